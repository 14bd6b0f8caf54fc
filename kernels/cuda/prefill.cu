// Prefill attention: history to BF16 in the workspace, then attention over BF16 pages.
//
// Per token of history and layer (d 128, g 128, 8 KV heads) 576 B are read and 4,096 written, once;
// then every tile reads the pages that it sees, from the L2 mostly. 4 d operations for every head
// and pair of query and key; bound by the matrix units. On an H200 (32/8 heads, d 128) a chunk of
// 8,192 takes 0.96 ms, 571 TFLOP/s, where cuDNN's attention to plain BF16 reaches 627.
//
// Its scalar twin is okv::reference::Attend (kernels/attend.h), called for the queries of one block
// with the pages that they see.

#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/prefill_launch.h"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool IsPrefill(const PrefillParams& params) {
  const PrefillShape& shape = params.plan.shape;
  if (!IsPrefillShape(shape) || params.plan.workspace == nullptr ||
      !IsAligned(params.plan.workspace)) {
    return false;
  }
  const auto is_buffer = [](const void* pointer) {
    return pointer != nullptr && IsAligned(pointer);
  };
  if (!is_buffer(params.q) || !is_buffer(params.out) || !is_buffer(params.r_k) ||
      !is_buffer(params.r_v) || !is_buffer(params.bf16_pages) || params.bf16_table == nullptr ||
      params.bf16_block_stride % 16 != 0) {
    return false;
  }
  if (shape.history_blocks_max > 0 &&
      (!is_buffer(params.int2_pages) || params.int2_block_stride % 16 != 0)) {
    return false;
  }
  if (params.rotation_heads != 1 && params.rotation_heads != shape.kv_heads) return false;
  return params.softmax_scale > 0.0f && params.logit_softcap >= 0.0f;
}

// The history's INT2 pages as bf16 blocks in the workspace.
cudaError_t DequantizeHistory(const PrefillParams& params, const PrefillPlan& plan,
                              cudaStream_t stream) {
  const PrefillShape& shape = params.plan.shape;
  const int64_t dim = shape.head_dim;
  PagedRows rows = {.base = reinterpret_cast<__nv_bfloat16*>(plan.history),
                    .layer_stride = 0,
                    .page_stride = plan.history_block_stride / 2,
                    .token_stride = dim,
                    .head_stride = 2 * kPrefillBlockTokens * dim,
                    .page_tokens = kPrefillBlockTokens};
  PagedRows values = rows;
  values.base += kPrefillBlockTokens * dim;
  return DequantizePages(
      {.layers_count = 1,
       .kv_heads = shape.kv_heads,
       .head_dim = shape.head_dim,
       .group_size = shape.group_size,
       .blocks_count = shape.history_blocks_max,
       .pages = {.base = params.int2_pages,
                 .block_stride = params.int2_block_stride,
                 .layer_stride = 0,
                 .head_stride = int2::RunBytes(shape.head_dim, shape.head_dim / shape.group_size),
                 .table = plan.history_slots},
       .rotations = {},
       .k = rows,
       .v = values,
       .tokens = {}},
      stream);
}

}  // namespace

uint32_t PrefillItemsMax(const PrefillLaunch& launch) {
  const PrefillShape& shape = launch.params.plan.shape;
  return launch.plan.granules_max * PrefillItemsOfHeads(shape);
}

cudaError_t Prefill(const PrefillParams& params, cudaStream_t stream) {
  if (!IsPrefill(params)) return cudaErrorInvalidValue;
  const PrefillShape& shape = params.plan.shape;
  const PrefillLaunch launch = {.params = params,
                                .plan = PrefillPlanAt(shape, params.plan.workspace)};
  const uint64_t items = uint64_t{launch.plan.granules_max} * PrefillItemsOfHeads(shape);
  if (items > 0x7fffffffu) return cudaErrorInvalidValue;
  if (shape.history_blocks_max > 0) {
    const cudaError_t error = DequantizeHistory(params, launch.plan, stream);
    if (error != cudaSuccess) return error;
  }
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  if (major == 9) {
    error = LaunchPrefillWgmma(launch, stream);
    if (error != cudaErrorNotSupported) return error;
  }
  return LaunchPrefillMma(launch, stream);
}

}  // namespace okv::cuda
