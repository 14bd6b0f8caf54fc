#include "cache_node/turn_queue.h"

#include "gtest/gtest.h"

namespace okv {
namespace {

using Item = std::pair<uint64_t, int>;

TEST(TurnQueueTest, OneItemWaitsBehindAtMostOneOfAGreedySession) {
  TurnQueue<int> queue;
  for (int i = 0; i < 5000; ++i) queue.Add(1, i);
  int greedy = 0;
  for (int round = 0; round < 100; ++round) {
    queue.Add(2, round);
    int waited = 0;
    while (true) {
      const auto next = queue.Next();
      ASSERT_TRUE(next.has_value());
      if (next->first == 2) {
        EXPECT_EQ(next->second, round);
        break;
      }
      EXPECT_EQ(next->second, greedy++);  // In its own order.
      ++waited;
    }
    EXPECT_LE(waited, 1);
  }
}

TEST(TurnQueueTest, EverySessionGetsOneOfEachRound) {
  TurnQueue<int> queue;
  for (uint64_t session = 1; session <= 3; ++session) {
    for (int i = 0; i < 2; ++i) queue.Add(session, i);
  }
  for (int i = 0; i < 2; ++i) {
    for (uint64_t session = 1; session <= 3; ++session) EXPECT_EQ(queue.Next(), Item(session, i));
  }
  EXPECT_EQ(queue.Next(), std::nullopt);
}

TEST(TurnQueueTest, WhatIsDroppedIsNotHandedOut) {
  TurnQueue<int> queue;
  queue.Add(1, 10);
  queue.Add(2, 20);
  queue.Add(1, 11);
  EXPECT_EQ(queue.Drop(1), (std::deque<int>{10, 11}));
  EXPECT_TRUE(queue.Drop(1).empty());
  EXPECT_EQ(queue.Next(), Item(2, 20));
  EXPECT_EQ(queue.Next(), std::nullopt);
}

}  // namespace
}  // namespace okv
