#include "proto/bf16.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(Bf16Test, EveryBf16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    const uint16_t back = FloatToBf16(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(back))) << bits;
      EXPECT_EQ(back & 0x8000u, bits & 0x8000u);
    } else {
      EXPECT_EQ(back, bits);
    }
  }
}

TEST(Bf16Test, RoundsToNearest) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(-1.5f), 0xbfc0);
  EXPECT_EQ(FloatToBf16(1.003f), 0x3f80);  // The next bf16 is 1.0078125, half way is 1.00390625.
  EXPECT_EQ(FloatToBf16(1.004f), 0x3f81);
}

TEST(Bf16Test, TiesGoToEven) {
  EXPECT_EQ(FloatToBf16(1.00390625f), 0x3f80);
  EXPECT_EQ(FloatToBf16(1.01171875f), 0x3f82);
}

TEST(Bf16Test, LargeValuesRoundToInfinity) {
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(FloatToBf16(-std::numeric_limits<float>::max()), 0xff80);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::infinity()), 0x7f80);
}

TEST(Bf16Test, NanWithLowBitsOnlyStaysNan) {
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0xffffffffu)))));
}

}  // namespace
}  // namespace okv
