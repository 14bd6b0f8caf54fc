#ifndef OKV_TESTS_KERNELS_CUDA_GPU_H_
#define OKV_TESTS_KERNELS_CUDA_GPU_H_

#include <cuda_runtime_api.h>

#include <string>

namespace okv::cuda {

// Why GPU tests cannot run here; empty where they can.
inline std::string NoGpuReason() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("no usable GPU: ") + cudaGetErrorString(error);
  }
  return count == 0 ? "no GPU" : "";
}

}  // namespace okv::cuda

// At the beginning of a test.
#define OKV_SKIP_WITHOUT_GPU() \
  if (const std::string reason = okv::cuda::NoGpuReason(); !reason.empty()) GTEST_SKIP() << reason

#endif  // OKV_TESTS_KERNELS_CUDA_GPU_H_
