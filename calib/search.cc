#include "calib/search.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "calib/refine.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

SquaredError Sum(const std::vector<SquaredError>& windows) {
  SquaredError total;
  for (const SquaredError& window : windows) total.Add(window);
  return total;
}

// Whether `better` errs less than `worse` by more than kGainErrors standard errors of the sum of
// the windows' differences. One window tells nothing of how they vary: it is taken at its word. An
// error that is not finite is worse.
bool IsBeyondChance(const std::vector<SquaredError>& worse,
                    const std::vector<SquaredError>& better) {
  const size_t count = worse.size();
  if (count < 2) return true;
  const double gain = Sum(worse).error - Sum(better).error;
  const double mean = gain / static_cast<double>(count);
  double squares = 0;
  for (size_t i = 0; i < count; ++i) {
    const double off = worse[i].error - better[i].error - mean;
    squares += off * off;
  }
  const double variance = squares / static_cast<double>(count - 1);
  return !(gain <= kGainErrors * std::sqrt(variance * static_cast<double>(count)));
}

// Lives for one call. Thread-compatible.
class Search {
 public:
  Search(KvTensor tensor, absl::Span<const HeadData> heads, const SearchOptions& options)
      : tensor_(tensor), heads_(heads), options_(options) {
    for (const HeadData& head : heads) {
      rows_.push_back(head.fit->Rows(tensor));
      weights_.push_back(head.weights->tensor(tensor));
      const size_t count = weights_.back().weights.size();
      const std::vector<float> even(count, 1.0f / static_cast<float>(count));
      even_.push_back({.weights = even, .masses = even, .mean_factor = 1});
      std::swap(even_.back().metric, weights_.back().metric);
      std::swap(even_.back().mean_metric, weights_.back().mean_metric);
    }
  }

  absl::StatusOr<FoundRotation> Run(const std::vector<Matrix>& rotations);

 private:
  std::vector<WeightedRows> Rows(const std::vector<RowWeights>& weights) const {
    std::vector<WeightedRows> rows;
    for (size_t i = 0; i < rows_.size(); ++i) rows.push_back({&rows_[i], &weights[i]});
    return rows;
  }
  // Over the heads, of each judging window.
  absl::StatusOr<std::vector<SquaredError>> JudgeWindows(const std::vector<uint16_t>& rotation,
                                                         uint32_t rank) const;
  // Judges `rotation` at the rank that `rows` like best and up to `reach` ranks beside it; keeps
  // the best so far.
  absl::Status Try(const Matrix& rotation, const std::vector<WeightedRows>& rows, size_t start,
                   bool refined, ptrdiff_t reach);
  // Goes back to the settled rank unless the best one is worth it. Returns the best.
  absl::StatusOr<FoundRotation> Settle();

  const KvTensor tensor_;
  const absl::Span<const HeadData> heads_;
  const SearchOptions& options_;
  std::vector<RowSample> rows_;      // One per head, as the next two.
  std::vector<RowWeights> weights_;  // All directions of an error alike.
  std::vector<RowWeights> even_;     // All rows alike, keys by the queries' metric.
  bool found_ = false;
  SquaredError tried_;  // The last one judged.
  FoundRotation best_;
  std::vector<SquaredError> best_windows_;  // Whose sum is best_'s error.
};

absl::StatusOr<std::vector<SquaredError>> Search::JudgeWindows(
    const std::vector<uint16_t>& rotation, uint32_t rank) const {
  std::vector<SquaredError> all;
  for (const HeadData& head : heads_) {
    OKV_ASSIGN_OR_RETURN(const std::vector<SquaredError> windows,
                         head.judge->JudgeWindows(tensor_, {.rotation = rotation.data(),
                                                            .group_size = options_.group_size,
                                                            .clip_rank = rank}));
    all.resize(std::max(all.size(), windows.size()));
    for (size_t i = 0; i < windows.size(); ++i) all[i].Add(windows[i]);
  }
  return all;
}

absl::Status Search::Try(const Matrix& rotation, const std::vector<WeightedRows>& rows,
                         size_t start, bool refined, ptrdiff_t reach) {
  const std::vector<uint32_t>& ranks = options_.clip_ranks;
  const auto liked = std::find(ranks.begin(), ranks.end(),
                               BestClipRank(rotation, rows, options_.group_size, ranks));
  const auto first = liked - std::min(reach, liked - ranks.begin());
  const auto end = liked + std::min(reach + 1, ranks.end() - liked);
  const std::vector<uint16_t> bits = RoundToBf16(rotation);
  for (auto rank = first; rank != end; ++rank) {
    OKV_ASSIGN_OR_RETURN(const std::vector<SquaredError> windows, JudgeWindows(bits, *rank));
    const SquaredError error = Sum(windows);
    if (!std::isfinite(error.error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the attention outputs of ",
                       tensor_ == KvTensor::kKeys ? "quantized keys" : "quantized values",
                       " are not finite: queries, keys or values are too large"));
    }
    tried_ = error;
    if (found_ && error.error >= best_.error.error) continue;
    found_ = true;
    best_windows_ = windows;
    best_ = {
        .start = start, .refined = refined, .rotation = bits, .clip_rank = *rank, .error = error};
  }
  return absl::OkStatus();
}

absl::StatusOr<FoundRotation> Search::Settle() {
  if (!options_.settled_rank.has_value() || best_.clip_rank == *options_.settled_rank) return best_;
  OKV_ASSIGN_OR_RETURN(const std::vector<SquaredError> settled,
                       JudgeWindows(best_.rotation, *options_.settled_rank));
  const SquaredError error = Sum(settled);
  const bool worth_it = !(error.error * (1 - kClipWorthLeaving) <= best_.error.error);
  if (worth_it && IsBeyondChance(settled, best_windows_)) return best_;
  best_.clip_rank = *options_.settled_rank;
  best_.error = error;
  return best_;
}

absl::StatusOr<FoundRotation> Search::Run(const std::vector<Matrix>& rotations) {
  const std::vector<WeightedRows> by_weight = Rows(weights_);
  std::array<SquaredError, kStartsMax> start_errors = {};
  for (size_t start = 0; start < rotations.size(); ++start) {
    OKV_RETURN_IF_ERROR(Try(rotations[start], by_weight, start, /*refined=*/false, /*reach=*/0));
    start_errors[start] = tried_;
  }
  const size_t start = best_.start;
  OKV_RETURN_IF_ERROR(Try(rotations[start], by_weight, start, /*refined=*/false, /*reach=*/1));
  best_.start_errors = start_errors;
  if (options_.refine_steps == 0) return Settle();
  const auto descend = [&](const std::vector<WeightedRows>& rows) {
    const uint32_t rank =
        BestClipRank(rotations[start], rows, options_.group_size, options_.clip_ranks);
    const Matrix refined =
        RefineRotation(rotations[start], rows, rank,
                       {.group_size = options_.group_size, .steps = options_.refine_steps});
    return Try(refined, rows, start, /*refined=*/true, /*reach=*/1);
  };
  OKV_RETURN_IF_ERROR(descend(by_weight));
  if (tensor_ == KvTensor::kKeys) OKV_RETURN_IF_ERROR(descend(Rows(even_)));
  best_.start_errors = start_errors;
  return Settle();
}

}  // namespace

absl::StatusOr<FoundRotation> SearchRotation(const std::vector<Matrix>& rotations, KvTensor tensor,
                                             absl::Span<const HeadData> heads,
                                             const SearchOptions& options) {
  OKV_CHECK(!rotations.empty() && !heads.empty() && !options.clip_ranks.empty());
  OKV_CHECK(rotations.size() <= kStartsMax);
  if (rotations.size() == 1 && options.clip_ranks.size() == 1 && options.refine_steps == 0) {
    return FoundRotation{.start = 0,
                         .refined = false,
                         .rotation = RoundToBf16(rotations[0]),
                         .clip_rank = options.clip_ranks[0],
                         .error = {}};
  }
  return Search(tensor, heads, options).Run(rotations);
}

}  // namespace okv
