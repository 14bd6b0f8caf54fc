#ifndef OKV_CALIB_ROW_CODEC_H_
#define OKV_CALIB_ROW_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace okv {

// Single rows through the codec and back, without the attention around them.

enum class KvTensor { kKeys, kValues };

// Rows of one KV head.
struct RowSample {
  uint32_t dim = 0;
  std::vector<uint16_t> rows;  // [tokens, dim] bf16
};

// The codec's parameters for one head.
struct RowCodec {
  const uint16_t* rotation;  // [dim, dim] bf16
  uint32_t group_size;
  uint32_t clip_rank;
};

// A squared error, and the squared norm of what it is an error of.
struct SquaredError {
  double error = 0;
  double signal = 0;
  double ratio() const { return signal > 0 ? error / signal : 0; }
  void Add(const SquaredError& other) {
    error += other.error;
    signal += other.signal;
  }
};

// The rows after a way through the codec, bf16 rotation included, and back: [rows, dim].
// kInvalidArgument, and *bad_row set: a row that the codec refuses.
absl::StatusOr<std::vector<float>> RestoredRows(const RowSample& sample, const RowCodec& codec,
                                                size_t* bad_row);

// What the codec makes of the rows in the rotated basis: of y^ against the bf16 y, as
// RotationSet::promised_error_k has it. Errors as RestoredRows.
absl::StatusOr<SquaredError> RotatedError(const RowSample& sample, const RowCodec& codec,
                                          size_t* bad_row);

}  // namespace okv

#endif  // OKV_CALIB_ROW_CODEC_H_
