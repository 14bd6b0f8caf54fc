#ifndef OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_
#define OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "proto/mutex.h"

namespace okv {

// Where a transport's device memory is, and what the transport knows it by. Thread-safe.
template <typename Handle>
class DeviceRegions {
 public:
  void Add(absl::Span<const uint8_t> region, Handle handle) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    regions_[region.data()] = {.end = region.data() + region.size(), .handle = handle};
  }
  // The region's that has all of `memory`, if there is one.
  std::optional<Handle> Find(absl::Span<const uint8_t> memory) const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    const auto after = regions_.upper_bound(memory.data());
    if (after == regions_.begin()) return std::nullopt;
    const Region& region = std::prev(after)->second;
    if (memory.data() + memory.size() > region.end) return std::nullopt;
    return region.handle;
  }

 private:
  struct Region {
    const uint8_t* end;
    Handle handle;
  };

  mutable Mutex mu_;
  std::map<const uint8_t*, Region> regions_ ABSL_GUARDED_BY(mu_);  // By their begins.
};

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_
