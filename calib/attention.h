#ifndef OKV_CALIB_ATTENTION_H_
#define OKV_CALIB_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace okv {

// One query head and its KV head over one sequence, fp32. Row t of a tensor starts at
// tensor + t * its stride (in elements).
struct AttentionHead {
  const float* q;
  const float* k;
  const float* v;  // All three: [tokens_count, head_dim]
  size_t q_stride;
  size_t k_stride;
  size_t v_stride;
  uint32_t tokens_count;
  uint32_t head_dim;
};

// Causal softmax attention, scale 1 / sqrt(head_dim), in tiles of kTileRows query rows, so that the
// matrix S of all scores never exists: kTileRows x tokens_count floats at a time (2 MiB at 2,048
// tokens). Products in fp32, sums of the softmax in float64. Thread-compatible: one a thread.
class TiledAttention {
 public:
  static constexpr uint32_t kTileRows = 256;

  // Calls `visit(first_row, rows_count, outputs)` for each tile in order; outputs is
  // [rows_count, head_dim] row-major and valid during the call.
  void Run(const AttentionHead& head,
           absl::FunctionRef<void(uint32_t, uint32_t, const float*)> visit);

 private:
  // Softmax of a tile's scores in place, row r masked behind column first_row + r; fills
  // row_scale_ with 1 / sum.
  void SoftmaxTile(uint32_t first_row, uint32_t rows_count, uint32_t columns_count);

  std::vector<float> scores_;     // [kTileRows, tokens_count]
  std::vector<float> outputs_;    // [kTileRows, head_dim]
  std::vector<float> row_scale_;  // [kTileRows]
};

}  // namespace okv

#endif  // OKV_CALIB_ATTENTION_H_
