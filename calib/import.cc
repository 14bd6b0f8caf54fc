#include "calib/import.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "calib/quoted.h"
#include "proto/bf16.h"
#include "proto/safetensors.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// What all parts of a source, tensors and metadata, begin with.
constexpr const char* kSourcePrefix = "source_";
constexpr const char* kShapeField = "source_shape";
constexpr const char* kHashField = "source_sha256";

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("rotation set: ", why));
}

absl::Status CheckClip(absl::string_view name, double ratio, uint32_t head_dim) {
  if (!(ratio >= 0 && ratio < 1)) {  // Written so that a NaN fails too.
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", ratio, ", not in [0, 1)"));
  }
  if (ratio > 0 && ratio * head_dim < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " ", ratio, " of ", head_dim, " channels is rank 0, which means off: say 0 instead"));
  }
  return absl::OkStatus();
}

// Files of one model have the same layers, and each layer the same heads and dimension; and an
// objective that is of keys or of values by its name stands in the file of those.
absl::Status CheckPair(const PublishedRotations& k, const PublishedRotations& v) {
  const bool k_is_of_values = absl::StartsWith(k.objective, "sst");
  if (k_is_of_values || absl::StartsWith(v.objective, "qqt")) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file of ", k_is_of_values ? "keys" : "values", " has an objective of ",
                     k_is_of_values ? "values" : "keys", ": the objectives are ",
                     Quoted(k.objective), " of keys and ", Quoted(v.objective), " of values"));
  }
  std::vector<uint32_t> only_k;
  std::vector<uint32_t> only_v;
  std::set_difference(k.layer_ids.begin(), k.layer_ids.end(), v.layer_ids.begin(),
                      v.layer_ids.end(), std::back_inserter(only_k));
  std::set_difference(v.layer_ids.begin(), v.layer_ids.end(), k.layer_ids.begin(),
                      k.layer_ids.end(), std::back_inserter(only_v));
  if (!only_k.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", only_k[0], " is in the file of keys and not in that of values"));
  }
  if (!only_v.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", only_v[0], " is in the file of values and not in that of keys"));
  }
  if (k.head_dim != v.head_dim || k.heads != v.heads || k.per_head != v.per_head) {
    const auto shape = [](const PublishedRotations& one) {
      return one.per_head
                 ? absl::StrCat("[", one.heads, ", ", one.head_dim, ", ", one.head_dim, "]")
                 : absl::StrCat("[", one.head_dim, ", ", one.head_dim, "]");
    };
    return absl::InvalidArgumentError(absl::StrCat("layer ", k.layer_ids[0], " has a rotation ",
                                                   shape(k), " of keys and ", shape(v),
                                                   " of values"));
  }
  return absl::OkStatus();
}

std::vector<uint16_t> Rounded(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), FloatToBf16);
  return bits;
}

bool IsIdentity(const PublishedRotations& one) {
  for (size_t i = 0; i < one.rotations.size(); ++i) {
    const size_t in_matrix = i % (size_t{one.head_dim} * one.head_dim);
    const bool diagonal = in_matrix / one.head_dim == in_matrix % one.head_dim;
    if (one.rotations[i] != (diagonal ? 1.0f : 0.0f)) return false;
  }
  return true;
}

// The method that the objectives amount to. "none" may skip the rotation, so that there the numbers
// must agree.
std::string MethodOf(const PublishedRotations& k, const PublishedRotations& v) {
  if (k.objective != v.objective) return "oscar";
  if (k.objective == "hadamard") return "hadamard";
  return k.objective == "identity" && IsIdentity(k) && IsIdentity(v) ? "none" : "oscar";
}

absl::string_view FloatBytes(const std::vector<float>& values) {
  return absl::string_view(reinterpret_cast<const char*>(values.data()),
                           values.size() * sizeof(float));
}

// The parts of a source by the name of their tensor, and which file each belongs to.
struct Part {
  const char* name;
  bool is_value;
  std::vector<float> PublishedRotations::*numbers;
};
constexpr Part kParts[] = {
    {"source_r_k", false, &PublishedRotations::rotations},
    {"source_r_v", true, &PublishedRotations::rotations},
    {"source_eigenvalues_k", false, &PublishedRotations::eigenvalues},
    {"source_eigenvalues_v", true, &PublishedRotations::eigenvalues},
};

const std::vector<float>& NumbersOf(const RotationSource& source, const Part& part) {
  return (part.is_value ? source.v : source.k).*part.numbers;
}

std::string HashOf(const RotationSource& source) {
  std::string bytes;
  for (const Part& part : kParts) {
    const std::vector<float>& numbers = NumbersOf(source, part);
    absl::StrAppend(&bytes, part.name, " ", numbers.size(), "\n", FloatBytes(numbers));
  }
  for (const PublishedRotations* one : {&source.k, &source.v}) {
    absl::StrAppend(&bytes, one->objective.size(), " ", one->objective, "\n", one->per_head, "\n");
  }
  return RotationHash{Sha256(bytes)}.Hex();
}

std::vector<uint64_t> ShapeOf(const RotationSet& set, const Part& part) {
  std::vector<uint64_t> shape = {set.layer_ids.size(), set.rotation_heads, set.head_dim};
  if (part.numbers == &PublishedRotations::rotations) shape.push_back(set.head_dim);
  return shape;
}

absl::StatusOr<std::string> Field(const std::map<std::string, std::string>& metadata,
                                  const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) return Bad(absl::StrCat("field '", name, "' is missing"));
  return found->second;
}

bool HasSource(const Safetensors& file) {
  const auto is_part = [](const auto& entry) {
    return absl::StartsWith(entry.first, kSourcePrefix);
  };
  return std::any_of(file.tensors().begin(), file.tensors().end(), is_part) ||
         std::any_of(file.metadata().begin(), file.metadata().end(), is_part);
}

absl::StatusOr<RotationSource> ReadSource(const Safetensors& file, const RotationSet& set) {
  RotationSource source;
  OKV_ASSIGN_OR_RETURN(const std::string shape, Field(file.metadata(), kShapeField));
  OKV_ASSIGN_OR_RETURN(const std::string hash, Field(file.metadata(), kHashField));
  OKV_ASSIGN_OR_RETURN(source.k.objective, Field(file.metadata(), "source_objective_k"));
  OKV_ASSIGN_OR_RETURN(source.v.objective, Field(file.metadata(), "source_objective_v"));
  if (shape != "layer" && shape != "per_kv_head") {
    return Bad(absl::StrCat("field '", kShapeField, "' is ", Quoted(shape)));
  }
  for (PublishedRotations* one : {&source.k, &source.v}) {
    one->layer_ids = set.layer_ids;
    one->heads = set.rotation_heads;
    one->head_dim = set.head_dim;
    one->per_head = shape == "per_kv_head";
  }
  for (const Part& part : kParts) {
    const Safetensors::Tensor* tensor = file.Find(part.name);
    const bool may_be_absent = part.numbers == &PublishedRotations::eigenvalues;
    if (tensor == nullptr && may_be_absent) continue;
    if (tensor == nullptr) return Bad(absl::StrCat("tensor '", part.name, "' is missing"));
    if (tensor->dtype != "F32" || tensor->shape != ShapeOf(set, part)) {
      return Bad(absl::StrCat("tensor '", part.name, "' is ", tensor->dtype, " [",
                              absl::StrJoin(tensor->shape, ", "), "]"));
    }
    std::vector<float>& numbers = (part.is_value ? source.v : source.k).*part.numbers;
    numbers.resize(tensor->data.size() / sizeof(float));
    std::memcpy(numbers.data(), tensor->data.data(), tensor->data.size());
  }
  for (const PublishedRotations* one : {&source.k, &source.v}) {
    const absl::Status status = CheckEigenvalues(*one);
    if (!status.ok()) return Bad(absl::StrCat("its source, ", status.message()));
  }
  if (HashOf(source) != hash) {
    return absl::DataLossError("rotation set: its source does not have the SHA-256 stored with it");
  }
  if (Rounded(source.k.rotations) != set.r_k || Rounded(source.v.rotations) != set.r_v) {
    return absl::DataLossError("rotation set: its source does not round to r_k and r_v");
  }
  return source;
}

}  // namespace

absl::Status ImportOptions::Validate(uint32_t head_dim) const {
  OKV_RETURN_IF_ERROR(CheckClip("clip_k", clip_k, head_dim));
  OKV_RETURN_IF_ERROR(CheckClip("clip_v", clip_v, head_dim));
  if (kv_heads == 0 || kv_heads > kKvHeadsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_heads is ", kv_heads, ", not 1 to ", kKvHeadsMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<SourcedSet> ImportPublished(PublishedRotations k, PublishedRotations v,
                                           const ImportOptions& options) {
  OKV_RETURN_IF_ERROR(CheckPair(k, v));
  OKV_RETURN_IF_ERROR(options.Validate(k.head_dim));
  if (k.per_head && k.heads != options.kv_heads) {
    return absl::InvalidArgumentError(absl::StrCat("the files have a rotation for each of ",
                                                   k.heads, " KV heads, kv_heads is ",
                                                   options.kv_heads));
  }
  SourcedSet result;
  RotationSet& set = result.set;
  set.model = options.model;
  set.weights_revision = options.weights_revision;
  set.layer_ids = k.layer_ids;
  set.kv_heads = options.kv_heads;
  set.head_dim = k.head_dim;
  set.group_size = options.group_size;
  set.rotation_heads = k.heads;
  set.method = MethodOf(k, v);
  set.r_k = Rounded(k.rotations);
  set.r_v = Rounded(v.rotations);
  const auto rank = [&](double ratio) {
    return static_cast<uint32_t>(std::floor(ratio * set.head_dim));
  };
  set.clip_rank_k.assign(set.layer_ids.size() * set.kv_heads, rank(options.clip_k));
  set.clip_rank_v.assign(set.layer_ids.size() * set.kv_heads, rank(options.clip_v));
  OKV_RETURN_IF_ERROR(set.Validate());
  result.source = {.k = std::move(k), .v = std::move(v)};
  return result;
}

std::string SerializeSourced(const SourcedSet& set) {
  std::string served = set.set.Serialize();
  if (!set.source.has_value()) return served;
  const Safetensors file = *Safetensors::Parse(served);
  std::map<std::string, Safetensors::Tensor> tensors = file.tensors();
  std::map<std::string, std::string> metadata = file.metadata();
  for (const Part& part : kParts) {
    const std::vector<float>& numbers = NumbersOf(*set.source, part);
    if (numbers.empty()) continue;
    tensors[part.name] = {
        .dtype = "F32", .shape = ShapeOf(set.set, part), .data = FloatBytes(numbers)};
  }
  metadata["source_objective_k"] = set.source->k.objective;
  metadata["source_objective_v"] = set.source->v.objective;
  metadata[kShapeField] = set.source->k.per_head ? "per_kv_head" : "layer";
  metadata[kHashField] = HashOf(*set.source);
  return WriteSafetensors(tensors, metadata);
}

absl::StatusOr<SourcedSet> ParseSourced(absl::string_view bytes) {
  SourcedSet result;
  OKV_ASSIGN_OR_RETURN(result.set, RotationSet::Parse(bytes));
  OKV_ASSIGN_OR_RETURN(const Safetensors file, Safetensors::Parse(bytes));
  if (!HasSource(file)) return result;
  OKV_ASSIGN_OR_RETURN(result.source, ReadSource(file, result.set));
  return result;
}

RotationSource SourceOf(const SourcedSet& set) {
  if (set.source.has_value()) return *set.source;
  RotationSource source;
  const auto fill = [&](const std::vector<uint16_t>& bits, PublishedRotations* one) {
    one->objective = set.set.method;
    one->layer_ids = set.set.layer_ids;
    one->heads = set.set.rotation_heads;
    one->per_head = one->heads > 1;
    one->head_dim = set.set.head_dim;
    one->rotations.resize(bits.size());
    std::transform(bits.begin(), bits.end(), one->rotations.begin(), Bf16ToFloat);
  };
  fill(set.set.r_k, &source.k);
  fill(set.set.r_v, &source.v);
  return source;
}

}  // namespace okv
