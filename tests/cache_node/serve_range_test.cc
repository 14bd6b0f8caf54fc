#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "proto/block_range.h"
#include "tests/cache_node/ranges.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

class ServeRangeTest : public ServeTest {
 protected:
  v1::FetchRequest RangeRequest(const std::vector<TestObject>& objects, const BlockRange& range) {
    v1::FetchRequest request = Request(objects);
    request.set_layer_begin(range.layer_begin);
    request.set_layer_end(range.layer_end);
    request.set_head_begin(range.head_begin);
    request.set_head_end(range.head_end);
    return request;
  }
  void ExpectSlices(TestWorker* reader, const std::vector<TestObject>& objects,
                    const BlockRange& range) {
    const auto delivered = reader->Fetch(RangeRequest(objects, range));
    for (size_t i = 0; i < objects.size(); ++i) {
      ASSERT_TRUE(delivered[i].status.ok()) << delivered[i].status << ", " << range.ToString();
      EXPECT_EQ(delivered[i].object_header, objects[i].header().Encode());
      EXPECT_TRUE(delivered[i].payload == Slice(objects[i], range)) << range.ToString();
      EXPECT_TRUE(
          VerifyRange(objects[i].header(), objects[i].object->layout, range, delivered[i].payload)
              .ok());
    }
  }
  void ExpectEveryRanksSlices(TestWorker* reader, const std::vector<TestObject>& objects) {
    const PageLayout& layout = objects[0].object->layout;
    for (const uint32_t ranks_count : {1, 2, 4}) {
      if (layout.kv_heads % ranks_count != 0) continue;
      for (uint32_t rank = 0; rank < ranks_count; ++rank) {
        BlockRange range = RankRange(layout, rank, ranks_count);
        ExpectSlices(reader, objects, range);
        range.layer_begin = 1;
        ExpectSlices(reader, objects, range);
        range.layer_end = 2;
        ExpectSlices(reader, objects, range);
      }
    }
  }
};

TEST_F(ServeRangeTest, EveryRankGetsItsHeadsAtAnyDegreeFromDramAndFromDisk) {
  StartNode();
  std::vector<std::vector<TestObject>> by_heads;
  for (uint32_t kv_heads = 1; kv_heads <= 8; ++kv_heads) {
    const Format format = FormatOf(kv_heads);
    by_heads.push_back({MakeObject({.number = 2 * kv_heads}, format),
                        MakeObject({.number = 2 * kv_heads + 1, .codec = Codec::kBf16}, format)});
    const auto worker = OpenSession("tenant", format);
    for (const TestObject& object : by_heads.back()) {
      ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
    }
    ExpectEveryRanksSlices(worker.get(), by_heads.back());
  }
  StopNode();
  StartNode();
  // Without room in DRAM every fetch reads the disk.
  const Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);
  for (uint32_t kv_heads = 1; kv_heads <= 8; ++kv_heads) {
    const auto worker = OpenSession("tenant", FormatOf(kv_heads));
    ExpectEveryRanksSlices(worker.get(), by_heads[kv_heads - 1]);
  }
  EXPECT_EQ(node_.Metric("okv_node_promoted_bytes_total"), 0);
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().pins_count == 0; }));
}

TEST_F(ServeRangeTest, ARangeOfAnObjectThatComesUpFromDiskIsItsSlice) {
  StartNode();
  const Format format = FormatOf(8);
  std::vector<TestObject> objects;
  {
    const auto worker = OpenSession("tenant", format);
    for (uint32_t number = 0; number < 8; ++number) {
      objects.push_back(MakeObject({.number = number, .codec = kCodecs[number % 2]}, format));
      ASSERT_TRUE(worker->Put(Offer(objects.back()), objects.back().payload).ok());
    }
  }
  StopNode();
  StartNode();
  const auto worker = OpenSession("tenant", format);
  ExpectSlices(worker.get(), objects, RankRange(objects[0].object->layout, 1, 4));
  EXPECT_GT(node_.Metric("okv_node_promoted_bytes_total"), 0);
  ExpectSlices(worker.get(), objects, RankRange(objects[0].object->layout, 3, 4));
}

TEST_F(ServeRangeTest, ManyRangesPassThroughFewPlaces) {
  StartNode({.bulks_per_session_max = 2, .bulks_max = 3});
  const Format format = FormatOf(4);
  const auto writer = OpenSession("tenant", format);
  std::vector<TestObject> objects;
  for (uint32_t number = 0; number < 12; ++number) {
    objects.push_back(MakeObject({.number = number, .codec = kCodecs[number % 2]}, format));
    ASSERT_TRUE(writer->Put(Offer(objects.back()), objects.back().payload).ok());
  }
  std::vector<std::unique_ptr<TestWorker>> ranks;
  std::vector<v1::FetchRequest> requests;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ranks.push_back(OpenSession("tenant", format));
    requests.push_back(RangeRequest(objects, RankRange(objects[0].object->layout, rank, 2)));
    ranks[rank]->Send(MessageType::kFetchRequest, requests[rank].SerializeAsString());
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto delivered = ranks[rank]->Answers(requests[rank].request_id(), objects.size());
    for (size_t i = 0; i < objects.size(); ++i) {
      ASSERT_TRUE(delivered[i].status.ok()) << delivered[i].status;
      EXPECT_TRUE(delivered[i].payload ==
                  Slice(objects[i], RankRange(objects[0].object->layout, rank, 2)));
    }
  }
}

TEST_F(ServeRangeTest, ARangeThatTheFormatDoesNotHaveIsRefusedNamingTheField) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});  // 2 layers, 2 heads.
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
  const struct {
    BlockRange range;
    const char* field;
  } bad[] = {
      {{.layer_begin = 1}, "layer_begin"},
      {{.layer_begin = 1, .layer_end = 1}, "layer_begin"},
      {{.layer_end = 3}, "layer_end"},
      {{.layer_begin = UINT32_MAX, .layer_end = UINT32_MAX}, "layer_end"},
      {{.head_begin = 2, .head_end = 1}, "head_begin"},
      {{.head_begin = 1, .head_end = 3}, "head_end"},
      {{.head_end = UINT32_MAX}, "head_end"},
  };
  for (const auto& [range, field] : bad) {
    const absl::Status status = worker->Fetch(RangeRequest({object}, range))[0].status;
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status << ", " << range.ToString();
    EXPECT_TRUE(absl::StrContains(status.message(), field)) << status;
  }
  ExpectDelivered(worker->Fetch(RangeRequest({object}, {.layer_end = 2, .head_end = 2}))[0],
                  object);
}

TEST_F(ServeRangeTest, AReaderThatVanishesWhileItsRangeIsCopiedLeavesNoPin) {
  StartNode();
  const Format format = FormatOf(8);
  const TestObject object = MakeObject({.number = 1, .codec = Codec::kBf16}, format);
  const auto writer = OpenSession("tenant", format);
  ASSERT_TRUE(writer->Put(Offer(object), object.payload).ok());
  for (int round = 0; round < 20; ++round) {
    const auto reader = OpenSession("tenant", format);
    reader->Send(MessageType::kFetchRequest,
                 RangeRequest(std::vector<TestObject>(20, object),
                              RankRange(object.object->layout, round % 4, 4))
                     .SerializeAsString());
  }
  EXPECT_TRUE(WaitUntil([this] {
    return data_plane_->sessions_count() == 1 && node_.storage->table()->stats().pins_count == 0;
  }));
  ExpectSlices(writer.get(), {object}, RankRange(object.object->layout, 1, 4));
}

}  // namespace
}  // namespace okv::testing_support
