#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cmd/engine/row_ops.h"
#include "tests/cmd/engine_test_targets.h"

namespace okv {
namespace {

using testing_support::OnEveryTarget;

std::vector<float> RandomRow(size_t size, uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> row(size);
  for (float& value : row) value = normal(random);
  return row;
}

// `compute` must give the same bits everywhere; the result.
template <typename Compute>
std::vector<float> SameBitsOnEveryTarget(const Compute& compute) {
  const std::vector<float> first = compute();
  OnEveryTarget([&] {
    const std::vector<float> again = compute();
    ASSERT_EQ(again.size(), first.size());
    for (size_t i = 0; i < first.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(again[i]), std::bit_cast<uint32_t>(first[i])) << i;
    }
  });
  return first;
}

TEST(RowOpsTest, ExpIsWithinTwoUnitsInTheLastPlace) {
  for (float x = -87.0f; x < 88.7f; x += 0.0137f) {
    const double exact = std::exp(double{x});
    const float rounded = static_cast<float>(exact);
    const double unit = std::nextafter(rounded, HUGE_VALF) - rounded;
    ASSERT_LE(std::abs(Exp(x) - exact), 2 * unit) << x;
  }
  EXPECT_EQ(Exp(0), 1.0f);
  EXPECT_EQ(Exp(-87.5f), 0.0f);
  EXPECT_EQ(Exp(-HUGE_VALF), 0.0f);
  EXPECT_EQ(Exp(89.0f), HUGE_VALF);
}

TEST(RowOpsTest, RmsNormAgreesWithDoublePrecision) {
  const std::vector<float> x = RandomRow(576, 1, 3), weight = RandomRow(576, 2, 1);
  const std::vector<float> y = SameBitsOnEveryTarget([&] {
    std::vector<float> result(576);
    RmsNorm(x, weight, 1e-5f, absl::MakeSpan(result));
    return result;
  });
  double square_sum = 0;
  for (const float value : x) square_sum += double{value} * value;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = x[i] / std::sqrt(square_sum / 576 + 1e-5) * weight[i];
    EXPECT_NEAR(y[i], exact, 1e-6 * (1 + std::abs(exact)));
  }
}

TEST(RowOpsTest, SwiGluAgreesWithDoublePrecisionFarFromZeroToo) {
  std::vector<float> gate = RandomRow(96, 3, 4), up = RandomRow(96, 4, 1);
  gate[0] = -100;
  gate[1] = 100;
  gate[2] = 0;
  const std::vector<float> y = SameBitsOnEveryTarget([&] {
    std::vector<float> result(96);
    SwiGlu(gate, up, absl::MakeSpan(result));
    return result;
  });
  for (size_t i = 0; i < y.size(); ++i) {
    const double exact = double{gate[i]} / (1 + std::exp(-double{gate[i]})) * up[i];
    EXPECT_NEAR(y[i], exact, 1e-6 * (1 + std::abs(exact))) << i;
  }
}

TEST(RowOpsTest, NegativeLogLikelihoodIsThatOfASoftmax) {
  std::vector<float> logits = RandomRow(49152, 5, 5);
  const std::vector<float> nll = SameBitsOnEveryTarget([&] {
    return std::vector<float>{NegativeLogLikelihood(logits, 0), NegativeLogLikelihood(logits, 777)};
  });
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit});
  EXPECT_NEAR(nll[0], std::log(sum) - logits[0], 1e-5);
  EXPECT_NEAR(nll[1], std::log(sum) - logits[777], 1e-5);
  logits.assign(16, -1000.0f);
  EXPECT_NEAR(NegativeLogLikelihood(logits, 3), std::log(16.0), 1e-6);
}

TEST(RowOpsTest, RopeTurnsHalfSplitPairsByThePositionsAngle) {
  const Rope rope(64, 100000.0, 8192);
  const std::vector<float> x = RandomRow(64, 6, 1);
  for (const uint32_t position : {0u, 1u, 100u, 8191u}) {
    const std::vector<float> y = SameBitsOnEveryTarget([&] {
      std::vector<float> turned = x;
      rope.Apply(position, turned.data());
      return turned;
    });
    for (size_t i = 0; i < 32; ++i) {
      const double angle = position * std::pow(100000.0, -2.0 * static_cast<double>(i) / 64);
      EXPECT_NEAR(y[i], x[i] * std::cos(angle) - x[i + 32] * std::sin(angle), 1e-6);
      EXPECT_NEAR(y[i + 32], x[i + 32] * std::cos(angle) + x[i] * std::sin(angle), 1e-6);
    }
    if (position == 0) {
      EXPECT_EQ(y, x);
    }
  }
}

}  // namespace
}  // namespace okv
