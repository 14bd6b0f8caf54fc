#include "cache_node/tiers/arena_tier.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {

uint64_t ArenaTier::CostBytes(const HeldObject& object) const {
  return (object.header.payload_bytes + kExtentAlignBytes - 1) / kExtentAlignBytes *
         kExtentAlignBytes;
}

absl::Status ArenaTier::Put(absl::Span<const TierWrite> group) {
  std::vector<Extent> extents;  // Given back when one of the group does not fit.
  std::vector<MemoryCopy> copies;
  for (const TierWrite& write : group) {
    OKV_ASSIGN_OR_RETURN(Extent extent, pool_->Allocate(write.payload.size()));
    copies.push_back(
        {.to = extent.span().data(), .from = write.payload.data(), .bytes = write.payload.size()});
    extents.push_back(std::move(extent));
  }
  OKV_RETURN_IF_ERROR(Copy(copies));
  MutexLock lock(&mu_);
  for (const TierWrite& write : group) {
    if (objects_.contains(write.object->header.id)) {
      return absl::AlreadyExistsError(
          absl::StrCat(write.object->header.id.key.Short(), " is in ", name_));
    }
  }
  for (size_t i = 0; i < group.size(); ++i) {
    objects_[group[i].object->header.id] = {.object = group[i].object,
                                            .extent = std::move(extents[i])};
  }
  return absl::OkStatus();
}

absl::Status ArenaTier::Read(const ObjectId& id, absl::Span<uint8_t> buffer) {
  MutexLock lock(&mu_);
  const auto found = objects_.find(id);
  if (found == objects_.end())
    return absl::NotFoundError(absl::StrCat(id.key.Short(), ": not in ", name_));
  const absl::Span<uint8_t> payload = found->second.extent.span();
  if (payload.size() != buffer.size()) {
    return absl::DataLossError(absl::StrCat(id.key.Short(), ": ", payload.size(), " bytes in ",
                                            name_, ", not ", buffer.size()));
  }
  return Copy({{.to = buffer.data(), .from = payload.data(), .bytes = payload.size()}});
}

absl::Status ArenaTier::Copy(absl::Span<const MemoryCopy> copies) {
  if (pool_->device() != nullptr) return pool_->device()->Copy(copies);
  for (const MemoryCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
  return absl::OkStatus();
}

absl::Status ArenaTier::Remove(const ObjectId& id) {
  MutexLock lock(&mu_);
  objects_.erase(id);
  return absl::OkStatus();
}

absl::Status ArenaTier::List(const Listing& listing) {
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

TierStats ArenaTier::stats() const {
  const uint64_t used_bytes = pool_->used_bytes();
  MutexLock lock(&mu_);
  return {.capacity_bytes = pool_->capacity_bytes(),
          .used_bytes = used_bytes,
          .occupied_bytes = used_bytes,
          .objects_count = objects_.size(),
          .free_bytes = 0,
          .floor_bytes = 0};
}

absl::Span<const uint8_t> ArenaTier::Adopt(ObjectRef object, Extent extent) {
  MutexLock lock(&mu_);
  const ObjectId id = object->header.id;
  const absl::Span<const uint8_t> payload = extent.span();
  const bool is_new =
      objects_.emplace(id, Held{.object = std::move(object), .extent = std::move(extent)}).second;
  OKV_CHECK(is_new);
  return payload;
}

}  // namespace okv
