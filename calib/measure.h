#ifndef OKV_CALIB_MEASURE_H_
#define OKV_CALIB_MEASURE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/covariance.h"
#include "calib/dump.h"
#include "kernels/thread_pool.h"

namespace okv {

// One layer's share of a rotation set.
struct LayerRotation {
  uint32_t group_size;
  uint32_t rotation_heads;            // 1 or kv_heads
  std::vector<uint16_t> r_k;          // [rotation_heads, dim, dim] bf16
  std::vector<uint16_t> r_v;          // the same
  std::vector<uint32_t> clip_rank_k;  // [kv_heads]
  std::vector<uint32_t> clip_rank_v;  // [kv_heads]
};

// What INT2 does to a layer, with every key and value quantized by the codec itself (no sink, no
// recent window). Each is a squared error over the squared norm of what it should be, over all
// heads together: 0 is exact, 1 means that the error is as large as the signal.
struct Int2Errors {
  uint32_t tokens_count = 0;  // That were measured.
  double logit =
      0;  // tr(E_K C_Q E_K^T) over tr(K C_Q K^T), E_K = K^ - K: the logits before softmax.
  double value = 0;   // |S (V^ - V)|^2 over |S V|^2: the output's error from values alone.
  double output = 0;  // The attention's output computed from K^ and V^.
};

// Quantizes the tokens of `ranges` through `rotation` and measures. `query_covariance` as
// QueryCovariance gives it, one per KV head. kInvalidArgument naming layer, token and head: a row
// that the codec refuses. REQUIRES: ranges hold at least one token.
absl::StatusOr<Int2Errors> MeasureInt2(const LayerDump& layer, const LayerRotation& rotation,
                                       const std::vector<Matrix>& query_covariance,
                                       const std::vector<SequenceRange>& ranges, ThreadPool* pool);

}  // namespace okv

#endif  // OKV_CALIB_MEASURE_H_
