#ifndef OKV_KERNELS_CUDA_ROTATE_H_
#define OKV_KERNELS_CUDA_ROTATE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/rows.h"

namespace okv::cuda {

struct RotateRowsParams {
  uint32_t layers_count;  // 1 to 512
  uint32_t kv_heads;      // 1 to 256
  uint32_t head_dim;      // 64, 128 or 256
  uint32_t tokens_count;
  // Null, or one number on the device: so many tokens, of tokens_count at most.
  const int32_t* tokens_count_device;

  ConstPagedRows k;
  ConstPagedRows v;
  TokenMap tokens;
  Rotations rotations;  // Not null
  bool to_model_basis;  // False: y = x R. True: y = x R^T

  // A token that either map leaves out is not written. May be the rows that are read.
  PagedRows k_out;
  PagedRows v_out;
  TokenMap tokens_out;
};

// y = bf16(x R) for rows of K and V, fp32 sums on tensor cores: what the BF16 windows hold. Within
// the last place of okv::RotateRows, and equal bit for bit to the y that QuantizePages makes.
// Queues one kernel on `stream` and returns without waiting. cudaErrorInvalidValue for an
// unsupported shape or a misaligned pointer or stride.
[[nodiscard]] cudaError_t RotateRows(const RotateRowsParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROTATE_H_
