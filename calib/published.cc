#include "calib/published.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "calib/quoted.h"
#include "calib/torch_file.h"
#include "proto/format.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr double kOrthogonalityErrorMax = 1.0 / 4096;
// 256 MiB: 128 layers of 32 heads of 128 x 128. Layers may share all of a storage, as published
// Hadamard rotations do, so that the file's own size is no bound.
constexpr size_t kElementsMax = size_t{1} << 26;
constexpr float kNegativeMax = 1e-6f;  // Of the largest eigenvalue.
constexpr uint64_t kFileBytesMax = uint64_t{1} << 32;

absl::Status BadLayer(uint32_t layer, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer, ": ", why));
}
absl::Status InLayer(uint32_t layer, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("layer ", layer, ": ", status.message()));
}

absl::StatusOr<uint32_t> LayerOfKey(const Pickle::Node& key) {
  uint32_t layer = 0;
  if (key.kind == Pickle::Kind::kText && absl::SimpleAtoi(key.text, &layer)) return layer;
  if (key.kind == Pickle::Kind::kInt && key.number >= 0 && key.number <= UINT32_MAX) {
    return static_cast<uint32_t>(key.number);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a key of 'layers' is no layer id: ",
                   key.kind == Pickle::Kind::kInt ? absl::StrCat(key.number) : Quoted(key.text)));
}

// Reads one file.
class Reader {
 public:
  explicit Reader(const TorchFile& file) : file_(file), pickle_(file.pickle()) {}
  absl::StatusOr<PublishedRotations> Read();

 private:
  absl::Status ReadHeader();
  absl::StatusOr<std::map<uint32_t, Pickle::Index>> Layers() const;
  absl::Status ReadLayer(uint32_t layer, const Pickle::Node& entry);
  absl::Status ReadShape(const TorchTensor& rotation);
  absl::Status CheckRotation(const float* rotation, uint32_t head) const;
  absl::Status ReadEigenvalues(const Pickle::Node& entry);

  const TorchFile& file_;
  const Pickle& pickle_;
  size_t layers_count_ = 0;
  PublishedRotations result_;
};

absl::StatusOr<PublishedRotations> Reader::Read() {
  OKV_RETURN_IF_ERROR(ReadHeader());
  OKV_ASSIGN_OR_RETURN(const auto layers, Layers());
  layers_count_ = layers.size();
  for (const auto& [layer, entry] : layers) {
    if (absl::Status status = ReadLayer(layer, pickle_.at(entry)); !status.ok()) {
      return InLayer(layer, status);
    }
    result_.layer_ids.push_back(layer);
  }
  OKV_RETURN_IF_ERROR(CheckEigenvalues(result_));
  return std::move(result_);
}

// What stands beside the layers; all of it may be absent.
absl::Status Reader::ReadHeader() {
  const Pickle::Node& root = pickle_.at(pickle_.root());
  OKV_ASSIGN_OR_RETURN(const Pickle::Node* version, pickle_.Find(root, "format_version"));
  if (version != nullptr && version->kind != Pickle::Kind::kInt) {
    return absl::InvalidArgumentError(
        absl::StrCat("'format_version' is a ", KindName(version->kind), ", not 1 or 2"));
  }
  if (version != nullptr && version->number != 1 && version->number != 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("'format_version' is ", version->number, ", not 1 or 2"));
  }
  OKV_ASSIGN_OR_RETURN(const Pickle::Node* objective, pickle_.Find(root, "objective"));
  if (objective == nullptr) return absl::OkStatus();
  if (objective->kind != Pickle::Kind::kText) {
    return absl::InvalidArgumentError(
        absl::StrCat("'objective' is a ", KindName(objective->kind), ", not a text"));
  }
  if (objective->text.size() > kFormatTextBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("'objective' is longer than ", kFormatTextBytesMax, " bytes"));
  }
  result_.objective = std::string(objective->text);
  return absl::OkStatus();
}

absl::StatusOr<std::map<uint32_t, Pickle::Index>> Reader::Layers() const {
  const Pickle::Node& root = pickle_.at(pickle_.root());
  OKV_ASSIGN_OR_RETURN(const Pickle::Index index, pickle_.Get(root, "layers", Pickle::Kind::kDict));
  const Pickle::Node& dict = pickle_.at(index);
  std::map<uint32_t, Pickle::Index> layers;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    OKV_ASSIGN_OR_RETURN(const uint32_t layer, LayerOfKey(pickle_.at(dict.items[i])));
    if (!layers.emplace(layer, dict.items[i + 1]).second) {
      return BadLayer(layer, "it stands twice");
    }
  }
  if (layers.empty() || layers.size() > kLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("'layers' has ", layers.size(), " entries, not 1 to ", kLayersMax));
  }
  return layers;
}

absl::Status Reader::ReadLayer(uint32_t layer, const Pickle::Node& entry) {
  OKV_ASSIGN_OR_RETURN(const Pickle::Node* id, pickle_.Find(entry, "layer_id"));
  if (id != nullptr && id->kind != Pickle::Kind::kInt) {
    return absl::InvalidArgumentError(
        absl::StrCat("its layer_id is a ", KindName(id->kind), ", not an integer"));
  }
  if (id != nullptr && id->number != int64_t{layer}) {
    return absl::InvalidArgumentError(absl::StrCat("its layer_id is ", id->number));
  }
  OKV_ASSIGN_OR_RETURN(const Pickle::Index index,
                       pickle_.Get(entry, "rotation", Pickle::Kind::kTensor));
  const TorchTensor& rotation = pickle_.tensor(index);
  if (rotation.type != TorchType::kFloat) {
    return absl::InvalidArgumentError(
        absl::StrCat("rotation is ", TorchTensorText(rotation), ", not of Float"));
  }
  OKV_RETURN_IF_ERROR(ReadShape(rotation));
  OKV_ASSIGN_OR_RETURN(const std::vector<float> numbers, file_.ReadFloats(rotation));
  const size_t matrix_elements = size_t{result_.head_dim} * result_.head_dim;
  for (uint32_t head = 0; head < result_.heads; ++head) {
    OKV_RETURN_IF_ERROR(CheckRotation(numbers.data() + head * matrix_elements, head));
  }
  result_.rotations.insert(result_.rotations.end(), numbers.begin(), numbers.end());
  return ReadEigenvalues(entry);
}

// The first layer's shape decides; all others must have it.
absl::Status Reader::ReadShape(const TorchTensor& rotation) {
  const std::vector<uint64_t>& sizes = rotation.sizes;
  const size_t dims = sizes.size();
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat("rotation is ", TorchTensorText(rotation), ", not ", why));
  };
  if ((dims != 2 && dims != 3) || sizes[dims - 1] != sizes[dims - 2]) {
    return bad("[d, d] or [kv_heads, d, d]");
  }
  if (sizes[dims - 1] != 64 && sizes[dims - 1] != 128 && sizes[dims - 1] != 256) {
    return bad("of dimension 64, 128 or 256");
  }
  if (dims == 3 && (sizes[0] == 0 || sizes[0] > kKvHeadsMax)) {
    return bad(absl::StrCat("of 1 to ", kKvHeadsMax, " KV heads"));
  }
  const uint32_t head_dim = static_cast<uint32_t>(sizes[dims - 1]);
  const uint32_t heads = dims == 3 ? static_cast<uint32_t>(sizes[0]) : 1;
  if (result_.layer_ids.empty()) {
    if (rotation.elements() > kElementsMax / layers_count_) {
      return bad(absl::StrCat("small enough for ", layers_count_, " layers: at most ", kElementsMax,
                              " elements in all"));
    }
    result_.head_dim = head_dim;
    result_.heads = heads;
    result_.per_head = dims == 3;
  } else if (head_dim != result_.head_dim || heads != result_.heads ||
             (dims == 3) != result_.per_head) {
    return bad(absl::StrCat("of the shape of layer ", result_.layer_ids[0]));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckRotation(const float* rotation, uint32_t head) const {
  const uint32_t dim = result_.head_dim;
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("rotation of head ", head, " ", why));
  };
  for (size_t i = 0; i < size_t{dim} * dim; ++i) {
    if (!std::isfinite(rotation[i])) {
      return bad(absl::StrCat("has NaN or Inf in row ", i / dim, ", column ", i % dim));
    }
  }
  std::vector<double> dots(dim);
  std::vector<double> transposed(size_t{dim} * dim);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t c = 0; c < dim; ++c) transposed[c * dim + i] = rotation[i * dim + c];
  }
  for (uint32_t i = 0; i < dim; ++i) {
    std::fill(dots.begin(), dots.end(), 0.0);
    for (uint32_t c = 0; c < dim; ++c) {
      const double factor = transposed[c * dim + i];
      for (uint32_t j = 0; j <= i; ++j) dots[j] += factor * transposed[c * dim + j];
    }
    for (uint32_t j = 0; j <= i; ++j) {
      const double error = std::abs(dots[j] - (i == j ? 1.0 : 0.0));
      if (!(error <= kOrthogonalityErrorMax)) {
        return bad(absl::StrCat("is not orthogonal: rows ", j, " and ", i, " are off by ", error));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Reader::ReadEigenvalues(const Pickle::Node& entry) {
  OKV_ASSIGN_OR_RETURN(const Pickle::Node* value, pickle_.Find(entry, "eigenvalues"));
  const bool first = result_.layer_ids.empty();
  if (!first && (value != nullptr) != !result_.eigenvalues.empty()) {
    return absl::InvalidArgumentError(value != nullptr
                                          ? "it has eigenvalues, layers before it have none"
                                          : "it has no eigenvalues, layers before it have some");
  }
  if (value == nullptr) return absl::OkStatus();
  OKV_ASSIGN_OR_RETURN(const Pickle::Index index,
                       pickle_.Get(entry, "eigenvalues", Pickle::Kind::kTensor));
  const TorchTensor& tensor = pickle_.tensor(index);
  std::vector<uint64_t> sizes = {result_.head_dim};
  if (result_.per_head) sizes.insert(sizes.begin(), result_.heads);
  if (tensor.type != TorchType::kFloat || tensor.sizes != sizes) {
    return absl::InvalidArgumentError(
        absl::StrCat("eigenvalues are ", TorchTensorText(tensor), ", not Float, one a channel"));
  }
  OKV_ASSIGN_OR_RETURN(const std::vector<float> numbers, file_.ReadFloats(tensor));
  result_.eigenvalues.insert(result_.eigenvalues.end(), numbers.begin(), numbers.end());
  return absl::OkStatus();
}

absl::string_view FloatBytes(const float* values, size_t count) {
  return absl::string_view(reinterpret_cast<const char*>(values), count * sizeof(float));
}

}  // namespace

absl::StatusOr<PublishedRotations> ParsePublished(absl::string_view bytes) {
  OKV_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(bytes));
  return Reader(file).Read();
}

absl::Status CheckEigenvalues(const PublishedRotations& rotations) {
  if (rotations.eigenvalues.empty()) return absl::OkStatus();
  for (size_t i = 0; i < rotations.layer_ids.size() * rotations.heads; ++i) {
    const uint32_t layer = rotations.layer_ids[i / rotations.heads];
    const float* const begin = rotations.eigenvalues.data() + i * rotations.head_dim;
    const float* const end = begin + rotations.head_dim;
    if (!std::all_of(begin, end, [](float x) { return std::isfinite(x); })) {
      return BadLayer(layer, "NaN or Inf in its eigenvalues");
    }
    if (const float* const at = std::is_sorted_until(begin, end); at != end) {
      return BadLayer(layer, absl::StrCat("its eigenvalues do not ascend: ", at[0], " in place ",
                                          at - begin, " after ", at[-1]));
    }
    if (begin[0] < 0 && begin[0] < -kNegativeMax * end[-1]) {
      return BadLayer(layer, absl::StrCat("its eigenvalue ", begin[0], " is negative, with ",
                                          end[-1], " the largest"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PublishedVersion> ParsePublishedVersion(absl::string_view name) {
  if (name == "v1") return PublishedVersion::kLayer;
  if (name == "v2") return PublishedVersion::kKvHead;
  return absl::InvalidArgumentError(
      absl::StrCat("format ", Quoted(name), " is not known; there are: v1, v2"));
}

absl::StatusOr<std::string> WritePublished(const PublishedRotations& rotations,
                                           PublishedVersion version, uint32_t kv_heads,
                                           absl::string_view folder) {
  const bool per_head = version == PublishedVersion::kKvHead;
  if (!per_head && rotations.heads > 1) {
    return absl::FailedPreconditionError(
        "format v1 has one rotation a layer; this set has one a KV head: say v2");
  }
  const uint64_t dim = rotations.head_dim;
  // Before any of it is allocated.
  const uint64_t heads = per_head ? std::max(rotations.heads, kv_heads) : rotations.heads;
  const uint64_t matrix_bytes = dim * dim * sizeof(float);
  if (heads * matrix_bytes > kFileBytesMax / std::max<size_t>(1, rotations.layer_ids.size())) {
    return absl::InvalidArgumentError(absl::StrCat(rotations.layer_ids.size(), " layers of ", heads,
                                                   " heads of ", dim, " x ", dim,
                                                   " numbers are more than a file of 4 GiB holds"));
  }
  const bool with_eigenvalues = !per_head && !rotations.eigenvalues.empty();
  const size_t fields_count = with_eigenvalues ? 3 : 2;
  TorchFileWriter writer(folder);
  writer.BeginDict(4);
  writer.Text("format_version");
  writer.Integer(static_cast<int64_t>(version));
  writer.Text("objective");
  writer.Text(rotations.objective);
  writer.Text("source_grouping");
  writer.Text(per_head ? "per_kv_head" : "layer");
  writer.Text("layers");
  writer.BeginDict(rotations.layer_ids.size());
  for (size_t i = 0; i < rotations.layer_ids.size(); ++i) {
    writer.Integer(rotations.layer_ids[i]);
    writer.BeginDict(fields_count);
    writer.Text("layer_id");
    writer.Integer(rotations.layer_ids[i]);
    writer.Text("rotation");
    const absl::string_view stored =
        FloatBytes(rotations.Rotation(i, 0), rotations.heads * dim * dim);
    if (per_head) {
      std::string bytes(stored);
      for (uint64_t head = rotations.heads; head < heads; ++head) {
        absl::StrAppend(&bytes, stored.substr(0, matrix_bytes));
      }
      writer.Tensor(TorchType::kFloat, {heads, dim, dim}, bytes);
    } else {
      writer.Tensor(TorchType::kFloat, {dim, dim}, stored);
    }
    if (with_eigenvalues) {
      writer.Text("eigenvalues");
      writer.Tensor(TorchType::kFloat, {dim}, FloatBytes(rotations.Eigenvalues(i, 0), dim));
    }
    writer.EndDict(fields_count);
  }
  writer.EndDict(rotations.layer_ids.size());
  writer.EndDict(4);
  return writer.Finish();
}

}  // namespace okv
