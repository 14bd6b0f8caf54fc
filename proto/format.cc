#include "proto/format.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/fields.h"

namespace okv {
namespace {

constexpr absl::string_view kMagic = "OKVF";
constexpr uint8_t kEncodingVersion = 1;
constexpr size_t kTextBytesMax = 4096;

// Field tags of the canonical encoding, in order. In every format id: never renumber.
enum Tag : uint8_t {
  kModel = 1,
  kWeightsRevision,
  kLayerIds,
  kKvHeads,
  kHeadDimK,
  kHeadDimV,
  kRopeTheta,
  kRopeScaling,
  kBlockTokensTag,
  kSinkTokens,
  kRecentTokens,
  kView,
  kGroupSize,
  kRotationHash,
  kPageLayoutVersionTag,
};

absl::Status Bad(absl::string_view field, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("format field '", field, "' ", why));
}

bool IsHeadDim(uint32_t dim) { return dim == 64 || dim == 128 || dim == 256; }
bool IsPowerOfTwo(uint32_t value) { return value != 0 && (value & (value - 1)) == 0; }

absl::Status ValidateText(absl::string_view field, const std::string& text, bool may_be_empty) {
  if (text.empty() && !may_be_empty) return Bad(field, "is missing");
  if (text.size() > kTextBytesMax) {
    return Bad(field, absl::StrCat("is longer than ", kTextBytesMax, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status ValidateWindows(const Format& format) {
  if (format.block_tokens != kBlockTokens) {
    return Bad("block_tokens", absl::StrCat("is ", format.block_tokens, ", not ", kBlockTokens));
  }
  if (format.sink_tokens == 0 || format.sink_tokens % kBlockTokens != 0) {
    return Bad("sink_tokens", absl::StrCat("is ", format.sink_tokens,
                                           ", not a positive multiple of ", kBlockTokens));
  }
  if (format.recent_tokens % kBlockTokens != 0) {
    return Bad("recent_tokens",
               absl::StrCat("is ", format.recent_tokens, ", not a multiple of ", kBlockTokens));
  }
  return absl::OkStatus();
}

absl::Status ValidateGeometry(const Format& format) {
  if (format.layer_ids.empty() || format.layer_ids.size() > kLayersMax) {
    return Bad("layer_ids", absl::StrCat("has ", format.layer_ids.size(), " entries, not 1 to ",
                                         kLayersMax));
  }
  for (size_t i = 1; i < format.layer_ids.size(); ++i) {
    if (format.layer_ids[i] <= format.layer_ids[i - 1]) {
      return Bad("layer_ids", "is not ascending");
    }
  }
  if (format.kv_heads == 0 || format.kv_heads > kKvHeadsMax) {
    return Bad("kv_heads", absl::StrCat("is ", format.kv_heads, ", not 1 to ", kKvHeadsMax));
  }
  if (!IsHeadDim(format.head_dim_k)) {
    return Bad("head_dim_k", absl::StrCat("is ", format.head_dim_k, ", not 64, 128 or 256"));
  }
  if (format.head_dim_v != format.head_dim_k) {
    return Bad("head_dim_v", absl::StrCat("is ", format.head_dim_v, ", not head_dim_k's ",
                                          format.head_dim_k));
  }
  if (!(format.rope_theta > 0) || !std::isfinite(format.rope_theta)) {
    return Bad("rope_theta", absl::StrCat("is ", format.rope_theta, ", not a positive number"));
  }
  if (!IsPowerOfTwo(format.group_size) || format.group_size < 32 ||
      format.group_size > format.head_dim_k) {
    return Bad("group_size", absl::StrCat("is ", format.group_size,
                                          ", not a power of two from 32 to ", format.head_dim_k));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Format::Validate() const {
  struct Text {
    absl::string_view field;
    const std::string& text;
    bool may_be_empty;
  };
  for (const Text& entry : {Text{"model", model, false},
                            Text{"weights_revision", weights_revision, false},
                            Text{"rope_scaling", rope_scaling, true}, Text{"view", view, false}}) {
    absl::Status status = ValidateText(entry.field, entry.text, entry.may_be_empty);
    if (!status.ok()) return status;
  }
  if (absl::Status status = ValidateGeometry(*this); !status.ok()) return status;
  if (absl::Status status = ValidateWindows(*this); !status.ok()) return status;
  if (rotation_hash.is_zero()) return Bad("rotation_hash", "is missing");
  if (page_layout_version != kPageLayoutVersion) {
    return Bad("page_layout_version", absl::StrCat("is ", page_layout_version,
                                                   "; this program reads ", kPageLayoutVersion));
  }
  return absl::OkStatus();
}

std::string Format::Canonical() const {
  std::string out(kMagic);
  out.push_back(static_cast<char>(kEncodingVersion));
  std::string layers;
  for (const uint32_t layer : layer_ids) AppendU32(&layers, layer);
  FieldWriter fields(&out);
  fields.Bytes(kModel, model);
  fields.Bytes(kWeightsRevision, weights_revision);
  fields.Bytes(kLayerIds, layers);
  fields.U32(kKvHeads, kv_heads);
  fields.U32(kHeadDimK, head_dim_k);
  fields.U32(kHeadDimV, head_dim_v);
  fields.Double(kRopeTheta, rope_theta);
  fields.Bytes(kRopeScaling, rope_scaling);
  fields.U32(kBlockTokensTag, block_tokens);
  fields.U32(kSinkTokens, sink_tokens);
  fields.U32(kRecentTokens, recent_tokens);
  fields.Bytes(kView, view);
  fields.U32(kGroupSize, group_size);
  fields.Bytes(kRotationHash, rotation_hash.view());
  fields.U32(kPageLayoutVersionTag, page_layout_version);
  return out;
}

absl::StatusOr<Format> Format::Parse(absl::string_view canonical) {
  FieldReader reader(canonical);
  if (reader.Take(kMagic.size()) != kMagic || reader.Unsigned(1) != kEncodingVersion) {
    return absl::InvalidArgumentError("not a canonical format: wrong magic or encoding version");
  }
  Format format;
  format.model = std::string(reader.Bytes(kModel, kTextBytesMax));
  format.weights_revision = std::string(reader.Bytes(kWeightsRevision, kTextBytesMax));
  const absl::string_view layers = reader.Bytes(kLayerIds, size_t{kLayersMax} * 4);
  format.kv_heads = reader.U32(kKvHeads);
  format.head_dim_k = reader.U32(kHeadDimK);
  format.head_dim_v = reader.U32(kHeadDimV);
  format.rope_theta = reader.Double(kRopeTheta);
  format.rope_scaling = std::string(reader.Bytes(kRopeScaling, kTextBytesMax));
  format.block_tokens = reader.U32(kBlockTokensTag);
  format.sink_tokens = reader.U32(kSinkTokens);
  format.recent_tokens = reader.U32(kRecentTokens);
  format.view = std::string(reader.Bytes(kView, kTextBytesMax));
  format.group_size = reader.U32(kGroupSize);
  const absl::string_view rotation = reader.Bytes(kRotationHash, 32);
  format.page_layout_version = reader.U32(kPageLayoutVersionTag);
  if (!reader.done() || layers.size() % 4 != 0 || rotation.size() != 32) {
    return absl::InvalidArgumentError("not a canonical format: truncated, or fields out of place");
  }
  FieldReader layer_reader(layers);
  while (!layer_reader.done()) {
    format.layer_ids.push_back(static_cast<uint32_t>(layer_reader.Unsigned(4)));
  }
  format.rotation_hash = *RotationHash::FromBytes(rotation);
  if (absl::Status status = format.Validate(); !status.ok()) return status;
  return format;
}

FormatId Format::id() const { return FormatId{Sha256(Canonical())}; }

std::string DescribeDifference(const Format& here, const Format& there) {
  struct Field {
    absl::string_view name;
    std::string here;
    std::string there;
  };
  const auto layers = [](const Format& format) {
    return absl::StrCat("[", absl::StrJoin(format.layer_ids, ","), "]");
  };
  const Field fields[] = {
      {"model", here.model, there.model},
      {"weights_revision", here.weights_revision, there.weights_revision},
      {"layer_ids", layers(here), layers(there)},
      {"kv_heads", absl::StrCat(here.kv_heads), absl::StrCat(there.kv_heads)},
      {"head_dim_k", absl::StrCat(here.head_dim_k), absl::StrCat(there.head_dim_k)},
      {"head_dim_v", absl::StrCat(here.head_dim_v), absl::StrCat(there.head_dim_v)},
      {"rope_theta", absl::StrCat(here.rope_theta), absl::StrCat(there.rope_theta)},
      {"rope_scaling", here.rope_scaling, there.rope_scaling},
      {"block_tokens", absl::StrCat(here.block_tokens), absl::StrCat(there.block_tokens)},
      {"sink_tokens", absl::StrCat(here.sink_tokens), absl::StrCat(there.sink_tokens)},
      {"recent_tokens", absl::StrCat(here.recent_tokens), absl::StrCat(there.recent_tokens)},
      {"view", here.view, there.view},
      {"group_size", absl::StrCat(here.group_size), absl::StrCat(there.group_size)},
      {"rotation_hash", here.rotation_hash.Hex(), there.rotation_hash.Hex()},
      {"page_layout_version", absl::StrCat(here.page_layout_version),
       absl::StrCat(there.page_layout_version)},
  };
  for (const Field& field : fields) {
    if (field.here == field.there) continue;
    return absl::StrCat("field '", field.name, "' differs: ", field.here, " here, ", field.there,
                        " there");
  }
  // StrCat prints six digits of a double: two thetas may differ behind them.
  if (here.rope_theta != there.rope_theta) return "field 'rope_theta' differs in its last digits";
  return "";
}

}  // namespace okv
