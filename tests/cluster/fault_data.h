#ifndef OKV_TESTS_CLUSTER_FAULT_DATA_H_
#define OKV_TESTS_CLUSTER_FAULT_DATA_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "proto/format.h"
#include "proto/ids.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"

namespace okv::faults {

// A block of the fault tests: the index-th of chain `chain`. Block 0 of a chain is its sink and is
// stored as bf16 (256 KiB), every other one as int2 (40 KiB).
struct BlockName {
  uint32_t chain = 0;
  uint32_t index = 0;

  auto operator<=>(const BlockName&) const = default;
  Codec codec() const { return index == 0 ? Codec::kBf16 : Codec::kInt2; }
};

inline constexpr uint32_t kChainBlocksMax = 2048;

// 4 layers, 4 KV heads, head_dim 64: objects large enough to travel by rendezvous.
RotationSet FaultRotations();
Format FaultFormat();

// Keys of the blocks by name: every process computes the same ones. Thread-compatible.
class BlockKeys {
 public:
  explicit BlockKeys(std::string tenant_salt) : tenant_salt_(std::move(tenant_salt)) {}
  ObjectId Id(const BlockName& block);
  std::optional<BlockKey> Parent(const BlockName& block);
  // The first blocks_count keys of a chain.
  std::vector<BlockKey> Chain(uint32_t chain, uint32_t blocks_count);

 private:
  const std::vector<BlockKey>& Keys(uint32_t chain);

  const std::string tenant_salt_;
  const FormatId format_id_ = FaultFormat().id();
  std::map<uint32_t, std::vector<BlockKey>> chains_;
};

// The bytes that the writer `nonce` puts under `id`: a function of key, codec, nonce, page and
// offset, so that any reader can tell any byte. Every page begins with the nonce: a payload made of
// two writers' pages is wrong as well.
void FillPattern(const ObjectId& id, const PageLayout& layout, uint64_t nonce,
                 absl::Span<uint8_t> payload);

struct PatternCheck {
  uint64_t nonce = 0;  // Of the first page.
  uint64_t wrong_bytes = 0;
};
PatternCheck CheckPattern(const ObjectId& id, const PageLayout& layout,
                          absl::Span<const uint8_t> payload);

// What fills a buffer that a returned call may no longer touch.
inline constexpr uint8_t kPoison = 0xA5;

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_DATA_H_
