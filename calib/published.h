#ifndef OKV_CALIB_PUBLISHED_H_
#define OKV_CALIB_PUBLISHED_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// One file of rotations, of keys or of values, as the OSCAR project publishes them:
//   version 1: {format_version, objective, source_grouping: "layer",
//               layers: {id: {layer_id, rotation [d, d], eigenvalues [d], ascending}}}
//   version 2: {..., source_grouping: "per_kv_head",
//               layers: {id: {layer_id, rotation [kv_heads, d, d]}}}
// Ids are those of the model, with gaps where a layer has no attention. A plain value.
struct PublishedRotations {
  std::string objective;            // "qqt_r_h_pbr", "hadamard", ...
  std::vector<uint32_t> layer_ids;  // Ascending.
  uint32_t heads = 1;               // KV heads of a rotation each, or 1: one a layer.
  bool per_head = false;            // The shape that it had, which 1 head leaves open.
  uint32_t head_dim = 0;
  std::vector<float> rotations;    // [layers, heads, head_dim, head_dim], y = x R
  std::vector<float> eigenvalues;  // [layers, heads, head_dim], or empty: not known.

  bool operator==(const PublishedRotations&) const = default;

  const float* Rotation(size_t layer, uint32_t head) const {
    return rotations.data() + (layer * heads + head) * head_dim * head_dim;
  }
  const float* Eigenvalues(size_t layer, uint32_t head) const {
    return eigenvalues.data() + (layer * heads + head) * head_dim;
  }
};

// Reads either version: what counts is the rotation's shape, not format_version. Keys may be texts.
// kInvalidArgument naming the layer: a layer that stands twice, a rotation that is missing, not of
// Float or of another shape than the first layer's, NaN or Inf, one that is not orthogonal to
// within 2^-12 (published ones are to 2^-25), eigenvalues of some layers only or as
// CheckEigenvalues; a format_version other than 1 and 2, an objective that is no text; more than
// 64 Mi numbers; and what TorchFile refuses. kDataLoss: truncated, or a CRC-32 that does not match.
absl::StatusOr<PublishedRotations> ParsePublished(absl::string_view bytes);

// kInvalidArgument naming the layer: eigenvalues that no covariance has, being NaN, Inf, out of
// ascending order, or negative beyond rounding (10^-6 of the largest). OK when there are none.
absl::Status CheckEigenvalues(const PublishedRotations& rotations);

enum class PublishedVersion { kLayer = 1, kKvHead = 2 };
// "v1", "v2". kInvalidArgument naming them.
absl::StatusOr<PublishedVersion> ParsePublishedVersion(absl::string_view name);

// The file, with `folder` as its name inside. Version 2 has no eigenvalues; for it a rotation a
// layer is repeated for each of `kv_heads`. kFailedPrecondition: version 1 of a rotation a KV head.
// kInvalidArgument: 4 GiB or more.
absl::StatusOr<std::string> WritePublished(const PublishedRotations& rotations,
                                           PublishedVersion version, uint32_t kv_heads,
                                           absl::string_view folder);

}  // namespace okv

#endif  // OKV_CALIB_PUBLISHED_H_
