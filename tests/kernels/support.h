#ifndef OKV_TESTS_KERNELS_SUPPORT_H_
#define OKV_TESTS_KERNELS_SUPPORT_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attend.h"
#include "kernels/quantize.h"
#include "kernels/simd.h"
#include "proto/bf16.h"
#include "proto/page_layout.h"

namespace okv::kernels_test {

// Numbers by integer arithmetic alone: the same on every machine and library.
class Lcg {
 public:
  explicit Lcg(uint64_t seed) : state_(seed * 2862933555777941757u + 3037000493u) {}
  uint32_t Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  // About normal (a sum of four uniforms), variance 1/3 * 4 / 4.
  float NextFloat() {
    int64_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int64_t>(Next() & 0xffff) - 0x8000;
    return static_cast<float>(sum) / 0x8000;
  }

 private:
  uint64_t state_;
};

inline std::vector<uint16_t> RandomBf16(Lcg* lcg, size_t count, float scale) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = FloatToBf16(lcg->NextFloat() * scale);
  return values;
}
inline std::vector<float> RandomF32(Lcg* lcg, size_t count, float scale) {
  std::vector<float> values(count);
  for (float& value : values) value = lcg->NextFloat() * scale;
  return values;
}

// Runs `check` once on each instruction set that this CPU has, the scalar one included.
template <typename Check>
void OnEveryTarget(const Check& check) {
  for (const int64_t target : SimdTargetsForTest()) {
    SetSimdTargetForTest(target);
    SCOPED_TRACE(std::string(SimdTargetName()));
    check();
  }
  SetSimdTargetForTest(0);
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline PageLayout OneRun(uint32_t dim, uint32_t group_size) {
  return {.layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = group_size};
}

// Fields of an int2 run, found by int2_layout.h.
inline uint32_t KeyCode(const uint8_t* run, uint32_t dim, uint32_t t, uint32_t c) {
  const int2::CodePosition at = int2::KeyCode(dim, t, c);
  return run[at.byte] >> at.shift & 3;
}
inline uint32_t ValueCode(const uint8_t* run, uint32_t dim, uint32_t t, uint32_t c) {
  const int2::CodePosition at = int2::ValueCode(dim, t, c);
  return run[at.byte] >> at.shift & 3;
}
struct Word {
  uint16_t scale;
  uint16_t offset;
};
inline Word WordAt(const uint8_t* at) {
  return {.scale = static_cast<uint16_t>(at[0] | at[1] << 8),
          .offset = static_cast<uint16_t>(at[2] | at[3] << 8)};
}
inline Word KeyWord(const uint8_t* run, const PageLayout& layout, uint32_t t, uint32_t g) {
  return WordAt(run + int2::KeyParams(layout.head_dim, layout.groups(), t, g));
}
inline Word ValueWord(const uint8_t* run, const PageLayout& layout, uint32_t t, uint32_t g) {
  return WordAt(run + int2::ValueParams(layout.head_dim, layout.groups(), t, g));
}

struct LayerShape {
  uint32_t query_heads = 9;
  uint32_t kv_heads = 3;
  uint32_t head_dim = 64;
  uint32_t group_size = 64;
  uint32_t rotation_heads = 1;
};

// One layer's pages as a query at the end of `tokens_count` tokens sees them, and the queries of
// the last block. Thread-compatible.
class Layer {
 public:
  Layer(const LayerShape& shape, uint32_t tokens_count, uint64_t seed, float q_scale = 1.0f)
      : shape_(shape),
        layout_{.layers_count = 1,
                .kv_heads = shape.kv_heads,
                .head_dim = shape.head_dim,
                .group_size = shape.group_size} {
    Lcg lcg(seed);
    const size_t d = shape.head_dim;
    const uint32_t blocks_count = (tokens_count + 63) / 64;
    last_tokens_ = tokens_count - (blocks_count == 0 ? 0 : (blocks_count - 1) * 64);
    for (uint32_t b = 0; b < blocks_count; ++b) {
      const bool bf16 = b < 1 || b + 2 >= blocks_count;
      AddPage(bf16 ? Codec::kBf16 : Codec::kInt2, &lcg);
    }
    // About orthogonal is enough: entries of variance 1/d.
    const float r_scale = 1.7f / __builtin_sqrtf(static_cast<float>(d));
    r_k_ = RandomBf16(&lcg, shape.rotation_heads * d * d, r_scale);
    r_v_ = RandomBf16(&lcg, shape.rotation_heads * d * d, r_scale);
    q_ = RandomF32(&lcg, 64 * shape.query_heads * d, q_scale);
  }

  // Adds a page of random rows.
  void AddPage(Codec codec, Lcg* lcg) {
    const size_t d = shape_.head_dim;
    std::vector<uint8_t> page(layout_.page_bytes(codec));
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const std::vector<uint16_t> y = RandomBf16(lcg, 2 * 64 * d, 1.0f);
      uint8_t* const run = page.data() + layout_.run_offset(codec, 0, h);
      if (codec == Codec::kBf16) {
        std::memcpy(run, y.data(), y.size() * 2);
        continue;
      }
      BadRow bad;
      EXPECT_TRUE(reference::QuantizeRun({.k = y.data(),
                                          .v = y.data() + 64 * d,
                                          .row_stride = d,
                                          .dim = shape_.head_dim,
                                          .group_size = shape_.group_size,
                                          .clip_rank_k = shape_.head_dim - 3,
                                          .clip_rank_v = 0},
                                         run, &bad)
                      .ok());
    }
    codecs_.push_back(codec);
    pages_.push_back(std::move(page));
  }

  // Puts NaN into everything that tokens from `first_token` on of the last page hold. Codes have no
  // NaN; their words do.
  void PoisonLastPage(uint32_t first_token) {
    const size_t d = shape_.head_dim;
    for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
      uint8_t* const run = pages_.back().data() + layout_.run_offset(codecs_.back(), 0, h);
      for (uint32_t t = first_token; t < 64; ++t) {
        if (codecs_.back() == Codec::kBf16) {
          std::memset(run + t * d * 2, 0xff, d * 2);
          std::memset(run + layout_.bf16_v_offset() + t * d * 2, 0xff, d * 2);
          continue;
        }
        for (uint32_t g = 0; g < layout_.groups(); ++g) {
          std::memset(run + int2::KeyParams(layout_.head_dim, layout_.groups(), t, g), 0xff, 4);
          std::memset(run + int2::ValueParams(layout_.head_dim, layout_.groups(), t, g), 0xff, 4);
        }
      }
    }
  }

  // Queries [first, first + count) of the last block, `seen` the tokens of it that the first sees.
  // *storage must outlive the result.
  AttendParams Params(uint32_t first, uint32_t count, uint32_t seen,
                      std::vector<AttendBlock>* storage, float* out) const {
    storage->clear();
    for (size_t b = 0; b < pages_.size(); ++b) {
      storage->push_back({.codec = codecs_[b], .page = pages_[b].data()});
    }
    return {.query_heads = shape_.query_heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.head_dim,
            .group_size = shape_.group_size,
            .softmax_scale = 1.0f / __builtin_sqrtf(static_cast<float>(shape_.head_dim)),
            .q = q_.data() + size_t{first} * shape_.query_heads * shape_.head_dim,
            .r_k = r_k_.data(),
            .r_v = r_v_.data(),
            .rotation_heads = shape_.rotation_heads,
            .queries_count = count,
            .blocks = *storage,
            .last_block_tokens = seen,
            .out = out};
  }

  size_t out_floats(uint32_t queries) const {
    return size_t{queries} * shape_.query_heads * shape_.head_dim;
  }
  uint32_t last_tokens() const { return last_tokens_; }
  const LayerShape& shape() const { return shape_; }
  const PageLayout& layout() const { return layout_; }
  std::vector<uint8_t>* page(size_t b) { return &pages_[b]; }

 private:
  const LayerShape shape_;
  const PageLayout layout_;
  uint32_t last_tokens_ = 0;
  std::vector<Codec> codecs_;
  std::vector<std::vector<uint8_t>> pages_;
  std::vector<uint16_t> r_k_;
  std::vector<uint16_t> r_v_;
  std::vector<float> q_;
};

}  // namespace okv::kernels_test

#endif  // OKV_TESTS_KERNELS_SUPPORT_H_
