#include "proto/clock.h"

#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(ClockTest, SystemTimeDoesNotGoBackwards) {
  const Clock* clock = Clock::System();
  int64_t last = clock->NowNanos();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = clock->NowNanos();
    EXPECT_GE(now, last);
    last = now;
  }
}

TEST(ClockTest, SystemWallTimeIsMicrosecondsSinceTheUnixEpoch) {
  // 2020-01-01 and 2100-01-01: seconds or nanoseconds would be far outside.
  EXPECT_GT(Clock::System()->WallMicros(), 1'577'836'800'000'000);
  EXPECT_LT(Clock::System()->WallMicros(), 4'102'444'800'000'000);
}

TEST(ClockTest, AFakeClockMovesOnlyByHand) {
  FakeClock clock;
  const int64_t wall = clock.WallMicros();
  EXPECT_EQ(clock.NowNanos(), 0);
  clock.AdvanceNanos(2'500'000);
  EXPECT_EQ(clock.NowNanos(), 2'500'000);
  EXPECT_EQ(clock.WallMicros(), wall + 2'500);
}

}  // namespace
}  // namespace okv
