#ifndef OKV_TESTS_SUPPORT_HOST_DEVICE_H_
#define OKV_TESTS_SUPPORT_HOST_DEVICE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/device_memory.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/object.h"

namespace okv::testing_support {

// A device for machines without one. Its memory is mapped twice: its addresses, which a host that
// follows them by mistake dies of when the device is `fenced`, and the mapping through which its
// own operations go. Transports within a process copy by address, so that theirs is not fenced.
// Thread-safe.
class HostDevice final : public DeviceMemory {
 public:
  explicit HostDevice(bool fenced) : fenced_(fenced) {}
  ~HostDevice() override { OKV_CHECK(areas_.empty() && locked_.empty()); }

  std::string name() const override { return "host device"; }
  absl::Status MakeCurrent() override { return absl::OkStatus(); }

  absl::StatusOr<uint8_t*> Allocate(uint64_t bytes) override {
    const int fd = memfd_create("device", MFD_CLOEXEC);
    OKV_CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
    const int prot = fenced_ ? PROT_NONE : PROT_READ | PROT_WRITE;
    void* address = mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0);
    void* own = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    OKV_CHECK(address != MAP_FAILED && own != MAP_FAILED && close(fd) == 0);
    MutexLock lock(&mu_);
    areas_[static_cast<uint8_t*>(address)] = {.own = static_cast<uint8_t*>(own), .bytes = bytes};
    return static_cast<uint8_t*>(address);
  }
  void Free(uint8_t* memory) override {
    MutexLock lock(&mu_);
    const auto found = areas_.find(memory);
    OKV_CHECK(found != areas_.end());
    OKV_CHECK(munmap(found->second.own, found->second.bytes) == 0);
    OKV_CHECK(munmap(memory, found->second.bytes) == 0);
    areas_.erase(found);
  }
  absl::StatusOr<MemoryKind> KindOf(const void* address) const override {
    MutexLock lock(&mu_);
    const bool is_ours = Find(static_cast<const uint8_t*>(address)) != nullptr;
    return is_ours ? MemoryKind::kDevice : MemoryKind::kHost;
  }
  absl::Status LockHostMemory(absl::Span<uint8_t> memory) override {
    MutexLock lock(&mu_);
    OKV_CHECK(locked_.insert(memory.data()).second);
    return absl::OkStatus();
  }
  void UnlockHostMemory(absl::Span<uint8_t> memory) override {
    MutexLock lock(&mu_);
    OKV_CHECK(locked_.erase(memory.data()) == 1);
  }

  absl::Status Copy(absl::Span<const MemoryCopy> copies) override {
    if (failing_) return absl::UnavailableError(absl::StrCat(name(), ": a copy: it fails"));
    {
      MutexLock lock(&mu_);
      ++copies_held_;
      while (holding_copies_) released_.Wait(&mu_);
      --copies_held_;
    }
    for (const MemoryCopy& copy : copies) {
      std::memcpy(const_cast<uint8_t*>(Own(copy.to)), Own(copy.from), copy.bytes);
    }
    return absl::OkStatus();
  }
  absl::Status CopyWithin(absl::Span<const MemoryCopy> copies) override {
    for (const MemoryCopy& copy : copies) {
      const absl::StatusOr<MemoryKind> to = KindOf(copy.to);
      const absl::StatusOr<MemoryKind> from = KindOf(copy.from);
      OKV_CHECK(*to == MemoryKind::kDevice && *from == MemoryKind::kDevice);
    }
    copied_within_ += copies.size();
    return Copy(copies);
  }
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Checksum(
      absl::Span<const DeviceRuns> blocks) override {
    if (failing_) return absl::UnavailableError(absl::StrCat(name(), ": checksums: it fails"));
    std::vector<std::vector<uint32_t>> checksums;
    for (const DeviceRuns& block : blocks) {
      checksums.emplace_back();
      const size_t run_bytes = block.layout.run_bytes(block.id.codec);
      for (uint32_t layer = block.range.layer_begin; layer < block.range.layer_end; ++layer) {
        const uint8_t* runs =
            block.first_run + (layer - block.range.layer_begin) * block.layer_stride_bytes;
        for (uint32_t head = block.range.head_begin; head < block.range.head_end; ++head) {
          const uint8_t* run = Own(runs + (head - block.range.head_begin) * run_bytes);
          checksums.back().push_back(
              RunChecksum(block.id, layer, head, absl::MakeConstSpan(run, run_bytes)));
        }
      }
    }
    blocks_hashed_ += blocks.size();
    return checksums;
  }
  std::vector<absl::Status> Verify(absl::Span<const DeviceRuns> blocks,
                                   absl::Span<const absl::Span<const uint32_t>> expected) override {
    OKV_CHECK(blocks.size() == expected.size());
    const auto checksums = Checksum(blocks);
    if (!checksums.ok()) return std::vector<absl::Status>(blocks.size(), checksums.status());
    std::vector<absl::Status> statuses;
    for (size_t i = 0; i < blocks.size(); ++i) {
      OKV_CHECK((*checksums)[i].size() == expected[i].size());
      const bool good = absl::MakeConstSpan((*checksums)[i]) == expected[i];
      statuses.push_back(
          good ? absl::OkStatus()
               : absl::DataLossError(absl::StrCat(blocks[i].id.Name(), ": wrong checksum")));
    }
    return statuses;
  }

  // From now on copies wait, or go on.
  void HoldCopies(bool hold) {
    MutexLock lock(&mu_);
    holding_copies_ = hold;
    released_.SignalAll();
  }
  // Calls of Copy() that wait.
  int copies_held() const {
    MutexLock lock(&mu_);
    return holding_copies_ ? copies_held_ : 0;
  }
  // From now on its operations fail, or work again.
  void SetFailing(bool failing) { failing_ = failing; }
  uint64_t blocks_hashed() const { return blocks_hashed_; }
  uint64_t copied_within() const { return copied_within_; }
  // Where the host may touch what is at a device's address. Other addresses are themselves.
  const uint8_t* Own(const uint8_t* address) const {
    MutexLock lock(&mu_);
    const auto* area = Find(address);
    return area == nullptr ? address : area->second.own + (address - area->first);
  }
  void Flip(const uint8_t* address) { *const_cast<uint8_t*>(Own(address)) ^= 0x20; }

 private:
  struct Area {
    uint8_t* own;
    uint64_t bytes;
  };
  using Areas = std::map<const uint8_t*, Area>;

  const Areas::value_type* Find(const uint8_t* address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto after = areas_.upper_bound(address);
    if (after == areas_.begin()) return nullptr;
    const Areas::value_type& area = *std::prev(after);
    return address < area.first + area.second.bytes ? &area : nullptr;
  }

  const bool fenced_;
  std::atomic<bool> failing_{false};
  std::atomic<uint64_t> blocks_hashed_{0};
  std::atomic<uint64_t> copied_within_{0};
  mutable Mutex mu_;
  CondVar released_;
  bool holding_copies_ ABSL_GUARDED_BY(mu_) = false;
  int copies_held_ ABSL_GUARDED_BY(mu_) = 0;
  Areas areas_ ABSL_GUARDED_BY(mu_);
  std::set<const uint8_t*> locked_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_SUPPORT_HOST_DEVICE_H_
