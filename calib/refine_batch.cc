#include "calib/refine_batch.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "calib/linalg.h"
#include "proto/bf16.h"
#include "proto/check.h"

namespace okv {
namespace {

constexpr uint32_t kSeed = 20260517;  // Any: the same for every head, so that a fit repeats itself.

// R^T (A R)'s diagonal, from A R.
std::vector<double> DiagonalOf(const std::vector<float>& rotation,
                               const std::vector<float>& times_rotation, size_t dim) {
  std::vector<double> diagonal(dim, 0.0);
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      diagonal[j] += double{rotation[i * dim + j]} * times_rotation[i * dim + j];
    }
  }
  return diagonal;
}

}  // namespace

RowDeck::RowDeck(const WeightedRows& head)
    : rows_(*head.rows), weights_(*head.weights), random_(kSeed) {
  const size_t count = rows_.rows.size() / rows_.dim;
  OKV_CHECK(count > 0 && weights_.weights.size() == count && weights_.masses.size() == count);
  chances_.resize(count);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) {
    sum += 0.5 * weights_.weights[i] + 0.5 / static_cast<double>(count);
    chances_[i] = sum;
  }
}

void RowDeck::Deal(size_t count, float* x, float* weights, float* masses) {
  std::uniform_real_distribution<double> pick(0.0, chances_.back());
  double mass = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto found = std::upper_bound(chances_.begin(), chances_.end(), pick(random_));
    const size_t row = std::min(static_cast<size_t>(found - chances_.begin()), chances_.size() - 1);
    const uint16_t* from = rows_.rows.data() + row * rows_.dim;
    std::transform(from, from + rows_.dim, x + i * rows_.dim, Bf16ToFloat);
    const double chance = chances_[row] - (row == 0 ? 0.0 : chances_[row - 1]);
    weights[i] = static_cast<float>(weights_.weights[row] / chance / static_cast<double>(count));
    masses[i] = static_cast<float>(weights_.masses[row] / chance);
    mass += masses[i];
  }
  if (mass == 0) mass = 1;
  for (size_t i = 0; i < count; ++i) masses[i] = static_cast<float>(masses[i] / mass);
}

HeadBatch::HeadBatch(uint32_t dim, size_t rows_count, uint32_t group_size)
    : dim_(dim),
      rows_count_(rows_count),
      group_size_(group_size),
      x_(rows_count * dim),
      y_(x_.size()),
      errors_(x_.size()),
      weights_(rows_count),
      masses_(rows_count),
      magnitudes_(dim),
      coded_(rows_count),
      by_ends_(2 * (dim / group_size)) {
  for (CodedRow& row : coded_) {
    row.codes.resize(dim);
    row.low.resize(dim / group_size);
    row.high.resize(dim / group_size);
  }
}

void HeadBatch::Draw(RowDeck* deck) {
  deck->Deal(rows_count_, x_.data(), weights_.data(), masses_.data());
  head_ = &deck->row_weights();
  weights_sum_ = 0;
  double s = 0;
  for (size_t row = 0; row < rows_count_; ++row) {
    weights_sum_ += weights_[row];
    s += double{masses_[row]} * masses_[row];
  }
  // With half of the mass in one row the rest says nothing about the mean of all.
  own_ = s < 0.5 ? 1 : 0;
  unbiased_ = 1 / (1 - own_ * s);
}

void HeadBatch::Code(const float* y, uint32_t clip_rank, CodedRow* coded, float* errors) {
  if (!std::all_of(y, y + dim_, [](float v) { return std::isfinite(v); })) {
    // Nothing to order or to code; an infinite loss tells.
    std::fill(errors, errors + dim_, std::numeric_limits<float>::infinity());
    return;
  }
  End threshold{.value = std::numeric_limits<float>::infinity(), .channel = 0, .sign = 0};
  if (clip_rank > 0) {
    std::transform(y, y + dim_, magnitudes_.begin(), [](float v) { return std::abs(v); });
    const auto kth = magnitudes_.begin() + clip_rank;
    std::nth_element(magnitudes_.begin(), kth, magnitudes_.end());
    while (std::abs(y[threshold.channel]) != *kth) ++threshold.channel;
    threshold.value = *kth;
    threshold.sign = std::signbit(y[threshold.channel]) ? -1.0f : 1.0f;
  }
  for (uint32_t group = 0; group < coded->low.size(); ++group) {
    const uint32_t first = group * group_size_;
    const float* const begin = y + first;
    const float* const end = begin + group_size_;
    const auto [least, most] = std::minmax_element(begin, end);
    // An end that is clipped hangs on the threshold's channel, from either side.
    const auto clipped = [&](const float* at) -> End {
      if (*at > threshold.value) return threshold;
      if (*at < -threshold.value) return {-threshold.value, threshold.channel, -threshold.sign};
      return {*at, static_cast<uint32_t>(at - y), 1.0f};
    };
    const End low = coded->low[group] = clipped(least);
    const End high = coded->high[group] = clipped(most);
    const float range = high.value - low.value;
    // A range that is infinite or has no finite inverse gives codes 0.
    const bool usable = range >= std::numeric_limits<float>::min() && std::isfinite(range);
    const float per_step = usable ? 3.0f / range : 0.0f;
    for (uint32_t c = first; c < first + group_size_; ++c) {
      const float steps =
          usable ? (std::clamp(y[c], low.value, high.value) - low.value) * per_step : 0.0f;
      // To the nearest; unlike std::nearbyint a vector instruction of every x86-64.
      coded->codes[c] = static_cast<float>(static_cast<int>(steps + 0.5f)) * (1.0f / 3.0f);
      errors[c] = low.value + range * coded->codes[c] - y[c];
    }
  }
}

void HeadBatch::RotateMetrics() {
  const auto of_basis = [&](const std::vector<float>& metric, std::vector<float>* product) {
    product->resize(metric.size());
    if (metric.empty()) return std::vector<double>(dim_, 1.0);
    MultiplyRows(metric.data(), dim_, rotation_.data(), dim_, product->data());
    return DiagonalOf(rotation_, *product, dim_);
  };
  diagonal_ = of_basis(head_->metric, &metric_of_basis_);
  mean_diagonal_ = of_basis(head_->mean_metric, &mean_of_basis_);
  pulled_mean_ = mean_;
  if (mean_of_basis_.empty()) return;
  std::fill(pulled_mean_.begin(), pulled_mean_.end(), 0.0);
  for (size_t i = 0; i < dim_; ++i) {
    double through = 0;
    for (size_t j = 0; j < dim_; ++j) through += mean_of_basis_[i * dim_ + j] * mean_[j];
    for (size_t j = 0; j < dim_; ++j) pulled_mean_[j] += through * rotation_[i * dim_ + j];
  }
}

double HeadBatch::Loss(const std::vector<float>& rotation, uint32_t clip_rank) {
  rotation_ = rotation;
  MultiplyRows(x_.data(), rows_count_, rotation.data(), dim_, y_.data());
  for (std::vector<double>* sum : {&mean_, &weighted_, &squares_, &mass_squares_}) {
    sum->assign(dim_, 0.0);
  }
  for (size_t row = 0; row < rows_count_; ++row) {
    float* const errors = errors_.data() + row * dim_;
    Code(y_.data() + row * dim_, clip_rank, &coded_[row], errors);
    const double weight = weights_[row];
    const double mass = masses_[row];
    for (uint32_t c = 0; c < dim_; ++c) {
      const double error = errors[c];
      mean_[c] += mass * error;
      weighted_[c] += weight * error;
      squares_[c] += weight * error * error;
      mass_squares_[c] += mass * mass * error * error;
    }
  }
  RotateMetrics();
  double loss = 0;
  double shared = 0;
  for (uint32_t c = 0; c < dim_; ++c) {
    // What D of the gradient is too: sum_t w_t (e_t - m)^2.
    squares_[c] += mean_[c] * (weights_sum_ * mean_[c] - 2 * weighted_[c]);
    loss += diagonal_[c] * squares_[c];
    shared += mean_[c] * pulled_mean_[c] - own_ * mean_diagonal_[c] * mass_squares_[c];
  }
  return loss + head_->mean_factor * unbiased_ * shared;
}

void HeadBatch::Back(const CodedRow& coded, const float* by_square, const float* by_mean,
                     float* y) {
  for (uint32_t group = 0; group < coded.low.size(); ++group) {
    const uint32_t first = group * group_size_;
    const float low = coded.low[group].value;
    const float high = coded.high[group].value;
    float by_low = 0;
    float by_high = 0;
    for (uint32_t c = first; c < first + group_size_; ++c) {
      const float below = y[c] < low ? by_mean[c] : 0.0f;
      const float above = y[c] > high ? by_mean[c] : 0.0f;
      by_low += by_square[c] * (1.0f - coded.codes[c]) + below;
      by_high += by_square[c] * coded.codes[c] + above;
      y[c] = -(by_square[c] + below + above);
    }
    by_ends_[2 * group] = by_low;
    by_ends_[2 * group + 1] = by_high;
  }
  // Last: a clipped end's channel may lie in another group.
  for (uint32_t group = 0; group < coded.low.size(); ++group) {
    const End& low = coded.low[group];
    const End& high = coded.high[group];
    y[low.channel] += by_ends_[2 * group] * low.sign;
    y[high.channel] += by_ends_[2 * group + 1] * high.sign;
  }
}

void HeadBatch::AddGradient(double scale, std::vector<float>* sum) {
  const double factor = head_->mean_factor * unbiased_;
  std::vector<float> by_mean(dim_);
  std::vector<float> by_square(dim_);
  for (size_t row = 0; row < rows_count_; ++row) {
    const double weight = weights_[row];
    const double mass = masses_[row];
    const float* const errors = errors_.data() + row * dim_;
    for (uint32_t c = 0; c < dim_; ++c) {
      const double centered = mass * (weights_sum_ * mean_[c] - weighted_[c]) - weight * mean_[c];
      const double shared = mass * (pulled_mean_[c] - own_ * mass * mean_diagonal_[c] * errors[c]);
      by_square[c] = static_cast<float>(2 * scale * weight * diagonal_[c] * errors[c]);
      by_mean[c] = static_cast<float>(2 * scale * (diagonal_[c] * centered + factor * shared));
    }
    Back(coded_[row], by_square.data(), by_mean.data(), y_.data() + row * dim_);
  }
  AddProductOfTransposed(x_.data(), y_.data(), rows_count_, dim_, sum->data());
  // The metrics turn with R: d (R^T W R)_cc is 2 (W R)_ic in R_ic.
  if (!metric_of_basis_.empty()) {
    for (size_t i = 0; i < size_t{dim_} * dim_; ++i) {
      (*sum)[i] += static_cast<float>(2 * scale * metric_of_basis_[i] * squares_[i % dim_]);
    }
  }
  if (mean_of_basis_.empty()) return;
  for (size_t i = 0; i < dim_; ++i) {
    const float* const row = mean_of_basis_.data() + i * dim_;
    double through = 0;
    for (size_t c = 0; c < dim_; ++c) through += row[c] * mean_[c];
    for (size_t c = 0; c < dim_; ++c) {
      (*sum)[i * dim_ + c] += static_cast<float>(
          2 * scale * factor * (through * mean_[c] - own_ * row[c] * mass_squares_[c]));
    }
  }
}

}  // namespace okv
