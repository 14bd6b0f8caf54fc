#ifndef OKV_CLIENT_DEVICE_MEMORY_H_
#define OKV_CLIENT_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/block_range.h"
#include "proto/ids.h"
#include "proto/page_layout.h"

namespace okv {

enum class MemoryKind : uint8_t { kHost, kDevice };

// Between two places in host memory or the device's.
struct MemoryCopy {
  uint8_t* to;
  const uint8_t* from;
  size_t bytes;
};

// The runs of one object, or of a range of it, in the device's memory. A plain value.
struct DeviceRuns {
  ObjectId id;
  PageLayout layout;
  BlockRange range;           // Resolved.
  const uint8_t* first_run;   // Of the range; a multiple of 16.
  size_t layer_stride_bytes;  // From a layer's first run to the next one's; a multiple of 16.

  // A range's own bytes, as they travel.
  static DeviceRuns OfRange(const ObjectId& id, const PageLayout& layout, const BlockRange& range,
                            const uint8_t* bytes) {
    return {.id = id,
            .layout = layout,
            .range = range,
            .first_run = bytes,
            .layer_stride_bytes = range.heads_count() * layout.run_bytes(id.codec)};
  }
  // A range where it lies in its whole block.
  static DeviceRuns InBlock(const ObjectId& id, const PageLayout& layout, const BlockRange& range,
                            const uint8_t* block) {
    return {.id = id,
            .layout = layout,
            .range = range,
            .first_run = block + layout.run_offset(id.codec, range.layer_begin, range.head_begin),
            .layer_stride_bytes = layout.page_bytes(id.codec)};
  }
};

// The memory of a GPU, as far as payloads need it: the node's HBM tier lies in it, and a worker
// that computes there fetches into it. Its addresses are no host addresses: only these calls, the
// transport and kernels may follow them. Thread-safe: calls of several threads run side by side,
// each on a stream of its own that waits for no other, and return when the device is done; the
// caller's thread has the device that it had before. They may run while other threads capture CUDA
// graphs.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual std::string name() const = 0;  // "cuda:0 (NVIDIA H200)", for logs and errors.
  // For the calling thread, from now on: what UCX and kernels need.
  virtual absl::Status MakeCurrent() = 0;

  // One allocation, aligned for every use. kResourceExhausted naming the device when it has not so
  // much.
  virtual absl::StatusOr<uint8_t*> Allocate(uint64_t bytes) = 0;
  virtual void Free(uint8_t* memory) = 0;
  // Which memory the address is in. kInvalidArgument naming both when it is another device's.
  virtual absl::StatusOr<MemoryKind> KindOf(const void* address) const = 0;
  // Page-locks host memory that is copied from and to often: such copies run at the speed of the
  // link. Until it is unlocked, which is before it goes.
  virtual absl::Status LockHostMemory(absl::Span<uint8_t> memory) = 0;
  virtual void UnlockHostMemory(absl::Span<uint8_t> memory) = 0;

  // In any direction. kUnavailable naming the device when it fails.
  virtual absl::Status Copy(absl::Span<const MemoryCopy> copies) = 0;
  // The same where both places of each are in the device's memory, all multiples of 16, and none
  // overlaps what another writes: together, 128 in a launch. They see what a NIC wrote.
  virtual absl::Status CopyWithin(absl::Span<const MemoryCopy> copies) = 0;
  // Checksums of the runs of each, in the order of its range. kUnavailable as above.
  virtual absl::StatusOr<std::vector<std::vector<uint32_t>>> Checksum(
      absl::Span<const DeviceRuns> blocks) = 0;
  // Compares them with `expected`, one for each of `blocks` and as many as its range has runs: one
  // status each. kDataLoss naming the first bad (layer, head) run; kUnavailable as above. What a
  // NIC wrote is visible to the check and to every kernel after it.
  virtual std::vector<absl::Status> Verify(
      absl::Span<const DeviceRuns> blocks,
      absl::Span<const absl::Span<const uint32_t>> expected) = 0;
};

// A GPU by the number that CUDA gives it. kFailedPrecondition in a build without CUDA; kNotFound
// naming the device when the machine has no such one, or no usable driver.
absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaDevice(int device);

}  // namespace okv

#endif  // OKV_CLIENT_DEVICE_MEMORY_H_
