#include <random>
#include <vector>

#include "cmd/bench/bootstrap.h"
#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(BootstrapTest, TheIntervalCoversTheTrueMeanAboutNinetyFiveTimesInAHundred) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal(3.0, 2.0);
  int covered = 0;
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<double> values(40);
    for (double& value : values) value = normal(random);
    const Interval interval = BootstrapMean(values, 500, trial);
    EXPECT_LE(interval.low, interval.mean);
    EXPECT_GE(interval.high, interval.mean);
    covered += interval.low <= 3.0 && interval.high >= 3.0;
  }
  EXPECT_GT(covered, 360);  // 90 %: the percentile bootstrap is a little narrow at 40 values.
  EXPECT_LT(covered, 395);
}

TEST(BootstrapTest, EqualValuesGiveAnIntervalOfNoWidth) {
  const std::vector<double> values(5, 1.25);
  const Interval interval = BootstrapMean(values, 100, 1);
  EXPECT_EQ(interval.mean, 1.25);
  EXPECT_EQ(interval.low, 1.25);
  EXPECT_EQ(interval.high, 1.25);
}

TEST(BootstrapTest, TheSameSeedGivesTheSameInterval) {
  const std::vector<double> values = {1, 2, 3, 5, 8, 13};
  const Interval a = BootstrapMean(values, 1000, 42), b = BootstrapMean(values, 1000, 42);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
}

}  // namespace
}  // namespace okv
