#include "control_plane/control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/ticket.h"
#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing::IsEmpty;
using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::IsStatus;
using testing_support::kSecondNanos;
using testing_support::kTenant;

TEST(ControlOptionsTest, ValidateNamesTheField) {
  EXPECT_TRUE(ControlOptions().Validate().ok());
  EXPECT_THAT((ControlOptions{.heartbeat_interval_ms = 0}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "heartbeat_interval_ms"));
  EXPECT_THAT((ControlOptions{.heartbeat_interval_ms = 1000, .node_timeout_ms = 1999}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "node_timeout_ms"));
  EXPECT_THAT((ControlOptions{.reservation_timeout_ms = 0}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "reservation_timeout_ms"));
  EXPECT_THAT((ControlOptions{.ticket_lifetime_s = 0}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "ticket_lifetime_s"));
  EXPECT_THAT((ControlOptions{.nodes_max = 0}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "nodes_max"));
  EXPECT_THAT((ControlOptions{.reservations_max = 0}).Validate(),
              IsStatus(StatusCode::kInvalidArgument, "reservations_max"));
}

TEST(SessionTest, TicketOpensWithTheKeyThatNodesGetUntilItExpires) {
  ControlHarness h;
  const auto session = h.control().OpenSession(kTenant, h.format().Canonical());
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(session->format_id, h.format_id());
  const auto registration = h.control().RegisterNode(
      {.node_id = "a", .data_address = "a:1", .metrics_address = "", .tiers = {}});
  ASSERT_TRUE(registration.ok());
  const std::string& key = registration->ticket_key;
  EXPECT_EQ(key.size(), 32u);
  const int64_t now = h.clock().WallMicros();
  const auto ticket = OpenTicket(session->ticket, key, now);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  EXPECT_EQ(ticket->tenant, kTenant);
  EXPECT_EQ(ticket->format_id, h.format_id());
  EXPECT_EQ(session->ticket_expires_wall_us, now + int64_t{3600} * 1'000'000);
  EXPECT_FALSE(OpenTicket(session->ticket, key, session->ticket_expires_wall_us + 1).ok());
}

TEST(SessionTest, TenantsHaveDifferentSaltsThatAreNeverEmpty) {
  ControlHarness h;
  const auto a = h.control().OpenSession("a", h.format().Canonical());
  const auto b = h.control().OpenSession("b", h.format().Canonical());
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(a->tenant_salt, b->tenant_salt);
  EXPECT_NE(a->tenant_salt, "");
}

TEST(SessionTest, BadTenantsAndFormatsAreTheCallersBug) {
  ControlHarness h;
  const std::string format = h.format().Canonical();
  EXPECT_THAT(h.control().OpenSession("", format).status(),
              IsStatus(StatusCode::kInvalidArgument, "tenant is missing"));
  EXPECT_THAT(h.control().OpenSession(std::string(1025, 'x'), format).status(),
              IsStatus(StatusCode::kInvalidArgument, "tenant"));
  EXPECT_EQ(h.control().OpenSession(kTenant, "").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(h.control().OpenSession(kTenant, format.substr(0, 40)).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(h.control().Status().formats_count, 0u);
}

TEST(SessionTest, UnknownRotationSetIsNamed) {
  ControlHarness h;
  Format format = h.format();
  format.rotation_hash.bytes[0] ^= 1;
  EXPECT_THAT(h.control().OpenSession(kTenant, format.Canonical()).status(),
              IsStatus(StatusCode::kFailedPrecondition, "rotation_hash"));
}

TEST(SessionTest, MismatchWithTheRotationSetNamesTheField) {
  ControlHarness h;
  Format format = h.format();
  format.weights_revision = "other";
  EXPECT_THAT(h.control().OpenSession(kTenant, format.Canonical()).status(),
              IsStatus(StatusCode::kFailedPrecondition, "weights_revision"));
  format = h.format();
  format.kv_heads = 4;
  EXPECT_THAT(h.control().OpenSession(kTenant, format.Canonical()).status(),
              IsStatus(StatusCode::kFailedPrecondition, "kv_heads"));
  format = h.format();
  format.group_size = 32;
  EXPECT_THAT(h.control().OpenSession(kTenant, format.Canonical()).status(),
              IsStatus(StatusCode::kFailedPrecondition, "group_size"));
}

TEST(SessionTest, CallsWithoutASessionsFormatAreRefused) {
  ControlHarness h;
  const auto keys = ChainKeys(0, 1);
  EXPECT_THAT(h.control().Lookup(kTenant, h.format_id(), keys).status(),
              IsStatus(StatusCode::kFailedPrecondition, "open a session first"));
  EXPECT_THAT(h.control().Reserve(kTenant, h.format_id(), "w", h.Objects(keys, 1)).status(),
              IsStatus(StatusCode::kFailedPrecondition, "open a session first"));
  h.Open();
  EXPECT_TRUE(h.control().Lookup(kTenant, h.format_id(), keys).ok());
}

TEST(SessionTest, FormatSurvivesARestart) {
  ControlHarness h;
  h.Open();
  h.Restart();
  EXPECT_TRUE(h.control().Lookup(kTenant, h.format_id(), ChainKeys(0, 1)).ok());
}

TEST(LookupTest, FindsWhatNodesCommittedAndNamesTheirAddresses) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 6);
  const NodeEpoch a = h.AddNode("a");
  const NodeEpoch b = h.AddNode("b");
  ASSERT_TRUE(h.control().ReportCommits(a, h.Objects(keys, 4), {}).ok());
  ASSERT_TRUE(h.control().ReportCommits(b, {h.Object(keys, 3, Codec::kBf16)}, {}).ok());
  const LookupAnswer answer = h.Lookup(keys);
  EXPECT_EQ(answer.prefix_blocks, 1u);
  EXPECT_EQ(answer.resume_boundary, 4u);
  ASSERT_EQ(answer.locations.size(), 5u);
  std::set<std::string> last;
  for (const auto& location : answer.locations) {
    ASSERT_LT(location.node, answer.nodes.size());
    const NodeAddressInfo& node = answer.nodes[location.node];
    EXPECT_EQ(node.data_address, absl::StrCat(node.node_id, ":1"));
    if (location.block == 3) last.insert(node.node_id);
  }
  EXPECT_EQ(last, (std::set<std::string>{"a", "b"}));
}

TEST(LookupTest, RemovedObjectIsGone) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 3);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 3), {}).ok());
  ASSERT_TRUE(h.control().ReportCommits(node, {}, {{keys[1], Codec::kBf16}}).ok());
  EXPECT_EQ(h.Resume(keys), 1u);
}

TEST(LookupTest, OtherTenantSeesNothingOfTheSameKeys) {
  ControlHarness h;
  h.Open();
  h.Open("rival");
  const auto keys = ChainKeys(0, 3);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 3), {}).ok());
  EXPECT_EQ(h.Resume(keys), 3u);
  const LookupAnswer rival = h.Lookup(keys, "rival");
  EXPECT_EQ(rival.resume_boundary, 0u);
  EXPECT_EQ(rival.prefix_blocks, 0u);
  EXPECT_THAT(rival.nodes, IsEmpty());
}

TEST(LookupTest, OtherFormatSeesNothingOfTheSameKeys) {
  ControlHarness h;
  h.Open();
  Format other = h.format();
  other.recent_tokens = 128;
  ASSERT_TRUE(h.control().OpenSession(kTenant, other.Canonical()).ok());
  const auto keys = ChainKeys(0, 3);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 3), {}).ok());
  const auto answer = h.control().Lookup(kTenant, other.id(), keys);
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->resume_boundary, 0u);
}

TEST(NodeTest, SilentNodeVanishesFromLookupsAndItsReportsAreRefused) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 3);
  const NodeEpoch a = h.AddNode("a");
  const NodeEpoch b = h.AddNode("b");
  ASSERT_TRUE(h.control().ReportCommits(a, h.Objects(keys, 3), {}).ok());
  ASSERT_TRUE(h.control().ReportCommits(b, h.Objects(keys, 2), {}).ok());
  h.clock().AdvanceNanos(4 * kSecondNanos);
  EXPECT_TRUE(h.control().Heartbeat(b, {}));
  h.clock().AdvanceNanos(2 * kSecondNanos);
  h.control().Sweep();
  EXPECT_EQ(h.Resume(keys), 2u);
  const ClusterStatus status = h.control().Status();
  EXPECT_EQ(status.objects_count, 2u);
  EXPECT_FALSE(status.nodes[0].state.alive);
  EXPECT_EQ(status.nodes[0].objects_count, 0u);
  EXPECT_EQ(status.nodes[0].heartbeat_age_ms, 6000);
  EXPECT_TRUE(status.nodes[1].state.alive);
  EXPECT_FALSE(h.control().Heartbeat(a, {})) << "it must register again";
  EXPECT_THAT(h.control().ReportCommits(a, h.Objects(keys, 3), {}),
              IsStatus(StatusCode::kAborted, "register again"));
}

TEST(NodeTest, NewRegistrationFencesTheOldEpoch) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 3);
  const NodeEpoch old = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(old, h.Objects(keys, 3), {}).ok());
  const NodeEpoch now = h.AddNode("a");
  EXPECT_GT(now.epoch, old.epoch);
  EXPECT_EQ(h.Resume(keys), 0u) << "its inventory says what it holds now";
  EXPECT_FALSE(h.control().Heartbeat(old, {}));
  EXPECT_THAT(h.control().ReportCommits(old, h.Objects(keys, 3), {}),
              IsStatus(StatusCode::kAborted, "registered again"));
  EXPECT_EQ(h.control().BeginInventory(old).status().code(), StatusCode::kAborted);
  EXPECT_TRUE(h.control().Heartbeat(now, {}));
  EXPECT_EQ(h.Resume(keys), 0u);
}

TEST(NodeTest, EpochOfAnEarlierControlPlaneIsNeverGivenAgain) {
  ControlHarness h;
  const NodeEpoch before = h.AddNode("a");
  h.Restart();
  EXPECT_FALSE(h.control().Heartbeat(before, {}));
  const NodeEpoch after = h.AddNode("a");
  EXPECT_GT(after.epoch, before.epoch);
  EXPECT_FALSE(h.control().Heartbeat(before, {})) << "a process left over from before";
}

TEST(NodeTest, KnownNodeIsShownDeadAfterARestartUntilItRegisters) {
  ControlHarness h;
  h.AddNode("a");
  h.Restart();
  ClusterStatus status = h.control().Status();
  ASSERT_EQ(status.nodes.size(), 1u);
  EXPECT_FALSE(status.nodes[0].state.alive);
  EXPECT_EQ(status.nodes[0].state.description.data_address, "a:1");
  h.AddNode("a");
  status = h.control().Status();
  ASSERT_EQ(status.nodes.size(), 1u);
  EXPECT_TRUE(status.nodes[0].state.alive);
}

TEST(NodeTest, BadDescriptionIsRefused) {
  ControlHarness h(ControlOptions{.nodes_max = 1});
  NodeDescription node;
  EXPECT_THAT(h.control().RegisterNode(node).status(),
              IsStatus(StatusCode::kInvalidArgument, "node_id"));
  node.node_id = "a";
  EXPECT_THAT(h.control().RegisterNode(node).status(),
              IsStatus(StatusCode::kInvalidArgument, "data_address"));
  node.data_address = "a:1";
  node.metrics_address = std::string(256, 'm');
  EXPECT_THAT(h.control().RegisterNode(node).status(),
              IsStatus(StatusCode::kInvalidArgument, "metrics_address"));
  node.metrics_address = "";
  node.tiers.resize(17);
  EXPECT_THAT(h.control().RegisterNode(node).status(),
              IsStatus(StatusCode::kInvalidArgument, "tiers"));
  node.tiers.clear();
  EXPECT_TRUE(h.control().RegisterNode(node).ok());
  node.node_id = "b";
  EXPECT_THAT(h.control().RegisterNode(node).status(),
              IsStatus(StatusCode::kResourceExhausted, "1 nodes are known"));
}

TEST(InventoryTest, ReplacesWhatTheIndexKnewOnceItIsComplete) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 6);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 5), {}).ok());
  const auto inventory = h.control().BeginInventory(node);
  ASSERT_TRUE(inventory.ok());
  ASSERT_TRUE(h.control().AddInventory(node, *inventory, h.Objects(keys, 2)).ok());
  EXPECT_EQ(h.Resume(keys), 5u) << "the old list serves until the new one is there";
  ASSERT_TRUE(h.control().EndInventory(node, *inventory).ok());
  EXPECT_EQ(h.Resume(keys), 2u);
  EXPECT_EQ(h.control().Status().objects_count, 2u);
  EXPECT_EQ(h.control().Status().nodes[0].objects_count, 2u);
}

TEST(InventoryTest, EmptyInventoryMeansTheNodeHoldsNothing) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 2);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 2), {}).ok());
  ASSERT_TRUE(h.SendInventory(node, {}).ok());
  EXPECT_EQ(h.Resume(keys), 0u);
}

TEST(InventoryTest, AbandonedInventoryChangesNothing) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 6);
  const NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 3), {}).ok());
  const auto inventory = h.control().BeginInventory(node);
  ASSERT_TRUE(inventory.ok());
  ASSERT_TRUE(h.control().AddInventory(node, *inventory, h.Objects(keys, 6)).ok());
  h.control().AbandonInventory(node, *inventory);
  EXPECT_EQ(h.Resume(keys), 3u);
  EXPECT_EQ(h.control().Status().objects_count, 3u);
  EXPECT_EQ(h.control().EndInventory(node, *inventory).code(), StatusCode::kAborted);
}

TEST(InventoryTest, SecondInventoryEndsTheFirst) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 6);
  const NodeEpoch node = h.AddNode("a");
  const auto first = h.control().BeginInventory(node);
  const auto second = h.control().BeginInventory(node);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(h.control().AddInventory(node, *first, h.Objects(keys, 6)).code(),
            StatusCode::kAborted);
  EXPECT_EQ(h.control().EndInventory(node, *first).code(), StatusCode::kAborted);
  h.control().AbandonInventory(node, *first);
  ASSERT_TRUE(h.control().AddInventory(node, *second, h.Objects(keys, 4)).ok());
  ASSERT_TRUE(h.control().EndInventory(node, *second).ok());
  EXPECT_EQ(h.Resume(keys), 4u);
}

TEST(InventoryTest, CommitsDuringAnInventoryAreKept) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 4);
  const NodeEpoch node = h.AddNode("a");
  const auto inventory = h.control().BeginInventory(node);
  ASSERT_TRUE(inventory.ok());
  ASSERT_TRUE(h.control().AddInventory(node, *inventory, h.Objects(keys, 2)).ok());
  ASSERT_TRUE(h.control()
                  .ReportCommits(node, {h.Object(keys, 2, Codec::kBf16)}, {{keys[1], Codec::kBf16}})
                  .ok());
  ASSERT_TRUE(h.control().EndInventory(node, *inventory).ok());
  const ClusterStatus status = h.control().Status();
  EXPECT_EQ(status.objects_count, 2u);
  EXPECT_EQ(h.Resume(keys), 1u);
}

TEST(InventoryTest, RestoresTheIndexAfterARestartOfTheControlPlane) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 64);
  NodeEpoch node = h.AddNode("a");
  ASSERT_TRUE(h.control().ReportCommits(node, h.Objects(keys, 64), {}).ok());
  h.Restart();
  EXPECT_EQ(h.Resume(keys), 0u);
  EXPECT_FALSE(h.control().Heartbeat(node, {})) << "register again";
  node = h.AddNode("a");
  ASSERT_TRUE(h.SendInventory(node, h.Objects(keys, 64)).ok());
  EXPECT_EQ(h.control().Status().objects_count, 64u);
  EXPECT_EQ(h.Lookup(keys).locations.size(), 5u) << "all are bf16: boundary 5 is the last";
}

TEST(InventoryTest, LongInventoryKeepsTheNodeAlive) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 4);
  const NodeEpoch node = h.AddNode("a");
  const auto inventory = h.control().BeginInventory(node);
  ASSERT_TRUE(inventory.ok());
  for (uint32_t i = 0; i < 4; ++i) {
    h.clock().AdvanceNanos(3 * kSecondNanos);
    h.control().Sweep();
    ASSERT_TRUE(h.control().AddInventory(node, *inventory, {h.Object(keys, i, Codec::kBf16)}).ok());
  }
  ASSERT_TRUE(h.control().EndInventory(node, *inventory).ok());
  EXPECT_EQ(h.Resume(keys), 4u);
}

TEST(InventoryTest, NodeLostDuringItsInventoryLeavesNothing) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, 4);
  const NodeEpoch node = h.AddNode("a");
  const auto inventory = h.control().BeginInventory(node);
  ASSERT_TRUE(inventory.ok());
  ASSERT_TRUE(h.control().AddInventory(node, *inventory, h.Objects(keys, 4)).ok());
  h.clock().AdvanceNanos(6 * kSecondNanos);
  h.control().Sweep();
  EXPECT_EQ(h.control().EndInventory(node, *inventory).code(), StatusCode::kAborted);
  EXPECT_EQ(h.control().Status().objects_count, 0u);
}

}  // namespace
}  // namespace okv
