#ifndef OKV_KERNELS_CUDA_EARLY_LAUNCH_H_
#define OKV_KERNELS_CUDA_EARLY_LAUNCH_H_

#include <cuda_runtime_api.h>

namespace okv::cuda {

// Launches a kernel that may, when `early`, start before the one in front of it on the stream has
// ended (programmatic dependent launch, sm_90 or later): it calls WaitForKernelBefore() before it
// reads what that one writes, or writes what that one reads.
template <class... Params>
cudaError_t LaunchEarly(void (*kernel)(Params...), cudaLaunchConfig_t config, bool early,
                        const Params&... params) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_EARLY_LAUNCH_H_
