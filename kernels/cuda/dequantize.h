#ifndef OKV_KERNELS_CUDA_DEQUANTIZE_H_
#define OKV_KERNELS_CUDA_DEQUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/rows.h"

namespace okv::cuda {

struct DequantizePagesParams {
  uint32_t layers_count;  // 1 to 512
  uint32_t kv_heads;      // 1 to 256
  uint32_t head_dim;      // 64, 128 or 256
  uint32_t group_size;    // 32, 64, ... head_dim
  uint32_t blocks_count;  // Token t of block b is token 64 b + t

  ConstPages pages;
  // Rows come out in the rotated basis without rotations; with them, times R^T: as the model had
  // them, K after RoPE.
  Rotations rotations;

  PagedRows k;  // out
  PagedRows v;
  TokenMap tokens;

  // As QuantizePagesParams::early_inputs: pages, maps, table and rotations. A layer of 8,192 tokens
  // takes about 1 us less; at d 256 in the model's basis 1 us more.
  bool early_inputs = false;
};

// int2 pages to bf16 rows of an engine's own cache: x = offset + scale * code in fp32 (one
// multiply, one add), rounded to bf16: the bits of okv::DequantizeRun. With rotations these x,
// rounded, are multiplied by R^T with fp32 sums. Tokens left out by the map or by a negative block
// slot are not written. Queues one kernel on `stream`, none where blocks_count is 0, and returns
// without waiting.
// cudaErrorInvalidValue for an unsupported shape or a misaligned pointer or stride.
[[nodiscard]] cudaError_t DequantizePages(const DequantizePagesParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_DEQUANTIZE_H_
