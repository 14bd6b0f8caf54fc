#include "calib/row_codec.h"

#include "calib/linalg.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/page_layout.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kDim = 64;

// 150 rows: more than one call of the codec, and a part of another.
TEST(RestoredRowsTest, MatchTheScalarCodec) {
  const RowSample sample = GaussianRows(kDim, 150, 2, 3, 5);
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  size_t bad_row = 0;
  const auto restored =
      RestoredRows(sample, {.rotation = r.data(), .group_size = 32, .clip_rank = 57}, &bad_row);
  ASSERT_TRUE(restored.ok()) << restored.status();
  ASSERT_EQ(restored->size(), sample.rows.size());
  const PageLayout layout{.layers_count = 1, .kv_heads = 1, .head_dim = kDim, .group_size = 32};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  for (size_t row = 0; row < 150; ++row) {
    std::vector<uint16_t> y(size_t{64} * kDim, 0);
    reference::RotateRows({.x = sample.rows.data() + row * kDim,
                           .x_stride = kDim,
                           .r = r.data(),
                           .rows_count = 1,
                           .dim = kDim},
                          y.data(), kDim);
    BadRow bad;
    ASSERT_TRUE(reference::QuantizeRun({.k = y.data(),
                                        .v = y.data(),
                                        .row_stride = kDim,
                                        .dim = kDim,
                                        .group_size = 32,
                                        .clip_rank_k = 57,
                                        .clip_rank_v = 57},
                                       run.data(), &bad)
                    .ok());
    std::vector<float> k(y.size());
    std::vector<float> v(y.size());
    reference::DequantizeRunF32({.run = run.data(), .dim = kDim, .group_size = 32}, k.data(),
                                v.data());
    for (uint32_t c = 0; c < kDim; ++c) {
      double expected = 0;
      for (uint32_t n = 0; n < kDim; ++n) expected += double{k[n]} * Bf16ToFloat(r[c * kDim + n]);
      ASSERT_NEAR((*restored)[row * kDim + c], expected, 1e-4) << row << " " << c;
    }
  }
}

// A rotation keeps lengths, but for its own rounding.
TEST(RotatedErrorTest, IsTheErrorOfTheRestoredRows) {
  const RowSample sample = GaussianRows(kDim, 150, 2, 3, 5);
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));  // 1/8: exact in bf16.
  const RowCodec codec{.rotation = r.data(), .group_size = 32, .clip_rank = 57};
  size_t bad_row = 0;
  const auto restored = RestoredRows(sample, codec, &bad_row);
  const auto rotated = RotatedError(sample, codec, &bad_row);
  ASSERT_TRUE(restored.ok() && rotated.ok());
  SquaredError expected;
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    const double x = Bf16ToFloat(sample.rows[i]);
    expected.error += ((*restored)[i] - x) * ((*restored)[i] - x);
    expected.signal += x * x;
  }
  EXPECT_NEAR(rotated->error, expected.error, 1e-2 * expected.error);
  EXPECT_NEAR(rotated->signal, expected.signal, 1e-2 * expected.signal);
}

TEST(RestoredRowsTest, ARowThatTheCodecRefusesIsNamed) {
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  for (const size_t row : {size_t{0}, size_t{65}, size_t{130}, size_t{199}}) {
    RowSample sample = GaussianRows(kDim, 200, 0, 0, 1);
    sample.rows[row * kDim] = 0x7f80;  // Inf.
    size_t bad_row = 0;
    const auto restored =
        RestoredRows(sample, {.rotation = r.data(), .group_size = 64, .clip_rank = 0}, &bad_row);
    EXPECT_EQ(restored.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(bad_row, row);
  }
}

}  // namespace
}  // namespace okv
