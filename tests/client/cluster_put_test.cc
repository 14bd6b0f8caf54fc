#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/block_range.h"
#include "tests/client/cluster_fixture.h"

namespace okv {
namespace {

class ClusterPutTest : public ClusterTest {};

TEST_P(ClusterPutTest, PutOffersEveryObjectWithItsHeaderAndAtMostEightAtATime) {
  NodeProcess* node = AddNode("node-1");
  node->node.answer_puts_by = kPutsInFlightMax;
  node->node.puts_count = 20;
  Start(node);
  PlaceAllOn(node);
  for (const absl::Status& status : Put(20)) EXPECT_TRUE(status.ok()) << status;
  node->transport.reset();
  ASSERT_EQ(node->node.put_objects.size(), 20u);
  EXPECT_EQ(node->node.offers_in_flight_max, kPutsInFlightMax);
  for (uint32_t i = 0; i < 20; ++i) {
    const FakeNode::Stored& stored = node->node.put_objects.at(Id(i));
    EXPECT_TRUE(stored.payload == PayloadOf(i));
    EXPECT_EQ(stored.header.generation, 100 + i);
    EXPECT_EQ(stored.header.format_id, format_.id());
    EXPECT_EQ(stored.header.index, BlockIndex(i));
    EXPECT_EQ(stored.header.parent.has_value(), i > 0);
    EXPECT_TRUE(VerifyObject(stored.header, layout_, stored.payload).ok());
  }
  ASSERT_EQ(control_.reserves().size(), 1u);
  EXPECT_EQ(control_.reserves()[0].write_group(), "group-1");
}

TEST_P(ClusterPutTest, PutOfARangeOffersItsBytesAndChecksumsAndReservesTheWholeBlock) {
  NodeProcess* node = AddNode("node-1");
  node->node.puts_pending = true;
  node->node.answer_puts_by = 20;  // More than are on offer at a time: what is here is not.
  Start(node);
  PlaceAllOn(node);
  const BlockRange range = {.layer_begin = 0, .layer_end = 2, .head_begin = 1, .head_end = 2};
  const size_t run_bytes = layout_.run_bytes(Codec::kInt2);
  std::vector<std::vector<uint8_t>> shares;
  std::vector<PutItem> items;
  for (uint32_t i = 0; i < 20; ++i) {
    shares.push_back(PayloadOf(i));
    shares.back().resize(2 * run_bytes);
  }
  for (uint32_t i = 0; i < 20; ++i) {
    items.push_back({.id = Id(i),
                     .index = BlockIndex(i),
                     .parent = i == 0 ? std::nullopt : std::optional<BlockKey>(Id(i - 1).key),
                     .payload = shares[i]});
  }
  const auto statuses = cluster()->Put(
      items,
      {.write_group = "group-1", .range = {.head_begin = 1, .head_end = 2}, .deadline = kLong});
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  ASSERT_EQ(control_.reserves().size(), 1u);
  const v1::ReserveRequest reserved = control_.reserves()[0];
  for (const v1::ReserveObject& object : reserved.objects()) {
    EXPECT_EQ(object.payload_bytes(), layout_.block_bytes(Codec::kInt2));
  }
  node->transport.reset();
  ASSERT_EQ(node->node.put_objects.size(), 20u);
  for (uint32_t i = 0; i < 20; ++i) {
    const FakeNode::Stored& stored = node->node.put_objects.at(Id(i));
    EXPECT_TRUE(stored.payload == shares[i]);
    EXPECT_EQ(stored.header.payload_bytes, layout_.block_bytes(Codec::kInt2));
    EXPECT_EQ(stored.header.checksums, RangeChecksums(Id(i), layout_, range, shares[i]));
  }
  const PutItem whole = {.id = Id(0), .index = BlockIndex(0), .payload = items[0].payload};
  EXPECT_TRUE(absl::IsInvalidArgument(cluster()->Put({whole}, "g", kLong)[0]));
  const absl::Status bad = cluster()->Put(
      items, {.write_group = "g", .range = {.head_begin = 1, .head_end = 9}, .deadline = kLong})[0];
  EXPECT_TRUE(absl::IsInvalidArgument(bad)) << bad;
  EXPECT_THAT(std::string(bad.message()), HasSubstr("head_end"));
}

TEST_P(ClusterPutTest, AnItemThatRepeatsAnotherIsWrittenOnceAndSharesItsFate) {
  NodeProcess* node = AddNode("node-1");
  Start(node);
  PlaceAllOn(node);
  const std::vector<uint8_t> payload = PayloadOf(0);
  const PutItem item = {.id = Id(0), .index = BlockIndex(0), .payload = payload};
  auto statuses = cluster()->Put({item, item, item}, "g", kLong);
  EXPECT_TRUE(statuses[0].ok()) << statuses[0];
  EXPECT_TRUE(absl::IsAlreadyExists(statuses[1])) << statuses[1];
  EXPECT_TRUE(absl::IsAlreadyExists(statuses[2])) << statuses[2];
  ASSERT_EQ(control_.reserves().size(), 1u);
  EXPECT_EQ(control_.reserves()[0].objects_size(), 1);
  control_.AnswerReserve([](const v1::ReserveRequest&, v1::ReserveResponse* response) {
    response->add_placements()->set_code(8);
    return grpc::Status::OK;
  });
  statuses = cluster()->Put({item, item}, "g", kLong);
  EXPECT_TRUE(absl::IsResourceExhausted(statuses[0])) << statuses[0];
  EXPECT_TRUE(absl::IsResourceExhausted(statuses[1])) << statuses[1];
  node->transport.reset();
  EXPECT_EQ(node->node.offers_in_flight_max, 1u);
}

TEST_P(ClusterPutTest, PutPassesTheAnswersOfTheControlPlaneThrough) {
  NodeProcess* node = AddNode("node-1");
  Start(node);
  control_.AnswerReserve([&](const v1::ReserveRequest&, v1::ReserveResponse* response) {
    for (const int code : {6, 8, 10, 14}) response->add_placements()->set_code(code);
    return grpc::Status::OK;
  });
  const auto statuses = Put(4);
  EXPECT_TRUE(absl::IsAlreadyExists(statuses[0]));
  EXPECT_TRUE(absl::IsResourceExhausted(statuses[1]));
  EXPECT_TRUE(absl::IsAborted(statuses[2]));
  EXPECT_TRUE(absl::IsUnavailable(statuses[3]));
}

TEST_P(ClusterPutTest, PutPassesTheNodesReasonThroughWhenItRefusesThePayload) {
  NodeProcess* node = AddNode("node-1");
  node->node.refuse_puts = true;
  node->node.put_status = absl::ResourceExhaustedError("the arena is full");
  Start(node);
  PlaceAllOn(node);
  for (const absl::Status& status : Put(12)) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(std::string(status.message()), "the arena is full");
  }
}

TEST_P(ClusterPutTest, PutToANodeThatIsGoneIsUnavailable) {
  NodeProcess* node = AddNode("node-1");
  node->address = UnusedAddress();
  PlaceAllOn(node);
  for (const absl::Status& status : Put(3)) EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

TEST_P(ClusterPutTest, PutToANodeThatNeverAnswersIsDeadlineExceeded) {
  NodeProcess* node = AddNode("node-1");
  node->node.silent = true;
  Start(node);
  PlaceAllOn(node);
  for (const absl::Status& status : Put(12, absl::Milliseconds(100))) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  }
}

TEST_P(ClusterPutTest, PutOfAPayloadOfTheWrongSizeIsInvalidArgument) {
  const std::vector<uint8_t> payload(3);
  const PutItem item = {
      .id = Id(0), .index = BlockIndex(0), .parent = std::nullopt, .payload = payload};
  EXPECT_TRUE(absl::IsInvalidArgument(cluster()->Put({item}, "g", kLong)[0]));
}

TEST_P(ClusterPutTest, PutWithoutAControlPlaneIsUnavailable) {
  control_.AnswerReserve([](const v1::ReserveRequest&, v1::ReserveResponse*) {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "shutting down");
  });
  EXPECT_TRUE(absl::IsUnavailable(Put(2)[0]));
}

INSTANTIATE_TEST_SUITE_P(Transports, ClusterPutTest, ::testing::Values(false, true),
                         [](const ::testing::TestParamInfo<bool>& info) {
                           return info.param ? "Ucx" : "Loopback";
                         });

}  // namespace
}  // namespace okv
