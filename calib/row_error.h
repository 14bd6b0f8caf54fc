#ifndef OKV_CALIB_ROW_ERROR_H_
#define OKV_CALIB_ROW_ERROR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/covariance.h"
#include "calib/dump.h"
#include "calib/linalg.h"

namespace okv {

// What INT2 does to single rows, without the attention around them: cheap enough to compare
// hundreds of rotations of a head.

enum class KvTensor { kKeys, kValues };

// Tokens of a dump to fit on and to judge by. The last quarter of the dump is held out; the first
// 64 tokens of a sequence are in neither part as long as others are left: a sequence keeps its sink
// block in BF16, and the keys of its first tokens look like no others.
struct TokenSplit {
  std::vector<uint32_t> fit;       // Ascending, evenly spaced, at most tokens_max.
  std::vector<uint32_t> held_out;  // The same.
  SequenceRange held_out_range;    // The longest run of held-out tokens of one sequence.
};
// REQUIRES: a token at least, and tokens_max > 0.
TokenSplit SplitTokens(const std::vector<uint32_t>& sequence_lengths, uint32_t tokens_max);

// Rows of one KV head.
struct RowSample {
  uint32_t dim = 0;
  std::vector<uint16_t> rows;  // [tokens, dim] bf16
};
RowSample GatherSample(const LayerDump& layer, KvTensor tensor, uint32_t head,
                       const std::vector<uint32_t>& tokens);

// How errors e of rows, the mean error m among them, make one number:
//   mean of (e - m) W (e - m)^T + mean_factor * m W m^T.
// Keys: W = C_Q and factor 0. An error that all keys share moves all logits of a query by the same
// amount, which softmax does not see. Values: W = I and a factor above 1. Attention averages what
// differs between values and keeps what they share.
struct RowObjective {
  Matrix weight;  // [dim, dim], symmetric
  double mean_factor = 1;
};

// The codec's parameters for one head.
struct RowCodec {
  const uint16_t* rotation;  // [dim, dim] bf16
  uint32_t group_size;
  uint32_t clip_rank;
};

// Sends the rows through the codec, bf16 rotation included, and back. kInvalidArgument: a row that
// the codec refuses. REQUIRES: at least one row.
absl::StatusOr<double> RowError(const RowSample& sample, const RowCodec& codec,
                                const RowObjective& objective);

}  // namespace okv

#endif  // OKV_CALIB_ROW_ERROR_H_
