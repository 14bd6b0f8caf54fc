#include "cache_node/hbm_mover.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "proto/block_range.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// How long the thread rests when it can free nothing: pins go with the transfers that hold them.
constexpr std::chrono::milliseconds kRest(10);
constexpr size_t kEvictObjects = 64;

}  // namespace

absl::Status HbmMoverOptions::Validate() const {
  if (!(0 < low_watermark && low_watermark <= high_watermark && high_watermark <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("HBM watermarks must be 0 < low <= high <= 1, not ", low_watermark, " and ",
                     high_watermark));
  }
  if (group_bytes_max == 0 || group_objects_max == 0 || promotions_max == 0) {
    return absl::InvalidArgumentError("what moves between HBM and DRAM at once must be something");
  }
  return absl::OkStatus();
}

HbmMover::HbmMover(const HbmMoverOptions& options, const Parts& parts)
    : options_(options), parts_(parts) {}

HbmMover::~HbmMover() { Stop(); }

void HbmMover::Start() {
  thread_ = std::thread([this] { Run(); });
}

void HbmMover::Stop() {
  std::vector<ObjectPin> released;
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    wake_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  MutexLock lock(&mu_);
  released.swap(promotions_);
}

bool HbmMover::AboveWatermark(double watermark) const {
  const TierStats stats = parts_.hbm->stats();
  return static_cast<double>(stats.used_bytes) >
         watermark * static_cast<double>(stats.capacity_bytes);
}

uint64_t HbmMover::GroupBytes() const {
  return std::min({options_.group_bytes_max, parts_.hbm->stats().capacity_bytes / 16,
                   parts_.dram->stats().capacity_bytes / 16});
}

absl::StatusOr<Extent> HbmMover::Allocate(size_t bytes) {
  absl::StatusOr<Extent> extent = parts_.hbm->Allocate(bytes);
  while (absl::IsResourceExhausted(extent.status()) && EvictClean(bytes) > 0) {
    extent = parts_.hbm->Allocate(bytes);
  }
  if (absl::IsResourceExhausted(extent.status()) || AboveWatermark(options_.high_watermark)) {
    MutexLock lock(&mu_);
    work_ = true;
    wake_.Signal();
  }
  return extent;
}

uint64_t HbmMover::EvictClean(uint64_t bytes) {
  uint64_t freed = 0;
  for (ObjectPin& pin : parts_.table->PinColdestInHbm({.bytes = bytes,
                        .objects_max = kEvictObjects,
                        .where = BlockTable::InHbm::kElsewhereToo})) {
    freed += parts_.table->UnpinAndEvictHbm(std::move(pin));
  }
  return freed;
}

void HbmMover::Used(const ObjectPin& pin) {
  const uint64_t bytes = pin.object().header.payload_bytes;
  const TierStats hbm = parts_.hbm->stats();
  const bool again = parts_.table->NoteHbmMiss(pin, hbm.capacity_bytes);
  const double free_limit = options_.low_watermark * static_cast<double>(hbm.capacity_bytes);
  if (!again && static_cast<double>(hbm.used_bytes + bytes) > free_limit) return;
  ObjectPin held = parts_.table->PinAgain(pin);
  MutexLock lock(&mu_);
  // They pin what DRAM may have to give away, for a spill from HBM too.
  const uint64_t bytes_max = parts_.dram->stats().capacity_bytes / 16;
  const bool fits = promotions_.empty() || promotions_bytes_ + bytes <= bytes_max;
  if (!stopping_ && fits && promotions_.size() < options_.promotions_max) {
    promotions_.push_back(std::move(held));
    promotions_bytes_ += bytes;
    wake_.Signal();
  }
}

void HbmMover::Run() {
  bool rest = false;
  while (true) {
    std::vector<ObjectPin> promotions;
    bool work = false;
    {
      MutexLock lock(&mu_);
      if (rest && !stopping_) wake_.WaitFor(&mu_, kRest);
      while (!stopping_ && !work_ && promotions_.empty()) wake_.Wait(&mu_);
      if (stopping_) return;
      work = std::exchange(work_, false);
      promotions.swap(promotions_);
      promotions_bytes_ = 0;
    }
    rest = false;
    Promote(std::move(promotions));
    while (work && AboveWatermark(options_.low_watermark)) {
      const uint64_t freed = SpillGroup();
      MutexLock lock(&mu_);
      if (stopping_) return;
      if (freed == 0) {
        rest = true;
        work_ = true;  // Until it succeeds.
        break;
      }
    }
  }
}

uint64_t HbmMover::SpillGroup() {
  std::vector<ObjectPin> pins = parts_.table->PinColdestInHbm(
      {.bytes = GroupBytes(), .objects_max = options_.group_objects_max});
  CopyDown(&pins, /*may_wait=*/true);
  uint64_t freed = 0;
  for (ObjectPin& pin : pins) freed += parts_.table->UnpinAndEvictHbm(std::move(pin));
  // The coldest could not go: perhaps a warmer one is below already.
  return freed > 0 ? freed : EvictClean(GroupBytes());
}

size_t HbmMover::SpillSome() {
  OKV_CHECK(!thread_.joinable());
  std::vector<ObjectPin> pins =
      parts_.table->PinColdestInHbm({.bytes = GroupBytes(),
                                     .objects_max = options_.group_objects_max,
                                     .where = BlockTable::InHbm::kOnlyInHbm});
  return CopyDown(&pins, /*may_wait=*/false);
}

absl::StatusOr<Extent> HbmMover::AllocateDram(size_t bytes, bool may_wait) {
  if (!may_wait) return parts_.spiller->AllocateNow(bytes);
  std::promise<absl::StatusOr<Extent>> room;
  parts_.spiller->Allocate(bytes, /*may_drop=*/true, [&room](absl::StatusOr<Extent> extent) {
    room.set_value(std::move(extent));
  });
  return room.get_future().get();
}

std::vector<absl::Status> HbmMover::Verify(const std::vector<ObjectPin>& pins,
                                           const std::vector<const uint8_t*>& payloads) {
  std::vector<DeviceRuns> blocks;
  std::vector<absl::Span<const uint32_t>> expected;
  for (size_t i = 0; i < pins.size(); ++i) {
    const HeldObject& object = pins[i].object();
    blocks.push_back(DeviceRuns::InBlock(object.header.id, object.layout,
                                         BlockRange::Whole(object.layout), payloads[i]));
    expected.push_back(object.header.checksums);
  }
  return parts_.hbm->device()->Verify(blocks, expected);
}

size_t HbmMover::CopyDown(std::vector<ObjectPin>* pins, bool may_wait) {
  std::vector<ObjectPin> clean;
  std::vector<ObjectPin> dirty;
  std::vector<const uint8_t*> payloads;
  for (ObjectPin& pin : *pins) {
    if (pin.on_disk() || !pin.dram().empty()) {
      clean.push_back(std::move(pin));
      continue;
    }
    payloads.push_back(pin.hbm().bytes.data());
    dirty.push_back(std::move(pin));
  }
  *pins = std::move(clean);
  if (dirty.empty()) return 0;
  const std::vector<absl::Status> checks = Verify(dirty, payloads);
  size_t quarantined = 0;
  std::vector<ObjectPin> sound;
  std::vector<Extent> extents;
  std::vector<MemoryCopy> copies;
  for (size_t i = 0; i < dirty.size(); ++i) {
    const size_t bytes = dirty[i].object().header.payload_bytes;
    if (absl::IsDataLoss(checks[i])) {
      parts_.spiller->Quarantine(std::move(dirty[i]), *parts_.hbm, checks[i]);
      ++quarantined;
      continue;
    }
    Note(checks[i]);
    if (!checks[i].ok()) continue;
    absl::StatusOr<Extent> extent = AllocateDram(bytes, may_wait);
    if (!extent.ok()) break;  // The others will find no room either.
    copies.push_back({.to = extent->span().data(), .from = payloads[i], .bytes = bytes});
    extents.push_back(*std::move(extent));
    sound.push_back(std::move(dirty[i]));
  }
  const absl::Status copied = parts_.hbm->device()->Copy(copies);
  Note(copied);
  if (!copied.ok()) return quarantined;
  const size_t count = sound.size();
  for (size_t i = 0; i < count; ++i) {
    parts_.table->AttachDram(sound[i], std::move(extents[i]));
    parts_.metrics->HbmSpilled(copies[i].bytes);
    pins->push_back(std::move(sound[i]));
  }
  return quarantined + count;
}

void HbmMover::Promote(std::vector<ObjectPin> pins) {
  std::vector<ObjectPin> group;
  absl::flat_hash_set<ObjectId> ids;
  uint64_t bytes = 0;
  for (ObjectPin& pin : pins) {
    // Promoted by an earlier use, or about to be; gone from DRAM it cannot be.
    if (!pin.hbm().empty() || pin.dram().empty() || !ids.insert(pin.id()).second) continue;
    bytes += pin.object().header.payload_bytes;
    group.push_back(std::move(pin));
    if (bytes < GroupBytes()) continue;
    PromoteGroup(std::exchange(group, {}));
    bytes = 0;
  }
  if (!group.empty()) PromoteGroup(std::move(group));
}

void HbmMover::PromoteGroup(std::vector<ObjectPin> pins) {
  std::vector<ObjectPin> moved;
  std::vector<Extent> extents;
  std::vector<MemoryCopy> copies;
  std::vector<const uint8_t*> payloads;
  for (ObjectPin& pin : pins) {
    const absl::Span<const uint8_t> dram = pin.dram();
    absl::StatusOr<Extent> extent = Allocate(dram.size());
    if (!extent.ok()) break;  // The others will find no room either.
    copies.push_back({.to = extent->span().data(), .from = dram.data(), .bytes = dram.size()});
    payloads.push_back(extent->span().data());
    extents.push_back(*std::move(extent));
    moved.push_back(std::move(pin));
  }
  const absl::Status copied = parts_.hbm->device()->Copy(copies);
  Note(copied);
  if (!copied.ok()) return;
  const std::vector<absl::Status> checks = Verify(moved, payloads);
  for (size_t i = 0; i < moved.size(); ++i) {
    if (checks[i].ok()) {
      parts_.metrics->HbmPromoted(copies[i].bytes);
      parts_.table->AttachHbm(moved[i], std::move(extents[i]));
      continue;
    }
    // DRAM's copy, or the way up: only the first is a reason to look at the object.
    const absl::Status below = parts_.spiller->Verify(moved[i].object(), moved[i].memory());
    if (absl::IsDataLoss(below)) {
      parts_.on_damaged(moved[i].object().tenant, moved[i].id());
    } else {
      Note(checks[i]);
    }
  }
}

void HbmMover::Note(const absl::Status& status) {
  if (status.code() == device_status_.code()) return;
  parts_.log(status.ok() ? absl::StrCat(parts_.hbm->device()->name(), " works again")
                         : absl::StrCat("HBM: ", status.ToString()));
  device_status_ = status;
}

}  // namespace okv
