#include "cmd/bench/load_only.h"
#include "kernels/cuda/early_launch.h"
#include "kernels/cuda/ptx.cuh"

namespace okv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kSlots = 6;  // 8 warps x 6 slots x 4,608 B = 216 KiB in flight, as in attend's ring
constexpr int kSharedBytes = kWarps * kSlots * static_cast<int>(kLoadBytesMax);

// A thread block has one span of the items, its warps take turns in it.
__global__ void __launch_bounds__(32 * kWarps, 1) LoadOnlyKernel(const LoadOnlyParams params) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t slots[];
  __shared__ uint64_t arrived[kWarps][kSlots];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (lane < kSlots) BarrierInit(SharedAddress(&arrived[warp][lane]), 1);
  BarrierInitFence();
  __syncwarp();
  LetNextKernelStart();
  const uint64_t count = params.items_count;
  const auto begin = static_cast<uint32_t>(count * blockIdx.x / gridDim.x);
  const auto end = static_cast<uint32_t>(count * (blockIdx.x + 1) / gridDim.x);
  const int total = static_cast<int>((end - begin + kWarps - 1 - warp) / kWarps);

  LoadItem item = {};
  for (int i = 0; i < total + kSlots; ++i) {
    const int slot = i % kSlots;
    const uint32_t barrier = SharedAddress(&arrived[warp][slot]);
    if (i >= kSlots) BarrierWait(barrier, (i / kSlots - 1) & 1);
    if (i >= total) continue;
    if (i % 32 == 0 && i + lane < total) item = params.items[begin + warp + (i + lane) * kWarps];
    if (lane == i % 32) {
      BarrierExpect(barrier, item.bytes);
      BulkCopy(SharedAddress(slots + (warp * kSlots + slot) * kLoadBytesMax),
               params.bases[item.base] + uint64_t{item.offset_16} * 16, item.bytes, barrier);
    }
    __syncwarp();
  }
#endif
}

}  // namespace

cudaError_t LoadOnly(const LoadOnlyParams& params, cudaStream_t stream) {
  int device = 0;
  int major = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  if (major < 9) return cudaErrorNotSupported;
  error = cudaFuncSetAttribute(LoadOnlyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kSharedBytes);
  if (error != cudaSuccess) return error;
  return LaunchEarly(LoadOnlyKernel,
                     {.gridDim = dim3(processors),
                      .blockDim = dim3(32 * kWarps),
                      .dynamicSmemBytes = kSharedBytes,
                      .stream = stream},
                     params.early, params);
}

}  // namespace okv::cuda
