#include "calib/row_codec.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/format.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// The codec treats a row of keys and a row of values alike, so that one call takes 128 rows of
// either: the first 64 as its keys, the others as its values.
constexpr size_t kRowsPerCall = 2 * size_t{kBlockTokens};

// kRowsPerCall rotated rows through the codec: `restored` is [kRowsPerCall, dim].
absl::Status RoundTrip(const uint16_t* rotated, uint32_t dim, const RowCodec& codec,
                       std::vector<uint8_t>* run, float* restored, BadRow* bad) {
  const size_t half = size_t{kBlockTokens} * dim;
  OKV_RETURN_IF_ERROR(QuantizeRun({.k = rotated,
                                   .v = rotated + half,
                                   .row_stride = dim,
                                   .dim = dim,
                                   .group_size = codec.group_size,
                                   .clip_rank_k = codec.clip_rank,
                                   .clip_rank_v = codec.clip_rank},
                                  run->data(), bad));
  DequantizeRunF32({.run = run->data(), .dim = dim, .group_size = codec.group_size}, restored,
                   restored + half);
  return absl::OkStatus();
}

// Calls `visit(first, count, rotated, restored)` for kRowsPerCall rows at a time, the last time for
// what is left: the rows `first` and up, [count, dim], before and after the codec.
absl::Status ForEachCall(
    const RowSample& sample, const RowCodec& codec, size_t* bad_row,
    absl::FunctionRef<void(size_t, size_t, const uint16_t*, const float*)> visit) {
  const uint32_t dim = sample.dim;
  const size_t rows_count = sample.rows.size() / dim;
  const PageLayout layout{
      .layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = codec.group_size};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  std::vector<uint16_t> rotated(kRowsPerCall * dim);
  std::vector<float> restored(kRowsPerCall * dim);
  for (size_t first = 0; first < rows_count; first += kRowsPerCall) {
    const size_t count = std::min(kRowsPerCall, rows_count - first);
    std::fill(rotated.begin(), rotated.end(), uint16_t{0});  // Rows past the end are zero.
    const uint16_t* const rows = sample.rows.data() + first * dim;
    RotateRows({.x = rows, .x_stride = dim, .r = codec.rotation, .rows_count = count, .dim = dim},
               rotated.data(), dim);
    BadRow bad{};
    if (const absl::Status status =
            RoundTrip(rotated.data(), dim, codec, &run, restored.data(), &bad);
        !status.ok()) {
      *bad_row = first + bad.token + (bad.is_value ? kRowsPerCall / 2 : 0);
      return status;
    }
    visit(first, count, rotated.data(), restored.data());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<float>> RestoredRows(const RowSample& sample, const RowCodec& codec,
                                                size_t* bad_row) {
  const uint32_t dim = sample.dim;
  std::vector<float> back(sample.rows.size());
  OKV_RETURN_IF_ERROR(
      ForEachCall(sample, codec, bad_row,
                  [&](size_t first, size_t count, const uint16_t*, const float* restored) {
                    RotateRowsF32({.x = restored,
                                   .x_stride = dim,
                                   .r = codec.rotation,
                                   .rows_count = count,
                                   .dim = dim,
                                   .transpose = true},
                                  back.data() + first * dim, dim);
                  }));
  return back;
}

absl::StatusOr<SquaredError> RotatedError(const RowSample& sample, const RowCodec& codec,
                                          size_t* bad_row) {
  SquaredError sum;
  OKV_RETURN_IF_ERROR(
      ForEachCall(sample, codec, bad_row,
                  [&](size_t, size_t count, const uint16_t* rotated, const float* restored) {
                    for (size_t i = 0; i < count * sample.dim; ++i) {
                      const double y = Bf16ToFloat(rotated[i]);
                      sum.error += (restored[i] - y) * (restored[i] - y);
                      sum.signal += y * y;
                    }
                  }));
  return sum;
}

}  // namespace okv
