#include "cache_node/storage.h"

#include "absl/container/flat_hash_set.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {

absl::Status StorageOptions::Validate() const {
  OKV_RETURN_IF_ERROR(pool.Validate());
  OKV_RETURN_IF_ERROR(disk.Validate());
  if (hbm_pool.arena_bytes > 0) {
    OKV_CHECK(hbm_pool.device != nullptr);
    OKV_RETURN_IF_ERROR(hbm_pool.Validate());
    OKV_RETURN_IF_ERROR(hbm.Validate());
  }
  return spill.Validate();
}

absl::StatusOr<std::unique_ptr<Storage>> Storage::Open(const StorageOptions& options,
                                                       const Parts& parts) {
  OKV_RETURN_IF_ERROR(options.Validate());
  auto storage = absl::WrapUnique(new Storage(parts));
  RocksdbTierOptions disk = options.disk;
  if (!disk.log) disk.log = parts.log;
  disk.in_use = [owner = storage.get()](uint32_t group) {
    return owner->table_ != nullptr && owner->table_->HasGroup(group);
  };
  OKV_ASSIGN_OR_RETURN(storage->disk_, RocksdbTier::Open(disk));
  storage->formats_ = std::make_unique<Formats>(
      [disk = storage->disk_.get()](const Format& format) { return disk->SaveFormat(format); });
  BlockPoolOptions pool = options.pool;
  if (!pool.progress) {
    pool.progress = [log = parts.log](uint64_t done_bytes, uint64_t all_bytes) {
      log(absl::StrCat("prefault: ", done_bytes >> 20, " of ", all_bytes >> 20, " MiB of DRAM"));
    };
  }
  OKV_ASSIGN_OR_RETURN(storage->pool_, BlockPool::Create(pool));
  storage->dram_ = std::make_unique<DramTier>(storage->pool_.get());
  OKV_RETURN_IF_ERROR(storage->OpenHbm(options));
  storage->table_ = std::make_unique<BlockTable>(storage->dram_.get(), options.tenant_budgets,
                                                 storage->hbm_.get());
  OKV_RETURN_IF_ERROR(storage->AdoptDisk());
  storage->spiller_ =
      std::make_unique<Spiller>(options.spill, Spiller::Parts{.dram = storage->dram_.get(),
                                                              .disk = storage->disk_.get(),
                                                              .table = storage->table_.get(),
                                                              .metrics = parts.metrics,
                                                              .clock = parts.clock,
                                                              .on_removed = parts.on_removed,
                                                              .log = parts.log});
  storage->spiller_->Start();
  if (storage->hbm_ == nullptr) return storage;
  storage->hbm_mover_ =
      std::make_unique<HbmMover>(options.hbm, HbmMover::Parts{.hbm = storage->hbm_.get(),
                                                              .dram = storage->dram_.get(),
                                                              .table = storage->table_.get(),
                                                              .spiller = storage->spiller_.get(),
                                                              .metrics = parts.metrics,
                                                              .on_damaged = parts.on_damaged,
                                                              .log = parts.log});
  storage->hbm_mover_->Start();
  return storage;
}

Storage::~Storage() {
  if (spiller_ != nullptr) StopSpilling();
  if (locking_device_ != nullptr) locking_device_->UnlockHostMemory(pool_->arena());
}

absl::Status Storage::OpenHbm(const StorageOptions& options) {
  if (options.hbm_pool.arena_bytes == 0) return absl::OkStatus();
  DeviceMemory* device = options.hbm_pool.device;
  OKV_ASSIGN_OR_RETURN(hbm_pool_, BlockPool::Create(options.hbm_pool));
  hbm_ = std::make_unique<HbmTier>(hbm_pool_.get());
  // Spills and promotions then run at the speed of the link: without it the driver copies through
  // a buffer of its own.
  const absl::Status locked = device->LockHostMemory(pool_->arena());
  if (locked.ok()) locking_device_ = device;
  if (!locked.ok()) parts_.log(absl::StrCat("DRAM stays pageable: ", locked.message()));
  parts_.log(
      absl::StrCat("HBM tier of ", hbm_pool_->capacity_bytes() >> 20, " MiB on ", device->name()));
  return absl::OkStatus();
}

std::vector<const Tier*> Storage::tiers() const {
  std::vector<const Tier*> tiers;
  if (hbm_ != nullptr) tiers.push_back(hbm_.get());
  tiers.push_back(dram_.get());
  tiers.push_back(disk_.get());
  return tiers;
}

void Storage::StopSpilling() {
  spiller_->Stop();
  if (hbm_mover_ != nullptr) hbm_mover_->Stop();
}

ObjectRef Storage::Held(TierRecord* record) const {
  const Format* format = formats_->Find(record->header.format_id);
  if (format == nullptr) return nullptr;
  const PageLayout layout = PageLayout::Of(*format);
  if (record->header.payload_bytes != layout.block_bytes(record->header.id.codec) ||
      record->header.checksums.size() != layout.runs_count()) {
    return nullptr;
  }
  return std::make_shared<const HeldObject>(HeldObject{
      .header = std::move(record->header), .tenant = std::move(record->tenant), .layout = layout});
}

absl::Status Storage::RecoverFormats(const std::vector<TierRecord>& strangers) {
  absl::flat_hash_set<std::pair<FormatId, uint32_t>> asked;
  for (const TierRecord& record : strangers) {
    const FormatId format_id = record.header.format_id;
    const uint32_t group = record.place.group;
    if (formats_->Find(format_id) != nullptr || !asked.emplace(format_id, group).second) continue;
    const absl::StatusOr<Format> format = disk_->RecoverFormat(format_id, group);
    if (absl::IsNotFound(format.status())) continue;  // Another group may tell.
    OKV_RETURN_IF_ERROR(format.status());
    formats_->AddStored(*format);
    parts_.log(absl::StrCat("took back format ", format_id.Short(),
                            " that the disk's index did not have"));
  }
  return absl::OkStatus();
}

absl::Status Storage::AdoptDisk() {
  OKV_ASSIGN_OR_RETURN(const std::vector<Format> formats, disk_->LoadFormats());
  for (const Format& format : formats) formats_->AddStored(format);
  std::vector<BlockTable::Adopted> adopted;
  adopted.reserve(disk_->stats().objects_count);
  std::vector<TierRecord> strangers;
  OKV_RETURN_IF_ERROR(disk_->List({.object =
                                       [&](TierRecord record) {
                                         const DiskPlace place = record.place;
                                         if (ObjectRef object = Held(&record)) {
                                           adopted.push_back({std::move(object), place});
                                         } else {
                                           strangers.push_back(std::move(record));
                                         }
                                       },
                                   .corrupt =
                                       [&](const absl::Status& why) {
                                         parts_.metrics->Corrupt(disk_->name());
                                         parts_.log(absl::StrCat(
                                             "dropped a row of the disk's index: ", why.message()));
                                       }}));
  // A format is durable before its objects. An index that lost it did not lose the groups' tables.
  OKV_RETURN_IF_ERROR(RecoverFormats(strangers));
  std::vector<ObjectId> unreadable;
  for (TierRecord& record : strangers) {
    const DiskPlace place = record.place;
    const ObjectId id = record.header.id;
    if (ObjectRef object = Held(&record)) {
      adopted.push_back({std::move(object), place});
    } else {
      unreadable.push_back(id);
    }
  }
  const size_t objects_count = table_->AdoptFromDisk(std::move(adopted));
  parts_.log(absl::StrCat("adopted ", objects_count, " objects from disk"));
  if (unreadable.empty()) return absl::OkStatus();
  parts_.log(absl::StrCat("dropped ", unreadable.size(),
                          " objects on disk that fit no format known here"));
  return disk_->RemoveAll(unreadable);
}

void Storage::SpillRest(int64_t timeout_nanos) {
  const int64_t deadline_nanos = parts_.clock->NowNanos() + timeout_nanos;
  // DRAM first: what it holds must be on disk before HBM's finds room there.
  size_t left = spiller_->SpillAll(deadline_nanos);
  while (hbm_mover_ != nullptr && parts_.clock->NowNanos() < deadline_nanos &&
         hbm_mover_->SpillSome() > 0) {
    left = spiller_->SpillAll(deadline_nanos);
  }
  if (left > 0) {
    parts_.log(
        absl::StrCat(left, " objects were only in memory and could not be spilled: they are lost"));
  }
}

}  // namespace okv
