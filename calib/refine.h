#ifndef OKV_CALIB_REFINE_H_
#define OKV_CALIB_REFINE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "calib/history.h"
#include "calib/linalg.h"
#include "calib/refine_batch.h"

namespace okv {

struct RefineOptions {
  uint32_t group_size;
  uint32_t steps = 400;
  uint32_t batch_rows = 512;  // Of each head, in each step.
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
// What the loss of a batch and its gradient are, HeadBatch says.
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
