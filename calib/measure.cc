#include "calib/measure.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/attention.h"
#include "calib/row_codec.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// The token of the whole dump that an extract's token `index` is.
uint32_t OriginalToken(const std::vector<SequenceRange>& ranges, uint32_t index) {
  for (const SequenceRange& range : ranges) {
    if (index < range.tokens_count) return range.first_token + index;
    index -= range.tokens_count;
  }
  OKV_CHECK(false && "a token behind the ranges");
  return 0;
}

// `layer` holds the tokens of `ranges`. All of its rows through the codec and back.
absl::StatusOr<LayerDump> QuantizeLayer(const LayerDump& layer,
                                        const std::vector<SequenceRange>& ranges,
                                        const LayerRotation& rotation, ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  const size_t width = size_t{layer.kv_heads} * dim;
  LayerDump quantized = layer;
  std::vector<absl::Status> statuses(2 * size_t{layer.kv_heads});
  pool->ParallelFor(statuses.size(), [&](size_t task) {
    const size_t head = task / 2;
    const bool keys = task % 2 == 0;
    float* const tensor = (keys ? quantized.k : quantized.v).data() + head * dim;
    RowSample sample{.dim = dim, .rows = {}};
    for (size_t t = 0; t < layer.tokens_count; ++t) {
      std::transform(tensor + t * width, tensor + t * width + dim, std::back_inserter(sample.rows),
                     FloatToBf16);
    }
    const size_t matrix = rotation.rotation_heads == 1 ? 0 : head * dim * dim;
    size_t bad_row = 0;
    const absl::StatusOr<std::vector<float>> restored =
        RestoredRows(sample,
                     {.rotation = (keys ? rotation.r_k : rotation.r_v).data() + matrix,
                      .group_size = rotation.group_size,
                      .clip_rank = (keys ? rotation.clip_rank_k : rotation.clip_rank_v)[head]},
                     &bad_row);
    if (!restored.ok()) {
      statuses[task] = absl::Status(
          restored.status().code(),
          absl::StrCat(keys ? "K" : "V", " of token ",
                       OriginalToken(ranges, static_cast<uint32_t>(bad_row)), ", head ", head,
                       " cannot be quantized: ", restored.status().message()));
      return;
    }
    for (size_t t = 0; t < layer.tokens_count; ++t) {
      std::copy_n(restored->data() + t * dim, dim, tensor + t * width);
    }
  });
  for (const absl::Status& status : statuses) OKV_RETURN_IF_ERROR(status);
  return quantized;
}

struct Ratio {
  double error = 0;
  double signal = 0;
  double value() const { return signal > 0 ? error / signal : 0; }
};

Ratio Total(const std::vector<Ratio>& parts) {
  Ratio total;
  for (const Ratio& part : parts) {
    total.error += part.error;
    total.signal += part.signal;
  }
  return total;
}

Ratio LogitRatio(const LayerDump& exact, const LayerDump& quantized,
                 const std::vector<Matrix>& query_covariance, ThreadPool* pool) {
  const uint32_t dim = exact.head_dim;
  std::vector<Ratio> parts(exact.kv_heads);
  pool->ParallelFor(exact.kv_heads, [&](size_t head) {
    std::vector<double> keys(size_t{exact.tokens_count} * dim);
    std::vector<double> errors(keys.size());
    for (uint32_t t = 0; t < exact.tokens_count; ++t) {
      for (uint32_t c = 0; c < dim; ++c) {
        const size_t from = (size_t{t} * exact.kv_heads + head) * dim + c;
        const size_t to = size_t{t} * dim + c;
        keys[to] = exact.k[from];
        errors[to] = double{quantized.k[from]} - exact.k[from];
      }
    }
    const Matrix& c_q = query_covariance[head];
    for (double x : QuadraticForms(errors.data(), exact.tokens_count, c_q, dim)) {
      parts[head].error += x;
    }
    for (double x : QuadraticForms(keys.data(), exact.tokens_count, c_q, dim)) {
      parts[head].signal += x;
    }
  });
  return Total(parts);
}

// The outputs of one query head over all sequences, [tokens_count, dim].
std::vector<float> Outputs(const LayerDump& layer, uint32_t query_head, TiledAttention* attention) {
  std::vector<float> outputs;
  outputs.reserve(size_t{layer.tokens_count} * layer.head_dim);
  uint32_t first = 0;
  for (const uint32_t length : layer.sequence_lengths) {
    const AttentionHead head =
        layer.Head(first, length, query_head, layer.query_heads / layer.kv_heads);
    attention->Run(head, [&](uint32_t, uint32_t rows_count, const float* rows) {
      outputs.insert(outputs.end(), rows, rows + size_t{rows_count} * layer.head_dim);
    });
    first += length;
  }
  return outputs;
}

Ratio Compare(const std::vector<float>& exact, const std::vector<float>& approximate) {
  Ratio ratio;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = double{approximate[i]} - exact[i];
    ratio.error += error * error;
    ratio.signal += double{exact[i]} * exact[i];
  }
  return ratio;
}

}  // namespace

absl::StatusOr<Int2Errors> MeasureInt2(const LayerDump& layer, const LayerRotation& rotation,
                                       const std::vector<Matrix>& query_covariance,
                                       const std::vector<SequenceRange>& ranges, ThreadPool* pool) {
  OKV_CHECK(!ranges.empty() && query_covariance.size() == layer.kv_heads);
  const LayerDump exact = ExtractRanges(layer, ranges);
  OKV_ASSIGN_OR_RETURN(const LayerDump quantized, QuantizeLayer(exact, ranges, rotation, pool));
  LayerDump values_only = exact;
  values_only.v = quantized.v;

  std::vector<Ratio> value_parts(layer.query_heads);
  std::vector<Ratio> output_parts(layer.query_heads);
  pool->ParallelFor(layer.query_heads, [&](size_t task) {
    const uint32_t head = static_cast<uint32_t>(task);
    TiledAttention attention;
    const std::vector<float> reference = Outputs(exact, head, &attention);
    value_parts[task] = Compare(reference, Outputs(values_only, head, &attention));
    output_parts[task] = Compare(reference, Outputs(quantized, head, &attention));
  });
  return Int2Errors{.tokens_count = exact.tokens_count,
                    .logit = LogitRatio(exact, quantized, query_covariance, pool).value(),
                    .value = Total(value_parts).value(),
                    .output = Total(output_parts).value()};
}

}  // namespace okv
