#ifndef OKV_CACHE_NODE_BLOCK_POOL_H_
#define OKV_CACHE_NODE_BLOCK_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/device_memory.h"
#include "proto/mutex.h"

namespace okv {

class BlockPool;

// Extents start and end on pages of the machine: what a NIC registers and the kernel maps.
inline constexpr uint64_t kExtentAlignBytes = 4096;
inline constexpr uint64_t kArenaBytesMin = uint64_t{1} << 20;

// One object's memory in the arena: given back when the handle goes. Move-only. Thread-compatible.
class Extent {
 public:
  Extent() = default;
  Extent(Extent&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), offset_(other.offset_), bytes_(other.bytes_) {}
  Extent& operator=(Extent&& other) noexcept {
    if (this != &other) {
      Release();
      pool_ = std::exchange(other.pool_, nullptr);
      offset_ = other.offset_;
      bytes_ = other.bytes_;
    }
    return *this;
  }
  ~Extent() { Release(); }

  bool has_memory() const { return pool_ != nullptr; }
  // The bytes asked for; empty without memory. With a device these are the device's addresses.
  absl::Span<uint8_t> span() const;
  // Whose memory it is; null for DRAM.
  DeviceMemory* device() const;

 private:
  friend class BlockPool;
  Extent(BlockPool* pool, uint64_t offset, size_t bytes)
      : pool_(pool), offset_(offset), bytes_(bytes) {}
  void Release();

  BlockPool* pool_ = nullptr;
  uint64_t offset_ = 0;
  size_t bytes_ = 0;
};

struct BlockPoolOptions {
  uint64_t arena_bytes = 0;  // Rounded down to kExtentAlignBytes.
  // First touch of a fresh mapping runs at 0.25 to 0.6 GB/s: far below a transfer. Without prefault
  // the first puts pay for it.
  bool prefault = true;
  // Whose memory the arena is; null: the machine's own. Outlives the pool.
  DeviceMemory* device = nullptr;
  // Told now and then how far the prefault is; may be empty.
  std::function<void(uint64_t done_bytes, uint64_t all_bytes)> progress;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// An arena, of DRAM or of a GPU's memory: one mapping, cut into extents of any size. Payload sizes
// differ by format and codec, but a node sees few of them, so that best fit finds a hole of exactly
// the right size after the first round of spills; neighbours coalesce when both are free.
// Thread-safe; outlives its extents.
class BlockPool {
 public:
  // Maps the arena and prefaults it: blocks for about 2 to 4 s per GB of DRAM. kResourceExhausted
  // when the machine, or the device, has not that much memory.
  static absl::StatusOr<std::unique_ptr<BlockPool>> Create(const BlockPoolOptions& options);
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // kResourceExhausted when no hole is large enough: spill and try again. kInvalidArgument for 0
  // bytes and for more than the whole arena, where trying again is pointless. Never blocks; O(log
  // n).
  absl::StatusOr<Extent> Allocate(size_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  absl::Span<uint8_t> arena() const { return absl::MakeSpan(base_, arena_bytes_); }
  uint64_t capacity_bytes() const { return arena_bytes_; }
  DeviceMemory* device() const { return device_; }
  // In extents, rounded up to kExtentAlignBytes each.
  uint64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t extents_count() const ABSL_LOCKS_EXCLUDED(mu_);
  // 1 when everything free is in one piece.
  uint64_t holes_count() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class Extent;

  BlockPool(uint8_t* base, uint64_t arena_bytes, DeviceMemory* device);
  void Prefault(const BlockPoolOptions& options);
  void Free(uint64_t offset, size_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void InsertHole(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EraseHole(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  uint8_t* const base_;
  const uint64_t arena_bytes_;
  DeviceMemory* const device_;  // Null: DRAM.

  mutable Mutex mu_;
  // The holes twice: offset -> bytes for coalescing, (bytes, offset) for best fit.
  std::map<uint64_t, uint64_t> holes_ ABSL_GUARDED_BY(mu_);
  std::set<std::pair<uint64_t, uint64_t>> holes_by_size_ ABSL_GUARDED_BY(mu_);
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t extents_count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_BLOCK_POOL_H_
