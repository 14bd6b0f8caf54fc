#include "proto/block_key.h"

#include <set>

#include "gtest/gtest.h"
#include "proto/fields.h"
#include "proto/format.h"
#include "tests/golden/golden.h"
#include "tests/proto/examples.h"

namespace okv {
namespace {

using examples::Keys;
using examples::Tokens;

TEST(BlockKeyTest, AChainIsTheGoldenFile) {
  std::string bytes;
  for (const BlockKey& key : Keys()) bytes += std::string(key.view());
  golden::ExpectGolden("block_keys", "examples::Keys(): the keys of blocks 0, 1 and 2", bytes);
}

// The fields of page_layout.md, "Block key", written here by hand.
TEST(BlockKeyTest, AKeyIsSha256OverTheDocumentedFields) {
  const FormatId format_id = examples::ExampleFormat().id();
  const std::vector<uint32_t> tokens = Tokens(64);
  std::string token_bytes;
  for (const uint32_t token : tokens) AppendU32(&token_bytes, token);
  std::string bytes;
  FieldWriter fields(&bytes);
  fields.U32(1, 1);
  fields.Bytes(2, format_id.view());
  fields.Bytes(3, "acme");
  fields.Bytes(4, "");
  fields.Bytes(6, token_bytes);
  EXPECT_EQ(Keys()[0].bytes, Sha256(bytes));

  const BlockKey parent = Keys()[0];
  const ExtraKey extra[] = {{ExtraKey::Kind::kLora, "adapter"},
                            {ExtraKey::Kind::kMultimodal, "image"},
                            {ExtraKey::Kind::kEngineHash, "hash"}};
  bytes.clear();
  fields.U32(1, 1);
  fields.Bytes(2, format_id.view());
  fields.Bytes(3, "acme");
  fields.Bytes(5, parent.view());
  fields.Bytes(6, token_bytes);
  fields.Bytes(17, "adapter");
  fields.Bytes(18, "image");
  fields.Bytes(19, "hash");
  EXPECT_EQ(ComputeBlockKey({.format_id = format_id,
                             .tenant_salt = "acme",
                             .parent = parent,
                             .tokens = tokens,
                             .extra_keys = extra})
                .bytes,
            Sha256(bytes));
}

TEST(BlockKeyTest, KeysChainThroughTheirParents) {
  const std::vector<BlockKey> keys = Keys();
  ASSERT_EQ(keys.size(), 3u);
  const std::vector<uint32_t> tokens = Tokens(192);
  for (size_t i = 0; i < keys.size(); ++i) {
    const BlockKeyInput input = {
        .format_id = examples::ExampleFormat().id(),
        .tenant_salt = "acme",
        .parent = i == 0 ? std::nullopt : std::optional<BlockKey>(keys[i - 1]),
        .tokens = absl::MakeConstSpan(tokens).subspan(i * 64, 64),
        .extra_keys = {}};
    EXPECT_EQ(ComputeBlockKey(input), keys[i]) << i;
  }
}

TEST(BlockKeyTest, TokensThatFillNoBlockGiveNoKey) {
  const FormatId id = examples::ExampleFormat().id();
  EXPECT_TRUE(ComputeBlockKeys(id, "acme", {}, {}).empty());
  EXPECT_TRUE(ComputeBlockKeys(id, "acme", Tokens(63), {}).empty());
  EXPECT_EQ(ComputeBlockKeys(id, "acme", Tokens(64), {}).size(), 1u);
  const std::vector<BlockKey> keys = Keys();
  EXPECT_EQ(ComputeBlockKeys(id, "acme", Tokens(191), {}),
            (std::vector<BlockKey>{keys[0], keys[1]}));
}

TEST(BlockKeyTest, AnEarlyTokenChangesAllLaterKeys) {
  std::vector<uint32_t> tokens = Tokens(192);
  tokens[70] += 1;
  const auto keys = ComputeBlockKeys(examples::ExampleFormat().id(), "acme", tokens, {});
  EXPECT_EQ(keys[0], Keys()[0]);
  EXPECT_NE(keys[1], Keys()[1]);
  EXPECT_NE(keys[2], Keys()[2]);
}

// Whatever says "x" (salt, LoRA, multimodal, engine hash, or a shift of bytes between neighbours)
// gives a key of its own.
TEST(BlockKeyTest, TheSameTextInAnotherPlaceIsAnotherKey) {
  using Kind = ExtraKey::Kind;
  struct Case {
    std::string salt;
    std::vector<ExtraKey> extra;
  };
  const std::vector<Case> cases = {
      {"", {}},
      {"x", {}},
      {"", {{Kind::kLora, "x"}}},
      {"", {{Kind::kMultimodal, "x"}}},
      {"", {{Kind::kEngineHash, "x"}}},
      {"", {{Kind::kLora, ""}}},
      {"", {{Kind::kMultimodal, ""}}},
      {"x", {{Kind::kLora, "x"}}},
      {"", {{Kind::kLora, "x"}, {Kind::kLora, "x"}}},
      {"", {{Kind::kLora, "xx"}}},
      {"", {{Kind::kLora, "x"}, {Kind::kMultimodal, "x"}}},
      {"", {{Kind::kMultimodal, "x"}, {Kind::kLora, "x"}}},
      {"xx", {}},
  };
  std::set<BlockKey> keys;
  const FormatId id = examples::ExampleFormat().id();
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto chain = ComputeBlockKeys(id, cases[i].salt, Tokens(128), cases[i].extra);
    EXPECT_TRUE(keys.insert(chain[0]).second) << i;
    EXPECT_TRUE(keys.insert(chain[1]).second) << i;
  }
}

TEST(BlockKeyTest, AnAbsentParentIsNotAZeroParent) {
  const std::vector<uint32_t> tokens = Tokens(64);
  BlockKeyInput input = {.format_id = examples::ExampleFormat().id(),
                         .tenant_salt = "acme",
                         .parent = std::nullopt,
                         .tokens = tokens,
                         .extra_keys = {}};
  const BlockKey absent = ComputeBlockKey(input);
  input.parent = BlockKey{};
  EXPECT_NE(ComputeBlockKey(input), absent);
}

TEST(BlockKeyTest, AnotherFormatIsAnotherKey) {
  Format format = examples::ExampleFormat();
  format.view = "longest";
  EXPECT_NE(ComputeBlockKeys(format.id(), "acme", Tokens(64), {})[0], Keys()[0]);
}

TEST(BlockKeyDeathTest, ABlockOfAnotherSizeIsABrokenInvariant) {
  const std::vector<uint32_t> tokens = Tokens(63);
  EXPECT_DEATH(ComputeBlockKey({.format_id = {},
                                .tenant_salt = "",
                                .parent = std::nullopt,
                                .tokens = tokens,
                                .extra_keys = {}}),
               "OKV_CHECK failed: input.tokens.size\\(\\) == kBlockTokens");
}

}  // namespace
}  // namespace okv
