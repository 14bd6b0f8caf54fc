#include "kernels/attend.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "kernels/softmax_exp2.h"
#include "tests/kernels/attend_f64.h"
#include "tests/kernels/plain_attention.h"
#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

using ::testing::HasSubstr;

TEST(AttendTest, HasTheBitsOfTheScalarTwinForEveryShapeOnEveryTarget) {
  const LayerShape shapes[] = {
      {.query_heads = 9, .kv_heads = 3, .head_dim = 64, .group_size = 64, .rotation_heads = 1},
      {.query_heads = 2, .kv_heads = 2, .head_dim = 64, .group_size = 32, .rotation_heads = 2},
      {.query_heads = 10, .kv_heads = 2, .head_dim = 128, .group_size = 128, .rotation_heads = 1},
      {.query_heads = 6, .kv_heads = 1, .head_dim = 128, .group_size = 32, .rotation_heads = 1},
      {.query_heads = 14, .kv_heads = 2, .head_dim = 64, .group_size = 64, .rotation_heads = 2},
      {.query_heads = 16, .kv_heads = 1, .head_dim = 128, .group_size = 64, .rotation_heads = 1},
      {.query_heads = 4, .kv_heads = 2, .head_dim = 256, .group_size = 256, .rotation_heads = 2},
      {.query_heads = 3, .kv_heads = 3, .head_dim = 256, .group_size = 32, .rotation_heads = 1}};
  for (const LayerShape& shape : shapes) {
    // Blocks bf16, int2, bf16 and 5 tokens of a bf16 one.
    const Layer layer(shape, 3 * 64 + 5, shape.query_heads * shape.head_dim);
    const std::vector<float> expected = RunReference(layer, 0, 3, 5);
    OnEveryTarget([&] {
      EXPECT_TRUE(SameBits(RunAttend(layer, 0, 3, 5), expected))
          << shape.query_heads << " " << shape.kv_heads << " " << shape.head_dim << " "
          << shape.group_size;
    });
  }
}

TEST(AttendTest, HasTheBitsOfTheScalarTwinAtEveryKindOfLength) {
  // Spans end at 1,024 and 2,048.
  for (const uint32_t tokens :
       {1u, 2u, 63u, 64u, 65u, 128u, 319u, 320u, 321u, 449u, 1000u, 1024u, 1025u, 2500u}) {
    const Layer layer({.query_heads = 6, .kv_heads = 2}, tokens, tokens);
    const uint32_t seen = layer.last_tokens();
    const std::vector<float> expected = RunReference(layer, 0, 1, seen);
    OnEveryTarget([&] {
      EXPECT_TRUE(SameBits(RunAttend(layer, 0, 1, seen), expected)) << tokens << " tokens";
    });
  }
}

// In int2 blocks queries and probabilities are 16-bit fixed point: 2^-15 of a query's largest
// element is an error of about 1e-4 of a result, more where scores are large.
constexpr double kInt2Error = 3e-4;

TEST(AttendTest, AgreesWithFloat64AtEveryLength) {
  for (const uint32_t tokens : {1u, 63u, 64u, 65u, 319u, 320u, 321u, 1000u}) {
    const Layer layer({}, tokens, tokens);
    EXPECT_LT(WorstError(layer, 1, layer.last_tokens()), kInt2Error) << tokens << " tokens";
  }
}

TEST(AttendTest, AgreesWithFloat64ForEveryHeadDim) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t rotation_heads : {1u, 2u}) {
      const Layer layer({.query_heads = 10,
                         .kv_heads = 2,
                         .head_dim = dim,
                         .group_size = 32,
                         .rotation_heads = rotation_heads},
                        64 * 8 + 1, dim);
      EXPECT_LT(WorstError(layer, 5, 30), kInt2Error) << dim;
    }
  }
}

TEST(AttendTest, AgreesWithFloat64WhenScoresArePeaky) {
  // Queries 40 times as large, scores of +-300: a softmax of one token or two. And 10 times, where
  // several compete: an error of 2^-16 of a query's largest element is 5e-4 of a probability.
  for (const float q_scale : {40.0f, 10.0f}) {
    const Layer layer({}, 700, 5, q_scale);
    EXPECT_LT(WorstError(layer, 3, layer.last_tokens()), 1e-3) << q_scale;
    const Layer wide({.query_heads = 8, .kv_heads = 2, .head_dim = 128, .group_size = 128}, 1300, 6,
                     q_scale / 4);
    EXPECT_LT(WorstError(wide, 3, wide.last_tokens()), 1e-3) << q_scale;
  }
  // And flat ones: queries of nearly nothing.
  const Layer flat({}, 700, 5, 1e-4f);
  EXPECT_LT(WorstError(flat, 3, flat.last_tokens()), kInt2Error);
}

TEST(AttendTest, AnInt2BlockMayBeTheLast) {
  Layer layer({}, 0, 3);
  Lcg lcg(4);
  layer.AddPage(Codec::kInt2, &lcg);
  layer.AddPage(Codec::kInt2, &lcg);
  const std::vector<float> expected = RunReference(layer, 0, 7, 20);
  EXPECT_LT(WorstError(layer, 7, 20), kInt2Error);
  layer.PoisonLastPage(26);
  OnEveryTarget([&] { EXPECT_TRUE(SameBits(RunAttend(layer, 0, 7, 20), expected)); });
}

TEST(AttendTest, WhatLiesBehindTheLastVisibleTokenDoesNotMatter) {
  for (const uint32_t seen : {1u, 15u, 16u, 33u, 62u}) {
    Layer layer({.query_heads = 5, .kv_heads = 1}, 6 * 64 + seen, seen);
    const std::vector<float> expected = RunReference(layer, 0, 2, seen);
    layer.PoisonLastPage(seen + 1);
    OnEveryTarget([&] { EXPECT_TRUE(SameBits(RunAttend(layer, 0, 2, seen), expected)) << seen; });
  }
}

TEST(AttendTest, NoVisibleBlockGivesZeros) {
  const Layer layer({}, 0, 1);
  OnEveryTarget([&] {
    for (const float value : RunAttend(layer, 0, 2, 1)) ASSERT_EQ(value, 0.0f);
  });
  for (const float value : RunReference(layer, 0, 2, 1)) ASSERT_EQ(value, 0.0f);
}

// The hard promise: prefill tiles, any chunking and decode give the same bits.
TEST(AttendTest, ARowsBitsDoNotDependOnTheOtherRowsOfTheCall) {
  for (const uint32_t gqa : {1u, 3u, 5u, 7u}) {
    const LayerShape shape{.query_heads = 2 * gqa, .kv_heads = 2};
    const Layer layer(shape, 5 * 64, gqa);
    Layer poisoned(shape, 5 * 64, gqa);
    const size_t row_floats = size_t{shape.query_heads} * shape.head_dim;
    OnEveryTarget([&] {
      if (SimdTargetName() == "SCALAR") return;  // The scalar twin has no blocks of rows.
      const std::vector<float> tile = RunAttend(layer, 0, 64, 1);
      for (uint32_t size : {1u, 5u, 33u}) {
        std::vector<float> pieces;
        for (uint32_t first = 0; first < 64; first += size) {
          const std::vector<float> piece =
              RunAttend(layer, first, std::min(size, 64 - first), 1 + first);
          pieces.insert(pieces.end(), piece.begin(), piece.end());
        }
        EXPECT_TRUE(SameBits(pieces, tile)) << "chunks of " << size << ", gqa " << gqa;
      }
      // And as decode does it: what later tokens will hold is not there yet.
      poisoned.PoisonLastPage(31);
      const std::vector<float> row = RunAttend(poisoned, 30, 1, 31);
      EXPECT_EQ(std::memcmp(row.data(), &tile[30 * row_floats], row.size() * 4), 0);
    });
  }
}

TEST(AttendTest, InfinityInATokenTouchesOnlyTheQueriesThatSeeIt) {
  const LayerShape shape{.query_heads = 3, .kv_heads = 1};
  Layer layer(shape, 4 * 64, 2);
  const std::vector<float> expected = RunReference(layer, 0, 20, 10);
  // Token 20 of the last block: queries 0..10 do not see it, 11..19 do.
  const size_t v_row = layer.layout().bf16_v_offset() + 20 * 64 * 2;
  for (int c = 0; c < 64; ++c) {
    layer.page(3)->at(v_row + c * 2) = 0x80;
    layer.page(3)->at(v_row + c * 2 + 1) = 0x7f;
  }
  const size_t row_floats = 3 * 64;
  OnEveryTarget([&] {
    const std::vector<float> out = RunAttend(layer, 0, 20, 10);
    EXPECT_EQ(std::memcmp(out.data(), expected.data(), 11 * row_floats * 4), 0);
    EXPECT_FALSE(std::isfinite(out[11 * row_floats]));
  });
}

TEST(AttendTest, NanInAVisibleKeyOrValueMakesEveryRowThatSeesItNan) {
  for (const bool is_value : {false, true}) {
    Layer layer({.query_heads = 3, .kv_heads = 1}, 3 * 64, 2);
    const size_t element = (is_value ? layer.layout().bf16_v_offset() : 0) + (20 * 64 + 5) * 2;
    layer.page(2)->at(element) = 0xc0;
    layer.page(2)->at(element + 1) = 0x7f;
    const auto expect_nan_from_query_11 = [](const std::vector<float>& out) {
      for (uint32_t row = 0; row < 20 * 3; ++row) {
        EXPECT_EQ(std::isnan(out[row * 64]), row >= 11 * 3) << row;
      }
    };
    OnEveryTarget([&] { expect_nan_from_query_11(RunAttend(layer, 0, 20, 10)); });
    expect_nan_from_query_11(RunReference(layer, 0, 20, 10));
  }
}

TEST(AttendTest, GroupsOfScaleZeroGiveTheirOffset) {
  // All keys and values equal: the output is the value row, rotated back, whatever the queries.
  Layer layer({.query_heads = 2, .kv_heads = 2}, 0, 8);
  Lcg lcg(1);
  layer.AddPage(Codec::kInt2, &lcg);
  std::vector<uint16_t> rows(64 * 64, FloatToBf16(0.75f));
  for (uint32_t h = 0; h < 2; ++h) {
    BadRow bad;
    ASSERT_TRUE(QuantizeRun({.k = rows.data(),
                             .v = rows.data(),
                             .row_stride = 64,
                             .dim = 64,
                             .group_size = 64,
                             .clip_rank_k = 0,
                             .clip_rank_v = 0},
                            layer.page(0)->data() + layer.layout().run_offset(Codec::kInt2, 0, h),
                            &bad)
                    .ok());
  }
  EXPECT_LT(WorstError(layer, 2, 63), 5e-6);
}

// What the benchmark compares with computes the same thing.
TEST(PlainAttentionTest, GivesWhatAttendGivesOverBf16Blocks) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const LayerShape shape{.query_heads = 4, .kv_heads = 1, .head_dim = dim, .group_size = dim};
    Layer layer(shape, 128, dim);
    std::vector<AttendBlock> blocks;
    std::vector<float> expected(layer.out_floats(1));
    AttendParams params = layer.Params(0, 1, 64, &blocks, expected.data());
    std::vector<uint16_t> identity(dim * dim);
    for (uint32_t i = 0; i < dim; ++i) identity[i * dim + i] = FloatToBf16(1.0f);
    params.r_k = params.r_v = identity.data();
    ASSERT_TRUE(reference::Attend(params).ok());
    std::vector<uint16_t> k(128 * dim);
    std::vector<uint16_t> v(128 * dim);
    for (size_t b = 0; b < 2; ++b) {
      std::memcpy(&k[b * 64 * dim], blocks[b].page, 128 * dim);
      std::memcpy(&v[b * 64 * dim], blocks[b].page + layer.layout().bf16_v_offset(), 128 * dim);
    }
    OnEveryTarget([&] {
      std::vector<float> out(4 * dim);
      const bool done = AttendPlain({.q = params.q,
                                     .k = k.data(),
                                     .v = v.data(),
                                     .tokens = 128,
                                     .rows = 4,
                                     .dim = dim,
                                     .softmax_scale = params.softmax_scale,
                                     .out = out.data()});
      ASSERT_EQ(done, SimdTargetName() != "SCALAR");
      for (size_t i = 0; done && i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-5) << i;
    });
  }
}

TEST(AttendTest, EveryFieldOutOfRangeIsNamed) {
  const Layer layer({}, 100, 1);
  std::vector<float> out(layer.out_floats(64));
  ThreadPool pool(1);
  const auto expect_refused = [&](const char* field, void (*change)(AttendParams*)) {
    std::vector<AttendBlock> blocks;
    AttendParams params = layer.Params(0, 1, 1, &blocks, out.data());
    change(&params);
    for (const absl::Status& status : {Attend(params, &pool), reference::Attend(params)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
      EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    }
  };
  expect_refused("query_heads", [](AttendParams* p) { p->query_heads = 10; });
  expect_refused("query_heads", [](AttendParams* p) { p->query_heads = 0; });
  expect_refused("query_heads", [](AttendParams* p) { p->query_heads = 17 * 3; });
  expect_refused("kv_heads", [](AttendParams* p) { p->kv_heads = 0; });
  expect_refused("head_dim", [](AttendParams* p) { p->head_dim = 96; });
  expect_refused("group_size", [](AttendParams* p) { p->group_size = 16; });
  expect_refused("group_size", [](AttendParams* p) { p->group_size = 48; });
  expect_refused("group_size", [](AttendParams* p) { p->group_size = 128; });
  expect_refused("softmax_scale", [](AttendParams* p) { p->softmax_scale = 0; });
  expect_refused("rotation_heads", [](AttendParams* p) { p->rotation_heads = 2; });
  expect_refused("queries_count", [](AttendParams* p) { p->queries_count = 0; });
  expect_refused("queries_count", [](AttendParams* p) { p->queries_count = 65; });
  expect_refused("last_block_tokens", [](AttendParams* p) { p->last_block_tokens = 0; });
  expect_refused("last_block_tokens", [](AttendParams* p) { p->last_block_tokens = 65; });
  expect_refused("last_block_tokens", [](AttendParams* p) {
    p->queries_count = 64;
    p->last_block_tokens = 2;
  });
  expect_refused("q is null", [](AttendParams* p) { p->q = nullptr; });
  expect_refused("r_k", [](AttendParams* p) { p->r_k = nullptr; });
  expect_refused("r_v", [](AttendParams* p) { p->r_v = nullptr; });
  expect_refused("out", [](AttendParams* p) { p->out = nullptr; });
  static const AttendBlock kNoPage[] = {{.codec = Codec::kInt2, .page = nullptr}};
  static const uint8_t kByte[1] = {};
  static const AttendBlock kNoCodec[] = {{.codec = static_cast<Codec>(3), .page = kByte}};
  expect_refused("null page", [](AttendParams* p) { p->blocks = kNoPage; });
  expect_refused("codec", [](AttendParams* p) { p->blocks = kNoCodec; });
}

TEST(SoftmaxExp2Test, IsWithinOneUlpOfExp2) {
  double worst = 0;
  for (int i = 0; i <= 126 * 8192; ++i) {
    const float x =
        static_cast<float>(-i) / 8192.0f - (i % 7 == 0 && i < 126 * 8192 ? 3e-6f : 0.0f);
    if (x < kExp2Min) continue;
    const double exact = std::exp2(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
    worst = std::max(worst, std::fabs(Exp2Softmax(x) - exact) / ulp);
  }
  EXPECT_LT(worst, 1.0);
  EXPECT_GT(worst, 0.0);
}

TEST(SoftmaxExp2Test, IsExactAtWholeNumbersAndZeroBelowTheSmallestNormal) {
  EXPECT_EQ(Exp2Softmax(0.0f), 1.0f);
  EXPECT_EQ(Exp2Softmax(-0.0f), 1.0f);
  EXPECT_EQ(Exp2Softmax(-1.0f), 0.5f);
  EXPECT_EQ(Exp2Softmax(-126.0f), 0x1p-126f);
  EXPECT_EQ(Exp2Softmax(-126.0001f), 0.0f);
  EXPECT_EQ(Exp2Softmax(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(Exp2Softmax(std::nanf(""))));
}

}  // namespace
}  // namespace okv::kernels_test
