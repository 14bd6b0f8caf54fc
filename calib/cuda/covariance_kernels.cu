// Between the products: 12 B a widened number, 8 B a score, all bound by memory.

#include "calib/cuda/covariance_kernels.h"

namespace okv::cuda {
namespace {

constexpr uint32_t kThreads = 256;

__global__ __launch_bounds__(kThreads) void WidenKernel(const WidenParams params) {
  const size_t stride = size_t{gridDim.x} * kThreads;
  for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < params.count; i += stride) {
    params.wide[i] = params.narrow[i];
  }
}

// The largest, or the sum, over a block's threads; every thread gets it.
template <typename T, typename Op>
__device__ T OverBlock(T value, T* shared, const Op& op) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, offset));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  T all = shared[0];
  for (uint32_t warp = 1; warp < kThreads / 32; ++warp) all = op(all, shared[warp]);
  __syncthreads();  // `shared` may be written again.
  return all;
}

// One row of one head a block.
__global__ __launch_bounds__(kThreads) void CausalSoftmaxKernel(const CausalSoftmaxParams params) {
  __shared__ float shared_float[kThreads / 32];
  __shared__ double shared_double[kThreads / 32];
  const uint32_t row = blockIdx.x;
  const size_t tokens = params.tokens_count;
  float* const scores = params.scores + (size_t{blockIdx.y} * tokens + row) * tokens;
  const uint32_t visible = row + 1;
  float highest = -INFINITY;
  for (uint32_t i = threadIdx.x; i < visible; i += kThreads) highest = fmaxf(highest, scores[i]);
  highest = OverBlock(highest, shared_float, [](float a, float b) { return fmaxf(a, b); });
  double sum = 0;
  for (uint32_t i = threadIdx.x; i < visible; i += kThreads) {
    const float p = expf((scores[i] - highest) * params.scale);
    scores[i] = p;
    sum += p;
  }
  sum = OverBlock(sum, shared_double, [](double a, double b) { return a + b; });
  const float share = static_cast<float>(1.0 / sum);  // sum >= 1: the highest gives exp(0).
  for (uint32_t i = threadIdx.x; i < params.tokens_count; i += kThreads) {
    scores[i] = i < visible ? scores[i] * share : 0.0f;
  }
}

__global__ __launch_bounds__(kThreads) void AddSplitsKernel(const AddSplitsParams params) {
  const size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= params.count) return;
  double sum = 0;
  for (uint32_t split = 0; split < params.splits_count; ++split) {
    sum += params.parts[split * params.count + i];
  }
  params.out[i] = sum;
}

uint32_t Blocks(size_t count) { return static_cast<uint32_t>((count + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t Widen(const WidenParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const uint32_t blocks = Blocks(params.count);
  const uint32_t blocks_max = 4096;  // Of which each then takes several numbers a thread.
  const dim3 grid(blocks > blocks_max ? blocks_max : blocks);
  WidenKernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t CausalSoftmax(const CausalSoftmaxParams& params, cudaStream_t stream) {
  if (params.tokens_count == 0 || params.heads_count == 0) return cudaSuccess;
  CausalSoftmaxKernel<<<dim3(params.tokens_count, params.heads_count), kThreads, 0, stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t AddSplits(const AddSplitsParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  AddSplitsKernel<<<Blocks(params.count), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
