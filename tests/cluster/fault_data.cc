#include "tests/cluster/fault_data.h"

#include <algorithm>
#include <cstring>

#include "proto/block_key.h"
#include "proto/check.h"
#include "tests/support/fixtures.h"

namespace okv::faults {
namespace {

constexpr uint32_t kLayers = 4;
constexpr uint32_t kKvHeads = 4;

// Splitmix64 (Steele, Lea, Flood 2014): every input bit moves half of the output's.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t PageSeed(const ObjectId& id, uint64_t nonce, size_t page) {
  uint64_t seed = static_cast<uint64_t>(id.codec);
  for (size_t i = 0; i < id.key.view().size(); i += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, id.key.view().data() + i, sizeof(word));
    seed = Mix(seed ^ word);
  }
  return Mix(Mix(seed ^ nonce) ^ page);
}

// Word `word` of the page: the nonce first, then the pattern.
uint64_t PatternWord(uint64_t seed, uint64_t nonce, size_t word) {
  return word == 0 ? nonce : Mix(seed ^ (word * sizeof(uint64_t)));
}

}  // namespace

RotationSet FaultRotations() {
  RotationSet set = testing_support::SmallRotations("none", /*clip_rank=*/0);
  set.model = "faults";
  const size_t layer_words = set.r_k.size() / set.layer_ids.size();
  set.layer_ids.clear();
  const std::vector<uint16_t> layer(set.r_k.begin(),
                                    set.r_k.begin() + static_cast<ptrdiff_t>(layer_words));
  set.r_k.clear();
  for (uint32_t i = 0; i < kLayers; ++i) {
    set.layer_ids.push_back(i);
    set.r_k.insert(set.r_k.end(), layer.begin(), layer.end());
  }
  set.kv_heads = kKvHeads;
  set.r_v = set.r_k;
  set.clip_rank_k.assign(size_t{kLayers} * kKvHeads, 0);
  set.clip_rank_v = set.clip_rank_k;
  return set;
}

Format FaultFormat() { return testing_support::SmallFormat(FaultRotations()); }

const std::vector<BlockKey>& BlockKeys::Keys(uint32_t chain) {
  std::vector<BlockKey>& keys = chains_[chain];
  if (keys.empty()) {
    std::vector<uint32_t> tokens(size_t{kChainBlocksMax} * kBlockTokens);
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<uint32_t>(Mix(Mix(chain) ^ i)) % 32000;
    }
    keys = ComputeBlockKeys(format_id_, tenant_salt_, tokens, {});
  }
  return keys;
}

ObjectId BlockKeys::Id(const BlockName& block) {
  return {.key = Keys(block.chain).at(block.index), .codec = block.codec()};
}

std::optional<BlockKey> BlockKeys::Parent(const BlockName& block) {
  if (block.index == 0) return std::nullopt;
  return Keys(block.chain).at(block.index - 1);
}

std::vector<BlockKey> BlockKeys::Chain(uint32_t chain, uint32_t blocks_count) {
  const std::vector<BlockKey>& keys = Keys(chain);
  OKV_CHECK(blocks_count <= keys.size());
  return {keys.begin(), keys.begin() + blocks_count};
}

void FillPattern(const ObjectId& id, const PageLayout& layout, uint64_t nonce,
                 absl::Span<uint8_t> payload) {
  const size_t page_bytes = layout.page_bytes(id.codec);
  OKV_CHECK(payload.size() == layout.block_bytes(id.codec));
  OKV_CHECK(page_bytes % sizeof(uint64_t) == 0);
  for (size_t page = 0; page < layout.layers_count; ++page) {
    const uint64_t seed = PageSeed(id, nonce, page);
    uint8_t* out = payload.data() + page * page_bytes;
    for (size_t word = 0; word < page_bytes / sizeof(uint64_t); ++word) {
      const uint64_t value = PatternWord(seed, nonce, word);
      std::memcpy(out + word * sizeof(value), &value, sizeof(value));
    }
  }
}

PatternCheck CheckPattern(const ObjectId& id, const PageLayout& layout,
                          absl::Span<const uint8_t> payload) {
  PatternCheck check;
  OKV_CHECK(payload.size() == layout.block_bytes(id.codec));
  std::memcpy(&check.nonce, payload.data(), sizeof(check.nonce));
  std::vector<uint8_t> expected(payload.size());
  FillPattern(id, layout, check.nonce, absl::MakeSpan(expected));
  if (std::memcmp(expected.data(), payload.data(), payload.size()) == 0) return check;
  for (size_t i = 0; i < payload.size(); ++i) check.wrong_bytes += payload[i] != expected[i];
  return check;
}

}  // namespace okv::faults
