#ifndef OKV_CMD_BENCH_ATTEND_CASE_KERNELS_H_
#define OKV_CMD_BENCH_ATTEND_CASE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attend.h"

// Random pages and a float64 reference of decode attention, on the GPU: slow and plain, sharing
// nothing with the kernels but the definition of the page layout.
namespace okv::cuda {

// Fills `runs_count` int2 runs: random codes, scales in [0.3, 0.8], offsets -1.5 scale + 0.15
// noise: elements of standard deviation about 0.65. With outliers, of 64 values' rows one is 4,096
// times as large, and of 64 rows of either kind one has scale 0 and one scale 1e-30.
struct FillInt2Params {
  uint8_t* runs;
  size_t runs_count;
  uint32_t head_dim;
  uint32_t groups;
  bool outliers;
  uint64_t seed;
};
cudaError_t FillInt2(const FillInt2Params& params, cudaStream_t stream);
// Normal values of standard deviation `sigma`.
cudaError_t FillNormal(__nv_bfloat16* values, size_t count, float sigma, uint64_t seed,
                       cudaStream_t stream);
// Makes the rows of `params`'s bf16 blocks behind each sequence's end NaN.
cudaError_t PoisonTails(const DecodeParams& params, cudaStream_t stream);

struct ReferenceParams {
  DecodeParams decode;
  double* scores;         // [batch, query_tokens, query_heads, scores_stride] scratch
  int64_t scores_stride;  // At least the longest sequence
  double* out;            // [batch, query_tokens, query_heads, head_dim]
  double* lse;            // [batch, query_tokens, query_heads]
};
cudaError_t ReferenceAttend(const ReferenceParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_ATTEND_CASE_KERNELS_H_
