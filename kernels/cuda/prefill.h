#ifndef OKV_KERNELS_CUDA_PREFILL_H_
#define OKV_KERNELS_CUDA_PREFILL_H_

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Attention of many new tokens over [sink | INT2 history | BF16 blocks] of a batch of requests, on
// the GPU: prefill in chunks, after a prefix hit or without one. Plain C++.
//
// One chunk of a model: PlanPrefill() once, then Prefill() once a layer, all on one stream; both
// can be captured in a CUDA graph, which stays right when lengths and tables change between
// replays: only the shape and the pointers are fixed.
//
// The view is that of decode attention: a query in block b of its sequence sees block j <= b in
// BF16 if j < sink_blocks or j >= b - recent_blocks, otherwise in INT2. So a chunk needs, of every
// block before its last recent_blocks + 1, the INT2 page as well, blocks of the chunk included:
// they are sealed before Prefill() is called.
namespace okv::cuda {

// What the plan depends on, the same for every layer of a chunk. (Layers with another sliding
// window have another plan.)
struct PrefillShape {
  uint32_t batch;             // Requests, 1 to 8,192
  uint32_t query_tokens_max;  // Rows of q and out: the new tokens of all requests, or more
  uint32_t query_heads;       // 1 to 16 times kv_heads
  uint32_t kv_heads;
  uint32_t head_dim;        // 64, 128 or 256
  uint32_t group_size;      // 32, 64, ... head_dim
  uint32_t sink_blocks;     // 1 in the recipe
  uint32_t recent_blocks;   // 4
  uint32_t sliding_window;  // A query sees its last so many tokens, itself included; 0: all
  // INT2 blocks of all requests that some query sees, at most. The workspace has room for their
  // BF16 values; a request that no room is left for gets NaN as output.
  uint32_t history_blocks_max;
};

struct PrefillPlanParams {
  PrefillShape shape;
  // [batch + 1], ascending: the new tokens of request i, the last ones of its sequence, are rows
  // query_starts[i] .. query_starts[i + 1] - 1 of q and out. Any number of them, from 0 on.
  const int32_t* query_starts;
  // [batch] tokens of each sequence, the new ones included. A request with fewer tokens than new
  // ones is left out.
  const int32_t* lengths;
  // [batch, int2_table_stride]: the slot of block sink_blocks + i. Read for the blocks that some
  // query of the request sees in INT2: before b - recent_blocks, b the block of its last token.
  const int32_t* int2_table;
  int64_t int2_table_stride;
  void* workspace;  // out, PrefillWorkspaceBytes(), 16-byte aligned
};

struct PrefillParams {
  PrefillPlanParams plan;  // As they were given to PlanPrefill()

  const __nv_bfloat16* q;  // [query_tokens_max, query_heads, head_dim], after RoPE, not rotated
  // [rotation_heads, head_dim, head_dim] row-major; rotation_heads is 1 or kv_heads.
  const __nv_bfloat16* r_k;
  const __nv_bfloat16* r_v;
  uint32_t rotation_heads;

  // Pages of this layer: slot i at int2_pages + i * int2_block_stride (bytes, a multiple of 16),
  // its KV heads one run after the other (proto/page_layout.md).
  const uint8_t* int2_pages;
  int64_t int2_block_stride;
  // The same for bf16 pages. bf16_table [batch, bf16_table_stride] has the slots of blocks 0 ..
  // sink_blocks - 1 first, then those of blocks from bf16_first_blocks[i] on, which is at least
  // sink_blocks and at most the larger of sink_blocks and b - recent_blocks, b the block of the
  // first new token; without bf16_first_blocks it is sink_blocks. Rows behind the last token may
  // hold anything.
  const uint8_t* bf16_pages;
  int64_t bf16_block_stride;
  const int32_t* bf16_table;
  int64_t bf16_table_stride;
  const int32_t* bf16_first_blocks;  // [batch] or null

  float softmax_scale;       // Usually 1 / sqrt(head_dim)
  float logit_softcap;       // c: logits become c tanh(logit / c); 0: off
  const float* sink_logits;  // [query_heads] or null: exp(sink_logit) joins each sum

  __nv_bfloat16* out;  // [query_tokens_max, query_heads, head_dim], in the model's own basis
  // [query_tokens_max, query_heads] or null: natural logarithm of the sum of exp(logit), sink
  // logits included. Combines results of several workers.
  float* lse;
};

// Bytes of the workspace of `shape`: the plan, 256 head_dim bytes a history block and KV head, and
// sums of pieces (53 MiB at 32/8 heads and head_dim 128; less for chunks below 1,500 tokens). Its
// content needs no initialization; one serves all layers in turn. 0 when the shape is not
// supported.
size_t PrefillWorkspaceBytes(const PrefillShape& shape);

// Cuts the work of a chunk, from lengths on the device: tiles of 64 queries, the longest first.
// Queues small kernels on `stream` and returns without waiting. cudaErrorInvalidValue for an
// unsupported shape or a misaligned pointer.
[[nodiscard]] cudaError_t PlanPrefill(const PrefillPlanParams& params, cudaStream_t stream);

// Attention of one layer: history to BF16 in the workspace; then q R_K rounded to bf16, online
// softmax over all pages, the output times R_V^T. Rows of out of no request are not written; all of
// q may be read, tiles of 64 rows around a request's first and last included, and rows of others
// change nothing.
// Queues two kernels on `stream` and returns without waiting. cudaErrorInvalidValue for an
// unsupported shape or a misaligned pointer. REQUIRES: PlanPrefill() with params.plan came before
// on the stream. Two calls may not run at once on one workspace.
[[nodiscard]] cudaError_t Prefill(const PrefillParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_H_
