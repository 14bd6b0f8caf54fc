// The GPU's pages are, byte for byte, those of the scalar twin for the same rotated rows.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/rotate.h"
#include "kernels/quantize.h"
#include "tests/kernels/cuda/device.h"
#include "tests/kernels/support.h"

namespace okv::cuda_test {
namespace {

using kernels_test::Lcg;
using kernels_test::OneRun;
using kernels_test::RandomBf16;

constexpr uint8_t kPoison = 0xcd;

// Rows of many characters: every branch of the codec's rule, side by side in one warp.
std::vector<uint16_t> MixedRows(Lcg* lcg, size_t rows_count, uint32_t dim) {
  std::vector<uint16_t> rows = RandomBf16(lcg, rows_count * dim, 1.0f);
  for (size_t i = 0; i < rows_count; ++i) {
    uint16_t* const row = &rows[i * dim];
    const uint32_t kind = lcg->Next() % 14;
    for (uint32_t c = 0; c < dim; ++c) {
      const uint32_t bits = lcg->Next();
      const uint16_t sign = static_cast<uint16_t>(bits >> 15 & 0x8000);  // Of 31 bits
      if (kind == 0) row[c] = sign | (bits & 0x00ff);                 // About the smallest normal
      if (kind == 1) row[c] = FloatToBf16((bits % 7) * 0.5f - 1.5f);  // Ties
      if (kind == 2) row[c] = sign | (0x3f80 + 128 * (bits % 50));    // 50 binades
      if (kind == 3) row[c] = FloatToBf16(-7.25f);                    // Constant
      if (kind == 4) row[c] = bits % 3 == 0 ? 0x8000 : (bits % 3 == 1 ? 0x0000 : row[c]);
      if (kind == 5 && c % 41 == 7) row[c] = sign | 0x4500;      // Outliers
      if (kind == 6) row[c] = sign | (0x7d00 + bits % 0x100);    // About 2^123
      if (kind == 7) row[c] = bits % 32 == 0 ? row[c] : 0x8000;  // Mostly -0
      if (kind == 8) row[c] = sign | (bits % 0x7e00);            // Anything finite
      if (kind == 9) row[c] = sign | 0x3f80;                     // Only +-1
      if (kind == 10) row[c] = 0x7e00 + bits % 0x180;            // A scale above 2^126
      // No offset, and what must not pass for less than that
      if (kind == 11) row[c] = bits % 3 == 0 ? 0x8000 + bits % 0x80 : row[c] & 0x7fff;
    }
  }
  return rows;
}

struct Case {
  uint32_t layers = 1;
  uint32_t heads = 1;
  uint32_t dim = 64;
  uint32_t group = 64;
  uint32_t blocks = 1;

  size_t run_bytes() const { return OneRun(dim, group).run_bytes(Codec::kInt2); }
  size_t page_bytes() const { return run_bytes() * heads; }
  size_t block_bytes() const { return page_bytes() * layers; }
  size_t elements() const { return size_t{layers} * blocks * 64 * heads * dim; }
};

// Rows [layers, tokens, heads, dim], clip ranks [layers, heads], and what the twin makes of them.
struct Data {
  Data(const Case& c, uint64_t seed) : shape(c) {
    Lcg lcg(seed);
    k = MixedRows(&lcg, c.elements() / c.dim, c.dim);
    v = MixedRows(&lcg, c.elements() / c.dim, c.dim);
    for (uint32_t i = 0; i < c.layers * c.heads; ++i) {
      const uint32_t choices[] = {0, 1, c.dim / 2, c.dim - 6, c.dim - 1, c.dim - 11};
      rank_k.push_back(choices[lcg.Next() % 6]);
      rank_v.push_back(choices[lcg.Next() % 6]);
    }
  }

  // The blocks, [blocks][layers][heads] runs. Rows that have no int2 form are replaced first.
  std::vector<uint8_t> Expected() {
    std::vector<uint8_t> pages(shape.block_bytes() * shape.blocks);
    for (uint32_t b = 0; b < shape.blocks; ++b) {
      for (uint32_t l = 0; l < shape.layers; ++l) {
        for (uint32_t h = 0; h < shape.heads; ++h) {
          QuantizeOne(
              b, l, h,
              &pages[b * shape.block_bytes() + l * shape.page_bytes() + h * shape.run_bytes()]);
        }
      }
    }
    return pages;
  }

  size_t RowAt(uint32_t layer, uint32_t token, uint32_t head) const {
    return ((size_t{layer} * shape.blocks * 64 + token) * shape.heads + head) * shape.dim;
  }

  Case shape;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  std::vector<uint32_t> rank_k;
  std::vector<uint32_t> rank_v;

 private:
  void QuantizeOne(uint32_t b, uint32_t l, uint32_t h, uint8_t* run) {
    for (;;) {
      BadRow bad;
      const absl::Status status =
          reference::QuantizeRun({.k = &k[RowAt(l, b * 64, h)],
                                  .v = &v[RowAt(l, b * 64, h)],
                                  .row_stride = size_t{shape.heads} * shape.dim,
                                  .dim = shape.dim,
                                  .group_size = shape.group,
                                  .clip_rank_k = rank_k[l * shape.heads + h],
                                  .clip_rank_v = rank_v[l * shape.heads + h]},
                                 run, &bad);
      if (status.ok()) return;
      std::vector<uint16_t>& rows = bad.is_value ? v : k;
      std::fill_n(&rows[RowAt(l, b * 64 + bad.token, h)], shape.dim, uint16_t{0x3f80});
    }
  }
};

// What a launch needs on the device; `params` refers to it.
class Launch {
 public:
  explicit Launch(const Data& data)
      : k_(data.k),
        v_(data.v),
        rank_k_(data.rank_k),
        rank_v_(data.rank_v),
        pages_(std::vector<uint8_t>(data.shape.block_bytes() * data.shape.blocks, kPoison)),
        bad_row_({cuda::kNoBadRow}) {
    const Case& c = data.shape;
    params = {.layers_count = c.layers,
              .kv_heads = c.heads,
              .head_dim = c.dim,
              .group_size = c.group,
              .blocks_count = c.blocks,
              .tokens_count = nullptr,
              .k = PlainRows(AsBf16(k_), c.blocks * 64, c.heads, c.dim),
              .v = PlainRows(AsBf16(v_), c.blocks * 64, c.heads, c.dim),
              .tokens = {},
              .rotations = {},
              .clip_rank_k = rank_k_.get(),
              .clip_rank_v = rank_v_.get(),
              .pages = {.base = pages_.get(),
                        .block_stride = static_cast<int64_t>(c.block_bytes()),
                        .layer_stride = static_cast<int64_t>(c.page_bytes()),
                        .head_stride = static_cast<int64_t>(c.run_bytes()),
                        .table = nullptr},
              .bad_row = bad_row_.get()};
  }
  std::vector<uint8_t> Pages() const { return pages_.Read(); }
  uint64_t BadRowWord() const { return bad_row_.Read()[0]; }

  cuda::QuantizePagesParams params;

 private:
  OnDevice<uint16_t> k_;
  OnDevice<uint16_t> v_;
  OnDevice<uint32_t> rank_k_;
  OnDevice<uint32_t> rank_v_;
  OnDevice<uint8_t> pages_;
  OnDevice<uint64_t> bad_row_;
};

void ExpectSamePages(const std::vector<uint8_t>& pages, const std::vector<uint8_t>& expected,
                     const Case& c) {
  ASSERT_EQ(pages.size(), expected.size());
  const auto [a, b] = std::mismatch(pages.begin(), pages.end(), expected.begin());
  if (a == pages.end()) return;
  const size_t at = static_cast<size_t>(a - pages.begin());
  ADD_FAILURE() << "d " << c.dim << ", g " << c.group << ": block " << at / c.block_bytes()
                << ", layer " << at % c.block_bytes() / c.page_bytes() << ", head "
                << at % c.page_bytes() / c.run_bytes() << ", byte " << at % c.run_bytes() << " is "
                << int{*a} << ", not " << int{*b};
}

class QuantizeCudaTest : public CudaTest {};

TEST_F(QuantizeCudaTest, HasTheBytesOfTheScalarTwin) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      const Case c = {.layers = 2, .heads = 3, .dim = dim, .group = group, .blocks = 3};
      for (uint64_t seed = 1; seed <= 3; ++seed) {
        SCOPED_TRACE(seed);
        Data data(c, 100 * dim + group + seed);
        const std::vector<uint8_t> expected = data.Expected();
        Launch launch(data);
        launch.params.early_inputs = seed == 3;
        ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
        Wait();
        ExpectSamePages(launch.Pages(), expected, c);
        EXPECT_EQ(launch.BadRowWord(), cuda::kNoBadRow);
      }
    }
  }
}

TEST_F(QuantizeCudaTest, EveryClipRankIsExact) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 1, .heads = dim / 2, .dim = dim, .group = dim, .blocks = 1};
    Data data(c, dim);
    for (uint32_t h = 0; h < c.heads; ++h) {
      data.rank_k[h] = 2 * h;
      data.rank_v[h] = 2 * h + 1;
    }
    const std::vector<uint8_t> expected = data.Expected();
    const Launch launch(data);
    ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
    Wait();
    ExpectSamePages(launch.Pages(), expected, c);
  }
}

// Rows whose magnitudes lie within so many steps of bf16 below the largest: what the search for the
// threshold takes its short way on, up to 255. A few rows with a wider range send it the long way.
TEST_F(QuantizeCudaTest, EveryClipRankIsExactInRowsOfEverySpread) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t spread : {1u, 2u, 30u, 127u, 128u, 254u, 255u, 256u, 257u, 600u}) {
      const Case c = {.layers = 1, .heads = dim / 2, .dim = dim, .group = dim, .blocks = 1};
      Data data(c, dim + spread);
      Lcg lcg(spread * 7 + dim);
      for (std::vector<uint16_t>* rows : {&data.k, &data.v}) {
        for (size_t at = 0; at < rows->size(); at += dim) {
          const uint32_t largest = 0x0400 + spread + lcg.Next() % 0x7000;
          for (uint32_t ch = 0; ch < dim; ++ch) {
            const uint32_t bits = lcg.Next();
            (*rows)[at + ch] =
                static_cast<uint16_t>((bits >> 15 & 0x8000) | (largest - bits % (spread + 1)));
          }
          (*rows)[at + lcg.Next() % dim] = static_cast<uint16_t>(largest);
          (*rows)[at + lcg.Next() % dim] = static_cast<uint16_t>(0x8000 | (largest - spread));
        }
      }
      for (uint32_t h = 0; h < c.heads; ++h) {
        data.rank_k[h] = 2 * h;
        data.rank_v[h] = 2 * h + 1;
      }
      SCOPED_TRACE(testing::Message() << "d " << dim << ", spread " << spread);
      const std::vector<uint8_t> expected = data.Expected();
      const Launch launch(data);
      ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
      Wait();
      ExpectSamePages(launch.Pages(), expected, c);
    }
  }
}

// What a model's rows look like: normal, with outliers, a scale of its own each; usual ranks.
TEST_F(QuantizeCudaTest, NormalRowsOfManyScalesHaveTheBytesOfTheScalarTwin) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 1, .heads = 8, .dim = dim, .group = dim, .blocks = 16};
    Data data(c, dim + 99);
    Lcg lcg(dim);
    for (std::vector<uint16_t>* rows : {&data.k, &data.v}) {
      *rows = RandomBf16(&lcg, rows->size(), 1.0f);
      for (size_t at = 0; at < rows->size(); at += dim) {
        const float scale = std::ldexp(1.0f, static_cast<int>(lcg.Next() % 200) - 100);
        for (uint32_t ch = 0; ch < dim; ++ch) {
          (*rows)[at + ch] = FloatToBf16(Bf16ToFloat((*rows)[at + ch]) * scale);
        }
        if (lcg.Next() % 64 == 0) (*rows)[at + 5] = FloatToBf16(17.0f * scale);
      }
    }
    for (uint32_t h = 0; h < c.heads; ++h) {
      data.rank_k[h] = dim - 1 - h;
      data.rank_v[h] = dim - 1 - 2 * h;
    }
    SCOPED_TRACE(dim);
    const std::vector<uint8_t> expected = data.Expected();
    const Launch launch(data);
    ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
    Wait();
    ExpectSamePages(launch.Pages(), expected, c);
  }
}

// A row for each scale there is, subnormal ones too, of -1 to 2 times it in halves: levels of
// 0.5, 1.5 and 2.5 are ties, the last where bf16 has it, so that their codes say how the reciprocal
// and the product were rounded.
TEST_F(QuantizeCudaTest, TiesOfEveryScaleHaveTheBytesOfTheScalarTwin) {
  constexpr uint32_t kScales = 0x7eab;  // Three times a scale is finite below
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {
        .layers = 1, .heads = 1, .dim = dim, .group = dim, .blocks = (kScales + 63) / 64};
    Data data(c, dim);
    for (uint32_t bits = 0; bits < c.blocks * 64; ++bits) {
      const float scale = Bf16ToFloat(static_cast<uint16_t>(bits % kScales));
      for (uint32_t ch = 0; ch < dim; ++ch) {
        const uint16_t element = FloatToBf16(scale * (0.5f * static_cast<float>(ch % 7) - 1.0f));
        data.k[data.RowAt(0, bits, 0) + ch] = element;
        data.v[data.RowAt(0, bits, 0) + ch] = element ^ 0x8000;
      }
    }
    std::fill(data.rank_k.begin(), data.rank_k.end(), 0);
    std::fill(data.rank_v.begin(), data.rank_v.end(), dim - 1);
    SCOPED_TRACE(dim);
    const std::vector<uint16_t> k = data.k;
    const std::vector<uint8_t> expected = data.Expected();
    ASSERT_EQ(data.k, k) << "a row without an int2 form was replaced";
    const Launch launch(data);
    ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
    Wait();
    ExpectSamePages(launch.Pages(), expected, c);
    EXPECT_EQ(launch.BadRowWord(), cuda::kNoBadRow);
  }
}

TEST_F(QuantizeCudaTest, WithoutClipRanksNothingIsClipped) {
  const Case c = {.layers = 1, .heads = 2, .dim = 128, .group = 128, .blocks = 2};
  Data data(c, 11);
  std::fill(data.rank_k.begin(), data.rank_k.end(), 0);
  std::fill(data.rank_v.begin(), data.rank_v.end(), 0);
  const std::vector<uint8_t> expected = data.Expected();
  Launch launch(data);
  launch.params.clip_rank_k = nullptr;
  launch.params.clip_rank_v = nullptr;
  ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
  Wait();
  ExpectSamePages(launch.Pages(), expected, c);
}

// More blocks than one wave of thread blocks takes at a time: a warp has several tiles.
TEST_F(QuantizeCudaTest, ALongChunkHasTheBytesOfTheScalarTwin) {
  const Case c = {.layers = 2, .heads = 8, .dim = 128, .group = 128, .blocks = 96};
  Data data(c, 12);
  const std::vector<uint8_t> expected = data.Expected();
  const Launch launch(data);
  ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
  Wait();
  ExpectSamePages(launch.Pages(), expected, c);
}

TEST_F(QuantizeCudaTest, OnlyFullBlocksOfTheTokensOnTheDeviceAreSealed) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 1, .heads = 2, .dim = dim, .group = 64, .blocks = 4};
    Data data(c, 13);
    const std::vector<uint8_t> expected = data.Expected();
    for (const int32_t tokens : {-3, 0, 63, 64, 191, 192, 256, 1000}) {
      SCOPED_TRACE(testing::Message() << tokens << " tokens");
      Launch launch(data);
      const OnDevice<int32_t> count({tokens});
      launch.params.tokens_count = count.get();
      ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
      Wait();
      std::vector<uint8_t> sealed(expected.size(), kPoison);
      const size_t blocks = std::min<size_t>(4, std::max(tokens, 0) / 64);
      std::copy_n(expected.begin(), blocks * c.block_bytes(), sealed.begin());
      ExpectSamePages(launch.Pages(), sealed, c);
    }
  }
}

// One block a request out of a pool of bf16 blocks into a pool of int2 blocks, both in any order;
// two requests have nothing to demote.
TEST_F(QuantizeCudaTest, DemotesBlocksOfBf16PoolsThroughTables) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 3, .heads = 2, .dim = dim, .group = dim / 2, .blocks = 6};
    Data data(c, 14 + dim);
    const std::vector<uint8_t> expected = data.Expected();
    const std::vector<int32_t> source_table = {4, 7, 0, -1, 2, 5};
    const std::vector<int32_t> target_table = {3, 0, -1, 6, 1, 7};
    const size_t run_elements = 128 * dim;
    const size_t block_elements = run_elements * c.heads * c.layers;
    std::vector<uint16_t> pool(8 * block_elements, 0x7fc0);
    for (uint32_t b = 0; b < c.blocks; ++b) {
      if (source_table[b] < 0) continue;
      for (uint32_t l = 0; l < c.layers; ++l) {
        for (uint32_t h = 0; h < c.heads; ++h) {
          uint16_t* const run =
              &pool[source_table[b] * block_elements + (l * c.heads + h) * run_elements];
          for (uint32_t t = 0; t < 64; ++t) {
            std::copy_n(&data.k[data.RowAt(l, b * 64 + t, h)], dim, run + t * dim);
            std::copy_n(&data.v[data.RowAt(l, b * 64 + t, h)], dim, run + (64 + t) * dim);
          }
        }
      }
    }
    const OnDevice<uint16_t> device_pool(pool);
    const OnDevice<int32_t> source(source_table);
    const OnDevice<int32_t> target(target_table);
    const OnDevice<uint8_t> pages(std::vector<uint8_t>(8 * c.block_bytes(), kPoison));
    Launch launch(data);
    launch.params.k = {.base = AsBf16(device_pool),
                       .layer_stride = static_cast<int64_t>(run_elements * c.heads),
                       .page_stride = static_cast<int64_t>(block_elements),
                       .token_stride = dim,
                       .head_stride = static_cast<int64_t>(run_elements),
                       .page_tokens = 64};
    launch.params.v = launch.params.k;
    launch.params.v.base += 64 * dim;
    launch.params.tokens = {.slots = nullptr, .pages = source.get()};
    launch.params.pages.base = pages.get();
    launch.params.pages.table = target.get();
    ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
    Wait();
    std::vector<uint8_t> wanted(8 * c.block_bytes(), kPoison);
    for (uint32_t b = 0; b < c.blocks; ++b) {
      if (source_table[b] < 0 || target_table[b] < 0) continue;
      std::copy_n(expected.begin() + b * c.block_bytes(), c.block_bytes(),
                  wanted.begin() + target_table[b] * c.block_bytes());
    }
    ExpectSamePages(pages.Read(), wanted, c);
    EXPECT_EQ(launch.BadRowWord(), cuda::kNoBadRow);
  }
}

// Blocks that begin anywhere in a batch of prompts: a slot a token.
TEST_F(QuantizeCudaTest, TakesTokensFromSlots) {
  const Case c = {.layers = 1, .heads = 2, .dim = 64, .group = 32, .blocks = 5};
  Data data(c, 15);
  const std::vector<uint8_t> all = data.Expected();
  const std::vector<int32_t> blocks = {4, -1, 1};
  std::vector<int32_t> slots;
  for (const int32_t block : blocks) {
    for (int32_t t = 0; t < 64; ++t) slots.push_back(block < 0 ? -1 : block * 64 + t);
  }
  const OnDevice<int32_t> device_slots(slots);
  Launch launch(data);
  launch.params.blocks_count = 3;
  launch.params.tokens = {.slots = device_slots.get(), .pages = nullptr};
  ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
  Wait();
  std::vector<uint8_t> wanted(all.size(), kPoison);
  std::copy_n(all.begin() + 4 * c.block_bytes(), c.block_bytes(), wanted.begin());
  std::copy_n(all.begin() + 1 * c.block_bytes(), c.block_bytes(),
              wanted.begin() + 2 * c.block_bytes());
  ExpectSamePages(launch.Pages(), wanted, c);
}

struct Poison {
  uint32_t layer;
  uint32_t token;
  uint32_t head;
  bool is_value;
};

TEST_F(QuantizeCudaTest, TheFirstBadRowIsReported) {
  const Case c = {.layers = 2, .heads = 3, .dim = 128, .group = 64, .blocks = 2};
  const Poison poisons[] = {{1, 5, 0, false},  {0, 100, 2, true}, {0, 100, 2, false},
                            {0, 100, 1, true}, {0, 99, 2, true},  {0, 0, 0, true},
                            {0, 0, 0, false}};
  Data data(c, 16);
  data.Expected();
  uint32_t count = 0;
  for (const Poison& p : poisons) {
    uint16_t* const row = &(p.is_value ? data.v : data.k)[data.RowAt(p.layer, p.token, p.head)];
    switch (count++ % 4) {
      case 0:
        row[37] = 0xffc1;
        break;
      case 1:
        row[127] = 0x7f80;
        break;
      case 2:
        row[0] = 0xff80;
        break;
      default:  // Finite, but not the range of one group. Not clipped away either.
        std::fill_n(row, c.dim, uint16_t{0x7f7f});
        row[64] = 0xff7f;
    }
    const Launch launch(data);
    ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
    Wait();
    ASSERT_NE(launch.BadRowWord(), cuda::kNoBadRow) << count;
    const cuda::BadRow bad = cuda::DecodeBadRow(launch.BadRowWord());
    EXPECT_EQ(bad.layer, p.layer) << count;
    EXPECT_EQ(bad.token, p.token) << count;
    EXPECT_EQ(bad.head, p.head) << count;
    EXPECT_EQ(bad.is_value, p.is_value) << count;
  }
}

TEST_F(QuantizeCudaTest, ABadRowDoesNotDisturbItsNeighbors) {
  const Case c = {.layers = 1, .heads = 1, .dim = 128, .group = 128, .blocks = 1};
  Data data(c, 17);
  data.rank_k[0] = 122;
  const std::vector<uint8_t> expected = data.Expected();
  std::fill_n(&data.k[data.RowAt(0, 20, 0)], c.dim, uint16_t{0x7fff});
  const Launch launch(data);
  ASSERT_CUDA_OK(cuda::QuantizePages(launch.params, stream_));
  Wait();
  const std::vector<uint8_t> pages = launch.Pages();
  for (uint32_t t = 0; t < 64; ++t) {
    if (t == 20) continue;
    const uint32_t at = int2::KeyParams(128, 1, t, 0);
    EXPECT_TRUE(std::equal(&pages[at], &pages[at] + 4, &expected[at])) << t;
    for (uint32_t ch = 0; ch < 128; ++ch) {
      const int2::CodePosition code = int2::KeyCode(128, t, ch);
      ASSERT_EQ(pages[code.byte] >> code.shift & 3, expected[code.byte] >> code.shift & 3) << t;
    }
  }
}

TEST_F(QuantizeCudaTest, WhatIsNotSupportedIsRefused) {
  const Case c = {.layers = 1, .heads = 1, .dim = 64, .group = 64, .blocks = 1};
  const Data data(c, 18);
  const Launch good(data);
  const auto refused = [&](auto change) {
    cuda::QuantizePagesParams params = good.params;
    change(&params);
    return cuda::QuantizePages(params, stream_) == cudaErrorInvalidValue;
  };
  EXPECT_FALSE(refused([](cuda::QuantizePagesParams*) {}));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->head_dim = 96; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->group_size = 128; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->group_size = 48; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->kv_heads = 257; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->layers_count = 0; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->k.token_stride = 4; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->v.base += 1; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->v.page_tokens = 24; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->pages.head_stride = 8; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->pages.base += 8; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->bad_row = nullptr; }));
  EXPECT_TRUE(refused([](cuda::QuantizePagesParams* p) { p->rotations.k = p->k.base; }));
}

}  // namespace
}  // namespace okv::cuda_test
