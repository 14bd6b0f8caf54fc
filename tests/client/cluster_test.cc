#include "client/cluster.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/cluster_fixture.h"

namespace okv {
namespace {

// ---- Fetch

TEST_P(ClusterTest, FetchReceivesFromTwoNodesAtOnce) {
  NodeProcess* first = AddNode("node-1");
  NodeProcess* second = AddNode("node-2");
  for (uint32_t i = 0; i < 40; ++i) (i % 2 ? first : second)->node.objects[Id(i)] = Object(i);
  Start(first);
  Start(second);
  buffers_.assign(40, std::vector<uint8_t>(layout_.block_bytes(Codec::kInt2)));
  std::vector<FetchItem> items;
  for (uint32_t i = 0; i < 40; ++i) {
    items.push_back({.id = Id(i),
                     .index = BlockIndex(i),
                     .nodes = {(i % 2 ? first : second)->where()},
                     .buffer = absl::MakeSpan(buffers_[i])});
  }
  ExpectAllFetched(cluster()->Fetch(items, kLong));
}

TEST_P(ClusterTest, FetchOfBothCodecsChecksTheCodec) {
  NodeProcess* node = AddNode("node-1");
  node->node.objects[Id(1, Codec::kBf16)] = Object(1, Codec::kBf16);
  Start(node);
  std::vector<uint8_t> buffer(layout_.block_bytes(Codec::kBf16));
  const FetchItem item = {.id = Id(1, Codec::kBf16),
                          .index = BlockIndex(1),
                          .nodes = {node->where()},
                          .buffer = absl::MakeSpan(buffer)};
  EXPECT_TRUE(cluster()->Fetch({item}, kLong)[0].ok());
  EXPECT_TRUE(buffer == PayloadOf(1, Codec::kBf16));
}

TEST_P(ClusterTest, FetchOfARangeReceivesItsRunsAndVerifiesThemByTheirPlaceInTheBlock) {
  NodeProcess* bad = AddNode("node-1");
  NodeProcess* good = AddNode("node-2");
  for (NodeProcess* node : {bad, good}) {
    Store(node, 10);
    node->node.layout = layout_;
  }
  // In head 1 of layer 1: rank 0 does not see it, rank 1 goes on to the good copy.
  bad->node.objects[Id(3)].payload[layout_.run_offset(Codec::kInt2, 1, 1) + 9] ^= 1;
  Start(bad);
  Start(good);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const BlockRange range = {.head_begin = rank, .head_end = rank + 1};
    const size_t run_bytes = layout_.run_bytes(Codec::kInt2);
    buffers_.assign(10, std::vector<uint8_t>(2 * run_bytes));
    std::vector<FetchItem> items;
    for (uint32_t i = 0; i < 10; ++i) {
      items.push_back({.id = Id(i),
                       .index = BlockIndex(i),
                       .nodes = {bad->where(), good->where()},
                       .buffer = absl::MakeSpan(buffers_[i])});
    }
    const auto statuses = cluster()->Fetch(items, range, kLong);
    for (uint32_t i = 0; i < 10; ++i) {
      EXPECT_TRUE(statuses[i].ok()) << statuses[i];
      for (uint32_t layer = 0; layer < 2; ++layer) {
        const std::vector<uint8_t> block = PayloadOf(i);
        EXPECT_EQ(absl::MakeConstSpan(buffers_[i]).subspan(layer * run_bytes, run_bytes),
                  absl::MakeConstSpan(block).subspan(layout_.run_offset(Codec::kInt2, layer, rank),
                                                     run_bytes));
      }
    }
    items[0].nodes = {bad->where()};
    items[3].nodes = {bad->where()};
    const auto alone = cluster()->Fetch(items, range, kLong);
    EXPECT_TRUE(alone[0].ok()) << alone[0];
    EXPECT_EQ(absl::IsDataLoss(alone[3]), rank == 1) << alone[3];
  }
}

TEST_P(ClusterTest, ARangeThatTheFormatDoesNotHaveIsInvalidArgumentNamingTheField) {
  std::vector<uint8_t> buffer(layout_.run_bytes(Codec::kInt2));
  const FetchItem item = {
      .id = Id(0), .index = BlockIndex(0), .nodes = {}, .buffer = absl::MakeSpan(buffer)};
  const absl::Status status = cluster()->Fetch({item}, {.head_begin = 2, .head_end = 3}, kLong)[0];
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("head_end"));
}

TEST_P(ClusterTest, ANodeTooOldForRangesIsNamedAndStillAskedForTheWhole) {
  NodeProcess* node = AddNode("node-1");
  node->node.protocol_minor = 0;
  Store(node, 1);
  Start(node);
  std::vector<uint8_t> buffer(2 * layout_.run_bytes(Codec::kInt2));
  const FetchItem item = {.id = Id(0),
                          .index = BlockIndex(0),
                          .nodes = {node->where()},
                          .buffer = absl::MakeSpan(buffer)};
  const absl::Status status = cluster()->Fetch({item}, {.head_end = 1}, kLong)[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  for (const uint32_t minor : {0u, kProtocolMinor}) {
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(" ", kProtocolMajor, ".", minor)));
  }
  ExpectAllFetched(Fetch(1, {node->where()}));
}

TEST_P(ClusterTest, AnObjectThatNoNodeHasIsNotFoundAndTheOthersArrive) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 3);
  node->node.objects.erase(Id(1));
  Start(node);
  const auto statuses = Fetch(3, {node->where()});
  EXPECT_TRUE(statuses[0].ok());
  EXPECT_TRUE(absl::IsNotFound(statuses[1])) << statuses[1];
  EXPECT_TRUE(statuses[2].ok());
  EXPECT_TRUE(absl::IsNotFound(Fetch(1, {})[0]));
}

TEST_P(ClusterTest, ABufferOfTheWrongSizeIsInvalidArgument) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 1);
  Start(node);
  std::vector<uint8_t> buffer(layout_.block_bytes(Codec::kInt2) - 1);
  const FetchItem item = {.id = Id(0),
                          .index = BlockIndex(0),
                          .nodes = {node->where()},
                          .buffer = absl::MakeSpan(buffer)};
  EXPECT_TRUE(absl::IsInvalidArgument(cluster()->Fetch({item}, kLong)[0]));
}

TEST_P(ClusterTest, AFlippedBitIsDataLossWhenNoOtherCopyExists) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 3);
  node->node.objects[Id(1)].payload[100] ^= 0x10;
  Start(node);
  const auto statuses = Fetch(3, {node->where()});
  EXPECT_TRUE(statuses[0].ok());
  EXPECT_TRUE(absl::IsDataLoss(statuses[1])) << statuses[1];
  EXPECT_TRUE(statuses[2].ok());
}

TEST_P(ClusterTest, AFlippedBitFailsOverToAGoodCopy) {
  NodeProcess* bad = AddNode("node-1");
  NodeProcess* good = AddNode("node-2");
  Store(bad, 3);
  Store(good, 3);
  bad->node.objects[Id(1)].payload[100] ^= 0x10;
  Start(bad);
  Start(good);
  ExpectAllFetched(Fetch(3, {bad->where(), good->where()}));
}

TEST_P(ClusterTest, AFlippedBitIsReportedToTheNodeThatSentItUnlessItIsTooOld) {
  NodeProcess* bad = AddNode("node-1");
  NodeProcess* old = AddNode("node-2");
  NodeProcess* good = AddNode("node-3");
  old->node.protocol_minor = 0;
  for (NodeProcess* node : {bad, old, good}) {
    Store(node, 3);
    Start(node);
  }
  bad->node.objects[Id(1)].payload[100] ^= 0x10;
  old->node.objects[Id(1)].payload[100] ^= 0x10;
  ExpectAllFetched(Fetch(3, {bad->where(), old->where(), good->where()}));
  EXPECT_EQ(cluster()->stats().complaints, 2u);
  ExpectAllFetched(Fetch(1, {bad->where()}));  // Behind the complaint, over the same session.
  for (NodeProcess* node : {bad, old, good}) node->transport.reset();
  ASSERT_EQ(bad->node.complaints.size(), 1u);
  EXPECT_EQ(bad->node.complaints[0].key(), std::string(Id(1).key.view()));
  EXPECT_EQ(bad->node.complaints[0].codec(), v1::CODEC_INT2);
  EXPECT_THAT(bad->node.complaints[0].message(), HasSubstr("wrong checksum"));
  EXPECT_TRUE(old->node.complaints.empty());
  EXPECT_TRUE(good->node.complaints.empty());
}

TEST_P(ClusterTest, AnotherObjectUnderTheRightOrdinalIsDataLoss) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 2);
  node->node.swapped[Id(0)] = Id(1);
  Start(node);
  const auto statuses = Fetch(1, {node->where()});
  EXPECT_TRUE(absl::IsDataLoss(statuses[0])) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("differs"));
}

TEST_P(ClusterTest, ObjectsOfOneDeliveryAreCheckedEach) {
  constexpr uint32_t kCount = 18;  // Three requests.
  for (const auto together :
       {FakeNode::Together::kHeadersFirst, FakeNode::Together::kHeadersLast}) {
    NodeProcess* node = AddNode(together == FakeNode::Together::kHeadersFirst ? "first" : "last");
    Store(node, kCount);
    node->node.together = together;
    node->node.swapped[Id(3)] = Id(4);
    std::string damaged = Object(9).header.Encode();
    damaged.back() ^= 1;
    node->node.bad_headers[Id(9)] = damaged;
    node->node.objects[Id(16)].payload[5] ^= 1;
    Start(node);
    const size_t bytes = layout_.block_bytes(Codec::kInt2);
    std::vector<uint8_t> area(kCount * bytes);
    std::vector<FetchItem> items;
    for (uint32_t i = 0; i < kCount; ++i) {
      items.push_back({.id = Id(i),
                       .index = BlockIndex(i),
                       .nodes = {node->where()},
                       .buffer = absl::MakeSpan(area).subspan(i * bytes, bytes)});
    }
    const std::vector<absl::Status> statuses = cluster()->Fetch(items, kLong);
    const std::map<uint32_t, std::string> reasons = {
        {3, "differs"}, {9, "wrong checksum of the header"}, {16, "wrong checksum"}};
    for (uint32_t i = 0; i < kCount; ++i) {
      const auto reason = reasons.find(i);
      if (reason != reasons.end()) {
        EXPECT_TRUE(absl::IsDataLoss(statuses[i])) << i << ": " << statuses[i];
        EXPECT_THAT(std::string(statuses[i].message()), HasSubstr(reason->second));
        continue;
      }
      EXPECT_TRUE(statuses[i].ok()) << i << ": " << statuses[i];
      const std::vector<uint8_t> expected = PayloadOf(i);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), items[i].buffer.begin())) << i;
    }
  }
}

TEST_P(ClusterTest, ANodeThatDiesMidFetchLeavesWhatArrivedAndUnavailableForTheRest) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 20);
  node->node.deliveries_before_death = 5;
  Start(node);
  const auto statuses = Fetch(20, {node->where()});
  int fetched = 0;
  for (uint32_t i = 0; i < 20; ++i) {
    if (statuses[i].ok()) {
      ++fetched;
      EXPECT_TRUE(buffers_[i] == PayloadOf(i));
    } else {
      EXPECT_TRUE(absl::IsUnavailable(statuses[i])) << statuses[i];
      EXPECT_THAT(std::string(statuses[i].message()), HasSubstr(node->address));
    }
  }
  EXPECT_GE(fetched, 1);
  EXPECT_LE(fetched, 5);
}

TEST_P(ClusterTest, ANodeThatDiesMidFetchFailsOverToAReplica) {
  NodeProcess* dying = AddNode("node-1");
  NodeProcess* replica = AddNode("node-2");
  Store(dying, 20);
  Store(replica, 20);
  dying->node.deliveries_before_death = 5;
  Start(dying);
  Start(replica);
  ExpectAllFetched(Fetch(20, {dying->where(), replica->where()}));
}

TEST_P(ClusterTest, ANodeThatIsNotThereIsUnavailableAtOnce) {
  const LookupResult::Node nobody = {.node_id = "node-9", .data_address = UnusedAddress()};
  const auto statuses = Fetch(2, {nobody});
  EXPECT_TRUE(absl::IsUnavailable(statuses[0])) << statuses[0];
  EXPECT_TRUE(absl::IsUnavailable(statuses[1]));
}

TEST_P(ClusterTest, ANodeThatStallsLosesWhatAnotherHoldsToThatOne) {
  NodeProcess* silent = AddNode("node-1");
  NodeProcess* replica = AddNode("node-2");
  silent->node.silent = true;
  Store(silent, 20);
  Store(replica, 20);
  Start(silent);
  Start(replica);
  options_.fetch_stall_timeout = absl::Milliseconds(50);
  const absl::Time start = absl::Now();
  ExpectAllFetched(Fetch(20, {silent->where(), replica->where()}));
  EXPECT_LT(absl::Now() - start, kLong / 2);
  EXPECT_EQ(cluster()->stats().failovers_stalled, 20u);
  EXPECT_EQ(cluster()->stats().fetched, 20u);
}

TEST_P(ClusterTest, WhatOnlyAStalledNodeHoldsIsWaitedForUntilTheDeadline) {
  NodeProcess* silent = AddNode("node-1");
  NodeProcess* replica = AddNode("node-2");
  silent->node.silent = true;
  Store(replica, 20);
  Start(silent);
  Start(replica);
  options_.fetch_stall_timeout = absl::Milliseconds(50);
  buffers_.assign(20, std::vector<uint8_t>(layout_.block_bytes(Codec::kInt2), 0xa5));
  std::vector<FetchItem> items;
  for (uint32_t i = 0; i < 20; ++i) {
    items.push_back({.id = Id(i),
                     .index = BlockIndex(i),
                     .nodes = {silent->where(), replica->where()},
                     .buffer = absl::MakeSpan(buffers_[i])});
    if (i % 2 == 1) items.back().nodes.pop_back();
  }
  const auto statuses = cluster()->Fetch(items, absl::Seconds(2));
  // What comes late finds no buffer: the call is over.
  RunOnNode(silent, [silent] { silent->node.AnswerLate(); });
  for (uint32_t i = 0; i < 20; ++i) {
    if (i % 2 == 0) {
      EXPECT_TRUE(statuses[i].ok()) << statuses[i];
      EXPECT_TRUE(buffers_[i] == PayloadOf(i));
    } else {
      EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[i])) << statuses[i];
      EXPECT_TRUE(buffers_[i] == std::vector<uint8_t>(buffers_[i].size(), 0xa5));
    }
  }
  EXPECT_EQ(cluster()->stats().fetched, 10u);
  EXPECT_EQ(cluster()->stats().fetch_failed, 10u);
}

TEST_P(ClusterTest, FailoversAreCountedByTheirReason) {
  NodeProcess* missing = AddNode("node-1");
  NodeProcess* damaged = AddNode("node-2");
  NodeProcess* full = AddNode("node-3");
  NodeProcess* good = AddNode("node-4");
  for (NodeProcess* node : {damaged, full, good}) Store(node, 1);
  damaged->node.objects[Id(0)].payload[7] ^= 1;
  full->node.failures[Id(0)] = absl::ResourceExhaustedError("too many wait");
  for (NodeProcess* node : {missing, damaged, full, good}) Start(node);
  const LookupResult::Node nobody = {.node_id = "node-9", .data_address = UnusedAddress()};
  ExpectAllFetched(
      Fetch(1, {nobody, missing->where(), damaged->where(), full->where(), good->where()}));
  ClusterStats stats = cluster()->stats();
  EXPECT_EQ(stats.failovers_unavailable, 2u);
  EXPECT_EQ(stats.failovers_missing, 1u);
  EXPECT_EQ(stats.failovers_damaged, 1u);
  EXPECT_EQ(stats.failovers_stalled, 0u);
  EXPECT_EQ(stats.fetched, 1u);
  EXPECT_EQ(stats.fetched_bytes, layout_.block_bytes(Codec::kInt2));
  EXPECT_EQ(stats.fetch_failed, 0u);
  // The last node's failure leads nowhere.
  EXPECT_TRUE(absl::IsNotFound(Fetch(1, {missing->where()})[0]));
  stats = cluster()->stats();
  EXPECT_EQ(stats.failovers(), 4u);
  EXPECT_EQ(stats.fetch_failed, 1u);
}

TEST_P(ClusterTest, ANodesReasonStandsBehindTheDeadline) {
  NodeProcess* missing = AddNode("node-1");
  NodeProcess* silent = AddNode("node-2");
  silent->node.silent = true;
  Start(missing);
  Start(silent);
  const absl::Status status =
      Fetch(1, {missing->where(), silent->where()}, absl::Milliseconds(300))[0];
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("not here"));
}

TEST_P(ClusterTest, TheWorstNodeNamesTheReason) {
  NodeProcess* missing = AddNode("node-1");
  NodeProcess* damaged = AddNode("node-2");
  Store(damaged, 1);
  damaged->node.objects[Id(0)].payload[0] ^= 1;
  Start(missing);
  Start(damaged);
  EXPECT_TRUE(absl::IsDataLoss(Fetch(1, {missing->where(), damaged->where()})[0]));
  EXPECT_TRUE(absl::IsDataLoss(Fetch(1, {damaged->where(), missing->where()})[0]));
  const LookupResult::Node nobody = {.node_id = "node-9", .data_address = UnusedAddress()};
  EXPECT_TRUE(absl::IsUnavailable(Fetch(1, {nobody, missing->where()})[0]));
}

TEST_P(ClusterTest, ANodeThatNeverAnswersIsDeadlineExceededAndTheBuffersAreLeftAlone) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 10);
  node->node.silent = true;
  Start(node);
  for (const absl::Status& status : Fetch(10, {node->where()}, absl::Milliseconds(100))) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(Fetch(1, {node->where()}, absl::ZeroDuration())[0]));
}

TEST_P(ClusterTest, ADeadlineOfOneCallDoesNotCutAnother) {
  NodeProcess* node = AddNode("node-1");
  NodeProcess* silent = AddNode("node-2");
  Store(node, 30);
  silent->node.silent = true;
  Start(node);
  Start(silent);
  cluster();
  std::thread impatient([&] {
    std::vector<uint8_t> buffer(layout_.block_bytes(Codec::kInt2));
    for (int i = 0; i < 5; ++i) {
      const FetchItem item = {.id = Id(0),
                              .index = BlockIndex(0),
                              .nodes = {silent->where()},
                              .buffer = absl::MakeSpan(buffer)};
      EXPECT_TRUE(absl::IsDeadlineExceeded(cluster()->Fetch({item}, absl::Milliseconds(10))[0]));
    }
  });
  for (int i = 0; i < 10; ++i) ExpectAllFetched(Fetch(30, {node->where()}));
  impatient.join();
}

TEST_P(ClusterTest, AFormatThatTheNodeRefusesPassesTheFieldThrough) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 1);
  node->node.hello_status =
      absl::FailedPreconditionError("field 'group_size' differs: 64 here, 128 there");
  Start(node);
  const absl::Status status = Fetch(1, {node->where()})[0];
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("group_size"));
}

TEST_P(ClusterTest, AnotherNodeAtTheAddressIsUnavailable) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 1);
  Start(node);
  LookupResult::Node expected = node->where();
  expected.node_id = "node-7";
  const absl::Status status = Fetch(1, {expected})[0];
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("node-7"));
}

TEST_P(ClusterTest, ASessionIsUsedAgainAndARestartedNodeIsReconnectedTo) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 4);
  Start(node);
  ExpectAllFetched(Fetch(4, {node->where()}));
  ExpectAllFetched(Fetch(4, {node->where()}));
  const std::string address = node->address;
  node->transport.reset();
  EXPECT_EQ(node->node.accepted, 1u);
  Start(node, address);
  ExpectAllFetched(Fetch(4, {node->where()}));
}

// ---- Tickets

TEST_P(ClusterTest, ATicketPastHalfItsLifeIsRenewedForANewSession) {
  control_.SetTicketLife(absl::ZeroDuration());
  NodeProcess* node = AddNode("node-1");
  Store(node, 1);
  Start(node);
  ExpectAllFetched(Fetch(1, {node->where()}));
  EXPECT_EQ(control_.opens(), 2);
  node->transport.reset();
  EXPECT_EQ(node->node.tickets, std::vector<std::string>{"ticket-2"});
}

TEST_P(ClusterTest, ATicketThatANodeRefusesIsRenewedOnce) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 3);
  node->node.check_hello = [](const v1::Hello& hello) {
    return hello.ticket() == "ticket-1" ? absl::PermissionDeniedError("expired") : absl::OkStatus();
  };
  Start(node);
  ExpectAllFetched(Fetch(3, {node->where()}));
  EXPECT_EQ(control_.opens(), 2);
}

TEST_P(ClusterTest, ANodeThatRefusesEveryTicketIsPermissionDenied) {
  NodeProcess* node = AddNode("node-1");
  Store(node, 3);
  node->node.hello_status = absl::PermissionDeniedError("signed with another key");
  Start(node);
  for (const absl::Status& status : Fetch(3, {node->where()})) {
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  }
  EXPECT_EQ(control_.opens(), 2);
}

INSTANTIATE_TEST_SUITE_P(Transports, ClusterTest, ::testing::Values(false, true),
                         [](const ::testing::TestParamInfo<bool>& info) {
                           return info.param ? "Ucx" : "Loopback";
                         });

// ---- Control plane

class ControlTest : public ::testing::Test {
 protected:
  ControlTest()
      : rotations_(testing_support::SmallRotations("hadamard", 0)),
        format_(testing_support::SmallFormat(rotations_)),
        transport_(hub_.CreateTransport()) {
    options_.rpc_timeout = absl::Seconds(10);
  }
  absl::StatusOr<std::unique_ptr<Cluster>> Connect() {
    return Cluster::Connect(options_, format_, transport_.get());
  }

  const RotationSet rotations_;
  const Format format_;
  LoopbackHub hub_;
  std::unique_ptr<Transport> transport_;
  ClusterOptions options_;
};

TEST_F(ControlTest, NoControlPlaneIsUnavailableNamingAddressAndAttempts) {
  options_.control_address = UnusedAddress();
  options_.connect_timeout = absl::Milliseconds(300);
  const absl::Status status = Connect().status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(options_.control_address));
  EXPECT_THAT(std::string(status.message()), HasSubstr(" attempts in 300ms"));
  EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr("after 1 attempts")));
}

TEST_F(ControlTest, ConnectWaitsForAControlPlaneThatStartsLate) {
  options_.control_address = UnusedAddress();
  options_.connect_timeout = absl::Seconds(20);
  absl::Status status = absl::UnknownError("not run");
  std::thread connecting([&] { status = Connect().status(); });
  FakeControl control(options_.control_address);
  connecting.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ControlTest, ConnectPassesAFormatThatDoesNotMatchThrough) {
  FakeControl control;
  control.AnswerOpen(grpc::Status(grpc::StatusCode::FAILED_PRECONDITION,
                                  "field 'kv_heads' differs: 8 here, 2 there"));
  options_.control_address = control.address();
  const absl::Status status = Connect().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_heads"));
}

TEST_F(ControlTest, BadOptionsAreInvalidArgumentNamingTheField) {
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("control_address"));
  options_.control_address = "nowhere";
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("control_address"));
  options_.control_address = "127.0.0.1:1";
  options_.tenant = "";
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("tenant"));
  options_.tenant = "t";
  options_.connect_timeout = absl::ZeroDuration();
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("connect_timeout"));
  options_.connect_timeout = absl::Seconds(1);
  options_.rpc_timeout = absl::ZeroDuration();
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("rpc_timeout"));
  options_.rpc_timeout = absl::Seconds(1);
  options_.fetch_stall_timeout = absl::ZeroDuration();
  EXPECT_THAT(std::string(Connect().status().message()), HasSubstr("fetch_stall_timeout"));
  EXPECT_TRUE(absl::IsInvalidArgument(Connect().status()));
}

TEST_F(ControlTest, LookupAnswersNodesAndTheSaltIsTheTenants) {
  FakeControl control;
  control.AnswerLookup([&](const v1::LookupRequest& request, v1::LookupResponse* response) {
    EXPECT_EQ(request.keys_size(), 2);
    EXPECT_EQ(request.format_id(), std::string(format_.id().view()));
    response->set_prefix_blocks(1);
    response->set_resume_boundary(2);
    response->add_nodes()->set_node_id("node-1");
    response->mutable_nodes(0)->set_data_address("127.0.0.1:5");
    response->add_blocks()->add_bf16_nodes(0);
    response->add_blocks()->add_int2_nodes(0);
    return grpc::Status::OK;
  });
  options_.control_address = control.address();
  options_.tenant = "acme";
  auto cluster = Connect();
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  EXPECT_EQ((*cluster)->tenant_salt(), "salt of acme");
  const auto found = (*cluster)->Lookup(std::vector<BlockKey>(2), absl::Seconds(5));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->prefix_blocks, 1u);
  EXPECT_EQ(found->resume_boundary, 2u);
  ASSERT_EQ(found->blocks.size(), 2u);
  EXPECT_EQ(found->blocks[0].bf16_nodes, std::vector<uint32_t>{0});
  EXPECT_EQ(found->blocks[1].int2_nodes, std::vector<uint32_t>{0});
  EXPECT_EQ(found->nodes[0].data_address, "127.0.0.1:5");
}

TEST_F(ControlTest, ALookupThatContradictsItselfIsInternal) {
  FakeControl control;
  options_.control_address = control.address();
  auto cluster = Connect();
  ASSERT_TRUE(cluster.ok());
  control.AnswerLookup([](const v1::LookupRequest&, v1::LookupResponse* response) {
    response->add_blocks()->add_int2_nodes(3);  // Of no node.
    return grpc::Status::OK;
  });
  EXPECT_TRUE(
      absl::IsInternal((*cluster)->Lookup(std::vector<BlockKey>(1), absl::Seconds(5)).status()));
  control.AnswerLookup([](const v1::LookupRequest&, v1::LookupResponse* response) {
    response->set_prefix_blocks(5);
    return grpc::Status::OK;
  });
  EXPECT_TRUE(
      absl::IsInternal((*cluster)->Lookup(std::vector<BlockKey>(9), absl::Seconds(5)).status()));
}

TEST_F(ControlTest, ARestartedControlPlaneThatForgotTheFormatIsToldItAgain) {
  FakeControl control;
  control.AnswerLookup([&](const v1::LookupRequest&, v1::LookupResponse*) {
    return control.opens() == 1
               ? grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "unknown format_id")
               : grpc::Status::OK;
  });
  options_.control_address = control.address();
  auto cluster = Connect();
  ASSERT_TRUE(cluster.ok());
  EXPECT_TRUE((*cluster)->Lookup(std::vector<BlockKey>(1), absl::Seconds(5)).ok());
  EXPECT_EQ(control.opens(), 2);
}

TEST_F(ControlTest, ARotationSetComesBackAsItWasPublished) {
  FakeControl control;
  options_.control_address = control.address();
  const auto hash = Cluster::PublishRotation(options_, rotations_);
  ASSERT_TRUE(hash.ok()) << hash.status();
  EXPECT_EQ(*hash, rotations_.hash());
  const auto loaded = Cluster::GetRotation(options_, *hash);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(*loaded == rotations_);
}

TEST_F(ControlTest, ARotationSetThatDoesNotValidateIsInvalidArgument) {
  FakeControl control;
  options_.control_address = control.address();
  RotationSet bad = rotations_;
  bad.r_k.pop_back();
  EXPECT_TRUE(absl::IsInvalidArgument(Cluster::PublishRotation(options_, bad).status()));
}

TEST_F(ControlTest, ARotationSetThatIsNotThereIsNotFound) {
  FakeControl control;
  options_.control_address = control.address();
  EXPECT_TRUE(absl::IsNotFound(Cluster::GetRotation(options_, rotations_.hash()).status()));
}

TEST_F(ControlTest, ARotationSetThatArrivesDamagedIsDataLoss) {
  FakeControl control;
  options_.control_address = control.address();
  const auto hash = Cluster::PublishRotation(options_, rotations_);
  ASSERT_TRUE(hash.ok());
  control.DamageRotation([](std::string* file) { (*file)[file->size() - 100] ^= 4; });
  EXPECT_TRUE(absl::IsDataLoss(Cluster::GetRotation(options_, *hash).status()));
  control.DamageRotation([](std::string* file) { file->resize(file->size() / 2); });
  EXPECT_TRUE(absl::IsDataLoss(Cluster::GetRotation(options_, *hash).status()));
  const RotationSet other = testing_support::SmallRotations("hadamard", 3);
  control.DamageRotation([&](std::string* file) { *file = other.Serialize(); });
  const absl::Status status = Cluster::GetRotation(options_, *hash).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(other.hash().Short()));
}

TEST(BackoffDelayTest, DoublesUpToASecondAndKeepsHalfAtLeast) {
  EXPECT_EQ(internal::BackoffDelay(1, 1.0), absl::Milliseconds(50));
  EXPECT_EQ(internal::BackoffDelay(1, 0.0), absl::Milliseconds(25));
  EXPECT_EQ(internal::BackoffDelay(2, 1.0), absl::Milliseconds(100));
  EXPECT_EQ(internal::BackoffDelay(6, 1.0), absl::Seconds(1));
  EXPECT_EQ(internal::BackoffDelay(1000, 0.5), absl::Milliseconds(750));
}

}  // namespace
}  // namespace okv
