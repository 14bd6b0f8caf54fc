// Objects that do not fit DRAM: spilled, promoted, refused, and found damaged.

#include "cache_node/spill.h"

#include <chrono>
#include <future>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TempDir;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;

constexpr uint64_t kBf16Bytes = 65'536;

TestObject Bf16(uint32_t number) { return MakeObject({.number = number, .codec = Codec::kBf16}); }

TEST(SpillTest, OptionsNameWhatIsWrong) {
  SpillerOptions options;
  EXPECT_TRUE(options.Validate().ok());
  options.low_watermark = 0.95;
  EXPECT_TRUE(absl::IsInvalidArgument(options.Validate()));
  options = {};
  options.group_objects_max = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(options.Validate()));
}

TEST(SpillTest, FourTimesTheArenaReadsBackByteForByte) {
  const TempDir directory;
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  constexpr uint32_t kCount = 64;  // x 64 KiB into 1 MiB.
  for (uint32_t number = 0; number < kCount; ++number) {
    const absl::Status status = node.Write(Bf16(number));
    ASSERT_TRUE(status.ok()) << number << ": " << status;
  }
  EXPECT_EQ(node.storage->table()->stats().objects_count, kCount);
  // Makes room for one object, which nobody else takes: a load promotes only where there is room.
  ASSERT_TRUE(node.AllocateAndWait(kBf16Bytes).ok());
  for (uint32_t number = 0; number < kCount; ++number) {
    const TestObject object = Bf16(number);
    const auto payload = node.Read(object.id());
    ASSERT_TRUE(payload.ok()) << number << ": " << payload.status();
    ASSERT_EQ(*payload, object.payload) << number;
  }
  EXPECT_GE(node.Metric("okv_node_spilled_bytes_total"), (kCount - 16) * kBf16Bytes);
  for (int use = 0; use < 2; ++use) ASSERT_TRUE(node.Read(Bf16(0).id()).ok());
  EXPECT_GT(node.Metric("okv_node_promoted_bytes_total"), 0);
  EXPECT_EQ(node.Metric("okv_node_stored_bytes{codec=\"bf16\"}"), kCount * kBf16Bytes);
  node.storage->StopSpilling();
  EXPECT_EQ(node.Metric("okv_node_pins"), 0);
  node.Close();
}

TEST(SpillTest, ReadersAndWritersTogetherSeeEveryCommittedObject) {
  const TempDir directory;
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  std::atomic<uint32_t> written{0};
  constexpr uint32_t kCount = 60;
  std::thread writer([&] {
    for (uint32_t number = 0; number < kCount; ++number) {
      ASSERT_TRUE(node.Write(Bf16(number)).ok());
      written = number + 1;
    }
  });
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937_64 random(reader);
      for (int step = 0; step < 200; ++step) {
        const uint32_t count = written;
        if (count == 0) {
          std::this_thread::yield();
          continue;
        }
        const TestObject object = Bf16(random() % count);
        const auto payload = node.Read(object.id());
        ASSERT_TRUE(payload.ok()) << payload.status();
        ASSERT_EQ(*payload, object.payload);
      }
    });
  }
  writer.join();
  for (std::thread& reader : readers) reader.join();
  node.storage->StopSpilling();
  EXPECT_EQ(node.storage->table()->stats().pins_count, 0u);
  node.Close();
}

TEST(SpillTest, WhoWaitsForPinnedMemoryGivesUpAfterAWhile) {
  const TempDir directory;
  FakeClock clock;
  TestStorage node;
  node.clock = &clock;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  Extent all = *node.AllocateAndWait(uint64_t{1} << 20);
  std::promise<absl::Status> gave_up;
  std::promise<absl::Status> second;
  node.storage->spiller()->Allocate(
      kBf16Bytes, /*may_drop=*/true,
      [&](absl::StatusOr<Extent> extent) { gave_up.set_value(extent.status()); });
  clock.AdvanceNanos(SpillerOptions().allocate_wait_nanos - 1);
  node.storage->spiller()->Allocate(
      kBf16Bytes, /*may_drop=*/true,
      [&](absl::StatusOr<Extent> extent) { second.set_value(extent.status()); });
  clock.AdvanceNanos(1);
  EXPECT_TRUE(absl::IsResourceExhausted(gave_up.get_future().get()));
  all = Extent();  // The second waiter has time left, and now there is room.
  EXPECT_TRUE(second.get_future().get().ok());
  node.Close();
}

TEST(SpillTest, StoppingFailsWhoWaits) {
  const TempDir directory;
  FakeClock clock;
  TestStorage node;
  node.clock = &clock;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  {
    const Extent all = *node.AllocateAndWait(uint64_t{1} << 20);
    std::promise<absl::Status> waiting;
    node.storage->spiller()->Allocate(
        kBf16Bytes, /*may_drop=*/true,
        [&](absl::StatusOr<Extent> extent) { waiting.set_value(extent.status()); });
    node.storage->StopSpilling();
    EXPECT_TRUE(absl::IsUnavailable(waiting.get_future().get()));
    EXPECT_TRUE(absl::IsUnavailable(node.AllocateAndWait(kBf16Bytes).status()));
  }
  node.Close();
}

TEST(SpillTest, AStopCountsWhatIsPinnedAsLost) {
  const TempDir directory;
  TestStorage node;
  std::string log;
  node.log = [&](const std::string& line) { log += line + "\n"; };
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  ASSERT_TRUE(node.Write(Bf16(1)).ok());
  node.storage->StopSpilling();
  {
    const ObjectPin pin = *node.storage->table()->Pin(Bf16(1).id());
    node.storage->SpillRest(10'000'000'000);
  }
  EXPECT_NE(log.find("1 objects were only in memory"), std::string::npos) << log;
  node.Close();
}

TEST(SpillTest, AnObjectDamagedInDramIsQuarantinedInsteadOfSpilled) {
  const TempDir directory;
  TestStorage node;
  std::promise<ObjectId> removed;
  node.on_removed = [&](const ObjectId& id, const absl::Status& why) {
    EXPECT_TRUE(absl::IsDataLoss(why)) << why;
    removed.set_value(id);
  };
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  ASSERT_TRUE(node.Write(Bf16(1)).ok());
  {
    const ObjectPin pin = *node.storage->table()->Pin(Bf16(1).id());
    const_cast<uint8_t*>(pin.dram().data())[1000] ^= 1;
  }
  ASSERT_TRUE(node.Write(Bf16(2)).ok());
  node.storage->StopSpilling();
  node.storage->SpillRest(10'000'000'000);
  EXPECT_EQ(removed.get_future().get(), Bf16(1).id());
  EXPECT_TRUE(absl::IsNotFound(node.Read(Bf16(1).id()).status()));
  EXPECT_EQ(*node.Read(Bf16(2).id()), Bf16(2).payload);
  EXPECT_EQ(node.Metric("okv_node_corrupt_objects_total{tier=\"dram\"}"), 1);
  EXPECT_EQ(node.storage->disk()->stats().objects_count, 1u);
  node.Close();
}

bool InDram(TestStorage* node, uint32_t number) {
  const absl::StatusOr<ObjectPin> pin = node->storage->table()->Pin(Bf16(number).id());
  return pin.ok() && !pin->dram().empty();
}

TEST(SpillTest, AScanOverFourTimesDramLeavesTheHotSetWhereItIs) {
  const TempDir directory;
  {
    TestStorage node;
    ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
    ASSERT_TRUE(node.storage->formats()->Add(testing_support::TestFormat()).ok());
    for (uint32_t number = 0; number < 76; ++number) ASSERT_TRUE(node.Write(Bf16(number)).ok());
    node.Close();
  }
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  constexpr uint32_t kHot = 12;  // Of 16 that fit; the scan is 64 others.
  for (uint32_t number = 0; number < kHot; ++number) {
    ASSERT_TRUE(node.Read(Bf16(number).id()).ok());
    EXPECT_TRUE(InDram(&node, number)) << "with free memory the first use promotes";
  }
  for (uint32_t number = kHot; number < 76; ++number) {
    ASSERT_EQ(*node.Read(Bf16(number).id()), Bf16(number).payload);
  }
  for (uint32_t number = 0; number < kHot; ++number) EXPECT_TRUE(InDram(&node, number)) << number;
  EXPECT_GE(node.Metric("okv_node_passed_bytes_total"), 60 * kBf16Bytes);
  // A second scan comes back to each after more than DRAM holds: none is used again within the
  // window.
  for (uint32_t number = kHot; number < 76; ++number) {
    ASSERT_TRUE(node.Read(Bf16(number).id()).ok());
  }
  for (uint32_t number = 0; number < kHot; ++number) EXPECT_TRUE(InDram(&node, number)) << number;
  // What is used twice in a row is promoted, and the coldest gives way.
  for (int use = 0; use < 2; ++use) ASSERT_TRUE(node.Read(Bf16(70).id()).ok());
  EXPECT_TRUE(InDram(&node, 70));
  node.Close();
}

TEST(SpillTest, ARowThatTheTableDoesNotKnowIsReplaced) {
  const TempDir directory;
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  const TestObject old = MakeObject({.number = 1, .codec = Codec::kBf16, .write_id = 1});
  const TestObject young = MakeObject({.number = 1, .codec = Codec::kBf16, .write_id = 2});
  ASSERT_TRUE(node.storage->disk()->Put({{.object = old.object, .payload = old.payload}}).ok());
  ASSERT_TRUE(node.storage->formats()->Add(testing_support::TestFormat()).ok());
  ASSERT_TRUE(node.Write(young).ok());
  node.Close();
  TestStorage restarted;
  ASSERT_TRUE(restarted.Open(TestStorageOptions(directory.path())).ok());
  EXPECT_EQ(restarted.storage->table()->Pin(young.id())->object().header.generation, 2u);
  EXPECT_EQ(*restarted.Read(young.id()), young.payload);
  restarted.Close();
}

}  // namespace
}  // namespace okv
