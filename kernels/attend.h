#ifndef OKV_KERNELS_ATTEND_H_
#define OKV_KERNELS_ATTEND_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/thread_pool.h"
#include "proto/ids.h"

namespace okv {

// One block of a layer as a query sees it: the page in one codec.
struct AttendBlock {
  Codec codec;
  const uint8_t* page;  // PageLayout::page_bytes(codec), KV-head-major, K and V rotated
};

struct AttendParams {
  // 1 to 16 times kv_heads; query head h reads KV head h / (query_heads / kv_heads).
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t head_dim;  // 64, 128 or 256
  uint32_t group_size;
  float softmax_scale;  // Usually 1 / sqrt(head_dim).

  // [queries_count, query_heads, head_dim] fp32, post-RoPE, in the model's own basis.
  const float* q;
  // [rotation_heads, head_dim, head_dim] bf16; rotation_heads is 1 or kv_heads.
  const uint16_t* r_k;
  const uint16_t* r_v;
  uint32_t rotation_heads;

  // Queries of one tile, consecutive positions of ONE block, so that they share a view: 1 to 64.
  uint32_t queries_count;

  // The visible blocks in order of position. Every block but the last is full; query i sees the
  // first last_block_tokens + i tokens of the last one (causal inside it): last_block_tokens counts
  // the keys that query 0 sees there. REQUIRES: last_block_tokens is at least 1, and at most 64
  // after adding queries_count - 1. What a page holds behind the last visible token may be
  // anything, NaN included.
  absl::Span<const AttendBlock> blocks;
  uint32_t last_block_tokens;

  float* out;  // [queries_count, query_heads, head_dim] fp32, in the model's own basis
};

// Attention of a tile's queries over `blocks`, int2 pages read as they are. Per query row, with its
// KV head's k and v:
//   q' = q R_K
//   s_t = scale * q' k_t
//   p_t = exp(s_t - max s): online softmax, block by block in order of position, in spans of 16
//         blocks that are folded at the end
//   o = sum_t p_t v_t
//   out = (o / sum p) R_V^T
// Over bf16 blocks sums are fma chains in fp32, channels and tokens ascending. Over int2 blocks q'
// and p_t times a scale are 16-bit fixed point and multiply codes as integers (README.md): relative
// L2 error to 3e-4 against float64 over dequantized pages, to 1e-3 when few tokens have all the
// weight. Int2 scales are not negative, as QuantizeRun writes them; with others values are
// unspecified. Row-invariant: a row's bits depend on no other row, nor on queries_count, the number
// of threads or the CPU. No visible block (blocks empty): out = 0. A NaN in a query, key or value
// (an int2 word's half) makes the rows that see it NaN (of unspecified bits), and no other.
// kInvalidArgument for shapes outside the ranges above, naming the field. Blocks until done.
absl::Status Attend(const AttendParams& params, ThreadPool* pool);

namespace reference {
absl::Status Attend(const AttendParams& params);
}  // namespace reference

}  // namespace okv

#endif  // OKV_KERNELS_ATTEND_H_
