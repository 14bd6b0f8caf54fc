#include "calib/choose.h"

#include <algorithm>
#include <random>
#include <utility>

#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kSeed = 20260517;  // Any: the same for every head, so that a fit repeats itself.
constexpr int kRandomSigns = 16;
constexpr int kFlipRounds = 2;

using Signs = std::vector<double>;

std::vector<uint16_t> SignedRotation(const Matrix& basis, const Signs& signs) {
  const uint32_t dim = static_cast<uint32_t>(signs.size());
  Matrix vectors = basis;
  for (size_t i = 0; i < vectors.size(); ++i) vectors[i] *= signs[i % dim];
  return RoundToBf16(RotationFromEigenvectors(vectors, dim));
}

// The error of one rotation over all heads that share it. Thread-compatible.
class Judge {
 public:
  Judge(const std::vector<HeadRows>& heads, uint32_t group_size)
      : heads_(heads), group_size_(group_size) {}

  absl::StatusOr<double> Fit(const std::vector<uint16_t>& rotation, uint32_t clip_rank) const {
    return Sum(&HeadRows::fit, rotation, clip_rank);
  }
  absl::StatusOr<double> HeldOut(const std::vector<uint16_t>& rotation, uint32_t clip_rank) const {
    return Sum(&HeadRows::held_out, rotation, clip_rank);
  }

 private:
  absl::StatusOr<double> Sum(RowSample HeadRows::*sample, const std::vector<uint16_t>& rotation,
                             uint32_t clip_rank) const {
    double sum = 0;
    for (const HeadRows& head : heads_) {
      OKV_ASSIGN_OR_RETURN(
          const double error,
          RowError(head.*sample,
                   {.rotation = rotation.data(), .group_size = group_size_, .clip_rank = clip_rank},
                   head.objective));
      sum += error;
    }
    return sum;
  }

  const std::vector<HeadRows>& heads_;
  const uint32_t group_size_;
};

// The rank with the least error on the rows to fit.
absl::StatusOr<uint32_t> BestRank(const Judge& judge, const std::vector<uint16_t>& rotation,
                                  const std::vector<uint32_t>& ranks) {
  if (ranks.size() == 1) return ranks[0];
  uint32_t best_rank = ranks[0];
  double best = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(const double error, judge.Fit(rotation, ranks[i]));
    if (i == 0 || error < best) {
      best = error;
      best_rank = ranks[i];
    }
  }
  return best_rank;
}

absl::StatusOr<Signs> FitSigns(const Judge& judge, const Matrix& basis, uint32_t dim,
                               uint32_t clip_rank) {
  Signs best_signs(dim, 1.0);
  OKV_ASSIGN_OR_RETURN(double best, judge.Fit(SignedRotation(basis, best_signs), clip_rank));
  std::mt19937 random(kSeed);
  for (int i = 0; i < kRandomSigns; ++i) {
    Signs signs(dim);
    for (double& sign : signs) sign = (random() & 1) != 0 ? 1.0 : -1.0;
    OKV_ASSIGN_OR_RETURN(const double error, judge.Fit(SignedRotation(basis, signs), clip_rank));
    if (error < best) {
      best = error;
      best_signs = std::move(signs);
    }
  }
  for (int round = 0; round < kFlipRounds; ++round) {
    bool improved = false;
    for (uint32_t rank = 0; rank < dim; ++rank) {
      Signs signs = best_signs;
      signs[rank] = -signs[rank];
      OKV_ASSIGN_OR_RETURN(const double error, judge.Fit(SignedRotation(basis, signs), clip_rank));
      if (error < best) {
        best = error;
        best_signs = std::move(signs);
        improved = true;
      }
    }
    if (!improved) break;
  }
  return best_signs;
}

}  // namespace

absl::StatusOr<RotationChoice> ChooseRotation(const std::vector<Matrix>& bases,
                                              const std::vector<HeadRows>& heads,
                                              const ChooseOptions& options) {
  OKV_CHECK(!bases.empty() && !heads.empty() && !options.clip_ranks.empty());
  const uint32_t dim = heads[0].fit.dim;
  RotationChoice choice;
  if (bases.size() == 1 && !options.fit_signs) {
    choice.rotation = RoundToBf16(RotationFromEigenvectors(bases[0], dim));
    return choice;
  }
  const Judge judge(heads, options.group_size);
  uint32_t clip_rank = 0;
  for (size_t i = 0; i < bases.size(); ++i) {
    std::vector<uint16_t> rotation = RoundToBf16(RotationFromEigenvectors(bases[i], dim));
    OKV_ASSIGN_OR_RETURN(const uint32_t rank, BestRank(judge, rotation, options.clip_ranks));
    OKV_ASSIGN_OR_RETURN(const double error, judge.HeldOut(rotation, rank));
    if (i > 0 && error >= choice.error) continue;
    choice.basis = i;
    choice.error = choice.error_plain = error;
    choice.rotation = std::move(rotation);
    clip_rank = rank;
  }
  if (!options.fit_signs) return choice;
  OKV_ASSIGN_OR_RETURN(const Signs signs, FitSigns(judge, bases[choice.basis], dim, clip_rank));
  std::vector<uint16_t> rotation = SignedRotation(bases[choice.basis], signs);
  OKV_ASSIGN_OR_RETURN(const double error, judge.HeldOut(rotation, clip_rank));
  if (error < choice.error) {
    choice.error = error;
    choice.signs_kept = true;
    choice.rotation = std::move(rotation);
  }
  return choice;
}

}  // namespace okv
