#include "proto/page_layout.h"

#include <map>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/fields.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

PageLayout Layout(uint32_t dim, uint32_t group) {
  return {.layers_count = 3, .kv_heads = 5, .head_dim = dim, .group_size = group};
}

TEST(PageLayoutTest, RunsHaveTheDocumentedSizes) {
  struct Case {
    uint32_t dim, group;
    size_t int2_bytes, bf16_bytes;
  };
  for (const Case& entry :
       {Case{64, 64, 2560, 16384}, Case{64, 32, 3072, 16384}, Case{128, 128, 4608, 32768},
        Case{128, 64, 5120, 32768}, Case{128, 32, 6144, 32768}, Case{256, 256, 8704, 65536},
        Case{256, 32, 12288, 65536}}) {
    const PageLayout layout = Layout(entry.dim, entry.group);
    EXPECT_EQ(layout.run_bytes(Codec::kInt2), entry.int2_bytes);
    EXPECT_EQ(layout.run_bytes(Codec::kBf16), entry.bf16_bytes);
    // 2 + 32 / g bits an element.
    EXPECT_EQ(layout.block_bytes(Codec::kInt2) * 8 * entry.group,
              layout.elements_count() * (2 * entry.group + 32));
    EXPECT_EQ(layout.block_bytes(Codec::kBf16), layout.elements_count() * 2);
  }
}

TEST(PageLayoutTest, RunsTileTheBlockLayerMajor) {
  for (const Codec codec : kCodecs) {
    const PageLayout layout = Layout(128, 64);
    size_t at = 0;
    for (uint32_t layer = 0; layer < layout.layers_count; ++layer) {
      EXPECT_EQ(at, layout.page_bytes(codec) * layer);
      for (uint32_t head = 0; head < layout.kv_heads; ++head) {
        EXPECT_EQ(layout.run_offset(codec, layer, head), at);
        at += layout.run_bytes(codec);
      }
    }
    EXPECT_EQ(layout.block_bytes(codec), at);
    EXPECT_EQ(layout.runs_count(), 15u);
  }
}

TEST(PageLayoutTest, PartsTileAnInt2Run) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      const PageLayout layout = Layout(dim, group);
      EXPECT_EQ(layout.k_codes_offset(), 0u);
      EXPECT_EQ(layout.v_codes_offset(), size_t{dim} * 16);
      EXPECT_EQ(layout.params_offset() - layout.v_codes_offset(), 64u * dim / 4);
      EXPECT_EQ(layout.run_bytes(Codec::kInt2) - layout.params_offset(),
                2 * 64u * layout.groups() * 4);
      // A run starts on a 16-byte boundary: one vector load.
      EXPECT_EQ(layout.run_bytes(Codec::kInt2) % 16, 0u);
    }
  }
}

TEST(PageLayoutTest, EveryBitOfAnInt2RunBelongsToOneCodeOrWord) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group = 32; group <= dim; group *= 2) {
      const PageLayout layout = Layout(dim, group);
      std::vector<uint8_t> bits(layout.run_bytes(Codec::kInt2));
      const auto claim = [&bits](uint32_t byte, uint32_t mask) {
        ASSERT_LT(byte, bits.size());
        EXPECT_EQ(bits[byte] & mask, 0u) << byte;
        bits[byte] = static_cast<uint8_t>(bits[byte] | mask);
      };
      for (uint32_t t = 0; t < kBlockTokens; ++t) {
        for (uint32_t ch = 0; ch < dim; ++ch) {
          const int2::CodePosition k = int2::KeyCode(dim, t, ch);
          const int2::CodePosition v = int2::ValueCode(dim, t, ch);
          EXPECT_LT(k.byte, layout.v_codes_offset());
          EXPECT_GE(v.byte, layout.v_codes_offset());
          EXPECT_LT(v.byte, layout.params_offset());
          claim(k.byte, 3u << k.shift);
          claim(v.byte, 3u << v.shift);
        }
        for (uint32_t g = 0; g < layout.groups(); ++g) {
          for (uint32_t i = 0; i < 4; ++i) {
            claim(int2::KeyParams(dim, layout.groups(), t, g) + i, 0xff);
            claim(int2::ValueParams(dim, layout.groups(), t, g) + i, 0xff);
          }
        }
      }
      for (const uint8_t byte : bits) ASSERT_EQ(byte, 0xff);
    }
  }
}

// What a kernel relies on when it loads 16 bytes a lane; page_layout.md's table in numbers.
TEST(PageLayoutTest, LanesOfATileHoldTheDocumentedCodes) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    const uint32_t quarter = dim / 4;
    for (uint32_t row = 0; row < 8; ++row) {
      for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t lane = (row * 4 + c) * 16;
        for (uint32_t j = 0; j < 4; ++j) {
          // Keys: byte y of word w, channels 4 c + y, in the first tile.
          for (uint32_t w = 0; w < 4; ++w) {
            const uint32_t token = row + 8 * (dim == 64 ? w : w & 1);
            const uint32_t r = 4 * c + (dim == 64 ? 0 : 16 * (w >> 1));
            for (uint32_t y = 0; y < 4; ++y) {
              const int2::CodePosition k = int2::KeyCode(dim, token, j * quarter + r + y);
              EXPECT_EQ(k.byte, lane + w * 4 + y);
              EXPECT_EQ(k.shift, 2 * j);
            }
            // Values: channel row + 8 (w & 1), tokens 2 c, 2 c + 8, 2 c + 1, 2 c + 9 and 16 more.
            const uint32_t tokens[] = {0, 8, 1, 9};
            for (uint32_t y = 0; y < 4; ++y) {
              const int2::CodePosition v = int2::ValueCode(dim, 16 * (w >> 1) + 2 * c + tokens[y],
                                                           j * quarter + row + 8 * (w & 1));
              EXPECT_EQ(v.byte, 16 * dim + lane + w * 4 + y);
              EXPECT_EQ(v.shift, 2 * j);
            }
          }
        }
      }
    }
  }
}

TEST(PageLayoutTest, OfTakesTheFormatsGeometry) {
  const PageLayout layout = PageLayout::Of(examples::ExampleFormat());
  EXPECT_EQ(layout.layers_count, 1u);
  EXPECT_EQ(layout.kv_heads, 2u);
  EXPECT_EQ(layout.head_dim, 64u);
  EXPECT_EQ(layout.group_size, 32u);
}

std::string AsString(const std::vector<uint8_t>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

// The bytes that ComputeBlockKey hashes for block 1 of examples::Keys().
std::string BlockKeyFields() {
  std::string tokens;
  for (const uint32_t token : examples::Tokens(128)) AppendU32(&tokens, token);
  std::string bytes;
  FieldWriter fields(&bytes);
  fields.U32(1, 1);
  fields.Bytes(2, examples::ExampleFormat().id().view());
  fields.Bytes(3, "acme");
  fields.Bytes(5, examples::Keys()[0].view());
  fields.Bytes(6, absl::string_view(tokens).substr(256));
  return bytes;
}

// What a code block "```hex NAME" of page_layout.md shows.
std::map<std::string, std::string> DocumentedBytes() {
  using namespace examples;
  return {
      {"format", ExampleFormat().Canonical()},
      {"format_id", std::string(ExampleFormat().id().view())},
      {"block_key_fields", BlockKeyFields()},
      {"block_key", std::string(Keys()[1].view())},
      {"int2_run", AsString(Int2Run(0))},
      {"bf16_run", AsString(Bf16Run())},
      {"object_header", Header().Encode()},
      {"rotation_hash", std::string(Rotations().hash().view())},
      {"rotation_set", Rotations().Serialize()},
      {"ticket", SealTicket(ExampleTicket(), kTicketKey)},
  };
}

TEST(PageLayoutTest, DocumentedBlockKeyFieldsAreThoseHashed) {
  EXPECT_EQ(Sha256(BlockKeyFields()), examples::Keys()[1].bytes);
}

// A line is "OFFSET  XX XX ...  what it is": a hexadecimal offset, two blanks, bytes, two blanks.
TEST(PageLayoutTest, EveryHexLineOfTheDocumentIsWhatTheCodeWrites) {
  const std::map<std::string, std::string> expected = DocumentedBytes();
  std::istringstream document(golden::ReadSource("proto/page_layout.md"));
  std::set<std::string> seen;
  const std::string* bytes = nullptr;
  int lines_count = 0;
  for (std::string line; std::getline(document, line);) {
    if (absl::StartsWith(line, "```")) {
      bytes = nullptr;
      if (!absl::StartsWith(line, "```hex ")) continue;
      const std::string name = line.substr(7);
      ASSERT_EQ(expected.count(name), 1u) << name;
      bytes = &expected.at(name);
      seen.insert(name);
      continue;
    }
    if (bytes == nullptr || line == "...") continue;
    const size_t gap = line.find("  ");
    ASSERT_NE(gap, std::string::npos) << line;
    const std::string rest = line.substr(gap + 2);
    uint32_t offset = 0;
    ASSERT_TRUE(absl::SimpleHexAtoi(line.substr(0, gap), &offset)) << line;
    const std::string shown = golden::BytesOfHex(rest.substr(0, rest.find("  ")));
    ASSERT_FALSE(shown.empty()) << line;
    ASSERT_LE(offset + shown.size(), bytes->size()) << line;
    EXPECT_EQ(absl::BytesToHexString(bytes->substr(offset, shown.size())),
              absl::BytesToHexString(shown))
        << line;
    ++lines_count;
  }
  for (const auto& [name, value] : expected) EXPECT_EQ(seen.count(name), 1u) << name;
  EXPECT_GT(lines_count, 40);
}

}  // namespace
}  // namespace okv
