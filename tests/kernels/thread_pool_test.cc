#include "kernels/thread_pool.h"

#include <atomic>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace okv {
namespace {

TEST(ThreadPoolTest, EveryTaskRunsExactlyOnce) {
  for (const size_t threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads_count(), threads);
    for (const size_t tasks : {0u, 1u, 2u, 3u, 100u, 1000u}) {
      std::vector<int> runs(tasks, 0);  // Not atomic: each element belongs to one task.
      pool.ParallelFor(tasks, [&runs](size_t i) { ++runs[i]; });
      EXPECT_EQ(runs, std::vector<int>(tasks, 1));
    }
  }
}

TEST(ThreadPoolTest, WhatTasksWroteIsVisibleToTheCallerAndTheNextLoop) {
  ThreadPool pool(3);
  std::vector<long> values(64, 1);
  for (int round = 0; round < 200; ++round) {
    const long sum = std::accumulate(values.begin(), values.end(), 0L);
    pool.ParallelFor(values.size(), [&values, sum](size_t i) { values[i] = sum % 7; });
    const long next = std::accumulate(values.begin(), values.end(), 0L);
    ASSERT_EQ(next, 64 * (sum % 7));
    values.assign(64, round);
  }
}

TEST(ThreadPoolTest, TwoThreadsWorkAtTheSameTime) {
  ThreadPool pool(2);
  // Each of two tasks waits for the other: with one thread this would never end.
  std::atomic<int> arrived{0};
  pool.ParallelFor(2, [&arrived](size_t) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST(ThreadPoolTest, OneThreadIsTheCaller) {
  ThreadPool pool(1);
  std::set<std::thread::id> ids;
  pool.ParallelFor(10, [&ids](size_t) { ids.insert(std::this_thread::get_id()); });
  EXPECT_EQ(ids, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ThreadPoolTest, APoolThatNeverWorkedCanBeDestroyed) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

}  // namespace
}  // namespace okv
