// What every Tier promises, run on each.

#include "cache_node/tiers/tier.h"

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>

#include "cache_node/block_pool.h"
#include "cache_node/tiers/dram_tier.h"
#include "cache_node/tiers/group_files.h"
#include "cache_node/tiers/hbm_tier.h"
#include "cache_node/tiers/rocksdb_tier.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"
#include "tests/support/host_device.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TestObject;

// A tier with what it stands on. The limit holds more than ten bf16 blocks and fewer than twenty.
struct TierUnderTest {
  virtual ~TierUnderTest() = default;
  virtual Tier* tier() = 0;
};

constexpr uint64_t kLimitBytes = uint64_t{1} << 20;

struct DramUnderTest final : TierUnderTest {
  std::unique_ptr<BlockPool> pool =
      *BlockPool::Create({.arena_bytes = kLimitBytes, .prefault = false, .progress = {}});
  DramTier dram{pool.get()};
  Tier* tier() override { return &dram; }
};

struct HbmUnderTest final : TierUnderTest {
  testing_support::HostDevice device{/*fenced=*/true};
  std::unique_ptr<BlockPool> pool =
      *BlockPool::Create({.arena_bytes = kLimitBytes, .device = &device, .progress = {}});
  HbmTier hbm{pool.get()};
  Tier* tier() override { return &hbm; }
};

struct DiskUnderTest final : TierUnderTest {
  testing_support::TempDir directory;
  std::unique_ptr<RocksdbTier> disk = *RocksdbTier::Open({.data_dir = directory.path(),
                                                          .disk_bytes = kLimitBytes,
                                                          .node_id = "",
                                                          .free_floor_bytes = 0});
  Tier* tier() override { return disk.get(); }
};

using Factory = std::function<std::unique_ptr<TierUnderTest>()>;
struct Named {
  const char* name;
  Factory make;
};

class TierTest : public testing::TestWithParam<Named> {
 protected:
  Tier* tier() { return under_test_->tier(); }
  absl::Status Put(const TestObject& object) {
    return tier()->Put({{.object = object.object, .payload = object.payload}});
  }
  absl::StatusOr<std::vector<uint8_t>> Read(const TestObject& object) {
    std::vector<uint8_t> buffer(object.payload.size());
    const absl::Status status = tier()->Read(object.id(), absl::MakeSpan(buffer));
    if (!status.ok()) return status;
    return buffer;
  }
  std::map<ObjectId, TierRecord> List() {
    std::map<ObjectId, TierRecord> records;
    EXPECT_TRUE(tier()
                    ->List({.object =
                                [&](TierRecord record) {
                                  const ObjectId id = record.header.id;
                                  EXPECT_TRUE(records.emplace(id, std::move(record)).second);
                                },
                            .corrupt = [](const absl::Status& why) { ADD_FAILURE() << why; }})
                    .ok());
    return records;
  }

 private:
  const std::unique_ptr<TierUnderTest> under_test_ = GetParam().make();
};

TEST_P(TierTest, WhatWasPutIsReadBack) {
  const TestObject int2 = MakeObject({.number = 1});
  const TestObject bf16 = MakeObject({.number = 1, .codec = Codec::kBf16});
  ASSERT_TRUE(Put(int2).ok());
  ASSERT_TRUE(Put(bf16).ok());
  ASSERT_TRUE(tier()->Flush().ok());
  EXPECT_EQ(*Read(int2), int2.payload);
  EXPECT_EQ(*Read(bf16), bf16.payload);
}

TEST_P(TierTest, WhatIsNotThereIsNotFound) {
  EXPECT_TRUE(absl::IsNotFound(Read(MakeObject({.number = 1})).status()));
  EXPECT_TRUE(tier()->Remove(MakeObject({.number = 1}).id()).ok());
}

TEST_P(TierTest, ABufferOfAnotherSizeIsDataLoss) {
  const TestObject object = MakeObject({.number = 1});
  ASSERT_TRUE(Put(object).ok());
  std::vector<uint8_t> buffer(object.payload.size() - 1);
  EXPECT_TRUE(absl::IsDataLoss(tier()->Read(object.id(), absl::MakeSpan(buffer))));
}

TEST_P(TierTest, AnObjectIsPutOnce) {
  const TestObject object = MakeObject({.number = 1});
  const TestObject other = MakeObject({.number = 2});
  ASSERT_TRUE(Put(object).ok());
  EXPECT_TRUE(
      absl::IsAlreadyExists(tier()->Put({{.object = other.object, .payload = other.payload},
                                         {.object = object.object, .payload = object.payload}})));
  EXPECT_TRUE(absl::IsNotFound(Read(other).status())) << "half a group was stored";
  EXPECT_EQ(tier()->stats().objects_count, 1u);
}

TEST_P(TierTest, RemovedObjectsAreGoneAndGiveTheirBytesBack) {
  const TestObject object = MakeObject({.number = 1});
  const uint64_t before = tier()->stats().used_bytes;
  ASSERT_TRUE(Put(object).ok());
  EXPECT_EQ(tier()->stats().used_bytes, before + tier()->CostBytes(*object.object));
  ASSERT_TRUE(tier()->Remove(object.id()).ok());
  EXPECT_TRUE(absl::IsNotFound(Read(object).status()));
  EXPECT_EQ(tier()->stats().used_bytes, before);
  EXPECT_EQ(tier()->stats().objects_count, 0u);
  EXPECT_TRUE(Put(object).ok());
}

TEST_P(TierTest, TheLimitHoldsAndAGroupThatDoesNotFitLeavesNothing) {
  std::vector<TestObject> objects;
  uint32_t number = 0;
  while (true) {
    const TestObject object = MakeObject({.number = number, .codec = Codec::kBf16});
    const absl::Status status = Put(object);
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      break;
    }
    objects.push_back(object);
    ASSERT_LT(++number, 20u) << "no limit";
  }
  EXPECT_GT(number, 10u);
  const TierStats full = tier()->stats();
  EXPECT_LE(full.used_bytes, full.capacity_bytes);
  EXPECT_EQ(full.capacity_bytes, kLimitBytes);

  ASSERT_TRUE(tier()->Remove(objects[0].id()).ok());
  const TestObject fits = MakeObject({.number = 100, .codec = Codec::kBf16});
  const TestObject does_not = MakeObject({.number = 101, .codec = Codec::kBf16});
  EXPECT_TRUE(absl::IsResourceExhausted(
      tier()->Put({{.object = fits.object, .payload = fits.payload},
                   {.object = does_not.object, .payload = does_not.payload}})));
  EXPECT_TRUE(absl::IsNotFound(Read(fits).status()));
  EXPECT_TRUE(Put(fits).ok());
  for (size_t i = 1; i < objects.size(); ++i) EXPECT_EQ(*Read(objects[i]), objects[i].payload);
}

TEST_P(TierTest, ListGivesHeadersAndTenants) {
  const TestObject first = MakeObject({.number = 0, .codec = Codec::kBf16, .tenant = "a"});
  const TestObject second = MakeObject({.number = 7, .tenant = "b", .write_id = 99});
  ASSERT_TRUE(tier()
                  ->Put({{.object = first.object, .payload = first.payload},
                         {.object = second.object, .payload = second.payload}})
                  .ok());
  const std::map<ObjectId, TierRecord> records = List();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records.at(first.id()).header, first.header());
  EXPECT_EQ(records.at(first.id()).tenant, "a");
  EXPECT_EQ(records.at(second.id()).header, second.header());
  EXPECT_EQ(records.at(second.id()).tenant, "b");
}

TEST_P(TierTest, RandomCallsAgreeWithAMap) {
  const uint64_t seed = std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::map<uint32_t, TestObject> model;
  uint64_t used_bytes = 0;
  for (int step = 0; step < 300; ++step) {
    const uint32_t number = random() % 40;
    const TestObject object =
        MakeObject({.number = number, .codec = number % 2 == 0 ? Codec::kInt2 : Codec::kBf16});
    const uint64_t cost = tier()->CostBytes(*object.object);
    if (random() % 3 != 0) {
      const absl::Status status = Put(object);
      if (model.count(number) > 0) {
        // A full tier may notice either of the two first.
        EXPECT_TRUE(absl::IsAlreadyExists(status) || absl::IsResourceExhausted(status)) << status;
      } else if (status.ok()) {
        model[number] = object;
        used_bytes += cost;
      } else {
        EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      }
    } else {
      EXPECT_TRUE(tier()->Remove(object.id()).ok());
      if (model.erase(number) > 0) used_bytes -= cost;
    }
    ASSERT_EQ(tier()->stats().used_bytes, used_bytes);
    ASSERT_EQ(tier()->stats().objects_count, model.size());
    if (step % 50 == 0) {
      ASSERT_TRUE(tier()->Flush().ok());
    }
  }
  EXPECT_EQ(List().size(), model.size());
  for (const auto& [number, object] : model) EXPECT_EQ(*Read(object), object.payload);
}

TEST(GroupFilesTest, AGroupThatIsThereIsNotWrittenOver) {
  const testing_support::TempDir directory;
  const auto files = *GroupFiles::Open(directory.path());
  const std::vector<uint8_t> first(5000, 1);
  const std::vector<uint8_t> second(300, 2);
  ASSERT_TRUE(files->Write(1, {first}, "a table").ok());
  const absl::Status status = files->Write(1, {second}, "another").status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  std::vector<uint8_t> read(first.size());
  EXPECT_TRUE(files->Read({.group = 1, .page = 0}, absl::MakeSpan(read)).ok());
  EXPECT_EQ(read, first);
  EXPECT_EQ(*files->ReadTable(1), "a table");
}

INSTANTIATE_TEST_SUITE_P(
    Tiers, TierTest,
    testing::Values(Named{"Hbm", [] { return std::make_unique<HbmUnderTest>(); }},
                    Named{"Dram", [] { return std::make_unique<DramUnderTest>(); }},
                    Named{"Disk", [] { return std::make_unique<DiskUnderTest>(); }}),
    [](const testing::TestParamInfo<Named>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace okv
