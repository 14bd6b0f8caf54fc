#ifndef OKV_CLIENT_TRANSPORT_TRANSPORT_H_
#define OKV_CLIENT_TRANSPORT_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/device_memory.h"
#include "client/transport/device_staging.h"
#include "proto/data_plane.h"

namespace okv {

// The data plane: small messages, and bulk messages whose payload goes from the sender's memory
// into memory that the receiver chooses, without a copy between (UCX rendezvous). One suite of
// tests runs on every implementation (tests/conformance/transport_conformance.h).
//
// Threads: a Transport owns one thread. Every handler and every `done` runs on it, and every method
// of Connection and BulkReceive may be called on it only; other threads use Post. Handlers may not
// block.

// A payload that a peer offers. Owned by whoever was handed it; destroying it unreceived refuses it
// (the sender's done gets an error).
class BulkReceive {
 public:
  virtual ~BulkReceive() = default;
  virtual size_t payload_bytes() const = 0;
  // Receives into `buffer` (exactly payload_bytes long, alive until done). done: OK when every byte
  // is there; kUnavailable when the connection failed first. Called exactly once, and after it (or
  // after Connection::Close's closed) nothing writes into `buffer`. At most one call.
  virtual void Receive(absl::Span<uint8_t> buffer, std::function<void(absl::Status)> done) = 0;
};

// One peer. Owned by the Transport: valid until OnClosed returned (or Close's `closed` was called).
class Connection {
 public:
  virtual ~Connection() = default;
  // Queues a small message, at most kMessageBytesMax. Messages of one connection arrive in order
  // among themselves. A failed connection drops it and reports through OnClosed.
  virtual void Send(MessageType type, std::string message) = 0;
  // Queues a bulk message: `header` (small, at most header_bytes_max(), copied) and `payload`,
  // alive until done. done: OK when the receiver has every byte; kAborted when it refused;
  // kUnavailable when the connection failed. Called exactly once; afterwards nothing reads
  // `payload`.
  virtual void SendBulk(MessageType type, absl::string_view header,
                        absl::Span<const uint8_t> payload,
                        std::function<void(absl::Status)> done) = 0;
  // Closes at once, cutting transfers in flight: their done gets kCancelled or kUnavailable. When
  // `closed` runs no transfer of this connection touches memory any more. OnClosed is not called.
  virtual void Close(std::function<void()> closed) = 0;
  virtual size_t header_bytes_max() const = 0;
  // Peer and transports in use, for logs: "127.0.0.1:4471 via tcp/lo".
  virtual std::string description() const = 0;
  // How payloads in GPU memory reach this peer's GPU memory: "cuda_ipc" (one host), "rdma", or
  // "staged" through host memory. Empty for a transport without a device.
  virtual std::string device_path() const { return ""; }
};

// What a connection's owner is told. Outlives the connection.
class ConnectionHandler {
 public:
  virtual ~ConnectionHandler() = default;
  virtual void OnMessage(Connection* connection, MessageType type, absl::string_view message) = 0;
  virtual void OnBulk(Connection* connection, MessageType type, absl::string_view header,
                      std::unique_ptr<BulkReceive> payload) = 0;
  // The peer went away or failed; every done of this connection has run. Last call.
  virtual void OnClosed(Connection* connection, const absl::Status& why) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;  // Closes every connection and joins the thread.

  // Accepts peers at "host:port" (port 0: any free one); their events go to `handler`, and OnAccept
  // is the first of them. Returns the address with the port bound. kUnavailable naming the address
  // when it is in use; kInvalidArgument when it cannot be parsed. Any thread; once.
  class AcceptHandler : public ConnectionHandler {
   public:
    virtual void OnAccept(Connection* connection) = 0;
  };
  virtual absl::StatusOr<std::string> Listen(const std::string& address,
                                             AcceptHandler* handler) = 0;

  // Starts a connection; returns at once. A peer that is not there is reported by handler->OnClosed
  // (kUnavailable). Transport thread only.
  virtual absl::StatusOr<Connection*> Connect(const std::string& address,
                                              ConnectionHandler* handler) = 0;

  // Runs `work` on the transport's thread, soon. Any thread.
  virtual void Post(std::function<void()> work) = 0;

  // Registers memory that payloads are sent from or received into often (arenas): optional for host
  // memory, saves the registration per transfer. A device's memory must be registered, one
  // allocation of cudaMalloc in one call (a peer on the same host can map all of it): otherwise it
  // may not be a payload's. Any thread, before use; the memory outlives the Transport.
  // kFailedPrecondition for a device's memory without a device in the options, kInvalidArgument for
  // memory that is not of that device. The first of a device's makes the staging, too:
  // kResourceExhausted naming device_staging_bytes when the device has no room for that.
  virtual absl::Status RegisterMemory(absl::Span<uint8_t> memory, MemoryKind kind) = 0;
  absl::Status RegisterMemory(absl::Span<uint8_t> memory) {
    return RegisterMemory(memory, MemoryKind::kHost);
  }
  // Whether payloads may be in a device's memory.
  virtual bool takes_device_memory() const = 0;
  // Whether all of `memory` lies in one registration of a device's memory. Any thread.
  virtual bool has_device_memory(absl::Span<const uint8_t> memory) const = 0;
  // Where payloads that lie apart in a device's memory travel together. Null when no such memory
  // was registered, or the options leave it out: then each travels on its own. Transport thread.
  virtual DeviceStaging* device_staging() = 0;
};

struct UcxTransportOptions {
  // Transports as UCX_TLS takes them, "^" in front of those not to use; empty: UCX's choice.
  // Without UCX's shared memory: an endpoint to a killed or stopped process whose queue is full
  // never closes there (1.13: uct_mm_ep_flush ignores the cancel flag; one kill in five hung), and
  // no deadline could be kept. Over loopback tcp the same kills settle in milliseconds. Payloads of
  // 1.27 MiB between two processes on 2 cores: 3.8 GB/s over tcp, 4.3 over shared memory. "all" is
  // for measurements between processes that nobody kills.
  std::string tls = "^posix,sysv";
  // Network devices as UCX_NET_DEVICES takes them. UCX is neither encrypted nor hardened against
  // its peers, so that it stays on the loopback device unless told otherwise; empty: every device.
  std::string net_devices = "lo";
  bool require_rdma = false;  // kFailedPrecondition at creation when UCX has no RDMA device.
  // kFailedPrecondition at creation when UCX has no way between GPU memories that does not lead
  // through host memory: neither cuda_ipc nor an RDMA device with the kernel's peer memory.
  bool require_gpudirect = false;
  // Payloads may be in this GPU's memory, too: it is made current on the transport's thread, and
  // creation fails with kFailedPrecondition when UCX does not know CUDA memory. Null: host memory
  // only. Outlives the transport.
  DeviceMemory* device = nullptr;
  // Of the device's memory, for payloads that lie apart and travel together, once memory of it is
  // registered; a transfer takes up to an eighth of it. 0: each travels on its own.
  uint64_t device_staging_bytes = uint64_t{256} << 20;
  // There when RDMA devices reach GPU memory (nvidia_peermem); part of sysfs.
  std::string peer_memory_path = "/sys/module/nvidia_peermem";

  // Where UCX puts its shared memory, and the free space it must have there: a container's default
  // is 64 MB for everybody, and UCX dies of SIGBUS when it runs out. Only when `tls` has shared
  // memory.
  std::string shm_path = "/dev/shm";
  uint64_t shm_bytes_min = uint64_t{16} << 20;
  // Where UCX finds network devices; part of sysfs.
  std::string net_path = "/sys/class/net";

  bool uses_shared_memory() const;
  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// kFailedPrecondition, giving both sizes, when shm_path has less room than shm_bytes_min and the
// transports include shared memory.
absl::Status CheckSharedMemory(const UcxTransportOptions& options);

// kFailedPrecondition naming net_path when it cannot be read: UCX then starts, but finds no way to
// any peer ("Destination is unreachable").
absl::Status CheckNetworkDevices(const UcxTransportOptions& options);

// The UCX implementation. kUnavailable or kFailedPrecondition, naming what is missing, when UCX
// cannot start: among others a /dev/shm too small for its shared-memory transport (the message
// gives both sizes).
absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(const UcxTransportOptions& options);

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_TRANSPORT_H_
