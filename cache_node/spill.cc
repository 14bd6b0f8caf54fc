#include "cache_node/spill.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_node/payload.h"
#include "proto/check.h"
#include "proto/object.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// How long the thread rests when it can free nothing: pins go with the transfers that hold them.
constexpr std::chrono::milliseconds kRest(10);
// How often it looks whether others filled the disk.
constexpr std::chrono::milliseconds kFloorWatch(1000);
constexpr size_t kEvictObjects = 64;

double Seconds(int64_t nanos) { return static_cast<double>(nanos) * 1e-9; }

}  // namespace

absl::Status SpillerOptions::Validate() const {
  if (!(0 < low_watermark && low_watermark <= high_watermark && high_watermark <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("watermarks must be 0 < low <= high <= 1, not ",
                                                   low_watermark, " and ", high_watermark));
  }
  if (group_bytes_max == 0 || group_objects_max == 0) {
    return absl::InvalidArgumentError("spill groups must hold something");
  }
  return absl::OkStatus();
}

Spiller::Spiller(const SpillerOptions& options, const Parts& parts)
    : options_(options),
      parts_(parts),
      evictor_(
          {.disk = parts.disk,
           .table = parts.table,
           .metrics = parts.metrics,
           .verify = [this](const HeldObject& object,
                            absl::Span<const uint8_t> payload) { return Verify(object, payload); },
           .quarantine =
               [this](ObjectPin pin, const absl::Status& why) {
                 Quarantine(std::move(pin), *parts_.disk, why);
               },
           .on_removed = parts.on_removed}) {}

Spiller::~Spiller() { Stop(); }

void Spiller::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Spiller::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    wake_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  FailWaiters(absl::UnavailableError("the node is stopping"));
}

bool Spiller::AboveWatermark(double watermark) const {
  const TierStats stats = parts_.dram->stats();
  return static_cast<double>(stats.used_bytes) >
         watermark * static_cast<double>(stats.capacity_bytes);
}

uint64_t Spiller::GroupBytes() const {
  return std::min({options_.group_bytes_max, parts_.dram->stats().capacity_bytes / 16,
                   parts_.disk->stats().capacity_bytes / 16});
}

void Spiller::Allocate(size_t bytes, bool may_drop, AllocateDone done) {
  absl::Status refused;
  {
    MutexLock lock(&mu_);
    if (stopping_) {
      refused = absl::UnavailableError("the node is stopping");
    } else if (waiters_.size() >= options_.waiters_max) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat("DRAM is full, and ", waiters_.size(), " puts wait for room already"));
    } else if (!waiters_.empty()) {  // Nobody overtakes: a large payload would wait for ever.
      waiters_.push_back({.bytes = bytes,
                          .may_drop = may_drop,
                          .deadline_nanos = parts_.clock->NowNanos() + options_.allocate_wait_nanos,
                          .done = std::move(done)});
      return;
    }
  }
  if (!refused.ok()) {
    done(refused);
    return;
  }
  absl::StatusOr<Extent> extent = AllocateNow(bytes);
  const bool wait = absl::IsResourceExhausted(extent.status());
  if (wait || AboveWatermark(options_.high_watermark)) {
    MutexLock lock(&mu_);
    work_ = true;
    if (wait && !stopping_) {
      waiters_.push_back({.bytes = bytes,
                          .may_drop = may_drop,
                          .deadline_nanos = parts_.clock->NowNanos() + options_.allocate_wait_nanos,
                          .done = std::exchange(done, nullptr)});
    }
    wake_.Signal();
  }
  if (done) done(std::move(extent));
}

absl::StatusOr<Extent> Spiller::AllocateNow(size_t bytes) {
  while (true) {
    absl::StatusOr<Extent> extent = parts_.dram->Allocate(bytes);
    if (!absl::IsResourceExhausted(extent.status()) || EvictClean(bytes) == 0) return extent;
  }
}

uint64_t Spiller::EvictClean(uint64_t bytes) {
  uint64_t freed = 0;
  for (ObjectPin& pin : parts_.table->PinColdest({.bytes = bytes,
                        .objects_max = kEvictObjects,
                        .where = BlockTable::Where::kOnDiskToo})) {
    freed += parts_.table->UnpinAndEvict(std::move(pin));
  }
  return freed;
}

void Spiller::Run() {
  bool rest = false;
  while (true) {
    bool idle = false;
    {
      MutexLock lock(&mu_);
      while (!stopping_ && !idle && (rest || (!work_ && waiters_.empty()))) {
        if (rest) {
          wake_.WaitFor(&mu_, kRest);
          rest = false;
        } else {
          wake_.WaitFor(&mu_, kFloorWatch);
          idle = !work_ && waiters_.empty();
        }
      }
      if (stopping_) return;
      work_ = false;
    }
    if (idle) {
      WatchFloor();
      continue;
    }
    ServeWaiters();
    while (waiters_count() > 0 || AboveWatermark(options_.low_watermark)) {
      const std::optional<bool> may_drop = FirstMayDrop();
      const absl::StatusOr<uint64_t> freed = SpillGroup(may_drop.value_or(false));
      // Who came meanwhile has his turn: nothing was dropped for him yet.
      if (may_drop.has_value() && absl::IsResourceExhausted(freed.status())) {
        FailWaiters(
            absl::ResourceExhaustedError(absl::StrCat("DRAM is full: ", freed.status().message())),
            /*first_only=*/!*may_drop);
      }
      ServeWaiters();
      {
        MutexLock lock(&mu_);
        if (stopping_) return;
      }
      if (!freed.ok() || *freed == 0) {
        rest = true;
        break;
      }
    }
  }
}

void Spiller::ServeWaiters() {
  while (true) {
    Waiter waiter;
    absl::StatusOr<Extent> extent = absl::UnknownError("");
    {
      MutexLock lock(&mu_);
      if (waiters_.empty()) return;
      extent = parts_.dram->Allocate(waiters_.front().bytes);
      const bool expired = parts_.clock->NowNanos() >= waiters_.front().deadline_nanos;
      if (absl::IsResourceExhausted(extent.status()) && !expired) return;
      waiter = std::move(waiters_.front());
      waiters_.pop_front();
    }
    waiter.done(std::move(extent));
  }
}

void Spiller::FailWaiters(const absl::Status& status, bool first_only) {
  std::deque<Waiter> waiters;
  {
    MutexLock lock(&mu_);
    if (first_only && !waiters_.empty()) {
      waiters.push_back(std::move(waiters_.front()));
      waiters_.pop_front();
    } else {
      waiters.swap(waiters_);
    }
  }
  for (Waiter& waiter : waiters) waiter.done(status);
}

size_t Spiller::waiters_count() const {
  MutexLock lock(&mu_);
  return waiters_.size();
}

std::optional<bool> Spiller::FirstMayDrop() const {
  MutexLock lock(&mu_);
  if (waiters_.empty()) return std::nullopt;
  return waiters_.front().may_drop;
}

absl::StatusOr<uint64_t> Spiller::SpillGroup(bool may_drop) {
  std::vector<ObjectPin> pins =
      parts_.table->PinColdest({.bytes = GroupBytes(), .objects_max = options_.group_objects_max});
  bool disk_full = false;
  const absl::Status status = CopyDown(&pins, &disk_full);
  uint64_t freed = 0;
  for (ObjectPin& pin : pins) freed += parts_.table->UnpinAndEvict(std::move(pin));
  // The coldest could not go: perhaps a warmer one is on disk already.
  if (freed == 0) freed = EvictClean(GroupBytes());
  if (freed > 0) return freed;
  OKV_RETURN_IF_ERROR(status);
  if (disk_full) {
    if (may_drop) freed = evictor_.DropFromMemory(GroupBytes());
    if (freed > 0) return freed;
    return absl::ResourceExhaustedError(
        absl::StrCat("the disk tier has ", parts_.disk->stats().used_bytes, " of ",
                     parts_.disk->stats().capacity_bytes, " bytes in use"));
  }
  return 0;
}

absl::Status Spiller::CopyDown(std::vector<ObjectPin>* pins, bool* disk_full) {
  std::vector<TierWrite> group;
  std::vector<ObjectPin> clean;
  std::vector<ObjectPin> dirty;
  uint64_t cost_bytes = 2 * kDiskPageBytes;  // What a table takes beside its objects' part.
  uint64_t payload_bytes = 0;
  for (ObjectPin& pin : *pins) {
    if (pin.on_disk()) {
      clean.push_back(std::move(pin));
      continue;
    }
    group.push_back({.object = pin.object_ref(), .payload = pin.dram()});
    cost_bytes += parts_.disk->CostBytes(pin.object());
    payload_bytes += pin.object().header.payload_bytes;
    dirty.push_back(std::move(pin));
  }
  *pins = std::move(clean);
  if (group.empty()) return absl::OkStatus();
  std::vector<absl::Status> checks(group.size());
  const auto keep = [&](size_t i) {
    checks[i] = Verify(*group[i].object, group[i].payload);
    return checks[i].ok();
  };
  std::vector<DiskPlace> places;
  absl::Status status = evictor_.MakeRoom(cost_bytes, GroupBytes());
  if (status.ok()) {
    absl::StatusOr<RocksdbTier::Stored> stored = parts_.disk->Store(group, keep);
    status = stored.ok() ? stored->synced : stored.status();
    if (stored.ok()) places = std::move(stored->places);
  }
  NoteDisk(status);
  *disk_full = absl::IsResourceExhausted(status);
  if (*disk_full) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(status);
  for (size_t i = 0; i < dirty.size(); ++i) {
    if (!checks[i].ok()) {
      Quarantine(std::move(dirty[i]), *parts_.dram, checks[i]);
      continue;
    }
    parts_.table->MarkOnDisk(dirty[i], places[i]);
    pins->push_back(std::move(dirty[i]));
  }
  parts_.metrics->Spilled(payload_bytes);
  return absl::OkStatus();
}

void Spiller::NoteDisk(const absl::Status& status) {
  if (!status.ok()) parts_.metrics->SpillFailed(status.code());
  if (status.code() == disk_status_.code()) return;
  if (status.ok()) {
    parts_.log("the disk tier takes objects again");
  } else {
    parts_.log(absl::StrCat("the disk tier takes nothing, trying on: ", status.ToString()));
  }
  disk_status_ = status;
}

void Spiller::WatchFloor() {
  if (parts_.disk->ShortBytes(0) == 0) return;
  NoteDisk(evictor_.MakeRoom(0, 0));
}

size_t Spiller::SpillAll(int64_t deadline_nanos) {
  OKV_CHECK(!thread_.joinable());
  while (parts_.clock->NowNanos() < deadline_nanos) {
    std::vector<ObjectPin> pins =
        parts_.table->PinColdest({.bytes = GroupBytes(),
                                  .objects_max = options_.group_objects_max,
                                  .where = BlockTable::Where::kOnlyInDram});
    if (pins.empty()) break;
    bool disk_full = false;
    if (!CopyDown(&pins, &disk_full).ok() || (disk_full && pins.empty())) break;
  }
  const TableStats stats = parts_.table->stats();
  uint64_t on_disk = 0;
  for (const TableStats::PerCodec& codec : stats.codecs) on_disk += codec.disk_objects;
  return stats.objects_count - on_disk;
}

absl::StatusOr<AlignedBuffer> Spiller::Load(ObjectPin* pin) {
  if (!pin->dram().empty()) return nullptr;  // Another load was faster.
  const HeldObject& object = pin->object();
  const size_t bytes = object.header.payload_bytes;
  if (!pin->on_disk()) {  // Only HBM holds it.
    const Payload memory = pin->memory();
    if (memory.empty()) {  // Another load found the disk's copy damaged.
      return absl::DataLossError(absl::StrCat(pin->id().Name(), " is damaged, and leaving"));
    }
    AlignedBuffer own = AllocateAligned(bytes);
    OKV_RETURN_IF_ERROR(
        GatherPieces(memory, {{.offset = 0, .bytes = bytes}}, absl::MakeSpan(own.get(), bytes)));
    return own;
  }
  absl::StatusOr<Extent> extent = AllocateForLoad(*pin);
  AlignedBuffer own;
  if (!extent.ok()) own = AllocateAligned(bytes);
  const absl::Span<uint8_t> buffer =
      extent.ok() ? extent->span() : absl::MakeSpan(own.get(), bytes);
  absl::Status status = ReadFromDisk(*pin, buffer);
  if (status.ok()) status = Verify(object, buffer);
  if (!status.ok()) {
    if (absl::IsDataLoss(status)) Quarantine(std::move(*pin), *parts_.disk, status);
    return status;
  }
  if (!extent.ok()) {
    parts_.metrics->Passed(bytes);
    return own;
  }
  parts_.table->AttachDram(*pin, *std::move(extent));
  parts_.metrics->Promoted(bytes);
  if (AboveWatermark(options_.high_watermark)) {
    MutexLock lock(&mu_);
    work_ = true;
    wake_.Signal();
  }
  return nullptr;
}

absl::StatusOr<Extent> Spiller::AllocateForLoad(const ObjectPin& pin) {
  const uint64_t bytes = pin.object().header.payload_bytes;
  const TierStats dram = parts_.dram->stats();
  const bool again = parts_.table->NoteLoad(pin, dram.capacity_bytes);
  const double free_limit = options_.low_watermark * static_cast<double>(dram.capacity_bytes);
  if (static_cast<double>(dram.used_bytes + bytes) <= free_limit) {
    return parts_.dram->Allocate(bytes);  // Nobody has to go for it.
  }
  if (again) return AllocateNow(bytes);
  return absl::ResourceExhaustedError("a first use does not displace what DRAM holds");
}

absl::Status Spiller::ReadFromDisk(const ObjectPin& pin, absl::Span<uint8_t> buffer) {
  while (true) {
    const DiskPlace place = pin.place();
    const absl::Status status = parts_.disk->ReadAt(place, buffer);
    if (!absl::IsNotFound(status)) return status;
    // It moved while we looked, or the table knows what the disk does not.
    if (pin.place() == place) return absl::DataLossError(status.message());
  }
}

absl::Status Spiller::Verify(const HeldObject& object, const Payload& payload) const {
  const int64_t start_nanos = parts_.clock->NowNanos();
  absl::Status status = VerifyPayload(object, payload);
  parts_.metrics->Verified(Seconds(parts_.clock->NowNanos() - start_nanos));
  return status;
}

void Spiller::Quarantine(ObjectPin pin, const Tier& tier, const absl::Status& why) {
  if (!parts_.table->Doom(pin)) return;
  parts_.metrics->Corrupt(tier.name());
  const ObjectId id = pin.id();
  // A removal that fails leaves a row that a restart finds damaged again.
  const absl::Status removed = parts_.disk->Remove(id);
  // Before it may be written, and reported, again.
  parts_.on_removed(id, removed.ok() ? why
                                     : absl::DataLossError(absl::StrCat(
                                           why.message(), "; removing it: ", removed.message())));
  parts_.table->Forget(std::move(pin));
}

}  // namespace okv
