#include "control_plane/placement.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/control_plane/keys.h"

namespace okv {
namespace {

using testing_support::TestKey;

constexpr uint64_t kGiB = uint64_t{1} << 30;

// A table of nodes "0", "1", ... with so many bytes free.
NodeTable Nodes(const std::vector<uint64_t>& free_bytes) {
  NodeTable nodes;
  for (size_t i = 0; i < free_bytes.size(); ++i) {
    NodeDescription node;
    node.node_id = std::to_string(i);
    node.tiers = {{.tier = "dram", .capacity_bytes = free_bytes[i]}};
    nodes.Register(node, i + 1, 0);
  }
  return nodes;
}

std::vector<uint32_t> Place(const NodeTable& nodes, uint32_t keys_count) {
  std::vector<uint32_t> places;
  for (uint32_t i = 0; i < keys_count; ++i) {
    places.push_back(PlaceObject(nodes, {}, TestKey(i, 0), 1)->value());
  }
  return places;
}

TEST(PlacementTest, KeysSpreadByFreeBytes) {
  constexpr uint32_t kKeys = 20'000;
  std::map<uint32_t, double> share;
  for (const uint32_t node : Place(Nodes({kGiB, 2 * kGiB, 5 * kGiB}), kKeys)) {
    share[node] += 1.0 / kKeys;
  }
  // Three sigma of 20,000 draws is 0.011.
  EXPECT_NEAR(share[0], 0.125, 0.011);
  EXPECT_NEAR(share[1], 0.25, 0.011);
  EXPECT_NEAR(share[2], 0.625, 0.011);
}

TEST(PlacementTest, LossOfANodeMovesOnlyItsKeys) {
  const auto before = Place(Nodes({kGiB, kGiB, kGiB, kGiB}), 4000);
  const auto after = Place(Nodes({kGiB, kGiB, kGiB, 0}), 4000);
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] == 3) {
      EXPECT_NE(after[i], 3u);
    } else {
      EXPECT_EQ(after[i], before[i]);
    }
  }
}

TEST(PlacementTest, FirstPreferredNodeWithRoomWins) {
  const NodeTable nodes = Nodes({100, 10, 100});
  const BlockKey key = TestKey(0, 0);
  EXPECT_EQ(PlaceObject(nodes, {NodeSlot(2), NodeSlot(0)}, key, 50), NodeSlot(2));
  EXPECT_EQ(PlaceObject(nodes, {NodeSlot(1), NodeSlot(0)}, key, 50), NodeSlot(0));
}

TEST(PlacementTest, DeadAndFullNodesGetNothing) {
  NodeTable nodes = Nodes({100, 100});
  nodes.at(NodeSlot(0)).alive = false;
  for (uint32_t i = 0; i < 50; ++i) {
    EXPECT_EQ(PlaceObject(nodes, {NodeSlot(0)}, TestKey(i, 0), 100), NodeSlot(1));
  }
  nodes.at(NodeSlot(1)).reserved_bytes = 60;
  EXPECT_EQ(PlaceObject(nodes, {}, TestKey(0, 0), 40), NodeSlot(1));
  EXPECT_EQ(PlaceObject(nodes, {}, TestKey(0, 0), 41), std::nullopt);
  nodes.at(NodeSlot(1)).committed_bytes = 60;
  EXPECT_EQ(nodes.at(NodeSlot(1)).FreeBytes(), 0u);
  EXPECT_EQ(PlaceObject(NodeTable(), {}, TestKey(0, 0), 1), std::nullopt);
}

TEST(PlacementTest, FreeBytesIsTheSumOfTiersAndNeverWrapsAround) {
  NodeState node;
  node.description.tiers = {{.tier = "dram", .capacity_bytes = 100, .used_bytes = 150},
                            {.tier = "disk", .capacity_bytes = 1000, .used_bytes = 400}};
  EXPECT_EQ(node.FreeBytes(), 600u);
  node.reserved_bytes = 700;
  EXPECT_EQ(node.FreeBytes(), 0u);
}

}  // namespace
}  // namespace okv
