// Decode attention: checks and dispatch. The kernel: attend_kernel.cuh.
//
// Bytes: every page and row that a query sees is read once (with more than 16 query rows a KV head,
// once per 16); operations a 64-token page of d 128 and 4 rows: 32 matrix instructions of 4,096
// integer products, 96 AND, about 260 others. Bound by memory: 99 % of it on an H200 (README.md).

#include "kernels/cuda/attend_launch.h"

namespace okv::cuda {
namespace {

bool Aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool ValidParams(const DecodeParams& params) {
  const DecodeShape& shape = params.shape;
  if (params.rotation_heads != 1 && params.rotation_heads != shape.kv_heads) return false;
  if (params.int2_block_stride % 16 != 0 || params.bf16_block_stride % 16 != 0) return false;
  return Aligned16(params.q) && Aligned16(params.r_k) && Aligned16(params.r_v) &&
         Aligned16(params.int2_pages) && Aligned16(params.bf16_pages) &&
         Aligned16(params.workspace) && params.workspace != nullptr;
}

}  // namespace

cudaError_t Attend(const DecodeParams& params, cudaStream_t stream) {
  constexpr double kLog2E = 1.4426950408889634;
  AttendKernelParams kernel = {};
  kernel.decode = params;
  if (!MakeDecodeGeometry(params.shape, &kernel.geometry) || !ValidParams(params)) {
    return cudaErrorInvalidValue;
  }
  kernel.workspace = LayOutWorkspace(params.shape, kernel.geometry, params.workspace);
  kernel.scale_log2 = static_cast<float>(params.softmax_scale * kLog2E);
  kernel.cap_log2 = static_cast<float>(params.logit_softcap * kLog2E);
  kernel.query_group = params.shape.query_heads / params.shape.kv_heads;
  if (kernel.geometry.wide) return LaunchAttendWide(kernel, stream);
  switch (params.shape.head_dim) {
    case 64:
      return LaunchAttend64(kernel, stream);
    case 128:
      return LaunchAttend128(kernel, stream);
    default:
      return LaunchAttend256(kernel, stream);
  }
}

}  // namespace okv::cuda
