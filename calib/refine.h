#ifndef OKV_CALIB_REFINE_H_
#define OKV_CALIB_REFINE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "calib/history.h"
#include "calib/linalg.h"
#include "calib/row_codec.h"

namespace okv {

// Rows of one head, and what they weigh. Borrowed.
struct WeightedRows {
  const RowSample* rows;      // A row at least.
  const RowWeights* weights;  // One of each kind per row.
};

struct RefineOptions {
  uint32_t group_size;
  uint32_t steps = 400;
  uint32_t batch_rows = 512;  // Of all heads together, in each step.
  // Root mean square of a step's angles in its first steps, in radians; falls to 0 along a cosine.
  double step_size = 0.03;
};

// Of `ranks`, the clip rank at which the rows lose least: RowWeights' sum over heads, each relative
// to its own at the first rank. In fp32, over at most 4,096 rows a head. REQUIRES: not empty.
uint32_t BestClipRank(const Matrix& rotation, absl::Span<const WeightedRows> heads,
                      uint32_t group_size, const std::vector<uint32_t>& ranks);

// Turns `rotation` by gradient descent so that the rows lose less in the codec at `clip_rank`: the
// sum over heads of RowWeights' error, each relative to its first.
//
// The codes are taken as fixed in a step. The error jumps where a row crosses from one code to the
// next, by as much up as down as long as all directions count alike, so that the gradient at fixed
// codes is that of the average error; with a metric like C_Q, whose directions differ, it is not,
// and such descents went uphill. With one group a head the errors are nearly white, and tr(C_Q E)
// follows tr(E).
//
// Stochastic gradient descent over the orthogonal matrices by Cayley transforms (Li, Li, Todorovic,
// "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform", ICLR 2020;
// SpinQuant, arXiv 2405.16406, turns rotations so for whole models), with momentum and a running
// scale of the gradient; rows are drawn half by weight and half evenly. Deterministic. Returns
// `rotation` itself when rows are too large for a finite gradient, or lose nothing. REQUIRES:
// [dim, dim] and orthogonal; a head at least.
Matrix RefineRotation(const Matrix& rotation, absl::Span<const WeightedRows> heads,
                      uint32_t clip_rank, const RefineOptions& options);

}  // namespace okv

#endif  // OKV_CALIB_REFINE_H_
