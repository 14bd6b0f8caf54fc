// Fetches into and puts from a device's memory. The transport of these tests copies by address, so
// that the device is not fenced.

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "client/transport/device_regions.h"
#include "client/transport/ucx_paths.h"
#include "gtest/gtest.h"
#include "tests/client/cluster_fixture.h"
#include "tests/support/host_device.h"

namespace okv {
namespace {

using testing_support::HostDevice;

class DeviceTest : public ClusterTest {
 protected:
  DeviceTest() {
    options_.device = &device_;
    memory_ = *device_.Allocate(kObjects * block_bytes_);
    // In two regions that lie side by side.
    for (const uint32_t first : {0u, kObjects / 2}) {
      const auto half = absl::MakeSpan(memory_ + first * block_bytes_, kObjects / 2 * block_bytes_);
      OKV_CHECK(transport_->RegisterMemory(half, MemoryKind::kDevice).ok());
    }
  }
  ~DeviceTest() override { device_.Free(memory_); }

  absl::Span<uint8_t> Buffer(uint32_t i) {
    return absl::MakeSpan(memory_ + i * block_bytes_, block_bytes_);
  }
  std::vector<FetchItem> Items(const std::vector<LookupResult::Node>& nodes) {
    std::vector<FetchItem> items;
    for (uint32_t i = 0; i < kObjects; ++i) {
      items.push_back({.id = Id(i), .index = BlockIndex(i), .nodes = nodes, .buffer = Buffer(i)});
    }
    return items;
  }
  bool Holds(uint32_t i) {
    const std::vector<uint8_t> payload = PayloadOf(i);
    return std::equal(payload.begin(), payload.end(), device_.Own(Buffer(i).data()));
  }

  static constexpr uint32_t kObjects = 12;
  const size_t block_bytes_ = layout_.block_bytes(Codec::kInt2);
  HostDevice device_{/*fenced=*/false};
  uint8_t* memory_;
};

TEST_P(DeviceTest, WhatArrivesIsVerifiedOnTheDevice) {
  NodeProcess* node = AddNode("node-1");
  Store(node, kObjects);
  Start(node);
  for (const absl::Status& status : cluster()->Fetch(Items({node->where()}), kLong)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (uint32_t i = 0; i < kObjects; ++i) EXPECT_TRUE(Holds(i)) << i;
  EXPECT_EQ(device_.blocks_hashed(), kObjects);
  EXPECT_EQ(cluster()->stats().fetched_to_device, kObjects);
}

TEST_P(DeviceTest, DamagedObjectsAreListedAndTheirNodeIsTold) {
  NodeProcess* damaged = AddNode("node-1");
  NodeProcess* good = AddNode("node-2");
  for (NodeProcess* node : {damaged, good}) {
    Store(node, kObjects);
  }
  damaged->node.objects[Id(3)].payload[100] ^= 1;
  damaged->node.objects[Id(5)].payload[200] ^= 1;
  for (NodeProcess* node : {damaged, good}) Start(node);
  std::vector<FetchItem> items = Items({damaged->where()});
  items[5].nodes.push_back(good->where());
  const std::vector<absl::Status> statuses = cluster()->Fetch(items, kLong);
  for (uint32_t i = 0; i < kObjects; ++i) {
    EXPECT_EQ(absl::IsDataLoss(statuses[i]), i == 3) << statuses[i];
    if (i == 3) continue;
    EXPECT_TRUE(statuses[i].ok()) << statuses[i];
    EXPECT_TRUE(Holds(i)) << i;
  }
  EXPECT_EQ(cluster()->stats().complaints, 2u);
  EXPECT_EQ(cluster()->stats().fetched_to_device, kObjects - 1);
}

TEST_P(DeviceTest, ADeviceThatFailsIsNoNodesFault) {
  NodeProcess* node = AddNode("node-1");
  NodeProcess* other = AddNode("node-2");
  for (NodeProcess* process : {node, other}) {
    Store(process, kObjects);
    Start(process);
  }
  device_.SetFailing(true);
  for (const absl::Status& status :
       cluster()->Fetch(Items({node->where(), other->where()}), kLong)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
  EXPECT_EQ(cluster()->stats().complaints, 0u);
  EXPECT_EQ(cluster()->stats().failovers(), 0u);
}

TEST_P(DeviceTest, WhatIsPutIsHashedOnTheDevice) {
  NodeProcess* node = AddNode("node-1");
  Start(node);
  PlaceAllOn(node);
  std::vector<PutItem> items;
  for (uint32_t i = 0; i < kObjects; ++i) {
    const std::vector<uint8_t> payload = PayloadOf(i);
    ASSERT_TRUE(
        device_.Copy({{.to = Buffer(i).data(), .from = payload.data(), .bytes = payload.size()}})
            .ok());
    items.push_back({.id = Id(i),
                     .index = BlockIndex(i),
                     .parent = i == 0 ? std::nullopt : std::optional<BlockKey>(Id(i - 1).key),
                     .payload = Buffer(i)});
  }
  for (const absl::Status& status : cluster()->Put(items, "group-1", kLong)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(device_.blocks_hashed(), kObjects);
  device_.SetFailing(true);
  for (const absl::Status& status : cluster()->Put(items, "group-2", kLong)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
  cluster_.reset();
  node->transport.reset();
  ASSERT_EQ(node->node.put_objects.size(), kObjects);
  for (const auto& [id, stored] : node->node.put_objects) {
    EXPECT_TRUE(VerifyObject(stored.header, layout_, stored.payload).ok());
  }
}

TEST_P(DeviceTest, NoTransferReachesOverTwoRegions) {
  NodeProcess* node = AddNode("node-1");
  Store(node, kObjects);
  Start(node);
  for (const absl::Status& status : cluster()->Fetch(Items({node->where()}), kLong)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  cluster_.reset();
  node->transport.reset();
  uint32_t number = 0;
  uint32_t following = 0;
  for (const v1::FetchRequest& request : node->node.fetches) {
    for (int i = 0; i < request.objects_size(); ++i, ++number) {
      const bool follows = request.objects(i).follows();
      EXPECT_EQ(follows, i > 0 && number != kObjects / 2) << number;
      following += follows ? 1 : 0;
    }
  }
  EXPECT_EQ(number, kObjects);
  EXPECT_GT(following, 0u);
}

TEST_P(DeviceTest, WhatCannotBeADevicesBufferIsRefused) {
  NodeProcess* node = AddNode("node-1");
  Store(node, kObjects);
  Start(node);
  std::vector<FetchItem> items = Items({node->where()});
  items.resize(1);
  items[0].buffer = absl::MakeSpan(memory_ + 8, block_bytes_);
  EXPECT_TRUE(absl::IsInvalidArgument(cluster()->Fetch(items, kLong)[0]));
  uint8_t* const other = *device_.Allocate(block_bytes_);
  items[0].buffer = absl::MakeSpan(other, block_bytes_);
  const absl::Status not_registered = cluster()->Fetch(items, kLong)[0];
  EXPECT_TRUE(absl::IsInvalidArgument(not_registered));
  EXPECT_THAT(std::string(not_registered.message()), HasSubstr("registered"));
  device_.Free(other);
  cluster_.reset();
  options_.device = nullptr;
  items[0].buffer = Buffer(0);
  items[0].memory = MemoryKind::kDevice;
  EXPECT_TRUE(absl::IsInvalidArgument(cluster()->Fetch(items, kLong)[0]));
}

INSTANTIATE_TEST_SUITE_P(All, DeviceTest, ::testing::Values(false),
                         [](const auto&) { return std::string("Loopback"); });

TEST(DeviceRegionsTest, HaveWhatIsInOneOfThem) {
  const std::vector<uint8_t> memory(300);
  const auto span = absl::MakeConstSpan(memory);
  DeviceRegions<int> regions;
  EXPECT_EQ(regions.Find(span.first(1)), std::nullopt);
  regions.Add(span.subspan(100, 50), 1);
  regions.Add(span.subspan(150, 50), 2);
  EXPECT_EQ(regions.Find(span.subspan(100, 50)), 1);
  EXPECT_EQ(regions.Find(span.subspan(160, 40)), 2);
  EXPECT_EQ(regions.Find(span.subspan(140, 20)), std::nullopt) << "over two of them";
  EXPECT_EQ(regions.Find(span.subspan(90, 20)), std::nullopt);
  EXPECT_EQ(regions.Find(span.subspan(190, 20)), std::nullopt);
}

TEST(UcxDeviceTest, AVersionThatUnmapsWhatIsInUseIsNotSafe) {
  EXPECT_FALSE(ucx::SafeWithDevices(1, 22, 0));
  EXPECT_TRUE(ucx::SafeWithDevices(1, 21, 0));
  EXPECT_TRUE(ucx::SafeWithDevices(1, 22, 1));
}

// What UCX on this machine lacks is said when a transport is made.
TEST(UcxDeviceTest, WithoutItsCudaOrWithoutADeviceItIsRefused) {
  HostDevice device{/*fenced=*/false};
  UcxTransportOptions options;
  options.require_gpudirect = true;
  EXPECT_TRUE(absl::IsInvalidArgument(CreateUcxTransport(options).status()));
  options.device = &device;
  const absl::Status status = CreateUcxTransport(options).status();
  // A machine with a GPU and a UCX for it has what is asked for.
  if (status.ok()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("host device"));
}

TEST(UcxDeviceTest, MemoryThatIsNotOfTheDeviceIsNotRegistered) {
  HostDevice device{/*fenced=*/false};
  UcxTransportOptions options;
  options.device = &device;
  const auto transport = CreateUcxTransport(options);
  if (!transport.ok()) GTEST_SKIP() << transport.status();  // It needs a GPU and a UCX for it.
  std::vector<uint8_t> memory(4096);
  const absl::Status status =
      (*transport)->RegisterMemory(absl::MakeSpan(memory), MemoryKind::kDevice);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("not of host device"));
  EXPECT_FALSE((*transport)->has_device_memory(memory));
}

TEST(UcxDeviceTest, ATransportWithoutADeviceTakesNoDevicesMemory) {
  const auto transport = CreateUcxTransport({});
  ASSERT_TRUE(transport.ok()) << transport.status();
  EXPECT_FALSE((*transport)->takes_device_memory());
  std::vector<uint8_t> memory(4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      (*transport)->RegisterMemory(absl::MakeSpan(memory), MemoryKind::kDevice)));
}

}  // namespace
}  // namespace okv
