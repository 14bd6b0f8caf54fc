// Ranks of a tensor-parallel group, each with a transport and a session of its own, over the real
// control plane and node.

#include <memory>
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

class TensorParallelTest : public ::testing::Test {
 protected:
  struct Rank {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Cluster> cluster;
  };

  void SetUp() override {
    cluster_.StartControl();
    if (HasFatalFailure()) return;
    cluster_.Publish();
    cluster_.StartNode(0);
    const auto rotations = RotationSet::Parse(ReadFileOrEmpty(cluster_.rotation()));
    ASSERT_TRUE(rotations.ok()) << rotations.status();
    format_ = SmallFormat(*rotations);
    layout_ = PageLayout::Of(format_);
  }
  Rank MakeRank() {
    Rank rank;
    rank.transport = *CreateUcxTransport({});
    ClusterOptions options;
    options.control_address = cluster_.control_address();
    auto connected = Cluster::Connect(options, format_, rank.transport.get());
    EXPECT_TRUE(connected.ok()) << connected.status();
    rank.cluster = *std::move(connected);
    return rank;
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
    std::vector<std::vector<uint8_t>> payloads;
    std::vector<PutItem> items;
    for (uint32_t i = 0; i < kBlocks; ++i) {
      const uint32_t block = backwards ? kBlocks - 1 - i : i;
      payloads.push_back(RangeBytes(block, range));
      items.push_back({.id = {.key = keys[block], .codec = CodecOf(block)},
                       .index = BlockIndex(block),
                       .parent = block == 0 ? std::nullopt : std::optional(keys[block - 1]),
                       .payload = payloads.back()});
    }
    return rank.cluster->Put(items, {.write_group = "group", .range = range, .deadline = kLong});
  }
  void ExpectFetched(const Rank& rank, const BlockRange& range) {
    const std::vector<BlockKey> keys = Keys(*rank.cluster);
    LookupResult::Node node = {.node_id = cluster_.ReadyFile(0)["node_id"],
                               .data_address = cluster_.ReadyFile(0)["data_address"]};
    std::vector<std::vector<uint8_t>> buffers;
    std::vector<FetchItem> items;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      buffers.emplace_back(range.bytes(layout_, CodecOf(block)));
      items.push_back({.id = {.key = keys[block], .codec = CodecOf(block)},
                       .index = BlockIndex(block),
                       .nodes = {node},
                       .buffer = absl::MakeSpan(buffers.back())});
    }
    const auto statuses = rank.cluster->Fetch(items, range, kLong);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      ASSERT_TRUE(statuses[block].ok()) << statuses[block];
      EXPECT_TRUE(buffers[block] == RangeBytes(block, range)) << "block " << block;
    }
  }

  LocalCluster cluster_;
  Format format_;
  PageLayout layout_;
};

TEST_F(TensorParallelTest, WhatTwoRanksWriteIsReadWholeAndByRanks) {
  // Each rank begins where the other ends: no share that waits for its block may hold up others.
  std::vector<Rank> ranks;
  for (int i = 0; i < 2; ++i) ranks.push_back(MakeRank());
  std::vector<absl::Status> statuses[2];
  std::thread other([&] { statuses[1] = Put(ranks[1], RankRange(1, 2), /*backwards=*/true); });
  statuses[0] = Put(ranks[0], RankRange(0, 2), /*backwards=*/false);
  other.join();
  for (const auto& of_rank : statuses) {
    for (const absl::Status& status : of_rank) EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(cluster_.Metric(0, "okv_node_blocks_abandoned_total"), 0);
  for (uint32_t rank = 0; rank < 2; ++rank) ExpectFetched(ranks[rank], RankRange(rank, 2));
  ExpectFetched(ranks[0], RankRange(0, 1));
}

TEST_F(TensorParallelTest, WhatOneWriterWroteRanksRead) {
  const Rank rank = MakeRank();
  for (const absl::Status& status : Put(rank, RankRange(0, 1), false)) {
    EXPECT_TRUE(status.ok()) << status;
  }
  for (uint32_t i = 0; i < 2; ++i) ExpectFetched(MakeRank(), RankRange(i, 2));
}

}  // namespace
}  // namespace okv::testing_support
