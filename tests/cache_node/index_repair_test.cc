// A disk tier whose index is damaged or gone: it starts, serves everything whose payload is intact,
// and says what it lost.

#include <algorithm>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache_node/storage.h"
#include "cache_node/tiers/group_files.h"
#include "cache_node/tiers/group_table.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::ReadFileOrEmpty;
using testing_support::TempDir;
using testing_support::TestFormat;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;
using testing_support::WriteFile;

constexpr uint32_t kObjects = 24;

TestObject Block(uint32_t number) {
  return MakeObject({.number = number, .codec = kCodecs[number % 2]});
}

std::string BytesOf(const TestObject& object) {
  return {object.payload.begin(), object.payload.end()};
}

std::vector<std::string> FilesOf(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// A stopped node's directory whose index is in tables and in the write-ahead log.
class IndexRepairTest : public testing::Test {
 protected:
  IndexRepairTest() {
    for (const uint32_t half : {0u, 1u}) {  // The second start writes the first's log to a table.
      TestStorage node;
      EXPECT_TRUE(node.Open(TestStorageOptions(whole_.Path("data"))).ok());
      if (half == 0) {
        EXPECT_TRUE(node.storage->formats()->Add(TestFormat()).ok());
      }
      for (uint32_t number = half * kObjects / 2; number < (half + 1) * kObjects / 2; ++number) {
        EXPECT_TRUE(node.Write(Block(number)).ok());
      }
      node_id_ = node.storage->node_id();
      node.Close();
    }
  }

  // A copy to damage.
  std::string Copy() {
    const std::string path = copies_.Path(absl::StrCat("copy", ++copies_count_));
    std::filesystem::copy(whole_.Path("data"), path, std::filesystem::copy_options::recursive);
    return path;
  }
  static std::string GroupOf(const std::string& data_dir, const TestObject& object) {
    const std::string payload = BytesOf(object);
    for (const std::string& path : FilesOf(data_dir + "/groups")) {
      if (ReadFileOrEmpty(path).find(payload) != std::string::npos) return path;
    }
    ADD_FAILURE() << "not in a group";
    return "";
  }

  // Opens, reads all; returns how many are not there. Whatever is there is right.
  struct Found {
    bool opened = false;
    uint32_t missing = 0;
    uint32_t damaged = 0;
    double rebuilds = 0;
    double recovered = 0;
    double groups_lost = 0;
    std::string log;
  };
  Found Open(const std::string& data_dir) {
    Found found;
    TestStorage node;
    node.log = [&](const std::string& line) { absl::StrAppend(&found.log, line, "\n"); };
    const absl::Status opened = node.Open(TestStorageOptions(data_dir));
    EXPECT_TRUE(opened.ok()) << opened << "\n" << found.log;
    if (!opened.ok()) return found;
    found.opened = true;
    EXPECT_EQ(node.storage->node_id(), node_id_);
    for (uint32_t number = 0; number < kObjects; ++number) {
      const auto payload = node.Read(Block(number).id());
      if (payload.ok()) {
        EXPECT_EQ(*payload, Block(number).payload) << number;
        const ObjectPin pin = *node.storage->table()->Pin(Block(number).id());
        EXPECT_EQ(pin.object().header, Block(number).header());
        EXPECT_EQ(pin.object().tenant, "tenant");
      } else if (absl::IsNotFound(payload.status())) {
        ++found.missing;
      } else {
        EXPECT_TRUE(absl::IsDataLoss(payload.status())) << payload.status();
        ++found.damaged;
      }
    }
    const TierStats stats = node.storage->disk()->stats();
    EXPECT_EQ(stats.objects_count, kObjects - found.missing - found.damaged);
    found.rebuilds = node.Metric("okv_node_index_rebuilds_total");
    found.recovered = node.Metric("okv_node_index_recovered_objects_total");
    found.groups_lost = node.Metric("okv_node_index_lost_groups_total");
    node.Close();
    return found;
  }
  // Nothing is lost.
  void ExpectWhole(const std::string& data_dir, const std::string& what) {
    SCOPED_TRACE(what);
    const Found found = Open(data_dir);
    EXPECT_TRUE(found.opened);
    EXPECT_EQ(found.missing + found.damaged, 0u) << found.log;
    EXPECT_EQ(found.groups_lost, 0);
  }

  const TempDir whole_;
  const TempDir copies_;
  uint32_t copies_count_ = 0;
  std::string node_id_;
};

TEST_F(IndexRepairTest, AFlippedBitAnywhereInTheIndexLosesNothing) {
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (const std::string& file : FilesOf(whole_.Path("data/rocksdb"))) {
    const std::string name = std::filesystem::path(file).filename();
    if (absl::StrContains(name, "LOG") || name == "LOCK") continue;  // Nobody reads them.
    for (int i = 0; i < 3; ++i) {
      const std::string data_dir = Copy();
      const std::string path = data_dir + "/rocksdb/" + name;
      std::string bytes = ReadFileOrEmpty(path);
      if (bytes.empty()) break;
      const size_t at = random() % bytes.size();
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
      WriteFile(path, bytes);
      ExpectWhole(data_dir, absl::StrCat(name, " at ", at, " of ", bytes.size()));
      std::filesystem::remove_all(data_dir);
    }
  }
}

TEST_F(IndexRepairTest, AnIndexFileThatIsShortOrGoneLosesNothing) {
  for (const std::string& file : FilesOf(whole_.Path("data/rocksdb"))) {
    const std::string name = std::filesystem::path(file).filename();
    const std::string bytes = ReadFileOrEmpty(file);
    std::vector<size_t> sizes = {0, bytes.size() / 2};
    if (!bytes.empty()) sizes.push_back(bytes.size() - 1);
    for (const size_t size : sizes) {
      const std::string data_dir = Copy();
      WriteFile(data_dir + "/rocksdb/" + name, bytes.substr(0, size));
      ExpectWhole(data_dir, absl::StrCat(name, " cut to ", size, " of ", bytes.size()));
      std::filesystem::remove_all(data_dir);
    }
    const std::string data_dir = Copy();
    std::filesystem::remove(data_dir + "/rocksdb/" + name);
    ExpectWhole(data_dir, absl::StrCat(name, " gone"));
    std::filesystem::remove_all(data_dir);
  }
}

TEST_F(IndexRepairTest, AnIndexThatIsGoneIsBuiltAnewAndSaysSo) {
  const std::string data_dir = Copy();
  std::filesystem::remove_all(data_dir + "/rocksdb");
  const Found found = Open(data_dir);
  EXPECT_EQ(found.missing + found.damaged, 0u);
  EXPECT_EQ(found.rebuilds, 1);
  EXPECT_EQ(found.recovered, kObjects);
  EXPECT_TRUE(absl::StrContains(found.log, "damaged")) << found.log;
  EXPECT_TRUE(absl::StrContains(found.log, absl::StrCat("took back ", kObjects))) << found.log;
  const Found again = Open(data_dir);
  EXPECT_EQ(again.missing + again.damaged, 0u);
  EXPECT_EQ(again.rebuilds + again.recovered, 0) << again.log;
}

TEST_F(IndexRepairTest, ADamagedIndexIsPutAside) {
  const std::string data_dir = Copy();
  WriteFile(data_dir + "/rocksdb/CURRENT", "nonsense");
  EXPECT_EQ(Open(data_dir).rebuilds, 1);
  EXPECT_EQ(ReadFileOrEmpty(data_dir + "/rocksdb.damaged/CURRENT"), "nonsense");
  WriteFile(data_dir + "/rocksdb/CURRENT", "more nonsense");
  EXPECT_EQ(Open(data_dir).rebuilds, 1);
  EXPECT_EQ(ReadFileOrEmpty(data_dir + "/rocksdb.damaged/CURRENT"), "more nonsense");
}

TEST_F(IndexRepairTest, AGroupWithoutATableThatCanBeReadIsLostAloneAndCounted) {
  const std::string data_dir = Copy();
  const std::string path = GroupOf(data_dir, Block(3));
  std::string bytes = ReadFileOrEmpty(path);
  bytes[bytes.size() - 10] = static_cast<char>(bytes[bytes.size() - 10] ^ 1);  // In its digest.
  WriteFile(path, bytes);
  // As long as the index is whole, nobody needs the table.
  Found found = Open(data_dir);
  EXPECT_EQ(found.missing + found.damaged, 0u);
  std::filesystem::remove_all(data_dir + "/rocksdb");
  found = Open(data_dir);
  EXPECT_GT(found.missing, 0u);
  EXPECT_LT(found.missing, kObjects);
  EXPECT_EQ(found.groups_lost, 1);
  EXPECT_EQ(found.recovered, kObjects - found.missing);
  const std::string name = std::filesystem::path(path).filename();
  EXPECT_TRUE(absl::StrContains(found.log, name)) << found.log;
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(Open(data_dir).groups_lost, 0);
}

TEST_F(IndexRepairTest, ADamagedPayloadIsFoundOutAfterTheIndexWasBuiltAnew) {
  const std::string data_dir = Copy();
  const std::string path = GroupOf(data_dir, Block(5));
  std::string bytes = ReadFileOrEmpty(path);
  const std::string payload = BytesOf(Block(5));
  const size_t at = bytes.find(payload) + 77;
  bytes[at] = static_cast<char>(bytes[at] ^ 4);
  WriteFile(path, bytes);
  std::filesystem::remove_all(data_dir + "/rocksdb");
  const Found found = Open(data_dir);
  EXPECT_EQ(found.damaged, 1u);
  EXPECT_EQ(found.missing, 0u);
}

TEST_F(IndexRepairTest, AnEndOfTheLogThatIsGoneCostsNoCommittedGroup) {
  const std::string data_dir = Copy();
  for (const std::string& path : FilesOf(data_dir + "/rocksdb")) {
    if (absl::EndsWith(path, ".log")) WriteFile(path, "");
  }
  const Found found = Open(data_dir);  // RocksDB takes the short log for a crash.
  EXPECT_EQ(found.missing + found.damaged, 0u) << found.log;
  EXPECT_EQ(found.rebuilds, 0);
  EXPECT_GT(found.recovered, 0);
  EXPECT_TRUE(absl::StrContains(found.log, "took back")) << found.log;
}

TEST_F(IndexRepairTest, WhatACrashLeftIsTakenBackOnlyWhereItVerifies) {
  const std::string data_dir = Copy();
  for (const std::string& path : FilesOf(data_dir + "/rocksdb")) {
    if (absl::EndsWith(path, ".log")) WriteFile(path, "");
  }
  const TestObject torn = Block(kObjects - 1);
  const std::string path = GroupOf(data_dir, torn);
  std::string bytes = ReadFileOrEmpty(path);
  const size_t at = bytes.find(BytesOf(torn));
  bytes.replace(at, 4096, std::string(4096, '\0'));
  WriteFile(path, bytes);
  const Found found = Open(data_dir);
  EXPECT_EQ(found.damaged, 0u);
  EXPECT_EQ(found.missing, 1u);
}

TEST_F(IndexRepairTest, OfTwoVersionsOfAnObjectTheYoungerOneIsTakenBack) {
  const TempDir directory;
  const TestObject old_version = MakeObject({.number = 1, .write_id = 7});
  const TestObject new_version = MakeObject({.number = 1, .write_id = 9});
  const TestObject other = MakeObject({.number = 2});  // Keeps the old version's group.
  {
    auto disk = *RocksdbTier::Open(TestStorageOptions(directory.path()).disk);
    ASSERT_TRUE(disk->SaveFormat(TestFormat()).ok());
    ASSERT_TRUE(disk->Put({{.object = old_version.object, .payload = old_version.payload},
                           {.object = other.object, .payload = other.payload}})
                    .ok());
    ASSERT_TRUE(disk->Remove(old_version.id()).ok());
    ASSERT_TRUE(disk->Put({{.object = new_version.object, .payload = new_version.payload}}).ok());
    ASSERT_TRUE(disk->Flush().ok());
  }
  std::filesystem::remove_all(directory.Path("rocksdb"));
  auto disk = *RocksdbTier::Open(TestStorageOptions(directory.path()).disk);
  uint32_t records = 0;
  ASSERT_TRUE(disk->List({.object =
                              [&](const TierRecord& record) {
                                ++records;
                                if (record.header.id == new_version.id()) {
                                  EXPECT_EQ(record.header.generation, 9u);
                                }
                              },
                          .corrupt = {}})
                  .ok());
  EXPECT_EQ(records, 2u);
  EXPECT_EQ(disk->recovery().objects, 2u);
}

TEST_F(IndexRepairTest, GroupsOfTheVersionWithoutTablesAreServedAsEver) {
  const std::string data_dir = Copy();
  for (const std::string& path : FilesOf(data_dir + "/groups")) {
    const std::string bytes = ReadFileOrEmpty(path);
    const uint64_t table_bytes = 4096;  // One page in groups this small.
    ASSERT_TRUE(absl::StrContains(bytes.substr(bytes.size() - table_bytes), "OKVGROUP"));
    WriteFile(path, bytes.substr(0, bytes.size() - table_bytes));
  }
  Found found = Open(data_dir);
  EXPECT_EQ(found.missing + found.damaged, 0u);
  std::filesystem::remove_all(data_dir + "/rocksdb");
  found = Open(data_dir);
  EXPECT_EQ(found.missing, kObjects);
  EXPECT_GT(found.groups_lost, 0);
}

TEST_F(IndexRepairTest, AGroupOfALaterVersionRefusesTheStart) {
  const std::string data_dir = Copy();
  const std::string path = GroupOf(data_dir, Block(3));
  std::string bytes = ReadFileOrEmpty(path);
  const size_t trailer = bytes.size() - 56;
  ASSERT_EQ(bytes.substr(trailer, 8), "OKVGROUP");
  const uint64_t table_bytes = static_cast<uint8_t>(bytes[trailer + 16]) |
                               uint64_t{static_cast<uint8_t>(bytes[trailer + 17])} << 8;
  bytes[trailer + 8] = 2;
  const size_t table = bytes.size() - GroupFiles::TableBytes(table_bytes);
  const auto digest =
      Sha256(absl::StrCat(bytes.substr(table, table_bytes), bytes.substr(trailer, 24)));
  bytes.replace(trailer + 24, 32, std::string(digest.begin(), digest.end()));
  WriteFile(path, bytes);
  std::filesystem::remove_all(data_dir + "/rocksdb");
  TestStorage node;
  const absl::Status status = node.Open(TestStorageOptions(data_dir));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "version 2")) << status;
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(IndexRepairTest, ARebuildThatWasCutShortGoesOn) {
  // Without rows, after a rebuild began: the state after a crash right behind its mark.
  const std::string data_dir = Copy();
  std::filesystem::rename(data_dir + "/groups", data_dir + "/elsewhere");
  WriteFile(data_dir + "/rocksdb/CURRENT", "nonsense");
  std::filesystem::create_directory(data_dir + "/groups");
  const std::string later = data_dir + "/groups/00000fff.group";
  WriteFile(later, std::string(4096, 'x'));
  {
    // A group that cannot be opened stops the rebuild behind its mark.
    std::filesystem::remove(later);
    std::filesystem::create_directory(later);
    TestStorage node;
    EXPECT_FALSE(node.Open(TestStorageOptions(data_dir)).ok());
  }
  std::filesystem::remove_all(data_dir + "/groups");
  std::filesystem::rename(data_dir + "/elsewhere", data_dir + "/groups");
  // A damaged payload is taken back unverified: this is still the rebuild.
  const std::string path = GroupOf(data_dir, Block(5));
  std::string bytes = ReadFileOrEmpty(path);
  const std::string payload = BytesOf(Block(5));
  bytes[bytes.find(payload)] ^= 1;
  WriteFile(path, bytes);
  const Found found = Open(data_dir);
  EXPECT_EQ(found.recovered, kObjects) << found.log;
  EXPECT_EQ(found.damaged, 1u);
}

TEST_F(IndexRepairTest, ADamagedIdFileIsWrittenAgainFromTheIndex) {
  const std::string data_dir = Copy();
  const std::string whole = ReadFileOrEmpty(data_dir + "/NODE_ID");
  ASSERT_TRUE(absl::StrContains(whole, node_id_));
  std::string damaged = whole;
  damaged[damaged.find(node_id_) + 5] ^= 1;
  WriteFile(data_dir + "/NODE_ID", damaged);
  ExpectWhole(data_dir, "NODE_ID");
  EXPECT_EQ(ReadFileOrEmpty(data_dir + "/NODE_ID"), whole);
  std::filesystem::remove_all(data_dir + "/rocksdb");
  StorageOptions options = TestStorageOptions(data_dir);
  options.disk.node_id = "another";
  TestStorage node;
  const absl::Status status = node.Open(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), node_id_)) << status;
}

TEST_F(IndexRepairTest, ATableWithAHeaderOfAnotherVersionIsNamed) {
  const TestObject object = Block(0);
  HeldObject other = *object.object;
  ++other.header.page_layout_version;
  const std::string bytes = EncodeGroupTable(
      {}, std::vector<TierWrite>{
              {.object = std::make_shared<const HeldObject>(other), .payload = object.payload}});
  const absl::Status status = ParseGroupTable(9, bytes).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), GroupFiles::FileName(9))) << status;
}

TEST_F(IndexRepairTest, RandomBytesAreNoTable) {
  std::mt19937_64 random(7);
  const TestObject objects[] = {Block(0), Block(1)};
  const std::string whole = EncodeGroupTable(
      {{TestFormat().id(), TestFormat().Canonical()}},
      std::vector<TierWrite>{{.object = objects[0].object, .payload = objects[0].payload},
                             {.object = objects[1].object, .payload = objects[1].payload}});
  const absl::StatusOr<GroupTable> table = ParseGroupTable(9, whole);
  ASSERT_TRUE(table.ok());
  ASSERT_EQ(table->objects.size(), 2u);
  EXPECT_EQ(table->objects[1].header, objects[1].header());
  EXPECT_EQ(table->objects[1].place.group, 9u);
  EXPECT_EQ(table->objects[1].place.page, DiskPagesBytes(objects[0].payload.size()) / 4096);
  EXPECT_EQ(table->formats.at(TestFormat().id()), TestFormat().Canonical());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(ParseGroupTable(9, whole.substr(0, size)).ok()) << size;
  }
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = whole;
    for (int flips = 0; flips < 3; ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    ParseGroupTable(9, bytes).IgnoreError();  // Ends, whatever it says.
  }
}

}  // namespace
}  // namespace okv
