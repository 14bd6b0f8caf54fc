#include <cmath>
#include <limits>

#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

TEST(RotateTest, RowsHaveTheBitsOfTheScalarTwinOnEveryTarget) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const size_t rows : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 13u}) {
      Lcg lcg(dim + rows);
      const size_t stride = dim + 24;
      const std::vector<uint16_t> x = RandomBf16(&lcg, rows * stride, 2.0f);
      const std::vector<uint16_t> r = RandomBf16(&lcg, dim * dim, 0.2f);
      const RotateParams params{
          .x = x.data(), .x_stride = stride, .r = r.data(), .rows_count = rows, .dim = dim};
      std::vector<uint16_t> expected(rows * stride, 0x1234);
      reference::RotateRows(params, expected.data(), stride);
      OnEveryTarget([&] {
        std::vector<uint16_t> y(rows * stride, 0x1234);
        RotateRows(params, y.data(), stride);
        EXPECT_TRUE(SameBits(y, expected)) << "dim " << dim << " rows " << rows;
      });
    }
  }
}

TEST(RotateTest, Fp32RowsHaveTheBitsOfTheScalarTwinInBothDirections) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const bool transpose : {false, true}) {
      Lcg lcg(dim);
      const size_t rows = 8;
      const std::vector<float> x = RandomF32(&lcg, rows * dim, 1.0f);
      const std::vector<uint16_t> r = RandomBf16(&lcg, dim * dim, 0.2f);
      const RotateQueriesParams params{.x = x.data(),
                                       .x_stride = dim,
                                       .r = r.data(),
                                       .rows_count = rows,
                                       .dim = dim,
                                       .transpose = transpose};
      std::vector<float> expected(rows * dim);
      reference::RotateRowsF32(params, expected.data(), dim);
      OnEveryTarget([&] {
        std::vector<float> y(rows * dim, std::nanf(""));
        RotateRowsF32(params, y.data(), dim);
        EXPECT_TRUE(SameBits(y, expected)) << "dim " << dim << " transpose " << transpose;
      });
    }
  }
}

TEST(RotateTest, SumIsInAscendingOrder) {
  std::vector<uint16_t> x(64, 0);
  std::vector<uint16_t> r(64 * 64, 0);
  // 2^24 + 1 - 2^24, in this order, loses the 1 (a tie, to even); in another order it would not.
  x[3] = x[4] = x[5] = FloatToBf16(1.0f);
  r[3 * 64] = FloatToBf16(16777216.0f);
  r[4 * 64] = FloatToBf16(1.0f);
  r[5 * 64] = FloatToBf16(-16777216.0f);
  r[3 * 64 + 1] = FloatToBf16(16777216.0f);
  r[4 * 64 + 1] = FloatToBf16(-16777216.0f);
  r[5 * 64 + 1] = FloatToBf16(1.0f);
  OnEveryTarget([&] {
    std::vector<uint16_t> y(64);
    RotateRows({.x = x.data(), .x_stride = 64, .r = r.data(), .rows_count = 1, .dim = 64}, y.data(),
               64);
    EXPECT_EQ(Bf16ToFloat(y[0]), 0.0f);
    EXPECT_EQ(Bf16ToFloat(y[1]), 1.0f);
  });
}

TEST(RotateTest, ProductsAreNotRoundedBeforeTheyAreAdded) {
  std::vector<float> x(64, 0.0f);
  std::vector<uint16_t> r(64 * 64, 0);
  // (1 + 2^-23)(1 + 2^-7) - (1 + 2^-7) = 2^-23 + 2^-30; a rounded product would lose the 2^-30.
  x[20] = -1.0f;
  x[21] = 1.0f + 0x1p-23f;
  r[20 * 64 + 9] = r[21 * 64 + 9] = FloatToBf16(1.0f + 0x1p-7f);
  OnEveryTarget([&] {
    std::vector<float> y(64);
    RotateRowsF32({.x = x.data(),
                   .x_stride = 64,
                   .r = r.data(),
                   .rows_count = 1,
                   .dim = 64,
                   .transpose = false},
                  y.data(), 64);
    EXPECT_EQ(y[9], 0x1p-23f + 0x1p-30f);
  });
}

TEST(RotateTest, IdentityGivesTheRowBackAndNanHasOneSpelling) {
  std::vector<uint16_t> identity(64 * 64, 0);
  for (int i = 0; i < 64; ++i) identity[i * 65] = 0x3f80;
  Lcg lcg(5);
  std::vector<uint16_t> x = RandomBf16(&lcg, 2 * 64, 3.0f);
  x[64 + 7] = 0xff91;  // NaN with a sign and a payload: it reaches every output (NaN * 0).
  OnEveryTarget([&] {
    std::vector<uint16_t> y(2 * 64);
    RotateRows({.x = x.data(), .x_stride = 64, .r = identity.data(), .rows_count = 2, .dim = 64},
               y.data(), 64);
    for (int c = 0; c < 64; ++c) {
      EXPECT_EQ(y[c], x[c]);
      EXPECT_EQ(y[64 + c], 0x7fc0);
    }
  });
}

TEST(RotateTest, TransposeUndoesAnOrthogonalRotation) {
  // The 128 x 128 Walsh-Hadamard matrix over 8 sqrt(2) is orthogonal; bf16 rounds its one
  // magnitude.
  std::vector<uint16_t> r(128 * 128);
  for (uint32_t i = 0; i < 128; ++i) {
    for (uint32_t j = 0; j < 128; ++j) {
      r[i * 128 + j] =
          FloatToBf16((__builtin_popcount(i & j) & 1) != 0 ? -0.08838835f : 0.08838835f);
    }
  }
  Lcg lcg(9);
  const std::vector<float> x = RandomF32(&lcg, 4 * 128, 1.0f);
  std::vector<float> y(4 * 128);
  std::vector<float> back(4 * 128);
  RotateQueriesParams params{.x = x.data(),
                             .x_stride = 128,
                             .r = r.data(),
                             .rows_count = 4,
                             .dim = 128,
                             .transpose = false};
  RotateRowsF32(params, y.data(), 128);
  params.x = y.data();
  params.transpose = true;
  RotateRowsF32(params, back.data(), 128);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(back[i], x[i], 0.01f);
}

}  // namespace
}  // namespace okv::kernels_test
