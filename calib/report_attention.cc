#include "calib/report_attention.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"

namespace okv {
namespace {

// The first token of the sequence that `token` is in.
uint32_t SequenceBegin(const std::vector<uint32_t>& sequence_lengths, uint32_t token) {
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    if (token < first + length) break;
    first += length;
  }
  return first;
}

// Heads from `head` up, `count` of them, of [tokens, heads, dim] over a range.
std::vector<float> CopyHeads(const std::vector<float>& tensor, uint32_t heads, uint32_t head,
                             uint32_t count, uint32_t dim, const SequenceRange& range) {
  std::vector<float> rows;
  rows.reserve(size_t{range.tokens_count} * count * dim);
  for (uint32_t t = 0; t < range.tokens_count; ++t) {
    const float* row = tensor.data() + (size_t{range.first_token + t} * heads + head) * dim;
    rows.insert(rows.end(), row, row + size_t{count} * dim);
  }
  return rows;
}

void RoundRows(std::vector<float>* rows) {
  for (float& value : *rows) value = Bf16ToFloat(FloatToBf16(value));
}

// A matrix in memory: row i at data + i * stride.
struct View {
  const float* data;
  size_t stride;
};

// out[rows, columns] = alpha a b^T, a [rows, inner], b [columns, inner].
void TimesTransposed(View a, size_t rows, View b, size_t columns, size_t inner, float alpha,
                     float* out, size_t out_stride) {
  if (columns == 0) return;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows),
              static_cast<int>(columns), static_cast<int>(inner), alpha, a.data,
              static_cast<int>(a.stride), b.data, static_cast<int>(b.stride), 0.0f, out,
              static_cast<int>(out_stride));
}

// out[rows, columns] = beta out + a b, a [rows, inner], b [inner, columns].
void Times(View a, size_t rows, View b, size_t inner, size_t columns, float beta, float* out) {
  OKV_CHECK(inner > 0);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows),
              static_cast<int>(columns), static_cast<int>(inner), 1.0f, a.data,
              static_cast<int>(a.stride), b.data, static_cast<int>(b.stride), beta, out,
              static_cast<int>(columns));
}

double SquaredNorm(const float* values, size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += double{values[i]} * values[i];
  return sum;
}

// One window of one KV head. Lives for one call.
class WindowComparison {
 public:
  WindowComparison(const LayerDump& layer, uint32_t kv_head, const HistoryShape& shape,
                   const SequenceRange& range)
      : shape_(shape),
        dim_(layer.head_dim),
        group_(layer.query_heads / layer.kv_heads),
        tokens_count_(range.tokens_count),
        q_(CopyHeads(layer.q, layer.query_heads, kv_head * group_, group_, dim_, range)),
        k_(CopyHeads(layer.k, layer.kv_heads, kv_head, 1, dim_, range)),
        v_(CopyHeads(layer.v, layer.kv_heads, kv_head, 1, dim_, range)) {
    RoundRows(&k_);
    RoundRows(&v_);
  }

  // Rows that are history for some query of the window.
  size_t history_rows() const {
    return (tokens_count_ - 1) / kBlockTokens * kBlockTokens - shape_.recent_tokens -
           shape_.sink_tokens;
  }

  // Adds what restored rows, from `first_row` of each, do to every stride-th block's queries.
  void AddErrors(absl::Span<const RestoredHistory> restored, size_t first_row, uint32_t stride,
                 std::vector<AttentionErrors>* errors);

 private:
  // A block's queries: rows of q_, and the columns that they see.
  struct Block {
    size_t first_token;
    size_t rows_count;
    size_t columns_count;  // Tokens.
    size_t history_count;  // Columns from shape_.sink_tokens up.
  };

  void ComputeExact(const Block& block);
  // Softmax in place; log_sums gets the log of each row's sum of exponentials.
  void Softmax(const Block& block, std::vector<float>* scores, std::vector<double>* log_sums) const;
  // `value_errors`: restored minus exact history rows of the whole window.
  void AddBlock(const Block& block, const float* restored_k, const float* value_errors,
                AttentionErrors* errors);

  const HistoryShape shape_;
  const uint32_t dim_;
  const uint32_t group_;
  const uint32_t tokens_count_;
  const std::vector<float> q_;  // [tokens * group, dim]
  std::vector<float> k_;        // [tokens, dim]
  std::vector<float> v_;        // [tokens, dim]

  // Of the block at hand: [rows_count, columns_count], but for the last.
  std::vector<float> scores_;
  std::vector<float> weights_;
  std::vector<float> coded_scores_;
  std::vector<float> coded_weights_;
  std::vector<double> log_sums_;  // [rows_count]
  std::vector<double> coded_log_sums_;
  std::vector<float> outputs_;  // [rows_count, dim]
};

void WindowComparison::Softmax(const Block& block, std::vector<float>* scores,
                               std::vector<double>* log_sums) const {
  log_sums->resize(block.rows_count);
  for (size_t row = 0; row < block.rows_count; ++row) {
    float* const p = scores->data() + row * block.columns_count;
    const size_t visible = block.first_token + row / group_ + 1;
    const float highest = *std::max_element(p, p + visible);
    double sum = 0;
    for (size_t i = 0; i < visible; ++i) sum += p[i] = std::exp(p[i] - highest);
    const float scale = static_cast<float>(1.0 / sum);
    for (size_t i = 0; i < visible; ++i) p[i] *= scale;
    std::fill(p + visible, p + block.columns_count, 0.0f);
    (*log_sums)[row] = std::log(sum) + highest;
  }
}

void WindowComparison::ComputeExact(const Block& block) {
  const size_t columns = block.columns_count;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
  scores_.resize(block.rows_count * columns);
  outputs_.resize(block.rows_count * dim_);
  TimesTransposed({q_.data() + block.first_token * group_ * dim_, dim_}, block.rows_count,
                  {k_.data(), dim_}, columns, dim_, scale, scores_.data(), columns);
  weights_ = scores_;
  Softmax(block, &weights_, &log_sums_);
  Times({weights_.data(), columns}, block.rows_count, {v_.data(), dim_}, columns, dim_, 0.0f,
        outputs_.data());
}

void WindowComparison::AddBlock(const Block& block, const float* restored_k,
                                const float* value_errors, AttentionErrors* errors) {
  const size_t rows = block.rows_count;
  const size_t columns = block.columns_count;
  const size_t sink = shape_.sink_tokens;
  const size_t history = block.history_count;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
  coded_scores_ = scores_;
  TimesTransposed({q_.data() + block.first_token * group_ * dim_, dim_}, rows, {restored_k, dim_},
                  history, dim_, scale, coded_scores_.data() + sink, columns);
  coded_weights_ = coded_scores_;
  Softmax(block, &coded_weights_, &coded_log_sums_);
  // KL = sum p (s - s^) - lse(s) + lse(s^); s and s^ differ in history alone.
  for (size_t row = 0; row < rows; ++row) {
    const size_t first = row * columns + sink;
    double sum = coded_log_sums_[row] - log_sums_[row];
    for (size_t i = first; i < first + history; ++i) {
      sum += double{weights_[i]} * (double{scores_[i]} - coded_scores_[i]);
    }
    errors->kl_sum += std::max(sum, 0.0);  // Rounding may give -1e-9.
  }
  errors->queries_count += rows;

  std::vector<float> error(rows * dim_);
  const double signal = SquaredNorm(outputs_.data(), outputs_.size());
  Times({weights_.data() + sink, columns}, rows, {value_errors, dim_}, history, dim_, 0.0f,
        error.data());
  errors->output_by_v.Add({.error = SquaredNorm(error.data(), error.size()), .signal = signal});
  std::transform(outputs_.begin(), outputs_.end(), error.begin(), [](float x) { return -x; });
  Times({coded_weights_.data(), columns}, rows, {v_.data(), dim_}, columns, dim_, 1.0f,
        error.data());
  errors->output_by_k.Add({.error = SquaredNorm(error.data(), error.size()), .signal = signal});
  Times({coded_weights_.data() + sink, columns}, rows, {value_errors, dim_}, history, dim_, 1.0f,
        error.data());
  errors->output.Add({.error = SquaredNorm(error.data(), error.size()), .signal = signal});
}

void WindowComparison::AddErrors(absl::Span<const RestoredHistory> restored, size_t first_row,
                                 uint32_t stride, std::vector<AttentionErrors>* errors) {
  const size_t first_value = first_row * dim_;
  const size_t values_count = history_rows() * dim_;
  const float* const v = v_.data() + size_t{shape_.sink_tokens} * dim_;
  std::vector<std::vector<float>> value_errors;
  for (const RestoredHistory& one : restored) {
    std::vector<float> differences(values_count);
    for (size_t i = 0; i < values_count; ++i) differences[i] = one.v[first_value + i] - v[i];
    value_errors.push_back(std::move(differences));
  }
  const uint32_t exact = shape_.sink_tokens + shape_.recent_tokens;
  for (uint32_t first = exact + kBlockTokens; first < tokens_count_;
       first += stride * kBlockTokens) {
    const uint32_t end = std::min(first + kBlockTokens, tokens_count_);
    const Block block{.first_token = first,
                      .rows_count = size_t{end - first} * group_,
                      .columns_count = end,
                      .history_count = first - exact};
    ComputeExact(block);
    for (size_t i = 0; i < restored.size(); ++i) {
      AddBlock(block, restored[i].k.data() + first_value, value_errors[i].data(), &(*errors)[i]);
    }
  }
}

}  // namespace

void AttentionErrors::Add(const AttentionErrors& other) {
  queries_count += other.queries_count;
  kl_sum += other.kl_sum;
  output_by_k.Add(other.output_by_k);
  output_by_v.Add(other.output_by_v);
  output.Add(other.output);
}

LayerDump ExtractWindows(const LayerDump& layer, const HistoryShape& shape,
                         const std::vector<SequenceRange>& windows) {
  LayerDump part = ExtractRanges(layer, windows);
  const auto put_sinks = [&](const std::vector<float>& from, uint32_t heads,
                             std::vector<float>* to) {
    const size_t width = size_t{heads} * layer.head_dim;
    size_t first = 0;
    for (const SequenceRange& window : windows) {
      const size_t sink = SequenceBegin(layer.sequence_lengths, window.first_token);
      std::copy_n(from.data() + sink * width, shape.sink_tokens * width,
                  to->data() + first * width);
      first += window.tokens_count;
    }
  };
  put_sinks(layer.q, layer.query_heads, &part.q);
  put_sinks(layer.k, layer.kv_heads, &part.k);
  put_sinks(layer.v, layer.kv_heads, &part.v);
  return part;
}

std::vector<AttentionErrors> CompareAttention(const LayerDump& windows, uint32_t kv_head,
                                              const ComparedQueries& queries,
                                              absl::Span<const RestoredHistory> restored) {
  std::vector<AttentionErrors> errors(restored.size());
  uint32_t first_token = 0;
  size_t first_row = 0;
  for (const uint32_t tokens_count : windows.sequence_lengths) {
    WindowComparison window(windows, kv_head, queries.shape,
                            {.first_token = first_token, .tokens_count = tokens_count});
    const size_t values_end = (first_row + window.history_rows()) * windows.head_dim;
    for (const RestoredHistory& one : restored) {
      OKV_CHECK(one.k.size() >= values_end && one.v.size() >= values_end);
    }
    window.AddErrors(restored, first_row, queries.stride, &errors);
    first_token += tokens_count;
    first_row += window.history_rows();
  }
  return errors;
}

}  // namespace okv
