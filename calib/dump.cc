#include "calib/dump.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "calib/files.h"
#include "nlohmann/json.hpp"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"
#include "proto/safetensors.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kPrefix = "layer_";
constexpr absl::string_view kSuffix = ".safetensors";
constexpr const char* kTensorNames[] = {"q", "k", "v"};
constexpr uint32_t kQueryHeadsMax = 16 * kKvHeadsMax;  // GQA 1 to 16.

std::string LayerPath(const std::string& directory, uint32_t layer_id) {
  return absl::StrCat(directory, "/", kPrefix, layer_id, kSuffix);
}

// Bytes of an array as they lie in memory; dumps are little-endian, as every supported host is.
template <typename T>
absl::string_view AsBytes(const std::vector<T>& values) {
  return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// One file of the dump, mapped and checked but for the numbers in q, k and v.
struct LayerFile {
  MappedFile file;
  DumpInfo info;
  uint32_t layer_id;
  uint32_t tokens_count;
  std::vector<uint32_t> sequence_lengths;
  const Safetensors::Tensor* tensors[3];  // q, k, v; they point into `parsed`.
  std::unique_ptr<Safetensors> parsed;
};

absl::Status CheckRows(const Safetensors::Tensor& tensor, const char* name) {
  if (tensor.dtype != "BF16" && tensor.dtype != "F32") {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " has dtype ", tensor.dtype, ", not BF16 or F32"));
  }
  if (tensor.shape.size() != 3) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " has shape [",
                                                   absl::StrJoin(tensor.shape, ", "),
                                                   "], not [tokens, heads, head_dim]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Field(const std::map<std::string, std::string>& metadata,
                                  const std::string& name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) {
    return absl::InvalidArgumentError(absl::StrCat("__metadata__ has no ", name));
  }
  return found->second;
}

absl::StatusOr<uint32_t> LayerId(absl::string_view text) {
  uint32_t id = 0;
  if (!absl::SimpleAtoi(text, &id)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a layer id"));
  }
  return id;
}

absl::StatusOr<std::vector<uint32_t>> SequenceLengths(const Safetensors::Tensor& tensor,
                                                      uint64_t tokens_count) {
  const bool wide = tensor.dtype == "I64";
  if (!wide && tensor.dtype != "I32" && tensor.dtype != "U32") {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor seq_lens has dtype ", tensor.dtype, ", not I32, U32 or I64"));
  }
  if (tensor.shape.size() != 1) {
    return absl::InvalidArgumentError("tensor seq_lens is not one-dimensional");
  }
  std::vector<uint32_t> lengths;
  uint64_t sum = 0;
  for (size_t i = 0; i < tensor.shape[0]; ++i) {
    int64_t length = 0;
    if (wide) {
      std::memcpy(&length, tensor.data.data() + i * 8, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, tensor.data.data() + i * 4, 4);
      length = narrow;
    }
    if (length <= 0 || static_cast<uint64_t>(length) > tokens_count - sum) {
      return absl::InvalidArgumentError(absl::StrCat("seq_lens[", i, "] is ", length, " with ",
                                                     tokens_count - sum, " tokens left"));
    }
    sum += static_cast<uint64_t>(length);
    lengths.push_back(static_cast<uint32_t>(length));
  }
  if (sum != tokens_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("seq_lens sum to ", sum, ", the tensors have ", tokens_count, " tokens"));
  }
  return lengths;
}

absl::Status ReadMetadata(const std::map<std::string, std::string>& metadata, LayerFile* layer) {
  OKV_ASSIGN_OR_RETURN(layer->info.model, Field(metadata, "model"));
  OKV_ASSIGN_OR_RETURN(layer->info.weights_revision, Field(metadata, "weights_revision"));
  OKV_ASSIGN_OR_RETURN(layer->info.text_source, Field(metadata, "text_source"));
  OKV_ASSIGN_OR_RETURN(const std::string id, Field(metadata, "layer"));
  OKV_ASSIGN_OR_RETURN(layer->layer_id, LayerId(id));
  OKV_ASSIGN_OR_RETURN(const std::string ids, Field(metadata, "layer_ids"));
  for (const absl::string_view text : absl::StrSplit(ids, ',')) {
    OKV_ASSIGN_OR_RETURN(const uint32_t one, LayerId(text));
    layer->info.layer_ids.push_back(one);
  }
  return absl::OkStatus();
}

absl::Status CheckLayerFile(LayerFile* layer) {
  for (size_t i = 0; i < 3; ++i) {
    layer->tensors[i] = layer->parsed->Find(kTensorNames[i]);
    if (layer->tensors[i] == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", kTensorNames[i], " is missing"));
    }
    OKV_RETURN_IF_ERROR(CheckRows(*layer->tensors[i], kTensorNames[i]));
  }
  const auto& [q, k, v] = layer->tensors;
  if (k->shape != v->shape || q->shape[0] != k->shape[0] || q->shape[2] != k->shape[2]) {
    return absl::InvalidArgumentError(
        absl::StrCat("shapes do not fit together: q [", absl::StrJoin(q->shape, ", "), "], k [",
                     absl::StrJoin(k->shape, ", "), "], v [", absl::StrJoin(v->shape, ", "), "]"));
  }
  if (q->shape[1] > kQueryHeadsMax || k->shape[1] > kKvHeadsMax || q->shape[2] > 256 ||
      q->shape[0] > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("q [", absl::StrJoin(q->shape, ", "), "] is beyond the limits"));
  }
  if (q->shape[0] == 0) return absl::InvalidArgumentError("the tensors have no tokens");
  layer->tokens_count = static_cast<uint32_t>(q->shape[0]);
  layer->info.query_heads = static_cast<uint32_t>(q->shape[1]);
  layer->info.kv_heads = static_cast<uint32_t>(k->shape[1]);
  layer->info.head_dim = static_cast<uint32_t>(q->shape[2]);
  OKV_RETURN_IF_ERROR(ReadMetadata(layer->parsed->metadata(), layer));
  OKV_RETURN_IF_ERROR(layer->info.Validate());
  const Safetensors::Tensor* lengths = layer->parsed->Find("seq_lens");
  if (lengths == nullptr) return absl::InvalidArgumentError("tensor seq_lens is missing");
  OKV_ASSIGN_OR_RETURN(layer->sequence_lengths, SequenceLengths(*lengths, layer->tokens_count));
  return absl::OkStatus();
}

absl::Status Named(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::StatusOr<LayerFile> OpenLayer(const std::string& directory, uint32_t layer_id) {
  const std::string path = LayerPath(directory, layer_id);
  OKV_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  absl::StatusOr<Safetensors> parsed = Safetensors::Parse(file.bytes());
  if (!parsed.ok()) return Named(path, parsed.status());
  LayerFile layer{.file = std::move(file),
                  .info = {},
                  .layer_id = 0,
                  .tokens_count = 0,
                  .sequence_lengths = {},
                  .tensors = {},
                  .parsed = std::make_unique<Safetensors>(*std::move(parsed))};
  if (absl::Status status = CheckLayerFile(&layer); !status.ok()) return Named(path, status);
  if (layer.layer_id != layer_id) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": __metadata__ says layer ", layer.layer_id));
  }
  return layer;
}

// "" when the two layers belong to one dump.
std::string Difference(const DumpInfo& a, const LayerFile& b, uint32_t tokens_count,
                       const std::vector<uint32_t>& sequence_lengths) {
  const auto differs = [](absl::string_view what, const auto& one, const auto& other) {
    return absl::StrCat(what, " ", other, ", not ", one, " as in the first layer");
  };
  if (a.model != b.info.model) return differs("model", a.model, b.info.model);
  if (a.weights_revision != b.info.weights_revision) {
    return differs("weights_revision", a.weights_revision, b.info.weights_revision);
  }
  if (a.query_heads != b.info.query_heads) {
    return differs("query heads", a.query_heads, b.info.query_heads);
  }
  if (a.kv_heads != b.info.kv_heads) return differs("KV heads", a.kv_heads, b.info.kv_heads);
  if (a.head_dim != b.info.head_dim) return differs("head_dim", a.head_dim, b.info.head_dim);
  if (tokens_count != b.tokens_count) return differs("tokens", tokens_count, b.tokens_count);
  if (sequence_lengths != b.sequence_lengths) return "other sequence lengths than the first layer";
  if (a.layer_ids != b.info.layer_ids) return "other layer_ids than the first layer";
  return "";
}

// Ids of the layer files in `directory`, ascending.
absl::StatusOr<std::vector<uint32_t>> ListLayers(const std::string& directory) {
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read the dump ", directory));
  }
  std::vector<uint32_t> ids;
  for (const std::filesystem::directory_iterator end; entries != end; entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    absl::string_view id = name;
    if (!absl::ConsumePrefix(&id, kPrefix) || !absl::ConsumeSuffix(&id, kSuffix)) continue;
    absl::StatusOr<uint32_t> parsed = LayerId(id);
    if (!parsed.ok()) return Named(absl::StrCat(directory, "/", name), parsed.status());
    ids.push_back(*parsed);
    if (error) break;
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read the dump ", directory));
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Widens a tensor to fp32 and refuses what is not finite.
absl::Status ReadRows(const Safetensors::Tensor& tensor, const char* name, uint32_t layer_id,
                      std::vector<float>* rows) {
  const size_t heads = tensor.shape[1];
  const size_t dim = tensor.shape[2];
  rows->resize(tensor.shape[0] * heads * dim);
  if (tensor.dtype == "F32") {
    std::memcpy(rows->data(), tensor.data.data(), rows->size() * sizeof(float));
  } else {
    for (size_t i = 0; i < rows->size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, tensor.data.data() + 2 * i, sizeof(bits));
      (*rows)[i] = Bf16ToFloat(bits);
    }
  }
  const auto bad =
      std::find_if(rows->begin(), rows->end(), [](float x) { return !std::isfinite(x); });
  if (bad == rows->end()) return absl::OkStatus();
  const size_t index = static_cast<size_t>(bad - rows->begin());
  return absl::InvalidArgumentError(absl::StrCat("NaN or Inf in ", name, " of layer ", layer_id,
                                                 ", token ", index / (heads * dim), ", head ",
                                                 index / dim % heads));
}

}  // namespace

absl::Status DumpInfo::Validate() const {
  const auto invalid = [](absl::string_view what) { return absl::InvalidArgumentError(what); };
  if (model.empty()) return invalid("model is empty");
  if (weights_revision.empty()) return invalid("weights_revision is empty");
  if (layer_ids.empty() || layer_ids.size() > kLayersMax) {
    return invalid(
        absl::StrCat("layer_ids has ", layer_ids.size(), " entries, not 1 to ", kLayersMax));
  }
  if (std::adjacent_find(layer_ids.begin(), layer_ids.end(), std::greater_equal<>()) !=
      layer_ids.end()) {
    return invalid("layer_ids are not ascending");
  }
  if (kv_heads == 0 || kv_heads > kKvHeadsMax) {
    return invalid(absl::StrCat("kv_heads is ", kv_heads, ", not 1 to ", kKvHeadsMax));
  }
  if (query_heads == 0 || query_heads % kv_heads != 0 || query_heads > kQueryHeadsMax) {
    return invalid(
        absl::StrCat(query_heads, " query heads do not divide over ", kv_heads, " KV heads"));
  }
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return invalid(absl::StrCat("head_dim is ", head_dim, ", not 64, 128 or 256"));
  }
  return absl::OkStatus();
}

DumpWriter::DumpWriter(std::string directory, const DumpInfo& info)
    : directory_(std::move(directory)), info_(info), layer_tokens_(info.layer_ids.size(), 0) {}

absl::StatusOr<std::unique_ptr<DumpWriter>> DumpWriter::Create(const std::string& directory,
                                                               const DumpInfo& info) {
  OKV_RETURN_IF_ERROR(info.Validate());
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot make ", directory));
  std::filesystem::directory_iterator entries(directory, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read ", directory));
  for (const std::filesystem::directory_iterator end; entries != end && !error;
       entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (absl::string_view(name).substr(0, kPrefix.size()) == kPrefix) {
      return absl::AlreadyExistsError(absl::StrCat(directory, " already holds ", name));
    }
  }
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read ", directory));
  return std::unique_ptr<DumpWriter>(new DumpWriter(directory, info));
}

DumpWriter::~DumpWriter() {
  for (const uint32_t layer_id : info_.layer_ids) {
    for (const char* name : kTensorNames) unlink(SpoolPath(layer_id, name).c_str());
  }
}

std::string DumpWriter::SpoolPath(uint32_t layer_id, const char* tensor) const {
  return absl::StrCat(directory_, "/", kPrefix, layer_id, ".", tensor, ".spool");
}

absl::Status DumpWriter::Append(const DumpRows& rows) {
  OKV_CHECK(rows.layer < info_.layer_ids.size());
  const uint32_t id = info_.layer_ids[rows.layer];
  const size_t q_values = size_t{rows.tokens_count} * info_.query_heads * info_.head_dim;
  const size_t kv_values = size_t{rows.tokens_count} * info_.kv_heads * info_.head_dim;
  std::vector<uint16_t> q(q_values);
  std::transform(rows.q, rows.q + q_values, q.begin(), FloatToBf16);
  OKV_RETURN_IF_ERROR(AppendToFile(SpoolPath(id, "q"), AsBytes(q)));
  const auto bytes = [&](const uint16_t* values) {
    return absl::string_view(reinterpret_cast<const char*>(values), kv_values * sizeof(uint16_t));
  };
  OKV_RETURN_IF_ERROR(AppendToFile(SpoolPath(id, "k"), bytes(rows.k)));
  OKV_RETURN_IF_ERROR(AppendToFile(SpoolPath(id, "v"), bytes(rows.v)));
  layer_tokens_[rows.layer] += rows.tokens_count;
  return absl::OkStatus();
}

absl::Status DumpWriter::EndSequence() {
  for (size_t layer = 1; layer < layer_tokens_.size(); ++layer) {
    if (layer_tokens_[layer] != layer_tokens_[0]) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", info_.layer_ids[layer], " has ", layer_tokens_[layer],
                       " tokens, layer ", info_.layer_ids[0], " has ", layer_tokens_[0]));
    }
  }
  if (layer_tokens_[0] == ended_tokens_) return absl::OkStatus();
  sequence_lengths_.push_back(static_cast<uint32_t>(layer_tokens_[0] - ended_tokens_));
  ended_tokens_ = layer_tokens_[0];
  return absl::OkStatus();
}

absl::Status DumpWriter::Finish() {
  OKV_RETURN_IF_ERROR(EndSequence());
  if (ended_tokens_ == 0) return absl::FailedPreconditionError("the dump has no tokens");
  for (const uint32_t layer_id : info_.layer_ids) OKV_RETURN_IF_ERROR(JoinLayer(layer_id));
  return absl::OkStatus();
}

absl::Status DumpWriter::JoinLayer(uint32_t layer_id) const {
  nlohmann::json header;
  header["__metadata__"] = {{"model", info_.model},
                            {"weights_revision", info_.weights_revision},
                            {"text_source", info_.text_source},
                            {"layer", absl::StrCat(layer_id)},
                            {"layer_ids", absl::StrJoin(info_.layer_ids, ",")}};
  uint64_t offset = 0;
  const auto add = [&](const char* name, const char* dtype, std::vector<uint64_t> shape,
                       uint64_t bytes) {
    header[name] = {
        {"dtype", dtype}, {"shape", std::move(shape)}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  };
  for (const char* name : kTensorNames) {
    const uint64_t heads = name[0] == 'q' ? info_.query_heads : info_.kv_heads;
    add(name, "BF16", {ended_tokens_, heads, info_.head_dim},
        ended_tokens_ * heads * info_.head_dim * 2);
  }
  add("seq_lens", "U32", {sequence_lengths_.size()}, sequence_lengths_.size() * 4);

  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // Tensors start 8-aligned.
  OKV_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(LayerPath(directory_, layer_id)));
  OKV_RETURN_IF_ERROR(file.Append(AsBytes(std::vector<uint64_t>{text.size()})));
  OKV_RETURN_IF_ERROR(file.Append(text));
  for (const char* name : kTensorNames) {
    OKV_RETURN_IF_ERROR(file.AppendFile(SpoolPath(layer_id, name)));
  }
  OKV_RETURN_IF_ERROR(file.Append(AsBytes(sequence_lengths_)));
  return file.Commit();
}

AttentionHead LayerDump::Head(uint32_t first_token, uint32_t range_tokens, uint32_t query_head,
                              uint32_t group) const {
  OKV_CHECK(first_token + range_tokens <= tokens_count && query_head < query_heads);
  const size_t q_stride = size_t{query_heads} * head_dim;
  const size_t kv_stride = size_t{kv_heads} * head_dim;
  const size_t kv_offset = first_token * kv_stride + size_t{query_head / group} * head_dim;
  return {.q = q.data() + first_token * q_stride + size_t{query_head} * head_dim,
          .k = k.data() + kv_offset,
          .v = v.data() + kv_offset,
          .q_stride = q_stride,
          .k_stride = kv_stride,
          .v_stride = kv_stride,
          .tokens_count = range_tokens,
          .head_dim = head_dim};
}

absl::StatusOr<DumpReader> DumpReader::Open(const std::string& directory) {
  DumpReader reader(directory);
  OKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids, ListLayers(directory));
  if (ids.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no ", kPrefix, "<id>", kSuffix, " in the dump ", directory));
  }
  for (const uint32_t id : ids) {
    OKV_ASSIGN_OR_RETURN(const LayerFile layer, OpenLayer(directory, id));
    if (id == ids[0]) {
      reader.info_ = layer.info;
      reader.tokens_count_ = layer.tokens_count;
      reader.sequence_lengths_ = layer.sequence_lengths;
    }
    const std::string difference =
        Difference(reader.info_, layer, reader.tokens_count_, reader.sequence_lengths_);
    if (!difference.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat(LayerPath(directory, id), " has ", difference));
    }
  }
  for (const uint32_t id : reader.info_.layer_ids) {
    if (!std::binary_search(ids.begin(), ids.end(), id)) {
      return absl::NotFoundError(
          absl::StrCat("layer ", id, " of the dump is missing: no ", LayerPath(directory, id)));
    }
  }
  if (ids.size() != reader.info_.layer_ids.size()) {
    return absl::FailedPreconditionError(absl::StrCat(directory, " holds ", ids.size(),
                                                      " layer files, layer_ids names ",
                                                      reader.info_.layer_ids.size()));
  }
  return reader;
}

absl::StatusOr<LayerDump> DumpReader::ReadLayer(uint32_t position) const {
  OKV_CHECK(position < info_.layer_ids.size());
  OKV_ASSIGN_OR_RETURN(const LayerFile file, OpenLayer(directory_, info_.layer_ids[position]));
  const std::string difference = Difference(info_, file, tokens_count_, sequence_lengths_);
  if (!difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", info_.layer_ids[position], " has ", difference));
  }
  LayerDump layer{.layer_id = file.layer_id,
                  .tokens_count = tokens_count_,
                  .query_heads = info_.query_heads,
                  .kv_heads = info_.kv_heads,
                  .head_dim = info_.head_dim,
                  .sequence_lengths = sequence_lengths_,
                  .q = {},
                  .k = {},
                  .v = {}};
  std::vector<float>* rows[] = {&layer.q, &layer.k, &layer.v};
  for (size_t i = 0; i < 3; ++i) {
    OKV_RETURN_IF_ERROR(ReadRows(*file.tensors[i], kTensorNames[i], layer.layer_id, rows[i]));
  }
  return layer;
}

}  // namespace okv
