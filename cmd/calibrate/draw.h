#ifndef OKV_CMD_CALIBRATE_DRAW_H_
#define OKV_CMD_CALIBRATE_DRAW_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/thread_pool.h"

namespace okv {

// A dump of random rows: to measure time and memory with, or, by the second moments of a model's
// published rotations, to see what its head_dim and its outlier channels ask of the codec.
struct DrawOptions {
  std::string out;
  // Published files (version 1), which then say head_dim and layers; both or neither.
  std::string k_file;
  std::string v_file;
  std::vector<uint32_t> layer_ids = {};  // Of those files, ascending; empty: all.
  uint32_t layers_count = 36;            // Without files.
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t tokens_count = 30'000;
  uint32_t sequence_tokens = 2'000;  // The last sequence has what is left.
  uint32_t seed = 1;

  // kInvalidArgument naming the flag; what DumpInfo::Validate finds is left to it.
  absl::Status Validate() const;
};

// Without files, queries, keys and values are Gaussian in a random basis of their layer, of
// variances that fall with the rank as 1 / (1 + rank); queries and keys share a basis, keys have a
// mean. With files, queries have the second moment C_Q and values C_S of their layer; the files do
// not know the keys' own, so that keys have C_Q too: a stand-in, without the common part that a
// model's keys have. Rows are independent of each other: attention over them is not a text's.
// The same seed gives the same files, whatever the number of threads. Memory is one sequence.
// Errors as DumpWriter and LoadMoments; kInvalidArgument: files of different layers or head_dim, a
// layer that they do not have.
absl::Status DrawDump(DrawOptions options, ThreadPool* pool);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_DRAW_H_
