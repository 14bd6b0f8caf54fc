// Control's part of draining a node.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::IsStatus;
using testing_support::kTenant;

class ControlDrainTest : public testing::Test {
 protected:
  ControlDrainTest() { h_.Open(); }
  PlacementAnswer ReserveMove(const MoveSource& source, const ObjectAnnouncement& object) {
    const auto answers = h_.control().ReserveMoves(source, kTenant, h_.format_id(), {object});
    PlacementAnswer refused;
    refused.status = answers.status();
    return answers.ok() ? answers->front() : refused;
  }

  ControlHarness h_;
  const std::vector<BlockKey> keys_ = ChainKeys(0, 4);
};

TEST_F(ControlDrainTest, NothingIsPlacedOnADrainedNodeUntilItIsUndrainedAlsoOverARestart) {
  h_.AddNode("a");
  ASSERT_TRUE(h_.control().DrainNode("a", 1000).ok());
  const ObjectAnnouncement object = h_.Object(keys_, 0, Codec::kBf16);
  EXPECT_THAT(h_.ReserveOne(object, "w").status, IsStatus(StatusCode::kResourceExhausted, "free"));
  h_.Restart();
  h_.Open();
  const NodeEpoch a = h_.AddNode("a");
  EXPECT_THAT(h_.ReserveOne(object, "w").status, IsStatus(StatusCode::kResourceExhausted, "free"));
  EXPECT_EQ(h_.control().ExchangeDrain(a, {}).limit_ms, 1000u);
  ASSERT_TRUE(h_.control().CancelDrain("a").ok());
  EXPECT_EQ(h_.control().ExchangeDrain(a, {}).id, 0u);
  EXPECT_TRUE(h_.ReserveOne(object, "w").status.ok());
  h_.Restart();
  h_.Open();
  h_.AddNode("a");
  EXPECT_TRUE(h_.ReserveOne(object, "w").status.ok());
}

TEST_F(ControlDrainTest, AnOpenReservationOnADrainedNodeIsReplacedByOneElsewhere) {
  h_.AddNode("a");
  const ObjectAnnouncement object = h_.Object(keys_, 0, Codec::kBf16);
  ASSERT_EQ(h_.ReserveOne(object, "w").node.node_id, "a");
  h_.AddNode("b");
  ASSERT_TRUE(h_.control().DrainNode("a", 1000).ok());
  EXPECT_EQ(h_.ReserveOne(object, "w").node.node_id, "b");
  EXPECT_EQ(h_.control().Status().reservations_count, 1u);
}

TEST_F(ControlDrainTest, OnlyCopiesOnNodesThatStayCountForAMove) {
  const NodeEpoch a = h_.AddNode("a");
  const NodeEpoch b = h_.AddNode("b");
  h_.AddNode("c");
  const ObjectAnnouncement object = h_.Object(keys_, 0, Codec::kBf16);
  ASSERT_TRUE(h_.control().ReportCommits(a, {object}, {}).ok());
  ASSERT_TRUE(h_.control().ReportCommits(b, {object}, {}).ok());
  EXPECT_THAT(ReserveMove({.node = a, .avoid_node_ids = {}}, object).status,
              IsStatus(StatusCode::kFailedPrecondition, "not being drained"));
  ASSERT_TRUE(h_.control().DrainNode("a", 1000).ok());
  EXPECT_THAT(ReserveMove({.node = a, .avoid_node_ids = {}}, object).status,
              IsStatus(StatusCode::kAlreadyExists, "stored"));
  ASSERT_TRUE(h_.control().DrainNode("b", 1000).ok());
  EXPECT_EQ(ReserveMove({.node = a, .avoid_node_ids = {}}, object).node.node_id, "c");
  // Two that are drained do not write it twice.
  EXPECT_THAT(ReserveMove({.node = b, .avoid_node_ids = {}}, object).status,
              IsStatus(StatusCode::kAborted, "another writer"));
  // For a worker it is stored all the same.
  EXPECT_THAT(h_.ReserveOne(object, "w").status, IsStatus(StatusCode::kAlreadyExists, "stored"));
  EXPECT_THAT(
      ReserveMove({.node = {.node_id = "a", .epoch = a.epoch + 1000}, .avoid_node_ids = {}}, object)
          .status,
      IsStatus(StatusCode::kAborted, ""));
}

TEST_F(ControlDrainTest, ANodeToAvoidGetsNothingAndLosesWhatIsReservedThere) {
  const NodeEpoch a = h_.AddNode("a");
  h_.AddNode("b");
  const ObjectAnnouncement object = h_.Object(keys_, 0, Codec::kBf16);
  ASSERT_TRUE(h_.control().ReportCommits(a, {object}, {}).ok());
  ASSERT_TRUE(h_.control().DrainNode("a", 1000).ok());
  ASSERT_EQ(ReserveMove({.node = a, .avoid_node_ids = {}}, object).node.node_id, "b");
  EXPECT_THAT(ReserveMove({.node = a, .avoid_node_ids = {"b", "nobody"}}, object).status,
              IsStatus(StatusCode::kResourceExhausted, "free"));
  EXPECT_EQ(h_.control().Status().reservations_count, 0u);
  h_.AddNode("c");
  EXPECT_EQ(ReserveMove({.node = a, .avoid_node_ids = {"b"}}, object).node.node_id, "c");
}

TEST_F(ControlDrainTest, WhatANodeSaysOfAnEarlierDrainIsNotShown) {
  const NodeEpoch a = h_.AddNode("a");
  const uint64_t first = *h_.control().DrainNode("a", 1000);
  const uint64_t second = *h_.control().DrainNode("a", 2000);
  EXPECT_NE(first, second);
  DrainReport progress;
  progress.id = first;
  progress.objects_left = 7;
  EXPECT_EQ(h_.control().ExchangeDrain(a, progress).id, second);
  EXPECT_EQ(h_.control().Status().nodes[0].state.drain_report.objects_left, 0u);
  progress.id = second;
  h_.control().ExchangeDrain(a, progress);
  EXPECT_EQ(h_.control().Status().nodes[0].state.drain_report.objects_left, 7u);
}

TEST_F(ControlDrainTest, TwoOrdersAtOnceLeaveTheSameOnDiskAndInMemory) {
  h_.AddNode("a");
  ASSERT_TRUE(h_.control().DrainNode("a", 1000).ok());  // Ids for the next are leased.
  std::promise<void> ended;
  std::thread other;
  h_.state().AfterNextPut([&] {
    other = std::thread([&] {
      EXPECT_TRUE(h_.control().CancelDrain("a").ok());
      ended.set_value();
    });
    // It cannot end while this order is being stored: what would be lost is awaited in vain.
    ended.get_future().wait_for(std::chrono::milliseconds(300));
  });
  ASSERT_TRUE(h_.control().DrainNode("a", 2000).ok());
  other.join();
  const bool draining = h_.control().Status().nodes[0].state.draining();
  EXPECT_FALSE(draining);
  h_.Restart();
  h_.Open();
  EXPECT_EQ(h_.control().Status().nodes[0].state.draining(), draining);
}

TEST_F(ControlDrainTest, ANodeThatIsNotKnownAndAStateThatIsFullAreErrors) {
  EXPECT_THAT(h_.control().DrainNode("a", 1000).status(), IsStatus(StatusCode::kNotFound, "'a'"));
  EXPECT_THAT(h_.control().CancelDrain("a"), IsStatus(StatusCode::kNotFound, "'a'"));
  h_.AddNode("a");
  h_.state().FailWrites(true);
  EXPECT_THAT(h_.control().DrainNode("a", 1000).status(), IsStatus(StatusCode::kUnavailable, ""));
  EXPECT_FALSE(h_.control().Status().nodes[0].state.draining());
}

}  // namespace
}  // namespace okv
