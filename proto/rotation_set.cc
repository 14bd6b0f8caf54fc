#include "proto/rotation_set.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/bf16.h"
#include "proto/fields.h"
#include "proto/safetensors.h"
#include "proto/status_macros.h"
#include "proto/utf8.h"

namespace okv {
namespace {

// Rounding an orthogonal matrix to bf16 leaves max |R R^T - I| near 2^-9; a matrix beyond this is
// not a rotation.
constexpr float kOrthogonalityErrorMax = 1.0f / 64;
constexpr absl::string_view kFileVersion = "1";
constexpr absl::string_view kProvenancePrefix = "provenance.";

// Field tags of the hash: never renumber.
enum Tag : uint8_t {
  kVersion = 1,
  kModel,
  kWeightsRevision,
  kLayerIds,
  kKvHeads,
  kHeadDim,
  kGroupSize,
  kRotationHeads,
  kMethod,
  kRK,
  kRV,
  kClipRankK,
  kClipRankV,
};

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("rotation set: ", why));
}

// A little-endian machine's arrays are the file's bytes.
template <typename T>
absl::string_view AsBytes(const std::vector<T>& values) {
  return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The largest |R R^T - I|, and where.
struct OrthogonalityError {
  float error = 0;
  uint32_t row = 0;
  uint32_t other_row = 0;
};

OrthogonalityError MeasureOrthogonality(const std::vector<float>& matrix, uint32_t dim) {
  std::vector<float> transposed(matrix.size());
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t c = 0; c < dim; ++c) transposed[c * dim + i] = matrix[i * dim + c];
  }
  OrthogonalityError worst;
  std::vector<float> dots(dim);
  for (uint32_t i = 0; i < dim; ++i) {
    // Row i with all rows up to i: the inner loop runs over rows, which compilers vectorize without
    // reordering a sum (36 layers of 128 x 128, K and V, take under 0.1 s).
    std::fill(dots.begin(), dots.end(), 0.0f);
    for (uint32_t c = 0; c < dim; ++c) {
      const float factor = matrix[i * dim + c];
      const float* column = transposed.data() + c * dim;
      for (uint32_t j = 0; j <= i; ++j) dots[j] += factor * column[j];
    }
    for (uint32_t j = 0; j <= i; ++j) {
      const float error = std::fabs(dots[j] - (i == j ? 1.0f : 0.0f));
      if (error > worst.error) worst = {.error = error, .row = i, .other_row = j};
    }
  }
  return worst;
}

absl::Status CheckMatrix(const uint16_t* bits, uint32_t dim, const std::string& name) {
  std::vector<float> matrix(size_t{dim} * dim);
  for (size_t i = 0; i < matrix.size(); ++i) {
    matrix[i] = Bf16ToFloat(bits[i]);
    if (std::isfinite(matrix[i])) continue;
    return Bad(absl::StrCat("NaN or Inf in ", name, ", row ", i / dim, ", column ", i % dim));
  }
  // No entry of a rotation is beyond 1; bounded entries keep the sums below finite.
  for (const float value : matrix) {
    if (std::fabs(value) > 1 + kOrthogonalityErrorMax) {
      return Bad(absl::StrCat(name, " is not orthogonal: it holds ", value));
    }
  }
  const OrthogonalityError worst = MeasureOrthogonality(matrix, dim);
  if (worst.error <= kOrthogonalityErrorMax) return absl::OkStatus();
  return Bad(absl::StrCat(name, " is not orthogonal: rows ", worst.other_row, " and ", worst.row,
                          " are off by ", worst.error));
}

absl::Status CheckText(absl::string_view field, const std::string& text) {
  if (text.empty()) return Bad(absl::StrCat("field '", field, "' is missing"));
  if (text.size() > kFormatTextBytesMax) {
    return Bad(absl::StrCat("field '", field, "' is longer than ", kFormatTextBytesMax, " bytes"));
  }
  if (!IsUtf8(text)) return Bad(absl::StrCat("field '", field, "' is not UTF-8"));
  return absl::OkStatus();
}

absl::Status CheckGeometry(const RotationSet& set) {
  OKV_RETURN_IF_ERROR(CheckText("model", set.model));
  OKV_RETURN_IF_ERROR(CheckText("weights_revision", set.weights_revision));
  OKV_RETURN_IF_ERROR(CheckText("method", set.method));
  for (const auto& [name, value] : set.provenance) {
    if (!IsUtf8(name)) return Bad("a name in 'provenance' is not UTF-8");
  }
  if (set.layer_ids.empty() || set.layer_ids.size() > kLayersMax) {
    return Bad(absl::StrCat("field 'layer_ids' has ", set.layer_ids.size(), " entries"));
  }
  for (size_t i = 1; i < set.layer_ids.size(); ++i) {
    if (set.layer_ids[i] <= set.layer_ids[i - 1]) return Bad("field 'layer_ids' is not ascending");
  }
  if (set.kv_heads == 0 || set.kv_heads > kKvHeadsMax) {
    return Bad(absl::StrCat("field 'kv_heads' is ", set.kv_heads));
  }
  if (set.head_dim != 64 && set.head_dim != 128 && set.head_dim != 256) {
    return Bad(absl::StrCat("field 'head_dim' is ", set.head_dim, ", not 64, 128 or 256"));
  }
  if (set.group_size < 32 || set.group_size > set.head_dim ||
      (set.group_size & (set.group_size - 1)) != 0) {
    return Bad(absl::StrCat("field 'group_size' is ", set.group_size));
  }
  if (set.rotation_heads != 1 && set.rotation_heads != set.kv_heads) {
    return Bad(absl::StrCat("field 'rotation_heads' is ", set.rotation_heads));
  }
  const size_t matrices = set.layer_ids.size() * set.rotation_heads;
  const size_t elements = matrices * set.head_dim * set.head_dim;
  if (elements > kFieldBytesMax / sizeof(uint16_t)) {
    return Bad(absl::StrCat(elements, " elements of 'r_k' are more than its hash can cover"));
  }
  if (set.r_k.size() != elements) return Bad("tensor 'r_k' has the wrong size");
  if (set.r_v.size() != elements) return Bad("tensor 'r_v' has the wrong size");
  const size_t ranks = set.layer_ids.size() * set.kv_heads;
  if (set.clip_rank_k.size() != ranks) return Bad("tensor 'clip_rank_k' has the wrong size");
  if (set.clip_rank_v.size() != ranks) return Bad("tensor 'clip_rank_v' has the wrong size");
  return absl::OkStatus();
}

absl::Status CheckRanks(const RotationSet& set, const std::vector<uint32_t>& ranks,
                        absl::string_view name) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < set.head_dim) continue;
    return Bad(absl::StrCat(name, " of layer ", set.layer_ids[i / set.kv_heads], ", head ",
                            i % set.kv_heads, " is ", ranks[i], ", not below head_dim ",
                            set.head_dim));
  }
  return absl::OkStatus();
}

absl::Status CheckPromises(const RotationSet& set, const std::vector<float>& errors,
                           absl::string_view name) {
  if (errors.empty()) return absl::OkStatus();
  if (errors.size() != set.layer_ids.size()) {
    return Bad(absl::StrCat("tensor '", name, "' has the wrong size"));
  }
  for (size_t i = 0; i < errors.size(); ++i) {
    if (std::isfinite(errors[i]) && errors[i] >= 0) continue;
    return Bad(absl::StrCat(name, " of layer ", set.layer_ids[i], " is ", errors[i]));
  }
  return absl::OkStatus();
}

using Metadata = std::map<std::string, std::string>;

absl::StatusOr<std::string> TextField(const Metadata& metadata, const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) return Bad(absl::StrCat("field '", name, "' is missing"));
  return found->second;
}

absl::StatusOr<uint32_t> NumberField(const Metadata& metadata, const std::string& name) {
  OKV_ASSIGN_OR_RETURN(const std::string text, TextField(metadata, name));
  uint32_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) {
    return Bad(absl::StrCat("field '", name, "' is '", text, "', not a number"));
  }
  return number;
}

template <typename T>
absl::Status ReadTensor(const Safetensors& file, const std::string& name, absl::string_view dtype,
                        const std::vector<uint64_t>& shape, std::vector<T>* out) {
  const Safetensors::Tensor* tensor = file.Find(name);
  if (tensor == nullptr) return Bad(absl::StrCat("tensor '", name, "' is missing"));
  if (tensor->dtype != dtype || tensor->shape != shape) {
    return Bad(absl::StrCat("tensor '", name, "' is ", tensor->dtype, " [",
                            absl::StrJoin(tensor->shape, ", "), "], not ", dtype, " [",
                            absl::StrJoin(shape, ", "), "]"));
  }
  out->resize(tensor->data.size() / sizeof(T));
  std::memcpy(out->data(), tensor->data.data(), tensor->data.size());
  return absl::OkStatus();
}

absl::Status ReadFields(const Metadata& metadata, RotationSet* set) {
  OKV_ASSIGN_OR_RETURN(const std::string version, TextField(metadata, "okv_rotation_set"));
  if (version != kFileVersion) return Bad(absl::StrCat("file version ", version, " is not known"));
  OKV_ASSIGN_OR_RETURN(set->model, TextField(metadata, "model"));
  OKV_ASSIGN_OR_RETURN(set->weights_revision, TextField(metadata, "weights_revision"));
  OKV_ASSIGN_OR_RETURN(set->method, TextField(metadata, "method"));
  OKV_ASSIGN_OR_RETURN(set->kv_heads, NumberField(metadata, "kv_heads"));
  OKV_ASSIGN_OR_RETURN(set->head_dim, NumberField(metadata, "head_dim"));
  OKV_ASSIGN_OR_RETURN(set->group_size, NumberField(metadata, "group_size"));
  OKV_ASSIGN_OR_RETURN(set->rotation_heads, NumberField(metadata, "rotation_heads"));
  OKV_ASSIGN_OR_RETURN(const std::string layers, TextField(metadata, "layer_ids"));
  for (const absl::string_view text : absl::StrSplit(layers, ',')) {
    uint32_t layer = 0;
    if (!absl::SimpleAtoi(text, &layer)) {
      return Bad(absl::StrCat("field 'layer_ids' holds '", text, "'"));
    }
    set->layer_ids.push_back(layer);
  }
  for (const auto& [name, value] : metadata) {
    if (!absl::StartsWith(name, kProvenancePrefix)) continue;
    set->provenance[name.substr(kProvenancePrefix.size())] = value;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RotationSet::Validate() const {
  OKV_RETURN_IF_ERROR(CheckGeometry(*this));
  for (const bool is_value : {false, true}) {
    for (size_t i = 0; i < layer_ids.size() * rotation_heads; ++i) {
      const std::string name =
          absl::StrCat(is_value ? "r_v" : "r_k", " of layer ", layer_ids[i / rotation_heads],
                       ", head ", i % rotation_heads);
      const uint16_t* bits = (is_value ? r_v : r_k).data() + i * head_dim * head_dim;
      OKV_RETURN_IF_ERROR(CheckMatrix(bits, head_dim, name));
    }
  }
  OKV_RETURN_IF_ERROR(CheckRanks(*this, clip_rank_k, "clip_rank_k"));
  OKV_RETURN_IF_ERROR(CheckRanks(*this, clip_rank_v, "clip_rank_v"));
  OKV_RETURN_IF_ERROR(CheckPromises(*this, promised_error_k, "promised_error_k"));
  return CheckPromises(*this, promised_error_v, "promised_error_v");
}

RotationHash RotationSet::hash() const {
  std::string bytes;
  FieldWriter fields(&bytes);
  fields.U32(kVersion, 1);
  fields.Bytes(kModel, model);
  fields.Bytes(kWeightsRevision, weights_revision);
  fields.Bytes(kLayerIds, AsBytes(layer_ids));
  fields.U32(kKvHeads, kv_heads);
  fields.U32(kHeadDim, head_dim);
  fields.U32(kGroupSize, group_size);
  fields.U32(kRotationHeads, rotation_heads);
  fields.Bytes(kMethod, method);
  fields.Bytes(kRK, AsBytes(r_k));
  fields.Bytes(kRV, AsBytes(r_v));
  fields.Bytes(kClipRankK, AsBytes(clip_rank_k));
  fields.Bytes(kClipRankV, AsBytes(clip_rank_v));
  return RotationHash{Sha256(bytes)};
}

std::string RotationSet::Serialize() const {
  const std::vector<uint64_t> matrices = {layer_ids.size(), rotation_heads, head_dim, head_dim};
  const std::vector<uint64_t> ranks = {layer_ids.size(), kv_heads};
  Metadata metadata = {
      {"okv_rotation_set", std::string(kFileVersion)},
      {"model", model},
      {"weights_revision", weights_revision},
      {"layer_ids", absl::StrJoin(layer_ids, ",")},
      {"kv_heads", absl::StrCat(kv_heads)},
      {"head_dim", absl::StrCat(head_dim)},
      {"group_size", absl::StrCat(group_size)},
      {"rotation_heads", absl::StrCat(rotation_heads)},
      {"method", method},
      {"rotation_hash", hash().Hex()},
  };
  for (const auto& [name, value] : provenance) {
    metadata[absl::StrCat(kProvenancePrefix, name)] = value;
  }
  std::map<std::string, Safetensors::Tensor> tensors = {
      {"r_k", {"BF16", matrices, AsBytes(r_k)}},
      {"r_v", {"BF16", matrices, AsBytes(r_v)}},
      {"clip_rank_k", {"U32", ranks, AsBytes(clip_rank_k)}},
      {"clip_rank_v", {"U32", ranks, AsBytes(clip_rank_v)}},
  };
  if (!promised_error_k.empty()) {
    tensors["promised_error_k"] = {"F32", {layer_ids.size()}, AsBytes(promised_error_k)};
  }
  if (!promised_error_v.empty()) {
    tensors["promised_error_v"] = {"F32", {layer_ids.size()}, AsBytes(promised_error_v)};
  }
  return WriteSafetensors(tensors, metadata);
}

absl::StatusOr<RotationSet> RotationSet::Parse(absl::string_view bytes) {
  OKV_ASSIGN_OR_RETURN(const Safetensors file, Safetensors::Parse(bytes));
  RotationSet set;
  OKV_RETURN_IF_ERROR(ReadFields(file.metadata(), &set));
  const std::vector<uint64_t> matrices = {set.layer_ids.size(), set.rotation_heads, set.head_dim,
                                          set.head_dim};
  const std::vector<uint64_t> ranks = {set.layer_ids.size(), set.kv_heads};
  OKV_RETURN_IF_ERROR(ReadTensor(file, "r_k", "BF16", matrices, &set.r_k));
  OKV_RETURN_IF_ERROR(ReadTensor(file, "r_v", "BF16", matrices, &set.r_v));
  OKV_RETURN_IF_ERROR(ReadTensor(file, "clip_rank_k", "U32", ranks, &set.clip_rank_k));
  OKV_RETURN_IF_ERROR(ReadTensor(file, "clip_rank_v", "U32", ranks, &set.clip_rank_v));
  // Older files have none of these two.
  for (const bool is_value : {false, true}) {
    const std::string name = is_value ? "promised_error_v" : "promised_error_k";
    if (file.Find(name) == nullptr) continue;
    OKV_RETURN_IF_ERROR(ReadTensor(file, name, "F32", {set.layer_ids.size()},
                                   is_value ? &set.promised_error_v : &set.promised_error_k));
  }
  OKV_RETURN_IF_ERROR(set.Validate());
  OKV_ASSIGN_OR_RETURN(const std::string stored, TextField(file.metadata(), "rotation_hash"));
  if (stored != set.hash().Hex()) {
    return absl::DataLossError(absl::StrCat("rotation set: stored hash ", stored,
                                            " is not that of its content, ", set.hash().Hex()));
  }
  return set;
}

absl::Status RotationSet::CheckMatches(const Format& format) const {
  const auto differs = [](absl::string_view field, const std::string& here,
                          const std::string& there) {
    return absl::FailedPreconditionError(absl::StrCat(
        "field '", field, "' differs: ", here, " in the rotation set, ", there, " in the format"));
  };
  if (model != format.model) return differs("model", model, format.model);
  if (weights_revision != format.weights_revision) {
    return differs("weights_revision", weights_revision, format.weights_revision);
  }
  if (layer_ids != format.layer_ids) {
    return differs("layer_ids", absl::StrJoin(layer_ids, ","),
                   absl::StrJoin(format.layer_ids, ","));
  }
  if (kv_heads != format.kv_heads) {
    return differs("kv_heads", absl::StrCat(kv_heads), absl::StrCat(format.kv_heads));
  }
  if (head_dim != format.head_dim_k) {
    return differs("head_dim_k", absl::StrCat(head_dim), absl::StrCat(format.head_dim_k));
  }
  if (group_size != format.group_size) {
    return differs("group_size", absl::StrCat(group_size), absl::StrCat(format.group_size));
  }
  if (hash() != format.rotation_hash) {
    return differs("rotation_hash", hash().Hex(), format.rotation_hash.Hex());
  }
  return absl::OkStatus();
}

}  // namespace okv
