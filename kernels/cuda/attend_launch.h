#ifndef OKV_KERNELS_CUDA_ATTEND_LAUNCH_H_
#define OKV_KERNELS_CUDA_ATTEND_LAUNCH_H_

#include "kernels/cuda/attend_plan.cuh"

namespace okv::cuda {

struct AttendKernelParams {
  DecodeParams decode;
  DecodeGeometry geometry;
  DecodeWorkspace workspace;
  float scale_log2;  // softmax_scale log2 e
  float cap_log2;    // logit_softcap log2 e; 0: off
  uint32_t query_group;
};

// One file a head_dim, so that they compile in parallel.
// REQUIRES: params.geometry.wide
cudaError_t LaunchAttendWide(const AttendKernelParams& params, cudaStream_t stream);
cudaError_t LaunchAttend64(const AttendKernelParams& params, cudaStream_t stream);
cudaError_t LaunchAttend128(const AttendKernelParams& params, cudaStream_t stream);
cudaError_t LaunchAttend256(const AttendKernelParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_LAUNCH_H_
