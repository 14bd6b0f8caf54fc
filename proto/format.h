#ifndef OKV_PROTO_FORMAT_H_
#define OKV_PROTO_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/sha256.h"

namespace okv {

inline constexpr uint32_t kBlockTokens = 64;
inline constexpr uint32_t kPageLayoutVersion = 1;
// Limits that everything below may rely on.
inline constexpr uint32_t kLayersMax = 512;
inline constexpr uint32_t kKvHeadsMax = 256;
inline constexpr size_t kFormatTextBytesMax = 4096;

// Everything that decides whether bytes may be used. Two processes exchange blocks only when their
// formats are equal; format_id is the name of that equality. A plain value. Thread-compatible.
struct Format {
  // Texts are UTF-8 of at most kFormatTextBytesMax bytes.
  std::string model;                // For example "SmolLM2-135M-Instruct".
  std::string weights_revision;     // Whatever names the weights' bytes: a commit, a SHA-256.
  std::vector<uint32_t> layer_ids;  // Global ids of the layers with a KV cache, ascending.
  uint32_t kv_heads = 0;
  uint32_t head_dim_k = 0;  // 64, 128 or 256; head_dim_v equals it in layout version 1.
  uint32_t head_dim_v = 0;
  double rope_theta = 0;
  std::string rope_scaling;  // "" = none; otherwise the engine's canonical description.
  uint32_t block_tokens = kBlockTokens;
  uint32_t sink_tokens = 64;     // A multiple of block_tokens: S = sink_tokens / block_tokens.
  uint32_t recent_tokens = 256;  // Likewise: W = recent_tokens / block_tokens.
  std::string view = "exact";    // How prefill sees history: "exact", or an engine's own name.
  uint32_t group_size = 0;       // Channels that share a scale: 32 to head_dim, a power of two.
  RotationHash rotation_hash;    // Covers the rotations' bf16 bits and the clip ranks.
  uint32_t page_layout_version = kPageLayoutVersion;

  bool operator==(const Format&) const = default;

  uint32_t layers_count() const { return static_cast<uint32_t>(layer_ids.size()); }
  uint32_t sink_blocks() const { return sink_tokens / kBlockTokens; }
  uint32_t recent_blocks() const { return recent_tokens / kBlockTokens; }

  // kInvalidArgument naming the first field that is missing or out of range. A missing field is an
  // error, never a default.
  absl::Status Validate() const;

  // The canonical encoding, page_layout.md: magic "OKVF", version, then every field as (tag u8,
  // length u32 LE, bytes). Equal formats, equal bytes.
  std::string Canonical() const;
  // Reads Canonical()'s bytes. kInvalidArgument on anything else; the result is validated.
  static absl::StatusOr<Format> Parse(absl::string_view canonical);

  // SHA-256 of Canonical().
  FormatId id() const;
};

// "field 'group_size' differs: 64 here, 128 there" for the first field, in the order above, that
// differs; "" when equal.
std::string DescribeDifference(const Format& here, const Format& there);

}  // namespace okv

#endif  // OKV_PROTO_FORMAT_H_
