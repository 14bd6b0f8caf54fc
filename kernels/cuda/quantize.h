#ifndef OKV_KERNELS_CUDA_QUANTIZE_H_
#define OKV_KERNELS_CUDA_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/rows.h"

// Rotate, clip, quantize and pack on the GPU. Plain C++; the kernels are in quantize.cu.
namespace okv::cuda {

// What *QuantizePagesParams::bad_row holds while no row is bad: the caller puts it there.
inline constexpr uint64_t kNoBadRow = ~uint64_t{0};

// A row without an int2 form. `token` counts from the launch's first block on.
struct BadRow {
  uint32_t layer;
  uint64_t token;
  uint32_t head;
  bool is_value;  // False: the K row
};
// REQUIRES: word is not kNoBadRow.
inline BadRow DecodeBadRow(uint64_t word) {
  return {.layer = static_cast<uint32_t>(word >> 52),
          .token = word >> 10 & 0x3ffffffffff,
          .head = static_cast<uint32_t>(word >> 1 & 0x1ff),
          .is_value = (word & 1) != 0};
}

struct QuantizePagesParams {
  uint32_t layers_count;  // 1 to 512
  uint32_t kv_heads;      // 1 to 256
  uint32_t head_dim;      // 64, 128 or 256
  uint32_t group_size;    // 32, 64, ... head_dim
  uint32_t blocks_count;  // Blocks of 64 tokens to seal: token t of block b is token 64 b + t
  // Null, or one number on the device: only its full blocks are sealed, of blocks_count at most.
  const int32_t* tokens_count;

  // Prefill: K after RoPE and V, as the model has them, and rotations. Demotion: rows of bf16
  // pages, one block a request, without: they are stored rotated. A block whose first token is left
  // out by the map is left out. REQUIRES: the map leaves out whole blocks only.
  ConstPagedRows k;
  ConstPagedRows v;
  TokenMap tokens;
  Rotations rotations;

  // [layers, kv_heads] each, 0 (off) to head_dim - 1; null: off.
  const uint32_t* clip_rank_k;
  const uint32_t* clip_rank_v;

  Pages pages;  // out

  // The first bad row by (layer, token, head, K before V) is put here, when it is smaller than what
  // is here.
  uint64_t* bad_row;

  // All that is read here (rows, maps, the count, rotations, ranks, table) was complete before the
  // kernel in front on the stream began, and is read before that one has ended. REQUIRES: that
  // kernel, if it may begin before its own predecessor has ended, waits for it before it lets this
  // one start, as all kernels here do. 8,192 tokens of a layer take 1 to 5 us less.
  bool early_inputs = false;
};

// Seals blocks: y = bf16(x R) by tensor cores with fp32 sums, then the codec's rule: y gives the
// bytes that okv::QuantizeRun gives for it. Queues one kernel on `stream`, none where blocks_count
// is 0, and returns without waiting; a captured graph follows the tables, tokens_count and clip
// ranks. cudaErrorInvalidValue for an unsupported shape or a misaligned pointer or stride. A row
// with NaN or Inf, or with a range or scale that bf16 cannot hold, is reported in *bad_row: the
// content of its run is then unspecified, and the caller stores nothing of the launch.
[[nodiscard]] cudaError_t QuantizePages(const QuantizePagesParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_QUANTIZE_H_
