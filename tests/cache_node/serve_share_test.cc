#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "proto/block_range.h"
#include "tests/cache_node/ranges.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

// Ranks that write a block together.
class ServeShareTest : public ServeTest {
 protected:
  v1::PutOffer ShareOffer(const TestObject& object, const BlockRange& range) {
    ObjectHeader header = object.header();
    header.checksums =
        RangeChecksums(object.id(), object.object->layout, range, Slice(object, range));
    v1::PutOffer offer = Offer(ReservationFor(object), header);
    offer.set_layer_begin(range.layer_begin);
    offer.set_layer_end(range.layer_end);
    offer.set_head_begin(range.head_begin);
    offer.set_head_end(range.head_end);
    return offer;
  }
  // Offers a share; its bytes live as long as the fixture. The request id.
  uint64_t OfferShare(TestWorker* rank, const TestObject& object, const BlockRange& range) {
    const v1::PutOffer offer = ShareOffer(object, range);
    shares_.push_back(Slice(object, range));
    rank->Offer(offer, shares_.back());
    return offer.request_id();
  }
  absl::Status PutShare(TestWorker* rank, const TestObject& object, const BlockRange& range) {
    return rank->PutAnswer(OfferShare(rank, object, range));
  }
  static BlockRange Rank(const TestObject& object, uint32_t rank, uint32_t ranks_count) {
    return RankRange(object.object->layout, rank, ranks_count);
  }
  void ExpectWhole(const TestObject& object, const Format& format) {
    const auto reader = OpenSession("tenant", format);
    ExpectDelivered(reader->Fetch(Request({object}))[0], object);
  }

  std::list<std::vector<uint8_t>> shares_;
};

TEST_F(ServeShareTest, ABlockThatRanksWriteIsByteForByteTheBlockThatOneWriterWrites) {
  StartNode();
  std::vector<std::pair<TestObject, Format>> written;
  uint32_t number = 0;
  for (const uint32_t kv_heads : {2, 4, 8}) {
    for (const uint32_t ranks_count : {1, 2, 4}) {
      if (kv_heads % ranks_count != 0) continue;
      const Format format = FormatOf(kv_heads);
      for (const Codec codec : kCodecs) {
        const TestObject object = MakeObject({.number = number++, .codec = codec}, format);
        std::vector<std::unique_ptr<TestWorker>> ranks;
        std::vector<uint64_t> requests;
        for (uint32_t i = 0; i < ranks_count; ++i) {
          const uint32_t rank = (i + number) % ranks_count;  // Any order.
          ranks.push_back(OpenSession("tenant", format));
          requests.push_back(OfferShare(ranks[i].get(), object, Rank(object, rank, ranks_count)));
        }
        for (uint32_t i = 0; i < ranks_count; ++i) {
          const absl::Status status = ranks[i]->PutAnswer(requests[i]);
          EXPECT_TRUE(status.ok()) << status;
        }
        ExpectWhole(object, format);
        written.emplace_back(object, format);
      }
    }
  }
  EXPECT_EQ(committed().size(), written.size());
  StopNode();
  StartNode();
  for (const auto& [object, format] : written) ExpectWhole(object, format);
}

TEST_F(ServeShareTest, SharesMayBeLayersToo) {
  StartNode();
  const TestObject object = MakeObject({.number = 1}, FormatOf(4));
  const auto worker = OpenSession("tenant", FormatOf(4));
  const uint64_t first = OfferShare(
      worker.get(), object, {.layer_begin = 1, .layer_end = 3, .head_begin = 0, .head_end = 4});
  const uint64_t second = OfferShare(
      worker.get(), object, {.layer_begin = 0, .layer_end = 1, .head_begin = 2, .head_end = 4});
  EXPECT_TRUE(PutShare(worker.get(), object,
                       {.layer_begin = 0, .layer_end = 1, .head_begin = 0, .head_end = 2})
                  .ok());
  EXPECT_TRUE(worker->PutAnswer(first).ok());
  EXPECT_TRUE(worker->PutAnswer(second).ok());
  ExpectWhole(object, FormatOf(4));
}

TEST_F(ServeShareTest, UntilItsLastShareABlockIsNotThere) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto first = OpenSession();
  const auto second = OpenSession();
  const uint64_t request = OfferShare(first.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(first->WaitForPending(request));
  EXPECT_TRUE(absl::IsNotFound(second->Fetch(Request({object}))[0].status));
  EXPECT_TRUE(committed().empty());
  EXPECT_FALSE(first->answered(request));
  EXPECT_EQ(node_.storage->table()->stats().claims_count, 1u);
  EXPECT_TRUE(PutShare(second.get(), object, Rank(object, 1, 2)).ok());
  EXPECT_TRUE(first->PutAnswer(request).ok());
  EXPECT_EQ(committed(), std::vector<ObjectId>{object.id()});
  ExpectWhole(object, TestFormat());
}

TEST_F(ServeShareTest, WithoutOneRankTheOthersAreToldAndTheSpaceReturns) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  const uint64_t request = OfferShare(rank.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(rank->WaitForPending(request));
  EXPECT_GT(node_.storage->pool()->used_bytes(), 0u);
  clock_.AdvanceNanos(DataPlaneOptions().assembly_nanos_max);
  const absl::Status status = rank->PutAnswer(request);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "2 of 4 runs")) << status;
  ExpectNothingStored();
  EXPECT_EQ(node_.Metric("okv_node_blocks_abandoned_total"), 1);
  // The late share starts a block of its own, and the group that tries again is free to write.
  const TestObject again = MakeObject({.number = 1, .write_id = 2});
  const uint64_t once_more = OfferShare(rank.get(), again, Rank(again, 0, 2));
  EXPECT_TRUE(PutShare(rank.get(), again, Rank(again, 1, 2)).ok());
  EXPECT_TRUE(rank->PutAnswer(once_more).ok());
  ExpectWhole(again, TestFormat());
}

TEST_F(ServeShareTest, ARankThatDiesInMidShareLeavesRoomForItsSuccessor) {
  StartNode();
  const TestObject object = MakeObject({.number = 1, .codec = Codec::kBf16}, FormatOf(8));
  const std::vector<uint8_t> bytes = Slice(object, Rank(object, 1, 2));
  const auto first = OpenSession("tenant", FormatOf(8));
  const uint64_t request = OfferShare(first.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(first->WaitForPending(request));
  for (int round = 0; round < 10 && committed().empty(); ++round) {
    OpenSession("tenant", FormatOf(8))
        ->OfferAndVanish(ShareOffer(object, Rank(object, 1, 2)), bytes);
    ASSERT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 1; }));
  }
  // Now and then a share is faster than its rank's end, or is still being copied at it.
  const auto second = OpenSession("tenant", FormatOf(8));
  absl::Status status;
  EXPECT_TRUE(WaitUntil([&] {
    status = PutShare(second.get(), object, Rank(object, 1, 2));
    return !absl::IsAborted(status);
  }));
  EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status)) << status;
  EXPECT_TRUE(first->PutAnswer(request).ok());
  ExpectWhole(object, FormatOf(8));
}

TEST_F(ServeShareTest, AShareOutlivesTheRankThatBroughtIt) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  {
    const auto gone = OpenSession();
    ASSERT_TRUE(gone->WaitForPending(OfferShare(gone.get(), object, Rank(object, 0, 2))));
  }
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
  const auto rank = OpenSession();
  EXPECT_TRUE(PutShare(rank.get(), object, Rank(object, 1, 2)).ok());
  ExpectWhole(object, TestFormat());
}

TEST_F(ServeShareTest, ARankThatOffersItsShareAgainWaitsWithTheOthers) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  const uint64_t first = OfferShare(rank.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(rank->WaitForPending(first));
  const uint64_t again = OfferShare(rank.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(rank->WaitForPending(again));
  EXPECT_TRUE(PutShare(rank.get(), object, Rank(object, 1, 2)).ok());
  EXPECT_TRUE(rank->PutAnswer(first).ok());
  EXPECT_TRUE(rank->PutAnswer(again).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(PutShare(rank.get(), object, Rank(object, 1, 2))));
}

TEST_F(ServeShareTest, SharesThatOverlapAreRefusedNamingBoth) {
  StartNode();
  const TestObject object = MakeObject({.number = 1}, FormatOf(4));
  const auto first = OpenSession("tenant", FormatOf(4));
  const auto second = OpenSession("tenant", FormatOf(4));
  const uint64_t request = OfferShare(first.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(first->WaitForPending(request));
  BlockRange range = Rank(object, 0, 2);
  range.head_begin = 1;
  range.head_end = 3;
  absl::Status status = PutShare(second.get(), object, range);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "heads [1, 3)")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "heads [0, 2)")) << status;
  EXPECT_TRUE(absl::IsInvalidArgument(second->Put(Offer(object), object.payload)));

  // Two ranks that both believe they are the first, with bytes of their own.
  TestObject other = MakeObject({.number = 1}, FormatOf(4));
  other.payload[0] ^= 1;
  status = PutShare(second.get(), other, Rank(object, 0, 2));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "other bytes")) << status;

  EXPECT_TRUE(PutShare(second.get(), object, Rank(object, 1, 2)).ok());
  EXPECT_TRUE(first->PutAnswer(request).ok());
  ExpectWhole(object, FormatOf(4));
}

TEST_F(ServeShareTest, AnotherWriteIdIsAbortedWhileABlockIsBeingWritten) {
  StartNode();
  const TestObject object = MakeObject({.number = 1, .write_id = 5});
  const TestObject late = MakeObject({.number = 1, .write_id = 4});
  const auto rank = OpenSession();
  const uint64_t request = OfferShare(rank.get(), object, Rank(object, 0, 2));
  ASSERT_TRUE(rank->WaitForPending(request));
  const absl::Status status = PutShare(rank.get(), late, Rank(late, 1, 2));
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "write id 5, not 4")) << status;
  EXPECT_TRUE(absl::IsAborted(rank->Put(Offer(late), late.payload)));
  EXPECT_TRUE(PutShare(rank.get(), object, Rank(object, 1, 2)).ok());
}

TEST_F(ServeShareTest, SharesOfOneWriteIdDescribeOneObject) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  ASSERT_TRUE(rank->WaitForPending(OfferShare(rank.get(), object, Rank(object, 0, 2))));
  const auto put = [&](const std::function<void(ObjectHeader*)>& change) {
    const BlockRange range = Rank(object, 1, 2);
    v1::PutOffer offer = ShareOffer(object, range);
    ObjectHeader header = *ObjectHeader::Decode(offer.object_header());
    change(&header);
    offer.set_object_header(header.Encode());
    shares_.push_back(Slice(object, range));
    return rank->Put(offer, shares_.back());
  };
  absl::Status status = put([](ObjectHeader* h) { h->index = BlockIndex(7); });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "'index'")) << status;
  status = put([](ObjectHeader* h) { h->parent = TestKey(9); });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "'parent'")) << status;
  // The block's size and the share's checksums, not the other way round.
  EXPECT_TRUE(absl::IsInvalidArgument(put([](ObjectHeader* h) { h->payload_bytes /= 2; })));
  EXPECT_TRUE(absl::IsInvalidArgument(put([](ObjectHeader* h) { h->checksums.push_back(0); })));
  EXPECT_TRUE(put([](ObjectHeader*) {}).ok());
}

TEST_F(ServeShareTest, ABadShareIsDataLossNamingItsRunAndMayBeSentAgain) {
  StartNode();
  for (const Codec codec : kCodecs) {
    const TestObject object = MakeObject({.number = 1, .codec = codec}, FormatOf(8));
    const BlockRange range = Rank(object, 1, 2);
    const auto rank = OpenSession("tenant", FormatOf(8));
    const uint64_t request = OfferShare(rank.get(), object, Rank(object, 0, 2));
    ASSERT_TRUE(rank->WaitForPending(request));
    std::vector<uint8_t> flipped = Slice(object, range);
    flipped[flipped.size() - 1] ^= 1;
    const absl::Status status = rank->Put(ShareOffer(object, range), flipped);
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "layer 2, head 7")) << status;
    EXPECT_TRUE(PutShare(rank.get(), object, range).ok());
    EXPECT_TRUE(rank->PutAnswer(request).ok());
    ExpectWhole(object, FormatOf(8));
  }
}

TEST_F(ServeShareTest, BadSharesOfALoneRankLeaveNothing) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  std::vector<uint8_t> flipped = Slice(object, Rank(object, 0, 2));
  flipped[0] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(rank->Put(ShareOffer(object, Rank(object, 0, 2)), flipped)));
  ExpectNothingStored();
  v1::PutOffer offer = ShareOffer(object, Rank(object, 0, 2));
  offer.set_head_end(3);
  const absl::Status status = rank->Put(offer, flipped);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "head_end")) << status;
  ExpectNothingStored();
}

TEST_F(ServeShareTest, WithoutRoomEveryRankIsToldAndNothingIsLeft) {
  StartNode();
  Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  const uint64_t first = OfferShare(rank.get(), object, Rank(object, 0, 2));
  const uint64_t second = OfferShare(rank.get(), object, Rank(object, 1, 2));
  ASSERT_TRUE(WaitUntil([this] { return node_.storage->spiller()->waiters_count() == 1; }));
  // The second offer has come too when a later request is answered.
  rank->Fetch(Request({object}));
  clock_.AdvanceNanos(SpillerOptions().allocate_wait_nanos);
  EXPECT_TRUE(absl::IsResourceExhausted(rank->PutAnswer(first)));
  EXPECT_TRUE(absl::IsResourceExhausted(rank->PutAnswer(second)));
  all = Extent();
  ExpectNothingStored();
}

TEST_F(ServeShareTest, ABlockLargerThanTheArenaIsRefusedAtOnce) {
  StartNode();
  Format format = FormatOf(8);
  for (uint32_t layer = 3; layer < 40; ++layer) format.layer_ids.push_back(layer);
  const TestObject object = MakeObject({.number = 1, .codec = Codec::kBf16}, format);
  ASSERT_GT(object.payload.size(), size_t{4} << 20);
  // Even while others wait for room.
  const Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);
  const TestObject small = MakeObject({.number = 2});
  const auto waiting = OpenSession();
  waiting->Offer(Offer(small), small.payload);
  ASSERT_TRUE(WaitUntil([this] { return node_.storage->spiller()->waiters_count() == 1; }));
  const auto worker = OpenSession("tenant", format);
  const absl::Status status = worker->Put(Offer(object), object.payload);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "arena")) << status;
  EXPECT_TRUE(absl::IsInvalidArgument(PutShare(worker.get(), object, Rank(object, 0, 2))));
}

TEST_F(ServeShareTest, StoppingWithBlocksIncompleteLeavesNothing) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto rank = OpenSession();
  ASSERT_TRUE(rank->WaitForPending(OfferShare(rank.get(), object, Rank(object, 0, 2))));
  StopNode();  // The table checks its claims, the arena its extents, when they go.
  EXPECT_TRUE(rank->WaitForClosed());
}

}  // namespace
}  // namespace okv::testing_support
