// y = bf16(x R) on the GPU is right to the rounding of bf16, and one y everywhere: the rows that
// RotateRows writes are those that QuantizePages quantizes.
#include <algorithm>
#include <cmath>
#include <cstring>
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

constexpr uint16_t kPoison = 0x7fc1;

struct Case {
  uint32_t layers = 2;
  uint32_t heads = 3;
  uint32_t dim = 128;
  uint32_t tokens = 70;
  uint32_t rotation_heads = 1;
};

// Rows [layers, tokens, heads, dim] and rotations [layers, rotation_heads, dim, dim] with entries
// of variance 1 / dim.
struct Data {
  Data(const Case& c, uint64_t seed) : shape(c) {
    Lcg lcg(seed);
    const size_t elements = size_t{c.layers} * c.tokens * c.heads * c.dim;
    const size_t rotation = size_t{c.layers} * c.rotation_heads * c.dim * c.dim;
    const float r_scale = 1.7f / std::sqrt(static_cast<float>(c.dim));
    k = RandomBf16(&lcg, elements, 2.0f);
    v = RandomBf16(&lcg, elements, 0.01f);
    r_k = RandomBf16(&lcg, rotation, r_scale);
    r_v = RandomBf16(&lcg, rotation, r_scale);
  }
  size_t RowAt(uint32_t layer, uint32_t token, uint32_t head) const {
    return ((size_t{layer} * shape.tokens + token) * shape.heads + head) * shape.dim;
  }
  const uint16_t* Rotation(uint32_t layer, uint32_t head, bool is_value) const {
    const uint32_t r = shape.rotation_heads == 1 ? 0 : head;
    return &(is_value ? r_v
                      : r_k)[(size_t{layer} * shape.rotation_heads + r) * shape.dim * shape.dim];
  }

  Case shape;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  std::vector<uint16_t> r_k;
  std::vector<uint16_t> r_v;
};

class RotateCudaTest : public CudaTest {
 protected:
  // All rows, in their places of arrays like the source's.
  void Rotate(const Data& data, bool to_model_basis, std::vector<uint16_t>* k,
              std::vector<uint16_t>* v) {
    const Case& c = data.shape;
    const OnDevice<uint16_t> k_in(data.k), v_in(data.v), r_k(data.r_k), r_v(data.r_v);
    const OnDevice<uint16_t> k_out(std::vector<uint16_t>(data.k.size(), kPoison));
    const OnDevice<uint16_t> v_out(std::vector<uint16_t>(data.v.size(), kPoison));
    const cuda::RotateRowsParams params = {
        .layers_count = c.layers,
        .kv_heads = c.heads,
        .head_dim = c.dim,
        .tokens_count = c.tokens,
        .tokens_count_device = nullptr,
        .k = PlainRows(AsBf16(k_in), c.tokens, c.heads, c.dim),
        .v = PlainRows(AsBf16(v_in), c.tokens, c.heads, c.dim),
        .tokens = {},
        .rotations = {.k = AsBf16(r_k), .v = AsBf16(r_v), .rotation_heads = c.rotation_heads},
        .to_model_basis = to_model_basis,
        .k_out = PlainRows(AsMutableBf16(k_out), c.tokens, c.heads, c.dim),
        .v_out = PlainRows(AsMutableBf16(v_out), c.tokens, c.heads, c.dim),
        .tokens_out = {}};
    ASSERT_CUDA_OK(cuda::RotateRows(params, stream_));
    Wait();
    *k = k_out.Read();
    *v = v_out.Read();
  }
};

// |y - exact| is at most half a unit of bf16 of the exact value and the error of fp32 sums.
void ExpectRowNear(const uint16_t* x, const uint16_t* r, bool transpose, const uint16_t* y,
                   uint32_t dim) {
  for (uint32_t n = 0; n < dim; ++n) {
    double exact = 0;
    double magnitude = 0;
    for (uint32_t c = 0; c < dim; ++c) {
      const double product =
          double{Bf16ToFloat(x[c])} * Bf16ToFloat(transpose ? r[n * dim + c] : r[c * dim + n]);
      exact += product;
      magnitude += std::fabs(product);
    }
    const double error = std::fabs(Bf16ToFloat(y[n]) - exact);
    ASSERT_TRUE(error <= 0x1p-8 * 0.502 * 2 * std::fabs(exact) + 1e-6 * magnitude)
        << "channel " << n << ": " << Bf16ToFloat(y[n]) << ", not " << exact;
  }
}

TEST_F(RotateCudaTest, IsRightToTheRoundingOfBf16) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const bool to_model_basis : {false, true}) {
      const Case c = {.dim = dim, .tokens = 70, .rotation_heads = to_model_basis ? 3u : 1u};
      const Data data(c, dim);
      std::vector<uint16_t> k, v;
      Rotate(data, to_model_basis, &k, &v);
      if (HasFatalFailure()) return;
      for (uint32_t l = 0; l < c.layers; ++l) {
        for (uint32_t t = 0; t < c.tokens; ++t) {
          for (uint32_t h = 0; h < c.heads; ++h) {
            SCOPED_TRACE(testing::Message() << "d " << dim << " layer " << l << " token " << t
                                            << " head " << h << " back " << to_model_basis);
            const size_t at = data.RowAt(l, t, h);
            ExpectRowNear(&data.k[at], data.Rotation(l, h, false), to_model_basis, &k[at], dim);
            ExpectRowNear(&data.v[at], data.Rotation(l, h, true), to_model_basis, &v[at], dim);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(RotateCudaTest, APermutationComesOutExactly) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 1, .heads = 1, .dim = dim, .tokens = 64, .rotation_heads = 1};
    Data data(c, dim + 1);
    std::fill(data.r_k.begin(), data.r_k.end(), 0);
    std::fill(data.r_v.begin(), data.r_v.end(), 0);
    const auto image = [dim](uint32_t channel) { return (channel * 37 + 11) % dim; };
    for (uint32_t i = 0; i < dim; ++i) data.r_k[i * dim + image(i)] = 0x3f80;
    for (uint32_t i = 0; i < dim; ++i) data.r_v[image(i) * dim + i] = 0x3f80;
    std::vector<uint16_t> k, v;
    Rotate(data, false, &k, &v);
    if (HasFatalFailure()) return;
    for (uint32_t t = 0; t < 64; ++t) {
      for (uint32_t i = 0; i < dim; ++i) {
        ASSERT_EQ(k[t * dim + image(i)], data.k[t * dim + i]) << dim << " " << t << " " << i;
        ASSERT_EQ(v[t * dim + i], data.v[t * dim + image(i)]) << dim << " " << t << " " << i;
      }
    }
  }
}

// What a launch reads before the kernel in front has ended.
enum class Early { kNothing, kRotations, kInputs };

TEST_F(RotateCudaTest, QuantizePagesQuantizesTheRowsThatRotateRowsWrites) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    // At d 128 more than a wave: a warp has several tiles. At d 64 the last block is alone in its
    // unit: two of the group's warps have no tile.
    const Case c = {.layers = 2,
                    .heads = 8,
                    .dim = dim,
                    .tokens = dim == 128   ? 4096u
                              : dim == 256 ? 512u
                                           : 448u,
                    .rotation_heads = dim == 64 ? 8u : 1u};
    const uint32_t blocks = c.tokens / 64;
    const Data data(c, dim + 2);
    std::vector<uint16_t> k, v;
    Rotate(data, false, &k, &v);
    if (HasFatalFailure()) return;
    const size_t run_bytes = OneRun(dim, dim).run_bytes(Codec::kInt2);
    const OnDevice<uint16_t> k_in(data.k), v_in(data.v), r_k(data.r_k), r_v(data.r_v);
    const OnDevice<uint32_t> ranks(std::vector<uint32_t>(c.layers * c.heads, dim - 6));
    const uint32_t runs_count = blocks * c.layers * c.heads;
    std::vector<uint8_t> wanted(runs_count * run_bytes);
    for (uint32_t i = 0; i < runs_count; ++i) {
      const size_t at =
          data.RowAt(i / c.heads % c.layers, i / (c.layers * c.heads) * 64, i % c.heads);
      BadRow bad;
      ASSERT_TRUE(reference::QuantizeRun({.k = &k[at],
                                          .v = &v[at],
                                          .row_stride = size_t{c.heads} * dim,
                                          .dim = dim,
                                          .group_size = dim,
                                          .clip_rank_k = dim - 6,
                                          .clip_rank_v = dim - 6},
                                         &wanted[i * run_bytes], &bad)
                      .ok());
    }
    const auto stride = [&](size_t runs) { return static_cast<int64_t>(runs * run_bytes); };
    for (const Early early : {Early::kNothing, Early::kRotations, Early::kInputs}) {
      SCOPED_TRACE(testing::Message() << "d " << dim << ", early " << static_cast<int>(early));
      const OnDevice<uint8_t> pages(std::vector<uint8_t>(wanted.size()));
      const OnDevice<uint64_t> bad_row({cuda::kNoBadRow});
      ASSERT_CUDA_OK(cuda::QuantizePages({.layers_count = c.layers,
                                          .kv_heads = c.heads,
                                          .head_dim = dim,
                                          .group_size = dim,
                                          .blocks_count = blocks,
                                          .tokens_count = nullptr,
                                          .k = PlainRows(AsBf16(k_in), c.tokens, c.heads, dim),
                                          .v = PlainRows(AsBf16(v_in), c.tokens, c.heads, dim),
                                          .tokens = {},
                                          .rotations = {.k = AsBf16(r_k),
                                                        .v = AsBf16(r_v),
                                                        .rotation_heads = c.rotation_heads,
                                                        .early = early == Early::kRotations},
                                          .clip_rank_k = ranks.get(),
                                          .clip_rank_v = ranks.get(),
                                          .pages = {.base = pages.get(),
                                                    .block_stride = stride(c.layers * c.heads),
                                                    .layer_stride = stride(c.heads),
                                                    .head_stride = stride(1),
                                                    .table = nullptr},
                                          .bad_row = bad_row.get(),
                                          .early_inputs = early == Early::kInputs},
                                         stream_));
      Wait();
      EXPECT_EQ(bad_row.Read()[0], cuda::kNoBadRow);
      EXPECT_EQ(pages.Read(), wanted);
    }
  }
}

// From a projection's output into the bf16 blocks of a pool: what a worker appends.
TEST_F(RotateCudaTest, WritesWindowsThroughSlots) {
  const Case c = {.layers = 2, .heads = 2, .dim = 128, .tokens = 45, .rotation_heads = 1};
  const Data data(c, 5);
  std::vector<uint16_t> k, v;
  Rotate(data, false, &k, &v);
  if (HasFatalFailure()) return;
  const size_t run = 128 * c.dim;
  const size_t block = run * c.heads * c.layers;
  std::vector<int32_t> slots;
  for (uint32_t t = 0; t < c.tokens; ++t) {
    slots.push_back(t % 7 == 3 ? -1 : static_cast<int32_t>((t * 11 + 5) % 192));
  }
  const OnDevice<int32_t> device_slots(slots);
  const OnDevice<int32_t> tokens_count({40});
  const OnDevice<uint16_t> k_in(data.k), v_in(data.v), r_k(data.r_k), r_v(data.r_v);
  const OnDevice<uint16_t> pool(std::vector<uint16_t>(3 * block, kPoison));
  const cuda::PagedRows keys = {.base = AsMutableBf16(pool),
                                .layer_stride = static_cast<int64_t>(run * c.heads),
                                .page_stride = static_cast<int64_t>(block),
                                .token_stride = c.dim,
                                .head_stride = static_cast<int64_t>(run),
                                .page_tokens = 64};
  cuda::PagedRows values = keys;
  values.base += 64 * c.dim;
  ASSERT_CUDA_OK(cuda::RotateRows(
      {.layers_count = c.layers,
       .kv_heads = c.heads,
       .head_dim = c.dim,
       .tokens_count = c.tokens,
       .tokens_count_device = tokens_count.get(),
       .k = PlainRows(AsBf16(k_in), c.tokens, c.heads, c.dim),
       .v = PlainRows(AsBf16(v_in), c.tokens, c.heads, c.dim),
       .tokens = {},
       .rotations = {.k = AsBf16(r_k), .v = AsBf16(r_v), .rotation_heads = 1, .early = true},
       .to_model_basis = false,
       .k_out = keys,
       .v_out = values,
       .tokens_out = {.slots = device_slots.get(), .pages = nullptr}},
      stream_));
  Wait();
  std::vector<uint16_t> wanted(3 * block, kPoison);
  for (uint32_t t = 0; t < 40; ++t) {
    if (slots[t] < 0) continue;
    for (uint32_t l = 0; l < c.layers; ++l) {
      for (uint32_t h = 0; h < c.heads; ++h) {
        uint16_t* const row =
            &wanted[slots[t] / 64 * block + (l * c.heads + h) * run + slots[t] % 64 * c.dim];
        std::copy_n(&k[data.RowAt(l, t, h)], c.dim, row);
        std::copy_n(&v[data.RowAt(l, t, h)], c.dim, row + 64 * c.dim);
      }
    }
  }
  EXPECT_TRUE(kernels_test::SameBits(pool.Read(), wanted));
}

// Out of an engine's cache: pages of 16 tokens, or a slot a token; some are left out.
TEST_F(RotateCudaTest, TakesTokensFromPagesAndSlotsAndLeavesOutTheRest) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const Case c = {.layers = 1, .heads = 2, .dim = dim, .tokens = 96, .rotation_heads = 1};
    const Data data(c, dim + 7);
    std::vector<uint16_t> k, v;
    Rotate(data, false, &k, &v);
    if (HasFatalFailure()) return;
    for (const uint32_t page_tokens : {16u, 1u}) {
      SCOPED_TRACE(testing::Message() << "d " << dim << ", pages of " << page_tokens);
      const std::vector<int32_t> pages = {4, 1, -1, 0, 5, 2};
      std::vector<int32_t> places;  // Of tokens, in both
      for (int32_t t = 0; t < 96; ++t) {
        const int32_t page = pages[static_cast<size_t>(t) / 16];
        const int32_t slot = t % 7 == 3 ? -1 : (t * 11 + 5) % 96;
        places.push_back(page_tokens == 1 ? slot : page < 0 ? -1 : page * 16 + t % 16);
      }
      const size_t row = size_t{c.heads} * dim;
      std::vector<uint16_t> cache_k(96 * row, kPoison), cache_v = cache_k;
      std::vector<uint16_t> wanted_k = cache_k, wanted_v = cache_k;
      for (size_t t = 0; t < 96; ++t) {
        if (places[t] < 0) continue;
        const size_t place = static_cast<size_t>(places[t]);
        std::copy_n(&data.k[t * row], row, &cache_k[place * row]);
        std::copy_n(&data.v[t * row], row, &cache_v[place * row]);
        std::copy_n(&k[t * row], row, &wanted_k[t * row]);
        std::copy_n(&v[t * row], row, &wanted_v[t * row]);
      }
      const OnDevice<uint16_t> k_in(cache_k), v_in(cache_v), r_k(data.r_k), r_v(data.r_v);
      const OnDevice<uint16_t> k_out(std::vector<uint16_t>(96 * row, kPoison));
      const OnDevice<uint16_t> v_out(std::vector<uint16_t>(96 * row, kPoison));
      const OnDevice<int32_t> map(page_tokens == 1 ? places : pages);
      cuda::ConstPagedRows from = PlainRows(AsBf16(k_in), 96, c.heads, dim);
      from.page_tokens = page_tokens;
      from.token_stride = from.page_stride;
      from.page_stride *= page_tokens;
      cuda::ConstPagedRows from_v = from;
      from_v.base = AsBf16(v_in);
      ASSERT_CUDA_OK(
          cuda::RotateRows({.layers_count = 1,
                            .kv_heads = c.heads,
                            .head_dim = dim,
                            .tokens_count = 96,
                            .tokens_count_device = nullptr,
                            .k = from,
                            .v = from_v,
                            .tokens = {.slots = page_tokens == 1 ? map.get() : nullptr,
                                       .pages = page_tokens == 1 ? nullptr : map.get()},
                            .rotations = {.k = AsBf16(r_k), .v = AsBf16(r_v), .rotation_heads = 1},
                            .to_model_basis = false,
                            .k_out = PlainRows(AsMutableBf16(k_out), 96, c.heads, dim),
                            .v_out = PlainRows(AsMutableBf16(v_out), 96, c.heads, dim),
                            .tokens_out = {}},
                           stream_));
      Wait();
      EXPECT_TRUE(kernels_test::SameBits(k_out.Read(), wanted_k));
      EXPECT_TRUE(kernels_test::SameBits(v_out.Read(), wanted_v));
    }
  }
}

TEST_F(RotateCudaTest, MayWriteOverTheRowsThatItReads) {
  const Case c = {.layers = 1, .heads = 2, .dim = 64, .tokens = 1000, .rotation_heads = 2};
  const Data data(c, 6);
  std::vector<uint16_t> k, v;
  Rotate(data, false, &k, &v);
  if (HasFatalFailure()) return;
  const OnDevice<uint16_t> rows_k(data.k), rows_v(data.v), r_k(data.r_k), r_v(data.r_v);
  ASSERT_CUDA_OK(
      cuda::RotateRows({.layers_count = 1,
                        .kv_heads = 2,
                        .head_dim = 64,
                        .tokens_count = c.tokens,
                        .tokens_count_device = nullptr,
                        .k = PlainRows(AsBf16(rows_k), c.tokens, 2, 64),
                        .v = PlainRows(AsBf16(rows_v), c.tokens, 2, 64),
                        .tokens = {},
                        .rotations = {.k = AsBf16(r_k), .v = AsBf16(r_v), .rotation_heads = 2},
                        .to_model_basis = false,
                        .k_out = PlainRows(AsMutableBf16(rows_k), c.tokens, 2, 64),
                        .v_out = PlainRows(AsMutableBf16(rows_v), c.tokens, 2, 64),
                        .tokens_out = {}},
                       stream_));
  Wait();
  EXPECT_TRUE(kernels_test::SameBits(rows_k.Read(), k));
  EXPECT_TRUE(kernels_test::SameBits(rows_v.Read(), v));
}

TEST_F(RotateCudaTest, WithoutARotationItIsRefused) {
  EXPECT_EQ(cuda::RotateRows({}, stream_), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace okv::cuda_test
