#ifndef OKV_CMD_BENCH_CUDA_PREFILL_H_
#define OKV_CMD_BENCH_CUDA_PREFILL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace okv {

// Time of prefill attention on the GPU by shape. Windows (sink 64, recent 256), the history's way
// to BF16 and both rotations are in it; the plan of the chunk is not. Each layer has pages of its
// own; the layers of a chunk are one CUDA graph.
struct CudaPrefillOptions {
  std::string shapes;  // "1x8192,1x2048+32768": requests x new tokens, + history before them
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;
  uint32_t rotation_heads = 1;
  float query_sigma = 1.0f;
  uint32_t layers = 4;
  uint32_t rounds = 9;
  uint64_t seed = 1;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

struct CudaPrefillRow {
  std::string shape;
  double us = 0;          // Of one layer
  double operations = 0;  // 4 a channel, query head and pair of a query and a key it sees

  double tflop_per_s() const { return operations / us * 1e-6; }
};

struct CudaPrefillReport {
  std::string device;
  std::string model;  // "32/8 heads, d 128, ..."
  std::vector<CudaPrefillRow> rows;

  std::string ToTable() const;
  std::string ToJson() const;
};

// A sample of each shape's rows is compared with float64 before it is timed: kInternal when it is
// wrong. kUnavailable without a GPU. Blocks until done.
absl::StatusOr<CudaPrefillReport> RunCudaPrefill(const CudaPrefillOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_CUDA_PREFILL_H_
