// Control::Reserve: reservations, placement and the room they promise.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "proto/ticket.h"
#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::IsStatus;
using testing_support::kSecondNanos;
using testing_support::kTenant;

TEST(ReserveTest, ReservationIsSignedForTheNodeItNames) {
  ControlHarness h;
  h.Open();
  const auto registration =
      h.control().RegisterNode({.node_id = "a",
                                .data_address = "a:1",
                                .metrics_address = "",
                                .tiers = {{.tier = "dram", .capacity_bytes = 1 << 30}}});
  ASSERT_TRUE(registration.ok());
  const auto keys = ChainKeys(0, 1);
  const PlacementAnswer answer = h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w");
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.node.node_id, "a");
  EXPECT_EQ(answer.node.data_address, "a:1");
  const auto opened =
      OpenReservation(answer.reservation, registration->ticket_key, h.clock().WallMicros());
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tenant, kTenant);
  EXPECT_EQ(opened->format_id, h.format_id());
  EXPECT_EQ(opened->object, (ObjectId{keys[0], Codec::kBf16}));
  EXPECT_EQ(opened->node_id, "a");
  EXPECT_EQ(opened->write_id, answer.write_id);
  EXPECT_EQ(opened->expires_wall_us, h.clock().WallMicros() + 30'000'000);
}

TEST(ReserveTest, SameWriteGroupGetsTheSameAnswerAndAnotherIsAborted) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  h.AddNode("b");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  const PlacementAnswer first = h.ReserveOne(object, "tp-group");
  const PlacementAnswer again = h.ReserveOne(object, "tp-group");
  EXPECT_EQ(again.write_id, first.write_id);
  EXPECT_EQ(again.node.node_id, first.node.node_id);
  EXPECT_EQ(h.control().Status().reservations_count, 1u);
  EXPECT_THAT(h.ReserveOne(object, "other").status,
              IsStatus(StatusCode::kAborted, "another writer"));
  // The other codec of the same block is another object.
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kInt2), "other").status.ok());
}

TEST(ReserveTest, OtherTenantsReservationOfTheSameKeyBlocksNobody) {
  ControlHarness h;
  h.Open();
  h.Open("rival");
  h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16, "rival"), "squatter").status.ok());
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
}

TEST(ReserveTest, StoredObjectAlreadyExistsUntilItIsLost) {
  ControlHarness h;
  h.Open();
  const NodeEpoch node = h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  ASSERT_TRUE(h.ReserveOne(object, "w").status.ok());
  ASSERT_TRUE(h.control().ReportCommits(node, {object}, {}).ok());
  EXPECT_EQ(h.control().Status().reservations_count, 0u);
  EXPECT_EQ(h.ReserveOne(object, "w").status.code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(h.ReserveOne(object, "x").status.code(), StatusCode::kAlreadyExists);
  ASSERT_TRUE(h.control().ReportCommits(node, {}, {object.id}).ok());
  EXPECT_TRUE(h.ReserveOne(object, "x").status.ok());
}

TEST(ReserveTest, ExpiryFreesTheObjectForOthers) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  const PlacementAnswer first = h.ReserveOne(object, "dead writer");
  h.clock().AdvanceNanos(30 * kSecondNanos - 1);
  EXPECT_EQ(h.ReserveOne(object, "other").status.code(), StatusCode::kAborted);
  h.clock().AdvanceNanos(1);
  const PlacementAnswer second = h.ReserveOne(object, "other");
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_GT(second.write_id, first.write_id);
  EXPECT_EQ(h.control().Status().reservations_count, 1u);
}

TEST(ReserveTest, SweepGivesTheRoomOfExpiredReservationsBack) {
  ControlHarness h;
  h.Open();
  const uint64_t bytes = h.block_bytes(Codec::kBf16);
  NodeEpoch node = h.AddNode("a", 2 * bytes);
  const auto keys = ChainKeys(0, 3);
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.ok());
  EXPECT_THAT(h.ReserveOne(h.Object(keys, 2, Codec::kBf16), "w").status,
              IsStatus(StatusCode::kResourceExhausted, "no node has"));
  for (int second = 0; second < 31; ++second) {
    h.clock().AdvanceNanos(kSecondNanos);
    ASSERT_TRUE(h.control().Heartbeat(node, {{.tier = "dram", .capacity_bytes = 2 * bytes}}));
  }
  h.control().Sweep();
  EXPECT_EQ(h.control().Status().reservations_count, 0u);
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 2, Codec::kBf16), "w").status.ok());
}

TEST(ReserveTest, AskingAgainLateExtendsTheReservation) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  const PlacementAnswer first = h.ReserveOne(object, "slow");
  h.clock().AdvanceNanos(20 * kSecondNanos);
  h.AddNode("a");
  const PlacementAnswer again = h.ReserveOne(object, "slow");
  EXPECT_EQ(again.write_id, first.write_id);
  EXPECT_EQ(again.expires_wall_us, h.clock().WallMicros() + 30'000'000);
  h.clock().AdvanceNanos(20 * kSecondNanos);
  h.AddNode("a");
  h.control().Sweep();
  EXPECT_EQ(h.ReserveOne(object, "other").status.code(), StatusCode::kAborted);
}

TEST(ReserveTest, RoomOfACommitIsTakenUntilTheHeartbeatCountsIt) {
  ControlHarness h;
  h.Open();
  const uint64_t bytes = h.block_bytes(Codec::kBf16);
  const NodeEpoch node = h.AddNode("a", bytes);
  const auto keys = ChainKeys(0, 2);
  ASSERT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
  ASSERT_TRUE(h.control().ReportCommits(node, {h.Object(keys, 0, Codec::kBf16)}, {}).ok());
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(h.control().Heartbeat(
      node, {{.tier = "dram", .capacity_bytes = 3 * bytes, .used_bytes = bytes}}));
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.ok());
}

TEST(ReserveTest, ReplicaOnAnotherNodeLeavesTheWriteUnderWayAlone) {
  ControlHarness h;
  h.Open();
  const NodeEpoch a = h.AddNode("a");
  const NodeEpoch b = h.AddNode("b");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  const PlacementAnswer answer = h.ReserveOne(object, "w");
  const NodeEpoch& other = answer.node.node_id == "a" ? b : a;
  const NodeEpoch& chosen = answer.node.node_id == "a" ? a : b;
  ASSERT_TRUE(h.control().ReportCommits(other, {object}, {}).ok());
  EXPECT_EQ(h.control().Status().reservations_count, 1u);
  ASSERT_TRUE(h.control().ReportCommits(chosen, {object}, {}).ok());
  EXPECT_EQ(h.control().Status().reservations_count, 0u);
}

TEST(ReserveTest, WithoutALiveNodeItIsUnavailable) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 1);
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.code(),
            StatusCode::kUnavailable);
  h.AddNode("a");
  h.clock().AdvanceNanos(6 * kSecondNanos);
  h.control().Sweep();
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.code(),
            StatusCode::kUnavailable);
}

TEST(ReserveTest, ReservationOnALostNodeMovesUnderANewWriteId) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  const PlacementAnswer first = h.ReserveOne(object, "w");
  EXPECT_EQ(first.node.node_id, "a");
  h.clock().AdvanceNanos(6 * kSecondNanos);
  h.control().Sweep();
  h.AddNode("b");
  const PlacementAnswer second = h.ReserveOne(object, "w");
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.node.node_id, "b");
  EXPECT_NE(second.write_id, first.write_id);
}

TEST(ReserveTest, ReservationOnALostNodeBlocksNoOtherWriter) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 1);
  const ObjectAnnouncement object = h.Object(keys, 0, Codec::kBf16);
  ASSERT_TRUE(h.ReserveOne(object, "w").status.ok());
  h.clock().AdvanceNanos(6 * kSecondNanos);
  h.control().Sweep();
  h.AddNode("b");
  EXPECT_EQ(h.ReserveOne(object, "other").node.node_id, "b");
}

TEST(ReserveTest, WriteIdsAreUniqueAcrossRestarts) {
  ControlHarness h;
  h.Open();
  std::set<uint64_t> seen;
  for (uint32_t life = 0; life < 5; ++life) {
    h.AddNode("a");
    const auto keys = ChainKeys(life, 20);
    for (uint32_t i = 0; i < 20; ++i) {
      const PlacementAnswer answer = h.ReserveOne(h.Object(keys, i, Codec::kBf16), "w");
      ASSERT_TRUE(answer.status.ok());
      EXPECT_TRUE(seen.insert(answer.write_id.value()).second);
    }
    h.Restart();
  }
}

TEST(ReserveTest, ChainStaysOnOneNodeInBothCodecsWhileItHasRoom) {
  ControlHarness h;
  h.Open();
  for (const char* node : {"a", "b", "c"}) h.AddNode(node);
  for (uint32_t sequence = 0; sequence < 10; ++sequence) {
    const auto keys = ChainKeys(sequence, 30);
    std::vector<ObjectAnnouncement> objects;
    for (uint32_t i = 0; i < 30; ++i) {
      objects.push_back(h.Object(keys, i, i % 2 ? Codec::kBf16 : Codec::kInt2));
      objects.push_back(h.Object(keys, i, i % 2 ? Codec::kInt2 : Codec::kBf16));
    }
    const auto answers = h.control().Reserve(kTenant, h.format_id(), "w", objects);
    ASSERT_TRUE(answers.ok());
    std::set<std::string> nodes;
    for (const PlacementAnswer& answer : *answers) nodes.insert(answer.node.node_id);
    EXPECT_EQ(nodes.size(), 1u);
  }
}

TEST(ReserveTest, ChainFollowsItsStoredParentAndMovesOnWhenThatNodeIsFull) {
  ControlHarness h;
  h.Open();
  const uint64_t bytes = h.block_bytes(Codec::kBf16);
  const NodeEpoch small = h.AddNode("small", 2 * bytes);
  h.AddNode("large", 1000 * bytes);
  const auto keys = ChainKeys(0, 4);
  ASSERT_TRUE(h.control().ReportCommits(small, {h.Object(keys, 0, Codec::kBf16)}, {}).ok());
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").node.node_id, "small");
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 2, Codec::kBf16), "w").node.node_id, "small");
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 3, Codec::kBf16), "w").node.node_id, "large");
}

TEST(ReserveTest, BadRequestsAreTheCallersBug) {
  ControlHarness h;
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 2);
  const auto reserve = [&](const ObjectAnnouncement& object, const std::string& group) {
    return h.control().Reserve(object.tenant, object.format_id, group, {object}).status();
  };
  ObjectAnnouncement object = h.Object(keys, 1, Codec::kInt2);
  EXPECT_THAT(reserve(object, ""), IsStatus(StatusCode::kInvalidArgument, "write_group"));
  EXPECT_THAT(reserve(object, std::string(2000, 'g')),
              IsStatus(StatusCode::kInvalidArgument, "write_group"));
  object.payload_bytes -= 1;
  EXPECT_THAT(reserve(object, "w"), IsStatus(StatusCode::kInvalidArgument, "payload_bytes"));
  object = h.Object(keys, 1, Codec::kInt2);
  object.parent.reset();
  EXPECT_THAT(reserve(object, "w"), IsStatus(StatusCode::kInvalidArgument, "lacks its parent"));
  object = h.Object(keys, 0, Codec::kInt2);
  object.parent = keys[1];
  EXPECT_THAT(reserve(object, "w"), IsStatus(StatusCode::kInvalidArgument, "has a parent"));
  object = h.Object(keys, 0, Codec::kInt2);
  object.tenant = "";
  EXPECT_THAT(reserve(object, "w"), IsStatus(StatusCode::kInvalidArgument, "tenant"));
  EXPECT_EQ(h.control().Status().reservations_count, 0u);
}

TEST(ReserveTest, TooManyOpenReservationsIsBackOff) {
  ControlHarness h(ControlOptions{.reservations_max = 2});
  h.Open();
  h.AddNode("a");
  const auto keys = ChainKeys(0, 3);
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.ok());
  EXPECT_THAT(h.ReserveOne(h.Object(keys, 2, Codec::kBf16), "w").status,
              IsStatus(StatusCode::kResourceExhausted, "open reservations"));
  EXPECT_TRUE(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.ok());
}

TEST(ReserveTest, StateThatCannotBeWrittenIsUnavailableAndNothingIsReserved) {
  ControlHarness h;
  h.Open();
  h.Restart();  // The next id needs the mark to move.
  h.state().FailWrites(true);
  EXPECT_EQ(
      h.control()
          .RegisterNode({.node_id = "n", .data_address = "n:1", .metrics_address = "", .tiers = {}})
          .status()
          .code(),
      StatusCode::kUnavailable);
  EXPECT_TRUE(h.control().Status().nodes.empty());
  Format other = h.format();
  other.recent_tokens = 128;
  EXPECT_EQ(h.control().OpenSession(kTenant, other.Canonical()).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(h.control().Status().formats_count, 1u);
  h.state().FailWrites(false);
  h.AddNode("n");
  EXPECT_TRUE(h.control().OpenSession(kTenant, other.Canonical()).ok());
}

TEST(IdAllocatorTest, NeverGivesAnIdTwiceOrWithoutADurableMark) {
  testing_support::MemoryState state;
  uint64_t last = 0;
  {
    const auto ids = IdAllocator::Open(&state);
    ASSERT_TRUE(ids.ok());
    for (int i = 0; i < 1'000'002; ++i) {  // Crosses the end of a million.
      const auto id = (*ids)->Next();
      ASSERT_TRUE(id.ok());
      ASSERT_EQ(*id, last + 1);
      last = *id;
    }
  }
  state.FailWrites(true);
  const auto ids = IdAllocator::Open(&state);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ((*ids)->Next().status().code(), StatusCode::kUnavailable);
  state.FailWrites(false);
  const auto id = (*ids)->Next();
  ASSERT_TRUE(id.ok());
  EXPECT_GT(*id, last);
  ASSERT_TRUE(state.Put("ids_end", "garbage").ok());
  EXPECT_EQ(IdAllocator::Open(&state).status().code(), StatusCode::kDataLoss);
}

}  // namespace
}  // namespace okv
