#include "cache_node/assembly.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
absl::Status Assembly::StoreOnDevice(const Share& share, absl::Span<const uint8_t> staged) const {
  DeviceMemory* device = extent.device();
  const absl::Span<uint8_t> block = extent.span();
  if (!staged.empty()) {
    std::vector<MemoryCopy> copies;
    const uint8_t* from = staged.data();
    for (const BlockPiece& piece : RangePieces(share.range, layout_, id().codec)) {
      copies.push_back({.to = block.data() + piece.offset, .from = from, .bytes = piece.bytes});
      from += piece.bytes;
    }
    OKV_RETURN_IF_ERROR(device->Copy(copies));
  }
  return device->Verify({DeviceRuns::InBlock(id(), layout_, share.range, block.data())},
                        {absl::MakeConstSpan(share.header.checksums)})[0];
}

absl::Status Assembly::Store(const Share& share, absl::Span<const uint8_t> staged) const {
  if (extent.device() != nullptr) return StoreOnDevice(share, staged);
  const Codec codec = id().codec;
  const size_t run_bytes = layout_.run_bytes(codec);
  const absl::Span<uint8_t> block = extent.span();
  for (uint32_t layer = share.range.layer_begin; layer < share.range.layer_end; ++layer) {
    for (uint32_t head = share.range.head_begin; head < share.range.head_end; ++head) {
      const size_t index = share.range.run_index(layer, head);
      const absl::Span<uint8_t> run =
          block.subspan(layout_.run_offset(codec, layer, head), run_bytes);
      if (!staged.empty()) std::memcpy(run.data(), staged.data() + index * run_bytes, run_bytes);
      if (RunChecksum(id(), layer, head, run) != share.header.checksums[index]) {
        return absl::DataLossError(
            absl::StrCat(id().Name(), ": wrong checksum in layer ", layer, ", head ", head));
      }
    }
  }
  return absl::OkStatus();
}

uint32_t& Assembly::Checksum(uint32_t layer, uint32_t head) {
  return header_.checksums[size_t{layer} * layout_.kv_heads + head];
}

std::vector<uint32_t> Assembly::ChecksumsOf(const BlockRange& range) const {
  return range.Select(header_.checksums, layout_);
}

absl::StatusOr<bool> Assemblies::IsHere(const Assembly& assembly, const Share& share,
                                        int64_t now_nanos) const {
  const ObjectHeader& mine = assembly.header_;
  const ObjectHeader& its = share.header;
  if (mine.generation != its.generation) {
    return absl::AbortedError(absl::StrCat(its.id.Name(), " is being written under write id ",
                                           mine.generation, ", not ", its.generation));
  }
  const char* differs = nullptr;
  if (mine.format_id != its.format_id) differs = "format_id";
  if (mine.parent != its.parent) differs = "parent";
  if (mine.index != its.index) differs = "index";
  if (assembly.tenant_ != share.tenant) differs = "tenant";
  if (differs != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(its.id.Name(), ": field '", differs,
                                                   "' differs between the shares of write id ",
                                                   its.generation));
  }
  for (const Assembly::Part& part : assembly.parts_) {
    if (!part.range.Overlaps(share.range)) continue;
    const std::string what = absl::StrCat(its.id.Name(), ", ", share.range.ToString());
    const bool same = part.range == share.range;
    if (same && !part.complete) return absl::AbortedError(absl::StrCat(what, " is being written"));
    if (same && assembly.ChecksumsOf(part.range) == its.checksums) return true;
    return absl::InvalidArgumentError(absl::StrCat(
        what, ": another share has ", part.range.ToString(), same ? " with other bytes" : ""));
  }
  if (now_nanos >= assembly.deadline_nanos_) {
    return absl::AbortedError(
        absl::StrCat(its.id.Name(), ": the time of write id ", its.generation, " is up"));
  }
  return false;
}

absl::StatusOr<Assemblies::Joined> Assemblies::Join(const Share& share, int64_t now_nanos) {
  const ObjectId& id = share.header.id;
  OKV_CHECK(share.header.checksums.size() == share.range.runs_count());
  if (const auto found = open_.find(id); found != open_.end()) {
    OKV_ASSIGN_OR_RETURN(const bool is_here, IsHere(*found->second, share, now_nanos));
    if (!is_here) found->second->parts_.push_back({.range = share.range});
    return Joined{.assembly = found->second, .is_here = is_here};
  }
  OKV_ASSIGN_OR_RETURN(WriteClaim claim, table_->Claim(id, share.header.parent));
  auto assembly = std::make_shared<Assembly>();
  assembly->header_ = share.header;
  assembly->header_.checksums.assign(share.layout.runs_count(), 0);
  assembly->tenant_ = share.tenant;
  assembly->layout_ = share.layout;
  assembly->claim_ = std::move(claim);
  assembly->parts_.push_back({.range = share.range});
  assembly->deadline_nanos_ = now_nanos + nanos_max_;
  open_[id] = assembly;
  return Joined{.assembly = std::move(assembly), .is_first = true};
}

void Assemblies::Withdraw(const AssemblyRef& assembly, const BlockRange& range) {
  if (assembly->ended_) return;
  auto& parts = assembly->parts_;
  const auto part = std::find_if(parts.begin(), parts.end(), [&range](const auto& candidate) {
    return candidate.range == range;
  });
  OKV_CHECK(part != parts.end() && !part->complete);
  parts.erase(part);
  if (parts.empty()) Abandon(assembly);
}

ObjectRef Assemblies::Complete(const AssemblyRef& assembly, const Share& share) {
  OKV_CHECK(!assembly->ended_);
  for (Assembly::Part& part : assembly->parts_) {
    if (part.range != share.range) continue;
    OKV_CHECK(!part.complete);
    part.complete = true;
  }
  const BlockRange& range = share.range;
  for (uint32_t layer = range.layer_begin; layer < range.layer_end; ++layer) {
    for (uint32_t head = range.head_begin; head < range.head_end; ++head) {
      assembly->Checksum(layer, head) = share.header.checksums[range.run_index(layer, head)];
    }
  }
  assembly->runs_complete_ += range.runs_count();
  // Shares do not overlap: so many runs are every run.
  if (assembly->runs_complete_ < assembly->layout_.runs_count()) return nullptr;
  auto object = std::make_shared<const HeldObject>(HeldObject{
      .header = assembly->header_, .tenant = assembly->tenant_, .layout = assembly->layout_});
  table_->Commit(std::move(assembly->claim_), object, std::move(assembly->extent));
  assembly->ended_ = true;
  open_.erase(object->header.id);
  return object;
}

void Assemblies::Abandon(const AssemblyRef& assembly) {
  OKV_CHECK(!assembly->ended_);
  assembly->ended_ = true;
  const AssemblyRef kept = assembly;  // The argument may be the map's.
  open_.erase(kept->id());
  const WriteClaim released = std::move(kept->claim_);
}

std::vector<Assemblies::Expired> Assemblies::Expire(int64_t now_nanos) {
  std::vector<Expired> expired;
  for (const auto& [id, assembly] : open_) {
    if (now_nanos < assembly->deadline_nanos_) continue;
    const auto& parts = assembly->parts_;
    // What is under way has a limit of its own, its session's.
    if (!std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.complete; })) {
      continue;
    }
    expired.push_back(
        {.assembly = assembly,
         .why = absl::AbortedError(absl::StrCat(
             id.Name(), ": ", assembly->layout_.runs_count() - assembly->runs_complete_, " of ",
             assembly->layout_.runs_count(), " runs did not come within ",
             nanos_max_ / 1'000'000'000, " s: a writer of its group is gone"))});
  }
  for (const Expired& one : expired) Abandon(one.assembly);
  return expired;
}

}  // namespace okv
