#include "control_plane/rotation_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kRotationPrefix = "rotation/";
constexpr absl::string_view kPublishedPrefix = "rotation_published_wall_us/";
constexpr absl::string_view kFormatPrefix = "format/";

std::string RotationKey(const RotationHash& hash) {
  return absl::StrCat(kRotationPrefix, hash.Hex());
}

RotationInfo Describe(const RotationSet& set, const RotationHash& hash, uint64_t file_bytes,
                      int64_t published_wall_us) {
  return {.hash = hash,
          .model = set.model,
          .weights_revision = set.weights_revision,
          .method = set.method,
          .layers_count = static_cast<uint32_t>(set.layer_ids.size()),
          .kv_heads = set.kv_heads,
          .head_dim = set.head_dim,
          .group_size = set.group_size,
          .file_bytes = file_bytes,
          .published_wall_us = published_wall_us};
}

}  // namespace

absl::StatusOr<std::unique_ptr<RotationRegistry>> RotationRegistry::Open(State* state,
                                                                         const Clock* clock) {
  std::unique_ptr<RotationRegistry> registry(new RotationRegistry(state, clock));
  OKV_RETURN_IF_ERROR(registry->Load());
  return registry;
}

absl::Status RotationRegistry::Load() {
  MutexLock lock(&mu_);
  OKV_ASSIGN_OR_RETURN(const auto rotations, state_->List(kRotationPrefix));
  for (const auto& [key, file] : rotations) {
    const absl::StatusOr<RotationSet> set = RotationSet::Parse(file);
    if (!set.ok()) {
      return absl::DataLossError(
          absl::StrCat("state: '", key, "': ", absl::string_view(set.status().message())));
    }
    const RotationHash hash = set->hash();
    int64_t published_wall_us = 0;
    const auto published = state_->Get(absl::StrCat(kPublishedPrefix, hash.Hex()));
    if (published.ok() && !absl::SimpleAtoi(*published, &published_wall_us)) published_wall_us = 0;
    rotations_[hash] = Describe(*set, hash, file.size(), published_wall_us);
  }
  OKV_ASSIGN_OR_RETURN(const auto formats, state_->List(kFormatPrefix));
  for (const auto& [key, canonical] : formats) {
    const absl::StatusOr<Format> format = Format::Parse(canonical);
    // Another version's format is no damage: its sessions are opened anew, or refused by name.
    if (format.ok()) formats_[format->id()] = std::make_unique<const Format>(*format);
  }
  return absl::OkStatus();
}

absl::StatusOr<RotationRegistry::Published> RotationRegistry::Publish(const std::string& file) {
  OKV_ASSIGN_OR_RETURN(const RotationSet set, RotationSet::Parse(file));
  const RotationHash hash = set.hash();
  MutexLock lock(&mu_);
  if (const auto found = rotations_.find(hash); found != rotations_.end()) {
    // Equal rotations; the promise and where it is from are no part of the hash.
    if (!set.promised_error_k.empty()) {
      OKV_RETURN_IF_ERROR(state_->Put(RotationKey(hash), file));
      found->second.file_bytes = file.size();
    }
    return Published{.hash = hash, .already_known = true};
  }
  const int64_t now = clock_->WallMicros();
  OKV_RETURN_IF_ERROR(state_->Put(absl::StrCat(kPublishedPrefix, hash.Hex()), absl::StrCat(now)));
  OKV_RETURN_IF_ERROR(state_->Put(RotationKey(hash), file));
  rotations_[hash] = Describe(set, hash, file.size(), now);
  return Published{.hash = hash, .already_known = false};
}

absl::StatusOr<std::string> RotationRegistry::Get(const RotationHash& hash) const {
  absl::StatusOr<std::string> file = state_->Get(RotationKey(hash));
  if (!absl::IsNotFound(file.status())) return file;
  return absl::NotFoundError(absl::StrCat("no rotation set ", hash.Hex(), " is published"));
}

std::vector<RotationInfo> RotationRegistry::List(const std::string& model) const {
  std::vector<RotationInfo> list;
  {
    MutexLock lock(&mu_);
    for (const auto& [hash, info] : rotations_) {
      if (model.empty() || info.model == model) list.push_back(info);
    }
  }
  std::sort(list.begin(), list.end(), [](const RotationInfo& a, const RotationInfo& b) {
    return std::make_pair(a.published_wall_us, a.hash) <
           std::make_pair(b.published_wall_us, b.hash);
  });
  return list;
}

absl::StatusOr<FormatId> RotationRegistry::RegisterFormat(const std::string& canonical) {
  OKV_ASSIGN_OR_RETURN(const Format format, Format::Parse(canonical));
  const FormatId id = format.id();
  {
    MutexLock lock(&mu_);
    if (formats_.contains(id)) return id;
    if (!rotations_.contains(format.rotation_hash)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "field 'rotation_hash': no rotation set ", format.rotation_hash.Hex(), " is published"));
    }
    if (formats_.size() >= kFormatsMax) {
      return absl::ResourceExhaustedError(absl::StrCat(kFormatsMax, " formats are in use already"));
    }
  }
  // Reading and checking a whole set takes a while: nobody waits for it under the mutex.
  OKV_ASSIGN_OR_RETURN(const std::string file, Get(format.rotation_hash));
  OKV_ASSIGN_OR_RETURN(const RotationSet set, RotationSet::Parse(file));
  OKV_RETURN_IF_ERROR(set.CheckMatches(format));
  OKV_RETURN_IF_ERROR(state_->Put(absl::StrCat(kFormatPrefix, id.Hex()), canonical));
  MutexLock lock(&mu_);
  formats_.try_emplace(id, std::make_unique<const Format>(format));
  return id;
}

absl::StatusOr<const Format*> RotationRegistry::FindFormat(const FormatId& id) const {
  MutexLock lock(&mu_);
  const auto found = formats_.find(id);
  if (found != formats_.end()) return found->second.get();
  return absl::FailedPreconditionError(
      absl::StrCat("format ", id.Short(), " is not registered: open a session first"));
}

size_t RotationRegistry::rotations_count() const {
  MutexLock lock(&mu_);
  return rotations_.size();
}

size_t RotationRegistry::formats_count() const {
  MutexLock lock(&mu_);
  return formats_.size();
}

}  // namespace okv
