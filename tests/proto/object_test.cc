#include "proto/object.h"

#include <xxhash.h>

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/fields.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::Header;
using examples::Payload;
using examples::StatusIs;

// Offsets of the fixed fields (page_layout.md, "Object header").
constexpr size_t kVersionAt = 4;
constexpr size_t kCodecAt = 72;
constexpr size_t kHasParentAt = 73;
constexpr size_t kParentAt = 74;
constexpr size_t kChecksumsCountAt = 126;
constexpr size_t kFixedBytes = 130;

PageLayout Layout() { return PageLayout::Of(examples::ExampleFormat()); }

// `bytes` with the header's own checksum made right again.
std::string Sealed(std::string bytes) {
  bytes.resize(bytes.size() - 4);
  AppendU32(&bytes, static_cast<uint32_t>(XXH3_64bits(bytes.data(), bytes.size())));
  return bytes;
}

std::string WithByte(std::string bytes, size_t at, uint8_t value) {
  bytes[at] = static_cast<char>(value);
  return Sealed(std::move(bytes));
}

TEST(ObjectHeaderTest, EncodeIsTheGoldenFile) {
  golden::ExpectGolden("object_header", "ObjectHeader::Encode() of examples::Header()",
                       Header().Encode());
}

TEST(ObjectHeaderTest, DecodeReadsWhatEncodeWrote) {
  ObjectHeader header = Header();
  for (const bool has_parent : {true, false}) {
    for (const size_t checksums_count : {0, 1, 2, 1000}) {
      header.parent = has_parent ? std::optional<BlockKey>(examples::Keys()[0]) : std::nullopt;
      header.id.codec = has_parent ? Codec::kInt2 : Codec::kBf16;
      header.index = BlockIndex(0xfedcba98);
      header.payload_bytes = 0x0123456789abcdef;
      header.generation = 0xfedcba9876543210;
      header.checksums.assign(checksums_count, 0x89abcdef);
      const std::string bytes = header.Encode();
      EXPECT_EQ(bytes.size(), kFixedBytes + 4 * checksums_count + 4);
      const auto decoded = ObjectHeader::Decode(bytes);
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      EXPECT_EQ(*decoded, header);
    }
  }
}

TEST(ObjectHeaderTest, DecodeRejectsEveryTruncationAndTrailingBytes) {
  const std::string bytes = Header().Encode();
  const auto is_lost = StatusIs(absl::StatusCode::kDataLoss, "");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THAT(ObjectHeader::Decode(absl::string_view(bytes).substr(0, size)).status(), is_lost)
        << size;
  }
  EXPECT_THAT(ObjectHeader::Decode(bytes + '\0').status(), is_lost);
  EXPECT_THAT(ObjectHeader::Decode(Sealed(bytes + "1234")).status(), is_lost);
}

TEST(ObjectHeaderTest, DecodeRejectsEveryFlippedBit) {
  const std::string bytes = Header().Encode();
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THAT(ObjectHeader::Decode(flipped).status(), StatusIs(absl::StatusCode::kDataLoss, ""))
        << bit;
  }
}

TEST(ObjectHeaderTest, DecodeRejectsFieldsOutOfRangeBehindARightChecksum) {
  const std::string bytes = Header().Encode();
  ASSERT_EQ(Sealed(bytes), bytes);
  const auto is_lost = StatusIs(absl::StatusCode::kDataLoss, "");
  EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, 0, 'X')).status(), is_lost);
  for (const uint8_t codec : {0, 3, 255}) {
    EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, kCodecAt, codec)).status(), is_lost);
  }
  EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, kHasParentAt, 2)).status(), is_lost);
  // No parent, but the bytes of one.
  EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, kHasParentAt, 0)).status(), is_lost);
  for (const uint8_t count : {0, 1, 3}) {
    EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, kChecksumsCountAt, count)).status(), is_lost);
  }
  // 0xff000002 checksums: nothing may be allocated for them.
  EXPECT_THAT(ObjectHeader::Decode(WithByte(bytes, kChecksumsCountAt + 3, 0xff)).status(), is_lost);
}

TEST(ObjectHeaderTest, DecodeRejectsMoreChecksumsThanAnyFormatHas) {
  ObjectHeader header = Header();
  header.checksums.assign(size_t{kLayersMax} * kKvHeadsMax, 1);
  EXPECT_TRUE(ObjectHeader::Decode(header.Encode()).ok());
  header.checksums.push_back(1);
  EXPECT_THAT(ObjectHeader::Decode(header.Encode()).status(),
              StatusIs(absl::StatusCode::kDataLoss, ""));
}

TEST(ObjectHeaderTest, AnotherPageLayoutVersionIsAFailedPrecondition) {
  EXPECT_THAT(ObjectHeader::Decode(WithByte(Header().Encode(), kVersionAt, 9)).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, "page_layout_version 9"));
}

TEST(ObjectHeaderTest, RandomBytesNeverDecodeToSomethingElse) {
  std::mt19937_64 random(examples::Seed());
  const std::string header = Header().Encode();
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = header;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    bytes.resize(random() % 4 == 0 ? 8 + random() % 300 : bytes.size());
    bytes = Sealed(std::move(bytes));
    const auto decoded = ObjectHeader::Decode(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(decoded->Encode(), bytes);
    }
  }
}

// The algorithm of page_layout.md, "Checksums", step by step.
TEST(ChecksumTest, ARunChecksumIsSeededXxh3) {
  const ObjectHeader header = Header();
  const std::vector<uint8_t> run = examples::Int2Run(1);
  std::string place(header.id.key.view());
  place += std::string("\x01\x00\x00\x00\x00\x01\x00\x00\x00", 9);
  const uint64_t seed = XXH3_64bits(place.data(), place.size());
  EXPECT_EQ(RunChecksum(header.id, 0, 1, run),
            static_cast<uint32_t>(XXH3_64bits_withSeed(run.data(), run.size(), seed)));
  EXPECT_EQ(header.checksums[1], RunChecksum(header.id, 0, 1, run));
}

TEST(ChecksumTest, APlaceChangesTheChecksum) {
  const std::vector<uint8_t> run = examples::Int2Run(0);
  const ObjectId id = Header().id;
  const uint32_t here = RunChecksum(id, 0, 0, run);
  EXPECT_NE(RunChecksum(id, 1, 0, run), here);
  EXPECT_NE(RunChecksum(id, 0, 1, run), here);
  EXPECT_NE(RunChecksum(id, 1, 0, run), RunChecksum(id, 0, 1, run));
  EXPECT_NE(RunChecksum({.key = id.key, .codec = Codec::kBf16}, 0, 0, run), here);
  EXPECT_NE(RunChecksum({.key = examples::Keys()[2], .codec = id.codec}, 0, 0, run), here);
}

TEST(VerifyObjectTest, AcceptsWhatBlockChecksumsCovers) {
  EXPECT_TRUE(VerifyObject(Header(), Layout(), Payload()).ok());
}

TEST(VerifyObjectTest, AFlippedBitIsDataLossNamingItsRun) {
  const PageLayout layout = {.layers_count = 3, .kv_heads = 2, .head_dim = 64, .group_size = 64};
  std::mt19937_64 random(examples::Seed());
  for (const Codec codec : kCodecs) {
    ObjectHeader header = Header();
    header.id.codec = codec;
    std::vector<uint8_t> payload(layout.block_bytes(codec));
    for (uint8_t& byte : payload) byte = static_cast<uint8_t>(random());
    header.payload_bytes = payload.size();
    header.checksums = BlockChecksums(header.id, layout, payload);
    ASSERT_TRUE(VerifyObject(header, layout, payload).ok());
    for (uint32_t run = 0; run < layout.runs_count(); ++run) {
      const size_t at = layout.run_bytes(codec) * run + random() % layout.run_bytes(codec);
      payload[at] ^= static_cast<uint8_t>(1u << (random() % 8));
      EXPECT_THAT(VerifyObject(header, layout, payload),
                  StatusIs(absl::StatusCode::kDataLoss, "layer " + std::to_string(run / 2) +
                                                            ", head " + std::to_string(run % 2)));
      header.checksums[run] =
          RunChecksum(header.id, run / 2, run % 2,
                      absl::MakeConstSpan(payload).subspan(layout.run_bytes(codec) * run,
                                                           layout.run_bytes(codec)));
    }
    EXPECT_TRUE(VerifyObject(header, layout, payload).ok());
  }
}

TEST(VerifyObjectTest, AMisplacedRunIsDataLoss) {
  // Two runs with the same bytes, and their checksums exchanged: nothing but the place differs.
  ObjectHeader header = Header();
  std::vector<uint8_t> payload = examples::Int2Run(0);
  const std::vector<uint8_t> copy = payload;
  payload.insert(payload.end(), copy.begin(), copy.end());
  header.checksums = BlockChecksums(header.id, Layout(), payload);
  ASSERT_TRUE(VerifyObject(header, Layout(), payload).ok());
  std::swap(header.checksums[0], header.checksums[1]);
  EXPECT_THAT(VerifyObject(header, Layout(), payload),
              StatusIs(absl::StatusCode::kDataLoss, "layer 0, head 0"));
}

TEST(VerifyObjectTest, AStaleObjectIsDataLoss) {
  // Right for another block: what a slot that was used again holds.
  ObjectHeader header = Header();
  header.id.key = examples::Keys()[2];
  EXPECT_THAT(VerifyObject(header, Layout(), Payload()), StatusIs(absl::StatusCode::kDataLoss, ""));
}

TEST(VerifyObjectTest, AZeroedObjectIsDataLossEvenWithZeroedChecksums) {
  ObjectHeader header = Header();
  const std::vector<uint8_t> zeros(Payload().size());
  EXPECT_THAT(VerifyObject(header, Layout(), zeros), StatusIs(absl::StatusCode::kDataLoss, ""));
  header.checksums.assign(2, 0);
  EXPECT_THAT(VerifyObject(header, Layout(), zeros), StatusIs(absl::StatusCode::kDataLoss, ""));
}

TEST(VerifyObjectTest, WrongSizesAreDataLoss) {
  std::vector<uint8_t> payload = Payload();
  ObjectHeader header = Header();
  header.payload_bytes += 1;
  EXPECT_THAT(VerifyObject(header, Layout(), payload),
              StatusIs(absl::StatusCode::kDataLoss, "payload bytes"));
  payload.push_back(0);
  EXPECT_THAT(VerifyObject(header, Layout(), payload),
              StatusIs(absl::StatusCode::kDataLoss, "payload bytes"));
  EXPECT_THAT(VerifyObject(Header(), Layout(), {}),
              StatusIs(absl::StatusCode::kDataLoss, "payload bytes"));
  header = Header();
  header.checksums.pop_back();
  EXPECT_THAT(VerifyObject(header, Layout(), Payload()),
              StatusIs(absl::StatusCode::kDataLoss, "checksums"));
}

TEST(ChecksumDeathTest, APayloadOfTheWrongSizeIsABrokenInvariant) {
  EXPECT_DEATH(BlockChecksums(Header().id, Layout(), {}), "OKV_CHECK failed: payload.size");
}

}  // namespace
}  // namespace okv
