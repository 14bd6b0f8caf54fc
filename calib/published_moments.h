#ifndef OKV_CALIB_PUBLISHED_MOMENTS_H_
#define OKV_CALIB_PUBLISHED_MOMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/linalg.h"
#include "calib/published.h"

namespace okv {

// Published rotations with the second moments that they were fitted to (recover.h), to draw rows by
// where a model's weights are not at hand. A plain value.
struct PublishedMoments {
  PublishedRotations file;
  // [layers] of [head_dim, head_dim]: F with F^T F = C. Rows z F of standard normal z have second
  // moment C.
  std::vector<Matrix> factors;

  uint32_t head_dim() const { return file.head_dim; }
};

// Errors name `path`: ParsePublished's, MappedFile::Open's (kNotFound, ...), and kInvalidArgument
// for a file without eigenvalues or with more than one rotation a layer.
absl::StatusOr<PublishedMoments> LoadMoments(const std::string& path);

}  // namespace okv

#endif  // OKV_CALIB_PUBLISHED_MOMENTS_H_
