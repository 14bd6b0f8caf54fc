#include "calib/row_error.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"
#include "proto/page_layout.h"

namespace okv {
namespace {

constexpr uint32_t kSinkTokens = 64;
// The codec treats a row of keys and a row of values alike, so that one call takes 128 rows of
// either: the first 64 as its keys, the others as its values.
constexpr size_t kRowsPerCall = 2 * size_t{kBlockTokens};

// Every n-th of `tokens`, so that at most tokens_max are left.
std::vector<uint32_t> Thin(const std::vector<uint32_t>& tokens, uint32_t tokens_max) {
  const size_t step = (tokens.size() + tokens_max - 1) / tokens_max;
  std::vector<uint32_t> thinned;
  for (size_t i = 0; i < tokens.size(); i += step) thinned.push_back(tokens[i]);
  return thinned;
}

// kRowsPerCall rotated rows through the codec: `restored` is [kRowsPerCall, dim].
absl::Status RoundTrip(const uint16_t* rotated, uint32_t dim, const RowCodec& codec,
                       std::vector<uint8_t>* run, float* restored) {
  const size_t half = size_t{kBlockTokens} * dim;
  BadRow bad{};
  const absl::Status status = QuantizeRun({.k = rotated,
                                           .v = rotated + half,
                                           .row_stride = dim,
                                           .dim = dim,
                                           .group_size = codec.group_size,
                                           .clip_rank_k = codec.clip_rank,
                                           .clip_rank_v = codec.clip_rank},
                                          run->data(), &bad);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("a sampled row cannot be quantized: ", status.message()));
  }
  DequantizeRunF32({.run = run->data(), .dim = dim, .group_size = codec.group_size}, restored,
                   restored + half);
  return absl::OkStatus();
}

}  // namespace

TokenSplit SplitTokens(const std::vector<uint32_t>& sequence_lengths, uint32_t tokens_max) {
  const uint32_t tokens_count =
      std::accumulate(sequence_lengths.begin(), sequence_lengths.end(), 0u);
  OKV_CHECK(tokens_count > 0 && tokens_max > 0);
  const uint32_t held_out_first = tokens_count - std::max(1u, tokens_count / 4);
  std::vector<uint32_t> all[2];    // Fit, held out.
  std::vector<uint32_t> later[2];  // Behind the sink block.
  TokenSplit split{.fit = {}, .held_out = {}, .held_out_range = {}};
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    for (uint32_t t = 0; t < length; ++t) {
      const size_t part = first + t >= held_out_first ? 1 : 0;
      all[part].push_back(first + t);
      if (t >= kSinkTokens) later[part].push_back(first + t);
    }
    const uint32_t held_first = std::max(first, held_out_first);
    first += length;
    if (first > held_first && first - held_first > split.held_out_range.tokens_count) {
      split.held_out_range = {.first_token = held_first, .tokens_count = first - held_first};
    }
  }
  if (all[0].empty()) all[0] = all[1];  // A dump of one token.
  split.fit = Thin(later[0].empty() ? all[0] : later[0], tokens_max);
  split.held_out = Thin(later[1].empty() ? all[1] : later[1], tokens_max);
  return split;
}

RowSample GatherSample(const LayerDump& layer, KvTensor tensor, uint32_t head,
                       const std::vector<uint32_t>& tokens) {
  const std::vector<float>& from = tensor == KvTensor::kKeys ? layer.k : layer.v;
  RowSample sample{.dim = layer.head_dim, .rows = {}};
  sample.rows.reserve(tokens.size() * layer.head_dim);
  for (const uint32_t token : tokens) {
    const float* row = from.data() + (size_t{token} * layer.kv_heads + head) * layer.head_dim;
    std::transform(row, row + layer.head_dim, std::back_inserter(sample.rows), FloatToBf16);
  }
  return sample;
}

absl::StatusOr<double> RowError(const RowSample& sample, const RowCodec& codec,
                                const RowObjective& objective) {
  const uint32_t dim = sample.dim;
  const size_t rows_count = sample.rows.size() / dim;
  OKV_CHECK(rows_count > 0 && objective.weight.size() == size_t{dim} * dim);
  const PageLayout layout{
      .layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = codec.group_size};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  std::vector<uint16_t> rotated(kRowsPerCall * dim);
  std::vector<float> restored(kRowsPerCall * dim);
  std::vector<float> back(kRowsPerCall * dim);
  std::vector<double> errors(kRowsPerCall * dim);
  std::vector<double> mean(dim, 0.0);
  Matrix moment(size_t{dim} * dim, 0.0);  // Of the errors, not centered.
  for (size_t first = 0; first < rows_count; first += kRowsPerCall) {
    const size_t count = std::min(kRowsPerCall, rows_count - first);
    std::fill(rotated.begin(), rotated.end(), uint16_t{0});  // Rows past the end are zero.
    const uint16_t* const rows = sample.rows.data() + first * dim;
    RotateRows({.x = rows, .x_stride = dim, .r = codec.rotation, .rows_count = count, .dim = dim},
               rotated.data(), dim);
    if (const absl::Status status = RoundTrip(rotated.data(), dim, codec, &run, restored.data());
        !status.ok()) {
      return status;
    }
    RotateRowsF32({.x = restored.data(),
                   .x_stride = dim,
                   .r = codec.rotation,
                   .rows_count = count,
                   .dim = dim,
                   .transpose = true},
                  back.data(), dim);
    for (size_t i = 0; i < count * dim; ++i) {
      errors[i] = double{back[i]} - Bf16ToFloat(rows[i]);
      mean[i % dim] += errors[i];
    }
    AddOuterProducts(errors.data(), count, dim, &moment);
  }
  Symmetrize(dim, &moment);
  const double scale = 1.0 / static_cast<double>(rows_count);
  double total = 0;
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      const double shared = mean[i] * scale * mean[j] * scale;
      const double own = moment[i * dim + j] * scale - shared;
      total += objective.weight[i * dim + j] * (own + objective.mean_factor * shared);
    }
  }
  return total;
}

}  // namespace okv
