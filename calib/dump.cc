#include "calib/dump.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "calib/dump_layer.h"
#include "calib/files.h"
#include "nlohmann/json.hpp"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kPrefix = "layer_";

// Bytes of an array as they lie in memory; dumps are little-endian, as every supported host is.
template <typename T>
absl::string_view AsBytes(const std::vector<T>& values) {
  return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// Refuses what is not finite.
absl::Status CheckFinite(const std::vector<float>& rows, size_t tensor, const LayerDump& layer,
                         ThreadPool* pool) {
  std::atomic<size_t> first_bad = rows.size();
  ForEachPiece(rows.size(), pool, [&](size_t begin, size_t end) {
    const float* const bad = std::find_if(rows.data() + begin, rows.data() + end,
                                          [](float x) { return !std::isfinite(x); });
    const size_t at = static_cast<size_t>(bad - rows.data());
    if (at == end) return;
    size_t known = first_bad;
    while (at < known && !first_bad.compare_exchange_weak(known, at)) {
    }
  });
  if (first_bad == rows.size()) return absl::OkStatus();
  const size_t heads = tensor == 0 ? layer.query_heads : layer.kv_heads;
  const size_t row = first_bad / layer.head_dim;
  return absl::InvalidArgumentError(absl::StrCat("NaN or Inf in ", kDumpTensors[tensor],
                                                 " of layer ", layer.layer_id, ", token ",
                                                 row / heads, ", head ", row % heads));
}

// Whether names are given where the layout needs them.
absl::Status CheckGiven(const std::string& directory, DumpLayout layout, const DumpNames& names) {
  if (layout == DumpLayout::kSafetensors ||
      (!names.model.empty() && !names.weights_revision.empty())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      directory, " does not say of which model and weights_revision it is: name both"));
}

// Names that were given must be those that the dump has; the layouts without names took them over.
absl::Status CheckNames(const std::string& directory, const DumpNames& names,
                        const DumpInfo& info) {
  const auto differs = [&](absl::string_view what, const std::string& given,
                           const std::string& its) {
    return absl::FailedPreconditionError(
        absl::StrCat(directory, " has ", what, " ", its, ", not ", given));
  };
  if (!names.model.empty() && names.model != info.model) {
    return differs("model", names.model, info.model);
  }
  if (!names.weights_revision.empty() && names.weights_revision != info.weights_revision) {
    return differs("weights_revision", names.weights_revision, info.weights_revision);
  }
  return absl::OkStatus();
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
  for (const uint32_t layer_id : info_.layer_ids) RemoveSpools(layer_id);
}

void DumpWriter::RemoveSpools(uint32_t layer_id) const {
  for (const char* name : kDumpTensors) unlink(SpoolPath(layer_id, name).c_str());
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
  for (const uint32_t layer_id : info_.layer_ids) {
    OKV_RETURN_IF_ERROR(JoinLayer(layer_id));
    // Not all at the end: the disk never holds more than one layer twice.
    RemoveSpools(layer_id);
  }
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
  for (const char* name : kDumpTensors) {
    const uint64_t heads = name[0] == 'q' ? info_.query_heads : info_.kv_heads;
    add(name, "BF16", {ended_tokens_, heads, info_.head_dim},
        ended_tokens_ * heads * info_.head_dim * 2);
  }
  add("seq_lens", "U32", {sequence_lengths_.size()}, sequence_lengths_.size() * 4);

  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');  // Tensors start 8-aligned.
  const std::string path = LayerPath(directory_, DumpLayout::kSafetensors, layer_id);
  OKV_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path));
  OKV_RETURN_IF_ERROR(file.Append(AsBytes(std::vector<uint64_t>{text.size()})));
  OKV_RETURN_IF_ERROR(file.Append(text));
  for (const char* name : kDumpTensors) {
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

DumpReader::DumpReader(DumpLayerSource source)
    : source_(std::make_unique<DumpLayerSource>(std::move(source))) {}
DumpReader::DumpReader(DumpReader&&) noexcept = default;
DumpReader::~DumpReader() = default;

absl::StatusOr<std::unique_ptr<DumpLayer>> DumpReader::OpenLayer(uint32_t layer_id) const {
  switch (source_->listing.layout) {
    case DumpLayout::kTorch:
      return OpenTorchLayer(*source_, layer_id);
    case DumpLayout::kNumpy:
      return OpenNumpyLayer(*source_, layer_id);
    case DumpLayout::kSafetensors:
      break;
  }
  return OpenSafetensorsLayer(*source_, layer_id);
}

// Whether a layer belongs to the dump that the first layer began.
absl::Status DumpReader::CheckSame(const DumpLayer& layer) const {
  const auto differs = [&](const std::string& what) {
    return absl::FailedPreconditionError(absl::StrCat(
        LayerPath(source_->directory, source_->listing.layout, layer.layer_id()), " has ", what));
  };
  const auto other = [&](absl::string_view what, const auto& one, const auto& its) {
    return differs(absl::StrCat(what, " ", its, ", not ", one, " as in the first layer"));
  };
  const DumpInfo& info = layer.info();
  if (info_.model != info.model) return other("model", info_.model, info.model);
  if (info_.weights_revision != info.weights_revision) {
    return other("weights_revision", info_.weights_revision, info.weights_revision);
  }
  if (info_.query_heads != info.query_heads) {
    return other("query heads", info_.query_heads, info.query_heads);
  }
  if (info_.kv_heads != info.kv_heads) return other("KV heads", info_.kv_heads, info.kv_heads);
  if (info_.head_dim != info.head_dim) return other("head_dim", info_.head_dim, info.head_dim);
  if (tokens_count_ != layer.tokens_count()) {
    return other("tokens", tokens_count_, layer.tokens_count());
  }
  if (sequence_lengths_ != layer.sequence_lengths()) {
    return differs("other sequence lengths than the first layer");
  }
  if (info_.layer_ids != info.layer_ids) return differs("other layer_ids than the first layer");
  return absl::OkStatus();
}

absl::StatusOr<DumpReader> DumpReader::Open(const std::string& directory, const DumpNames& names) {
  OKV_ASSIGN_OR_RETURN(DumpListing listing, ListDump(directory));
  OKV_RETURN_IF_ERROR(CheckGiven(directory, listing.layout, names));
  DumpReader reader({.directory = directory, .listing = std::move(listing), .names = names});
  const DumpListing& listed = reader.source_->listing;
  for (const uint32_t id : listed.layer_ids) {
    OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DumpLayer> layer, reader.OpenLayer(id));
    if (id == listed.layer_ids[0]) {
      reader.info_ = layer->info();
      reader.tokens_count_ = layer->tokens_count();
      reader.sequence_lengths_ = layer->sequence_lengths();
    }
    OKV_RETURN_IF_ERROR(reader.CheckSame(*layer));
  }
  for (const uint32_t id : reader.info_.layer_ids) {
    if (!std::binary_search(listed.layer_ids.begin(), listed.layer_ids.end(), id)) {
      return absl::NotFoundError(absl::StrCat("layer ", id, " of the dump is missing: no ",
                                              LayerPath(directory, listed.layout, id)));
    }
  }
  if (listed.layer_ids.size() != reader.info_.layer_ids.size()) {
    return absl::FailedPreconditionError(absl::StrCat(directory, " holds ", listed.layer_ids.size(),
                                                      " layers, layer_ids names ",
                                                      reader.info_.layer_ids.size()));
  }
  OKV_RETURN_IF_ERROR(CheckNames(directory, names, reader.info_));
  return reader;
}

absl::StatusOr<LayerDump> DumpReader::ReadLayer(uint32_t position) const {
  ThreadPool alone(1);
  LayerDump layer;
  OKV_RETURN_IF_ERROR(ReadLayer(position, &alone, &layer));
  return layer;
}

absl::Status DumpReader::ReadLayer(uint32_t position, ThreadPool* pool, LayerDump* layer) const {
  OKV_CHECK(position < info_.layer_ids.size());
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DumpLayer> file, OpenLayer(info_.layer_ids[position]));
  OKV_RETURN_IF_ERROR(CheckSame(*file));
  *layer = {.layer_id = file->layer_id(),
            .tokens_count = tokens_count_,
            .query_heads = info_.query_heads,
            .kv_heads = info_.kv_heads,
            .head_dim = info_.head_dim,
            .sequence_lengths = sequence_lengths_,
            .q = std::move(layer->q),
            .k = std::move(layer->k),
            .v = std::move(layer->v)};
  std::vector<float>* rows[] = {&layer->q, &layer->k, &layer->v};
  for (size_t i = 0; i < 3; ++i) {
    OKV_RETURN_IF_ERROR(file->Read(i, pool, rows[i]));
    OKV_RETURN_IF_ERROR(CheckFinite(*rows[i], i, *layer, pool));
  }
  return absl::OkStatus();
}

}  // namespace okv
