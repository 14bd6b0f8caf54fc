#ifndef OKV_PROTO_CLOCK_H_
#define OKV_PROTO_CLOCK_H_

#include <atomic>
#include <cstdint>

namespace okv {

// Where time comes from, passed in so that tests need no sleeps. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic, from an arbitrary start: for durations and deadlines inside one process.
  virtual int64_t NowNanos() const = 0;
  // Microseconds since the Unix epoch: for what other processes read (ticket expiry, provenance).
  virtual int64_t WallMicros() const = 0;

  // The machine's clock; lives for ever.
  static const Clock* System();
};

// A clock that a test moves by hand.
class FakeClock final : public Clock {
 public:
  int64_t NowNanos() const override { return nanos_.load(); }
  int64_t WallMicros() const override { return 1'700'000'000'000'000 + nanos_.load() / 1000; }
  void AdvanceNanos(int64_t nanos) { nanos_.fetch_add(nanos); }

 private:
  std::atomic<int64_t> nanos_{0};
};

}  // namespace okv

#endif  // OKV_PROTO_CLOCK_H_
