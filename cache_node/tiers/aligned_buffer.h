#ifndef OKV_CACHE_NODE_TIERS_ALIGNED_BUFFER_H_
#define OKV_CACHE_NODE_TIERS_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace okv {

inline constexpr std::align_val_t kBufferAlign{4096};

struct AlignedDelete {
  void operator()(uint8_t* bytes) const { operator delete[](bytes, kBufferAlign); }
};
// Memory on a page boundary outside the arena: direct I/O reads into it without a copy.
using AlignedBuffer = std::unique_ptr<uint8_t[], AlignedDelete>;

inline AlignedBuffer AllocateAligned(size_t bytes) {
  return AlignedBuffer(static_cast<uint8_t*>(operator new[](bytes, kBufferAlign)));
}

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_ALIGNED_BUFFER_H_
