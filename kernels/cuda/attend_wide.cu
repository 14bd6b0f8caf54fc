#include "kernels/cuda/attend_launch.cuh"
#include "kernels/cuda/attend_wide.cuh"

namespace okv::cuda {

cudaError_t LaunchAttendWide(const AttendKernelParams& params, cudaStream_t stream) {
  const DecodeShape& shape = params.decode.shape;
  if (shape.query_tokens == 1 && shape.sliding_window == 0 && params.cap_log2 == 0.0f) {
    return LaunchKernel<WideTile<true>>(AttendWideKernel<WideTile<true>>, params, stream);
  }
  return LaunchKernel<WideTile<false>>(AttendWideKernel<WideTile<false>>, params, stream);
}

}  // namespace okv::cuda
