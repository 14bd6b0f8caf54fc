#include "calib/history.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "proto/bf16.h"
#include "proto/format.h"

namespace okv {
namespace {

constexpr uint32_t kWindowTokens = 2048;

std::vector<SequenceRange> Pieces(const std::vector<uint32_t>& sequence_lengths,
                                  const HistoryShape& shape) {
  const uint32_t least = shape.sink_tokens + shape.recent_tokens + kBlockTokens + 1;
  std::vector<SequenceRange> pieces;
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    for (uint32_t t = 0; t < length; t += kWindowTokens) {
      const uint32_t count = std::min(kWindowTokens, length - t);
      if (count >= least) pieces.push_back({.first_token = first + t, .tokens_count = count});
    }
    first += length;
  }
  return pieces;
}

// At most `count_max` of them, evenly spaced.
std::vector<SequenceRange> Spaced(const std::vector<SequenceRange>& ranges, uint32_t count_max) {
  if (ranges.size() <= count_max) return ranges;
  std::vector<SequenceRange> kept;
  for (size_t i = 0; i < count_max; ++i) kept.push_back(ranges[i * ranges.size() / count_max]);
  return kept;
}

// out[rows, columns] = alpha a[rows, inner] b[columns, inner]^T, `out` with its own stride.
void TimesTransposed(const float* a, size_t rows, const float* b, size_t columns, size_t inner,
                     float alpha, float* out, size_t stride) {
  if (columns == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows),
              static_cast<int>(columns), static_cast<int>(inner), alpha, a, static_cast<int>(inner),
              b, static_cast<int>(inner), 0.0f, out, static_cast<int>(stride));
}

// out[rows, columns] += a[rows, inner] b[inner, columns], `a` with its own stride.
void AddProduct(const float* a, size_t stride, size_t rows, const float* b, size_t inner,
                size_t columns, float* out) {
  if (inner == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows),
              static_cast<int>(columns), static_cast<int>(inner), 1.0f, a, static_cast<int>(stride),
              b, static_cast<int>(columns), 1.0f, out, static_cast<int>(columns));
}

void Softmax(float* scores, size_t visible, size_t count) {
  const float highest = *std::max_element(scores, scores + visible);
  double sum = 0;
  for (size_t i = 0; i < visible; ++i) sum += scores[i] = std::exp(scores[i] - highest);
  const float scale = static_cast<float>(1.0 / sum);
  for (size_t i = 0; i < visible; ++i) scores[i] *= scale;
  std::fill(scores + visible, scores + count, 0.0f);
}

double Dot(const float* a, const float* b, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += double{a[i]} * b[i];
  return sum;
}

std::vector<float> Normalized(const std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  std::vector<float> shares(values.size());
  std::transform(values.begin(), values.end(), shares.begin(), [&](double value) {
    return static_cast<float>(sum > 0 ? value / sum : 1.0 / static_cast<double>(values.size()));
  });
  return shares;
}

}  // namespace

HistoryWindows SplitWindows(const std::vector<uint32_t>& sequence_lengths, uint32_t fit_max,
                            uint32_t judge_max) {
  HistoryWindows windows{.shape = {}, .fit = {}, .judge = {}};
  std::vector<SequenceRange> pieces = Pieces(sequence_lengths, windows.shape);
  if (pieces.empty()) {
    windows.shape = {.sink_tokens = 0, .recent_tokens = 0};
    pieces = Pieces(sequence_lengths, windows.shape);
  }
  if (pieces.empty()) return windows;
  const size_t judge_count = std::max<size_t>(1, pieces.size() / 4);
  const auto middle = pieces.end() - static_cast<ptrdiff_t>(judge_count);
  windows.judge = Spaced({middle, pieces.end()}, judge_max);
  windows.fit = pieces.size() == 1 ? pieces : Spaced({pieces.begin(), middle}, fit_max);
  return windows;
}

HeadHistory::HeadHistory(const LayerDump& layer, uint32_t kv_head, const HistoryShape& shape,
                         const std::vector<SequenceRange>& windows, uint32_t judge_stride)
    : shape_(shape),
      kv_head_(kv_head),
      dim_(layer.head_dim),
      group_(layer.query_heads / layer.kv_heads) {
  const auto copy = [&](const std::vector<float>& from, uint32_t heads, uint32_t head,
                        uint32_t heads_count, const SequenceRange& range) {
    std::vector<float> to;
    to.reserve(size_t{range.tokens_count} * heads_count * dim_);
    for (uint32_t t = 0; t < range.tokens_count; ++t) {
      const float* row = from.data() + (size_t{range.first_token + t} * heads + head) * dim_;
      to.insert(to.end(), row, row + size_t{heads_count} * dim_);
    }
    return to;
  };
  for (const SequenceRange& range : windows) {
    windows_.push_back({.first_token = range.first_token,
                        .tokens_count = range.tokens_count,
                        .q = copy(layer.q, layer.query_heads, kv_head * group_, group_, range),
                        .k = copy(layer.k, layer.kv_heads, kv_head, 1, range),
                        .v = copy(layer.v, layer.kv_heads, kv_head, 1, range),
                        .judged = {}});
    for (std::vector<float>* tensor : {&windows_.back().k, &windows_.back().v}) {
      for (float& value : *tensor) value = Bf16ToFloat(FloatToBf16(value));
    }
    if (judge_stride == 0) continue;
    Window& window = windows_.back();
    window.judged = Blocks(window, judge_stride);
    const size_t sink_values = size_t{shape.sink_tokens} * dim_;
    std::vector<float> p;
    for (Block& block : window.judged) {
      Attend(window, block, window.k.data() + sink_values, window.v.data() + sink_values, &p,
             &block.outputs);
    }
  }
}

std::vector<HeadHistory::Block> HeadHistory::Blocks(const Window& window, uint32_t stride) const {
  const uint32_t exact = shape_.sink_tokens + shape_.recent_tokens;
  std::vector<Block> blocks;
  for (uint32_t first = exact + kBlockTokens; first < window.tokens_count;
       first += stride * kBlockTokens) {
    const uint32_t end = std::min(first + kBlockTokens, window.tokens_count);
    blocks.push_back({.first_token = first,
                      .history_end = first - shape_.recent_tokens,
                      .tokens_count = end,
                      .rows_count = (end - first) * group_,
                      .outputs = {}});
  }
  return blocks;
}

uint32_t HeadHistory::HistoryEnd(const Window& window) const {
  return (window.tokens_count - 1) / kBlockTokens * kBlockTokens - shape_.recent_tokens;
}

void HeadHistory::Attend(const Window& window, const Block& block, const float* k_history,
                         const float* v_history, std::vector<float>* weights,
                         std::vector<float>* outputs) const {
  const size_t rows = block.rows_count;
  const size_t columns = block.tokens_count;
  const size_t sink = shape_.sink_tokens;
  const size_t history = block.history_end - sink;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
  weights->resize(rows * columns);
  outputs->assign(rows * dim_, 0.0f);
  const float* const q = window.q.data() + size_t{block.first_token} * group_ * dim_;
  float* const p = weights->data();
  // The three parts of what a query sees: first column, rows of K and of V, count.
  const struct {
    size_t first;
    const float* k;
    const float* v;
    size_t count;
  } parts[] = {{0, window.k.data(), window.v.data(), sink},
               {sink, k_history, v_history, history},
               {block.history_end, window.k.data() + size_t{block.history_end} * dim_,
                window.v.data() + size_t{block.history_end} * dim_, columns - block.history_end}};
  for (const auto& part : parts) {
    TimesTransposed(q, rows, part.k, part.count, dim_, scale, p + part.first, columns);
  }
  for (size_t row = 0; row < rows; ++row) {
    Softmax(p + row * columns, block.first_token + row / group_ + 1, columns);
  }
  for (const auto& part : parts) {
    AddProduct(p + part.first, columns, rows, part.v, part.count, dim_, outputs->data());
  }
}

RowSample HeadHistory::WindowRows(const Window& window, KvTensor tensor) const {
  RowSample sample{.dim = dim_, .rows = {}};
  const float* const data = window.tensor(tensor).data();
  std::transform(data + size_t{shape_.sink_tokens} * dim_, data + size_t{HistoryEnd(window)} * dim_,
                 std::back_inserter(sample.rows), FloatToBf16);
  return sample;
}

absl::Status HeadHistory::BadRowStatus(const absl::Status& status, const Window& window,
                                       KvTensor tensor, size_t row) const {
  return absl::Status(status.code(),
                      absl::StrCat(tensor == KvTensor::kKeys ? "K" : "V", " of token ",
                                   window.first_token + shape_.sink_tokens + row, ", head ",
                                   kv_head_, " cannot be quantized: ", status.message()));
}

RowSample HeadHistory::Rows(KvTensor tensor) const {
  RowSample sample{.dim = dim_, .rows = {}};
  for (const Window& window : windows_) {
    const RowSample part = WindowRows(window, tensor);
    sample.rows.insert(sample.rows.end(), part.rows.begin(), part.rows.end());
  }
  return sample;
}

absl::StatusOr<SquaredError> HeadHistory::CodecError(KvTensor tensor, const RowCodec& codec) const {
  SquaredError sum;
  for (const Window& window : windows_) {
    size_t bad_row = 0;
    const absl::StatusOr<SquaredError> one =
        RotatedError(WindowRows(window, tensor), codec, &bad_row);
    if (!one.ok()) return BadRowStatus(one.status(), window, tensor, bad_row);
    sum.Add(*one);
  }
  return sum;
}

RowWeights HeadHistory::Influence::Shares() const {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  return {.weights = Normalized(weights),
          .masses = Normalized(masses),
          .mean_factor = sum > 0 ? shared / sum : 1.0};
}

void HeadHistory::AddQuery(const Window& window, const float* q, const float* o, const float* p,
                           size_t count, const float* products, const double* squares,
                           size_t first_row, Influence* keys, Influence* values) const {
  const float reach = static_cast<float>(Dot(q, q, dim_) / dim_);
  const float norm = static_cast<float>(Dot(o, o, dim_));
  double mass = 0;
  for (size_t t = 0; t < count; ++t) {
    const float apart = static_cast<float>(squares[t]) + norm - 2.0f * products[t];
    const float felt = p[t] * std::sqrt(std::max(apart, 0.0f) * reach);
    keys->weights[first_row + t] += felt * felt;
    keys->masses[first_row + t] += felt;
    values->weights[first_row + t] += p[t] * p[t];
    values->masses[first_row + t] += p[t];
    mass += p[t];
  }
  values->shared += mass * mass;
  // |sum_t p_t (v_t - o)|^2 over history.
  std::vector<float> part(dim_, 0.0f);
  AddProduct(p, count, 1, window.v.data() + size_t{shape_.sink_tokens} * dim_, count, dim_,
             part.data());
  double together = 0;
  for (uint32_t c = 0; c < dim_; ++c) {
    const double away = part[c] - mass * o[c];
    together += away * away;
  }
  keys->shared += together * reach;
}

HeadWeights HeadHistory::Weights(uint32_t stride) const {
  Influence keys;
  Influence values;
  std::vector<float> p;
  std::vector<float> outputs;
  std::vector<float> products;
  const size_t sink = shape_.sink_tokens;
  for (const Window& window : windows_) {
    const size_t first_row = keys.weights.size();
    for (Influence* one : {&keys, &values}) {
      one->weights.resize(first_row + HistoryEnd(window) - sink, 0.0);
      one->masses.resize(one->weights.size(), 0.0);
    }
    const float* const v = window.v.data() + sink * dim_;
    for (const Block& block : Blocks(window, stride)) {
      Attend(window, block, window.k.data() + sink * dim_, v, &p, &outputs);
      const size_t count = block.history_end - sink;
      products.resize(block.rows_count * count);
      TimesTransposed(outputs.data(), block.rows_count, v, count, dim_, 1.0f, products.data(),
                      count);
      std::vector<double> squares(count);
      for (size_t t = 0; t < count; ++t) squares[t] = Dot(v + t * dim_, v + t * dim_, dim_);
      const float* const q = window.q.data() + size_t{block.first_token} * group_ * dim_;
      for (size_t row = 0; row < block.rows_count; ++row) {
        AddQuery(window, q + row * dim_, outputs.data() + row * dim_,
                 p.data() + row * block.tokens_count + sink, count, products.data() + row * count,
                 squares.data(), first_row, &keys, &values);
      }
    }
  }
  return {.keys = keys.Shares(), .values = values.Shares()};
}

absl::StatusOr<SquaredError> HeadHistory::Judge(KvTensor tensor, const RowCodec& codec) const {
  SquaredError total;
  std::vector<float> p;
  std::vector<float> coded;
  const size_t sink_values = size_t{shape_.sink_tokens} * dim_;
  for (const Window& window : windows_) {
    const float* const k = window.k.data() + sink_values;
    const float* const v = window.v.data() + sink_values;
    const bool keys = tensor == KvTensor::kKeys;
    size_t bad_row = 0;
    const absl::StatusOr<std::vector<float>> restored =
        RestoredRows(WindowRows(window, tensor), codec, &bad_row);
    if (!restored.ok()) return BadRowStatus(restored.status(), window, tensor, bad_row);
    for (const Block& block : window.judged) {
      Attend(window, block, keys ? restored->data() : k, keys ? v : restored->data(), &p, &coded);
      for (size_t i = 0; i < coded.size(); ++i) {
        const double error = double{coded[i]} - block.outputs[i];
        total.error += error * error;
        total.signal += double{block.outputs[i]} * block.outputs[i];
      }
    }
  }
  return total;
}

}  // namespace okv
