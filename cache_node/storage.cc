#include "cache_node/storage.h"

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {

absl::Status StorageOptions::Validate() const {
  OKV_RETURN_IF_ERROR(pool.Validate());
  OKV_RETURN_IF_ERROR(disk.Validate());
  return spill.Validate();
}

absl::StatusOr<std::unique_ptr<Storage>> Storage::Open(const StorageOptions& options,
                                                       const Parts& parts) {
  OKV_RETURN_IF_ERROR(options.Validate());
  auto storage = absl::WrapUnique(new Storage(parts));
  OKV_ASSIGN_OR_RETURN(storage->disk_, RocksdbTier::Open(options.disk));
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
  storage->table_ = std::make_unique<BlockTable>(storage->dram_.get(), options.tenant_budgets);
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
  return storage;
}

Storage::~Storage() = default;

absl::Status Storage::AdoptDisk() {
  OKV_ASSIGN_OR_RETURN(const std::vector<Format> formats, disk_->LoadFormats());
  for (const Format& format : formats) formats_->AddStored(format);
  std::vector<BlockTable::Adopted> adopted;
  adopted.reserve(disk_->stats().objects_count);
  std::vector<ObjectId> unreadable;
  OKV_RETURN_IF_ERROR(disk_->List(
      {.object =
           [&](TierRecord record) {
             const ObjectHeader& header = record.header;
             const Format* format = formats_->Find(header.format_id);
             const PageLayout layout = format != nullptr ? PageLayout::Of(*format) : PageLayout{};
             if (format == nullptr || header.payload_bytes != layout.block_bytes(header.id.codec) ||
                 header.checksums.size() != layout.runs_count()) {
               unreadable.push_back(header.id);
               return;
             }
             adopted.push_back({.object = std::make_shared<const HeldObject>(
                                    HeldObject{.header = std::move(record.header),
                                               .tenant = std::move(record.tenant),
                                               .layout = layout}),
                                .place = record.place});
           },
       .corrupt =
           [&](const absl::Status& why) {
             parts_.metrics->Corrupt(disk_->name());
             parts_.log(absl::StrCat("dropped a row of the disk's index: ", why.message()));
           }}));
  const size_t objects_count = table_->AdoptFromDisk(std::move(adopted));
  parts_.log(absl::StrCat("adopted ", objects_count, " objects of ", formats.size(),
                          " formats from disk"));
  if (unreadable.empty()) return absl::OkStatus();
  // A format is durable before its objects: without it they are of no use to anybody.
  parts_.log(absl::StrCat("dropped ", unreadable.size(),
                          " objects on disk that fit no format known here"));
  return disk_->RemoveAll(unreadable);
}

void Storage::SpillRest(int64_t timeout_nanos) {
  const size_t left = spiller_->SpillAll(parts_.clock->NowNanos() + timeout_nanos);
  if (left > 0) {
    parts_.log(
        absl::StrCat(left, " objects were only in DRAM and could not be spilled: they are lost"));
  }
}

}  // namespace okv
