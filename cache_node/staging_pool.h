#ifndef OKV_CACHE_NODE_STAGING_POOL_H_
#define OKV_CACHE_NODE_STAGING_POOL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "proto/mutex.h"

namespace okv {

// Fewer bytes than this in pieces are copied by the transport's thread: about 10 us, less than
// handing them to another thread and back.
inline constexpr size_t kCopyHereBytesMax = size_t{64} << 10;

// Memory for what a tensor-parallel rank reads or writes: its heads lie in a block one piece a
// layer, and travel in one.
//
// A list of pieces could be handed to UCX instead, and was measured (ucx_perftest ucp_am_bw, UCX
// 1.13, loopback tcp, 36 pieces of 18 KiB, 2 cores of a loaded Xeon): 0.5 to 0.6 GB/s with a list
// at the sender and at both ends, 3.2 to 4.7 GB/s from one piece of the same size. Its rendezvous
// copies lists through 8 KiB fragments; one copy here runs at the speed of memory. A buffer is used
// again and again, so that its pages are touched and, with RDMA, registered once. Thread-safe;
// outlives its buffers.
class StagingPool {
 public:
  // Given back when it goes. Move-only.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)),
          memory_(std::move(other.memory_)),
          capacity_(other.capacity_),
          bytes_(other.bytes_) {}
    Buffer& operator=(Buffer&& other) noexcept {
      if (this != &other) {
        Release();
        pool_ = std::exchange(other.pool_, nullptr);
        memory_ = std::move(other.memory_);
        capacity_ = other.capacity_;
        bytes_ = other.bytes_;
      }
      return *this;
    }
    ~Buffer() { Release(); }

    bool has_memory() const { return pool_ != nullptr; }
    // The bytes asked for; their contents are whatever was there.
    absl::Span<uint8_t> span() const { return absl::MakeSpan(memory_.get(), bytes_); }

   private:
    friend class StagingPool;
    void Release() {
      if (pool_ != nullptr) std::exchange(pool_, nullptr)->Give(std::move(memory_), capacity_);
    }

    StagingPool* pool_ = nullptr;
    std::unique_ptr<uint8_t[]> memory_;
    size_t capacity_ = 0;
    size_t bytes_ = 0;
  };

  // Keeps unused buffers of at most `kept_bytes_max` together.
  explicit StagingPool(uint64_t kept_bytes_max) : kept_bytes_max_(kept_bytes_max) {}

  // Never fails: the callers bound how many they hold, by the transfers that they allow.
  Buffer Take(size_t bytes) ABSL_LOCKS_EXCLUDED(mu_) {
    Buffer buffer;
    buffer.pool_ = this;
    buffer.bytes_ = bytes;
    {
      MutexLock lock(&mu_);
      const auto found = kept_.lower_bound(bytes);
      // A node sees few sizes: one far too large is somebody else's.
      if (found != kept_.end() && found->first / 2 <= bytes) {
        buffer.capacity_ = found->first;
        buffer.memory_ = std::move(found->second);
        kept_bytes_ -= found->first;
        kept_.erase(found);
        return buffer;
      }
    }
    buffer.capacity_ = bytes;
    buffer.memory_ = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    return buffer;
  }

 private:
  void Give(std::unique_ptr<uint8_t[]> memory, size_t capacity) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (kept_bytes_ + capacity > kept_bytes_max_) return;
    kept_bytes_ += capacity;
    kept_.emplace(capacity, std::move(memory));
  }

  const uint64_t kept_bytes_max_;

  Mutex mu_;
  std::multimap<size_t, std::unique_ptr<uint8_t[]>> kept_ ABSL_GUARDED_BY(mu_);  // By capacity.
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_STAGING_POOL_H_
