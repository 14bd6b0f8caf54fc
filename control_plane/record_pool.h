#ifndef OKV_CONTROL_PLANE_RECORD_POOL_H_
#define OKV_CONTROL_PLANE_RECORD_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "proto/check.h"

namespace okv {

// Millions of small records under 32-bit names. A record never moves, so growing costs one more
// chunk and never a copy of what is there; a name is half a pointer. Thread-compatible.
template <typename Record>
class RecordPool {
 public:
  static constexpr uint32_t kNone = 0xffffffff;

  // A fresh record. The name of a released one may come again.
  uint32_t Allocate() {
    if (free_.empty()) {
      OKV_CHECK(chunks_.size() < kNone / kChunkRecords);
      const uint32_t first = static_cast<uint32_t>(chunks_.size()) * kChunkRecords;
      chunks_.push_back(std::make_unique<Chunk>());
      for (uint32_t i = kChunkRecords; i > 0; --i) free_.push_back(first + i - 1);
    }
    const uint32_t name = free_.back();
    free_.pop_back();
    (*this)[name] = Record();
    return name;
  }
  void Release(uint32_t name) { free_.push_back(name); }

  // REQUIRES: allocated.
  Record& operator[](uint32_t name) {
    return (*chunks_[name / kChunkRecords])[name % kChunkRecords];
  }
  const Record& operator[](uint32_t name) const {
    return (*chunks_[name / kChunkRecords])[name % kChunkRecords];
  }

  // What the pool holds of the process's memory.
  size_t memory_bytes() const {
    return chunks_.size() * (sizeof(Chunk) + sizeof(chunks_[0])) +
           free_.capacity() * sizeof(free_[0]);
  }

 private:
  static constexpr uint32_t kChunkRecords = 4096;
  using Chunk = std::array<Record, kChunkRecords>;

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<uint32_t> free_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_RECORD_POOL_H_
