// Rows out of int2 pages have the bits of the scalar twin, in whichever cache layout they are asked
// for; in the model's basis they are what fp64 gives, to the rounding of bf16.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/dequantize.h"
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
  uint32_t group = 128;
  uint32_t blocks = 3;

  size_t run_bytes() const { return OneRun(dim, group).run_bytes(Codec::kInt2); }
  size_t page_bytes() const { return run_bytes() * heads; }
  size_t block_bytes() const { return page_bytes() * layers; }
  uint32_t tokens() const { return blocks * 64; }
};

// Pages of random rows, [blocks][layers][heads] runs, and the rows that the twin reads in them.
struct Data {
  Data(const Case& c, uint64_t seed) : shape(c), pages(c.block_bytes() * c.blocks) {
    Lcg lcg(seed);
    for (size_t i = 0; i < pages.size() / c.run_bytes(); ++i) {
      const std::vector<uint16_t> y =
          RandomBf16(&lcg, 128 * c.dim, std::ldexp(1.0f, static_cast<int>(i % 9) * 20 - 80));
      BadRow bad;
      EXPECT_TRUE(reference::QuantizeRun({.k = y.data(),
                                          .v = y.data() + 64 * c.dim,
                                          .row_stride = c.dim,
                                          .dim = c.dim,
                                          .group_size = c.group,
                                          .clip_rank_k = c.dim - 3,
                                          .clip_rank_v = i % 2 == 0 ? 0 : c.dim / 2},
                                         &pages[i * c.run_bytes()], &bad)
                      .ok());
    }
  }
  // [64][dim] of a run.
  void Rows(uint32_t block, uint32_t layer, uint32_t head, std::vector<uint16_t>* k,
            std::vector<uint16_t>* v) const {
    k->resize(64 * shape.dim);
    v->resize(64 * shape.dim);
    const size_t at =
        block * shape.block_bytes() + layer * shape.page_bytes() + head * shape.run_bytes();
    reference::DequantizeRun({.run = &pages[at], .dim = shape.dim, .group_size = shape.group},
                             k->data(), v->data());
  }

  Case shape;
  std::vector<uint8_t> pages;
};

cuda::ConstPages PagesOf(const Case& c, const OnDevice<uint8_t>& pages, const int32_t* table) {
  return {.base = pages.get(),
          .block_stride = static_cast<int64_t>(c.block_bytes()),
          .layer_stride = static_cast<int64_t>(c.page_bytes()),
          .head_stride = static_cast<int64_t>(c.run_bytes()),
          .table = table};
}

class DequantizeCudaTest : public CudaTest {
 protected:
  // Into [layers, tokens, heads, dim].
  void Dequantize(const Data& data, const cuda::Rotations& rotations, bool early_inputs,
                  std::vector<uint16_t>* k, std::vector<uint16_t>* v) {
    const Case& c = data.shape;
    const size_t elements = size_t{c.layers} * c.tokens() * c.heads * c.dim;
    const OnDevice<uint8_t> pages(data.pages);
    const OnDevice<uint16_t> k_out(std::vector<uint16_t>(elements, kPoison));
    const OnDevice<uint16_t> v_out(std::vector<uint16_t>(elements, kPoison));
    ASSERT_CUDA_OK(
        cuda::DequantizePages({.layers_count = c.layers,
                               .kv_heads = c.heads,
                               .head_dim = c.dim,
                               .group_size = c.group,
                               .blocks_count = c.blocks,
                               .pages = PagesOf(c, pages, nullptr),
                               .rotations = rotations,
                               .k = PlainRows(AsMutableBf16(k_out), c.tokens(), c.heads, c.dim),
                               .v = PlainRows(AsMutableBf16(v_out), c.tokens(), c.heads, c.dim),
                               .tokens = {},
                               .early_inputs = early_inputs},
                              stream_));
    Wait();
    *k = k_out.Read();
    *v = v_out.Read();
  }
};

TEST_F(DequantizeCudaTest, HasTheBitsOfTheScalarTwin) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      const Case c = {.heads = group == 32 ? 4u : 3u, .dim = dim, .group = group};
      const Data data(c, dim + group);
      std::vector<uint16_t> k, v, run_k, run_v;
      Dequantize(data, {}, /*early_inputs=*/dim == group, &k, &v);
      if (HasFatalFailure()) return;
      for (uint32_t i = 0; i < c.blocks * c.layers * c.heads; ++i) {
        const uint32_t block = i / (c.layers * c.heads);
        const uint32_t layer = i / c.heads % c.layers;
        const uint32_t head = i % c.heads;
        data.Rows(block, layer, head, &run_k, &run_v);
        for (uint32_t t = 0; t < 64; ++t) {
          const size_t at = ((size_t{layer} * c.tokens() + block * 64 + t) * c.heads + head) * dim;
          ASSERT_TRUE(std::equal(&k[at], &k[at] + dim, &run_k[t * dim]))
              << "K, d " << dim << ", g " << group << ", run " << i << ", token " << t;
          ASSERT_TRUE(std::equal(&v[at], &v[at] + dim, &run_v[t * dim]))
              << "V, d " << dim << ", g " << group << ", run " << i << ", token " << t;
        }
      }
    }
  }
}

// An engine's cache layout: where row (page, token of the page, head) is, and how large a page is.
struct CacheLayout {
  std::string name;
  int64_t token_stride;
  int64_t head_stride;
  int64_t page_elements;  // K and V together when packed
  int64_t v_offset;       // 0: V is in a pool of its own
};

std::vector<CacheLayout> LayoutsOf(int64_t page_tokens, int64_t heads, int64_t dim) {
  const int64_t half = page_tokens * heads * dim;
  return {{"NHD", heads * dim, dim, half, 0},
          {"HND", dim, page_tokens * dim, half, 0},
          {"NHD packed", heads * dim, dim, 2 * half, half},
          {"HND packed", dim, page_tokens * dim, 2 * half, half}};
}

// Blocks in any order through a table (one is left out), out to pages of an engine in any order
// (one is left out).
class CacheLayoutCudaTest : public CudaTest, public testing::WithParamInterface<Case> {};

TEST_P(CacheLayoutCudaTest, HasTheRowsWhereTheEngineHasThem) {
  const Case& c = GetParam();
  const Data data(c, 3);
  const OnDevice<uint8_t> pages(data.pages);
  const std::vector<int32_t> blocks = {2, 0, -1, 3};
  const OnDevice<int32_t> block_table(blocks);
  for (const int64_t page_tokens : {16, 32, 64, 128}) {
    const int64_t used = 256 / page_tokens;
    const int64_t pages_count = used + 3;
    std::vector<int32_t> page_table;  // No page twice: none of the counts is a multiple of 3.
    for (int64_t i = 0; i < used; ++i) {
      page_table.push_back(static_cast<int32_t>((i * 3 + 2) % pages_count));
    }
    page_table[1] = -1;
    const OnDevice<int32_t> table(page_table);
    for (const CacheLayout& layout : LayoutsOf(page_tokens, c.heads, c.dim)) {
      SCOPED_TRACE(testing::Message() << layout.name << ", pages of " << page_tokens);
      const size_t elements = static_cast<size_t>(layout.page_elements * pages_count);
      const OnDevice<uint16_t> k_out(std::vector<uint16_t>(elements, kPoison));
      const OnDevice<uint16_t> v_out(std::vector<uint16_t>(elements, kPoison));
      const bool packed = layout.v_offset != 0;
      const cuda::PagedRows k = {.base = AsMutableBf16(k_out),
                                 .layer_stride = 0,
                                 .page_stride = layout.page_elements,
                                 .token_stride = layout.token_stride,
                                 .head_stride = layout.head_stride,
                                 .page_tokens = static_cast<uint32_t>(page_tokens)};
      cuda::PagedRows v = k;
      v.base = packed ? k.base + layout.v_offset : AsMutableBf16(v_out);
      ASSERT_CUDA_OK(cuda::DequantizePages({.layers_count = 1,
                                            .kv_heads = c.heads,
                                            .head_dim = c.dim,
                                            .group_size = c.group,
                                            .blocks_count = c.blocks,
                                            .pages = PagesOf(c, pages, block_table.get()),
                                            .rotations = {},
                                            .k = k,
                                            .v = v,
                                            .tokens = {.slots = nullptr, .pages = table.get()}},
                                           stream_));
      Wait();
      std::vector<uint16_t> wanted_k(elements, kPoison), wanted_v(elements, kPoison);
      std::vector<uint16_t>& v_pool = packed ? wanted_k : wanted_v;
      std::vector<uint16_t> run_k, run_v;
      for (uint32_t i = 0; i < c.tokens() * c.heads; ++i) {
        const uint32_t token = i / c.heads;
        const uint32_t head = i % c.heads;
        if (blocks[token / 64] < 0 || page_table[token / page_tokens] < 0) continue;
        data.Rows(blocks[token / 64], 0, head, &run_k, &run_v);
        const int64_t at = page_table[token / page_tokens] * layout.page_elements +
                           token % page_tokens * layout.token_stride + head * layout.head_stride;
        std::copy_n(&run_k[token % 64 * c.dim], c.dim, &wanted_k[at]);
        std::copy_n(&run_v[token % 64 * c.dim], c.dim, &v_pool[at + layout.v_offset]);
      }
      EXPECT_TRUE(kernels_test::SameBits(k_out.Read(), wanted_k));
      EXPECT_TRUE(kernels_test::SameBits(v_out.Read(), wanted_v));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, CacheLayoutCudaTest,
    testing::Values(Case{.layers = 1, .heads = 2, .dim = 128, .group = 64, .blocks = 4},
                    Case{.layers = 1, .heads = 3, .dim = 64, .group = 64, .blocks = 4},
                    Case{.layers = 1, .heads = 4, .dim = 64, .group = 32, .blocks = 4}),
    [](const auto& info) {
      return "Heads" + std::to_string(info.param.heads) + "Dim" + std::to_string(info.param.dim);
    });

TEST_F(DequantizeCudaTest, WritesTokensToTheirSlotsAndLeavesOutTheRest) {
  const Case c = {.layers = 1, .heads = 1, .dim = 64, .group = 64, .blocks = 2};
  const Data data(c, 4);
  const OnDevice<uint8_t> pages(data.pages);
  std::vector<int32_t> slots;
  for (int32_t t = 0; t < 128; ++t) slots.push_back(t % 5 == 2 ? -1 : (t * 77 + 13) % 160);
  const OnDevice<int32_t> device_slots(slots);
  const OnDevice<uint16_t> k_out(std::vector<uint16_t>(160 * 64, kPoison));
  const OnDevice<uint16_t> v_out(std::vector<uint16_t>(160 * 64, kPoison));
  ASSERT_CUDA_OK(cuda::DequantizePages({.layers_count = 1,
                                        .kv_heads = 1,
                                        .head_dim = 64,
                                        .group_size = 64,
                                        .blocks_count = 2,
                                        .pages = PagesOf(c, pages, nullptr),
                                        .rotations = {},
                                        .k = PlainRows(AsMutableBf16(k_out), 160, 1, 64),
                                        .v = PlainRows(AsMutableBf16(v_out), 160, 1, 64),
                                        .tokens = {.slots = device_slots.get(), .pages = nullptr}},
                                       stream_));
  Wait();
  std::vector<uint16_t> wanted_k(160 * 64, kPoison), wanted_v(160 * 64, kPoison);
  std::vector<uint16_t> run_k, run_v;
  for (int32_t t = 0; t < 128; ++t) {
    if (slots[t] < 0) continue;
    data.Rows(t / 64, 0, 0, &run_k, &run_v);
    std::copy_n(&run_k[t % 64 * 64], 64, &wanted_k[slots[t] * 64]);
    std::copy_n(&run_v[t % 64 * 64], 64, &wanted_v[slots[t] * 64]);
  }
  EXPECT_TRUE(kernels_test::SameBits(k_out.Read(), wanted_k));
  EXPECT_TRUE(kernels_test::SameBits(v_out.Read(), wanted_v));
}

// The twin's rows times R^T in fp64.
std::vector<double> ModelBasis(const std::vector<float>& rows, const uint16_t* r, uint32_t dim) {
  std::vector<double> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (uint32_t c = 0; c < dim; ++c) {
      out[i] += double{rows[i / dim * dim + c]} * Bf16ToFloat(r[i % dim * dim + c]);
    }
  }
  return out;
}

float ErrorOf(const std::vector<uint16_t>& rows, size_t first, size_t stride,
              const std::vector<double>& exact, uint32_t dim) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double value = Bf16ToFloat(rows[first + i / dim * stride + i % dim]);
    error += (value - exact[i]) * (value - exact[i]);
    norm += exact[i] * exact[i];
  }
  return RelativeError(error, norm);
}

TEST_F(DequantizeCudaTest, InTheModelsBasisItIsNearFloat64) {
  for (uint32_t i = 0; i < 9; ++i) {
    const uint32_t dim = 64 << i / 3;
    const bool early_rotations = i % 3 == 1;
    const bool early_inputs = i % 3 == 2;
    SCOPED_TRACE(testing::Message() << "d " << dim << ", early rotations " << early_rotations
                                    << ", early inputs " << early_inputs);
    const Case c = {.layers = 2, .heads = 2, .dim = dim, .group = dim, .blocks = 2};
    const Data data(c, 5 + dim);
    const uint32_t rotation_heads = dim == 128 ? 1 : 2;
    Lcg lcg(dim);
    const float scale = 1.7f / std::sqrt(static_cast<float>(dim));
    const std::vector<uint16_t> r_k =
        RandomBf16(&lcg, size_t{2} * rotation_heads * dim * dim, scale);
    const std::vector<uint16_t> r_v =
        RandomBf16(&lcg, size_t{2} * rotation_heads * dim * dim, scale);
    const OnDevice<uint16_t> device_r_k(r_k), device_r_v(r_v);
    std::vector<uint16_t> k, v;
    Dequantize(data,
               {.k = AsBf16(device_r_k),
                .v = AsBf16(device_r_v),
                .rotation_heads = rotation_heads,
                .early = early_rotations},
               early_inputs, &k, &v);
    if (HasFatalFailure()) return;
    for (uint32_t one = 0; one < 8; ++one) {
      const uint32_t block = one / 4;
      const uint32_t layer = one / 2 % 2;
      const uint32_t head = one % 2;
      std::vector<float> run_k(64 * dim), run_v(64 * dim);
      reference::DequantizeRunF32(
          {.run = &data.pages[one * c.run_bytes()], .dim = dim, .group_size = dim}, run_k.data(),
          run_v.data());
      const size_t r =
          size_t{layer * rotation_heads + (rotation_heads == 1 ? 0 : head)} * dim * dim;
      const size_t at = ((size_t{layer} * 128 + block * 64) * 2 + head) * dim;
      EXPECT_LT(ErrorOf(k, at, 2 * dim, ModelBasis(run_k, &r_k[r], dim), dim), 4e-3f) << one;
      EXPECT_LT(ErrorOf(v, at, 2 * dim, ModelBasis(run_v, &r_v[r], dim), dim), 4e-3f) << one;
    }
  }
}

}  // namespace
}  // namespace okv::cuda_test
