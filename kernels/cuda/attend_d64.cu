#include "kernels/cuda/attend_launch.cuh"

namespace okv::cuda {

cudaError_t LaunchAttend64(const AttendKernelParams& params, cudaStream_t stream) {
  switch (64 / params.decode.shape.group_size) {
    case 1:
      return LaunchRows<64, 1>(params, stream);
    case 2:
      return LaunchRows<64, 2>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace okv::cuda
