#ifndef OKV_CALIB_IMPORT_H_
#define OKV_CALIB_IMPORT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "calib/published.h"
#include "proto/rotation_set.h"

namespace okv {

// What published files do not say. A plain value.
struct ImportOptions {
  std::string model;
  std::string weights_revision;
  uint32_t kv_heads = 0;
  uint32_t group_size = 0;
  double clip_k = 0;  // Ratios in [0, 1): the rank is floor(ratio * head_dim), 0 = off.
  double clip_v = 0;

  // kInvalidArgument naming the option; what RotationSet::Validate finds is left to it.
  absl::Status Validate(uint32_t head_dim) const;
};

// The fp32 numbers behind a set that was imported. Serving rounds R to bf16; these give the
// published files back, and C_Q and C_S where the eigenvalues are known. They are not part of the
// set's identity. A plain value.
struct RotationSource {
  PublishedRotations k;
  PublishedRotations v;

  bool operator==(const RotationSource&) const = default;
};

// A set and where it comes from.
struct SourcedSet {
  RotationSet set;                       // Validated.
  std::optional<RotationSource> source;  // Of imported sets.
};

// The set to serve of two published files. kInvalidArgument: the options; files that do not belong
// together (layers, heads, dimensions: the message names the layer), a file of keys whose objective
// is one of values or the other way round, or what RotationSet::Validate finds.
absl::StatusOr<SourcedSet> ImportPublished(PublishedRotations k, PublishedRotations v,
                                           const ImportOptions& options);

// RotationSet::Serialize() with the source in tensors of its own: source_r_k, source_r_v (F32),
// where known source_eigenvalues_k, source_eigenvalues_v (F32), and in __metadata__
// source_objective_k, source_objective_v, source_shape ("layer", "per_kv_head"), source_sha256.
// RotationSet::Parse passes over them. A set without a source gives RotationSet::Serialize().
std::string SerializeSourced(const SourcedSet& set);
// Errors of RotationSet::Parse. Also kInvalidArgument: a part of the source is missing or has the
// wrong shape, or CheckEigenvalues; kDataLoss: it does not have its SHA-256, or does not round to
// the set's bf16 bits.
absl::StatusOr<SourcedSet> ParseSourced(absl::string_view bytes);

// The fp32 numbers to write into published files: the source, or the set's own bf16 widened, with
// the method as objective and no eigenvalues.
RotationSource SourceOf(const SourcedSet& set);

}  // namespace okv

#endif  // OKV_CALIB_IMPORT_H_
