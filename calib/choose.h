#ifndef OKV_CALIB_CHOOSE_H_
#define OKV_CALIB_CHOOSE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/linalg.h"
#include "calib/row_error.h"

namespace okv {

// Picks a rotation R = U D H P_br by what the codec does to rows: U among given bases, D a diagonal
// of signs. No D changes what the theory promises (the diagonal of R^T C R is tr(C) / dim for any,
// when U holds C's eigenvectors); it decides how a row's large components add up.

// The rows of one of the heads that share a rotation.
struct HeadRows {
  RowSample fit;
  RowSample held_out;
  RowObjective objective;
};

struct ChooseOptions {
  uint32_t group_size;
  // The ranks that a basis is tried with; each basis is judged at its best one. Not empty.
  std::vector<uint32_t> clip_ranks;
  bool fit_signs = true;
};

struct RotationChoice {
  size_t basis = 0;                // Index of the basis.
  bool signs_kept = false;         // False: D = I.
  std::vector<uint16_t> rotation;  // [dim, dim] bf16
  // Held-out errors summed over the heads, with D = I and as chosen; 0 when nothing was compared.
  double error_plain = 0;
  double error = 0;
};

// Searches on the rows to fit, and keeps what is better on the held-out rows: the basis first (the
// first of equals), then its signs: 16 random ones, then single flips of the best until none helps,
// two rounds at most. Deterministic. Errors as RowError and SymmetricEigen. With one basis and no
// sign fit nothing is measured. REQUIRES: a basis and a head at least.
absl::StatusOr<RotationChoice> ChooseRotation(const std::vector<Matrix>& bases,
                                              const std::vector<HeadRows>& heads,
                                              const ChooseOptions& options);

}  // namespace okv

#endif  // OKV_CALIB_CHOOSE_H_
