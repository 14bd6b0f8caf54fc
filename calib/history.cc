#include "calib/history.h"

#include <cblas.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "proto/bf16.h"
#include "proto/format.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kWindowTokens = 2048;

std::vector<SequenceRange> Pieces(const std::vector<uint32_t>& sequence_lengths,
                                  const HistoryShape& shape) {
  const uint32_t least = shape.sink_tokens + shape.recent_tokens + kBlockTokens + 1;
  std::vector<SequenceRange> pieces;
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    // The sink's rows take the place of a later piece's first ones, which the piece before it has.
    for (uint32_t t = 0; t < length; t += kWindowTokens - shape.sink_tokens) {
      const uint32_t count = std::min(kWindowTokens, length - t);
      if (count < least) break;
      pieces.push_back({.first_token = first + t, .tokens_count = count});
    }
    first += length;
  }
  return pieces;
}

// The first token of the sequence that holds `token`.
uint32_t SequenceBegin(const std::vector<uint32_t>& sequence_lengths, uint32_t token) {
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    if (token - first < length) break;
    first += length;
  }
  return first;
}

// At most `count_max` of them, evenly spaced.
std::vector<SequenceRange> Spaced(const std::vector<SequenceRange>& windows, uint32_t count_max) {
  if (windows.size() <= count_max) return windows;
  std::vector<SequenceRange> kept;
  for (size_t i = 0; i < count_max; ++i) kept.push_back(windows[i * windows.size() / count_max]);
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

// e^x for x <= 0 to 2 units in the last place, 0 below -87. Without a call, so that a loop of it
// becomes vector instructions: with std::exp the softmax is half of a judgment's time.
inline float ExpOfNegative(float x) {
  const float clamped = std::max(x, -87.0f);
  // x = (n + f) log 2 with f in [-0.5, 0.5]; e^(f log 2) by its series to the sixth power.
  const int n = static_cast<int>(clamped * 1.44269504f - 0.5f);
  const float r =
      (clamped - static_cast<float>(n) * 0.693359375f) + static_cast<float>(n) * 2.12194440e-4f;
  float series = 1.0f / 720;
  for (const float one : {1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) {
    series = series * r + one;
  }
  const float power = std::bit_cast<float>((n + 127) << 23);
  return x < -87.0f ? 0.0f : series * power;
}

void Softmax(float* scores, size_t visible, size_t count) {
  const float highest = *std::max_element(scores, scores + visible);
  for (size_t i = 0; i < visible; ++i) scores[i] = ExpOfNegative(scores[i] - highest);
  // Four sums: one would wait for itself at each step.
  double sums[4] = {};
  for (size_t i = 0; i < visible; ++i) sums[i % 4] += scores[i];
  const float scale = static_cast<float>(1.0 / ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  for (size_t i = 0; i < visible; ++i) scores[i] *= scale;
  std::fill(scores + visible, scores + count, 0.0f);
}

double Dot(const float* a, const float* b, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += double{a[i]} * b[i];
  return sum;
}

double SquaredDistance(const float* a, const float* b, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    const double apart = double{a[i]} - b[i];
    sum += apart * apart;
  }
  return sum;
}

// Adds factor x^T x to `sum`, [dim, dim].
void AddSquare(const float* x, size_t dim, double factor, std::vector<double>* sum) {
  for (size_t i = 0; i < dim; ++i) {
    const double scaled = factor * x[i];
    double* const row = sum->data() + i * dim;
    for (size_t j = 0; j < dim; ++j) row[j] += scaled * x[j];
  }
}

// A [dim, dim] matrix scaled to trace dim; empty where there is none.
std::vector<float> OfTraceDim(const std::vector<double>& matrix) {
  const size_t dim = static_cast<size_t>(std::lround(std::sqrt(matrix.size())));
  double trace = 0;
  for (size_t i = 0; i < dim; ++i) trace += matrix[i * dim + i];
  if (!(trace > 0) || !std::isfinite(trace)) return {};
  std::vector<float> scaled(matrix.size());
  std::transform(matrix.begin(), matrix.end(), scaled.begin(), [&](double value) {
    return static_cast<float>(value * static_cast<double>(dim) / trace);
  });
  return scaled;
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
  HistoryWindows windows;
  windows.fit_tokens = std::accumulate(sequence_lengths.begin(), sequence_lengths.end(), 0u);
  std::vector<SequenceRange> pieces = Pieces(sequence_lengths, windows.shape);
  if (pieces.empty()) {
    windows.shape = {.sink_tokens = 0, .recent_tokens = 0};
    pieces = Pieces(sequence_lengths, windows.shape);
  }
  if (pieces.empty()) return windows;
  if (pieces.size() == 1) {
    windows.fit = windows.judge = windows.report = pieces;
    return windows;
  }
  const size_t judge_count = std::max<size_t>(1, pieces.size() / 4);
  const size_t report_count = pieces.size() == 2 ? 0 : std::max<size_t>(1, pieces.size() / 8);
  const auto report = pieces.end() - static_cast<ptrdiff_t>(report_count);
  const auto judge = report - static_cast<ptrdiff_t>(judge_count);
  windows.fit = Spaced({pieces.begin(), judge}, fit_max);
  windows.judge = Spaced({judge, report}, judge_max);
  windows.reports_apart = report_count > 0;
  windows.report =
      windows.reports_apart ? Spaced({report, pieces.end()}, judge_max) : windows.judge;
  // The place of the sink's rows in a later piece belongs to the piece before it.
  const bool begins = SequenceBegin(sequence_lengths, judge->first_token) == judge->first_token;
  windows.fit_tokens = judge->first_token + (begins ? 0 : windows.shape.sink_tokens);
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
    const uint32_t sink = SequenceBegin(layer.sequence_lengths, range.first_token);
    std::vector<float> to;
    to.reserve(size_t{range.tokens_count} * heads_count * dim_);
    for (uint32_t t = 0; t < range.tokens_count; ++t) {
      const uint32_t token = t + (t < shape.sink_tokens ? sink : range.first_token);
      const float* row = from.data() + (size_t{token} * heads + head) * dim_;
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
          .mean_factor = sum > 0 ? shared / sum : 1.0,
          .metric = OfTraceDim(metric),
          .mean_metric = OfTraceDim(mean_metric)};
}

void HeadHistory::AddQuery(const SeenHistory& seen, Influence* keys, Influence* values) const {
  const float reach = static_cast<float>(Dot(seen.q, seen.q, dim_) / dim_);
  const double norm = Dot(seen.o, seen.o, dim_);
  double mass = 0;
  double felt_sum = 0;
  for (size_t t = 0; t < seen.count; ++t) {
    const float p = seen.p[t];
    // |v - o|^2 by its parts, unless they cancel: products have fp32's 24 bits.
    const double parts = seen.squares[t] + norm;
    double apart = parts - 2 * double{seen.products[t]};
    if (apart < parts / 1024) apart = SquaredDistance(seen.values + t * dim_, seen.o, dim_);
    const float felt = p * std::sqrt(static_cast<float>(apart) * reach);
    keys->weights[seen.first_row + t] += felt * felt;
    keys->masses[seen.first_row + t] += felt;
    values->weights[seen.first_row + t] += p * p;
    values->masses[seen.first_row + t] += p;
    felt_sum += double{p} * p * apart;
    mass += p;
  }
  values->shared += mass * mass;
  // |sum_t p_t (v_t - o)|^2 over history.
  std::vector<float> part(dim_, 0.0f);
  AddProduct(seen.p, seen.count, 1, seen.values, seen.count, dim_, part.data());
  double together = 0;
  for (uint32_t c = 0; c < dim_; ++c) {
    const double away = part[c] - mass * seen.o[c];
    together += away * away;
  }
  keys->shared += together * reach;
  AddSquare(seen.q, dim_, felt_sum, &keys->metric);
  AddSquare(seen.q, dim_, together, &keys->mean_metric);
}

HeadWeights HeadHistory::Weights(uint32_t stride) const {
  Influence keys;
  Influence values;
  keys.metric.assign(size_t{dim_} * dim_, 0.0);
  keys.mean_metric = keys.metric;
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
        AddQuery({.q = q + row * dim_,
                  .o = outputs.data() + row * dim_,
                  .p = p.data() + row * block.tokens_count + sink,
                  .values = v,
                  .products = products.data() + row * count,
                  .squares = squares.data(),
                  .count = count,
                  .first_row = first_row},
                 &keys, &values);
      }
    }
  }
  return {.keys = keys.Shares(), .values = values.Shares()};
}

absl::StatusOr<SquaredError> HeadHistory::Judge(KvTensor tensor, const RowCodec& codec) const {
  OKV_ASSIGN_OR_RETURN(const std::vector<SquaredError> windows, JudgeWindows(tensor, codec));
  SquaredError total;
  for (const SquaredError& window : windows) total.Add(window);
  return total;
}

absl::StatusOr<std::vector<SquaredError>> HeadHistory::JudgeWindows(KvTensor tensor,
                                                                    const RowCodec& codec) const {
  std::vector<SquaredError> errors;
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
    SquaredError total;
    for (const Block& block : window.judged) {
      Attend(window, block, keys ? restored->data() : k, keys ? v : restored->data(), &p, &coded);
      for (size_t i = 0; i < coded.size(); ++i) {
        const double error = double{coded[i]} - block.outputs[i];
        total.error += error * error;
        total.signal += double{block.outputs[i]} * block.outputs[i];
      }
    }
    errors.push_back(total);
  }
  return errors;
}

}  // namespace okv
