#include <limits>
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

// Of four values a percentile bootstrap would cover it 80 times in a hundred.
TEST(BootstrapTest, FewValuesHaveStudentsInterval) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal(3.0, 2.0);
  for (const size_t count : {2u, 4u, 7u}) {
    int covered = 0;
    for (int trial = 0; trial < 2000; ++trial) {
      std::vector<double> values(count);
      for (double& value : values) value = normal(random);
      const Interval interval = BootstrapMean(values, 500, trial);
      covered += interval.low <= 3.0 && interval.high >= 3.0;
    }
    EXPECT_NEAR(covered, 1900, 40) << count;
    EXPECT_STREQ(IntervalMethod(count), "student_t");
  }
  const std::vector<double> pair = {1, 2};
  EXPECT_NEAR(BootstrapMean(pair, 500, 1).low, 1.5 - 12.7062 * 0.5, 1e-6);
  EXPECT_STREQ(IntervalMethod(8), "bootstrap");
}

TEST(BootstrapTest, OneValueSaysNothingOfTheMean) {
  const std::vector<double> one = {2};
  const Interval interval = BootstrapMean(one, 500, 1);
  EXPECT_EQ(interval.mean, 2);
  EXPECT_EQ(interval.low, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(interval.high, std::numeric_limits<double>::infinity());
  EXPECT_STREQ(IntervalMethod(1), "none");
}

TEST(BootstrapTest, EqualValuesGiveAnIntervalOfNoWidth) {
  const std::vector<double> values(9, 1.25);
  const Interval interval = BootstrapMean(values, 100, 1);
  EXPECT_EQ(interval.mean, 1.25);
  EXPECT_EQ(interval.low, 1.25);
  EXPECT_EQ(interval.high, 1.25);
}

TEST(BootstrapTest, TheSameSeedGivesTheSameInterval) {
  const std::vector<double> values = {1, 2, 3, 5, 8, 13, 21, 34, 55};
  const Interval a = BootstrapMean(values, 1000, 42), b = BootstrapMean(values, 1000, 42);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
}

}  // namespace
}  // namespace okv
