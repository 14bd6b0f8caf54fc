#ifndef OKV_KERNELS_CUDA_ATTEND_H_
#define OKV_KERNELS_CUDA_ATTEND_H_

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Decode attention over [sink | INT2 history | recent] of a batch of requests, on the GPU. Plain
// C++; the kernels are in attend_kernel.cuh.
//
// One step of a model: PlanDecode() once, then Attend() once a layer, all on one stream; both can
// be captured in a CUDA graph, which stays right when lengths and tables change between replays:
// only the shape and the pointers are fixed.
namespace okv::cuda {

// What the plan depends on, the same for every layer of a step. (Layers with another sliding window
// have another plan.)
struct DecodeShape {
  uint32_t batch;         // Requests, 1 to 8,192. Any may have length 0.
  uint32_t query_tokens;  // 1 to 8 new tokens a request, the last ones of its sequence
  uint32_t query_heads;   // 1 to 16 times kv_heads
  uint32_t kv_heads;
  uint32_t head_dim;       // 64, 128 or 256
  uint32_t group_size;     // 32, 64, ... head_dim
  uint32_t sink_blocks;    // Blocks 0 .. sink_blocks - 1 are read in BF16 (1 in the recipe)
  uint32_t recent_blocks;  // A query in block b reads blocks >= b - recent_blocks in BF16 (4)
  // Slots of a request's BF16 ring: block j >= sink_blocks is in ring slot
  // (j - sink_blocks) % ring_blocks. At least recent_blocks + 1, and one more when query_tokens
  // > 1.
  uint32_t ring_blocks;
  uint32_t sliding_window;  // A query sees its last so many tokens, itself included; 0: all
};

struct DecodeParams {
  DecodeShape shape;

  const __nv_bfloat16* q;  // [batch, query_tokens, query_heads, head_dim], after RoPE
  // [rotation_heads, head_dim, head_dim] row-major; rotation_heads is 1 or kv_heads.
  const __nv_bfloat16* r_k;
  const __nv_bfloat16* r_v;
  uint32_t rotation_heads;

  // Pages of this layer: slot i at int2_pages + i * int2_block_stride (bytes, a multiple of 16),
  // its KV heads one run after the other (proto/page_layout.md). int2_table [batch,
  // int2_table_stride]: the slot of block sink_blocks + i. Read for blocks sink_blocks .. b -
  // recent_blocks - 1, b the block of the request's last token.
  const uint8_t* int2_pages;
  int64_t int2_block_stride;
  const int32_t* int2_table;
  int64_t int2_table_stride;
  // The same for bf16 pages: bf16_table [batch, bf16_table_stride] has the sink's slots first, then
  // ring_blocks of the ring. Rows behind the last token may hold anything.
  const uint8_t* bf16_pages;
  int64_t bf16_block_stride;
  const int32_t* bf16_table;
  int64_t bf16_table_stride;
  // [batch] tokens of each sequence, the new ones included. With fewer than query_tokens, only the
  // last `length` queries have keys; the output of the others is 0.
  const int32_t* lengths;

  float softmax_scale;  // Usually 1 / sqrt(head_dim)
  float logit_softcap;  // c: logits become c tanh(logit / c); 0: off
  const float*
      sink_logits;  // [query_heads] or null: exp(sink_logit) joins each sum of probabilities

  __nv_bfloat16* out;  // [batch, query_tokens, query_heads, head_dim], in the model's own basis
  // [batch, query_tokens, query_heads] or null: natural logarithm of the sum of exp(logit), sink
  // logits included; -inf without keys. Combines results of several workers.
  float* lse;

  void* workspace;  // DecodeWorkspaceBytes(), as PlanDecode() left it
  // Pages, tables, lengths and the plan were complete before the kernel in front of this one on the
  // stream began: loading starts while that one ends. BF16 rows and q may be that kernel's output.
  bool early_history;
};

// Bytes of the workspace of `shape` on the current device; 16-byte alignment is enough. Its content
// needs no initialization. 0 when the shape is not supported.
size_t DecodeWorkspaceBytes(const DecodeShape& shape);

// Cuts the work of a step into equal shares, from `lengths` on the device. Queues one small kernel
// on `stream` and returns without waiting. cudaErrorInvalidValue for an unsupported shape.
[[nodiscard]] cudaError_t PlanDecode(const DecodeShape& shape, const int32_t* lengths,
                                     void* workspace, cudaStream_t stream);

// Attention of one layer: q R_K, INT2 and BF16 pages, online softmax, merge, output times R_V^T, in
// one launch. Queues the kernel on `stream` and returns without waiting. cudaErrorInvalidValue for
// an unsupported shape or a misaligned pointer. REQUIRES: PlanDecode() with the same shape and
// lengths came before on the stream. Two calls may not run at once on one workspace. A device that
// gives a thread block 163 KiB instead of 227 (sm_80) has no room for head_dim 256 with more than 4
// query rows a KV head: cudaErrorInvalidValue.
[[nodiscard]] cudaError_t Attend(const DecodeParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_H_
