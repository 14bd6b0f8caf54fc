#include "cmd/bench/published_draws.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/linalg.h"
#include "calib/published_moments.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

struct OneSide {
  uint32_t head_dim = 0;
  std::vector<uint16_t> mix;
  std::vector<uint16_t> rotation;
};

absl::StatusOr<OneSide> Load(const std::string& path, uint32_t layer) {
  OKV_ASSIGN_OR_RETURN(const PublishedMoments moments, LoadMoments(path));
  const std::vector<uint32_t>& ids = moments.file.layer_ids;
  const auto found = std::find(ids.begin(), ids.end(), layer);
  if (found == ids.end()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has no layer ", layer));
  }
  const size_t index = found - ids.begin();
  const Matrix& mix = moments.factors[index];
  const float* const rotation = moments.file.Rotation(index, 0);
  OneSide side;
  side.head_dim = moments.head_dim();
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
