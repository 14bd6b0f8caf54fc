#ifndef OKV_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
#define OKV_CLIENT_TRANSPORT_UCX_TRANSPORT_H_

// Private to ucx_transport.cc: what the UCX implementation of Transport is made of.

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/transport/address.h"
#include "client/transport/transport.h"
#include "client/transport/ucx_environment.h"
#include "client/transport/ucx_memory.h"
#include "proto/mutex.h"

namespace okv::ucx {

// The UCX calls of one connection never call its handlers: what they report becomes an Event, and
// the thread's loop hands events out when UCX is not on the stack. A handler may therefore do
// anything, close its own connection included.

// Active message 0 is this file's own: the receiver's word on a bulk message. UCX completes a send
// when the bytes left (tcp), and also when the receiver dropped them; neither means "arrived".
inline constexpr unsigned kAckId = 0;
static_assert(static_cast<unsigned>(MessageType::kHello) > kAckId);

// Spinning a while before sleeping saves the two context switches (about 10 us) of a reply that is
// on its way; more would take a core from whoever shares the machine.
inline constexpr std::chrono::microseconds kSpin(20);
// The same while payloads are under way: the next piece of one takes that long, and on a machine
// with other work a thread that slept waits for its turn again. Fetches of 32 x 1.27 MB over TCP
// beside builds: 3.2 GB/s with 20 us, 3.55 with 200, at the same CPU time a byte.
inline constexpr std::chrono::microseconds kSpinBulks(200);
// How many calls of ucp_worker_progress before events and posted work get their turn.
inline constexpr int kProgressMax = 256;
// What one peer may make this process hold: offers nobody received yet, messages ahead of a missing
// one. An honest peer stays far below (a fetch has at most 4,096 objects).
inline constexpr size_t kOffersMax = 16384;
inline constexpr size_t kReorderMax = 64;
inline constexpr size_t kConnectionsMax = 4096;

// In front of every active message's header. Host order: UCX does not talk across byte orders
// either.
struct WireHeader {
  uint64_t sequence;  // Messages and bulk messages count apart, from 0. Acks name a bulk message.
};
struct WireAck {
  uint64_t sequence;
  uint64_t refused;  // 0 received, 1 refused.
};

class UcxTransport;
class UcxConnection;

// One payload on offer. Owned by the Transport's user once handed out; the connection keeps the
// list of those not yet received, to free their UCX descriptors when it closes. Owned by the
// transport thread.
class UcxBulkReceive final : public BulkReceive {
 public:
  UcxBulkReceive(UcxTransport* transport, UcxConnection* connection, uint64_t sequence, void* data,
                 size_t payload_bytes)
      : transport_(transport),
        connection_(connection),
        sequence_(sequence),
        data_(data),
        payload_bytes_(payload_bytes) {}
  ~UcxBulkReceive() override;

  size_t payload_bytes() const override { return payload_bytes_; }
  void Receive(absl::Span<uint8_t> buffer, std::function<void(absl::Status)> done) override;

 private:
  friend class UcxConnection;
  UcxTransport* const transport_;
  UcxConnection* connection_;  // Null once received, refused, or closed.
  const uint64_t sequence_;
  void* data_;  // UCX's descriptor.
  const size_t payload_bytes_;
  bool received_ = false;
};

// One operation that UCX has not completed; its memory belongs to UCX until then.
struct UcxOperation {
  enum class Kind { kSmall, kBulkSend, kReceive, kClose };
  Kind kind;
  UcxConnection* connection;
  uint64_t sequence = 0;
  std::string header = {};
  std::string message = {};
  std::function<void(absl::Status)> done = {};
  bool sent = false;      // UCX no longer reads the payload.
  bool answered = false;  // The receiver's ack is here.
  bool refused = false;
};

// Something that UCX reported, waiting for the loop.
struct Event {
  enum class Kind { kAccept, kMessage, kBulk, kAck, kSent, kReceived, kFailed };
  Kind kind;
  UcxConnection* connection = nullptr;
  MessageType type = MessageType::kHello;
  uint64_t sequence = 0;
  std::string bytes = {};
  std::unique_ptr<UcxBulkReceive> bulk = nullptr;
  UcxOperation* operation = nullptr;
  ucs_status_t status = UCS_OK;
  ucp_conn_request_h request = nullptr;
  WireAck ack = {};
};

// Owned by the transport thread.
class UcxConnection final : public Connection {
 public:
  UcxConnection(UcxTransport* transport, ConnectionHandler* handler, std::string peer)
      : transport_(transport), handler_(handler), peer_(std::move(peer)) {}

  void Send(MessageType type, std::string message) override;
  void SendBulk(MessageType type, absl::string_view header, absl::Span<const uint8_t> payload,
                std::function<void(absl::Status)> done) override;
  void Close(std::function<void()> closed) override;
  size_t header_bytes_max() const override;
  std::string description() const override;
  std::string device_path() const override;

  // Adopts the endpoint, from now on until the close.
  void SetEndpoint(ucp_ep_h endpoint) { endpoint_ = endpoint; }
  // Breaks the connection: dones, then OnClosed(why), once UCX let go of everything.
  void Fail(const absl::Status& why);
  bool open() const { return open_; }
  // Nothing of a closing connection is left with UCX.
  bool settled() const { return !open_ && pending_ == 0; }
  // REQUIRES: settled(). Runs what is owed to the owner; the caller then deletes the connection.
  void Finish();

  // From UCX's callbacks.
  ucs_status_t Arrived(unsigned id, absl::string_view header, void* data, size_t data_bytes,
                       bool rendezvous);
  void OnCompleted(UcxOperation* operation, ucs_status_t status);
  // From the loop.
  void Deliver(Event* event);

 private:
  friend class UcxBulkReceive;
  friend class UcxTransport;

  void StartSmall(unsigned id, std::string header, std::string message);
  void StartReceive(UcxBulkReceive* bulk, absl::Span<uint8_t> buffer,
                    std::function<void(absl::Status)> done);
  void Refuse(UcxBulkReceive* bulk);
  void Acknowledge(uint64_t sequence, bool refused);
  // Runs `done` when UCX and the receiver both finished with it.
  void FinishSend(UcxOperation* operation);
  absl::Status ClosedStatus() const;
  void InOrder(uint64_t sequence, MessageType type, std::string message);
  void StartClose();

  UcxTransport* const transport_;
  ConnectionHandler* const handler_;
  const std::string peer_;
  ucp_ep_h endpoint_ = nullptr;
  bool open_ = true;
  absl::Status why_;                           // Why it closes.
  std::vector<std::function<void()>> closed_;  // Close's callbacks; empty: OnClosed.
  std::vector<std::function<void(absl::Status)>> late_dones_;  // Sent after the close began.

  size_t pending_ = 0;  // Operations that UCX has not completed.
  uint64_t next_message_ = 0;
  uint64_t next_bulk_ = 0;
  uint64_t next_arrival_ = 0;
  std::map<uint64_t, std::pair<MessageType, std::string>> early_;  // Arrived before their turn.
  absl::flat_hash_map<uint64_t, std::unique_ptr<UcxOperation>> sends_;  // Bulk, by sequence.
  absl::flat_hash_set<UcxBulkReceive*> offers_;                         // Not yet received.
};

// Thread-safe as Transport says; everything below the line is owned by the transport thread.
class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(const UcxTransportOptions& options) : options_(options) {}
  ~UcxTransport() override;

  // Starts the thread and, on it, UCX.
  absl::Status Start();

  absl::StatusOr<std::string> Listen(const std::string& address, AcceptHandler* handler) override;
  absl::StatusOr<Connection*> Connect(const std::string& address,
                                      ConnectionHandler* handler) override;
  void Post(std::function<void()> work) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RegisterMemory(absl::Span<uint8_t> memory, MemoryKind kind) override;
  bool takes_device_memory() const override { return options_.device != nullptr; }
  bool has_device_memory(absl::Span<const uint8_t> memory) const override {
    return memories_.HasDevice(memory);
  }
  DeviceStaging* device_staging() override { return staging_.get(); }

  ucp_worker_h worker() const { return worker_; }
  size_t header_bytes_max() const { return header_bytes_max_; }
  bool on_thread() const { return std::this_thread::get_id() == thread_.get_id(); }
  void Push(Event event) { events_.push_back(std::move(event)); }
  // `connection` gave up `endpoint`: finish it when it has settled.
  void Closing(UcxConnection* connection, ucp_ep_h endpoint);

 private:
  friend class UcxConnection;

  absl::Status StartUcx();
  void StopUcx();
  absl::Status ReadConfig(ucp_config_t** config);
  absl::Status StartWorker();
  // Runs `work` on the thread and returns its result. Any thread; blocks.
  absl::Status RunOnThread(const std::function<absl::Status()>& work);
  absl::Status MakeStaging();
  void Run();
  // One turn of the loop: UCX, posted work, events, connections that have settled. False: all idle.
  bool Step();
  bool RunPosted() ABSL_LOCKS_EXCLUDED(mu_);
  // Blocks until UCX or a Post has something to do.
  void Sleep();
  void Wake();
  void Accept(ucp_conn_request_h request);
  absl::Status MakeEndpoint(UcxConnection* connection, ucp_ep_params_t* params);

  static ucs_status_t OnActiveMessage(void* arg, const void* header, size_t header_length,
                                      void* data, size_t length, const ucp_am_recv_param_t* param);
  static void OnConnectionRequest(ucp_conn_request_h request, void* arg);
  static void OnEndpointError(void* arg, ucp_ep_h endpoint, ucs_status_t status);

  // What UCX passes to OnActiveMessage: it does not say the id.
  struct HandlerArg {
    UcxTransport* transport;
    unsigned id;
  };

  const UcxTransportOptions options_;
  std::thread thread_;
  int wake_fd_ = -1;  // An eventfd: work was posted.

  Mutex mu_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // ---- Transport thread.
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int ucx_fd_ = -1;
  size_t bulks_count_ = 0;  // Payloads under way, of all connections.
  int armed_in_vain_ = 0;   // Times in a row that UCX refused to sleep and had nothing to do.
  size_t header_bytes_max_ = 0;
  ucp_listener_h listener_ = nullptr;
  bool accepting_ = true;
  AcceptHandler* acceptor_ = nullptr;
  HandlerArg handler_args_[kMessageTypeMax + 1];
  Memories memories_;
  std::unique_ptr<DeviceStaging> staging_;
  std::deque<Event> events_;
  absl::flat_hash_map<ucp_ep_h, UcxConnection*> endpoints_;
  absl::flat_hash_map<UcxConnection*, std::unique_ptr<UcxConnection>> connections_;
  std::vector<UcxConnection*> closing_;
};

}  // namespace okv::ucx

#endif  // OKV_CLIENT_TRANSPORT_UCX_TRANSPORT_H_
