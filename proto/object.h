#ifndef OKV_PROTO_OBJECT_H_
#define OKV_PROTO_OBJECT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/ids.h"
#include "proto/page_layout.h"

namespace okv {

// What travels and is stored in front of an object's payload. A plain value.
struct ObjectHeader {
  uint32_t page_layout_version = kPageLayoutVersion;
  FormatId format_id;
  ObjectId id;
  std::optional<BlockKey> parent;  // Absent for block 0.
  BlockIndex index;
  uint64_t payload_bytes = 0;
  uint64_t generation = 0;          // The write id that committed it.
  std::vector<uint32_t> checksums;  // [layers, kv_heads], layer-major.

  bool operator==(const ObjectHeader&) const = default;

  // page_layout.md, "Object header": fixed little-endian fields, magic "OKVO", a checksum of the
  // header itself last.
  std::string Encode() const;
  // The same, behind what is in `out`.
  void AppendTo(std::string* out) const;
  // Reads Encode()'s bytes; `bytes` may not be longer. kDataLoss when magic, length or the header's
  // own checksum is wrong, kFailedPrecondition for another page layout version.
  static absl::StatusOr<ObjectHeader> Decode(absl::string_view bytes);
};

// The checksum of one run: low 32 bits of XXH3-64 over the payload bytes, seeded with XXH3-64 over
// (key, codec u8, layer u32 LE, head u32 LE). A stale, misplaced or zeroed run fails.
uint32_t RunChecksum(const ObjectId& id, uint32_t layer, uint32_t head,
                     absl::Span<const uint8_t> run);

// RunChecksum of every run of a block. REQUIRES: payload.size() == layout.block_bytes(id.codec).
std::vector<uint32_t> BlockChecksums(const ObjectId& id, const PageLayout& layout,
                                     absl::Span<const uint8_t> payload);

// kDataLoss naming the first bad (layer, head) run, or a payload or checksum count of the wrong
// size.
absl::Status VerifyObject(const ObjectHeader& header, const PageLayout& layout,
                          absl::Span<const uint8_t> payload);

}  // namespace okv

#endif  // OKV_PROTO_OBJECT_H_
