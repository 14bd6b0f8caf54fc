#include "cache_node/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "proto/check.h"

namespace okv {
namespace {

// Small enough for a progress line every second or so, large enough that the call costs nothing.
constexpr uint64_t kPrefaultStepBytes = uint64_t{256} << 20;

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + kExtentAlignBytes - 1) / kExtentAlignBytes * kExtentAlignBytes;
}

}  // namespace

absl::Span<uint8_t> Extent::span() const {
  if (pool_ == nullptr) return {};
  return absl::MakeSpan(pool_->base_ + offset_, bytes_);
}

DeviceMemory* Extent::device() const { return pool_ == nullptr ? nullptr : pool_->device(); }

void Extent::Release() {
  if (pool_ != nullptr) std::exchange(pool_, nullptr)->Free(offset_, bytes_);
}

absl::Status BlockPoolOptions::Validate() const {
  if (arena_bytes < kArenaBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat(device == nullptr ? "dram_bytes" : "hbm_bytes",
                                                   " is ", arena_bytes, ", and must be at least ",
                                                   kArenaBytesMin));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<BlockPool>> BlockPool::Create(const BlockPoolOptions& options) {
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  const uint64_t bytes = options.arena_bytes / kExtentAlignBytes * kExtentAlignBytes;
  if (options.device != nullptr) {
    absl::StatusOr<uint8_t*> base = options.device->Allocate(bytes);
    if (!base.ok()) return base.status();
    return absl::WrapUnique(new BlockPool(*base, bytes, options.device));
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of DRAM: ", std::strerror(errno)));
  }
  auto pool = absl::WrapUnique(new BlockPool(static_cast<uint8_t*>(base), bytes, nullptr));
  if (options.prefault) pool->Prefault(options);
  return pool;
}

BlockPool::BlockPool(uint8_t* base, uint64_t arena_bytes, DeviceMemory* device)
    : base_(base), arena_bytes_(arena_bytes), device_(device) {
  MutexLock lock(&mu_);
  InsertHole(0, arena_bytes);
}

BlockPool::~BlockPool() {
  OKV_CHECK(extents_count() == 0);
  if (device_ != nullptr) {
    device_->Free(base_);
  } else {
    OKV_CHECK(munmap(base_, arena_bytes_) == 0);
  }
}

void BlockPool::Prefault(const BlockPoolOptions& options) {
  // Fewer page faults and fewer TLB misses where the machine has huge pages; no harm where not.
  madvise(base_, arena_bytes_, MADV_HUGEPAGE);
  for (uint64_t done = 0; done < arena_bytes_;) {
    const uint64_t step = std::min(kPrefaultStepBytes, arena_bytes_ - done);
    for (uint64_t page = done; page < done + step; page += kExtentAlignBytes) base_[page] = 0;
    done += step;
    if (options.progress) options.progress(done, arena_bytes_);
  }
}

void BlockPool::InsertHole(uint64_t offset, uint64_t bytes) {
  holes_.emplace(offset, bytes);
  holes_by_size_.emplace(bytes, offset);
}

void BlockPool::EraseHole(uint64_t offset, uint64_t bytes) {
  holes_.erase(offset);
  holes_by_size_.erase({bytes, offset});
}

absl::StatusOr<Extent> BlockPool::Allocate(size_t bytes) {
  if (bytes == 0 || bytes > arena_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("an extent of ", bytes, " bytes in an arena of ", arena_bytes_));
  }
  const uint64_t rounded = RoundUp(bytes);
  MutexLock lock(&mu_);
  const auto best = holes_by_size_.lower_bound({rounded, 0});
  if (best == holes_by_size_.end()) {
    return absl::ResourceExhaustedError(absl::StrCat("no hole of ", rounded, " bytes; ",
                                                     used_bytes_, " of ", arena_bytes_, " used"));
  }
  const auto [hole_bytes, offset] = *best;
  EraseHole(offset, hole_bytes);
  if (hole_bytes > rounded) InsertHole(offset + rounded, hole_bytes - rounded);
  used_bytes_ += rounded;
  ++extents_count_;
  return Extent(this, offset, bytes);
}

void BlockPool::Free(uint64_t offset, size_t bytes) {
  const uint64_t rounded = RoundUp(bytes);
  MutexLock lock(&mu_);
  OKV_CHECK(used_bytes_ >= rounded && extents_count_ > 0);
  used_bytes_ -= rounded;
  --extents_count_;
  uint64_t begin = offset;
  uint64_t end = offset + rounded;
  const auto after = holes_.lower_bound(offset);
  // A hole inside what was in use would be a second owner of the same bytes.
  OKV_CHECK(after == holes_.end() || after->first >= end);
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    OKV_CHECK(before->first + before->second <= offset);
    if (before->first + before->second == offset) begin = before->first;
  }
  if (after != holes_.end() && after->first == end) end += after->second;
  if (end != offset + rounded) EraseHole(offset + rounded, end - offset - rounded);
  if (begin != offset) EraseHole(begin, offset - begin);
  InsertHole(begin, end - begin);
}

uint64_t BlockPool::used_bytes() const {
  MutexLock lock(&mu_);
  return used_bytes_;
}

uint64_t BlockPool::extents_count() const {
  MutexLock lock(&mu_);
  return extents_count_;
}

uint64_t BlockPool::holes_count() const {
  MutexLock lock(&mu_);
  return holes_.size();
}

}  // namespace okv
