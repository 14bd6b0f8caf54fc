#ifndef OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_
#define OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_

#include <cstdint>
#include <iterator>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "proto/mutex.h"

namespace okv {

// Where a transport's device memory is. Thread-safe.
class DeviceRegions {
 public:
  void Add(absl::Span<const uint8_t> region) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    ends_[region.data()] = region.data() + region.size();
  }
  // Whether all of it is in one region.
  bool Contains(absl::Span<const uint8_t> memory) const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    const auto after = ends_.upper_bound(memory.data());
    return after != ends_.begin() && memory.data() + memory.size() <= std::prev(after)->second;
  }

 private:
  mutable Mutex mu_;
  std::map<const uint8_t*, const uint8_t*> ends_ ABSL_GUARDED_BY(mu_);  // By their begins.
};

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_DEVICE_REGIONS_H_
