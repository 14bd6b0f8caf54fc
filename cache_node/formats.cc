#include "cache_node/formats.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "proto/status_macros.h"

namespace okv {

absl::StatusOr<const Format*> Formats::Add(const Format& format) {
  const FormatId id = format.id();
  MutexLock lock(&mu_);
  if (const auto found = formats_.find(id); found != formats_.end()) return found->second.get();
  if (formats_.size() >= kFormatsMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this node knows ", kFormatsMax, " formats, and takes no more"));
  }
  OKV_RETURN_IF_ERROR(save_(format));
  return formats_.emplace(id, std::make_unique<const Format>(format)).first->second.get();
}

void Formats::AddStored(const Format& format) {
  MutexLock lock(&mu_);
  formats_.try_emplace(format.id(), std::make_unique<const Format>(format));
}

const Format* Formats::Find(const FormatId& id) const {
  MutexLock lock(&mu_);
  const auto found = formats_.find(id);
  return found == formats_.end() ? nullptr : found->second.get();
}

}  // namespace okv
