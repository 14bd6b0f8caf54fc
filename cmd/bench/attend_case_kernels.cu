// Float64 reference of decode attention and random pages. Written to be read; bytes and speed do
// not matter here.

#include <cuda_bf16.h>

#include "cmd/bench/attend_case_kernels.h"
#include "cmd/bench/reference_attention.cuh"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

constexpr int kThreads = kReferenceThreads;
constexpr int kTokens = 64;

__device__ uint64_t Hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
__device__ float Uniform(uint64_t hash) { return static_cast<float>(hash >> 40) * 0x1p-24f; }
__device__ float Normal(uint64_t hash) {
  const float radius = sqrtf(-2.0f * logf(1.0f - Uniform(hash)));
  return radius * cospif(2.0f * Uniform(Hash(hash)));
}

__device__ uint32_t RandomScaleAndOffset(uint64_t hash, bool outliers, bool is_value) {
  float scale = 0.3f + 0.5f * Uniform(hash);
  const int kind = outliers ? static_cast<int>(hash & 63) : 63;
  if (kind == 0 && is_value) scale *= 4096.0f;
  float offset = -1.5f * scale + 0.15f * Normal(Hash(hash));
  if (kind == 1) scale = 0.0f;
  if (kind == 2) scale = 1e-30f;
  return __bfloat16_as_ushort(__float2bfloat16(scale)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16(offset))) << 16;
}

__global__ void FillInt2Kernel(const FillInt2Params params) {
  const size_t words = int2::RunBytes(params.head_dim, params.groups) / 4;
  const size_t code_words = int2::ParamsOffset(params.head_dim) / 4;
  const size_t count = params.runs_count * words;
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count;
       i += gridDim.x * size_t{kThreads}) {
    const uint64_t hash = Hash(params.seed ^ Hash(i));
    const bool is_value = (i % words - code_words) % 4 >= 2;  // K, K, V, V
    reinterpret_cast<uint32_t*>(params.runs)[i] =
        i % words < code_words ? static_cast<uint32_t>(hash >> 32)
                               : RandomScaleAndOffset(hash, params.outliers, is_value);
  }
}

__global__ void FillNormalKernel(__nv_bfloat16* values, size_t count, float sigma, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{kThreads} + threadIdx.x; i < count;
       i += gridDim.x * size_t{kThreads}) {
    values[i] = __float2bfloat16(sigma * Normal(Hash(seed ^ Hash(i))));
  }
}

// The run of a block's head in the codec in which it is stored, K rows first.
__device__ __nv_bfloat16* Bf16Run(const DecodeParams& params, int request, int block, int kv_head) {
  const int sinks = params.shape.sink_blocks;
  const int slot =
      block < sinks ? block : sinks + (block - sinks) % static_cast<int>(params.shape.ring_blocks);
  const int64_t index = params.bf16_table[request * params.bf16_table_stride + slot];
  return reinterpret_cast<__nv_bfloat16*>(const_cast<uint8_t*>(params.bf16_pages) +
                                          index * params.bf16_block_stride) +
         static_cast<int64_t>(kv_head) * 2 * kTokens * params.shape.head_dim;
}

__global__ void PoisonTailsKernel(const DecodeParams params) {
  const int request = blockIdx.x;
  const int length = params.lengths[request];
  if (length % kTokens == 0) return;
  const int head_dim = params.shape.head_dim;
  const int first = length % kTokens * head_dim;
  for (uint32_t kv_head = 0; kv_head < params.shape.kv_heads; ++kv_head) {
    __nv_bfloat16* run = Bf16Run(params, request, length / kTokens, kv_head);
    for (int i = first + threadIdx.x; i < kTokens * head_dim; i += blockDim.x) {
      run[i] = __ushort_as_bfloat16(0x7fc0);
      run[kTokens * head_dim + i] = __ushort_as_bfloat16(0x7fc0);
    }
  }
}

struct Element {
  const DecodeParams& params;
  int request;
  int kv_head;
  int position;  // of the query

  __device__ bool Visible(int token) const {
    const int window = params.shape.sliding_window;
    return token <= position && (window == 0 || token > position - window);
  }
  // Element `channel` of K or V of `token`, as the query sees it.
  __device__ double Get(int token, int channel, bool is_value) const {
    const int block = token / kTokens;
    const int inside = token % kTokens;
    const int sinks = params.shape.sink_blocks;
    const uint32_t head_dim = params.shape.head_dim;
    if (block < sinks ||
        block >= position / kTokens - static_cast<int>(params.shape.recent_blocks)) {
      const __nv_bfloat16* run = Bf16Run(params, request, block, kv_head);
      return __bfloat162float(run[((is_value ? kTokens : 0) + inside) * head_dim + channel]);
    }
    const int64_t slot = params.int2_table[request * params.int2_table_stride + block - sinks];
    const uint32_t groups = head_dim / params.shape.group_size;
    const uint8_t* run = params.int2_pages + slot * params.int2_block_stride +
                         static_cast<int64_t>(kv_head) * int2::RunBytes(head_dim, groups);
    return PageValue(run, {head_dim, params.shape.group_size}, inside, channel, is_value);
  }
};

// One block a query row.
__global__ void ReferenceKernel(const ReferenceParams params) {
  __shared__ double row_values[256];
  __shared__ double reduce[kThreads];
  const DecodeParams& decode = params.decode;
  const int64_t row = blockIdx.x;
  const int heads = decode.shape.query_heads;
  const int head = row % heads;
  const int tokens = decode.shape.query_tokens;
  const int request = row / heads / tokens;
  const int kv_head = head / (heads / static_cast<int>(decode.shape.kv_heads));
  const int head_dim = decode.shape.head_dim;
  const int position = decode.lengths[request] - tokens + static_cast<int>(row / heads % tokens);
  const int64_t rotation =
      (decode.rotation_heads == 1 ? 0 : kv_head) * static_cast<int64_t>(head_dim) * head_dim;
  const Element element = {decode, request, kv_head, position};
  const int channel = threadIdx.x;
  const bool has_channel = channel < head_dim;
  if (has_channel) row_values[channel] = __bfloat162float(decode.q[row * head_dim + channel]);
  __syncthreads();
  const double rotated =
      has_channel ? Rotate(row_values, decode.r_k + rotation, head_dim, false) : 0.0;
  __syncthreads();
  if (has_channel) row_values[channel] = rotated;
  __syncthreads();
  double* scores = params.scores + row * params.scores_stride;
  const double2 softmax = Softmax(element, decode, head_dim, row_values, head, scores, reduce);

  double output = 0.0;
  if (has_channel && softmax.y > 0.0) {
    for (int token = 0; token <= position; ++token) {
      if (scores[token] > 0.0) output += scores[token] * element.Get(token, channel, true);
    }
    output /= softmax.y;
  }
  __syncthreads();
  if (has_channel) row_values[channel] = output;
  __syncthreads();
  if (has_channel) {
    params.out[row * head_dim + channel] =
        Rotate(row_values, decode.r_v + rotation, head_dim, true);
  }
  if (channel == 0) params.lse[row] = softmax.y > 0.0 ? softmax.x + log(softmax.y) : -INFINITY;
}

}  // namespace

cudaError_t FillInt2(const FillInt2Params& params, cudaStream_t stream) {
  FillInt2Kernel<<<4096, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t FillNormal(__nv_bfloat16* values, size_t count, float sigma, uint64_t seed,
                       cudaStream_t stream) {
  FillNormalKernel<<<4096, kThreads, 0, stream>>>(values, count, sigma, seed);
  return cudaGetLastError();
}

cudaError_t PoisonTails(const DecodeParams& params, cudaStream_t stream) {
  PoisonTailsKernel<<<params.shape.batch, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t ReferenceAttend(const ReferenceParams& params, cudaStream_t stream) {
  const DecodeShape& shape = params.decode.shape;
  const uint32_t rows = shape.batch * shape.query_tokens * shape.query_heads;
  ReferenceKernel<<<rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
