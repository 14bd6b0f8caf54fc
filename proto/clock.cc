#include "proto/clock.h"

#include <chrono>

namespace okv {
namespace {

class SystemClock final : public Clock {
 public:
  int64_t NowNanos() const override {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  int64_t WallMicros() const override {
    return std::chrono::duration_cast<std::chrono::microseconds>(
               std::chrono::system_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

const Clock* Clock::System() {
  static const SystemClock* const clock = new SystemClock;
  return clock;
}

}  // namespace okv
