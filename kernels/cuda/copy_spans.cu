#include "kernels/cuda/copy_spans.h"

namespace okv::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWordsPerThread = 4;  // Of 16 bytes, in flight together
constexpr uint64_t kChunkBytes = uint64_t{16} * kThreads * kWordsPerThread;

struct CopyParams {
  CopySpan spans[kCopySpansMax];
  uint32_t first_chunk[kCopySpansMax];  // Of each span: a thread block copies a chunk
  uint32_t count;
};

__device__ __forceinline__ uint4 LoadOnce(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__global__ void __launch_bounds__(kThreads)
    CopySpansKernel(const __grid_constant__ CopyParams params) {
  uint32_t low = 0;
  uint32_t high = params.count;  // The span is in [low, high).
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (params.first_chunk[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const CopySpan& span = params.spans[low];
  const uint64_t first = (blockIdx.x - params.first_chunk[low]) * kChunkBytes;
  const auto* from = reinterpret_cast<const uint4*>(span.from + first);
  auto* to = reinterpret_cast<uint4*>(span.to + first);
  const uint64_t words = (span.bytes - first) / 16;
  uint4 values[kWordsPerThread];
#pragma unroll
  for (uint32_t i = 0; i < kWordsPerThread; ++i) {
    const uint32_t word = i * kThreads + threadIdx.x;
    if (word < words) values[i] = LoadOnce(from + word);
  }
#pragma unroll
  for (uint32_t i = 0; i < kWordsPerThread; ++i) {
    const uint32_t word = i * kThreads + threadIdx.x;
    if (word < words) __stcs(to + word, values[i]);
  }
}

bool IsMultipleOf16(const CopySpan& span) {
  return (reinterpret_cast<uintptr_t>(span.to) | reinterpret_cast<uintptr_t>(span.from) |
          span.bytes) %
             16 ==
         0;
}

}  // namespace

cudaError_t CopySpans(const CopySpan* spans, uint32_t count, cudaStream_t stream) {
  if (count > kCopySpansMax) return cudaErrorInvalidValue;
  CopyParams params = {};
  uint64_t chunks = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (!IsMultipleOf16(spans[i])) return cudaErrorInvalidValue;
    if (spans[i].bytes == 0) continue;
    params.spans[params.count] = spans[i];
    params.first_chunk[params.count] = static_cast<uint32_t>(chunks);
    ++params.count;
    chunks += (spans[i].bytes - 1) / kChunkBytes + 1;
    if (chunks >= uint64_t{1} << 31) return cudaErrorInvalidValue;
  }
  if (chunks == 0) return cudaSuccess;
  CopySpansKernel<<<static_cast<uint32_t>(chunks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
