#include "calib/measure.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/attention.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// The ranges' tokens alone: as many sequences as ranges.
LayerDump ExtractRanges(const LayerDump& layer, const std::vector<SequenceRange>& ranges) {
  LayerDump part{.layer_id = layer.layer_id,
                 .tokens_count = 0,
                 .query_heads = layer.query_heads,
                 .kv_heads = layer.kv_heads,
                 .head_dim = layer.head_dim,
                 .sequence_lengths = {},
                 .q = {},
                 .k = {},
                 .v = {}};
  for (const SequenceRange& range : ranges) {
    const auto append = [&](const std::vector<float>& from, uint32_t heads,
                            std::vector<float>* to) {
      const size_t width = size_t{heads} * layer.head_dim;
      const float* first = from.data() + range.first_token * width;
      to->insert(to->end(), first, first + range.tokens_count * width);
    };
    append(layer.q, layer.query_heads, &part.q);
    append(layer.k, layer.kv_heads, &part.k);
    append(layer.v, layer.kv_heads, &part.v);
    part.sequence_lengths.push_back(range.tokens_count);
    part.tokens_count += range.tokens_count;
  }
  return part;
}

// The token of the whole dump that an extract's token `index` is.
uint32_t OriginalToken(const std::vector<SequenceRange>& ranges, uint32_t index) {
  for (const SequenceRange& range : ranges) {
    if (index < range.tokens_count) return range.first_token + index;
    index -= range.tokens_count;
  }
  OKV_CHECK(false && "a token behind the ranges");
  return 0;
}

// Sends 64 rows of one KV head from `first_token` through the codec and back to the model's basis,
// in place. Past the end the last token repeats: a row's codes do not depend on the others. A row
// that the codec refuses: *bad names it.
absl::Status QuantizeBlock(const LayerRotation& rotation, uint32_t head, uint32_t first_token,
                           LayerDump* layer, BadRow* bad) {
  const uint32_t dim = layer->head_dim;
  const size_t width = size_t{layer->kv_heads} * dim;
  const size_t matrix = rotation.rotation_heads == 1 ? 0 : size_t{head} * dim * dim;
  const uint16_t* rotations[] = {rotation.r_k.data() + matrix, rotation.r_v.data() + matrix};
  float* tensors[] = {layer->k.data() + size_t{head} * dim, layer->v.data() + size_t{head} * dim};
  const size_t values = size_t{kBlockTokens} * dim;
  std::vector<uint16_t> rows(values);
  std::vector<uint16_t> rotated[] = {std::vector<uint16_t>(values), std::vector<uint16_t>(values)};
  for (size_t i = 0; i < 2; ++i) {
    for (uint32_t t = 0; t < kBlockTokens; ++t) {
      const uint32_t token = std::min(first_token + t, layer->tokens_count - 1);
      const float* row = tensors[i] + token * width;
      std::transform(row, row + dim, rows.begin() + size_t{t} * dim, FloatToBf16);
    }
    RotateRows({.x = rows.data(),
                .x_stride = dim,
                .r = rotations[i],
                .rows_count = kBlockTokens,
                .dim = dim},
               rotated[i].data(), dim);
  }
  const QuantizeRunParams params{.k = rotated[0].data(),
                                 .v = rotated[1].data(),
                                 .row_stride = dim,
                                 .dim = dim,
                                 .group_size = rotation.group_size,
                                 .clip_rank_k = rotation.clip_rank_k,
                                 .clip_rank_v = rotation.clip_rank_v};
  const PageLayout layout{
      .layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = rotation.group_size};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  if (const absl::Status status = QuantizeRun(params, run.data(), bad); !status.ok()) {
    bad->token = std::min(first_token + bad->token, layer->tokens_count - 1);
    return status;
  }
  std::vector<float> restored[] = {std::vector<float>(values), std::vector<float>(values)};
  DequantizeRunF32({.run = run.data(), .dim = dim, .group_size = rotation.group_size},
                   restored[0].data(), restored[1].data());
  const uint32_t count = std::min(kBlockTokens, layer->tokens_count - first_token);
  for (size_t i = 0; i < 2; ++i) {
    RotateRowsF32({.x = restored[i].data(),
                   .x_stride = dim,
                   .r = rotations[i],
                   .rows_count = count,
                   .dim = dim,
                   .transpose = true},
                  tensors[i] + first_token * width, width);
  }
  return absl::OkStatus();
}

// `layer` holds the tokens of `ranges`.
absl::StatusOr<LayerDump> QuantizeLayer(const LayerDump& layer,
                                        const std::vector<SequenceRange>& ranges,
                                        const LayerRotation& rotation, ThreadPool* pool) {
  LayerDump quantized = layer;
  std::vector<absl::Status> statuses(layer.kv_heads);
  pool->ParallelFor(layer.kv_heads, [&](size_t head) {
    for (uint32_t first = 0; first < layer.tokens_count && statuses[head].ok();
         first += kBlockTokens) {
      BadRow bad{};
      const absl::Status status =
          QuantizeBlock(rotation, static_cast<uint32_t>(head), first, &quantized, &bad);
      if (status.ok()) continue;
      statuses[head] = absl::Status(
          status.code(),
          absl::StrCat(bad.is_value ? "V" : "K", " of token ", OriginalToken(ranges, bad.token),
                       ", head ", head, " cannot be quantized: ", status.message()));
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

absl::StatusOr<std::vector<double>> ValueClipErrors(const LayerDump& layer,
                                                    const LayerRotation& rotation,
                                                    const SequenceRange& range,
                                                    const std::vector<uint32_t>& ranks,
                                                    ThreadPool* pool) {
  const LayerDump exact = ExtractRanges(layer, {range});
  std::vector<std::vector<float>> references(layer.query_heads);
  pool->ParallelFor(layer.query_heads, [&](size_t head) {
    TiledAttention attention;
    references[head] = Outputs(exact, static_cast<uint32_t>(head), &attention);
  });
  const size_t kept_tokens = range.tokens_count > kBlockTokens ? kBlockTokens : 0;
  const size_t kept_values = kept_tokens * layer.kv_heads * layer.head_dim;
  std::vector<double> errors;
  for (const uint32_t rank : ranks) {
    LayerRotation candidate = rotation;
    candidate.clip_rank_v = rank;
    OKV_ASSIGN_OR_RETURN(LayerDump quantized, QuantizeLayer(exact, {range}, candidate, pool));
    quantized.k = exact.k;
    std::copy_n(exact.v.begin(), kept_values, quantized.v.begin());
    std::vector<Ratio> parts(layer.query_heads);
    pool->ParallelFor(layer.query_heads, [&](size_t head) {
      TiledAttention attention;
      parts[head] =
          Compare(references[head], Outputs(quantized, static_cast<uint32_t>(head), &attention));
    });
    errors.push_back(Total(parts).value());
  }
  return errors;
}

std::vector<double> EffectiveTokens(const LayerDump& layer, const SequenceRange& range,
                                    ThreadPool* pool) {
  LayerDump signs = ExtractRanges(layer, {range});
  // Values of random signs: the expected square of an output channel is the sum of the squared
  // weights.
  std::mt19937 random(1);
  for (float& value : signs.v) value = (random() & 1) != 0 ? 1.0f : -1.0f;
  std::vector<double> tokens(layer.kv_heads);
  pool->ParallelFor(layer.kv_heads, [&](size_t head) {
    TiledAttention attention;
    const uint32_t query_head = static_cast<uint32_t>(head) * (layer.query_heads / layer.kv_heads);
    const std::vector<float> outputs = Outputs(signs, query_head, &attention);
    double squares = 0;
    for (const float x : outputs) squares += double{x} * x;
    tokens[head] = static_cast<double>(outputs.size()) / squares;
  });
  return tokens;
}

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
