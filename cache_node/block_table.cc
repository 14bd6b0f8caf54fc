#include "cache_node/block_table.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/check.h"

namespace okv {
namespace {

// The first bytes of a hash are one.
uint64_t ShortKey(const BlockKey& key) {
  uint64_t bits;
  std::memcpy(&bits, key.view().data(), sizeof(bits));
  return bits;
}

}  // namespace

absl::Span<const uint8_t> ObjectPin::dram() const { return table_->Dram(entry_); }

Payload ObjectPin::hbm() const { return table_->Hbm(entry_); }

Payload ObjectPin::memory() const {
  const Payload hbm = table_->Hbm(entry_);
  return hbm.empty() ? Payload{.bytes = dram()} : hbm;
}

DiskPlace ObjectPin::place() const { return table_->Place(entry_); }

void ObjectPin::Release() {
  if (table_ != nullptr) std::exchange(table_, nullptr)->Unpin(entry_);
}

void WriteClaim::Release() {
  if (table_ != nullptr) std::exchange(table_, nullptr)->Unclaim(*this);
}

BlockTable::~BlockTable() {
  MutexLock lock(&mu_);
  OKV_CHECK(stats_.pins_count == 0 && claims_.empty());
  for (auto& [id, entry] : entries_) {
    if (!entry->hbm.empty()) DropHbm(entry.get());
    if (!entry->dram.empty()) DropDram(entry.get());
  }
}

absl::StatusOr<WriteClaim> BlockTable::Claim(const ObjectId& id,
                                             const std::optional<BlockKey>& parent) {
  MutexLock lock(&mu_);
  const auto found = entries_.find(id);
  if (found != entries_.end() && !found->second->doomed) {
    return absl::AlreadyExistsError(absl::StrCat(id.Name(), " is held"));
  }
  if (found != entries_.end() || !claims_.insert(id).second) {
    return absl::AbortedError(absl::StrCat(
        id.Name(), found != entries_.end() ? " is still leaving" : " is being written"));
  }
  CountChild(parent, /*add=*/true);
  return WriteClaim(this, id, parent, !parent.has_value() || IsHere(*parent));
}

void BlockTable::Commit(WriteClaim claim, ObjectRef object, Extent extent) {
  const ObjectId id = object->header.id;
  OKV_CHECK(claim.table_ == this && claim.id_ == id);
  OKV_CHECK(extent.span().size() == object->header.payload_bytes);
  MutexLock lock(&mu_);
  claim.table_ = nullptr;  // Used up, under the same lock that makes the object visible.
  claims_.erase(id);
  CountChild(claim.parent_, /*add=*/false);
  auto entry = std::make_unique<Entry>();
  entry->object = std::move(object);
  entry->used = ++uses_count_;
  entry->tenant = TenantOf(*entry->object);
  Count(*entry, /*add=*/true);
  if (extent.device() != nullptr) {
    SetHbm(entry.get(), std::move(extent));
  } else {
    SetDram(entry.get(), std::move(extent));
  }
  const bool is_new = entries_.emplace(id, std::move(entry)).second;
  OKV_CHECK(is_new);
}

size_t BlockTable::AdoptFromDisk(std::vector<Adopted> adopted) {
  // As found, the objects lie in memory one after the other; in the order of their places each is a
  // miss of every cache, as each one's slot in the table is: so both are asked for ahead.
  constexpr size_t kAhead = 16;
  struct Placed {
    DiskPlace place;
    Entry* entry;
  };
  std::vector<Placed> placed;
  placed.reserve(adopted.size());
  MutexLock lock(&mu_);
  entries_.reserve(entries_.size() + adopted.size());
  for (size_t i = 0; i < adopted.size(); ++i) {
    if (i + kAhead < adopted.size()) {
      entries_.prefetch(adopted[i + kAhead].object->header.id);
    }
    Adopted& found = adopted[i];
    OKV_CHECK(found.place.known());
    auto [slot, is_new] = entries_.try_emplace(found.object->header.id);
    if (!is_new) continue;
    slot->second = std::make_unique<Entry>();
    Entry* entry = slot->second.get();
    entry->object = std::move(found.object);
    entry->tenant = TenantOf(*entry->object);
    Count(*entry, /*add=*/true);
    placed.push_back({found.place, entry});
  }
  std::sort(placed.begin(), placed.end(), [](const Placed& a, const Placed& b) {
    return std::pair(a.place.group, a.place.page) < std::pair(b.place.group, b.place.page);
  });
  for (size_t i = 0; i < placed.size(); ++i) {
    if (i + 2 * kAhead < placed.size()) __builtin_prefetch(placed[i + 2 * kAhead].entry, /*rw=*/1);
    if (i + kAhead < placed.size()) __builtin_prefetch(placed[i + kAhead].entry->object.get());
    placed[i].entry->used = ++uses_count_;
    SetPlace(placed[i].entry, placed[i].place);
  }
  return placed.size();
}

absl::StatusOr<ObjectPin> BlockTable::Pin(const ObjectId& id) {
  MutexLock lock(&mu_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second->doomed) {
    return absl::NotFoundError(absl::StrCat(id.Name(), " is not held here"));
  }
  Entry* entry = found->second.get();
  entry->used = ++uses_count_;
  if (!entry->hbm.empty()) in_hbm_.MoveToBack(entry);
  if (!entry->dram.empty()) in_dram_.MoveToBack(entry);
  if (entry->place.known()) on_disk_.MoveToBack(entry);
  return PinLocked(entry);
}

ObjectPin BlockTable::PinAgain(const ObjectPin& pin) {
  OKV_CHECK(pin.table_ == this);
  MutexLock lock(&mu_);
  return PinLocked(pin.entry_);
}

ObjectPin BlockTable::PinLocked(Entry* entry) {
  ++entry->pins;
  ++stats_.pins_count;
  return ObjectPin(this, entry);
}

void BlockTable::AttachDram(const ObjectPin& pin, Extent extent) {
  OKV_CHECK(pin.table_ == this);
  OKV_CHECK(extent.span().size() == pin.object().header.payload_bytes);
  MutexLock lock(&mu_);
  if (pin.entry_->dram.empty()) SetDram(pin.entry_, std::move(extent));
}

void BlockTable::AttachHbm(const ObjectPin& pin, Extent extent) {
  OKV_CHECK(pin.table_ == this);
  OKV_CHECK(extent.span().size() == pin.object().header.payload_bytes);
  MutexLock lock(&mu_);
  if (pin.entry_->hbm.empty()) SetHbm(pin.entry_, std::move(extent));
}

std::vector<ObjectPin> BlockTable::PinColdest(const ColdestQuery& query) {
  std::vector<ObjectPin> pins;
  uint64_t bytes = 0;
  MutexLock lock(&mu_);
  if (query.where == Where::kOnDiskToo && clean_in_dram_ == 0) return pins;
  for (const bool over_only : {true, false}) {
    if (over_only && !AnyTenantOver()) continue;
    PinColdestLocked(query, over_only, &bytes, &pins);
  }
  return pins;
}

void BlockTable::PinColdestLocked(const ColdestQuery& query, bool over_only, uint64_t* bytes,
                                  std::vector<ObjectPin>* pins) {
  for (Entry* entry : in_dram_) {
    if (*bytes >= query.bytes || pins->size() >= query.objects_max) break;
    if (over_only && !entry->tenant->over()) continue;
    if (entry->pins > 0 || entry->doomed) continue;
    if (query.where == Where::kOnDiskToo && !entry->place.known()) continue;
    if (query.where == Where::kOnlyInDram && entry->place.known()) continue;
    *bytes += entry->dram.size();
    pins->push_back(PinLocked(entry));
  }
}

std::vector<ObjectPin> BlockTable::PinColdestInHbm(const HbmQuery& query) {
  std::vector<ObjectPin> pins;
  uint64_t bytes = 0;
  MutexLock lock(&mu_);
  if (query.where == InHbm::kElsewhereToo && clean_in_hbm_ == 0) return pins;
  for (const bool over_only : {true, false}) {
    if (over_only && !AnyTenantOver()) continue;
    for (Entry* entry : in_hbm_) {
      if (bytes >= query.bytes || pins.size() >= query.objects_max) break;
      if (over_only && !entry->tenant->over()) continue;
      if (entry->pins > 0 || entry->doomed) continue;
      const bool elsewhere = entry->place.known() || !entry->dram.empty();
      if (query.where == InHbm::kElsewhereToo && !elsewhere) continue;
      if (query.where == InHbm::kOnlyInHbm && elsewhere) continue;
      bytes += entry->hbm.size();
      pins.push_back(PinLocked(entry));
    }
  }
  return pins;
}

bool BlockTable::NoteHbmMiss(const ObjectPin& pin, uint64_t window_bytes) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  missed_bytes_ += entry->object->header.payload_bytes;
  const uint64_t before = std::exchange(entry->missed, missed_bytes_);
  return before != 0 && missed_bytes_ - before <= window_bytes;
}

bool BlockTable::NoteLoad(const ObjectPin& pin, uint64_t window_bytes) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  loaded_bytes_ += entry->object->header.payload_bytes;
  const uint64_t before = std::exchange(entry->loaded, loaded_bytes_);
  return before != 0 && loaded_bytes_ - before <= window_bytes;
}

void BlockTable::MarkOnDisk(const ObjectPin& pin, const DiskPlace& place) {
  OKV_CHECK(place.known());
  MutexLock lock(&mu_);
  // A doomed one keeps no place: its disk copy is being removed.
  if (!pin.entry_->doomed) SetPlace(pin.entry_, place);
}

uint64_t BlockTable::UnpinAndEvict(ObjectPin pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  pin.table_ = nullptr;
  uint64_t bytes = 0;
  if (entry->pins == 1 && entry->place.known() && !entry->doomed && !entry->dram.empty()) {
    bytes = entry->dram.size();
    DropDram(entry);
  }
  UnpinLocked(entry);
  return bytes;
}

uint64_t BlockTable::UnpinAndEvictHbm(ObjectPin pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  pin.table_ = nullptr;
  uint64_t bytes = 0;
  const bool elsewhere = entry->place.known() || !entry->dram.empty();
  if (entry->pins == 1 && elsewhere && !entry->doomed && !entry->hbm.empty()) {
    bytes = entry->hbm.size();
    DropHbm(entry);
  }
  UnpinLocked(entry);
  return bytes;
}

uint32_t BlockTable::ChildrenCount(const BlockKey& key) const {
  const auto found = children_.find(ShortKey(key));
  return found == children_.end() ? 0 : found->second;
}

bool BlockTable::IsHere(const BlockKey& key) const {
  for (const Codec codec : kCodecs) {
    const ObjectId id = {.key = key, .codec = codec};
    const auto found = entries_.find(id);
    if (claims_.contains(id) || (found != entries_.end() && !found->second->doomed)) return true;
  }
  return false;
}

std::vector<ColdObject> BlockTable::Cold(const ColdQuery& query) {
  std::vector<ColdObject> cold;
  absl::flat_hash_set<const Entry*> taken;
  absl::flat_hash_map<uint64_t, uint32_t> taken_children;
  absl::flat_hash_map<const internal::TenantUse*, uint64_t> taken_of;
  uint64_t taken_bytes = 0;
  MutexLock lock(&mu_);
  const auto over = [&](const Entry& entry) {
    const auto gone = taken_of.find(entry.tenant);
    return entry.tenant->payload_bytes - (gone == taken_of.end() ? 0 : gone->second) >
           entry.tenant->budget_bytes;
  };
  // A fetch touches its prefix from the beginning, so a block is colder than its children: it is
  // passed over first, and taken when the last of them was.
  const auto take = [&](Entry* entry, uint64_t used_max) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const ObjectHeader& header = entry->object->header;
    const auto children = taken_children.find(ShortKey(header.id.key));
    const uint32_t gone = children == taken_children.end() ? 0 : children->second;
    if (entry->used > used_max || !MayLeave(*entry, query.in_memory) ||
        ChildrenCount(header.id.key) > gone || !taken.insert(entry).second) {
      return false;
    }
    cold.push_back({.id = header.id,
                    .place = entry->place,
                    .in_memory = InMemory(*entry),
                    .over_budget = over(*entry),
                    .payload_bytes = header.payload_bytes});
    taken_bytes += header.payload_bytes;
    taken_of[entry->tenant] += header.payload_bytes;
    if (header.parent.has_value()) ++taken_children[ShortKey(*header.parent)];
    return true;
  };
  const auto take_with_parents = [&](Entry* leaf) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::vector<Entry*> next = {leaf};
    while (!next.empty() && taken_bytes < query.bytes) {
      Entry* entry = next.back();
      next.pop_back();
      if (!take(entry, leaf->used) || !entry->object->header.parent.has_value()) continue;
      for (const Codec codec : kCodecs) {
        const auto parent = entries_.find({.key = *entry->object->header.parent, .codec = codec});
        if (parent != entries_.end()) next.push_back(parent->second.get());
      }
    }
  };
  for (const bool over_only : {true, false}) {
    if (over_only && !AnyTenantOver()) continue;
    const auto take_of = [&](const auto& list) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      for (Entry* entry : list) {
        if (taken_bytes >= query.bytes) break;
        if (!over_only || over(*entry)) take_with_parents(entry);
      }
    };
    if (query.in_memory) {
      take_of(in_dram_);
      take_of(in_hbm_);
    } else {
      take_of(on_disk_);
    }
  }
  return cold;
}

std::vector<ObjectPin> BlockTable::DoomCold(absl::Span<const ColdObject> cold) {
  std::vector<ObjectPin> pins;
  MutexLock lock(&mu_);
  for (const ColdObject& object : cold) {
    const auto found = entries_.find(object.id);
    if (found == entries_.end()) continue;
    Entry* entry = found->second.get();
    if (!MayLeave(*entry, object.in_memory) || entry->place != object.place ||
        ChildrenCount(object.id.key) > 0) {
      continue;
    }
    DoomLocked(entry);
    pins.push_back(PinLocked(entry));
  }
  return pins;
}

bool BlockTable::HasGroup(uint32_t group) const {
  MutexLock lock(&mu_);
  return groups_.contains(group);
}

std::vector<ObjectPin> BlockTable::PinGroup(uint32_t group) {
  std::vector<ObjectPin> pins;
  MutexLock lock(&mu_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return pins;
  for (Entry* entry : *found->second) pins.push_back(PinLocked(entry));
  return pins;
}

internal::TenantUse* BlockTable::TenantOf(const HeldObject& object) {
  std::unique_ptr<internal::TenantUse>& use = tenants_[object.tenant];
  if (use == nullptr) {
    use = std::make_unique<internal::TenantUse>();
    use->budget_bytes = budgets_.Of(object.tenant);
  }
  return use.get();
}

bool BlockTable::AnyTenantOver() const {
  for (const auto& [tenant, use] : tenants_) {
    if (use->over()) return true;
  }
  return false;
}

bool BlockTable::Doom(const ObjectPin& pin) {
  MutexLock lock(&mu_);
  if (pin.entry_->doomed) return false;
  DoomLocked(pin.entry_);
  return true;
}

void BlockTable::DoomLocked(Entry* entry) {
  // Gone from every count at once; its memory follows with the last pin.
  Count(*entry, /*add=*/false);
  if (!entry->hbm.empty()) --CodecStats(*entry).hbm_objects;
  if (!entry->dram.empty()) --CodecStats(*entry).dram_objects;
  if (entry->place.known()) DropPlace(entry);
  entry->doomed = true;
}

void BlockTable::Forget(ObjectPin pin) {
  MutexLock lock(&mu_);
  Entry* entry = pin.entry_;
  OKV_CHECK(entry->doomed);
  pin.table_ = nullptr;
  entry->released = true;
  UnpinLocked(entry);
}

void BlockTable::Undoom(std::vector<Doomed> doomed) {
  MutexLock lock(&mu_);
  std::sort(doomed.begin(), doomed.end(), [](const Doomed& a, const Doomed& b) {
    return a.pin.entry_->used > b.pin.entry_->used;
  });
  for (Doomed& object : doomed) {
    Entry* entry = object.pin.entry_;
    OKV_CHECK(entry->doomed && !entry->released);
    object.pin.table_ = nullptr;
    entry->doomed = false;
    Count(*entry, /*add=*/true);
    if (!entry->hbm.empty()) ++CodecStats(*entry).hbm_objects;
    if (!entry->dram.empty()) ++CodecStats(*entry).dram_objects;
    if (object.place.known()) {
      SetPlace(entry, object.place);
      DiskList::Remove(entry);
      on_disk_.PushFront(entry);
    }
    UnpinLocked(entry);
  }
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

Payload BlockTable::Hbm(const Entry* entry) const {
  if (hbm_ == nullptr) return {};
  MutexLock lock(&mu_);
  return {.bytes = entry->hbm, .device = hbm_->device()};
}

DiskPlace BlockTable::Place(const Entry* entry) const {
  MutexLock lock(&mu_);
  return entry->place;
}

void BlockTable::Unpin(Entry* entry) {
  MutexLock lock(&mu_);
  UnpinLocked(entry);
}

void BlockTable::Unclaim(const WriteClaim& claim) {
  MutexLock lock(&mu_);
  OKV_CHECK(claims_.erase(claim.id_) == 1);
  CountChild(claim.parent_, /*add=*/false);
}

void BlockTable::UnpinLocked(Entry* entry) {
  OKV_CHECK(entry->pins > 0);
  --entry->pins;
  --stats_.pins_count;
  if (entry->pins > 0 || !entry->released) return;
  if (!entry->hbm.empty()) DropHbm(entry);
  if (!entry->dram.empty()) DropDram(entry);
  const ObjectId id = entry->object->header.id;
  entries_.erase(id);
}

void BlockTable::SetHbm(Entry* entry, Extent extent) {
  OKV_CHECK(hbm_ != nullptr && extent.device() == hbm_->device());
  entry->hbm = hbm_->Adopt(entry->object, std::move(extent));
  in_hbm_.PushBack(entry);
  if (!entry->doomed) ++CodecStats(*entry).hbm_objects;
  CountClean(entry);
}

void BlockTable::DropHbm(Entry* entry) {
  OKV_CHECK(hbm_->Remove(entry->object->header.id).ok());
  HbmList::Remove(entry);
  entry->hbm = {};
  if (!entry->doomed) --CodecStats(*entry).hbm_objects;
  CountClean(entry);
}

void BlockTable::SetDram(Entry* entry, Extent extent) {
  OKV_CHECK(extent.device() == nullptr);
  entry->dram = dram_->Adopt(entry->object, std::move(extent));
  in_dram_.PushBack(entry);
  if (!entry->doomed) ++CodecStats(*entry).dram_objects;
  CountClean(entry);
}

void BlockTable::DropDram(Entry* entry) {
  OKV_CHECK(dram_->Remove(entry->object->header.id).ok());
  DramList::Remove(entry);
  entry->dram = {};
  if (!entry->doomed) --CodecStats(*entry).dram_objects;
  CountClean(entry);
}

void BlockTable::SetPlace(Entry* entry, const DiskPlace& place) {
  if (entry->place.known()) {
    LeaveGroup(entry);  // It moves on disk, which is no use: its turn to go stays.
  } else {
    on_disk_.PushBack(entry);
    ++CodecStats(*entry).disk_objects;
  }
  entry->place = place;
  std::unique_ptr<GroupList>& group = groups_[place.group];
  if (group == nullptr) group = std::make_unique<GroupList>();
  group->PushBack(entry);
  CountClean(entry);
}

void BlockTable::LeaveGroup(Entry* entry) {
  const auto group = groups_.find(entry->place.group);
  GroupList::Remove(entry);
  if (group->second->empty()) groups_.erase(group);
}

void BlockTable::DropPlace(Entry* entry) {
  LeaveGroup(entry);
  DiskList::Remove(entry);
  entry->place = {};
  --CodecStats(*entry).disk_objects;
  CountClean(entry);
}

void BlockTable::CountClean(Entry* entry) {
  const bool on_disk = entry->place.known();
  const bool in_hbm = !entry->hbm.empty() && (on_disk || !entry->dram.empty());
  const bool in_dram = !entry->dram.empty() && on_disk;
  clean_in_hbm_ += uint64_t{in_hbm} - uint64_t{std::exchange(entry->clean_in_hbm, in_hbm)};
  clean_in_dram_ += uint64_t{in_dram} - uint64_t{std::exchange(entry->clean_in_dram, in_dram)};
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
  entry.tenant->payload_bytes += sign * entry.object->header.payload_bytes;
  CountChild(entry.object->header.parent, add);
}

void BlockTable::CountChild(const std::optional<BlockKey>& parent, bool add) {
  if (!parent.has_value()) return;
  const auto children = children_.try_emplace(ShortKey(*parent)).first;
  children->second += add ? 1 : ~uint32_t{0};  // Modulo 2^32.
  if (children->second == 0) children_.erase(children);
}

}  // namespace okv
