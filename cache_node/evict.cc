#include "cache_node/evict.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "cache_node/tiers/group_files.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// A round frees at least this share of the limit, so that the walk through the coldest objects is
// paid for by many groups.
constexpr uint64_t kRoundShare = 32;
// The share of the limit that goes at most, for want of groups that are cold altogether, before
// what is warm in a group is moved.
constexpr uint64_t kWindowShare = 8;
// Moving a group to win less than this share of it costs more writing than it is worth.
constexpr double kGainShareMin = 0.2;

uint64_t Missing(uint64_t wanted, uint64_t have) { return wanted - std::min(wanted, have); }

// What of a group's file is won when what is alive in it moves, and its part of the table with it.
uint64_t GainBytes(const GroupUse& use) {
  if (use.live_bytes == 0) return use.file_bytes;
  return Missing(use.file_bytes, use.live_bytes + use.table_bytes);
}

double GainShare(const GroupUse& use) {
  if (use.file_bytes == 0) return 1;
  return static_cast<double>(GainBytes(use)) / static_cast<double>(use.file_bytes);
}

}  // namespace

absl::Status Evictor::MakeRoom(uint64_t bytes, uint64_t group_bytes) {
  const uint64_t limit = parts_.disk->stats().capacity_bytes;
  uint64_t window = limit / kWindowShare;
  while (true) {
    const uint64_t missing = parts_.disk->ShortBytes(bytes + group_bytes);
    if (missing == 0) return absl::OkStatus();
    const uint64_t room = parts_.disk->RoomBytes();
    const uint64_t goal = std::max(missing, limit / kRoundShare);
    Plan plan = Choose(parts_.table->Cold({.bytes = std::max(window, 2 * goal)}), goal, room);
    if (plan.groups.empty() && window < limit) {
      // The coldest are spread over many groups: go on until whole groups are cold.
      window = limit;
      continue;
    }
    if (plan.groups.empty()) {
      if (parts_.disk->ShortBytes(bytes) == 0) return absl::OkStatus();
      return absl::ResourceExhaustedError(absl::StrCat("the disk tier has room for ", room, " of ",
                                                       bytes, " bytes, and nothing on it may go"));
    }
    OKV_RETURN_IF_ERROR(Drop(plan, group_bytes, ReasonFor(bytes + group_bytes)));
    const absl::flat_hash_set<uint32_t> chosen(plan.groups.begin(), plan.groups.end());
    for (const GroupUse& use : parts_.disk->Groups()) {
      if (chosen.contains(use.group)) stuck_.insert(use.group);
    }
  }
}

uint64_t Evictor::DropFromMemory(uint64_t bytes) {
  absl::Status removed;  // The disk is as it is: what memory alone holds goes all the same.
  return Leave(parts_.table->Cold({.bytes = bytes, .in_memory = true}), ReasonFor(bytes), &removed);
}

NodeMetrics::Eviction Evictor::ReasonFor(uint64_t bytes) const {
  const TierStats stats = parts_.disk->stats();
  return stats.occupied_bytes + bytes <= stats.capacity_bytes ? NodeMetrics::Eviction::kFreeFloor
                                                              : NodeMetrics::Eviction::kDiskLimit;
}

Evictor::Plan Evictor::Choose(std::vector<ColdObject> cold, uint64_t goal_bytes,
                              uint64_t room_bytes) {
  absl::flat_hash_map<uint32_t, GroupUse> uses;
  uint64_t dead_bytes = 0;  // Of groups without anything alive.
  for (const GroupUse& use : parts_.disk->Groups()) {
    if (stuck_.contains(use.group)) continue;
    uses[use.group] = use;
    if (use.live_bytes == 0) dead_bytes += use.file_bytes;
  }
  // A beginning of `cold`, so that no block goes before its children.
  size_t count = 0;
  for (; count < cold.size() && dead_bytes < goal_bytes; ++count) {
    const auto use = uses.find(cold[count].place.group);
    if (use == uses.end()) continue;  // In memory only.
    use->second.live_bytes -=
        std::min(use->second.live_bytes, DiskPagesBytes(cold[count].payload_bytes));
    if (use->second.live_bytes == 0) dead_bytes += use->second.file_bytes;
  }
  cold.resize(count);
  std::vector<GroupUse> candidates;
  for (const auto& [group, use] : uses) {
    if (GainShare(use) >= kGainShareMin) candidates.push_back(use);
  }
  std::sort(candidates.begin(), candidates.end(), [](const GroupUse& a, const GroupUse& b) {
    return std::pair(-GainShare(a), a.group) < std::pair(-GainShare(b), b.group);
  });
  Plan plan;
  for (const GroupUse& use : candidates) {
    if (goal_bytes == 0) break;
    if (use.live_bytes > room_bytes) continue;
    room_bytes -= use.live_bytes;
    goal_bytes = Missing(goal_bytes, GainBytes(use));
    plan.groups.push_back(use.group);
  }
  plan.cold = std::move(cold);
  return plan;
}

absl::Status Evictor::Drop(const Plan& plan, uint64_t group_bytes, NodeMetrics::Eviction reason) {
  absl::Status removed;
  Leave(plan.cold, reason, &removed);
  OKV_RETURN_IF_ERROR(removed);
  OKV_RETURN_IF_ERROR(Move(plan.groups, group_bytes));
  return parts_.disk->Flush();
}

uint64_t Evictor::Leave(std::vector<ColdObject> cold, NodeMetrics::Eviction reason,
                        absl::Status* removed) {
  // What cannot leave the disk is not even for a moment taken from its readers.
  *removed = parts_.disk->CheckWrites();
  if (!removed->ok()) {
    cold.erase(std::remove_if(cold.begin(), cold.end(),
                              [](const ColdObject& object) { return object.place.known(); }),
               cold.end());
  }
  absl::flat_hash_set<ObjectId> over_budget;
  absl::flat_hash_map<ObjectId, DiskPlace> places;
  for (const ColdObject& object : cold) {
    if (object.over_budget) over_budget.insert(object.id);
    if (object.place.known()) places[object.id] = object.place;
  }
  std::vector<ObjectPin> doomed = parts_.table->DoomCold(cold);
  std::vector<ObjectId> on_disk;
  for (const ObjectPin& pin : doomed) {
    if (places.contains(pin.id())) on_disk.push_back(pin.id());
  }
  if (!on_disk.empty()) *removed = parts_.disk->RemoveAll(on_disk);  // May be the first to fail.
  const absl::Status why = absl::ResourceExhaustedError("evicted: the disk tier is full");
  uint64_t memory_bytes = 0;
  std::vector<BlockTable::Doomed> staying;
  absl::flat_hash_set<BlockKey> parents;  // Of those; children come first.
  for (ObjectPin& pin : doomed) {
    const ObjectHeader& header = pin.object().header;
    const auto place = places.find(header.id);
    const bool is_on_disk = place != places.end();
    if (!removed->ok() && (is_on_disk || parents.contains(header.id.key))) {
      if (header.parent.has_value()) parents.insert(*header.parent);
      staying.push_back({std::move(pin), is_on_disk ? place->second : DiskPlace{}});
      continue;
    }
    if (!pin.memory().empty()) memory_bytes += header.payload_bytes;
    parts_.metrics->Evicted(
        over_budget.contains(header.id) ? NodeMetrics::Eviction::kTenantBudget : reason,
        /*objects_count=*/1, header.payload_bytes);
    parts_.on_removed(header.id, why);  // Before it may be written, and reported, again.
    parts_.table->Forget(std::move(pin));
  }
  if (!staying.empty()) parts_.table->Undoom(std::move(staying));
  return memory_bytes;
}

absl::Status Evictor::Move(const std::vector<uint32_t>& groups, uint64_t group_bytes) {
  std::vector<ObjectPin> pins;
  Moves moves;
  uint64_t bytes = 0;
  for (const uint32_t group : groups) {
    for (ObjectPin& pin : parts_.table->PinGroup(group)) {
      const uint64_t payload_bytes = DiskPagesBytes(pin.object().header.payload_bytes);
      if (!pins.empty() && bytes + payload_bytes > group_bytes) {
        OKV_RETURN_IF_ERROR(MoveSome(std::exchange(pins, {}), &moves));
        bytes = 0;
      }
      bytes += payload_bytes;
      pins.push_back(std::move(pin));
    }
  }
  if (!pins.empty()) OKV_RETURN_IF_ERROR(MoveSome(std::move(pins), &moves));
  return moves.objects_count > 0 ? absl::OkStatus() : moves.unread;
}

absl::StatusOr<absl::Span<const uint8_t>> Evictor::Whole(
    const ObjectPin& pin, std::vector<AlignedBuffer>* buffers) const {
  const absl::Span<const uint8_t> dram = pin.dram();
  // A copy of DRAM that is damaged must not replace the disk's.
  if (!dram.empty() && parts_.verify(pin.object(), dram).ok()) return dram;
  const size_t bytes = pin.object().header.payload_bytes;
  buffers->push_back(AllocateAligned(bytes));
  const absl::Span<uint8_t> buffer(buffers->back().get(), bytes);
  const absl::Status status = parts_.disk->ReadAt(pin.place(), buffer);
  if (absl::IsNotFound(status)) return absl::DataLossError(status.message());
  OKV_RETURN_IF_ERROR(status);
  OKV_RETURN_IF_ERROR(parts_.verify(pin.object(), buffer));
  return buffer;
}

absl::Status Evictor::MoveSome(std::vector<ObjectPin> pins, Moves* moves) {
  std::vector<AlignedBuffer> buffers;
  std::vector<TierWrite> writes;
  std::vector<ObjectPin> moved;
  for (ObjectPin& pin : pins) {
    const absl::StatusOr<absl::Span<const uint8_t>> payload = Whole(pin, &buffers);
    if (payload.ok()) {
      writes.push_back({.object = pin.object_ref(), .payload = *payload});
      moved.push_back(std::move(pin));
    } else if (absl::IsDataLoss(payload.status())) {
      parts_.quarantine(std::move(pin), payload.status());
    } else {
      stuck_.insert(pin.place().group);
      moves->unread = payload.status();
    }
  }
  if (writes.empty()) return absl::OkStatus();
  OKV_ASSIGN_OR_RETURN(const RocksdbTier::Stored stored,
                       parts_.disk->Store(writes, [](size_t) { return true; }));
  // Durable or not, the old group is empty by the index's account, and goes.
  for (size_t i = 0; i < moved.size(); ++i) parts_.table->MarkOnDisk(moved[i], stored.places[i]);
  moves->objects_count += moved.size();
  return stored.synced;
}

}  // namespace okv
