// Single calls to the disk that fail, at a moment of the test's choice.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "cache_node/evict.h"
#include "cache_node/tiers/group_files.h"
#include "gtest/gtest.h"
#include "tests/cache_node/failing_calls.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::FailingCalls;
using testing_support::FileCall;
using testing_support::MakeObject;
using testing_support::TempDir;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;

// Of no chain, 64 KiB.
TestObject Lone(uint32_t number) {
  return MakeObject({.number = number, .codec = Codec::kBf16, .chain_blocks = 1});
}

class DiskCallsTest : public testing::Test {
 protected:
  // Groups of 256 KiB: four blocks.
  StorageOptions Options() const {
    StorageOptions options = TestStorageOptions(directory_.path());
    options.pool.arena_bytes = uint64_t{4} << 20;
    options.disk.disk_bytes = uint64_t{8} << 20;
    options.spill.allocate_wait_nanos = 50'000'000;
    return options;
  }
  void EmptyDirectory() {
    if (node_.storage != nullptr) node_.Close();
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      std::filesystem::remove_all(entry);
    }
    written_ = 0;
  }
  void Open() {
    node_.on_removed = [this](const ObjectId&, const absl::Status& why) {
      std::lock_guard lock(mu_);
      removed_.push_back(why);
    };
    ASSERT_TRUE(node_.Open(Options()).ok());
    ASSERT_TRUE(node_.storage->formats()->Add(testing_support::TestFormat()).ok());
  }
  ~DiskCallsTest() override {
    if (node_.storage != nullptr) node_.Close();
  }
  void Write(uint32_t count) {
    for (; written_ < count; ++written_) ASSERT_TRUE(node_.Write(Lone(written_)).ok()) << written_;
  }
  std::vector<absl::Status> removed() {
    std::lock_guard lock(mu_);
    return removed_;
  }
  uint64_t objects_count() const { return node_.storage->table()->stats().objects_count; }
  // Whatever is held is as it was written. Returns how many are.
  uint64_t ExpectHeldIsRight() {
    uint64_t held = 0;
    for (uint32_t number = 0; number < written_; ++number) {
      const auto payload = node_.Read(Lone(number).id());
      if (absl::IsNotFound(payload.status())) continue;
      EXPECT_TRUE(payload.ok()) << number << ": " << payload.status();
      ++held;
      if (payload.ok()) {
        EXPECT_EQ(*payload, Lone(number).payload) << number;
      }
    }
    return held;
  }
  // Groups of which every second block is warm, all of it on disk only: to make room there, what
  // is warm moves. Returns how many there are.
  uint32_t MakeHalfWarmGroups() {
    Write(96);
    node_.storage->StopSpilling();
    node_.storage->SpillRest(60'000'000'000);
    for (ObjectPin& pin :
         node_.storage->table()->PinColdest({.bytes = UINT64_MAX, .objects_max = SIZE_MAX})) {
      EXPECT_GT(node_.storage->table()->UnpinAndEvict(std::move(pin)), 0u);
    }
    for (uint32_t number = 1; number < written_; number += 2) {
      EXPECT_TRUE(node_.storage->table()->Pin(Lone(number).id()).ok());
    }
    return written_ / 2;
  }
  // As the spill thread has it.
  std::unique_ptr<Evictor> MakeEvictor() {
    Spiller* spiller = node_.storage->spiller();
    RocksdbTier* disk = node_.storage->disk();
    return std::make_unique<Evictor>(Evictor::Parts{
        .disk = disk,
        .table = node_.storage->table(),
        .metrics = &node_.metrics,
        .verify =
            [spiller](const HeldObject& object, absl::Span<const uint8_t> payload) {
              return spiller->Verify(object, payload);
            },
        .quarantine =
            [spiller, disk](ObjectPin pin, const absl::Status& why) {
              spiller->Quarantine(std::move(pin), *disk, why);
            },
        .on_removed = [this](const ObjectId& id,
                             const absl::Status& why) { node_.on_removed(id, why); }});
  }
  // Room for this is made by moving two groups or more, and by no more than a few evictions.
  uint64_t SomeMore() const { return node_.storage->disk()->RoomBytes() + (uint64_t{256} << 10); }
  std::string GroupName(uint32_t number) {
    return GroupFiles::FileName(node_.storage->table()->Pin(Lone(number).id())->place().group);
  }
  double Evicted() const {
    return node_.Metric("okv_node_evicted_objects_total{reason=\"disk_limit\"}");
  }

  const TempDir directory_;
  TestStorage node_;
  uint32_t written_ = 0;
  std::mutex mu_;
  std::vector<absl::Status> removed_;
};

// The index takes no removals, or anything else.
int FailIndexWrites(FileCall call, const std::string& path) {
  const bool writes = call == FileCall::kWrite || call == FileCall::kOpenToWrite;
  return writes && absl::StrContains(path, "/rocksdb/") ? EROFS : 0;
}

TEST_F(DiskCallsTest, WhatCannotBeRemovedFromDiskStaysAndIsServed) {
  Open();
  MakeHalfWarmGroups();
  const std::unique_ptr<Evictor> evictor = MakeEvictor();
  {
    const FailingCalls failing(FailIndexWrites);
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = evictor->MakeRoom(SomeMore(), 0);
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    }
    EXPECT_EQ(objects_count(), written_);
    EXPECT_EQ(Evicted(), 0);
    EXPECT_TRUE(removed().empty());
    EXPECT_EQ(ExpectHeldIsRight(), written_);
  }
  const absl::Status status = evictor->MakeRoom(SomeMore(), 0);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_GT(Evicted(), 0);
  EXPECT_EQ(removed().size(), Evicted());
  EXPECT_EQ(ExpectHeldIsRight(), objects_count());
}

TEST_F(DiskCallsTest, AFullTierWhoseIndexTakesNothingServesOnAndRecovers) {
  Open();
  Write(200);
  ASSERT_GT(Evicted(), 0);
  uint64_t held = 0;
  size_t removals = 0;
  {
    const FailingCalls failing(FailIndexWrites);
    // DRAM fills with what can be read, and written, no more.
    while (node_.Write(Lone(written_)).ok()) ++written_;
    held = objects_count();
    removals = removed().size();
    const double evicted = Evicted();
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(node_.Write(Lone(written_)).ok());
    EXPECT_EQ(objects_count(), held);
    EXPECT_EQ(removed().size(), removals);
    EXPECT_EQ(Evicted(), evicted);
    EXPECT_EQ(ExpectHeldIsRight(), held);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (const uint32_t goal = written_ + 100; written_ < goal;) {
    const absl::Status status = node_.Write(Lone(written_));
    if (status.ok()) ++written_;
    ASSERT_LT(std::chrono::steady_clock::now(), end) << status;
  }
  node_.storage->StopSpilling();
  EXPECT_GT(removed().size(), removals);
  for (const absl::Status& why : removed()) EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
  EXPECT_EQ(ExpectHeldIsRight(), objects_count());
}

// The rows name the new group, by an index that does not know whether they are durable.
TEST_F(DiskCallsTest, ASyncThatFailsBehindAMoveLosesNothing) {
  for (const int failures : {1, 2, 4}) {
    SCOPED_TRACE(failures);
    EmptyDirectory();
    Open();
    MakeHalfWarmGroups();
    const std::unique_ptr<Evictor> evictor = MakeEvictor();
    int left = failures;
    bool moving = false;
    {
      const FailingCalls failing([&](FileCall call, const std::string& path) {
        moving = moving || (call == FileCall::kOpenToWrite && absl::EndsWith(path, ".group"));
        if (call != FileCall::kSync || !moving || !absl::EndsWith(path, ".log")) return 0;
        return left-- > 0 ? EIO : 0;
      });
      const absl::Status failed = evictor->MakeRoom(SomeMore(), 0);
      EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
      absl::Status status = failed;
      for (int i = 0; i < 20 && !status.ok(); ++i) status = evictor->MakeRoom(SomeMore(), 0);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_LT(left, 1);
    }
    EXPECT_TRUE(node_.storage->disk()->Flush().ok());
    EXPECT_EQ(ExpectHeldIsRight(), objects_count());
    for (const absl::Status& why : removed()) EXPECT_TRUE(absl::IsResourceExhausted(why)) << why;
    // Nothing is kept for ever either.
    for (const GroupUse& use : node_.storage->disk()->Groups()) EXPECT_GT(use.live_bytes, 0u);
  }
}

TEST_F(DiskCallsTest, AGroupThatCannotBeReadDoesNotCostTheOthersMore) {
  Open();
  const uint32_t warm = MakeHalfWarmGroups();
  const uint64_t room = SomeMore();
  const std::string bad = GroupName(1);
  int reads = 0;
  {
    const FailingCalls failing([&](FileCall call, const std::string& path) {
      if (call != FileCall::kRead || !absl::EndsWith(path, bad)) return 0;
      ++reads;
      return EIO;
    });
    const absl::Status made = MakeEvictor()->MakeRoom(room, 0);
    EXPECT_TRUE(made.ok()) << made;
  }
  EXPECT_GT(reads, 0);
  // Two rounds of an eighth of the limit at most, where one would do.
  EXPECT_LE(Evicted(), 32);
  EXPECT_EQ(objects_count(), written_ - Evicted());
  EXPECT_GE(objects_count(), warm);
  EXPECT_EQ(ExpectHeldIsRight(), objects_count());
}

TEST_F(DiskCallsTest, AMoveDoesNotTakeADamagedCopyFromDram) {
  Open();
  MakeHalfWarmGroups();
  const std::string before = GroupName(1);
  ASSERT_TRUE(node_.Read(Lone(1).id()).ok());  // Promoted: DRAM is empty.
  {
    const ObjectPin pin = *node_.storage->table()->Pin(Lone(1).id());
    ASSERT_FALSE(pin.dram().empty());
    const_cast<uint8_t*>(pin.dram().data())[1000] ^= 1;
  }
  ASSERT_TRUE(MakeEvictor()->MakeRoom(SomeMore(), 0).ok());
  EXPECT_NE(GroupName(1), before);
  EXPECT_GT(node_.storage->table()->UnpinAndEvict(*node_.storage->table()->Pin(Lone(1).id())), 0u);
  const auto payload = node_.Read(Lone(1).id());
  ASSERT_TRUE(payload.ok()) << payload.status();
  EXPECT_EQ(*payload, Lone(1).payload);
}

TEST_F(DiskCallsTest, AFileSystemThatDoesNotSayWhatIsFreeCostsNothing) {
  Open();
  Write(60);
  {
    const FailingCalls failing([](FileCall call, const std::string& path) {
      return call == FileCall::kFreeSpace && absl::StrContains(path, "/groups") ? EIO : 0;
    });
    EXPECT_EQ(node_.storage->disk()->RoomBytes(), 0u);
    EXPECT_EQ(node_.storage->disk()->ShortBytes(1), 0u);
    while (node_.Write(Lone(written_)).ok()) ++written_;
    EXPECT_FALSE(node_.Write(Lone(written_)).ok());
    EXPECT_EQ(objects_count(), written_);
    EXPECT_GT(node_.Metric("okv_node_spill_failures_total{code=\"UNAVAILABLE\"}"), 0);
  }
  EXPECT_TRUE(removed().empty());
  Write(written_ + 8);
}

TEST_F(DiskCallsTest, AnIndexThatIsBuiltAnewWhileTheNodeRunsKeepsItsId) {
  Open();
  Write(60);
  node_.storage->StopSpilling();
  node_.storage->SpillRest(60'000'000'000);
  RocksdbTier* disk = node_.storage->disk();
  const std::string node_id = disk->node_id();
  {
    const FailingCalls failing(FailIndexWrites);
    EXPECT_FALSE(disk->Remove(Lone(0).id()).ok());
    EXPECT_FALSE(disk->Flush().ok());
  }
  std::filesystem::remove_all(directory_.Path("rocksdb"));
  std::filesystem::remove(directory_.Path("NODE_ID"));
  const absl::Status status = disk->Flush();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(disk->node_id(), node_id);
  EXPECT_TRUE(std::filesystem::exists(directory_.Path("NODE_ID")));
  EXPECT_EQ(ExpectHeldIsRight(), 60u);
}

// What a directory is read for.
class DiskCallsAtStartTest : public DiskCallsTest {
 protected:
  // 24 objects. The index knows those of the first half's groups only.
  void FillWithoutRows() {
    Open();
    Write(12);
    node_.Close();
    const std::string index = directory_.Path("rocksdb");
    std::filesystem::copy(index, directory_.Path("before"),
                          std::filesystem::copy_options::recursive);
    Open();
    Write(24);
    node_.Close();
    std::filesystem::remove_all(index);
    std::filesystem::rename(directory_.Path("before"), index);
  }
  absl::Status OpenFailing(FileCall call, const std::string& part) {
    const FailingCalls failing([&](FileCall made, const std::string& path) {
      return made == call && absl::StrContains(path, part) ? EIO : 0;
    });
    return node_.Open(Options());
  }
};

TEST_F(DiskCallsAtStartTest, AListOfGroupsThatIsCutShortRefusesTheStart) {
  Open();
  Write(24);
  node_.Close();
  const absl::Status status = OpenFailing(FileCall::kList, "/groups");
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  Open();
  EXPECT_EQ(ExpectHeldIsRight(), 24u);
}

TEST_F(DiskCallsAtStartTest, AGroupWithoutRowsThatCannotBeReadRefusesTheStartAndStays) {
  FillWithoutRows();
  std::string last;
  for (const auto& entry : std::filesystem::directory_iterator(directory_.Path("groups"))) {
    last = std::max(last, entry.path().string());
  }
  // Its table can be read, a payload cannot.
  int reads = 0;
  {
    const FailingCalls failing([&](FileCall call, const std::string& path) {
      return call == FileCall::kRead && path == last && ++reads > 2 ? EIO : 0;
    });
    const absl::Status status = node_.Open(Options());
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  EXPECT_GT(reads, 2);
  EXPECT_TRUE(std::filesystem::exists(last));
  Open();
  EXPECT_EQ(ExpectHeldIsRight(), 24u);
}

}  // namespace
}  // namespace okv
