#include "calib/published_moments.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/files.h"
#include "calib/recover.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// F = L^T with C = L L^T (Cholesky). Pivots that rounding left below zero are 0.
Matrix FactorOf(const Matrix& covariance, uint32_t dim) {
  Matrix lower(covariance.size(), 0.0);
  Matrix factor(covariance.size(), 0.0);
  for (uint32_t j = 0; j < dim; ++j) {
    for (uint32_t i = j; i < dim; ++i) {
      double rest = covariance[size_t{i} * dim + j];
      for (uint32_t c = 0; c < j; ++c) {
        rest -= lower[size_t{i} * dim + c] * lower[size_t{j} * dim + c];
      }
      const double pivot = lower[size_t{j} * dim + j];
      double& entry = lower[size_t{i} * dim + j];
      if (i == j) {
        entry = std::sqrt(std::max(rest, 0.0));
      } else {
        entry = pivot > 0.0 ? rest / pivot : 0.0;
      }
      factor[size_t{j} * dim + i] = entry;
    }
  }
  return factor;
}

}  // namespace

absl::StatusOr<PublishedMoments> LoadMoments(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::Open(path));
  absl::StatusOr<PublishedRotations> file = ParsePublished(mapped.bytes());
  if (!file.ok()) {
    return absl::Status(file.status().code(), absl::StrCat(path, ": ", file.status().message()));
  }
  if (!IsRecoverable(*file) || file->heads != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": covariances need eigenvalues and one rotation a layer"));
  }
  PublishedMoments moments;
  moments.file = *std::move(file);
  const uint32_t dim = moments.head_dim();
  for (size_t layer = 0; layer < moments.file.layer_ids.size(); ++layer) {
    moments.factors.push_back(FactorOf(
        RecoverCovariance(moments.file.Rotation(layer, 0), moments.file.Eigenvalues(layer, 0), dim),
        dim));
  }
  return moments;
}

}  // namespace okv
