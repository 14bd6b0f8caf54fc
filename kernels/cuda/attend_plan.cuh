#ifndef OKV_KERNELS_CUDA_ATTEND_PLAN_CUH_
#define OKV_KERNELS_CUDA_ATTEND_PLAN_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/attend.h"

// What PlanDecode() writes and the attention kernel reads.
//
// A pair is (request, KV head, group of query rows). Its keys are cut into units of about equal
// bytes, which a warp loads at once: BF16 units (sink, then recent) and INT2 units. The pairs'
// units lie on a line, request-major, which is cut into one piece a thread block. BF16 units are
// spread evenly over a pair's line, since they take longer; in a piece they come last, since the
// kernel in front may still be writing their rows.
namespace okv::cuda {

inline constexpr uint32_t kBlockTokens = 64;
inline constexpr uint32_t kBatchMax = 8192;
inline constexpr uint32_t kQueryTokensMax = 8;
inline constexpr uint32_t kQueryGroupMax = 16;  // Query heads per KV head

// How a shape maps to an instantiation of the kernel and to the work line.
struct DecodeGeometry {
  uint32_t rows;        // query_tokens x query heads per KV head
  uint32_t group_rows;  // Rows of one pair: 4, 8 or 16
  uint32_t row_groups;  // rows / group_rows, rounded up
  uint32_t pairs_per_request;
  bool wide;              // For the kernel of attend_wide.cuh
  uint32_t page_blocks;   // Blocks of an INT2 unit: 1, 2 or 4
  uint32_t blocks_count;  // Thread blocks
  uint32_t warps;         // of a thread block; wide: warpgroups
  uint32_t shared_bytes;  // A thread block may have
};

// Keys of one request, for all its pairs.
struct alignas(32) RequestPlan {
  int32_t length;
  int32_t sink_first_unit;  // Units of the sink in front of it are outside the sliding window
  int32_t sink_units;
  int32_t recent_first_token;
  int32_t recent_units;
  int32_t int2_first_block;  // A block of the sequence: sink_blocks or later
  int32_t int2_blocks;
  int32_t units;  // All of a pair
};

// The piece of one thread block, in 96 bytes that it reads at once: what it needs before its first
// page is worth not to be looked up. Pairs strictly between first and last are whole.
struct alignas(32) BlockPlan {
  int32_t first_pair;  // first_pair > last_pair: nothing to do
  int32_t first_unit;  // of first_pair
  int32_t last_pair;
  int32_t last_unit_end;     // of last_pair
  int32_t first_pair_begin;  // Thread blocks [begin, end) share first_pair
  int32_t first_pair_end;
  int32_t
      last_pair_end;  // The same for last_pair, which begins in this block unless it is first_pair
  int32_t first_request;  // What first_pair is
  int32_t first_kv_head;
  int32_t first_row;
  int32_t first_bf16;     // BF16 units of first_pair in front of first_unit
  int32_t last_bf16_end;  // and of last_pair in front of last_unit_end
  RequestPlan first_plan;
};

// Where the parts of the workspace are. A thread block has two partial results: 2 i for a pair that
// an earlier block began, 2 i + 1 for one that goes on in the next.
struct DecodeWorkspace {
  BlockPlan* blocks;       // [blocks_count]
  RequestPlan* requests;   // [batch]
  uint32_t* arrivals;      // [pairs], 0 between launches
  float* partial_outputs;  // [2 blocks_count, head_dim, group_rows]
  float* partial_sums;     // [2 blocks_count, 2, group_rows]: maxima, sums
  size_t bytes;
};

// False when the kernels do not support the shape.
bool MakeDecodeGeometry(const DecodeShape& shape, DecodeGeometry* geometry);
DecodeWorkspace LayOutWorkspace(const DecodeShape& shape, const DecodeGeometry& geometry,
                                void* base);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_PLAN_CUH_
