#ifndef OKV_KERNELS_CUDA_PREFILL_LAUNCH_H_
#define OKV_KERNELS_CUDA_PREFILL_LAUNCH_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/prefill_plan.cuh"

// Between the files that hold the attention kernels and prefill.cu.
namespace okv::cuda {

// Thread blocks of a launch, one an item.
uint32_t PrefillItemsMax(const PrefillLaunch& launch);

// For every architecture.
cudaError_t LaunchPrefillMma(const PrefillLaunch& launch, cudaStream_t stream);
// For sm_90 alone. cudaErrorNotSupported, with nothing queued, for strides that tensor copies
// cannot have: LaunchPrefillMma() takes them.
cudaError_t LaunchPrefillWgmma(const PrefillLaunch& launch, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_LAUNCH_H_
