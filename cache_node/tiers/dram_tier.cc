#include "cache_node/tiers/dram_tier.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {

uint64_t DramTier::CostBytes(const HeldObject& object) const {
  return (object.header.payload_bytes + kExtentAlignBytes - 1) / kExtentAlignBytes *
         kExtentAlignBytes;
}

absl::Status DramTier::Put(absl::Span<const TierWrite> group) {
  std::vector<Extent> extents;  // Given back when one of the group does not fit.
  for (const TierWrite& write : group) {
    OKV_ASSIGN_OR_RETURN(Extent extent, pool_->Allocate(write.payload.size()));
    std::memcpy(extent.span().data(), write.payload.data(), write.payload.size());
    extents.push_back(std::move(extent));
  }
  MutexLock lock(&mu_);
  for (const TierWrite& write : group) {
    if (objects_.contains(write.object->header.id)) {
      return absl::AlreadyExistsError(
          absl::StrCat(write.object->header.id.key.Short(), " is in dram"));
    }
  }
  for (size_t i = 0; i < group.size(); ++i) {
    objects_[group[i].object->header.id] = {.object = group[i].object,
                                            .extent = std::move(extents[i])};
  }
  return absl::OkStatus();
}

absl::Status DramTier::Read(const ObjectId& id, absl::Span<uint8_t> buffer) {
  MutexLock lock(&mu_);
  const auto found = objects_.find(id);
  if (found == objects_.end())
    return absl::NotFoundError(absl::StrCat(id.key.Short(), ": not in dram"));
  const absl::Span<uint8_t> payload = found->second.extent.span();
  if (payload.size() != buffer.size()) {
    return absl::DataLossError(
        absl::StrCat(id.key.Short(), ": ", payload.size(), " bytes in dram, not ", buffer.size()));
  }
  std::memcpy(buffer.data(), payload.data(), payload.size());
  return absl::OkStatus();
}

absl::Status DramTier::Remove(const ObjectId& id) {
  MutexLock lock(&mu_);
  objects_.erase(id);
  return absl::OkStatus();
}

absl::Status DramTier::List(const Listing& listing) {
  std::vector<ObjectRef> objects;
  {
    MutexLock lock(&mu_);
    objects.reserve(objects_.size());
    for (const auto& [id, held] : objects_) objects.push_back(held.object);
  }
  for (const ObjectRef& object : objects) {
    listing.object({.header = object->header, .tenant = object->tenant, .place = {}});
  }
  return absl::OkStatus();
}

TierStats DramTier::stats() const {
  const uint64_t used_bytes = pool_->used_bytes();
  MutexLock lock(&mu_);
  return {.capacity_bytes = pool_->capacity_bytes(),
          .used_bytes = used_bytes,
          .occupied_bytes = used_bytes,
          .objects_count = objects_.size(),
          .free_bytes = 0,
          .floor_bytes = 0};
}

absl::Span<const uint8_t> DramTier::Adopt(ObjectRef object, Extent extent) {
  MutexLock lock(&mu_);
  const ObjectId id = object->header.id;
  const absl::Span<const uint8_t> payload = extent.span();
  const bool is_new =
      objects_.emplace(id, Held{.object = std::move(object), .extent = std::move(extent)}).second;
  OKV_CHECK(is_new);
  return payload;
}

}  // namespace okv
