#ifndef OKV_CLIENT_TRANSPORT_UCX_MEMORY_H_
#define OKV_CLIENT_TRANSPORT_UCX_MEMORY_H_

// Private to ucx_transport.cc.

#include <ucp/api/ucp.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/device_memory.h"
#include "client/transport/device_regions.h"

namespace okv::ucx {

// The memory that was registered with one UCX context. Owned by the transport thread, but for
// HasDevice.
class Memories {
 public:
  Memories() = default;
  Memories(const Memories&) = delete;
  Memories& operator=(const Memories&) = delete;

  // kUnavailable when UCX refuses.
  absl::Status Register(ucp_context_h context, absl::Span<uint8_t> memory, MemoryKind kind);
  // Before the context goes.
  void UnregisterAll(ucp_context_h context);

  // Tells UCX which memory a buffer is in: with a device in the process it would ask the driver at
  // every transfer (its own cache needs hooks that a static CUDA runtime escapes), and what is said
  // here it need not register either. Without a device's memory it costs nothing.
  void Describe(absl::Span<const uint8_t> buffer, ucp_request_param_t* param) const;

  // Whether all of it lies in one registration of a device's memory. Any thread.
  bool HasDevice(absl::Span<const uint8_t> memory) const {
    return device_regions_.Find(memory).has_value();
  }

 private:
  std::vector<ucp_mem_h> handles_;
  DeviceRegions<ucp_mem_h> device_regions_;
  bool has_device_memory_ = false;
};

}  // namespace okv::ucx

#endif  // OKV_CLIENT_TRANSPORT_UCX_MEMORY_H_
