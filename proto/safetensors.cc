#include "proto/safetensors.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/fields.h"
#include "proto/utf8.h"

namespace okv {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kHeaderBytesMax = 100'000'000;
constexpr size_t kLengthBytes = 8;
constexpr char kMetadataName[] = "__metadata__";

// 0 for an unknown dtype.
uint64_t DtypeBytes(absl::string_view dtype) {
  if (dtype == "U8" || dtype == "I8") return 1;
  if (dtype == "BF16" || dtype == "F16") return 2;
  if (dtype == "F32" || dtype == "U32" || dtype == "I32") return 4;
  if (dtype == "F64" || dtype == "U64" || dtype == "I64") return 8;
  return 0;
}

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("not a safetensors file: ", why));
}

// Bytes of a tensor, or false when the product overflows.
bool TensorBytes(const Safetensors::Tensor& tensor, uint64_t* bytes) {
  *bytes = DtypeBytes(tensor.dtype);
  for (const uint64_t size : tensor.shape) {
    if (size != 0 && *bytes > std::numeric_limits<uint64_t>::max() / size) return false;
    *bytes *= size;
  }
  return true;
}

struct Entry {
  std::string name;
  Safetensors::Tensor tensor;
  uint64_t begin;
  uint64_t end;
};

absl::StatusOr<Entry> ReadEntry(const std::string& name, const Json& json) {
  Entry entry{.name = name, .tensor = {}, .begin = 0, .end = 0};
  const auto is_unsigned = [](const Json& value) { return value.is_number_unsigned(); };
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !json["shape"].is_array() || !json.contains("data_offsets") ||
      !json["data_offsets"].is_array() || json["data_offsets"].size() != 2 ||
      !std::all_of(json["shape"].begin(), json["shape"].end(), is_unsigned) ||
      !std::all_of(json["data_offsets"].begin(), json["data_offsets"].end(), is_unsigned)) {
    return Bad(absl::StrCat("tensor '", name, "' has no proper dtype, shape and data_offsets"));
  }
  entry.tensor.dtype = json["dtype"].get<std::string>();
  if (DtypeBytes(entry.tensor.dtype) == 0) {
    return Bad(absl::StrCat("tensor '", name, "' has the unknown dtype ", entry.tensor.dtype));
  }
  for (const Json& size : json["shape"]) entry.tensor.shape.push_back(size.get<uint64_t>());
  entry.begin = json["data_offsets"][0].get<uint64_t>();
  entry.end = json["data_offsets"][1].get<uint64_t>();
  uint64_t bytes = 0;
  if (entry.end < entry.begin || !TensorBytes(entry.tensor, &bytes) ||
      bytes != entry.end - entry.begin) {
    return Bad(absl::StrCat("tensor '", name, "': dtype and shape do not fit its data_offsets"));
  }
  return entry;
}

absl::Status ReadMetadata(const Json& json, std::map<std::string, std::string>* metadata) {
  if (!json.is_object()) return Bad("__metadata__ is not an object");
  for (const auto& [name, value] : json.items()) {
    if (!value.is_string()) return Bad(absl::StrCat("__metadata__ '", name, "' is not a string"));
    (*metadata)[name] = value.get<std::string>();
  }
  return absl::OkStatus();
}

// A parser callback that sets *repeated when an object names a member twice: nlohmann keeps the
// last one in silence, other readers the first.
Json::parser_callback_t RepeatedNames(bool* repeated) {
  auto names = std::make_shared<std::vector<std::set<std::string>>>();  // Of the open objects.
  return [names, repeated](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) names->emplace_back();
    if (event == Json::parse_event_t::object_end) names->pop_back();
    if (event == Json::parse_event_t::key &&
        !names->back().insert(parsed.get_ref<const std::string&>()).second) {
      *repeated = true;
    }
    return true;
  };
}

// The JSON header, and where the data begins.
absl::StatusOr<std::pair<Json, size_t>> ReadHeader(absl::string_view bytes) {
  if (bytes.size() < kLengthBytes) {
    return absl::DataLossError("safetensors: truncated in its length");
  }
  const uint64_t length = FieldReader(bytes).Unsigned(kLengthBytes);
  if (length > kHeaderBytesMax) return Bad(absl::StrCat("header of ", length, " bytes"));
  if (length > bytes.size() - kLengthBytes) {
    return absl::DataLossError("safetensors: truncated in its header");
  }
  const absl::string_view text = bytes.substr(kLengthBytes, length);
  if (text.empty() || text.front() != '{') return Bad("its header is not a JSON object");
  bool repeated = false;
  Json header = Json::parse(text.begin(), text.end(), RepeatedNames(&repeated),
                            /*allow_exceptions=*/false);
  if (!header.is_object()) return Bad("its header is not a JSON object");
  if (repeated) return Bad("a name stands twice in its header");
  return std::make_pair(std::move(header), kLengthBytes + length);
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Parse(absl::string_view bytes) {
  auto header = ReadHeader(bytes);
  if (!header.ok()) return header.status();
  const absl::string_view data = bytes.substr(header->second);
  Safetensors file;
  std::vector<Entry> entries;
  for (const auto& [name, json] : header->first.items()) {
    if (name == kMetadataName) {
      absl::Status status = ReadMetadata(json, &file.metadata_);
      if (!status.ok()) return status;
      continue;
    }
    auto entry = ReadEntry(name, json);
    if (!entry.ok()) return entry.status();
    entries.push_back(*std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t at = 0;
  for (Entry& entry : entries) {
    if (entry.begin != at) {
      return Bad(absl::StrCat("tensor '", entry.name, "' overlaps another or leaves a hole"));
    }
    at = entry.end;
    if (at > data.size()) {
      return absl::DataLossError(absl::StrCat("safetensors: truncated in tensor '", entry.name,
                                              "': ", data.size(), " data bytes, ", at, " needed"));
    }
    entry.tensor.data = data.substr(entry.begin, entry.end - entry.begin);
    file.tensors_[entry.name] = std::move(entry.tensor);
  }
  if (at != data.size()) {
    return Bad(absl::StrCat(data.size() - at, " bytes behind the last tensor"));
  }
  return file;
}

const Safetensors::Tensor* Safetensors::Find(absl::string_view name) const {
  const auto found = tensors_.find(std::string(name));
  return found == tensors_.end() ? nullptr : &found->second;
}

std::string WriteSafetensors(const std::map<std::string, Safetensors::Tensor>& tensors,
                             const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();  // nlohmann sorts object keys.
  for (const auto& [name, value] : metadata) OKV_CHECK(IsUtf8(name));
  if (!metadata.empty()) header[kMetadataName] = metadata;
  uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    uint64_t bytes = 0;
    OKV_CHECK(IsUtf8(name) && name != kMetadataName && DtypeBytes(tensor.dtype) > 0);
    OKV_CHECK(TensorBytes(tensor, &bytes) && bytes == tensor.data.size());
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text =
      header.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string out;
  AppendU64(&out, text.size());
  out += text;
  out.reserve(out.size() + at);
  for (const auto& [name, tensor] : tensors) out.append(tensor.data.data(), tensor.data.size());
  return out;
}

}  // namespace okv
