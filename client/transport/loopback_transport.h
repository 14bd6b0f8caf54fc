#ifndef OKV_CLIENT_TRANSPORT_LOOPBACK_TRANSPORT_H_
#define OKV_CLIENT_TRANSPORT_LOOPBACK_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "client/transport/transport.h"
#include "proto/mutex.h"

namespace okv {

class LoopbackTransport;

// Where the loopback transports of one process find each other: tests run a cluster without UCX,
// and ThreadSanitizer sees every access. Owned by the test; outlives its transports. Thread-safe.
class LoopbackHub {
 public:
  LoopbackHub() = default;
  LoopbackHub(const LoopbackHub&) = delete;
  LoopbackHub& operator=(const LoopbackHub&) = delete;

  // A transport with a thread of its own. It keeps every promise of Transport; payloads are copied
  // by the receiver's thread, 256 KiB at a time, so that a transfer can be cut in its middle.
  // With a device, payloads in its memory that lie apart travel together through
  // `device_staging_bytes` of it.
  std::unique_ptr<Transport> CreateTransport(DeviceMemory* device = nullptr,
                                             uint64_t device_staging_bytes = uint64_t{1} << 20);

 private:
  friend class LoopbackTransport;

  Mutex mu_;
  absl::flat_hash_map<std::string, LoopbackTransport*> listeners_ ABSL_GUARDED_BY(mu_);
  uint32_t next_port_ ABSL_GUARDED_BY(mu_) = 40000;
};

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_LOOPBACK_TRANSPORT_H_
