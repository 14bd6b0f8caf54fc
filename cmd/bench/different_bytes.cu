// Compares blocks in two pools. Reads every byte once; its time is of no interest.

#include "cmd/bench/different_bytes.h"

namespace okv::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int DifferentBytes(uint32_t a, uint32_t b) { return __popc(__vcmpne4(a, b)) / 8; }

// One thread block a block.
__global__ void DifferentBytesKernel(const DifferentBytesParams params) {
  const uint32_t block = blockIdx.x;
  const auto* const here =
      reinterpret_cast<const uint4*>(params.blocks + block * params.block_bytes);
  const auto* const there =
      reinterpret_cast<const uint4*>(params.pool + params.slots[block] * params.block_bytes);
  unsigned long long count = 0;
  for (uint64_t i = threadIdx.x; i < params.block_bytes / sizeof(uint4); i += kThreads) {
    const uint4 a = here[i];
    const uint4 b = there[i];
    count += DifferentBytes(a.x, b.x) + DifferentBytes(a.y, b.y) + DifferentBytes(a.z, b.z) +
             DifferentBytes(a.w, b.w);
  }
  if (count != 0) atomicAdd(params.count, count);
}

}  // namespace

cudaError_t CountDifferentBytes(const DifferentBytesParams& params, cudaStream_t stream) {
  const cudaError_t filled = cudaMemsetAsync(params.count, 0, sizeof(*params.count), stream);
  if (filled != cudaSuccess) return filled;
  DifferentBytesKernel<<<params.blocks_count, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
