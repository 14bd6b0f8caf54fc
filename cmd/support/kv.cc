#include "cmd/support/kv.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cmd/support/files.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {

Format MakeFormat(const ModelConfig& config, const RotationSet& rotations,
                  const FormatOptions& options) {
  Format format;
  format.model = config.name;
  format.weights_revision = config.weights_revision;
  for (uint32_t layer = 0; layer < config.layers; ++layer) format.layer_ids.push_back(layer);
  format.kv_heads = config.kv_heads;
  format.head_dim_k = config.head_dim;
  format.head_dim_v = config.head_dim;
  format.rope_theta = config.rope_theta;
  format.rope_scaling = config.rope_scaling;
  format.sink_tokens = options.sink_tokens;
  format.recent_tokens = options.recent_tokens;
  format.group_size = rotations.group_size;
  format.rotation_hash = rotations.hash();
  return format;
}

RotationSet IdentityRotations(const ModelConfig& config) {
  RotationSet set;
  set.model = config.name;
  set.weights_revision = config.weights_revision;
  for (uint32_t layer = 0; layer < config.layers; ++layer) set.layer_ids.push_back(layer);
  set.kv_heads = config.kv_heads;
  set.head_dim = config.head_dim;
  set.group_size = config.head_dim;
  set.method = "none";
  const size_t matrix = size_t{config.head_dim} * config.head_dim;
  set.r_k.assign(matrix * config.layers, 0);
  for (size_t layer = 0; layer < config.layers; ++layer) {
    for (size_t i = 0; i < config.head_dim; ++i) {
      set.r_k[layer * matrix + i * config.head_dim + i] = FloatToBf16(1.0f);
    }
  }
  set.r_v = set.r_k;
  set.clip_rank_k.assign(size_t{config.layers} * config.kv_heads, 0);
  set.clip_rank_v = set.clip_rank_k;
  return set;
}

absl::Status ValidateThreads(uint32_t threads) {
  constexpr uint32_t kThreadsMax = 1024;
  if (threads <= kThreadsMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--threads ", threads, ": at most ", kThreadsMax));
}

absl::StatusOr<std::vector<uint32_t>> ReadTokens(const Tokenizer& tokenizer,
                                                 const std::string& path, const TokenRange& range) {
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::vector<uint32_t> tokens = tokenizer.Encode(text);
  const uint64_t needed = uint64_t{range.skip_tokens} + range.tokens_count;
  if (tokens.size() < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' has ", tokens.size(), " tokens; ", needed, " are needed"));
  }
  if (!range.rest_too) tokens.resize(needed);
  tokens.erase(tokens.begin(), tokens.begin() + range.skip_tokens);
  return tokens;
}

absl::StatusOr<RotationSet> ReadRotationFile(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  absl::StatusOr<RotationSet> set = RotationSet::Parse(bytes);
  if (set.ok()) return set;
  return absl::Status(
      set.status().code(),
      absl::StrCat("rotation set '", path, "': ", absl::string_view(set.status().message())));
}

SequenceOptions MakeSequenceOptions(const ModelConfig& config, const Format& format,
                                    uint32_t tokens_max) {
  SequenceOptions options;
  options.format = format;
  options.query_heads = config.query_heads;
  options.softmax_scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  options.tokens_max = tokens_max;
  return options;
}

absl::StatusOr<std::unique_ptr<Sequence>> MakeSequence(const ModelConfig& config,
                                                       const Format& format,
                                                       const RotationSet* rotations,
                                                       uint32_t tokens_max, ThreadPool* pool) {
  return Sequence::Create(MakeSequenceOptions(config, format, tokens_max), rotations, pool);
}

absl::Status SequenceCache::Append(const AppendRows& rows) {
  if (dump_ != nullptr) {
    OKV_RETURN_IF_ERROR(dump_->Append({.layer = rows.layer,
                                       .tokens_count = rows.tokens_count,
                                       .q = rows.q,
                                       .k = rows.k,
                                       .v = rows.v}));
  }
  return sequence_->Append(rows);
}

}  // namespace okv
