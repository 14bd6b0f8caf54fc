// What attention over int2 blocks does at the edges of its 16-bit numbers.
#include <cmath>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/attend_f64.h"
#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

// Rows of one int2 page, by (is_value, token, channel).
using RowFunction = std::function<float(bool, uint32_t, uint32_t)>;

// Fills a page's runs with what quantizing those rows gives, the same for every KV head.
void FillPage(Layer* layer, size_t block, const RowFunction& element) {
  const LayerShape& shape = layer->shape();
  const uint32_t d = shape.head_dim;
  std::vector<uint16_t> rows(2 * 64 * d);
  for (uint32_t i = 0; i < rows.size(); ++i) {
    rows[i] = FloatToBf16(element(i >= 64 * d, i / d % 64, i % d));
  }
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    BadRow bad;
    ASSERT_TRUE(
        QuantizeRun({.k = rows.data(),
                     .v = rows.data() + 64 * d,
                     .row_stride = d,
                     .dim = d,
                     .group_size = shape.group_size,
                     .clip_rank_k = 0,
                     .clip_rank_v = 0},
                    layer->page(block)->data() + layer->layout().run_offset(Codec::kInt2, 0, h),
                    &bad)
            .ok());
  }
}

// A layer of int2 blocks only, filled with ordinary rows.
Layer Int2Layer(const LayerShape& shape, size_t blocks_count, uint64_t seed, float q_scale = 1.0f) {
  Layer layer(shape, 0, seed, q_scale);
  Lcg lcg(seed + 1);
  for (size_t b = 0; b < blocks_count; ++b) layer.AddPage(Codec::kInt2, &lcg);
  return layer;
}

// All targets have the scalar twin's bits, and they are near float64.
void ExpectRight(const Layer& layer, uint32_t queries, uint32_t seen, double error) {
  const std::vector<float> expected = RunReference(layer, 0, queries, seen);
  OnEveryTarget([&] { EXPECT_TRUE(SameBits(RunAttend(layer, 0, queries, seen), expected)); });
  EXPECT_LT(WorstError(layer, queries, seen), error);
}

TEST(AttendInt2Test, EveryGroupSizeIsNearFloat64) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      SCOPED_TRACE(group);
      ExpectRight(Int2Layer({.query_heads = 4, .kv_heads = 1, .head_dim = dim, .group_size = group},
                            9, dim + group),
                  2, 40, kInt2Error);
    }
  }
}

TEST(AttendInt2Test, EveryNumberOfRowsHasTheScalarTwinsBits) {
  for (const uint32_t gqa : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 11u, 13u, 16u}) {
    const Layer layer =
        Int2Layer({.query_heads = gqa, .kv_heads = 1, .head_dim = 128, .group_size = 64}, 3, gqa);
    const std::vector<float> expected = RunReference(layer, 0, 1, 50);
    OnEveryTarget([&] { EXPECT_TRUE(SameBits(RunAttend(layer, 0, 1, 50), expected)) << gqa; });
  }
}

// Token 70's key is 40 times the others' along the query, so it takes nearly all of the softmax.
TEST(AttendInt2Test, OneTokenMayDominate) {
  const LayerShape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 128, .group_size = 128};
  Layer layer = Int2Layer(shape, 4, 3);
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(1));
  AttendParams params = layer.Params(0, 1, 64, &blocks, out.data());
  const std::vector<double> q =
      RotateF64(std::vector<double>(params.q, params.q + 128), params.r_k, false);
  Lcg lcg(9);
  FillPage(&layer, 1, [&](bool is_value, uint32_t t, uint32_t c) {
    const float noise = lcg.NextFloat();
    return is_value || t != 6 ? noise : 40.0f * static_cast<float>(q[c]);
  });
  ExpectRight(layer, 1, 64, kInt2Error);
}

// A step of 0.001 beside offsets of 100: integers of one block carry next to nothing.
TEST(AttendInt2Test, SmallScalesBesideLargeOffsetsAreRight) {
  Layer layer = Int2Layer({.query_heads = 3, .kv_heads = 1}, 3, 5, 0.01f);
  Lcg lcg(6);
  FillPage(&layer, 1, [&](bool, uint32_t t, uint32_t) {
    return (t % 2 == 0 ? 100.0f : -50.0f) + (t % 3 == 0 ? lcg.NextFloat() : 0.0f);
  });
  ExpectRight(layer, 2, 64 - 1, kInt2Error);
}

TEST(AttendInt2Test, ScalesOfZeroAndTinyOnesAreRight) {
  for (const float size : {0.0f, 1e-38f, 1e-33f, 1e-25f, 1e-12f}) {
    SCOPED_TRACE(size);
    // Every third token has steps of this size, in K and V.
    Layer layer = Int2Layer({.query_heads = 3, .kv_heads = 1, .group_size = 32}, 3, 7);
    Lcg lcg(8);
    FillPage(&layer, 1, [&](bool, uint32_t t, uint32_t) {
      const float noise = lcg.NextFloat();
      return t % 3 == 0 ? size * noise : noise;
    });
    ExpectRight(layer, 2, 50, kInt2Error);
  }
}

TEST(AttendInt2Test, ValuesThatAreTinyThroughoutKeepTheirPrecision) {
  Layer layer = Int2Layer({.query_heads = 3, .kv_heads = 1}, 2, 7);
  Lcg lcg(8);
  for (const size_t block : {0u, 1u}) {
    FillPage(&layer, block, [&](bool is_value, uint32_t, uint32_t) {
      return lcg.NextFloat() * (is_value ? 1e-25f : 1.0f);
    });
  }
  ExpectRight(layer, 2, 50, kInt2Error);
}

// The second of three spans has scores far above the others', then far below.
TEST(AttendInt2Test, SpansFoldWhereverTheLargestScoresAre) {
  for (const float factor : {30.0f, 0.0f}) {
    Layer layer = Int2Layer({.query_heads = 2, .kv_heads = 1}, 40, 11, 2.0f);
    Lcg lcg(12);
    for (size_t block = 16; block < 32; ++block) {
      FillPage(&layer, block, [&](bool is_value, uint32_t, uint32_t) {
        return lcg.NextFloat() * (is_value ? 1.0f : factor);
      });
    }
    ExpectRight(layer, 1, 64, factor == 0.0f ? kInt2Error : 1e-3);
  }
}

TEST(AttendInt2Test, AQueryOfZerosAveragesTheValues) {
  const Layer layer = Int2Layer({.query_heads = 2, .kv_heads = 1}, 2, 13, 0.0f);
  ExpectRight(layer, 1, 33, kInt2Error);
}

// 0xffff and 0x7f80 in a word's half: NaN and Inf.
TEST(AttendInt2Test, NanInAWordOrAnInfiniteValueScaleMakesTheRowsThatSeeItNan) {
  for (const bool is_value : {false, true}) {
    for (const size_t half : {0u, 2u}) {
      for (const uint16_t bits : {0xffff, 0x7f80}) {
        // Infinite offsets give infinity, and an infinite key may have probability 0.
        if (bits == 0x7f80 && (!is_value || half == 2)) continue;
        Layer layer = Int2Layer({.query_heads = 3, .kv_heads = 1}, 3, 15);
        const uint32_t word =
            is_value ? int2::ValueParams(64, 1, 20, 0) : int2::KeyParams(64, 1, 20, 0);
        std::memcpy(layer.page(2)->data() + word + half, &bits, 2);
        // Query i sees tokens before 10 + i of the last block.
        const auto expect_nan_from_query_11 = [&](const std::vector<float>& out) {
          for (uint32_t row = 0; row < 20 * 3; ++row) {
            EXPECT_EQ(std::isnan(out[row * 64 + 7]), row >= 11 * 3)
                << row << " " << is_value << " " << half << " " << bits;
          }
        };
        OnEveryTarget([&] { expect_nan_from_query_11(RunAttend(layer, 0, 20, 10)); });
        expect_nan_from_query_11(RunReference(layer, 0, 20, 10));
      }
    }
  }
}

TEST(AttendInt2Test, NanInAQueryMakesItsOwnRowNan) {
  const Layer layer = Int2Layer({.query_heads = 3, .kv_heads = 1}, 3, 16);
  const std::vector<float> expected = RunReference(layer, 0, 4, 60);
  for (const float bad : {std::nanf(""), INFINITY}) {
    std::vector<AttendBlock> blocks;
    std::vector<float> out(layer.out_floats(4));
    AttendParams params = layer.Params(0, 4, 60, &blocks, out.data());
    std::vector<float> q(params.q, params.q + layer.out_floats(4));
    q[5 * 64 + 9] = bad;
    params.q = q.data();
    const auto expect_row_5_nan = [&] {
      for (uint32_t row = 0; row < 12; ++row) {
        if (row == 5) {
          EXPECT_TRUE(std::isnan(out[row * 64]));
        } else {
          EXPECT_EQ(std::memcmp(&out[row * 64], &expected[row * 64], 64 * 4), 0) << row;
        }
      }
    };
    OnEveryTarget([&] {
      ThreadPool pool(1);
      EXPECT_TRUE(Attend(params, &pool).ok());
      expect_row_5_nan();
    });
    EXPECT_TRUE(reference::Attend(params).ok());
    expect_row_5_nan();
  }
}

}  // namespace
}  // namespace okv::kernels_test
