// The HBM tier over a device that every machine has, fenced: what would follow one of its addresses
// on the host crashes.

#include <chrono>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "cache_node/hbm_mover.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"
#include "tests/support/host_device.h"

namespace okv::testing_support {
namespace {

class HbmTest : public testing::Test {
 protected:
  ~HbmTest() override {
    if (node_.storage != nullptr) node_.Close();
  }

  void Open(uint64_t hbm_bytes = uint64_t{1} << 20) {
    StorageOptions options = TestStorageOptions(directory_.path());
    options.pool.arena_bytes = uint64_t{4} << 20;
    options.hbm_pool = {.arena_bytes = hbm_bytes, .device = &device_, .progress = {}};
    node_.on_removed = [this](const ObjectId& id, const absl::Status& why) {
      MutexLock lock(&mu_);
      removed_.emplace_back(id, why);
    };
    ASSERT_TRUE(node_.Open(options).ok());
    ASSERT_TRUE(node_.storage->formats()->Add(TestFormat()).ok());
  }
  BlockTable* table() { return node_.storage->table(); }
  HbmMover* mover() { return node_.storage->hbm_mover(); }
  double HbmUse() const {
    const TierStats stats = node_.storage->hbm()->stats();
    return static_cast<double>(stats.used_bytes) / static_cast<double>(stats.capacity_bytes);
  }

  // As a put does: into HBM while it has memory, else into DRAM. Where it went.
  absl::StatusOr<std::string> Write(const TestObject& object) {
    absl::StatusOr<WriteClaim> claim = table()->Claim(object.id(), object.header().parent);
    if (!claim.ok()) return claim.status();
    absl::StatusOr<Extent> extent = mover()->Allocate(object.payload.size());
    if (!extent.ok()) extent = node_.AllocateAndWait(object.payload.size());
    if (!extent.ok()) return extent.status();
    const std::string tier = extent->device() != nullptr ? "hbm" : "dram";
    const absl::Status copied = device_.Copy({{.to = extent->span().data(),
                                               .from = object.payload.data(),
                                               .bytes = object.payload.size()}});
    if (!copied.ok()) return copied;
    table()->Commit(*std::move(claim), object.object, *std::move(extent));
    return tier;
  }
  // As a fetch does, use included.
  absl::StatusOr<std::vector<uint8_t>> Read(const ObjectId& id) {
    absl::StatusOr<ObjectPin> pin = table()->Pin(id);
    if (!pin.ok()) return pin.status();
    AlignedBuffer own;
    if (pin->memory().empty()) {
      absl::StatusOr<AlignedBuffer> loaded = node_.storage->spiller()->Load(&*pin);
      if (!loaded.ok()) return loaded.status();
      own = *std::move(loaded);
    }
    const size_t bytes = pin->object().header.payload_bytes;
    std::vector<uint8_t> payload(bytes);
    const Payload from = own != nullptr ? Payload{.bytes = {own.get(), bytes}} : pin->memory();
    const absl::Status gathered =
        GatherPieces(from, {{.offset = 0, .bytes = bytes}}, absl::MakeSpan(payload));
    if (!gathered.ok()) return gathered;
    if (from.device == nullptr && own == nullptr) mover()->Used(*pin);
    return payload;
  }
  bool InHbm(const TestObject& object) {
    const absl::StatusOr<ObjectPin> pin = table()->Pin(object.id());
    return pin.ok() && !pin->hbm().empty();
  }
  bool InDram(const TestObject& object) {
    const absl::StatusOr<ObjectPin> pin = table()->Pin(object.id());
    return pin.ok() && !pin->dram().empty();
  }
  static bool WaitUntil(const std::function<bool()>& ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ready()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
  // Writes objects first..first + count - 1.
  std::vector<TestObject> WriteMany(uint32_t first, uint32_t count) {
    std::vector<TestObject> objects;
    for (uint32_t i = 0; i < count; ++i) {
      objects.push_back(MakeObject({.number = first + i, .chain_blocks = 1}));
      const absl::StatusOr<std::string> tier = Write(objects.back());
      EXPECT_TRUE(tier.ok()) << tier.status();
    }
    return objects;
  }
  void ExpectAllThere(const std::vector<TestObject>& objects) {
    for (const TestObject& object : objects) {
      const auto read = Read(object.id());
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_TRUE(*read == object.payload) << object.id().Name();
    }
  }
  // An object that is only in DRAM.
  TestObject WriteToDram(uint32_t number) {
    const TestObject object = MakeObject({.number = number, .chain_blocks = 1});
    EXPECT_TRUE(node_.Write(object).ok());
    return object;
  }
  std::vector<std::pair<ObjectId, absl::Status>> removed() {
    MutexLock lock(&mu_);
    return removed_;
  }

  const TempDir directory_;
  HostDevice device_{/*fenced=*/true};
  Mutex mu_;
  std::vector<std::pair<ObjectId, absl::Status>> removed_ ABSL_GUARDED_BY(mu_);
  TestStorage node_;
};

TEST_F(HbmTest, WhatIsPutIsInHbmAndIsReadFromThere) {
  Open();
  const TestObject object = MakeObject({.number = 1});
  EXPECT_EQ(*Write(object), "hbm");
  EXPECT_FALSE(InDram(object));
  EXPECT_EQ(*Read(object.id()), object.payload);
  EXPECT_EQ(node_.Metric("okv_node_objects{tier=\"hbm\",codec=\"int2\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_objects{tier=\"dram\",codec=\"int2\"}"), 0);
  EXPECT_GT(node_.Metric("okv_node_tier_used_bytes{tier=\"hbm\"}"), 0);
}

// A drain reads objects so, wherever they are.
TEST_F(HbmTest, WhatOnlyHbmHoldsLoadsAsACopyAndStays) {
  Open();
  const TestObject object = MakeObject({.number = 1});
  ASSERT_EQ(*Write(object), "hbm");
  ObjectPin pin = *table()->Pin(object.id());
  const absl::StatusOr<AlignedBuffer> own = node_.storage->spiller()->Load(&pin);
  ASSERT_TRUE(own.ok()) << own.status();
  ASSERT_NE(*own, nullptr);
  EXPECT_EQ(std::vector<uint8_t>(own->get(), own->get() + object.payload.size()), object.payload);
  EXPECT_TRUE(InHbm(object));
  EXPECT_TRUE(removed().empty());
}

TEST_F(HbmTest, WhatFillsHbmMovesTheColdestDownAndNothingIsLost) {
  Open();
  const std::vector<TestObject> objects = WriteMany(0, 200);  // Twice what HBM holds.
  EXPECT_TRUE(WaitUntil([this] { return HbmUse() <= 0.9; }));
  EXPECT_GT(node_.Metric("okv_node_hbm_spilled_bytes_total"), 0);
  EXPECT_TRUE(InDram(objects.front()));
  ExpectAllThere(objects);
  EXPECT_TRUE(removed().empty());
}

TEST_F(HbmTest, APinnedObjectStaysWhereItIs) {
  Open();
  const TestObject object = MakeObject({.number = 1});
  ASSERT_EQ(*Write(object), "hbm");
  const ObjectPin pin = *table()->Pin(object.id());
  const uint8_t* const where = pin.hbm().bytes.data();
  WriteMany(10, 200);
  EXPECT_TRUE(WaitUntil([this] { return HbmUse() <= 0.9; }));
  EXPECT_EQ(pin.hbm().bytes.data(), where);
  EXPECT_EQ(*Read(object.id()), object.payload);
}

TEST_F(HbmTest, WhenAllOfHbmIsPinnedDramTakesWhatIsPut) {
  Open();
  std::vector<ObjectPin> pins;
  uint32_t number = 0;
  while (true) {
    ASSERT_LT(number, 1000u);
    const TestObject object = MakeObject({.number = number++, .chain_blocks = 1});
    const absl::StatusOr<std::string> tier = Write(object);
    ASSERT_TRUE(tier.ok()) << tier.status();
    if (*tier == "dram") break;
    pins.push_back(*table()->Pin(object.id()));
  }
  EXPECT_GT(pins.size(), 50u);
  pins.clear();  // Now they can go.
  EXPECT_TRUE(WaitUntil([this] { return HbmUse() <= 0.8; }));
}

TEST_F(HbmTest, WithFreeMemoryTheFirstUseFromDramPromotes) {
  Open();
  const TestObject object = WriteToDram(1);
  EXPECT_EQ(*Read(object.id()), object.payload);
  EXPECT_TRUE(WaitUntil([&] { return InHbm(object); }));
  EXPECT_EQ(*Read(object.id()), object.payload);
  EXPECT_EQ(node_.Metric("okv_node_hbm_promoted_bytes_total"),
            static_cast<double>(object.payload.size()));
}

TEST_F(HbmTest, AScanDisplacesNothingAndRepeatedUsePromotes) {
  Open();
  // Fuller than a first use leaves it alone, and not so full that anything spills.
  for (uint32_t number = 100; HbmUse() < 0.83; ++number) WriteMany(number, 1);
  std::vector<TestObject> scanned;
  for (uint32_t i = 0; i < 20; ++i) scanned.push_back(WriteToDram(1000 + i));
  const double promoted = node_.Metric("okv_node_hbm_promoted_bytes_total");
  ExpectAllThere(scanned);
  EXPECT_EQ(*Read(scanned[7].id()), scanned[7].payload);
  EXPECT_EQ(*Read(scanned[7].id()), scanned[7].payload);  // Twice in the queue, up once.
  EXPECT_TRUE(WaitUntil([&] { return InHbm(scanned[7]); }));
  EXPECT_EQ(node_.Metric("okv_node_hbm_promoted_bytes_total"),
            promoted + static_cast<double>(scanned[7].payload.size()));
  for (const TestObject& other : scanned) EXPECT_EQ(InHbm(other), other.id() == scanned[7].id());
}

TEST_F(HbmTest, AFlippedByteInHbmIsFoundOnTheWayDown) {
  Open();
  const TestObject object = MakeObject({.number = 1});
  ASSERT_EQ(*Write(object), "hbm");
  device_.Flip(table()->Pin(object.id())->hbm().bytes.data() + 5000);
  WriteMany(10, 200);
  EXPECT_TRUE(WaitUntil([this] { return !removed().empty(); }));
  ASSERT_EQ(removed().size(), 1u);
  EXPECT_EQ(removed()[0].first, object.id());
  EXPECT_TRUE(absl::IsDataLoss(removed()[0].second));
  EXPECT_TRUE(absl::IsNotFound(Read(object.id()).status()));
  EXPECT_EQ(node_.Metric("okv_node_corrupt_objects_total{tier=\"hbm\"}"), 1);
}

TEST_F(HbmTest, AFlippedByteInDramIsFoundOnTheWayUp) {
  std::promise<ObjectId> damaged;
  node_.on_damaged = [&damaged](const std::string& tenant, const ObjectId& id) {
    EXPECT_EQ(tenant, "tenant");
    damaged.set_value(id);
  };
  Open();
  const TestObject object = WriteToDram(1);
  {
    const ObjectPin pin = *table()->Pin(object.id());
    const_cast<uint8_t*>(pin.dram().data())[77] ^= 1;
    mover()->Used(pin);
  }
  EXPECT_EQ(damaged.get_future().get(), object.id());
  EXPECT_FALSE(InHbm(object));
  EXPECT_TRUE(removed().empty()) << "another copy may be good";
}

TEST_F(HbmTest, WhatWaitsToComeUpHoldsLittleOfDram) {
  Open();
  std::vector<TestObject> objects;
  for (uint32_t i = 0; i < 60; ++i) objects.push_back(WriteToDram(i));
  device_.HoldCopies(true);
  for (const TestObject& object : objects) mover()->Used(*table()->Pin(object.id()));
  // One group is on its way up, and what waits is another sixteenth of DRAM's 4 MiB.
  const uint64_t held_bytes = table()->stats().pins_count * objects[0].payload.size();
  EXPECT_GE(held_bytes, uint64_t{100} << 10);
  EXPECT_LE(held_bytes, uint64_t{512} << 10);
  device_.HoldCopies(false);
}

TEST_F(HbmTest, WhatOnlyHbmHoldsIsOnDiskAfterAStop) {
  Open();
  const std::vector<TestObject> objects = WriteMany(0, 60);
  ASSERT_TRUE(InHbm(objects[0]));
  ASSERT_FALSE(InDram(objects[0]));
  node_.Close();
  Open();
  ExpectAllThere(objects);
}

TEST_F(HbmTest, AStopSpillsMoreThanDramHolds) {
  Open(uint64_t{8} << 20);  // DRAM has 4 MiB.
  const std::vector<TestObject> objects = WriteMany(0, 550);
  ASSERT_TRUE(InHbm(objects[0]));
  node_.Close();
  Open();
  ExpectAllThere(objects);
}

TEST_F(HbmTest, AStopSpillsWhatOnlyHbmHoldsAlsoWhenDramIsFullOfWhatTheDiskLacks) {
  Open();
  std::vector<TestObject> objects = WriteMany(0, 40);
  node_.storage->StopSpilling();
  while (true) {
    absl::StatusOr<Extent> extent = node_.storage->spiller()->AllocateNow(10'240);
    if (!extent.ok()) break;
    objects.push_back(
        MakeObject({.number = static_cast<uint32_t>(objects.size()), .chain_blocks = 1}));
    std::copy(objects.back().payload.begin(), objects.back().payload.end(), extent->span().data());
    table()->Commit(*table()->Claim(objects.back().id(), std::nullopt), objects.back().object,
                    *std::move(extent));
  }
  ASSERT_TRUE(InHbm(objects[0]));
  ASSERT_FALSE(InDram(objects[0]));
  node_.Close();
  Open();
  ExpectAllThere(objects);
}

TEST_F(HbmTest, AStopGoesOnBehindAWholeGroupThatIsDamaged) {
  Open();
  std::vector<TestObject> objects = WriteMany(0, 40);
  node_.storage->StopSpilling();
  constexpr size_t kBad = 10;  // A group is seven.
  for (size_t i = 0; i < kBad; ++i) {
    device_.Flip(table()->Pin(objects[i].id())->hbm().bytes.data() + 100);
  }
  for (const TestObject& object : objects) ASSERT_TRUE(InHbm(object));  // In this order.
  node_.Close();
  EXPECT_EQ(removed().size(), kBad);
  Open();
  objects.erase(objects.begin(), objects.begin() + kBad);
  ExpectAllThere(objects);
}

TEST_F(HbmTest, ADeviceThatFailsLosesNothingAndIsUsedAgainWhenItWorks) {
  std::vector<std::string> lines;
  node_.log = [&](const std::string& line) {
    MutexLock lock(&mu_);
    lines.push_back(line);
  };
  const auto logged = [&](const std::string& words) {
    MutexLock lock(&mu_);
    for (const std::string& line : lines) {
      if (absl::StrContains(line, words)) return true;
    }
    return false;
  };
  Open();
  std::vector<TestObject> objects = WriteMany(0, 70);
  ASSERT_LT(HbmUse(), 0.9);
  // Filled without the device's help, which is about to fail.
  std::vector<Extent> extents;
  while (HbmUse() < 0.95) {
    device_.SetFailing(true);
    absl::StatusOr<Extent> extent = mover()->Allocate(10'240);
    ASSERT_TRUE(extent.ok()) << extent.status();
    extents.push_back(*std::move(extent));
  }
  EXPECT_TRUE(WaitUntil([&] { return logged("it fails"); }));
  EXPECT_EQ(table()->stats().objects_count, objects.size());
  device_.SetFailing(false);
  EXPECT_TRUE(WaitUntil([&] { return HbmUse() <= 0.8; }));
  EXPECT_TRUE(InDram(objects[0]));
  EXPECT_TRUE(logged("works again"));
  extents.clear();
  ExpectAllThere(objects);
  EXPECT_TRUE(removed().empty());
}

TEST_F(HbmTest, RandomUseLosesNothing) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  Open();
  std::vector<TestObject> objects;
  for (int step = 0; step < 1500; ++step) {
    if (objects.empty() || random() % 3 == 0) {
      const Codec codec = random() % 8 == 0 ? Codec::kBf16 : Codec::kInt2;
      objects.push_back(MakeObject(
          {.number = static_cast<uint32_t>(objects.size()), .codec = codec, .chain_blocks = 1}));
      const absl::StatusOr<std::string> tier = Write(objects.back());
      ASSERT_TRUE(tier.ok()) << tier.status();
      continue;
    }
    // The newer the likelier.
    const size_t back = std::min(random() % objects.size(), random() % objects.size());
    const TestObject& object = objects[objects.size() - 1 - back];
    const auto read = Read(object.id());
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_TRUE(*read == object.payload) << object.id().Name() << ", step " << step;
  }
  node_.Close();
  Open();
  ExpectAllThere(objects);
  EXPECT_TRUE(removed().empty());
}

}  // namespace
}  // namespace okv::testing_support
