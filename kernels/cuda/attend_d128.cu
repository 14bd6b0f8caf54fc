#include "kernels/cuda/attend_launch.cuh"

namespace okv::cuda {

cudaError_t LaunchAttend128(const AttendKernelParams& params, cudaStream_t stream) {
  switch (128 / params.decode.shape.group_size) {
    case 1:
      return LaunchRows<128, 1>(params, stream);
    case 2:
      return LaunchRows<128, 2>(params, stream);
    case 4:
      return LaunchRows<128, 4>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace okv::cuda
