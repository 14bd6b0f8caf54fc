#include "proto/mutex.h"

#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace okv {
namespace {

// Thread-safe.
class Counter {
 public:
  void Add() {
    MutexLock lock(&mu_);
    ++value_;
    changed_.SignalAll();
  }
  void WaitUntil(int value) {
    MutexLock lock(&mu_);
    while (value_ < value) changed_.Wait(&mu_);
  }
  // Whether a notification came in time; nobody sends one here.
  bool WaitForNothing() {
    MutexLock lock(&mu_);
    return changed_.WaitFor(&mu_, std::chrono::milliseconds(1));
  }
  int value() {
    MutexLock lock(&mu_);
    return value_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int value_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST(MutexTest, NoIncrementIsLost) {
  Counter counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) counter.Add();
    });
  }
  counter.WaitUntil(4000);
  EXPECT_EQ(counter.value(), 4000);
  for (std::thread& thread : threads) thread.join();
}

TEST(MutexTest, WaitForEndsWithoutANotification) {
  Counter counter;
  // A wakeup may be spurious: one that is not must come.
  while (counter.WaitForNothing()) {
  }
  counter.Add();  // The mutex is free again.
  EXPECT_EQ(counter.value(), 1);
}

}  // namespace
}  // namespace okv
