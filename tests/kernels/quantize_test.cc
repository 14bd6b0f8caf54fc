#include <algorithm>
#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "tests/kernels/support.h"

namespace okv::kernels_test {
namespace {

using ::testing::HasSubstr;

constexpr uint16_t kOne = 0x3f80;

// The rows of one run, and what QuantizeRun makes of them.
struct Rows {
  explicit Rows(uint32_t d, uint32_t g) : dim(d), group_size(g), k(64 * d), v(64 * d) {}
  QuantizeRunParams params() const {
    return {.k = k.data(),
            .v = v.data(),
            .row_stride = dim,
            .dim = dim,
            .group_size = group_size,
            .clip_rank_k = clip_rank_k,
            .clip_rank_v = clip_rank_v};
  }
  size_t run_bytes() const { return OneRun(dim, group_size).run_bytes(Codec::kInt2); }
  std::vector<uint8_t> Quantize() const {
    std::vector<uint8_t> run(run_bytes(), 0xcd);
    BadRow bad;
    EXPECT_TRUE(QuantizeRun(params(), run.data(), &bad).ok());
    return run;
  }

  uint32_t dim;
  uint32_t group_size;
  std::vector<uint16_t> k;
  std::vector<uint16_t> v;
  uint32_t clip_rank_k = 0;
  uint32_t clip_rank_v = 0;
};

Rows RandomRows(uint32_t dim, uint32_t group_size, uint64_t seed) {
  Lcg lcg(seed);
  Rows rows(dim, group_size);
  rows.k = RandomBf16(&lcg, 64 * dim, 3.0f);
  rows.v = RandomBf16(&lcg, 64 * dim, 0.01f);
  // Every 11th element is special: zeros of both signs, subnormals, outliers.
  const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x42c8, 0xc2c8};
  for (size_t i = 0; i < rows.k.size(); i += 11) rows.k[i] = rows.v[i] = special[lcg.Next() % 7];
  return rows;
}

TEST(QuantizeRunTest, HasTheBytesOfTheScalarTwinOnEveryTarget) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group_size = 32; group_size <= dim; group_size *= 2) {
      for (const uint32_t clip : {0u, 1u, dim - 11, dim - 6, dim - 1}) {
        Rows rows = RandomRows(dim, group_size, dim + group_size + clip);
        rows.clip_rank_k = clip;
        rows.clip_rank_v = clip == 0 ? 0 : clip - 1;
        std::vector<uint8_t> expected(rows.run_bytes());
        BadRow bad;
        ASSERT_TRUE(reference::QuantizeRun(rows.params(), expected.data(), &bad).ok());
        OnEveryTarget([&] {
          EXPECT_TRUE(SameBits(rows.Quantize(), expected))
              << "dim " << dim << " group " << group_size << " clip " << clip;
        });
      }
    }
  }
}

TEST(QuantizeRunTest, ReadsRowsAtTheirStride) {
  const Rows rows = RandomRows(64, 32, 3);
  std::vector<uint16_t> wide_k(64 * 192, 0x7fc0);
  std::vector<uint16_t> wide_v(64 * 192, 0x7fc0);
  for (int t = 0; t < 64; ++t) {
    std::copy_n(&rows.k[t * 64], 64, &wide_k[t * 192]);
    std::copy_n(&rows.v[t * 64], 64, &wide_v[t * 192]);
  }
  QuantizeRunParams params = rows.params();
  params.k = wide_k.data();
  params.v = wide_v.data();
  params.row_stride = 192;
  std::vector<uint8_t> run(rows.run_bytes());
  BadRow bad;
  ASSERT_TRUE(QuantizeRun(params, run.data(), &bad).ok());
  EXPECT_TRUE(SameBits(run, rows.Quantize()));
}

TEST(QuantizeRunTest, RoundsHalfToEven) {
  Rows rows(64, 64);
  const float levels[] = {0.0f, 3.0f, 0.5f, 1.5f, 2.5f, 0.498046875f, 0.50390625f, 2.484375f};
  const uint32_t codes[] = {0, 3, 0, 2, 2, 0, 1, 2};
  for (uint32_t i = 0; i < 8; ++i) {
    rows.k[5 * 64 + i] = FloatToBf16(levels[i]);
    rows.v[5 * 64 + i] = FloatToBf16(levels[i] - 3.0f);
  }
  std::fill_n(&rows.v[5 * 64 + 8], 56, FloatToBf16(-3.0f));
  OnEveryTarget([&] {
    const std::vector<uint8_t> run = rows.Quantize();
    const PageLayout layout = OneRun(64, 64);
    EXPECT_EQ(KeyWord(run.data(), layout, 5, 0).scale, kOne);
    EXPECT_EQ(KeyWord(run.data(), layout, 5, 0).offset, 0);
    EXPECT_EQ(ValueWord(run.data(), layout, 5, 0).scale, kOne);
    EXPECT_EQ(ValueWord(run.data(), layout, 5, 0).offset, FloatToBf16(-3.0f));
    for (uint32_t i = 0; i < 5; ++i) {
      EXPECT_EQ(KeyCode(run.data(), 64, 5, i), codes[i]) << levels[i];
      EXPECT_EQ(ValueCode(run.data(), 64, 5, i), codes[i]) << levels[i];
    }
    for (uint32_t i = 5; i < 8; ++i)
      EXPECT_EQ(KeyCode(run.data(), 64, 5, i), codes[i]) << levels[i];
  });
}

TEST(QuantizeRunTest, EqualChannelsGiveScaleZeroAndComeBackExactly) {
  Rows rows(128, 32);
  std::fill(rows.k.begin(), rows.k.end(), FloatToBf16(-7.25f));
  std::fill(rows.v.begin(), rows.v.end(), FloatToBf16(0.3f));
  OnEveryTarget([&] {
    const std::vector<uint8_t> run = rows.Quantize();
    for (size_t i = 0; i < 2 * 64 * 128 / 4; ++i) ASSERT_EQ(run[i], 0);
    std::vector<uint16_t> k(64 * 128);
    std::vector<uint16_t> v(64 * 128);
    DequantizeRun({.run = run.data(), .dim = 128, .group_size = 32}, k.data(), v.data());
    EXPECT_TRUE(SameBits(k, rows.k));
    EXPECT_TRUE(SameBits(v, rows.v));
  });
}

TEST(QuantizeRunTest, ARangeBelowThreeSmallestNormalsGivesScaleZero) {
  // Offsets 0x0080 (2^-126) and 0x0100 (2^-125): the range is 2^-126, a third of it subnormal.
  Rows rows(64, 64);
  std::fill(rows.k.begin(), rows.k.end(), 0x0080);
  rows.k[2 * 64 + 1] = 0x0100;
  // 4 * 2^-126 - 2^-126 = 3 * 2^-126: the scale is the smallest normal one, and stays.
  std::fill(rows.v.begin(), rows.v.end(), 0x0080);
  rows.v[2 * 64 + 1] = 0x0180;
  OnEveryTarget([&] {
    const std::vector<uint8_t> run = rows.Quantize();
    const PageLayout layout = OneRun(64, 64);
    EXPECT_EQ(KeyWord(run.data(), layout, 2, 0).scale, 0);
    EXPECT_EQ(KeyWord(run.data(), layout, 2, 0).offset, 0x0080);
    EXPECT_EQ(KeyCode(run.data(), 64, 2, 1), 0u);
    EXPECT_EQ(ValueWord(run.data(), layout, 2, 0).scale, 0x0080);
    EXPECT_EQ(ValueCode(run.data(), 64, 2, 1), 3u);
  });
}

TEST(QuantizeRunTest, SubnormalsAndMinusZeroCountAsPlusZero) {
  Rows rows(64, 64);
  for (size_t i = 0; i < rows.k.size(); ++i) {
    rows.k[i] = i % 3 == 0 ? 0x8000 : i % 3 == 1 ? 0x007f : 0x8001;
    rows.v[i] = i % 2 == 0 ? 0x8000 : kOne;
  }
  OnEveryTarget([&] {
    const std::vector<uint8_t> run = rows.Quantize();
    const PageLayout layout = OneRun(64, 64);
    for (uint32_t t = 0; t < 64; ++t) {
      EXPECT_EQ(KeyWord(run.data(), layout, t, 0).scale, 0);
      EXPECT_EQ(KeyWord(run.data(), layout, t, 0).offset, 0);
      EXPECT_EQ(ValueWord(run.data(), layout, t, 0).offset, 0);
    }
  });
}

// Clips by sorting; the quantizer without clipping must then give the same run.
std::vector<uint16_t> ClipBySorting(const std::vector<uint16_t>& rows, uint32_t dim,
                                    uint32_t rank) {
  std::vector<uint16_t> clipped = rows;
  for (size_t row = 0; row < rows.size(); row += dim) {
    std::vector<float> sorted;
    for (uint32_t c = 0; c < dim; ++c) {
      const float magnitude = std::fabs(Bf16ToFloat(rows[row + c]));
      sorted.push_back(magnitude < 0x1p-126f ? 0.0f : magnitude);
    }
    std::sort(sorted.begin(), sorted.end());
    for (uint32_t c = 0; c < dim; ++c) {
      const float value = Bf16ToFloat(rows[row + c]);
      clipped[row + c] = FloatToBf16(std::min(std::max(value, -sorted[rank]), sorted[rank]));
    }
  }
  return clipped;
}

TEST(QuantizeRunTest, ClipsAtTheRankThSmallestMagnitudeOfTheWholeRow) {
  struct Case {
    uint32_t dim;
    uint32_t rank;
  };
  for (const Case& c : {Case{64, 1}, Case{64, 32}, Case{64, 61}, Case{64, 63}, Case{128, 117},
                        Case{128, 122}, Case{128, 127}, Case{256, 128}, Case{256, 245}}) {
    Rows rows = RandomRows(c.dim, 32, c.dim + c.rank);
    rows.clip_rank_k = c.rank;
    rows.clip_rank_v = c.rank;
    Rows clipped = rows;
    clipped.k = ClipBySorting(rows.k, c.dim, c.rank);
    clipped.v = ClipBySorting(rows.v, c.dim, c.rank);
    clipped.clip_rank_k = clipped.clip_rank_v = 0;
    OnEveryTarget([&] {
      EXPECT_TRUE(SameBits(rows.Quantize(), clipped.Quantize())) << c.dim << " rank " << c.rank;
    });
    Rows unclipped = rows;
    unclipped.clip_rank_k = 0;
    if (c.rank + 1 < c.dim) {
      EXPECT_FALSE(SameBits(rows.Quantize(), unclipped.Quantize()));
    }
  }
}

TEST(QuantizeRunTest, AThresholdOfZeroLeavesPlusZeros) {
  Rows rows(64, 64);
  for (size_t i = 0; i < rows.k.size(); i += 2) rows.k[i] = FloatToBf16(-2.0f);
  rows.clip_rank_k = 20;  // 32 magnitudes are 0.
  OnEveryTarget([&] {
    const std::vector<uint8_t> run = rows.Quantize();
    for (uint32_t t = 0; t < 64; ++t) {
      EXPECT_EQ(KeyWord(run.data(), OneRun(64, 64), t, 0).offset, 0);
      EXPECT_EQ(KeyWord(run.data(), OneRun(64, 64), t, 0).scale, 0);
    }
  });
}

TEST(QuantizeRunTest, NanAndInfinityAreRefusedByTokenAndHalf) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint16_t poison : {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81}) {
      for (const uint32_t token : {0u, 17u, 63u}) {
        for (const bool is_value : {false, true}) {
          Rows rows = RandomRows(dim, 32, 4);
          rows.clip_rank_k = rows.clip_rank_v =
              token == 17 ? dim / 2 : 0;  // Not clipped away either.
          (is_value ? rows.v : rows.k)[token * dim + (token * 5) % dim] = poison;
          OnEveryTarget([&] {
            std::vector<uint8_t> run(rows.run_bytes());
            BadRow bad{.token = 99, .is_value = !is_value};
            const absl::Status status = QuantizeRun(rows.params(), run.data(), &bad);
            EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
            EXPECT_THAT(std::string(status.message()), HasSubstr("token " + std::to_string(token)));
            EXPECT_EQ(bad.token, token);
            EXPECT_EQ(bad.is_value, is_value);
          });
        }
      }
    }
  }
}

TEST(QuantizeRunTest, ARangeThatOverflowsIsRefused) {
  Rows rows = RandomRows(64, 32, 6);
  rows.v[40 * 64 + 33] = 0x7f7f;  // 3.4e38 and its negative in one group.
  rows.v[40 * 64 + 60] = 0xff7f;
  rows.v[41 * 64 + 33] = 0x7f7f;  // In two groups: no overflow, but it comes later anyway.
  rows.v[41 * 64 + 3] = 0xff7f;
  OnEveryTarget([&] {
    std::vector<uint8_t> run(rows.run_bytes());
    BadRow bad;
    EXPECT_EQ(QuantizeRun(rows.params(), run.data(), &bad).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(bad.token, 40u);
    EXPECT_TRUE(bad.is_value);
  });
  rows.v[40 * 64 + 60] = 0;
  EXPECT_EQ(rows.Quantize().size(), rows.run_bytes());
}

TEST(QuantizeRunTest, TheFirstBadKeyRowIsNamedBeforeAnyValueRow) {
  Rows rows = RandomRows(64, 64, 7);
  rows.v[0] = 0x7fc0;
  rows.k[9 * 64] = 0x7fc0;
  rows.k[8 * 64] = 0x7f7f;
  rows.k[8 * 64 + 1] = 0xff7f;
  OnEveryTarget([&] {
    std::vector<uint8_t> run(rows.run_bytes());
    BadRow bad;
    EXPECT_FALSE(QuantizeRun(rows.params(), run.data(), &bad).ok());
    EXPECT_EQ(bad.token, 8u);
    EXPECT_FALSE(bad.is_value);
  });
}

TEST(DequantizeRunTest, HasTheBitsOfTheScalarTwinOnEveryTarget) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group_size = 32; group_size <= dim; group_size *= 2) {
      const std::vector<uint8_t> run = RandomRows(dim, group_size, dim * group_size).Quantize();
      const DequantizeRunParams params{.run = run.data(), .dim = dim, .group_size = group_size};
      const size_t n = 64 * dim;
      std::vector<float> k32(n), v32(n), expected_k32(n), expected_v32(n);
      std::vector<uint16_t> k16(n), v16(n), expected_k16(n), expected_v16(n);
      reference::DequantizeRunF32(params, expected_k32.data(), expected_v32.data());
      reference::DequantizeRun(params, expected_k16.data(), expected_v16.data());
      OnEveryTarget([&] {
        DequantizeRunF32(params, k32.data(), v32.data());
        DequantizeRun(params, k16.data(), v16.data());
        EXPECT_TRUE(SameBits(k32, expected_k32)) << dim << " " << group_size;
        EXPECT_TRUE(SameBits(v32, expected_v32)) << dim << " " << group_size;
        EXPECT_TRUE(SameBits(k16, expected_k16)) << dim << " " << group_size;
        EXPECT_TRUE(SameBits(v16, expected_v16)) << dim << " " << group_size;
      });
    }
  }
}

TEST(DequantizeRunTest, IsWithinHalfAStepOfTheClippedRow) {
  for (const uint32_t group_size : {32u, 64u, 128u}) {
    Rows rows = RandomRows(128, group_size, group_size);
    rows.clip_rank_k = 122;
    rows.clip_rank_v = 117;
    const std::vector<uint8_t> run = rows.Quantize();
    const std::vector<uint16_t> y_k = ClipBySorting(rows.k, 128, 122);
    const std::vector<uint16_t> y_v = ClipBySorting(rows.v, 128, 117);
    std::vector<float> k(64 * 128);
    std::vector<float> v(64 * 128);
    DequantizeRunF32({.run = run.data(), .dim = 128, .group_size = group_size}, k.data(), v.data());
    const PageLayout layout = OneRun(128, group_size);
    for (uint32_t i = 0; i < 64 * 128; ++i) {
      // Half a step, and the last place of the bf16 step three times.
      const float k_step =
          Bf16ToFloat(KeyWord(run.data(), layout, i / 128, i % 128 / group_size).scale);
      const float v_step =
          Bf16ToFloat(ValueWord(run.data(), layout, i / 128, i % 128 / group_size).scale);
      ASSERT_LE(std::fabs(k[i] - Bf16ToFloat(y_k[i])), 0.507f * k_step + 1e-37f) << i;
      ASSERT_LE(std::fabs(v[i] - Bf16ToFloat(y_v[i])), 0.507f * v_step + 1e-37f) << i;
    }
  }
}

}  // namespace
}  // namespace okv::kernels_test
