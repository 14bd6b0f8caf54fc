#ifndef OKV_CMD_BENCH_PREFILL_CASE_KERNELS_H_
#define OKV_CMD_BENCH_PREFILL_CASE_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/prefill.h"

// A float64 reference of prefill attention on the GPU: slow and plain, sharing nothing with the
// kernels but the definition of the page layout.
namespace okv::cuda {

struct PrefillReferenceParams {
  PrefillParams prefill;
  // False: rotated queries and INT2 values are rounded to bf16 first, which the kernel's definition
  // includes. True: nothing is rounded.
  bool exact;
  uint32_t rows_count;
  const int32_t* rows;    // [rows_count] rows of q and out, token * query_heads + head
  double* scores;         // [rows_count, scores_stride] scratch
  int64_t scores_stride;  // At least the longest sequence
  double* out;            // [rows_count, head_dim]
  double* lse;            // [rows_count]
};
cudaError_t ReferencePrefill(const PrefillReferenceParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_PREFILL_CASE_KERNELS_H_
