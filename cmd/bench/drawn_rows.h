#ifndef OKV_CMD_BENCH_DRAWN_ROWS_H_
#define OKV_CMD_BENCH_DRAWN_ROWS_H_

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cmd/bench/row_draws.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/rows.h"
#include "proto/page_layout.h"

namespace okv::cuda {

// Draws rows on the device and brings them where attention reads them, with the kernels that do so
// in a service. Thread-compatible. A CUDA error, or a row that has no int2 form, ends the program.
class DrawnRows {
 public:
  DrawnRows(const RowDraws& draws, const PageLayout& layout, uint64_t seed);

  // `rows_count` queries [rows_count, head_dim], `sigma` times as large.
  void FillQueries(__nv_bfloat16* rows, size_t rows_count, float sigma);
  // `blocks_count` blocks, all layers, one after the other: rotated, clipped at the published
  // ratios (0.96 of keys, 0.92 of values) and quantized.
  void FillInt2(uint8_t* blocks, size_t blocks_count);
  // The same in bf16, rotated.
  void FillBf16(uint8_t* blocks, size_t blocks_count);

 private:
  // Blocks of one layer drawn at once: 2,048 x 64 tokens x 8 heads x 256 B are 256 MiB.
  static constexpr size_t kBlocksMax = 2048;

  // Draws `blocks_count` blocks of one layer into k_ and v_, [tokens, kv_heads, head_dim].
  void Draw(size_t blocks_count);
  ConstPagedRows Rows(const DeviceBuffer& buffer) const;

  const PageLayout layout_;
  uint64_t seed_;
  DeviceBuffer mix_k_, mix_v_, r_k_, r_v_, rank_k_, rank_v_, bad_row_;
  DeviceBuffer k_, v_;
};

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_DRAWN_ROWS_H_
