#ifndef OKV_CALIB_SEARCH_H_
#define OKV_CALIB_SEARCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "calib/history.h"
#include "calib/linalg.h"

namespace okv {

// Picks the rotation and clip rank of one tensor by what they do to attention outputs.

// One of the heads that share a rotation. Borrowed.
struct HeadData {
  const HeadHistory* fit;
  const HeadWeights* weights;  // Of `fit`.
  const HeadHistory* judge;
};

struct SearchOptions {
  uint32_t group_size;
  std::vector<uint32_t> clip_ranks;  // What is tried, in order of size; not empty.
  // The rank to leave only for one that errs less by kClipWorthLeaving, and by more than
  // kGainErrors standard errors over the judging windows: other gains are of that text, not of the
  // model.
  std::optional<uint32_t> settled_rank = std::nullopt;
  uint32_t refine_steps = 0;  // 0: the rotations are taken as they are.
};

// Values' errors hardly depend on the clip near their best: without this, fitted clips left 0.997
// of the recipe's error in the mean of six layers, and 1.018 on the worst, on text of neither.
inline constexpr double kClipWorthLeaving = 0.02;
// Differences by chance pass it in 3 % of cases with 20 windows, 5 % with 6, 15 % with 2. On text
// of two kinds, without it and with one kind behind the other, the worst of 30 layers was 1.020;
// with it 1.000.
inline constexpr double kGainErrors = 2;

// The most rotations that a search begins with.
inline constexpr size_t kStartsMax = 3;

struct FoundRotation {
  size_t start = 0;                // Which of the given rotations it is, or began as.
  bool refined = false;            // By RefineRotation.
  std::vector<uint16_t> rotation;  // [dim, dim] bf16
  uint32_t clip_rank = 0;
  SquaredError error;  // As judged, over the heads; 0 over 0 when nothing was compared.
  // Of each given rotation, before any descent, at the rank that its rows like best.
  std::array<SquaredError, kStartsMax> start_errors = {};
};

// Fits on `fit` and keeps what errs least on `judge`: each rotation at the rank that its rows like
// best, the best of them at that rank's neighbors too; then descents from it (RefineRotation), each
// at the rank that its rows like and at its neighbors: by the rows' weights with all directions
// alike, and for keys also with all rows alike by the queries' metrics. Both at once was worse than
// either: a row's own queries are not those of all rows. The settled rank, if any, is judged last.
// Deterministic. With one rotation and one rank and no steps nothing is measured. Errors as
// HeadHistory::Judge, and kInvalidArgument where outputs are not finite. REQUIRES: one to
// kStartsMax rotations and a head at least, whose windows have history.
absl::StatusOr<FoundRotation> SearchRotation(const std::vector<Matrix>& rotations, KvTensor tensor,
                                             absl::Span<const HeadData> heads,
                                             const SearchOptions& options);

}  // namespace okv

#endif  // OKV_CALIB_SEARCH_H_
