#ifndef OKV_CALIB_RECOVER_H_
#define OKV_CALIB_RECOVER_H_

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "calib/linalg.h"
#include "calib/published.h"

namespace okv {

// Whether rotations of this objective are U H P_br with U in ascending order of the eigenvalues, so
// that those give the covariance back.
bool IsRecoverable(const PublishedRotations& rotations);

// C = U diag(eigenvalues) U^T of a rotation as it is published: column j of R is column
// head_dim - 1 - BitReverse(j) of U H, because P_br there permutes ranks counted from the largest
// eigenvalue over columns that begin with the smallest. (RotationFromEigenvectors puts the largest
// first instead.) `rotation` is [dim, dim] row-major. REQUIRES: dim is a power of two.
Matrix RecoverCovariance(const float* rotation, const float* eigenvalues, uint32_t dim);

// Which channels RoPE turns together: i and i + rotary_dim / 2, for i below rotary_dim / 2.
struct RopePairs {
  uint32_t head_dim = 0;
  uint32_t rotary_dim = 0;  // At most head_dim; less where a model turns a part of a head.
};

// How far C is from what RoPE makes of it: mean |C_ii - C_jj| / (C_ii + C_jj) over the pairs that
// turn fast, the first 3/8 of them. Those go through all angles in a text, which leaves both
// channels the same variance; slow ones do not. 0 for equal variances, 1 when one of each pair has
// none. It tells a C that was recovered rightly from one of a wrong column order or of another
// pairing: 0.011 against 0.2 to 0.4 (Qwen3-4B-Thinking-2507, layer 0; Qwen3.5-4B with and without
// its rotary_dim of 64). REQUIRES: 16 <= rotary_dim <= head_dim, even.
double RopePairAsymmetry(const Matrix& covariance, const RopePairs& pairs);

}  // namespace okv

#endif  // OKV_CALIB_RECOVER_H_
