#ifndef OKV_CACHE_NODE_PAYLOAD_H_
#define OKV_CACHE_NODE_PAYLOAD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cache_node/tiers/tier.h"
#include "client/device_memory.h"
#include "proto/block_range.h"

namespace okv {

// A payload where it lies, in DRAM or in a GPU's memory. A plain value, valid as long as the pin or
// the buffer that it came from.
struct Payload {
  absl::Span<const uint8_t> bytes;
  DeviceMemory* device = nullptr;  // Null: DRAM.

  bool empty() const { return bytes.empty(); }
};

// Every checksum of the object, where the payload is. kDataLoss naming the first bad run;
// kUnavailable when the device fails.
absl::Status VerifyPayload(const HeldObject& object, const Payload& payload);

// Copies pieces of the payload into host memory, one after the other; `to` is as long as they are.
// kUnavailable when the device fails.
absl::Status GatherPieces(const Payload& payload, absl::Span<const BlockPiece> pieces,
                          absl::Span<uint8_t> to);

}  // namespace okv

#endif  // OKV_CACHE_NODE_PAYLOAD_H_
