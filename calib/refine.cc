#include "calib/refine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>

#include "proto/bf16.h"
#include "proto/check.h"

namespace okv {
namespace {

constexpr uint32_t kSeed = 20260517;  // Any: the same for every head, so that a fit repeats itself.
constexpr double kMomentum = 0.9;
constexpr double kScaleMemory = 0.98;
constexpr size_t kRankRows = 4096;

// Draws rows of one head with replacement: half of them by weight, half evenly, each with what
// makes the sums over it those over all rows on average. Thread-compatible.
class RowDeck {
 public:
  explicit RowDeck(const WeightedRows& head)
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
  // `x`: [count, dim]. `weights` sums to about 1, `masses` to 1.
  void Deal(size_t count, float* x, float* weights, float* masses) {
    std::uniform_real_distribution<double> pick(0.0, chances_.back());
    double mass = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto found = std::upper_bound(chances_.begin(), chances_.end(), pick(random_));
      const size_t row =
          std::min(static_cast<size_t>(found - chances_.begin()), chances_.size() - 1);
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
  double mean_factor() const { return weights_.mean_factor; }

 private:
  const RowSample& rows_;
  const RowWeights& weights_;
  std::mt19937_64 random_;
  std::vector<double> chances_;  // Cumulative.
};

// Where one end of a group comes from: y[channel] * sign.
struct End {
  float value;
  uint32_t channel;
  float sign;
};

// One row through the codec, in fp32 and without the rounding of its scale.
struct CodedRow {
  std::vector<float> codes;  // Over 3: an element is lo + (hi - lo) * code.
  std::vector<End> low;      // One per group.
  std::vector<End> high;
};

// The loss of one batch over one head, and its gradient. Thread-compatible.
class HeadBatch {
 public:
  HeadBatch(uint32_t dim, size_t rows_count, uint32_t group_size)
      : dim_(dim),
        rows_count_(rows_count),
        group_size_(group_size),
        x_(rows_count * dim),
        y_(x_.size()),
        errors_(x_.size()),
        weights_(rows_count),
        masses_(rows_count),
        magnitudes_(dim),
        mean_(dim),
        coded_(rows_count) {
    for (CodedRow& row : coded_) {
      row.codes.resize(dim);
      row.low.resize(dim / group_size);
      row.high.resize(dim / group_size);
    }
  }

  void Draw(RowDeck* deck) {
    deck->Deal(rows_count_, x_.data(), weights_.data(), masses_.data());
    mean_factor_ = deck->mean_factor();
  }
  // The batch's loss at `rotation`, [dim, dim]; Gradient is about the last one asked for.
  double Loss(const std::vector<float>& rotation, uint32_t clip_rank);
  // Adds scale times the loss' gradient by the rotation to `sum`.
  void AddGradient(double scale, std::vector<float>* sum);

 private:
  void Code(const float* y, uint32_t clip_rank, CodedRow* coded, float* errors);
  // d loss / d y of one row over y, from d loss / d error in `by_error`.
  void Back(const CodedRow& coded, const float* by_error, float* by_y) const;

  const uint32_t dim_;
  const size_t rows_count_;
  const uint32_t group_size_;
  double mean_factor_ = 1;
  std::vector<float> x_;       // [rows_count, dim]
  std::vector<float> y_;       // The same, rotated; then the gradient by it.
  std::vector<float> errors_;  // The same; then the gradient by them.
  std::vector<float> weights_;
  std::vector<float> masses_;
  std::vector<float> magnitudes_;
  std::vector<double> mean_;  // Of the errors, by mass.
  std::vector<CodedRow> coded_;
};

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

void HeadBatch::Back(const CodedRow& coded, const float* by_error, float* by_y) const {
  std::transform(by_error, by_error + dim_, by_y, [](float v) { return -v; });
  for (uint32_t group = 0; group < coded.low.size(); ++group) {
    const uint32_t first = group * group_size_;
    float by_low = 0;
    float by_high = 0;
    for (uint32_t c = first; c < first + group_size_; ++c) {
      by_low += by_error[c] * (1.0f - coded.codes[c]);
      by_high += by_error[c] * coded.codes[c];
    }
    by_y[coded.low[group].channel] += by_low * coded.low[group].sign;
    by_y[coded.high[group].channel] += by_high * coded.high[group].sign;
  }
}

double HeadBatch::Loss(const std::vector<float>& rotation, uint32_t clip_rank) {
  MultiplyRows(x_.data(), rows_count_, rotation.data(), dim_, y_.data());
  std::fill(mean_.begin(), mean_.end(), 0.0);
  for (size_t row = 0; row < rows_count_; ++row) {
    float* const errors = errors_.data() + row * dim_;
    Code(y_.data() + row * dim_, clip_rank, &coded_[row], errors);
    for (uint32_t c = 0; c < dim_; ++c) mean_[c] += double{masses_[row]} * errors[c];
  }
  double loss = 0;
  for (size_t row = 0; row < rows_count_; ++row) {
    const float* const errors = errors_.data() + row * dim_;
    double squares = 0;
    for (uint32_t c = 0; c < dim_; ++c) squares += (errors[c] - mean_[c]) * (errors[c] - mean_[c]);
    loss += weights_[row] * squares;
  }
  for (const double mean : mean_) loss += mean_factor_ * mean * mean;
  return loss;
}

void HeadBatch::AddGradient(double scale, std::vector<float>* sum) {
  // By m: 2 n m - sum_t 2 w_t (e_t - m); it reaches error t by its mass.
  std::vector<float> by_mean(dim_);
  for (uint32_t c = 0; c < dim_; ++c) {
    double pull = mean_factor_ * mean_[c];
    for (size_t row = 0; row < rows_count_; ++row) {
      pull -= weights_[row] * (errors_[row * dim_ + c] - mean_[c]);
    }
    by_mean[c] = static_cast<float>(2 * scale * pull);
  }
  for (size_t row = 0; row < rows_count_; ++row) {
    float* const errors = errors_.data() + row * dim_;
    const float factor = static_cast<float>(2 * scale * weights_[row]);
    for (uint32_t c = 0; c < dim_; ++c) {
      errors[c] = factor * (errors[c] - static_cast<float>(mean_[c])) + masses_[row] * by_mean[c];
    }
    Back(coded_[row], errors, y_.data() + row * dim_);
  }
  AddProductOfTransposed(x_.data(), y_.data(), rows_count_, dim_, sum->data());
}

std::vector<float> ToFloat(const Matrix& matrix) {
  std::vector<float> rounded(matrix.size());
  std::transform(matrix.begin(), matrix.end(), rounded.begin(),
                 [](double v) { return static_cast<float>(v); });
  return rounded;
}

// Momentum over gradients of a running scale. Thread-compatible.
class Descent {
 public:
  Descent(size_t size, const RefineOptions& options) : options_(options), momentum_(size, 0.0) {}

  // The angles to turn by in this step, skew. False: there is no finite one, or none left.
  bool Step(const Matrix& gradient, Matrix* angles) {
    double square = 0;
    for (size_t i = 0; i < gradient.size(); ++i) {
      momentum_[i] = kMomentum * momentum_[i] + (1 - kMomentum) * gradient[i];
      square += gradient[i] * gradient[i];
    }
    mean_square_ = kScaleMemory * mean_square_ +
                   (1 - kScaleMemory) * square / static_cast<double>(gradient.size());
    const double progress = static_cast<double>(steps_done_) / options_.steps;
    ++steps_done_;
    const double root = std::sqrt(mean_square_ / (1 - std::pow(kScaleMemory, steps_done_)));
    if (!std::isfinite(root) || root == 0) return false;
    const double rate = options_.step_size * 0.5 * (1 + std::cos(std::numbers::pi * progress)) /
                        (1 - std::pow(kMomentum, steps_done_)) / root;
    angles->resize(momentum_.size());
    std::transform(momentum_.begin(), momentum_.end(), angles->begin(),
                   [&](double m) { return -rate * m; });
    return true;
  }

 private:
  const RefineOptions& options_;
  Matrix momentum_;
  double mean_square_ = 0;
  uint32_t steps_done_ = 0;
};

}  // namespace

uint32_t BestClipRank(const Matrix& rotation, absl::Span<const WeightedRows> heads,
                      uint32_t group_size, const std::vector<uint32_t>& ranks) {
  OKV_CHECK(!heads.empty() && !ranks.empty());
  const std::vector<float> rounded = ToFloat(rotation);
  std::vector<double> losses(ranks.size(), 0.0);
  for (const WeightedRows& head : heads) {
    RowDeck deck(head);
    HeadBatch batch(head.rows->dim, kRankRows, group_size);
    batch.Draw(&deck);
    double first = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const double loss = batch.Loss(rounded, ranks[i]);
      if (i == 0) first = loss > 0 && std::isfinite(loss) ? loss : 1;
      losses[i] += std::isfinite(loss) ? loss / first : std::numeric_limits<double>::infinity();
    }
  }
  return ranks[static_cast<size_t>(std::min_element(losses.begin(), losses.end()) -
                                   losses.begin())];
}

Matrix RefineRotation(const Matrix& rotation, absl::Span<const WeightedRows> heads,
                      uint32_t clip_rank, const RefineOptions& options) {
  OKV_CHECK(!heads.empty());
  const uint32_t dim = heads[0].rows->dim;
  OKV_CHECK(rotation.size() == size_t{dim} * dim && clip_rank < dim);
  std::vector<RowDeck> decks;
  for (const WeightedRows& head : heads) decks.emplace_back(head);
  HeadBatch batch(dim, std::max<size_t>(1, options.batch_rows / heads.size()), options.group_size);
  Descent descent(rotation.size(), options);
  Matrix turned = rotation;
  Matrix angles;
  std::vector<double> first_losses(heads.size());
  std::vector<float> gradient(rotation.size());
  for (uint32_t step = 0; step < options.steps; ++step) {
    const std::vector<float> rounded = ToFloat(turned);
    std::fill(gradient.begin(), gradient.end(), 0.0f);
    for (size_t head = 0; head < heads.size(); ++head) {
      batch.Draw(&decks[head]);
      const double loss = batch.Loss(rounded, clip_rank);
      if (step == 0) first_losses[head] = loss;
      if (!std::isfinite(loss)) return rotation;
      if (first_losses[head] > 0) batch.AddGradient(1 / first_losses[head], &gradient);
    }
    if (!descent.Step(SkewGradient(turned, gradient, dim), &angles)) return rotation;
    turned = TurnByCayley(turned, angles, dim);
  }
  return turned;
}

}  // namespace okv
