#include "cache_node/payload.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/object.h"

namespace okv {

absl::Status VerifyPayload(const HeldObject& object, const Payload& payload) {
  if (payload.device == nullptr) return VerifyObject(object.header, object.layout, payload.bytes);
  const ObjectHeader& header = object.header;
  if (payload.bytes.size() != object.layout.block_bytes(header.id.codec) ||
      header.checksums.size() != object.layout.runs_count()) {
    return absl::DataLossError(absl::StrCat(header.id.Name(), ": ", payload.bytes.size(),
                                            " payload bytes and ", header.checksums.size(),
                                            " checksums do not fit its format"));
  }
  const DeviceRuns runs = DeviceRuns::InBlock(
      header.id, object.layout, BlockRange::Whole(object.layout), payload.bytes.data());
  return payload.device->Verify({runs}, {absl::MakeConstSpan(header.checksums)})[0];
}

absl::Status GatherPieces(const Payload& payload, absl::Span<const BlockPiece> pieces,
                          absl::Span<uint8_t> to) {
  std::vector<MemoryCopy> copies;
  size_t offset = 0;
  for (const BlockPiece& piece : pieces) {
    OKV_CHECK(offset + piece.bytes <= to.size());
    copies.push_back({.to = to.data() + offset,
                      .from = payload.bytes.data() + piece.offset,
                      .bytes = piece.bytes});
    offset += piece.bytes;
  }
  OKV_CHECK(offset == to.size());
  if (payload.device != nullptr) return payload.device->Copy(copies);
  for (const MemoryCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  return absl::OkStatus();
}

}  // namespace okv
