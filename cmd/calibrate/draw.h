#ifndef OKV_CMD_CALIBRATE_DRAW_H_
#define OKV_CMD_CALIBRATE_DRAW_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/thread_pool.h"

namespace okv {

// A dump of random rows, to measure time and memory with: no model has them.
struct DrawOptions {
  std::string out;
  uint32_t layers_count = 36;
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t tokens_count = 30'000;
  uint32_t sequence_tokens = 2'000;  // The last sequence has what is left.
  uint32_t seed = 1;

  // kInvalidArgument naming the flag; what DumpInfo::Validate finds is left to it.
  absl::Status Validate() const;
};

// Queries, keys and values are Gaussian in a random basis of their layer, of variances that fall
// with the rank as 1 / (1 + rank); queries and keys share a basis, keys have a mean. The same seed
// gives the same files, whatever the number of threads. Memory is one sequence. Errors as
// DumpWriter.
absl::Status DrawDump(const DrawOptions& options, ThreadPool* pool);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_DRAW_H_
