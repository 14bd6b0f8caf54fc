#ifndef OKV_CMD_BENCH_CUDA_ATTEND_H_
#define OKV_CMD_BENCH_CUDA_ATTEND_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/cuda_timing.h"
#include "cmd/bench/row_draws.h"

namespace okv {

// Time of decode attention on the GPU by shape, beside the copy rate of the same run. Windows (sink
// 64, recent 256), both rotations and the merge are in it; the plan of the step is not. Each layer
// has data of its own; the layers of a step are one CUDA graph. Beside it a kernel that loads the
// same bytes and does nothing else.
struct CudaAttendOptions {
  std::string shapes;  // "8x102400,32x32768": batch x context; "64r4096": ragged, 1 to 4,096 tokens
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;
  uint32_t query_tokens = 1;
  uint32_t rotation_heads = 1;
  float query_sigma = 1.0f;  // 8: peaky scores
  // None: normal queries, random codes and scales. Else rows of a model (LoadPublishedDraws).
  std::optional<RowDraws> draws;
  std::string draws_name;  // In the report
  uint32_t layers = 36;
  uint32_t rounds = 9;
  uint64_t seed = 1;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

// Each shape's first layer is compared with float64 before it is timed: kInternal when it is wrong.
// kUnavailable without a GPU. Blocks until done.
absl::StatusOr<CudaBenchReport> RunCudaAttend(const CudaAttendOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_CUDA_ATTEND_H_
