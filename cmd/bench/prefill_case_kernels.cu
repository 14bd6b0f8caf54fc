// Float64 reference of prefill attention. Written to be read; speed does not matter here.

#include <cuda_bf16.h>

#include "cmd/bench/prefill_case_kernels.h"
#include "cmd/bench/reference_attention.cuh"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

constexpr int kThreads = kReferenceThreads;
constexpr int kTokens = 64;

__device__ double RoundToBf16(double x) {
  return __bfloat162float(__float2bfloat16(static_cast<float>(x)));
}

// Keys and values of one KV head as a query at `position` sees them.
struct Element {
  const PrefillParams& params;
  bool exact;
  int request;
  int kv_head;
  int position;

  __device__ bool Visible(int token) const {
    const int window = static_cast<int>(params.plan.shape.sliding_window);
    return token <= position && (window == 0 || token > position - window);
  }
  __device__ double Get(int token, int channel, bool is_value) const {
    const PrefillShape& shape = params.plan.shape;
    const int sinks = static_cast<int>(shape.sink_blocks);
    const int block = token / kTokens;
    if (block < sinks || block >= position / kTokens - static_cast<int>(shape.recent_blocks)) {
      return Bf16(block, token % kTokens, channel, is_value);
    }
    return Int2(block - sinks, token % kTokens, channel, is_value);
  }

  __device__ double Bf16(int block, int inside, int channel, bool is_value) const {
    const PrefillShape& shape = params.plan.shape;
    const int sinks = static_cast<int>(shape.sink_blocks);
    int entry = block;
    if (block >= sinks) {
      entry = sinks + block -
              (params.bf16_first_blocks == nullptr ? sinks : params.bf16_first_blocks[request]);
    }
    const int64_t slot = params.bf16_table[request * params.bf16_table_stride + entry];
    const auto* run = reinterpret_cast<const __nv_bfloat16*>(params.bf16_pages +
                                                             slot * params.bf16_block_stride) +
                      static_cast<int64_t>(kv_head) * 2 * kTokens * shape.head_dim;
    return __bfloat162float(run[((is_value ? kTokens : 0) + inside) * shape.head_dim + channel]);
  }
  __device__ double Int2(int entry, int inside, int channel, bool is_value) const {
    const uint32_t dim = params.plan.shape.head_dim;
    const uint32_t group_size = params.plan.shape.group_size;
    const int64_t slot = params.plan.int2_table[request * params.plan.int2_table_stride + entry];
    const uint8_t* run = params.int2_pages + slot * params.int2_block_stride +
                         static_cast<int64_t>(kv_head) * int2::RunBytes(dim, dim / group_size);
    const double value = PageValue(run, {dim, group_size}, inside, channel, is_value);
    return exact ? value : RoundToBf16(value);
  }
};

// One thread block a row.
__global__ void ReferenceKernel(const PrefillReferenceParams params) {
  __shared__ double row_values[256];
  __shared__ double reduce[kThreads];
  const PrefillParams& prefill = params.prefill;
  const PrefillShape& shape = prefill.plan.shape;
  const int dim = static_cast<int>(shape.head_dim);
  const int token = params.rows[blockIdx.x] / static_cast<int>(shape.query_heads);
  const int head = params.rows[blockIdx.x] % static_cast<int>(shape.query_heads);
  int request = 0;
  while (prefill.plan.query_starts[request + 1] <= token) ++request;
  const int position =
      prefill.plan.lengths[request] - prefill.plan.query_starts[request + 1] + token;
  const int kv_head = head / static_cast<int>(shape.query_heads / shape.kv_heads);
  const Element element = {prefill, params.exact, request, kv_head, position};
  const int64_t rotation =
      (prefill.rotation_heads == 1 ? 0 : kv_head) * static_cast<int64_t>(dim) * dim;
  const int channel = threadIdx.x;
  const bool has_channel = channel < dim;
  if (has_channel) {
    const int64_t row = int64_t{token} * shape.query_heads + head;
    row_values[channel] = __bfloat162float(prefill.q[row * dim + channel]);
  }
  __syncthreads();
  const double rotated = has_channel ? Rotate(row_values, prefill.r_k + rotation, dim, false) : 0.0;
  __syncthreads();
  if (has_channel) row_values[channel] = params.exact ? rotated : RoundToBf16(rotated);
  __syncthreads();
  double* scores = params.scores + blockIdx.x * params.scores_stride;
  const double2 softmax = Softmax(element, prefill, dim, row_values, head, scores, reduce);

  double output = 0.0;
  if (has_channel) {
    for (int t = 0; t <= position; ++t) {
      if (scores[t] > 0.0) output += scores[t] * element.Get(t, channel, true);
    }
    output /= softmax.y;
  }
  __syncthreads();
  if (has_channel) row_values[channel] = output;
  __syncthreads();
  if (has_channel) {
    params.out[int64_t{blockIdx.x} * dim + channel] =
        Rotate(row_values, prefill.r_v + rotation, dim, true);
  }
  if (channel == 0) params.lse[blockIdx.x] = softmax.x + log(softmax.y);
}

}  // namespace

cudaError_t ReferencePrefill(const PrefillReferenceParams& params, cudaStream_t stream) {
  if (params.rows_count == 0) return cudaSuccess;
  ReferenceKernel<<<params.rows_count, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
