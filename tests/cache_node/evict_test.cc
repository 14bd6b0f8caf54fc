// What leaves the disk when it is full, and that the limit holds meanwhile.

#include "cache_node/evict.h"

#include <filesystem>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <system_error>

#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TempDir;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;

// Groups of 256 KiB, a sixteenth of the arena: four blocks.
constexpr uint64_t kLimitBytes = uint64_t{8} << 20;
constexpr uint64_t kArenaBytes = uint64_t{4} << 20;
constexpr uint64_t kBf16Bytes = 65'536;
constexpr uint32_t kChainBlocks = 8;

TestObject Block(uint32_t number) {
  return MakeObject({.number = number, .codec = Codec::kBf16, .chain_blocks = kChainBlocks});
}

StorageOptions SmallDisk(const std::string& data_dir) {
  StorageOptions options = TestStorageOptions(data_dir);
  options.pool.arena_bytes = kArenaBytes;
  options.disk.disk_bytes = kLimitBytes;
  return options;
}

// As `du` counts; files that go meanwhile do not count.
uint64_t DirectoryBytes(const std::string& path) {
  uint64_t bytes = 0;
  std::error_code error;
  std::filesystem::recursive_directory_iterator entry(path, error);
  while (!error && entry != std::filesystem::recursive_directory_iterator()) {
    std::error_code gone;
    const uintmax_t file_bytes = entry->file_size(gone);
    if (!gone) bytes += (file_bytes + 4095) / 4096 * 4096;
    entry.increment(error);
  }
  return bytes;
}

class EvictTest : public testing::Test {
 protected:
  void Open(const StorageOptions& options) {
    node_.on_removed = [this](const ObjectId& id, const absl::Status& why) {
      EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
      std::lock_guard lock(mu_);
      EXPECT_TRUE(removed_.insert(id).second) << "removed twice";
    };
    const absl::Status status = node_.Open(options);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(node_.storage->formats()->Add(testing_support::TestFormat()).ok());
  }
  testing::AssertionResult Write(const TestObject& object) {
    const absl::Status status = node_.Write(object);
    if (status.ok()) return testing::AssertionSuccess();
    return testing::AssertionFailure() << object.header().index.value() << ": " << status;
  }
  bool Removed(const ObjectId& id) {
    std::lock_guard lock(mu_);
    return removed_.contains(id);
  }
  size_t removed_count() {
    std::lock_guard lock(mu_);
    return removed_.size();
  }
  // Everything written is held byte for byte, or was reported gone; no block is without its parent.
  void ExpectConsistent(uint32_t written) {
    node_.storage->StopSpilling();
    uint32_t held = 0;
    for (uint32_t number = 0; number < written; ++number) {
      const TestObject object = Block(number);
      const auto payload = node_.Read(object.id());
      ASSERT_NE(payload.ok(), Removed(object.id())) << number << ": " << payload.status();
      if (!payload.ok()) continue;
      ++held;
      EXPECT_EQ(*payload, object.payload) << number;
      if (object.header().parent.has_value()) {
        EXPECT_FALSE(Removed(Block(number - 1).id())) << number << " lost its parent";
      }
    }
    EXPECT_EQ(node_.storage->table()->stats().objects_count, held);
    EXPECT_EQ(node_.storage->table()->stats().pins_count, 0u);
    EXPECT_EQ(node_.Metric("okv_node_evicted_objects_total{reason=\"disk_limit\"}"),
              removed_count());
    EXPECT_EQ(node_.Metric("okv_node_evicted_bytes_total{reason=\"disk_limit\"}"),
              removed_count() * kBf16Bytes);
  }

  const TempDir directory_;
  TestStorage node_;
  std::mutex mu_;
  std::set<ObjectId> removed_;
};

TEST_F(EvictTest, OverwritingFiveTimesTheLimitStaysWithinIt) {
  Open(SmallDisk(directory_.path()));
  constexpr uint32_t kCount = 5 * kLimitBytes / kBf16Bytes;
  uint64_t most_bytes = 0;
  for (uint32_t number = 0; number < kCount; ++number) {
    ASSERT_TRUE(Write(Block(number)));
    const uint64_t bytes = DirectoryBytes(directory_.path());
    most_bytes = std::max(most_bytes, bytes);
    ASSERT_LE(bytes, kLimitBytes * 12 / 10) << number;
  }
  EXPECT_GT(most_bytes, kLimitBytes * 7 / 10) << "the limit was not used";
  EXPECT_GT(removed_count(), kCount / 2);
  ExpectConsistent(kCount);
  node_.Close();
}

TEST_F(EvictTest, WhatIsReadNowAndThenStays) {
  Open(SmallDisk(directory_.path()));
  // Spread over the groups: between two of them go seven chains that nobody reads.
  std::vector<uint32_t> read;
  for (uint32_t number = 0; number < 400; ++number) {
    ASSERT_TRUE(Write(Block(number)));
    if (number / kChainBlocks % 8 == 0 && number < 128) read.push_back(number);
    if (number % 16 != 15) continue;
    for (const uint32_t hot : read) ASSERT_TRUE(node_.Read(Block(hot).id()).ok()) << hot;
  }
  EXPECT_EQ(read.size(), 2 * kChainBlocks);
  for (const uint32_t hot : read) EXPECT_EQ(*node_.Read(Block(hot).id()), Block(hot).payload);
  ExpectConsistent(400);
  node_.Close();
}

TEST_F(EvictTest, ARestartFindsWhatWasNotEvicted) {
  Open(SmallDisk(directory_.path()));
  for (uint32_t number = 0; number < 300; ++number) ASSERT_TRUE(Write(Block(number)));
  node_.Close();
  const uint64_t files_bytes = DirectoryBytes(directory_.path() + "/groups");
  TestStorage restarted;
  ASSERT_TRUE(restarted.Open(SmallDisk(directory_.path())).ok());
  EXPECT_EQ(DirectoryBytes(directory_.path() + "/groups"), files_bytes);
  for (uint32_t number = 0; number < 300; ++number) {
    const auto payload = restarted.Read(Block(number).id());
    ASSERT_NE(payload.ok(), Removed(Block(number).id())) << number << ": " << payload.status();
    if (payload.ok()) {
      EXPECT_EQ(*payload, Block(number).payload);
    }
  }
  // And goes on within the limit.
  for (uint32_t number = 300; number < 400; ++number) {
    const absl::Status status = restarted.Write(Block(number));
    ASSERT_TRUE(status.ok()) << number << ": " << status;
    ASSERT_LE(DirectoryBytes(directory_.path()), kLimitBytes * 12 / 10) << number;
  }
  restarted.Close();
}

TEST_F(EvictTest, ATenantOverItsBudgetIsTheFirstToGo) {
  StorageOptions options = SmallDisk(directory_.path());
  options.tenant_budgets = *TenantBudgets::Parse("greedy=2000000");
  Open(options);
  // The modest tenant's 24 blocks are older than everything of the greedy one.
  for (uint32_t number = 0; number < 24; ++number) ASSERT_TRUE(Write(Block(number)));
  for (uint32_t number = 1000; number < 1400; ++number) {
    ASSERT_TRUE(Write(MakeObject({.number = number,
                                  .codec = Codec::kBf16,
                                  .tenant = "greedy",
                                  .chain_blocks = kChainBlocks})));
  }
  for (uint32_t number = 0; number < 24; ++number) EXPECT_FALSE(Removed(Block(number).id()));
  EXPECT_GT(node_.Metric("okv_node_evicted_objects_total{reason=\"tenant_budget\"}"), 200);
  EXPECT_EQ(node_.Metric("okv_node_evicted_objects_total{reason=\"disk_limit\"}"), 0);
  node_.Close();
}

TEST(TenantBudgetsTest, AreReadFromAList) {
  const TenantBudgets budgets = *TenantBudgets::Parse("a=10,b=c=20,*=5");
  EXPECT_EQ(budgets.Of("a"), 10u);
  EXPECT_EQ(budgets.Of("b=c"), 20u);
  EXPECT_EQ(budgets.Of("other"), 5u);
  EXPECT_EQ(TenantBudgets::Parse("")->Of("a"), UINT64_MAX);
  for (const char* bad : {"a", "a=", "=5", "a=-1", "a=1,a=2", "*=1,*=2", "a=1x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(TenantBudgets::Parse(bad).status())) << bad;
  }
}

TEST_F(EvictTest, AChainLongerThanTheNodeGivesUpItsEndNotItsBeginning) {
  Open(SmallDisk(directory_.path()));
  const auto block = [](uint32_t number) {
    return MakeObject({.number = number, .codec = Codec::kBf16, .chain_blocks = 1000});
  };
  uint32_t refused = 0;
  uint32_t first_refused = 0;
  for (uint32_t number = 0; number < 300; ++number) {
    const absl::Status status = node_.Write(block(number));
    ASSERT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    if (!status.ok() && refused++ == 0) first_refused = number;
    ASSERT_LE(DirectoryBytes(directory_.path()), kLimitBytes * 12 / 10) << number;
  }
  node_.storage->StopSpilling();
  // What comes behind a block that was refused displaces nothing.
  EXPECT_GT(refused, 0u);
  EXPECT_EQ(removed_count(), 0u);
  for (uint32_t number = 0; number < first_refused; ++number) {
    const auto payload = node_.Read(block(number).id());
    ASSERT_TRUE(payload.ok()) << number << ": " << payload.status();
    EXPECT_EQ(*payload, block(number).payload);
  }
  node_.Close();
}

TEST_F(EvictTest, AChainThatFillsTheNodeGivesWayToOthersFromItsEnd) {
  Open(SmallDisk(directory_.path()));
  const auto block = [](uint32_t number) {
    return MakeObject({.number = number, .codec = Codec::kBf16, .chain_blocks = 1000});
  };
  uint32_t held = 0;
  while (Write(block(held))) ++held;
  ASSERT_GT(held, kLimitBytes / kBf16Bytes);
  for (uint32_t number = 1000; number < 1100; ++number) {
    ASSERT_TRUE(Write(Block(number)));
    ASSERT_LE(DirectoryBytes(directory_.path()), kLimitBytes * 12 / 10) << number;
  }
  node_.storage->StopSpilling();
  EXPECT_GT(removed_count(), 0u);
  bool gone = false;
  for (uint32_t number = 0; number < held; ++number) {
    const auto payload = node_.Read(block(number).id());
    ASSERT_NE(payload.ok(), Removed(block(number).id())) << number << ": " << payload.status();
    EXPECT_FALSE(gone && payload.ok()) << number << " lost its parent";
    gone = !payload.ok();
  }
  EXPECT_TRUE(gone);
  for (uint32_t number = 1000; number < 1100; ++number) {
    const auto payload = node_.Read(Block(number).id());
    ASSERT_TRUE(payload.ok()) << number << ": " << payload.status();
    EXPECT_EQ(*payload, Block(number).payload) << number;
  }
  node_.Close();
}

TEST_F(EvictTest, ReadersAndAFullDiskSeeRightBytesOrAMiss) {
  Open(SmallDisk(directory_.path()));
  std::atomic<uint32_t> written{0};
  std::thread writer([&] {
    for (uint32_t number = 0; number < 400; ++number) {
      ASSERT_TRUE(Write(Block(number)));
      written = number + 1;
    }
  });
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::vector<std::thread> readers;
  for (uint64_t reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937_64 random(seed + reader);
      while (written < 400) {
        const TestObject object = Block(random() % std::max(written.load(), 1u));
        const auto payload = node_.Read(object.id());
        ASSERT_TRUE(payload.ok() || absl::IsNotFound(payload.status())) << payload.status();
        if (payload.ok()) {
          ASSERT_EQ(*payload, object.payload);
        }
      }
    });
  }
  writer.join();
  for (std::thread& reader : readers) reader.join();
  ExpectConsistent(400);
  node_.Close();
}

}  // namespace
}  // namespace okv
