// Ranks of a tensor-parallel group, each with a transport and a session of its own, over the real
// control plane and node: in host memory, and each rank in its GPU's with the node's HBM tier on
// the first GPU (one GPU is everybody's where there are no more).

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/okv.h"
#include "gtest/gtest.h"
#include "proto/block_range.h"
#include "tests/cluster/local_cluster.h"
#include "tests/support/fixtures.h"

namespace okv::testing_support {
namespace {

constexpr uint32_t kBlocks = 40;
const absl::Duration kLong = absl::Seconds(60);

// Where payloads are.
class TensorParallelTest : public ::testing::TestWithParam<MemoryKind> {
 protected:
  struct Rank {
    ~Rank() {
      cluster.reset();
      transport.reset();
      if (device != nullptr) device->Free(memory);
    }
    DeviceMemory* device = nullptr;
    std::vector<uint8_t> host_memory;
    uint8_t* memory = nullptr;  // kBlocks whole blocks.
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Cluster> cluster;
  };

  void SetUp() override {
    std::vector<std::string> node_flags;
    if (GetParam() == MemoryKind::kDevice) {
      absl::StatusOr<std::unique_ptr<DeviceMemory>> device = OpenCudaDevice(0);
      if (!device.ok()) GTEST_SKIP() << device.status();
      for (int i = 1; device.ok(); ++i) {
        devices_.push_back(*std::move(device));
        device = OpenCudaDevice(i);
      }
      node_flags = {"--hbm_bytes", "67108864", "--hbm_device", "0", "--require_gpudirect"};
    }
    cluster_.StartControl();
    if (HasFatalFailure()) return;
    cluster_.Publish();
    cluster_.StartNode(0, node_flags);
    const auto rotations = RotationSet::Parse(ReadFileOrEmpty(cluster_.rotation()));
    ASSERT_TRUE(rotations.ok()) << rotations.status();
    format_ = SmallFormat(*rotations);
    layout_ = PageLayout::Of(format_);
  }
  std::unique_ptr<Rank> MakeRank(size_t number) {
    auto rank = std::make_unique<Rank>();
    const size_t bytes = kBlocks * layout_.block_bytes(Codec::kBf16);
    if (!devices_.empty()) {
      rank->device = devices_[number % devices_.size()].get();
      rank->memory = *rank->device->Allocate(bytes);
    } else {
      rank->host_memory.resize(bytes);
      rank->memory = rank->host_memory.data();
    }
    rank->transport = *CreateUcxTransport({.device = rank->device});
    EXPECT_TRUE(
        rank->transport->RegisterMemory(absl::MakeSpan(rank->memory, bytes), GetParam()).ok());
    ClusterOptions options;
    options.control_address = cluster_.control_address();
    options.device = rank->device;
    auto connected = Cluster::Connect(options, format_, rank->transport.get());
    EXPECT_TRUE(connected.ok()) << connected.status();
    rank->cluster = *std::move(connected);
    return rank;
  }
  // The rank's buffer of a block, for what it has of it.
  absl::Span<uint8_t> Buffer(const Rank& rank, uint32_t block, const BlockRange& range) const {
    return absl::MakeSpan(rank.memory + block * layout_.block_bytes(Codec::kBf16),
                          range.bytes(layout_, CodecOf(block)));
  }
  static void Copy(const Rank& rank, uint8_t* to, const uint8_t* from, size_t bytes) {
    if (rank.device == nullptr) {
      std::copy(from, from + bytes, to);
    } else {
      ASSERT_TRUE(rank.device->Copy({{.to = to, .from = from, .bytes = bytes}}).ok());
    }
  }
  std::vector<BlockKey> Keys(const Cluster& cluster) const {
    std::vector<uint32_t> tokens;
    for (uint32_t i = 0; i < kBlocks * kBlockTokens; ++i) tokens.push_back(i * 7 % 1000);
    return ComputeBlockKeys(format_.id(), cluster.tenant_salt(), tokens, {});
  }
  static Codec CodecOf(uint32_t block) { return block == 0 ? Codec::kBf16 : Codec::kInt2; }
  std::vector<uint8_t> BlockBytes(uint32_t block) const {
    std::vector<uint8_t> bytes(layout_.block_bytes(CodecOf(block)));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 31 + block * 7);
    return bytes;
  }
  std::vector<uint8_t> RangeBytes(uint32_t block, const BlockRange& range) const {
    const std::vector<uint8_t> whole = BlockBytes(block);
    std::vector<uint8_t> bytes;
    for (const BlockPiece& piece : RangePieces(range, layout_, CodecOf(block))) {
      const auto begin = whole.begin() + static_cast<ptrdiff_t>(piece.offset);
      bytes.insert(bytes.end(), begin, begin + static_cast<ptrdiff_t>(piece.bytes));
    }
    return bytes;
  }
  BlockRange RankRange(uint32_t rank, uint32_t ranks_count) const {
    BlockRange range = BlockRange::Whole(layout_);
    range.head_begin = layout_.kv_heads / ranks_count * rank;
    range.head_end = layout_.kv_heads / ranks_count * (rank + 1);
    return range;
  }

  // Every block's share, in an order of the rank's own.
  std::vector<absl::Status> Put(const Rank& rank, const BlockRange& range, bool backwards) {
    const std::vector<BlockKey> keys = Keys(*rank.cluster);
    std::vector<PutItem> items;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint32_t block = backwards ? kBlocks - 1 - i : i;
      const std::vector<uint8_t> payload = RangeBytes(block, range);
      const absl::Span<uint8_t> buffer = Buffer(rank, block, range);
      Copy(rank, buffer.data(), payload.data(), payload.size());
      items.push_back({.id = {.key = keys[block], .codec = CodecOf(block)},
                       .index = BlockIndex(block),
                       .parent = block == 0 ? std::nullopt : std::optional(keys[block - 1]),
                       .payload = buffer});
    }
    return rank.cluster->Put(items, {.write_group = "group", .range = range, .deadline = kLong});
  }
  void ExpectFetched(const Rank& rank, const BlockRange& range) {
    const std::vector<BlockKey> keys = Keys(*rank.cluster);
    LookupResult::Node node = {.node_id = cluster_.ReadyFile(0)["node_id"],
                               .data_address = cluster_.ReadyFile(0)["data_address"]};
    std::vector<FetchItem> items;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const absl::Span<uint8_t> buffer = Buffer(rank, block, range);
      const std::vector<uint8_t> nothing(buffer.size(), 0xa5);
      Copy(rank, buffer.data(), nothing.data(), nothing.size());
      items.push_back({.id = {.key = keys[block], .codec = CodecOf(block)},
                       .index = BlockIndex(block),
                       .nodes = {node},
                       .buffer = buffer});
    }
    const auto statuses = rank.cluster->Fetch(items, range, kLong);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      ASSERT_TRUE(statuses[block].ok()) << statuses[block];
      std::vector<uint8_t> bytes(items[block].buffer.size());
      Copy(rank, bytes.data(), items[block].buffer.data(), bytes.size());
      EXPECT_TRUE(bytes == RangeBytes(block, range)) << "block " << block;
    }
    EXPECT_EQ(rank.cluster->stats().fetched_to_device, rank.device != nullptr ? kBlocks : 0);
  }

  std::vector<std::unique_ptr<DeviceMemory>> devices_;
  LocalCluster cluster_;
  Format format_;
  PageLayout layout_;
};

TEST_P(TensorParallelTest, WhatTwoRanksWriteIsReadWholeAndByRanks) {
  // Each rank begins where the other ends: no share that waits for its block may hold up others.
  std::vector<std::unique_ptr<Rank>> ranks;
  for (size_t i = 0; i < 2; ++i) ranks.push_back(MakeRank(i));
  std::vector<absl::Status> statuses[2];
  std::thread other([&] { statuses[1] = Put(*ranks[1], RankRange(1, 2), /*backwards=*/true); });
  statuses[0] = Put(*ranks[0], RankRange(0, 2), /*backwards=*/false);
  other.join();
  for (const auto& of_rank : statuses) {
    for (const absl::Status& status : of_rank) EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(cluster_.Metric(0, "okv_node_blocks_abandoned_total"), 0);
  for (uint32_t i = 0; i < 2; ++i) ExpectFetched(*ranks[i], RankRange(i, 2));
  ExpectFetched(*MakeRank(1), RankRange(0, 1));
}

TEST_P(TensorParallelTest, WhatOneWriterWroteRanksRead) {
  const auto rank = MakeRank(0);
  for (const absl::Status& status : Put(*rank, RankRange(0, 1), false)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (uint32_t i = 0; i < 2; ++i) ExpectFetched(*MakeRank(i), RankRange(i, 2));
}

INSTANTIATE_TEST_SUITE_P(All, TensorParallelTest,
                         ::testing::Values(MemoryKind::kHost, MemoryKind::kDevice),
                         [](const auto& memory) {
                           return std::string(memory.param == MemoryKind::kHost ? "Host" : "Gpu");
                         });

}  // namespace
}  // namespace okv::testing_support
