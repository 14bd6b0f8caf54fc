// Objects that lie apart in HBM, or whose places at the reader's GPU lie apart, and that travel
// together all the same. The transport of these tests copies by address, so that the device is not
// fenced.

#include <algorithm>
#include <atomic>
#include <future>
#include <numeric>
#include <random>
#include <vector>

#include "client/node_session.h"
#include "gtest/gtest.h"
#include "tests/cache_node/ranges.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

constexpr uint32_t kObjectsCount = 40;

class ServePackTest : public ServeTest {
 protected:
  ServePackTest() {
    hbm_bytes_ = uint64_t{4} << 20;
    staging_bytes_ = DeviceStaging::kSlots * 7 * block_bytes_;  // Of seven blocks a place.
    worker_transport_ = hub_.CreateTransport(&device_, staging_bytes_);
    memory_ = *device_.Allocate(kMemoryBytes);
    OKV_CHECK(worker_transport_
                  ->RegisterMemory(absl::MakeSpan(memory_, kMemoryBytes), MemoryKind::kDevice)
                  .ok());
  }
  ~ServePackTest() override {
    StopNode();
    worker_transport_.reset();
    device_.Free(memory_);
  }

  TestObject Object(uint32_t number) {
    return MakeObject({.number = number, .chain_blocks = 1}, format_);
  }
  // In this order in HBM.
  void PutAll(const std::vector<uint32_t>& numbers) {
    const auto writer = OpenSession("tenant", format_);
    for (const uint32_t number : numbers) {
      const TestObject object = Object(number);
      ASSERT_TRUE(writer->Put(Offer(object), object.payload).ok());
    }
    writer->Close();
  }
  static std::vector<uint32_t> InOrder() {
    std::vector<uint32_t> numbers(kObjectsCount);
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }
  std::vector<uint32_t> Shuffled() {
    std::vector<uint32_t> numbers = InOrder();
    std::shuffle(numbers.begin(), numbers.end(), random_);
    return numbers;
  }

  // Object i goes to place places[i] of the reader's memory.
  std::vector<NodeSession::FetchTarget> TargetsAt(const std::vector<uint32_t>& places,
                                                  size_t bytes) {
    std::vector<NodeSession::FetchTarget> targets;
    for (uint32_t i = 0; i < places.size(); ++i) {
      const TestObject object = Object(i);
      targets.push_back({.id = object.id(),
                         .index = object.header().index,
                         .buffer = absl::MakeSpan(memory_ + places[i] * bytes, bytes)});
    }
    return targets;
  }
  void ExpectFetched(const std::vector<uint32_t>& places, const BlockRange& range = {}) {
    std::fill_n(memory_, kMemoryBytes, uint8_t{0xa5});
    const BlockRange resolved = *ResolveRange(range, layout_);
    const auto targets = TargetsAt(places, resolved.bytes(layout_, Codec::kInt2));
    const auto headers = FetchBySession(format_, targets, range);
    for (uint32_t i = 0; i < targets.size(); ++i) {
      const TestObject object = Object(i);
      if (std::find(missing_.begin(), missing_.end(), i) != missing_.end()) {
        EXPECT_TRUE(absl::IsNotFound(headers[i].status())) << headers[i].status();
        continue;
      }
      ASSERT_TRUE(headers[i].ok()) << headers[i].status();
      EXPECT_TRUE(*headers[i] == object.header());
      const std::vector<uint8_t> expected = Slice(object, resolved);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), targets[i].buffer.begin()))
          << "object " << i;
    }
    EXPECT_TRUE(WaitUntil(
        [this] { return other_sessions_ > 0 || node_.storage->table()->stats().pins_count == 0; }));
  }
  double Merged() { return node_.Metric("okv_node_hbm_merged_objects_total"); }
  double Packed() { return node_.Metric("okv_node_hbm_packed_objects_total"); }

  static constexpr size_t kMemoryBytes = size_t{4} << 20;
  const uint64_t seed_ = std::random_device()();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, absl::StrCat("seed ", seed_)};
  std::mt19937_64 random_{seed_};
  // An int2 block has 15 pages of the machine: neighbours leave no gap.
  const Format format_ = FormatOf(8);
  const PageLayout layout_ = PageLayout::Of(format_);
  const size_t block_bytes_ = layout_.block_bytes(Codec::kInt2);
  std::vector<uint32_t> missing_;
  uint8_t* memory_ = nullptr;
};

TEST_F(ServePackTest, NeighboursInHbmLeaveTogetherForPlacesThatLieApart) {
  StartNode();
  PutAll(InOrder());
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  ExpectFetched(backwards);
  EXPECT_EQ(Packed(), 0);
  EXPECT_EQ(Merged(), 34);  // Five times seven, and five.
  EXPECT_EQ(device_.copied_within(), kObjectsCount);
}

TEST_F(ServePackTest, ObjectsThatLieApartInHbmArePutTogether) {
  StartNode();
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  PutAll(backwards);
  ExpectFetched(InOrder());
  EXPECT_EQ(Packed(), kObjectsCount);
  EXPECT_EQ(device_.copied_within(), kObjectsCount);
}

TEST_F(ServePackTest, AnyOrderOnBothSidesWithObjectsMissing) {
  StartNode();
  std::vector<uint32_t> held = Shuffled();
  missing_.assign(held.end() - 4, held.end());
  held.resize(held.size() - 4);
  PutAll(held);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> places = InOrder();
    for (int swaps = 0; swaps < round; ++swaps) {
      std::swap(places[random_() % kObjectsCount], places[random_() % kObjectsCount]);
    }
    ExpectFetched(places);
  }
  EXPECT_GT(Packed(), 0);
  EXPECT_GT(Merged(), 0);
}

TEST_F(ServePackTest, RangesArePutTogetherInHbm) {
  StartNode();
  PutAll(Shuffled());
  for (const uint32_t ranks_count : {2, 4, 8}) {
    for (uint32_t rank = 0; rank < ranks_count; ++rank) {
      ExpectFetched(Shuffled(), RankRange(layout_, rank, ranks_count));
    }
  }
  EXPECT_GT(Packed(), 0);
}

TEST_F(ServePackTest, WithoutStagingEachTravelsAlone) {
  worker_transport_ = hub_.CreateTransport();
  OKV_CHECK(
      worker_transport_->RegisterMemory(absl::MakeSpan(memory_, kMemoryBytes), MemoryKind::kDevice)
          .ok());
  StartNode();
  PutAll(Shuffled());
  ExpectFetched(Shuffled());
  EXPECT_EQ(Packed(), 0);
  EXPECT_EQ(device_.copied_within(), 0u);
}

TEST_F(ServePackTest, SessionsShareThePlacesAndWhoGetsNoneTravelsAllTheSame) {
  StartNode();
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  PutAll(backwards);  // Nothing lies behind what is asked for before it.
  std::vector<TestObject> objects;
  for (uint32_t i = 0; i < kObjectsCount; ++i) objects.push_back(Object(i));
  std::vector<std::unique_ptr<TestWorker>> readers;
  // A reader that receives nothing yet, and how many places it gets.
  const auto add = [&](size_t slots_count) {
    readers.push_back(OpenSession("tenant", format_));
    readers.back()->HoldDeliveries();
    v1::FetchRequest request = Request(objects);
    request.set_pack_bytes_max(uint64_t{1} << 30);
    readers.back()->Send(MessageType::kFetchRequest, request.SerializeAsString());
    EXPECT_TRUE(readers.back()->WaitForHeld(slots_count));
    return readers.back().get();
  };
  TestWorker* const first = add(4);
  add(2);
  add(2);  // None is left.
  first->ReceiveHeld();
  EXPECT_TRUE(WaitUntil([this] { return Packed() == kObjectsCount; }));
  add(2);
  TestWorker* const with_one = add(1);
  add(1);                   // None is left.
  with_one->ReceiveHeld();  // It uses its place again and again.
  EXPECT_TRUE(WaitUntil([this] { return Packed() == 2 * kObjectsCount; }));
  add(1);  // The place that `with_one` had.
  other_sessions_ = readers.size();
  ExpectFetched(InOrder());
  EXPECT_EQ(Packed(), 2 * kObjectsCount);
  for (const auto& reader : readers) reader->Close();
  other_sessions_ = 0;
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
  ExpectFetched(InOrder());
  EXPECT_EQ(Packed(), 3 * kObjectsCount);
}

TEST_F(ServePackTest, ABrokenSessionEndsItsCallOnlyWhenNoCopyRunsAnyMore) {
  StartNode();
  PutAll(InOrder());
  std::fill_n(memory_, kMemoryBytes, uint8_t{0xa5});
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  const auto targets = TargetsAt(backwards, block_bytes_);
  device_.HoldCopies(true);
  const auto session = ClientSession(format_);
  std::atomic<size_t> ended{0};
  session->Fetch(targets, BlockRange{}, absl::Seconds(60),
                 [&](size_t, const absl::StatusOr<ObjectHeader>&) { ++ended; });
  ASSERT_TRUE(WaitUntil([this] { return device_.copies_held() > 0; }));
  session->Break(absl::CancelledError("broken"));
  // The node sees it gone, so that only the copy is left.
  ASSERT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
  for (int i = 0; i < 3; ++i) {  // Behind all that the end of the connection runs there.
    std::promise<void> passed;
    worker_transport_->Post([&passed] { passed.set_value(); });
    passed.get_future().wait();
  }
  EXPECT_EQ(ended, 0u);
  device_.HoldCopies(false);
  EXPECT_TRUE(WaitUntil([&] { return ended == kObjectsCount; }));
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().pins_count == 0; }));
  ExpectFetched(backwards);  // Its places were given back.
}

TEST_F(ServePackTest, AReadersDeviceThatFailsIsNoFaultOfTheNodes) {
  StartNode();
  PutAll(InOrder());
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  device_.SetFailing(true);
  for (const auto& header : FetchBySession(format_, TargetsAt(backwards, block_bytes_))) {
    EXPECT_TRUE(absl::IsInternal(header.status())) << header.status();
  }
  device_.SetFailing(false);
  ExpectFetched(backwards);
}

TEST_F(ServePackTest, ANodesDeviceThatFailsIsToldForEachObject) {
  StartNode();
  std::vector<uint32_t> backwards = InOrder();
  std::reverse(backwards.begin(), backwards.end());
  PutAll(backwards);  // All of them have to be put together.
  device_.SetFailing(true);
  for (const auto& header : FetchBySession(format_, TargetsAt(InOrder(), block_bytes_))) {
    EXPECT_TRUE(absl::IsUnavailable(header.status())) << header.status();
  }
  device_.SetFailing(false);
  ExpectFetched(InOrder());
}

}  // namespace
}  // namespace okv::testing_support
