#include "control_plane/node_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "control_plane/placement.h"
#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::IsEmpty;
using testing_support::IsStatus;
using testing_support::TestKey;

NodeDescription Describe(const std::string& node_id, uint64_t capacity_bytes = 100) {
  NodeDescription node;
  node.node_id = node_id;
  node.data_address = node_id + ":1";
  node.tiers = {{.tier = "dram", .capacity_bytes = capacity_bytes}};
  return node;
}

TEST(NodeTableTest, OnlyTheLatestEpochIsCurrent) {
  NodeTable nodes;
  const NodeSlot slot = nodes.Register(Describe("a"), 7, 0)->slot;
  ASSERT_TRUE(nodes.FindCurrent("a", 7).ok());
  EXPECT_EQ((*nodes.FindCurrent("a", 7))->slot, slot);
  EXPECT_THAT(nodes.FindCurrent("a", 8).status(), IsStatus(StatusCode::kAborted, "'a'"));
  EXPECT_THAT(nodes.FindCurrent("b", 7).status(), IsStatus(StatusCode::kAborted, "'b'"));

  EXPECT_EQ(nodes.Register(Describe("a"), 9, 0)->slot, slot) << "a node keeps its slot";
  EXPECT_TRUE(nodes.FindCurrent("a", 9).ok());
  EXPECT_THAT(nodes.FindCurrent("a", 7).status(),
              IsStatus(StatusCode::kAborted, "epoch 7 is over, it registered again as 9"));
  EXPECT_EQ(nodes.nodes().size(), 1u);
}

TEST(NodeTableTest, KnownNodeIsNotCurrentUnderAnyEpochUntilItRegisters) {
  NodeTable nodes;
  nodes.AddKnown(Describe("a"), 0);
  ASSERT_NE(nodes.Find("a"), nullptr);
  EXPECT_FALSE(nodes.Find("a")->alive);
  EXPECT_EQ(nodes.alive_count(), 0u);
  // Epoch 0 is what a message without the field has.
  EXPECT_THAT(nodes.FindCurrent("a", 0).status(), IsStatus(StatusCode::kAborted, "not registered"));
  nodes.Register(Describe("a"), 1, 0);
  EXPECT_TRUE(nodes.FindCurrent("a", 1).ok());
  EXPECT_EQ(nodes.alive_count(), 1u);
}

TEST(NodeTableTest, ExpiryTakesWhoWasSilentBeforeTheDeadlineAndNamesEachOnce) {
  NodeTable nodes;
  const NodeSlot early = nodes.Register(Describe("early"), 1, 99)->slot;
  const NodeSlot at = nodes.Register(Describe("at"), 2, 100)->slot;
  EXPECT_THAT(nodes.Expire(99), IsEmpty());
  EXPECT_THAT(nodes.Expire(100), ElementsAre(early));
  EXPECT_THAT(nodes.Expire(100), IsEmpty());
  EXPECT_THAT(nodes.FindCurrent("early", 1).status(), IsStatus(StatusCode::kAborted, "given up"));
  EXPECT_TRUE(nodes.at(at).alive);
  nodes.Register(Describe("early"), 3, 100);
  EXPECT_TRUE(nodes.FindCurrent("early", 3).ok());
  EXPECT_EQ(nodes.alive_count(), 2u);
}

TEST(NodeTableTest, RegistrationKeepsOpenReservationsAndForgetsCountedCommits) {
  NodeTable nodes;
  NodeState* node = nodes.Register(Describe("a", 100), 1, 0);
  node->reserved_bytes = 30;
  node->committed_bytes = 50;
  EXPECT_EQ(node->FreeBytes(), 20u);
  EXPECT_EQ(nodes.Register(Describe("a", 100), 2, 0)->FreeBytes(), 70u);
}

TEST(PlacementTest, NewNodeTakesItsShareAndMovesNothingElse) {
  constexpr uint32_t kKeys = 4000;
  NodeTable nodes;
  for (uint32_t i = 0; i < 4; ++i) nodes.Register(Describe(std::to_string(i), 1 << 20), i + 1, 0);
  std::vector<NodeSlot> before;
  for (uint32_t i = 0; i < kKeys; ++i) {
    before.push_back(*PlaceObject(nodes, {}, TestKey(i, 0), 1));
  }
  const NodeSlot added = nodes.Register(Describe("new", 1 << 20), 9, 0)->slot;
  uint32_t moved = 0;
  for (uint32_t i = 0; i < kKeys; ++i) {
    const NodeSlot now = *PlaceObject(nodes, {}, TestKey(i, 0), 1);
    if (now == before[i]) continue;
    EXPECT_EQ(now, added) << "key " << i << " moved between old nodes";
    ++moved;
  }
  // A fifth is 800; the keys are fixed, so this never flickers. Four sigma is 101.
  EXPECT_NEAR(moved, kKeys / 5, 101);
}

}  // namespace
}  // namespace okv
