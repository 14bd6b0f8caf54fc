// Prefill attention with mma.sync: see prefill_mma.cuh.

#include "kernels/cuda/prefill_launch.h"
#include "kernels/cuda/prefill_mma.cuh"

namespace okv::cuda {
namespace {

template <int kDim>
cudaError_t Launch(const PrefillLaunch& launch, cudaStream_t stream) {
  constexpr uint32_t kBytes = PrefillMmaTile<kDim>::kSharedBytes;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(PrefillMmaKernel<kDim>),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return error;
  PrefillMmaKernel<kDim>
      <<<PrefillItemsMax(launch), PrefillMmaTile<kDim>::kThreads, kBytes, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPrefillMma(const PrefillLaunch& launch, cudaStream_t stream) {
  switch (launch.params.plan.shape.head_dim) {
    case 64:
      return Launch<64>(launch, stream);
    case 128:
      return Launch<128>(launch, stream);
    default:
      return Launch<256>(launch, stream);
  }
}

}  // namespace okv::cuda
