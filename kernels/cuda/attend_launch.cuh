#ifndef OKV_KERNELS_CUDA_ATTEND_LAUNCH_CUH_
#define OKV_KERNELS_CUDA_ATTEND_LAUNCH_CUH_

#include "kernels/cuda/attend_kernel.cuh"
#include "kernels/cuda/early_launch.h"

namespace okv::cuda {

template <class T, class Kernel>
cudaError_t LaunchKernel(Kernel kernel, const AttendKernelParams& params, cudaStream_t stream) {
  const int units = RingUnitsOf<T>(
      params.geometry.shared_bytes >= kSharedBytesSm90 ? kSharedBytesSm90 : kSharedBytesSm80);
  const size_t shared_bytes =
      sizeof(Shared<T>) + size_t{T::kWarps} * T::kPages * units * T::kSlotBytes + T::kExtraBytes;
  const cudaError_t set = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(shared_bytes));
  if (set != cudaSuccess) return set;
  return LaunchEarly(kernel,
                     {.gridDim = dim3(params.geometry.blocks_count),
                      .blockDim = dim3(T::kThreads),
                      .dynamicSmemBytes = shared_bytes,
                      .stream = stream},
                     /*early=*/true, params);
}

template <class T>
cudaError_t LaunchTile(const AttendKernelParams& params, cudaStream_t stream) {
  return LaunchKernel<T>(AttendKernel<T>, params, stream);
}

template <int kDim, int kGroups, int kLaneRows>
cudaError_t LaunchOptions(const AttendKernelParams& params, cudaStream_t stream) {
  const DecodeShape& shape = params.decode.shape;
  if (shape.query_tokens == 1 && shape.sliding_window == 0 && params.cap_log2 == 0.0f) {
    return LaunchTile<Tile<kDim, kGroups, kLaneRows, true>>(params, stream);
  }
  return LaunchTile<Tile<kDim, kGroups, kLaneRows, false>>(params, stream);
}

template <int kDim, int kGroups>
cudaError_t LaunchRows(const AttendKernelParams& params, cudaStream_t stream) {
  switch (params.geometry.group_rows) {
    case 4:
      return LaunchOptions<kDim, kGroups, 1>(params, stream);
    case 8:
      return LaunchOptions<kDim, kGroups, 2>(params, stream);
    default:
      if constexpr (kDim < 256) {
        return LaunchOptions<kDim, kGroups, 4>(params, stream);
      } else {
        return cudaErrorInvalidValue;
      }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_LAUNCH_CUH_
