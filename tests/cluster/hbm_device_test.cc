// HBM between two processes on one GPU: okv-control, a node with an HBM tier (this program again,
// with --node, so that it can be told to damage what it holds), and this process as the worker with
// its buffers on the same GPU. Skipped, with the reason, where there is no GPU or no UCX for it.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cache_node/node.h"
#include "client/okv.h"
#include "gtest/gtest.h"
#include "proto/clock.h"
#include "proto/sha256.h"
#include "tests/support/fixtures.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing_support::Process;

constexpr uint64_t kHbmBytes = uint64_t{16} << 20;

// Flips a byte of every payload that is in HBM.
void FlipAll(Node* node, DeviceMemory* device) {
  for (const ObjectRef& object : node->storage()->table()->Objects()) {
    const absl::StatusOr<ObjectPin> pin = node->storage()->table()->Pin(object->header.id);
    if (!pin.ok() || pin->hbm().empty()) continue;
    auto* byte = const_cast<uint8_t*>(pin->hbm().bytes.data()) + 1234;
    uint8_t value = 0;
    OKV_CHECK(device->Copy({{.to = &value, .from = byte, .bytes = 1}}).ok());
    value ^= 0x10;
    OKV_CHECK(device->Copy({{.to = byte, .from = &value, .bytes = 1}}).ok());
  }
}

// The node's process: until SIGTERM; SIGUSR1 damages what is in HBM.
int RunNode(const std::string& control, const std::string& directory) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGUSR1);
  OKV_CHECK(pthread_sigmask(SIG_BLOCK, &signals, nullptr) == 0);  // Of every thread to come, too.
  const auto device = OpenCudaDevice(0);
  UcxTransportOptions ucx;
  ucx.device = device.ok() ? device->get() : nullptr;
  ucx.require_gpudirect = true;
  auto transport = CreateUcxTransport(ucx);
  if (!device.ok() || !transport.ok()) {
    std::fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    return 1;
  }
  NodeOptions options;
  options.control_address = control;
  options.data_dir = directory + "/data";
  options.dram_bytes = uint64_t{64} << 20;
  options.disk_bytes = uint64_t{256} << 20;
  options.hbm_bytes = kHbmBytes;
  options.hbm_device = device->get();
  const auto node =
      Node::Start(options, *std::move(transport), Clock::System(),
                  [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); });
  if (!node.ok()) {
    std::fprintf(stderr, "%s\n", node.status().ToString().c_str());
    return 1;
  }
  testing_support::WriteFile(directory + "/ready.part",
                             absl::StrCat((*node)->node_id(), " ", (*node)->data_address(), " ",
                                          (*node)->metrics_address()));
  OKV_CHECK(std::rename((directory + "/ready.part").c_str(), (directory + "/ready").c_str()) == 0);
  while (true) {
    int signal = 0;
    OKV_CHECK(sigwait(&signals, &signal) == 0);
    if (signal == SIGTERM) break;
    FlipAll(node->get(), device->get());
    testing_support::WriteFile(directory + "/flipped", "yes");
  }
  return 0;
}

class HbmDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<DeviceMemory>> device = OpenCudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << device.status();
    device_ = *std::move(device);
    UcxTransportOptions ucx;
    ucx.device = device_.get();
    ucx.require_gpudirect = true;
    absl::StatusOr<std::unique_ptr<Transport>> transport = CreateUcxTransport(ucx);
    if (!transport.ok()) GTEST_SKIP() << transport.status();
    transport_ = *std::move(transport);
    StartPrograms();
  }
  void TearDown() override {
    cluster_.reset();
    transport_.reset();
    if (memory_ != nullptr) device_->Free(memory_);
    if (node_ == nullptr) return;
    node_->Signal(SIGTERM);
    EXPECT_EQ(node_->Wait(std::chrono::seconds(60)), 0) << node_->output();
  }

  void StartPrograms() {
    const std::string port_file = directory_.Path("port");
    control_process_ = Process::Start({"okv-control", "--listen", "127.0.0.1:0", "--data_dir",
                                       directory_.Path("control"), "--port_file", port_file});
    ASSERT_TRUE(testing_support::WaitForFile(port_file, control_process_.get()))
        << control_process_->output();
    const std::string port = testing_support::ReadFileOrEmpty(port_file);
    ClusterOptions options;
    options.control_address = "127.0.0.1:" + port.substr(0, port.find('\n'));
    options.device = device_.get();
    node_ =
        Process::Start({"/proc/self/exe", "--node", options.control_address, directory_.path()});
    ASSERT_TRUE(testing_support::WaitForFile(directory_.Path("ready"), node_.get()))
        << node_->output();
    const std::vector<std::string> ready =
        absl::StrSplit(testing_support::ReadFileOrEmpty(directory_.Path("ready")), ' ');
    where_ = {.node_id = ready.at(0), .data_address = ready.at(1)};
    metrics_address_ = ready.at(2);
    // An int2 block of 4 layers of 4 heads has 40,960 bytes: neighbours leave no gap.
    RotationSet rotations = testing_support::SmallRotations("hadamard", 0);
    rotations.layer_ids = {0, 1, 2, 3};
    rotations.kv_heads = 4;
    const std::vector<uint16_t> two_layers = rotations.r_k;
    rotations.r_k.insert(rotations.r_k.end(), two_layers.begin(), two_layers.end());
    rotations.r_v = rotations.r_k;
    rotations.clip_rank_k.assign(16, 0);
    rotations.clip_rank_v.assign(16, 0);
    ASSERT_TRUE(Cluster::PublishRotation(options, rotations).ok());
    format_ = testing_support::SmallFormat(rotations);
    auto cluster = Cluster::Connect(options, format_, transport_.get());
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    block_bytes_ = PageLayout::Of(format_).block_bytes(Codec::kInt2);
    auto memory = device_->Allocate(kBlocksMax * block_bytes_);
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = *memory;
    ASSERT_TRUE(transport_
                    ->RegisterMemory(absl::MakeSpan(memory_, kBlocksMax * block_bytes_),
                                     MemoryKind::kDevice)
                    .ok());
  }

  static ObjectId Id(uint32_t i) {
    const std::string text = "block " + std::to_string(i);
    return {.key = {.bytes = Sha256(text)}, .codec = Codec::kInt2};
  }
  std::vector<uint8_t> PayloadOf(uint32_t i) const {
    std::vector<uint8_t> payload(block_bytes_);
    for (size_t k = 0; k < payload.size(); ++k)
      payload[k] = static_cast<uint8_t>(k * 7 + k / 256 + i);
    return payload;
  }
  absl::Span<uint8_t> Buffer(uint32_t i) {
    return absl::MakeSpan(memory_ + i * block_bytes_, block_bytes_);
  }
  // All blocks' buffers, one after another: a GPU that is shared takes its time for every copy.
  void ToDevice(const std::vector<uint8_t>& blocks) {
    ASSERT_TRUE(
        device_->Copy({{.to = memory_, .from = blocks.data(), .bytes = blocks.size()}}).ok());
  }
  std::vector<uint8_t> FromDevice(uint32_t count) {
    std::vector<uint8_t> blocks(count * block_bytes_);
    EXPECT_TRUE(
        device_->Copy({{.to = blocks.data(), .from = memory_, .bytes = blocks.size()}}).ok());
    return blocks;
  }
  // Puts blocks [0, count) from the device.
  void PutAll(uint32_t count) {
    std::vector<PutItem> items;
    std::vector<uint8_t> blocks;
    for (uint32_t i = 0; i < count; ++i) {
      const std::vector<uint8_t> payload = PayloadOf(i);
      blocks.insert(blocks.end(), payload.begin(), payload.end());
      items.push_back({.id = Id(i),
                       .index = BlockIndex(i),
                       .parent = i == 0 ? std::nullopt : std::optional<BlockKey>(Id(i - 1).key),
                       .payload = Buffer(i)});
    }
    ToDevice(blocks);
    for (const absl::Status& status : cluster_->Put(items, "writer", absl::Seconds(60))) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  // Fetches them into the device, over what was there.
  std::vector<absl::Status> FetchAll(uint32_t count) {
    std::vector<FetchItem> items;
    ToDevice(std::vector<uint8_t>(count * block_bytes_, 0xa5));
    for (uint32_t i = 0; i < count; ++i) {
      items.push_back(
          {.id = Id(i), .index = BlockIndex(i), .nodes = {where_}, .buffer = Buffer(i)});
    }
    return cluster_->Fetch(items, absl::Seconds(60));
  }
  void ExpectAllFetched(uint32_t count) {
    const std::vector<absl::Status> statuses = FetchAll(count);
    const std::vector<uint8_t> blocks = FromDevice(count);
    for (uint32_t i = 0; i < count; ++i) {
      ASSERT_TRUE(statuses[i].ok()) << i << ": " << statuses[i];
      const auto begin = blocks.begin() + static_cast<int64_t>(i * block_bytes_);
      EXPECT_TRUE(
          std::equal(begin, begin + static_cast<int64_t>(block_bytes_), PayloadOf(i).begin()))
          << i;
    }
  }
  double Metric(const std::string& series) const {
    const std::string text = testing_support::HttpGet(metrics_address_, "/metrics");
    const size_t at = text.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
  }
  bool WaitUntil(const std::function<bool()>& ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ready()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  static constexpr uint32_t kBlocksMax = 1000;  // 39 MiB: more than twice the node's HBM.
  const testing_support::TempDir directory_;
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Process> control_process_;
  std::unique_ptr<Process> node_;
  LookupResult::Node where_;
  std::string metrics_address_;
  Format format_;
  std::unique_ptr<Cluster> cluster_;
  size_t block_bytes_ = 0;
  uint8_t* memory_ = nullptr;
};

TEST_F(HbmDeviceTest, WhatIsPutFromTheGpuIsFetchedIntoItThroughCudaIpc) {
  PutAll(200);
  EXPECT_EQ(Metric("okv_node_objects{tier=\"hbm\",codec=\"int2\"}"), 200);
  ExpectAllFetched(200);
  EXPECT_EQ(cluster_->stats().fetched_to_device, 200u);
  EXPECT_TRUE(
      WaitUntil([this] { return Metric("okv_node_fetch_hits_total{tier=\"hbm\"}") == 200; }));
  EXPECT_EQ(Metric("okv_node_hbm_sent_bytes_total{path=\"cuda_ipc\"}"),
            200.0 * static_cast<double>(block_bytes_));
  EXPECT_GT(Metric("okv_node_hbm_merged_objects_total"), 100);
}

TEST_F(HbmDeviceTest, WhatIsInHbmIsFetchedIntoHostMemoryToo) {
  PutAll(20);
  std::vector<std::vector<uint8_t>> buffers(20, std::vector<uint8_t>(block_bytes_));
  std::vector<FetchItem> items;
  for (uint32_t i = 0; i < 20; ++i) {
    items.push_back({.id = Id(i),
                     .index = BlockIndex(i),
                     .nodes = {where_},
                     .buffer = absl::MakeSpan(buffers[i])});
  }
  for (const absl::Status& status : cluster_->Fetch(items, absl::Seconds(60))) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (uint32_t i = 0; i < 20; ++i) EXPECT_TRUE(buffers[i] == PayloadOf(i)) << i;
}

TEST_F(HbmDeviceTest, DamageInHbmIsFoundByTheReaderAndTheNodeDropsTheObjects) {
  PutAll(10);
  node_->Signal(SIGUSR1);
  ASSERT_TRUE(testing_support::WaitForFile(directory_.Path("flipped"), node_.get()));
  for (const absl::Status& status : FetchAll(10)) {
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  }
  EXPECT_EQ(cluster_->stats().complaints, 10u);
  EXPECT_TRUE(
      WaitUntil([this] { return Metric("okv_node_corrupt_objects_total{tier=\"hbm\"}") == 10; }));
  EXPECT_TRUE(
      WaitUntil([this] { return Metric("okv_node_objects{tier=\"hbm\",codec=\"int2\"}") == 0; }));
  for (const absl::Status& status : FetchAll(10)) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
  }
}

TEST_F(HbmDeviceTest, MoreThanHbmHoldsGoesDownAndComesBack) {
  PutAll(kBlocksMax);
  EXPECT_TRUE(WaitUntil([this] {
    return Metric("okv_node_tier_used_bytes{tier=\"hbm\"}") <= 0.9 * static_cast<double>(kHbmBytes);
  }));
  EXPECT_GT(Metric("okv_node_objects{tier=\"dram\",codec=\"int2\"}"), 0);
  ExpectAllFetched(kBlocksMax);
  ExpectAllFetched(kBlocksMax);
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--node") return okv::RunNode(argv[2], argv[3]);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
