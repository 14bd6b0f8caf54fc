#ifndef OKV_PROTO_BLOCK_KEY_H_
#define OKV_PROTO_BLOCK_KEY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "proto/ids.h"
#include "proto/sha256.h"

namespace okv {

// What besides tokens decides a block's values. Each kind has its own tag, so a LoRA adapter named
// "x" and a multimodal hash "x" give different keys.
struct ExtraKey {
  enum class Kind : uint8_t { kLora = 1, kMultimodal = 2, kEngineHash = 3 };
  Kind kind;
  std::string value;
};

struct BlockKeyInput {
  FormatId format_id;
  absl::string_view tenant_salt;
  std::optional<BlockKey> parent;     // Absent for block 0 only: absence is typed, not zero.
  absl::Span<const uint32_t> tokens;  // block_tokens ids.
  absl::Span<const ExtraKey> extra_keys;
};

// SHA-256 over (tag u8, length u32 LE, bytes) fields; page_layout.md has the list and an example.
BlockKey ComputeBlockKey(const BlockKeyInput& input);

// Keys of the full blocks of `tokens`, each the parent of the next. Trailing tokens that fill no
// block give no key.
std::vector<BlockKey> ComputeBlockKeys(const FormatId& format_id, absl::string_view tenant_salt,
                                       absl::Span<const uint32_t> tokens,
                                       absl::Span<const ExtraKey> extra_keys);

}  // namespace okv

#endif  // OKV_PROTO_BLOCK_KEY_H_
