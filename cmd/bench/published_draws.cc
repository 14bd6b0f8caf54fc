#include "cmd/bench/published_draws.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/linalg.h"
#include "calib/published.h"
#include "calib/recover.h"
#include "cmd/support/files.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

struct OneSide {
  uint32_t head_dim = 0;
  std::vector<uint16_t> mix;
  std::vector<uint16_t> rotation;
};

// M = L^T with C = L L^T (Cholesky), so that M^T M = C. Pivots that rounding left below zero are 0.
Matrix MixOf(const Matrix& covariance, uint32_t dim) {
  Matrix lower(covariance.size(), 0.0);
  Matrix mix(covariance.size(), 0.0);
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
      mix[size_t{j} * dim + i] = entry;
    }
  }
  return mix;
}

absl::StatusOr<OneSide> Load(const std::string& path, uint32_t layer) {
  OKV_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  const absl::StatusOr<PublishedRotations> file = ParsePublished(bytes);
  if (!file.ok()) {
    return absl::Status(file.status().code(), absl::StrCat(path, ": ", file.status().message()));
  }
  if (!IsRecoverable(*file) || file->heads != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": covariances need eigenvalues and one rotation a layer"));
  }
  const auto found = std::find(file->layer_ids.begin(), file->layer_ids.end(), layer);
  if (found == file->layer_ids.end()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has no layer ", layer));
  }
  const size_t index = found - file->layer_ids.begin();
  const uint32_t dim = file->head_dim;
  const float* const rotation = file->Rotation(index, 0);
  OneSide side;
  side.head_dim = dim;
  const Matrix mix = MixOf(RecoverCovariance(rotation, file->Eigenvalues(index, 0), dim), dim);
  for (size_t i = 0; i < mix.size(); ++i) {
    side.mix.push_back(FloatToBf16(static_cast<float>(mix[i])));
    side.rotation.push_back(FloatToBf16(rotation[i]));
  }
  return side;
}

}  // namespace

absl::StatusOr<RowDraws> LoadPublishedDraws(const PublishedDrawsOptions& options) {
  OKV_ASSIGN_OR_RETURN(OneSide k, Load(options.k_file, options.layer));
  OKV_ASSIGN_OR_RETURN(OneSide v, Load(options.v_file, options.layer));
  if (k.head_dim != v.head_dim) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.k_file, " and ", options.v_file, " differ in head_dim"));
  }
  return RowDraws{.head_dim = k.head_dim,
                  .mix_k = std::move(k.mix),
                  .mix_v = std::move(v.mix),
                  .r_k = std::move(k.rotation),
                  .r_v = std::move(v.rotation)};
}

}  // namespace okv
