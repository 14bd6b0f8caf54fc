#include "calib/recover.h"

#include <cmath>

#include "absl/strings/match.h"
#include "proto/check.h"

namespace okv {
namespace {

// row * H in place, H being Hadamard(dim): butterflies.
void TransformRow(uint32_t dim, double* row) {
  for (uint32_t half = 1; half < dim; half *= 2) {
    for (uint32_t begin = 0; begin < dim; begin += 2 * half) {
      for (uint32_t i = begin; i < begin + half; ++i) {
        const double sum = row[i] + row[i + half];
        row[i + half] = row[i] - row[i + half];
        row[i] = sum;
      }
    }
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  for (uint32_t i = 0; i < dim; ++i) row[i] *= scale;
}

}  // namespace

bool IsRecoverable(const PublishedRotations& rotations) {
  return !rotations.eigenvalues.empty() && absl::EndsWith(rotations.objective, "r_h_pbr");
}

Matrix RecoverCovariance(const float* rotation, const float* eigenvalues, uint32_t dim) {
  Matrix u(size_t{dim} * dim);
  for (uint32_t row = 0; row < dim; ++row) {
    for (uint32_t j = 0; j < dim; ++j) {
      u[size_t{row} * dim + dim - 1 - BitReverse(j, dim)] = double{rotation[size_t{row} * dim + j]};
    }
    TransformRow(dim, &u[size_t{row} * dim]);  // H is its own inverse.
  }
  Matrix covariance(u.size(), 0.0);
  std::vector<double> weighted(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t c = 0; c < dim; ++c) weighted[c] = u[size_t{i} * dim + c] * eigenvalues[c];
    for (uint32_t j = i; j < dim; ++j) {
      double sum = 0;
      for (uint32_t c = 0; c < dim; ++c) sum += weighted[c] * u[size_t{j} * dim + c];
      covariance[size_t{i} * dim + j] = sum;
      covariance[size_t{j} * dim + i] = sum;
    }
  }
  return covariance;
}

double RopePairAsymmetry(const Matrix& covariance, const RopePairs& pairs) {
  const size_t dim = pairs.head_dim;
  OKV_CHECK(covariance.size() == dim * dim && pairs.rotary_dim >= 16 && pairs.rotary_dim <= dim);
  const uint32_t half = pairs.rotary_dim / 2;
  const uint32_t fast = half * 3 / 8;
  double sum = 0;
  for (size_t i = 0; i < fast; ++i) {
    const double one = covariance[i * dim + i];
    const double other = covariance[(i + half) * dim + i + half];
    if (one + other > 0) sum += std::abs(one - other) / (one + other);
  }
  return sum / fast;
}

}  // namespace okv
