#include "proto/format.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/fields.h"
#include "proto/status_macros.h"
#include "proto/utf8.h"

namespace okv {
namespace {

constexpr absl::string_view kMagic = "OKVF";
constexpr uint8_t kEncodingVersion = 1;

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

absl::Status CheckText(absl::string_view field, const std::string& text) {
  if (text.size() > kFormatTextBytesMax) {
    return Bad(field, absl::StrCat("is longer than ", kFormatTextBytesMax, " bytes"));
  }
  if (!IsUtf8(text)) return Bad(field, "is not UTF-8");
  return absl::OkStatus();
}

absl::Status CheckName(absl::string_view field, const std::string& text) {
  if (text.empty()) return Bad(field, "is missing");
  return CheckText(field, text);
}

absl::Status CheckLayers(const std::vector<uint32_t>& layer_ids) {
  if (layer_ids.empty() || layer_ids.size() > kLayersMax) {
    return Bad("layer_ids",
               absl::StrCat("has ", layer_ids.size(), " entries, not 1 to ", kLayersMax));
  }
  for (size_t i = 1; i < layer_ids.size(); ++i) {
    if (layer_ids[i] <= layer_ids[i - 1]) {
      return Bad("layer_ids",
                 absl::StrCat("is not ascending: ", layer_ids[i], " follows ", layer_ids[i - 1]));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const Format& format) {
  if (format.kv_heads == 0 || format.kv_heads > kKvHeadsMax) {
    return Bad("kv_heads", absl::StrCat("is ", format.kv_heads, ", not 1 to ", kKvHeadsMax));
  }
  if (!IsHeadDim(format.head_dim_k)) {
    return Bad("head_dim_k", absl::StrCat("is ", format.head_dim_k, ", not 64, 128 or 256"));
  }
  if (format.head_dim_v != format.head_dim_k) {
    return Bad("head_dim_v",
               absl::StrCat("is ", format.head_dim_v, ", not head_dim_k's ", format.head_dim_k));
  }
  if (!(format.rope_theta > 0) || !std::isfinite(format.rope_theta)) {
    return Bad("rope_theta", absl::StrCat("is ", format.rope_theta, ", not a positive number"));
  }
  return absl::OkStatus();
}

absl::Status CheckWindows(const Format& format) {
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

absl::Status CheckCodec(const Format& format) {
  if (!IsPowerOfTwo(format.group_size) || format.group_size < 32 ||
      format.group_size > format.head_dim_k) {
    return Bad("group_size", absl::StrCat("is ", format.group_size,
                                          ", not a power of two from 32 to ", format.head_dim_k));
  }
  if (format.rotation_hash.is_zero()) return Bad("rotation_hash", "is missing");
  if (format.page_layout_version != kPageLayoutVersion) {
    return Bad("page_layout_version", absl::StrCat("is ", format.page_layout_version,
                                                   "; this program reads ", kPageLayoutVersion));
  }
  return absl::OkStatus();
}

// A double in the fewest digits of %.15g and %.17g that give it back.
std::string Digits(double value) {
  const std::string text = absl::StrFormat("%.15g", value);
  double parsed = 0;
  if (absl::SimpleAtod(text, &parsed) && parsed == value) return text;
  return absl::StrFormat("%.17g", value);
}

// Not the whole lists: a model has up to 512 layers. `other` decides which entry is worth printing.
std::string DescribeLayers(const std::vector<uint32_t>& ids, const std::vector<uint32_t>& other) {
  const auto differs = std::mismatch(ids.begin(), ids.end(), other.begin(), other.end()).first;
  std::string text = absl::StrCat(ids.size(), " layers");
  if (differs != ids.end()) {
    absl::StrAppend(&text, " with ", *differs, " at position ", differs - ids.begin());
  }
  return text;
}

}  // namespace

absl::Status Format::Validate() const {
  OKV_RETURN_IF_ERROR(CheckName("model", model));
  OKV_RETURN_IF_ERROR(CheckName("weights_revision", weights_revision));
  OKV_RETURN_IF_ERROR(CheckLayers(layer_ids));
  OKV_RETURN_IF_ERROR(CheckHeads(*this));
  OKV_RETURN_IF_ERROR(CheckText("rope_scaling", rope_scaling));
  OKV_RETURN_IF_ERROR(CheckWindows(*this));
  OKV_RETURN_IF_ERROR(CheckName("view", view));
  return CheckCodec(*this);
}

std::string Format::Canonical() const {
  std::string out(kMagic);
  out.push_back(static_cast<char>(kEncodingVersion));
  std::string layers;
  AppendU32s(&layers, layer_ids);
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
  format.model = std::string(reader.Bytes(kModel, kFormatTextBytesMax));
  format.weights_revision = std::string(reader.Bytes(kWeightsRevision, kFormatTextBytesMax));
  const absl::string_view layers = reader.Bytes(kLayerIds, size_t{kLayersMax} * 4);
  format.kv_heads = reader.U32(kKvHeads);
  format.head_dim_k = reader.U32(kHeadDimK);
  format.head_dim_v = reader.U32(kHeadDimV);
  format.rope_theta = reader.Double(kRopeTheta);
  format.rope_scaling = std::string(reader.Bytes(kRopeScaling, kFormatTextBytesMax));
  format.block_tokens = reader.U32(kBlockTokensTag);
  format.sink_tokens = reader.U32(kSinkTokens);
  format.recent_tokens = reader.U32(kRecentTokens);
  format.view = std::string(reader.Bytes(kView, kFormatTextBytesMax));
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
  OKV_RETURN_IF_ERROR(format.Validate());
  return format;
}

FormatId Format::id() const { return FormatId{Sha256(Canonical())}; }

std::string DescribeDifference(const Format& here, const Format& there) {
  const auto differs = [](absl::string_view field, const auto& a, const auto& b) {
    return absl::StrCat("field '", field, "' differs: ", a, " here, ", b, " there");
  };
  const auto quoted = [](const std::string& text) { return absl::StrCat("\"", text, "\""); };
  const auto text = [&](absl::string_view field, std::string Format::*member) {
    if (here.*member == there.*member) return std::string();
    return differs(field, quoted(here.*member), quoted(there.*member));
  };
  const auto number = [&](absl::string_view field, uint32_t Format::*member) {
    if (here.*member == there.*member) return std::string();
    return differs(field, here.*member, there.*member);
  };
  const auto layers = [&] {
    if (here.layer_ids == there.layer_ids) return std::string();
    return differs("layer_ids", DescribeLayers(here.layer_ids, there.layer_ids),
                   DescribeLayers(there.layer_ids, here.layer_ids));
  };
  const auto theta = [&] {
    if (here.rope_theta == there.rope_theta) return std::string();
    return differs("rope_theta", Digits(here.rope_theta), Digits(there.rope_theta));
  };
  const auto rotation = [&] {
    if (here.rotation_hash == there.rotation_hash) return std::string();
    return differs("rotation_hash", here.rotation_hash.Hex(), there.rotation_hash.Hex());
  };
  const std::string differences[] = {
      text("model", &Format::model),
      text("weights_revision", &Format::weights_revision),
      layers(),
      number("kv_heads", &Format::kv_heads),
      number("head_dim_k", &Format::head_dim_k),
      number("head_dim_v", &Format::head_dim_v),
      theta(),
      text("rope_scaling", &Format::rope_scaling),
      number("block_tokens", &Format::block_tokens),
      number("sink_tokens", &Format::sink_tokens),
      number("recent_tokens", &Format::recent_tokens),
      text("view", &Format::view),
      number("group_size", &Format::group_size),
      rotation(),
      number("page_layout_version", &Format::page_layout_version),
  };
  for (const std::string& difference : differences) {
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace okv
