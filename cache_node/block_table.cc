#include "cache_node/block_table.h"

#include "absl/strings/str_cat.h"
#include "proto/check.h"

namespace okv {

absl::Span<const uint8_t> ObjectPin::dram() const { return table_->Dram(entry_); }

bool ObjectPin::on_disk() const { return table_->OnDisk(entry_); }

void ObjectPin::Release() {
  if (table_ != nullptr) std::exchange(table_, nullptr)->Unpin(entry_);
}

void WriteClaim::Release() {
  if (table_ != nullptr) std::exchange(table_, nullptr)->Unclaim(id_);
}

BlockTable::~BlockTable() {
  MutexLock lock(&mu_);
  OKV_CHECK(stats_.pins_count == 0 && claims_.empty());
  for (auto& [id, entry] : entries_) {
    if (!entry->dram.empty()) DropDram(entry.get());
  }
}

absl::StatusOr<WriteClaim> BlockTable::Claim(const ObjectId& id) {
  MutexLock lock(&mu_);
  const auto found = entries_.find(id);
  if (found != entries_.end() && !found->second->doomed) {
    return absl::AlreadyExistsError(
        absl::StrCat(CodecName(id.codec), " object ", id.key.Short(), " is held"));
  }
  if (found != entries_.end() || !claims_.insert(id).second) {
    return absl::AbortedError(
        absl::StrCat(CodecName(id.codec), " object ", id.key.Short(),
                     found != entries_.end() ? " is still leaving" : " is being written"));
  }
  return WriteClaim(this, id);
}

void BlockTable::Commit(WriteClaim claim, ObjectRef object, Extent extent) {
  const ObjectId id = object->header.id;
  OKV_CHECK(claim.table_ == this && claim.id_ == id);
  OKV_CHECK(extent.span().size() == object->header.payload_bytes);
  MutexLock lock(&mu_);
  claim.table_ = nullptr;  // Used up, under the same lock that makes the object visible.
  claims_.erase(id);
  auto entry = std::make_unique<Entry>();
  entry->object = std::move(object);
  Count(*entry, /*add=*/true);
  SetDram(entry.get(), std::move(extent));
  const bool is_new = entries_.emplace(id, std::move(entry)).second;
  OKV_CHECK(is_new);
}

bool BlockTable::AdoptFromDisk(ObjectRef object) {
  const ObjectId id = object->header.id;
  MutexLock lock(&mu_);
  auto [place, is_new] = entries_.try_emplace(id);
  if (!is_new) return false;
  place->second = std::make_unique<Entry>();
  Entry& entry = *place->second;
  entry.object = std::move(object);
  entry.on_disk = true;
  Count(entry, /*add=*/true);
  ++CodecStats(entry).disk_objects;
  return true;
}

absl::StatusOr<ObjectPin> BlockTable::Pin(const ObjectId& id) {
  MutexLock lock(&mu_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second->doomed) {
    return absl::NotFoundError(
        absl::StrCat(CodecName(id.codec), " object ", id.key.Short(), " is not held here"));
  }
  Entry* entry = found->second.get();
  ++entry->pins;
  ++stats_.pins_count;
  if (!entry->dram.empty()) lru_.splice(lru_.end(), lru_, entry->lru);
  return ObjectPin(this, entry);
}

void BlockTable::AttachDram(const ObjectPin& pin, Extent extent) {
  OKV_CHECK(pin.table_ == this);
  OKV_CHECK(extent.span().size() == pin.object().header.payload_bytes);
  MutexLock lock(&mu_);
  if (pin.entry_->dram.empty()) SetDram(pin.entry_, std::move(extent));
}

std::vector<ObjectPin> BlockTable::PinColdest(const ColdestQuery& query) {
  std::vector<ObjectPin> pins;
  uint64_t bytes = 0;
  MutexLock lock(&mu_);
  for (Entry* entry : lru_) {
    if (bytes >= query.bytes || pins.size() >= query.objects_max) break;
    if (entry->pins > 0 || entry->doomed) continue;
    if (query.where == Where::kOnDiskToo && !entry->on_disk) continue;
    if (query.where == Where::kOnlyInDram && entry->on_disk) continue;
    ++entry->pins;
    ++stats_.pins_count;
    bytes += entry->dram.size();
    pins.push_back(ObjectPin(this, entry));
  }
  return pins;
}

void BlockTable::MarkOnDisk(const ObjectPin& pin) {
  MutexLock lock(&mu_);
  if (pin.entry_->on_disk) return;
  pin.entry_->on_disk = true;
  if (!pin.entry_->doomed) ++CodecStats(*pin.entry_).disk_objects;
}

uint64_t BlockTable::UnpinAndEvict(ObjectPin pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  pin.table_ = nullptr;
  uint64_t bytes = 0;
  if (entry->pins == 1 && entry->on_disk && !entry->doomed && !entry->dram.empty()) {
    bytes = entry->dram.size();
    DropDram(entry);
  }
  UnpinLocked(entry);
  return bytes;
}

bool BlockTable::Doom(const ObjectPin& pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  if (entry->doomed) return false;
  entry->doomed = true;
  // Gone from every count at once; its memory follows with the last pin.
  Count(*entry, /*add=*/false);
  TableStats::PerCodec& codec = CodecStats(*entry);
  if (!entry->dram.empty()) --codec.dram_objects;
  if (entry->on_disk) --codec.disk_objects;
  return true;
}

void BlockTable::Forget(ObjectPin pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  OKV_CHECK(entry->doomed);
  pin.table_ = nullptr;
  entry->released = true;
  UnpinLocked(entry);
}

std::vector<ObjectRef> BlockTable::Objects() const {
  std::vector<ObjectRef> objects;
  MutexLock lock(&mu_);
  objects.reserve(entries_.size());
  for (const auto& [id, entry] : entries_) {
    if (!entry->doomed) objects.push_back(entry->object);
  }
  return objects;
}

TableStats BlockTable::stats() const {
  MutexLock lock(&mu_);
  TableStats stats = stats_;
  stats.claims_count = claims_.size();
  return stats;
}

absl::Span<const uint8_t> BlockTable::Dram(const Entry* entry) const {
  MutexLock lock(&mu_);
  return entry->dram;
}

bool BlockTable::OnDisk(const Entry* entry) const {
  MutexLock lock(&mu_);
  return entry->on_disk;
}

void BlockTable::Unpin(Entry* entry) {
  MutexLock lock(&mu_);
  UnpinLocked(entry);
}

void BlockTable::Unclaim(const ObjectId& id) {
  MutexLock lock(&mu_);
  OKV_CHECK(claims_.erase(id) == 1);
}

void BlockTable::UnpinLocked(Entry* entry) {
  OKV_CHECK(entry->pins > 0);
  --entry->pins;
  --stats_.pins_count;
  if (entry->pins > 0 || !entry->released) return;
  if (!entry->dram.empty()) DropDram(entry);
  const ObjectId id = entry->object->header.id;
  entries_.erase(id);
}

void BlockTable::SetDram(Entry* entry, Extent extent) {
  entry->dram = dram_->Adopt(entry->object, std::move(extent));
  entry->lru = lru_.insert(lru_.end(), entry);
  if (!entry->doomed) ++CodecStats(*entry).dram_objects;
}

void BlockTable::DropDram(Entry* entry) {
  OKV_CHECK(dram_->Remove(entry->object->header.id).ok());
  lru_.erase(entry->lru);
  entry->dram = {};
  if (!entry->doomed) --CodecStats(*entry).dram_objects;
}

TableStats::PerCodec& BlockTable::CodecStats(const Entry& entry) {
  return stats_.codecs[entry.object->header.id.codec == kCodecs[0] ? 0 : 1];
}

void BlockTable::Count(const Entry& entry, bool add) {
  TableStats::PerCodec& codec = CodecStats(entry);
  const uint64_t sign = add ? 1 : ~uint64_t{0};  // Modulo 2^64.
  codec.stored_bytes += sign * entry.object->header.payload_bytes;
  codec.logical_bytes += sign * entry.object->logical_bytes();
  stats_.objects_count += sign;
}

}  // namespace okv
