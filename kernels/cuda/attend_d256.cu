#include "kernels/cuda/attend_launch.cuh"

namespace okv::cuda {

cudaError_t LaunchAttend256(const AttendKernelParams& params, cudaStream_t stream) {
  switch (256 / params.decode.shape.group_size) {
    case 1:
      return LaunchRows<256, 1>(params, stream);
    case 2:
      return LaunchRows<256, 2>(params, stream);
    case 4:
      return LaunchRows<256, 4>(params, stream);
    case 8:
      return LaunchRows<256, 8>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace okv::cuda
