// What survives the process: restarts, other nodes' directories, and bytes that rot on disk.

#include "cache_node/storage.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/cache_node/failing_calls.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TempDir;
using testing_support::TestFormat;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;

// A stopped node's directory with `count` objects, alternating codecs.
void Fill(const std::string& data_dir, uint32_t count) {
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(data_dir)).ok());
  ASSERT_TRUE(node.storage->formats()->Add(TestFormat()).ok());
  for (uint32_t number = 0; number < count; ++number) {
    ASSERT_TRUE(node.Write(MakeObject({.number = number, .codec = kCodecs[number % 2]})).ok());
  }
  node.Close();
}

TestObject Filled(uint32_t number) {
  return MakeObject({.number = number, .codec = kCodecs[number % 2]});
}

// The directory's database, opened behind the node's back.
class RawDatabase {
 public:
  explicit RawDatabase(const std::string& data_dir) {
    std::vector<std::string> names;
    const std::string path = data_dir + "/rocksdb";
    EXPECT_TRUE(rocksdb::DB::ListColumnFamilies(rocksdb::DBOptions(), path, &names).ok());
    std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
    for (const std::string& name : names) {
      descriptors.emplace_back(name, rocksdb::ColumnFamilyOptions());
    }
    rocksdb::DB* db = nullptr;
    const rocksdb::Status status =
        rocksdb::DB::Open(rocksdb::DBOptions(), path, descriptors, &families_, &db);
    EXPECT_TRUE(status.ok()) << status.ToString();
    db_.reset(db);
    for (rocksdb::ColumnFamilyHandle* family : families_) by_name_[family->GetName()] = family;
  }
  ~RawDatabase() {
    for (rocksdb::ColumnFamilyHandle* family : families_) db_->DestroyColumnFamilyHandle(family);
  }
  static std::string Key(const ObjectId& id) {
    std::string key(id.key.view());
    key.push_back(static_cast<char>(id.codec));
    return key;
  }
  void Put(const std::string& family, const ObjectId& id, const std::string& value) {
    EXPECT_TRUE(db_->Put(rocksdb::WriteOptions(), by_name_.at(family), Key(id), value).ok());
  }
  void DeleteAll(const std::string& family) {
    const std::unique_ptr<rocksdb::Iterator> rows(
        db_->NewIterator(rocksdb::ReadOptions(), by_name_.at(family)));
    for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
      EXPECT_TRUE(db_->Delete(rocksdb::WriteOptions(), by_name_.at(family), rows->key()).ok());
    }
  }
  void MakeFamily(const std::string& name) {
    rocksdb::ColumnFamilyHandle* family = nullptr;
    EXPECT_TRUE(db_->CreateColumnFamily(rocksdb::ColumnFamilyOptions(), name, &family).ok());
    families_.push_back(family);
  }

 private:
  std::unique_ptr<rocksdb::DB> db_;
  std::vector<rocksdb::ColumnFamilyHandle*> families_;
  std::map<std::string, rocksdb::ColumnFamilyHandle*> by_name_;
};

// Reads of `bad` say kDataLoss once and kNotFound from then on; its neighbours are fine.
void ExpectQuarantined(const std::string& data_dir, uint32_t bad, uint32_t count) {
  TestStorage node;
  std::vector<ObjectId> removed;
  node.on_removed = [&](const ObjectId& id, const absl::Status& why) {
    EXPECT_FALSE(absl::StrContains(why.message(), "removing it")) << why;
    removed.push_back(id);
  };
  ASSERT_TRUE(node.Open(TestStorageOptions(data_dir)).ok());
  EXPECT_EQ(node.storage->table()->stats().objects_count, count);
  for (uint32_t number = 0; number < count; ++number) {
    const auto payload = node.Read(Filled(number).id());
    if (number == bad) {
      EXPECT_TRUE(absl::IsDataLoss(payload.status())) << payload.status();
    } else {
      ASSERT_TRUE(payload.ok()) << number << ": " << payload.status();
      EXPECT_EQ(*payload, Filled(number).payload);
    }
  }
  EXPECT_TRUE(absl::IsNotFound(node.Read(Filled(bad).id()).status()));
  EXPECT_EQ(removed, std::vector<ObjectId>{Filled(bad).id()});
  EXPECT_EQ(node.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), 1);
  EXPECT_EQ(node.storage->disk()->stats().objects_count, count - 1);
  // It may be written again.
  EXPECT_TRUE(node.Write(Filled(bad)).ok());
  EXPECT_EQ(*node.Read(Filled(bad).id()), Filled(bad).payload);
  node.Close();
}

TEST(StorageTest, ARestartAdoptsWhatTheDiskHolds) {
  const TempDir directory;
  Fill(directory.path(), 20);
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  EXPECT_EQ(node.storage->table()->Objects().size(), 20u);
  EXPECT_EQ(node.Metric("okv_node_stored_bytes{codec=\"int2\"}"), 10 * 10'240);
  EXPECT_EQ(node.Metric("okv_node_logical_bytes{codec=\"int2\"}"), 10 * 65'536);
  EXPECT_EQ(node.Metric("okv_node_objects{tier=\"disk\",codec=\"bf16\"}"), 10);
  EXPECT_EQ(node.Metric("okv_node_objects{tier=\"dram\",codec=\"bf16\"}"), 0);
  const Format* format = node.storage->formats()->Find(TestFormat().id());
  ASSERT_NE(format, nullptr);
  EXPECT_EQ(*format, TestFormat());
  for (uint32_t number = 0; number < 20; ++number) {
    EXPECT_EQ(*node.Read(Filled(number).id()), Filled(number).payload);
    const ObjectPin pin = *node.storage->table()->Pin(Filled(number).id());
    EXPECT_EQ(pin.object().header, Filled(number).header());
    EXPECT_EQ(pin.object().tenant, "tenant");
  }
  node.Close();
}

TEST(StorageTest, ANodeKeepsItsIdAndTheDirectoryItsNode) {
  const TempDir directory;
  StorageOptions options = TestStorageOptions(directory.path());
  std::string node_id;
  {
    TestStorage node;
    ASSERT_TRUE(node.Open(options).ok());
    node_id = node.storage->node_id();
    node.Close();
  }
  EXPECT_FALSE(node_id.empty());
  options.disk.node_id = node_id;
  {
    TestStorage node;
    ASSERT_TRUE(node.Open(options).ok());
    EXPECT_EQ(node.storage->node_id(), node_id);
    node.Close();
  }
  options.disk.node_id = "another";
  TestStorage node;
  const absl::Status status = node.Open(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), node_id)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "another")) << status;
}

TEST(StorageTest, ASecondNodeOnOneDirectoryIsRefused) {
  const TempDir directory;
  TestStorage first;
  ASSERT_TRUE(first.Open(TestStorageOptions(directory.path())).ok());
  TestStorage second;
  const absl::Status status = second.Open(TestStorageOptions(directory.path()));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "in use")) << status;
  first.Close();
  EXPECT_TRUE(second.Open(TestStorageOptions(directory.path())).ok());
  second.Close();
}

TEST(StorageTest, ADirectoryThatCannotBeMadeIsNamed) {
  const TempDir directory;
  testing_support::WriteFile(directory.Path("file"), "not a directory");
  TestStorage node;
  const absl::Status status = node.Open(TestStorageOptions(directory.Path("file/data")));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), directory.Path("file/data"))) << status;
}

// Where a stopped node keeps an object's payload.
struct Stored {
  std::string path;
  size_t at = 0;
  std::string bytes;  // Of the whole file.
};
Stored Find(const std::string& data_dir, const TestObject& object) {
  const std::string payload(object.payload.begin(), object.payload.end());
  for (const auto& entry : std::filesystem::directory_iterator(data_dir + "/groups")) {
    Stored stored{
        .path = entry.path(), .at = 0, .bytes = testing_support::ReadFileOrEmpty(entry.path())};
    stored.at = stored.bytes.find(payload);
    if (stored.at != std::string::npos) return stored;
  }
  ADD_FAILURE() << "not in a group: " << object.id().key.Short();
  return {};
}

// A bit of its payload on disk.
void FlipStored(const std::string& data_dir, const TestObject& object) {
  Stored stored = Find(data_dir, object);
  stored.bytes[stored.at + 100] ^= 8;
  testing_support::WriteFile(stored.path, stored.bytes);
}

TEST(StorageTest, AFlippedBitInAGroupIsDataLossForThatObjectOnly) {
  const TempDir directory;
  Fill(directory.path(), 12);
  FlipStored(directory.path(), Filled(6));
  ExpectQuarantined(directory.path(), 6, 12);
}

TEST(StorageTest, TwoReadersOfADamagedPayloadBothGetDataLoss) {
  const TempDir directory;
  Fill(directory.path(), 4);
  FlipStored(directory.path(), Filled(1));
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  {
    ObjectPin first = *node.storage->table()->Pin(Filled(1).id());
    ObjectPin second = *node.storage->table()->Pin(Filled(1).id());
    for (ObjectPin* pin : {&first, &second}) {
      const auto payload = node.storage->spiller()->Load(pin);
      EXPECT_TRUE(absl::IsDataLoss(payload.status())) << payload.status();
    }
  }
  EXPECT_EQ(node.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), 1);
  node.Close();
}

TEST(StorageTest, AFormatThatTheIndexLostIsTakenBackForAllFromAnyGroupThatTellsIt) {
  const TempDir directory;
  Fill(directory.path(), 40);
  RawDatabase(directory.path()).DeleteAll("formats");
  // The group of whose objects one comes first in the index tells nothing.
  uint32_t first = 0;
  for (uint32_t number = 1; number < 40; ++number) {
    if (Filled(number).id() < Filled(first).id()) first = number;
  }
  Stored stored = Find(directory.path(), Filled(first));
  stored.bytes.back() ^= 1;  // Of its table's digest.
  testing_support::WriteFile(stored.path, stored.bytes);
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  for (uint32_t number = 0; number < 40; ++number) {
    const auto payload = node.Read(Filled(number).id());
    ASSERT_TRUE(payload.ok()) << number << ": " << payload.status();
    EXPECT_EQ(*payload, Filled(number).payload);
  }
  node.Close();
}

TEST(StorageTest, AFormatThatCannotBeReadBackRefusesTheStartAndDropsNothing) {
  const TempDir directory;
  Fill(directory.path(), 12);
  RawDatabase(directory.path()).DeleteAll("formats");
  {
    const testing_support::FailingCalls failing(
        [](testing_support::FileCall call, const std::string& path) {
          const bool reads = call == testing_support::FileCall::kRead;
          return reads && absl::EndsWith(path, ".group") ? EIO : 0;
        });
    TestStorage node;
    const absl::Status status = node.Open(TestStorageOptions(directory.path()));
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  EXPECT_EQ(node.storage->table()->stats().objects_count, 12u);
  node.Close();
}

TEST(StorageTest, APayloadOfAnotherObjectIsDataLoss) {
  const TempDir directory;
  Fill(directory.path(), 4);
  Stored stored = Find(directory.path(), Filled(1));
  const TestObject other = Filled(3);
  stored.bytes.replace(stored.at, other.payload.size(),
                       std::string(other.payload.begin(), other.payload.end()));
  testing_support::WriteFile(stored.path, stored.bytes);
  ExpectQuarantined(directory.path(), 1, 4);
}

TEST(StorageTest, AGroupThatIsGoneOrShortAtStartLosesItsObjectsOnly) {
  for (const bool gone : {false, true}) {
    const TempDir directory;
    Fill(directory.path(), 12);
    const Stored stored = Find(directory.path(), Filled(3));
    if (gone) {
      std::filesystem::remove(stored.path);
    } else {
      testing_support::WriteFile(stored.path, stored.bytes.substr(0, stored.at + 100));
    }
    uint32_t lost = 0;
    for (const bool first : {true, false}) {
      TestStorage node;
      ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
      uint32_t missing = 0;
      for (uint32_t number = 0; number < 12; ++number) {
        const auto payload = node.Read(Filled(number).id());
        if (payload.ok()) {
          EXPECT_EQ(*payload, Filled(number).payload);
        } else {
          EXPECT_TRUE(absl::IsNotFound(payload.status())) << payload.status();
          ++missing;
        }
      }
      EXPECT_TRUE(absl::IsNotFound(node.Read(Filled(3).id()).status()));
      EXPECT_LT(missing, 12u);
      EXPECT_EQ(node.storage->disk()->stats().objects_count, 12 - missing);
      EXPECT_EQ(node.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), first ? missing : 0);
      if (!first) {
        EXPECT_EQ(missing, lost);
      }
      lost = missing;
      node.Close();
    }
  }
}

TEST(StorageTest, AGroupThatGoesWhileTheNodeRunsIsDataLoss) {
  const TempDir directory;
  Fill(directory.path(), 4);
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  std::filesystem::remove(Find(directory.path(), Filled(1)).path);
  EXPECT_TRUE(absl::IsDataLoss(node.Read(Filled(1).id()).status()));
  EXPECT_TRUE(absl::IsNotFound(node.Read(Filled(1).id()).status()));
  EXPECT_TRUE(node.Write(Filled(1)).ok());
  EXPECT_EQ(*node.Read(Filled(1).id()), Filled(1).payload);
  node.Close();
}

TEST(StorageTest, AGroupWithoutRowsGoesAtStart) {
  const TempDir directory;
  Fill(directory.path(), 4);
  // What a crash between the file and its rows leaves.
  const std::string orphan = directory.Path("groups/0000abcd.group");
  testing_support::WriteFile(orphan, std::string(8192, 'x'));
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  EXPECT_FALSE(std::filesystem::exists(orphan));
  for (uint32_t number = 0; number < 4; ++number) {
    EXPECT_EQ(*node.Read(Filled(number).id()), Filled(number).payload);
  }
  node.Close();
}

TEST(StorageTest, ADirectoryOfTheFirstLayoutIsRefusedByName) {
  const TempDir directory;
  Fill(directory.path(), 1);
  { RawDatabase(directory.path()).MakeFamily("payload"); }
  TestStorage node;
  const absl::Status status = node.Open(TestStorageOptions(directory.path()));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), directory.path())) << status;
}

TEST(StorageTest, ADamagedIndexRowIsDroppedAtStart) {
  const TempDir directory;
  Fill(directory.path(), 4);
  {
    RawDatabase raw(directory.path());
    raw.Put("index", Filled(2).id(), "damaged");
  }
  for (const int corrupt : {1, 0}) {  // The second start does not find it again.
    TestStorage node;
    ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
    EXPECT_EQ(node.storage->table()->stats().objects_count, 3u);
    EXPECT_EQ(node.storage->disk()->stats().objects_count, 3u);
    EXPECT_EQ(node.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), corrupt);
    node.Close();
  }
}

TEST(StorageTest, WithoutRoomInDramADiskObjectIsStillRead) {
  const TempDir directory;
  Fill(directory.path(), 4);
  TestStorage node;
  ASSERT_TRUE(node.Open(TestStorageOptions(directory.path())).ok());
  Extent all = *node.AllocateAndWait(uint64_t{1} << 20);
  EXPECT_EQ(*node.Read(Filled(1).id()), Filled(1).payload);
  EXPECT_EQ(node.Metric("okv_node_promoted_bytes_total"), 0);
  EXPECT_EQ(node.Metric("okv_node_objects{tier=\"dram\",codec=\"bf16\"}"), 0);
  all = Extent();
  node.Close();
}

}  // namespace
}  // namespace okv
