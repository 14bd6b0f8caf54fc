#ifndef OKV_CALIB_CUDA_COVARIANCE_KERNELS_H_
#define OKV_CALIB_CUDA_COVARIANCE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace okv::cuda {

// What lies between the matrix products of GpuCovariance. Each queues its kernel on `stream` and
// returns without waiting.

// wide[i] = narrow[i] for i below count.
struct WidenParams {
  const float* narrow;
  double* wide;
  size_t count;
};
[[nodiscard]] cudaError_t Widen(const WidenParams& params, cudaStream_t stream);

// Causal softmax in place, as TiledAttention has it: scores of a row behind its own column become
// 0, the others exp(scale * (s - highest)) over their sum. Sums in fp64. Moves 8 B a score.
struct CausalSoftmaxParams {
  float* scores;         // [heads_count, tokens_count, tokens_count]
  uint32_t heads_count;  // Up to 65,535.
  uint32_t tokens_count;
  float scale;
};
[[nodiscard]] cudaError_t CausalSoftmax(const CausalSoftmaxParams& params, cudaStream_t stream);

// out[i] = sum over splits of parts[split * count + i], in their order.
struct AddSplitsParams {
  const double* parts;  // [splits_count, count]
  double* out;          // [count]
  uint32_t splits_count;
  size_t count;
};
[[nodiscard]] cudaError_t AddSplits(const AddSplitsParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_CALIB_CUDA_COVARIANCE_KERNELS_H_
