#include "calib/refine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "proto/check.h"

namespace okv {
namespace {

constexpr double kMomentum = 0.9;
constexpr double kScaleMemory = 0.98;
constexpr size_t kRankRows = 4096;

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
  HeadBatch batch(dim, options.batch_rows, options.group_size);
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
