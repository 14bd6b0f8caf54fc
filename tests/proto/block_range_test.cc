#include "proto/block_range.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace okv {
namespace {

using ::testing::HasSubstr;

PageLayout Layout(uint32_t layers_count, uint32_t kv_heads) {
  return {.layers_count = layers_count, .kv_heads = kv_heads, .head_dim = 64, .group_size = 64};
}

ObjectId Id(Codec codec) {
  ObjectId id{.key = {}, .codec = codec};
  id.key.bytes[3] = 7;
  return id;
}

std::vector<uint8_t> RandomBytes(size_t size) {
  std::mt19937_64 random(size);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// What a range is, said run by run.
std::vector<uint8_t> RunsOf(const BlockRange& range, const PageLayout& layout, Codec codec,
                            const std::vector<uint8_t>& block) {
  std::vector<uint8_t> bytes;
  for (uint32_t layer = range.layer_begin; layer < range.layer_end; ++layer) {
    for (uint32_t head = range.head_begin; head < range.head_end; ++head) {
      const auto run = block.begin() + layout.run_offset(codec, layer, head);
      bytes.insert(bytes.end(), run, run + layout.run_bytes(codec));
    }
  }
  return bytes;
}

TEST(BlockRangeTest, NothingSaidIsEverything) {
  const PageLayout layout = Layout(3, 4);
  EXPECT_EQ(*ResolveRange({}, layout), BlockRange::Whole(layout));
  EXPECT_EQ(*ResolveRange({.head_begin = 1, .head_end = 3}, layout),
            (BlockRange{.layer_begin = 0, .layer_end = 3, .head_begin = 1, .head_end = 3}));
  EXPECT_EQ(*ResolveRange({.layer_begin = 2, .layer_end = 3}, layout),
            (BlockRange{.layer_begin = 2, .layer_end = 3, .head_begin = 0, .head_end = 4}));
}

TEST(BlockRangeTest, BadBoundsAreInvalidArgumentNamingTheField) {
  const PageLayout layout = Layout(3, 4);
  const struct {
    BlockRange range;
    const char* field;
  } bad[] = {
      {{.layer_begin = 1}, "layer_begin"},
      {{.layer_begin = 2, .layer_end = 2}, "layer_begin"},
      {{.layer_begin = 2, .layer_end = 1}, "layer_begin"},
      {{.layer_end = 4}, "layer_end"},
      {{.layer_begin = 3, .layer_end = 4}, "layer_end"},
      {{.layer_end = UINT32_MAX}, "layer_end"},
      {{.head_begin = 1}, "head_begin"},
      {{.head_begin = UINT32_MAX, .head_end = 1}, "head_begin"},
      {{.head_end = 5}, "head_end"},
      {{.head_begin = UINT32_MAX, .head_end = UINT32_MAX}, "head_end"},
  };
  for (const auto& [range, field] : bad) {
    const absl::Status status = ResolveRange(range, layout).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status << " for " << range.ToString();
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  }
}

TEST(BlockRangeTest, PiecesAreTheRunsAndNeighboursAreOnePiece) {
  for (const Codec codec : kCodecs) {
    for (uint32_t kv_heads = 1; kv_heads <= 8; ++kv_heads) {
      const PageLayout layout = Layout(3, kv_heads);
      const std::vector<uint8_t> block = RandomBytes(layout.block_bytes(codec));
      for (uint32_t layer_begin = 0; layer_begin < 3; ++layer_begin) {
        for (uint32_t layer_end = layer_begin + 1; layer_end <= 3; ++layer_end) {
          for (uint32_t head_begin = 0; head_begin < kv_heads; ++head_begin) {
            for (uint32_t head_end = head_begin + 1; head_end <= kv_heads; ++head_end) {
              const BlockRange range = {.layer_begin = layer_begin,
                                        .layer_end = layer_end,
                                        .head_begin = head_begin,
                                        .head_end = head_end};
              std::vector<uint8_t> bytes;
              const std::vector<BlockPiece> pieces = RangePieces(range, layout, codec);
              for (const BlockPiece& piece : pieces) {
                const auto begin = block.begin() + piece.offset;
                bytes.insert(bytes.end(), begin, begin + piece.bytes);
              }
              EXPECT_TRUE(bytes == RunsOf(range, layout, codec, block)) << range.ToString();
              EXPECT_EQ(bytes.size(), range.bytes(layout, codec));
              const bool one = range.heads_count() == kv_heads || range.layers_count() == 1;
              EXPECT_EQ(pieces.size(), one ? 1 : range.layers_count()) << range.ToString();
            }
          }
        }
      }
    }
  }
}

TEST(BlockRangeTest, ChecksumsOfTheRangesOfARankAreThoseOfTheBlock) {
  const PageLayout layout = Layout(3, 4);
  for (const Codec codec : kCodecs) {
    const std::vector<uint8_t> block = RandomBytes(layout.block_bytes(codec));
    const std::vector<uint32_t> all = BlockChecksums(Id(codec), layout, block);
    EXPECT_EQ(RangeChecksums(Id(codec), layout, BlockRange::Whole(layout), block), all);
    const BlockRange range = {.layer_begin = 1, .layer_end = 3, .head_begin = 2, .head_end = 4};
    EXPECT_EQ(RangeChecksums(Id(codec), layout, range, RunsOf(range, layout, codec, block)),
              (std::vector<uint32_t>{all[6], all[7], all[10], all[11]}));
  }
}

TEST(BlockRangeTest, VerifyRangeNamesTheRunByItsPlaceInTheBlock) {
  const PageLayout layout = Layout(3, 4);
  const Codec codec = Codec::kInt2;
  const std::vector<uint8_t> block = RandomBytes(layout.block_bytes(codec));
  ObjectHeader header;
  header.id = Id(codec);
  header.payload_bytes = block.size();
  header.checksums = BlockChecksums(header.id, layout, block);
  const BlockRange range = {.layer_begin = 1, .layer_end = 3, .head_begin = 2, .head_end = 4};
  std::vector<uint8_t> bytes = RunsOf(range, layout, codec, block);
  EXPECT_TRUE(VerifyRange(header, layout, range, bytes).ok());

  bytes[3 * layout.run_bytes(codec) + 5] ^= 1;
  absl::Status status = VerifyRange(header, layout, range, bytes);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 2, head 3"));
  bytes[3 * layout.run_bytes(codec) + 5] ^= 1;

  // The bytes of other heads, whole as they are, are not these heads'.
  const BlockRange other = {.layer_begin = 1, .layer_end = 3, .head_begin = 0, .head_end = 2};
  EXPECT_TRUE(absl::IsDataLoss(VerifyRange(header, layout, other, bytes)));
  EXPECT_TRUE(
      absl::IsDataLoss(VerifyRange(header, layout, range, absl::MakeConstSpan(bytes).subspan(1))));
  ObjectHeader wrong = header;
  wrong.checksums.pop_back();
  EXPECT_TRUE(absl::IsDataLoss(VerifyRange(wrong, layout, range, bytes)));
  wrong = header;
  ++wrong.payload_bytes;
  EXPECT_TRUE(absl::IsDataLoss(VerifyRange(wrong, layout, range, bytes)));
}

TEST(BlockRangeTest, RangesOverlapWhenTheyShareARun) {
  const BlockRange a = {.layer_begin = 0, .layer_end = 2, .head_begin = 0, .head_end = 2};
  EXPECT_TRUE(a.Overlaps(a));
  EXPECT_TRUE(a.Overlaps({.layer_begin = 1, .layer_end = 3, .head_begin = 1, .head_end = 2}));
  EXPECT_FALSE(a.Overlaps({.layer_begin = 2, .layer_end = 3, .head_begin = 0, .head_end = 2}));
  EXPECT_FALSE(a.Overlaps({.layer_begin = 0, .layer_end = 2, .head_begin = 2, .head_end = 4}));
}

}  // namespace
}  // namespace okv
