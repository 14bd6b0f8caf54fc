#include "cache_node/block_table.h"

#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::TestObject;

class BlockTableTest : public testing::Test {
 protected:
  Extent Filled(const TestObject& object) {
    Extent extent = *dram_.Allocate(object.payload.size());
    std::memcpy(extent.span().data(), object.payload.data(), object.payload.size());
    return extent;
  }
  void Commit(const TestObject& object) {
    absl::StatusOr<WriteClaim> claim = table_.Claim(object.id(), object.header().parent);
    ASSERT_TRUE(claim.ok()) << claim.status();
    table_.Commit(*std::move(claim), object.object, Filled(object));
  }
  size_t Adopt(const TestObject& object, const DiskPlace& place) {
    std::vector<BlockTable::Adopted> adopted;
    adopted.push_back({.object = object.object, .place = place});
    return table_.AdoptFromDisk(std::move(adopted));
  }
  std::vector<ObjectId> Coldest(size_t count,
                                BlockTable::Where where = BlockTable::Where::kAnywhere) {
    std::vector<ObjectId> ids;
    for (const ObjectPin& pin :
         table_.PinColdest({.bytes = ~uint64_t{0}, .objects_max = count, .where = where})) {
      ids.push_back(pin.id());
    }
    return ids;
  }

  std::unique_ptr<BlockPool> pool_ =
      *BlockPool::Create({.arena_bytes = kArenaBytesMin, .prefault = false, .progress = {}});
  DramTier dram_{pool_.get()};
  BlockTable table_{&dram_};
};

TEST_F(BlockTableTest, ACommittedObjectIsPinnedWhereItWasReceived) {
  const TestObject object = MakeObject({.number = 1});
  EXPECT_TRUE(absl::IsNotFound(table_.Pin(object.id()).status()));
  absl::StatusOr<WriteClaim> claim = table_.Claim(object.id(), object.header().parent);
  ASSERT_TRUE(claim.ok());
  EXPECT_TRUE(absl::IsNotFound(table_.Pin(object.id()).status())) << "visible before its commit";
  Extent extent = Filled(object);
  const uint8_t* const where = extent.span().data();
  table_.Commit(*std::move(claim), object.object, std::move(extent));
  const absl::StatusOr<ObjectPin> pin = table_.Pin(object.id());
  ASSERT_TRUE(pin.ok());
  EXPECT_EQ(pin->dram().data(), where);
  EXPECT_EQ(pin->dram(), absl::MakeConstSpan(object.payload));
}

TEST_F(BlockTableTest, OneWriterAtATime) {
  const TestObject object = MakeObject({.number = 1});
  {
    const absl::StatusOr<WriteClaim> claim = table_.Claim(object.id(), object.header().parent);
    ASSERT_TRUE(claim.ok());
    EXPECT_TRUE(absl::IsAborted(table_.Claim(object.id(), object.header().parent).status()));
  }
  Commit(object);  // The claim above was given up.
  EXPECT_TRUE(absl::IsAlreadyExists(table_.Claim(object.id(), object.header().parent).status()));
  EXPECT_TRUE(
      table_.Claim(MakeObject({.number = 1, .codec = Codec::kBf16}).id(), std::nullopt).ok());
}

TEST_F(BlockTableTest, APinnedObjectDoesNotLeaveDram) {
  const TestObject object = MakeObject({.number = 1});
  Commit(object);
  ObjectPin reader = *table_.Pin(object.id());
  ObjectPin spill = *table_.Pin(object.id());
  table_.MarkOnDisk(spill, {.group = 1, .page = 0});
  EXPECT_EQ(table_.UnpinAndEvict(std::move(spill)), 0u);
  EXPECT_EQ(reader.dram(), absl::MakeConstSpan(object.payload));
  EXPECT_TRUE(Coldest(10).empty()) << "a pinned object was offered for spilling";
  reader.Release();
  std::vector<ObjectPin> pins = table_.PinColdest({.bytes = 1, .objects_max = 1});
  ASSERT_EQ(pins.size(), 1u);
  EXPECT_EQ(table_.UnpinAndEvict(std::move(pins[0])), object.payload.size());
  EXPECT_TRUE(table_.Pin(object.id())->dram().empty());
  EXPECT_EQ(pool_->used_bytes(), 0u);
}

TEST_F(BlockTableTest, WhatOnlyDramHoldsDoesNotLeaveIt) {
  const TestObject object = MakeObject({.number = 1});
  Commit(object);
  EXPECT_EQ(table_.UnpinAndEvict(*table_.Pin(object.id())), 0u);
  EXPECT_FALSE(table_.Pin(object.id())->dram().empty());
}

TEST_F(BlockTableTest, WhatCouldNotLeaveTheDiskIsHeldAgainAndIsTheFirstToLeave) {
  std::vector<TestObject> objects;
  for (uint32_t number = 0; number < 8; ++number) {
    objects.push_back(MakeObject({.number = number, .chain_blocks = 2}));
    ASSERT_EQ(Adopt(objects.back(), {.group = 1 + number / 4, .page = number}), 1u);
  }
  const BlockTable::ColdQuery all = {.bytes = UINT64_MAX};
  const std::vector<ColdObject> before = table_.Cold(all);
  ASSERT_EQ(before.size(), objects.size());
  const TableStats stats = table_.stats();
  {
    const absl::Span<const ColdObject> leaving = absl::MakeConstSpan(before).subspan(0, 4);
    std::vector<BlockTable::Doomed> doomed;
    for (ObjectPin& pin : table_.DoomCold(leaving)) {
      EXPECT_TRUE(absl::IsNotFound(table_.Pin(pin.id()).status()));
      doomed.push_back({std::move(pin), leaving[doomed.size()].place});
    }
    ASSERT_EQ(doomed.size(), leaving.size());
    EXPECT_FALSE(table_.HasGroup(1));
    table_.Undoom(std::move(doomed));
  }
  EXPECT_TRUE(table_.HasGroup(1));
  const std::vector<ColdObject> after = table_.Cold(all);
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].id, before[i].id) << i;
    EXPECT_EQ(after[i].place, before[i].place) << i;
  }
  EXPECT_EQ(table_.stats().objects_count, stats.objects_count);
  EXPECT_EQ(table_.stats().pins_count, 0u);
  EXPECT_EQ(table_.stats().codecs[0].disk_objects, stats.codecs[0].disk_objects);
  EXPECT_EQ(table_.stats().codecs[0].stored_bytes, stats.codecs[0].stored_bytes);
}

TEST_F(BlockTableTest, TheColdestAreTheLeastRecentlyPinned) {
  const TestObject a = MakeObject({.number = 1});
  const TestObject b = MakeObject({.number = 2});
  const TestObject c = MakeObject({.number = 3});
  Commit(a);
  Commit(b);
  Commit(c);
  EXPECT_TRUE(table_.Pin(a.id()).ok());
  EXPECT_EQ(Coldest(10), (std::vector<ObjectId>{b.id(), c.id(), a.id()}));
  EXPECT_EQ(Coldest(10), (std::vector<ObjectId>{b.id(), c.id(), a.id()})) << "asking was a use";
  EXPECT_EQ(Coldest(1), (std::vector<ObjectId>{b.id()}));
  table_.MarkOnDisk(*table_.Pin(c.id()), {.group = 1, .page = 0});
  EXPECT_EQ(Coldest(10, BlockTable::Where::kOnDiskToo), (std::vector<ObjectId>{c.id()}));
  EXPECT_EQ(Coldest(10, BlockTable::Where::kOnlyInDram), (std::vector<ObjectId>{b.id(), a.id()}));
  EXPECT_EQ(table_.PinColdest({.bytes = 1, .objects_max = 10}).size(), 1u);
}

TEST_F(BlockTableTest, OfTwoPromotionsOneIsKept) {
  const TestObject object = MakeObject({.number = 1});
  ASSERT_EQ(Adopt(object, {.group = 1, .page = 0}), 1u);
  EXPECT_EQ(Adopt(object, {.group = 2, .page = 0}), 0u);
  const ObjectPin pin = *table_.Pin(object.id());
  EXPECT_TRUE(pin.on_disk());
  EXPECT_TRUE(pin.dram().empty());
  table_.AttachDram(pin, Filled(object));
  const uint8_t* const first = pin.dram().data();
  table_.AttachDram(pin, Filled(object));
  EXPECT_EQ(pin.dram().data(), first);
  EXPECT_EQ(pool_->extents_count(), 1u);
}

TEST_F(BlockTableTest, ADoomedObjectIsNotFoundAndItsMemoryLastsUntilTheLastPin) {
  const TestObject object = MakeObject({.number = 1});
  Commit(object);
  ObjectPin reader = *table_.Pin(object.id());
  ObjectPin finder = *table_.Pin(object.id());
  EXPECT_TRUE(table_.Doom(finder));
  EXPECT_FALSE(table_.Doom(reader)) << "doomed twice";
  EXPECT_TRUE(absl::IsNotFound(table_.Pin(object.id()).status()));
  EXPECT_TRUE(absl::IsAborted(table_.Claim(object.id(), object.header().parent).status()));
  EXPECT_TRUE(table_.Objects().empty());
  EXPECT_EQ(table_.stats().objects_count, 0u);
  table_.Forget(std::move(finder));
  EXPECT_EQ(reader.dram(), absl::MakeConstSpan(object.payload));
  reader.Release();
  EXPECT_EQ(pool_->used_bytes(), 0u);
  Commit(object);
  EXPECT_TRUE(table_.Pin(object.id()).ok());
}

TEST_F(BlockTableTest, StatsCountEachObjectOnceAndEachCopyWhereItIs) {
  const TestObject int2 = MakeObject({.number = 1});
  const TestObject bf16 = MakeObject({.number = 0, .codec = Codec::kBf16});
  Commit(int2);
  Commit(bf16);
  table_.MarkOnDisk(*table_.Pin(int2.id()), {.group = 1, .page = 0});
  table_.MarkOnDisk(*table_.Pin(int2.id()), {.group = 1, .page = 0});
  ASSERT_EQ(Adopt(MakeObject({.number = 2}), {.group = 2, .page = 0}), 1u);
  const ObjectPin pin = *table_.Pin(bf16.id());
  const TableStats stats = table_.stats();
  EXPECT_EQ(stats.objects_count, 3u);
  EXPECT_EQ(stats.pins_count, 1u);
  EXPECT_EQ(stats.codecs[0].stored_bytes, 2 * 10'240u);
  EXPECT_EQ(stats.codecs[0].logical_bytes, 2 * 65'536u);
  EXPECT_EQ(stats.codecs[0].dram_objects, 1u);
  EXPECT_EQ(stats.codecs[0].disk_objects, 2u);
  EXPECT_EQ(stats.codecs[1].stored_bytes, 65'536u);
  EXPECT_EQ(stats.codecs[1].logical_bytes, 65'536u);
  EXPECT_EQ(stats.codecs[1].dram_objects, 1u);
  EXPECT_EQ(stats.codecs[1].disk_objects, 0u);
}

}  // namespace
}  // namespace okv
