#include "client/transport/ucx_transport.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/transport/ucx_paths.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace ucx {
namespace {

template <typename T>
std::string Bytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

// UCX holds an operation as a plain pointer until it completes it.
UcxOperation* HandToUcx(UcxOperation operation) {
  return std::make_unique<UcxOperation>(std::move(operation)).release();
}
std::unique_ptr<UcxOperation> TakeFromUcx(UcxOperation* operation) {
  return std::unique_ptr<UcxOperation>(operation);
}

// The completion of whatever was started for `operation`, whether UCX calls back or not.
void Completed(UcxOperation* operation, ucs_status_t status) {
  operation->connection->OnCompleted(operation, status);
}

void OnSent(void* request, ucs_status_t status, void* operation) {
  ucp_request_free(request);
  Completed(static_cast<UcxOperation*>(operation), status);
}

void OnReceived(void* request, ucs_status_t status, size_t /*length*/, void* operation) {
  ucp_request_free(request);
  Completed(static_cast<UcxOperation*>(operation), status);
}

// A call that started `operation` gave `result`: it failed, completed at once, or will call back.
void Started(UcxOperation* operation, ucs_status_ptr_t result) {
  if (UCS_PTR_IS_ERR(result)) {
    Completed(operation, UCS_PTR_STATUS(result));
  } else if (result == nullptr) {
    Completed(operation, UCS_OK);
  }
}

ucp_request_param_t SendParam(UcxOperation* operation, uint32_t flags) {
  ucp_request_param_t param = {};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = flags;
  param.cb.send = OnSent;
  param.user_data = operation;
  return param;
}

}  // namespace

// ---- UcxBulkReceive

UcxBulkReceive::~UcxBulkReceive() {
  if (connection_ != nullptr) connection_->Refuse(this);
}

void UcxBulkReceive::Receive(absl::Span<uint8_t> buffer, std::function<void(absl::Status)> done) {
  OKV_CHECK(!received_ && buffer.size() == payload_bytes_);
  received_ = true;
  if (connection_ == nullptr) {  // It closed, and its owner was told.
    transport_->Post([done = std::move(done)] { done(absl::UnavailableError("closed")); });
    return;
  }
  connection_->StartReceive(this, buffer, std::move(done));
}

// ---- UcxConnection

size_t UcxConnection::header_bytes_max() const { return transport_->header_bytes_max(); }

std::string UcxConnection::description() const {
  return absl::StrCat(peer_, " via ", endpoint_ == nullptr ? "(closed)" : LanesOf(endpoint_));
}

std::string UcxConnection::device_path() const {
  return endpoint_ == nullptr ? "" : DevicePath(LanesOf(endpoint_), transport_->options_);
}

void UcxConnection::Send(MessageType type, std::string message) {
  OKV_CHECK(message.size() <= kMessageBytesMax);
  if (!open_) return;
  StartSmall(static_cast<unsigned>(type), Bytes(WireHeader{next_message_++}), std::move(message));
}

void UcxConnection::StartSmall(unsigned id, std::string header, std::string message) {
  UcxOperation* operation = HandToUcx({.kind = UcxOperation::Kind::kSmall,
                                       .connection = this,
                                       .header = std::move(header),
                                       .message = std::move(message)});
  ++pending_;
  ucp_request_param_t param = SendParam(operation, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY);
  const auto* bytes = reinterpret_cast<const uint8_t*>(operation->message.data());
  transport_->memories_.Describe({bytes, operation->message.size()}, &param);
  Started(operation,
          ucp_am_send_nbx(endpoint_, id, operation->header.data(), operation->header.size(),
                          operation->message.data(), operation->message.size(), &param));
}

void UcxConnection::SendBulk(MessageType type, absl::string_view header,
                             absl::Span<const uint8_t> payload,
                             std::function<void(absl::Status)> done) {
  OKV_CHECK(header.size() <= header_bytes_max() && !payload.empty());
  if (!open_) {
    late_dones_.push_back(std::move(done));
    return;
  }
  const uint64_t sequence = next_bulk_++;
  auto owned = std::make_unique<UcxOperation>(
      UcxOperation{.kind = UcxOperation::Kind::kBulkSend,
                   .connection = this,
                   .sequence = sequence,
                   .header = absl::StrCat(Bytes(WireHeader{sequence}), header),
                   .done = std::move(done)});
  UcxOperation* operation = owned.get();
  sends_[sequence] = std::move(owned);
  ++pending_;
  ++transport_->bulks_count_;
  ucp_request_param_t param = SendParam(operation, UCP_AM_SEND_FLAG_RNDV | UCP_AM_SEND_FLAG_REPLY);
  transport_->memories_.Describe(payload, &param);
  Started(operation,
          ucp_am_send_nbx(endpoint_, static_cast<unsigned>(type), operation->header.data(),
                          operation->header.size(), payload.data(), payload.size(), &param));
}

void UcxConnection::StartReceive(UcxBulkReceive* bulk, absl::Span<uint8_t> buffer,
                                 std::function<void(absl::Status)> done) {
  void* data = std::exchange(bulk->data_, nullptr);
  if (data == nullptr) {  // It is closing.
    late_dones_.push_back(std::move(done));
    return;
  }
  offers_.erase(bulk);
  bulk->connection_ = nullptr;
  UcxOperation* operation = HandToUcx({.kind = UcxOperation::Kind::kReceive,
                                       .connection = this,
                                       .sequence = bulk->sequence_,
                                       .done = std::move(done)});
  ++pending_;
  ++transport_->bulks_count_;
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = OnReceived;
  param.user_data = operation;
  transport_->memories_.Describe(buffer, &param);
  Started(operation,
          ucp_am_recv_data_nbx(transport_->worker(), data, buffer.data(), buffer.size(), &param));
}

void UcxConnection::Refuse(UcxBulkReceive* bulk) {
  offers_.erase(bulk);
  bulk->connection_ = nullptr;
  void* data = std::exchange(bulk->data_, nullptr);
  if (data == nullptr) return;
  Acknowledge(bulk->sequence_, /*refused=*/true);
  ucp_am_data_release(transport_->worker(), data);
}

void UcxConnection::Acknowledge(uint64_t sequence, bool refused) {
  if (!open_) return;
  StartSmall(kAckId, Bytes(WireAck{.sequence = sequence, .refused = refused}), "");
}

void UcxConnection::OnCompleted(UcxOperation* operation, ucs_status_t status) {
  --pending_;
  switch (operation->kind) {
    case UcxOperation::Kind::kSmall:
      if (status != UCS_OK && open_) {
        transport_->Push({.kind = Event::Kind::kFailed, .connection = this, .status = status});
      }
      TakeFromUcx(operation);
      return;
    case UcxOperation::Kind::kClose:
      TakeFromUcx(operation);
      return;
    case UcxOperation::Kind::kBulkSend:
      transport_->Push({.kind = Event::Kind::kSent,
                        .connection = this,
                        .operation = operation,
                        .status = status});
      return;
    case UcxOperation::Kind::kReceive:
      --transport_->bulks_count_;
      transport_->Push({.kind = Event::Kind::kReceived,
                        .connection = this,
                        .operation = operation,
                        .status = status});
      return;
  }
}

ucs_status_t UcxConnection::Arrived(unsigned id, absl::string_view header, void* data,
                                    size_t data_bytes, bool rendezvous) {
  // What a sender of a refused rendezvous gets; nothing reads the status of an eager message.
  const ucs_status_t drop = rendezvous ? UCS_ERR_CANCELED : UCS_OK;
  if (!open_) return drop;
  const auto violation = [&] {
    transport_->Push(
        {.kind = Event::Kind::kFailed, .connection = this, .status = UCS_ERR_INVALID_PARAM});
    return drop;
  };
  if (id == kAckId) {
    Event event = {.kind = Event::Kind::kAck, .connection = this};
    if (rendezvous || header.size() != sizeof(event.ack)) return violation();
    std::memcpy(&event.ack, header.data(), sizeof(event.ack));
    transport_->Push(std::move(event));
    return UCS_OK;
  }
  WireHeader wire;
  if (header.size() < sizeof(wire)) return violation();
  std::memcpy(&wire, header.data(), sizeof(wire));
  header.remove_prefix(sizeof(wire));
  Event event = {.kind = Event::Kind::kMessage,
                 .connection = this,
                 .type = static_cast<MessageType>(id),
                 .sequence = wire.sequence};
  if (!rendezvous) {
    if (!header.empty() || data_bytes > kMessageBytesMax) return violation();
    event.bytes.assign(static_cast<const char*>(data), data_bytes);
    transport_->Push(std::move(event));
    return UCS_OK;
  }
  if (offers_.size() >= kOffersMax || data_bytes == 0) return violation();
  event.kind = Event::Kind::kBulk;
  event.bytes.assign(header.data(), header.size());
  event.bulk = std::make_unique<UcxBulkReceive>(transport_, this, wire.sequence, data, data_bytes);
  offers_.insert(event.bulk.get());
  transport_->Push(std::move(event));
  return UCS_INPROGRESS;
}

void UcxConnection::Deliver(Event* event) {
  switch (event->kind) {
    case Event::Kind::kAccept:
      return;  // The transport's.
    case Event::Kind::kMessage:
      InOrder(event->sequence, event->type, std::move(event->bytes));
      return;
    case Event::Kind::kBulk:
      if (open_) handler_->OnBulk(this, event->type, event->bytes, std::move(event->bulk));
      return;
    case Event::Kind::kAck: {
      const auto found = sends_.find(event->ack.sequence);
      if (found == sends_.end()) return;
      found->second->answered = true;
      found->second->refused = event->ack.refused != 0;
      FinishSend(found->second.get());
      return;
    }
    case Event::Kind::kSent:
      if (event->status != UCS_OK) {
        Fail(UcxError(peer_, event->status));
        return;
      }
      event->operation->sent = true;
      FinishSend(event->operation);
      return;
    case Event::Kind::kReceived: {
      const std::unique_ptr<UcxOperation> operation = TakeFromUcx(event->operation);
      if (event->status != UCS_OK) {
        Fail(UcxError(peer_, event->status));
        operation->done(ClosedStatus());
        return;
      }
      Acknowledge(operation->sequence, /*refused=*/false);
      operation->done(absl::OkStatus());
      return;
    }
    case Event::Kind::kFailed:
      Fail(event->status == UCS_ERR_INVALID_PARAM
               ? absl::UnavailableError(absl::StrCat(peer_, ": broke the protocol"))
               : UcxError(peer_, event->status));
      return;
  }
}

void UcxConnection::FinishSend(UcxOperation* operation) {
  if (!operation->sent || !operation->answered) return;
  const auto found = sends_.find(operation->sequence);
  OKV_CHECK(found != sends_.end());
  const std::unique_ptr<UcxOperation> owned = std::move(found->second);
  sends_.erase(found);
  --transport_->bulks_count_;
  owned->done(owned->refused ? absl::AbortedError("the receiver refused it") : absl::OkStatus());
}

// UCX keeps one endpoint's messages in order on one lane; which lane a message takes is its choice.
void UcxConnection::InOrder(uint64_t sequence, MessageType type, std::string message) {
  if (!open_) return;
  if (sequence < next_arrival_ || early_.size() >= kReorderMax) {
    Fail(absl::UnavailableError(absl::StrCat(peer_, ": broke the protocol (message order)")));
    return;
  }
  early_.emplace(sequence, std::make_pair(type, std::move(message)));
  while (open_ && !early_.empty() && early_.begin()->first == next_arrival_) {
    const auto next = early_.extract(early_.begin());
    ++next_arrival_;
    handler_->OnMessage(this, next.mapped().first, next.mapped().second);
  }
}

void UcxConnection::Fail(const absl::Status& why) {
  if (!open_) return;
  why_ = why;
  StartClose();
}

void UcxConnection::Close(std::function<void()> closed) {
  closed_.push_back(std::move(closed));
  if (!open_) return;
  why_ = absl::CancelledError("closed");
  StartClose();
}

absl::Status UcxConnection::ClosedStatus() const {
  return closed_.empty() ? why_ : absl::CancelledError("closed");
}

void UcxConnection::StartClose() {
  open_ = false;
  for (UcxBulkReceive* bulk : offers_) {
    ucp_am_data_release(transport_->worker(), std::exchange(bulk->data_, nullptr));
  }
  ucp_ep_h endpoint = std::exchange(endpoint_, nullptr);
  transport_->Closing(this, endpoint);
  if (endpoint == nullptr) return;
  // Force: without it UCX would first push out what is queued, to a peer that may not read.
  UcxOperation* operation = HandToUcx({.kind = UcxOperation::Kind::kClose, .connection = this});
  ++pending_;
  const ucp_request_param_t param = SendParam(operation, UCP_EP_CLOSE_FLAG_FORCE);
  Started(operation, ucp_ep_close_nbx(endpoint, &param));
}

void UcxConnection::Finish() {
  OKV_CHECK(settled());
  const absl::Status status = ClosedStatus();
  while (!sends_.empty() || !late_dones_.empty()) {
    const auto sends = std::exchange(sends_, {});
    transport_->bulks_count_ -= sends.size();
    for (const auto& [sequence, operation] : sends) {
      // Every byte there, says the receiver; that the connection broke afterwards changes nothing.
      const bool arrived = operation->answered && !operation->refused;
      operation->done(arrived ? absl::OkStatus() : status);
    }
    for (const auto& done : std::exchange(late_dones_, {})) done(status);
  }
  for (UcxBulkReceive* bulk : std::exchange(offers_, {})) bulk->connection_ = nullptr;
  if (closed_.empty()) {
    handler_->OnClosed(this, why_);
  } else {
    for (const auto& closed : closed_) closed();
  }
}

// ---- UcxTransport

UcxTransport::~UcxTransport() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
  close(wake_fd_);
}

void UcxTransport::Wake() {
  const uint64_t one = 1;
  OKV_CHECK(write(wake_fd_, &one, sizeof(one)) == sizeof(one));
}

absl::Status UcxTransport::Start() {
  OKV_RETURN_IF_ERROR(options_.Validate());
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) return absl::UnavailableError(absl::StrCat("eventfd: ", strerror(errno)));
  absl::Status started;
  bool done = false;
  CondVar changed;
  thread_ = std::thread([&, this] {
    const absl::Status status = StartUcx();
    {
      // The starter's stack is gone once it saw done.
      MutexLock lock(&mu_);
      started = status;
      done = true;
      changed.SignalAll();
    }
    if (status.ok()) Run();
    StopUcx();
  });
  MutexLock lock(&mu_);
  while (!done) changed.Wait(&mu_);
  return started;
}

void UcxTransport::Post(std::function<void()> work) {
  {
    MutexLock lock(&mu_);
    posted_.push_back(std::move(work));
    if (posted_.size() > 1) return;  // Whoever posted the first woke the thread.
  }
  Wake();
}

absl::Status UcxTransport::RunOnThread(const std::function<absl::Status()>& work) {
  if (on_thread()) return work();
  struct {
    Mutex mu;
    CondVar changed;
    bool done = false;
    absl::Status status;
  } result;
  Post([&] {
    const absl::Status status = work();
    MutexLock lock(&result.mu);
    result.status = status;
    result.done = true;
    result.changed.SignalAll();
  });
  MutexLock lock(&result.mu);
  while (!result.done) result.changed.Wait(&result.mu);
  return result.status;
}

void UcxTransport::Run() {
  auto idle_since = std::chrono::steady_clock::now();
  while (true) {
    if (Step()) {
      idle_since = std::chrono::steady_clock::now();
      armed_in_vain_ = 0;
      continue;
    }
    {
      MutexLock lock(&mu_);
      if (stopping_) return;
    }
    const auto spin = bulks_count_ > 0 ? kSpinBulks : kSpin;
    if (std::chrono::steady_clock::now() - idle_since >= spin) Sleep();
  }
}

bool UcxTransport::Step() {
  bool busy = false;
  for (int i = 0; i < kProgressMax && ucp_worker_progress(worker_) != 0; ++i) busy = true;
  busy |= RunPosted();
  while (!events_.empty()) {
    Event event = std::move(events_.front());
    events_.pop_front();
    if (event.kind == Event::Kind::kAccept) {
      Accept(event.request);
    } else {
      event.connection->Deliver(&event);
    }
    busy = true;
  }
  // Events name their connection: none may be left when one is deleted.
  for (size_t i = 0; i < closing_.size() && events_.empty();) {
    UcxConnection* connection = closing_[i];
    if (!connection->settled()) {
      ++i;
      continue;
    }
    closing_.erase(closing_.begin() + i);
    connection->Finish();
    connections_.erase(connection);
    busy = true;
  }
  return busy;
}

bool UcxTransport::RunPosted() {
  std::vector<std::function<void()>> work;
  {
    MutexLock lock(&mu_);
    work.swap(posted_);
  }
  for (const auto& run : work) run();
  return !work.empty();
}

void UcxTransport::Sleep() {
  const ucs_status_t status = ucp_worker_arm(worker_);
  if (status != UCS_OK) {
    // Busy again, with nothing done in between: a full shared-memory queue, which wakes nobody when
    // the peer makes room. The peer may wait for this core (seen: 150 ms of both spinning in
    // turns). An error: a device that failed, which is no reason to end what host memory serves.
    if (++armed_in_vain_ > 1) sched_yield();
    return;
  }
  pollfd fds[] = {{.fd = ucx_fd_, .events = POLLIN, .revents = 0},
                  {.fd = wake_fd_, .events = POLLIN, .revents = 0}};
  // Closing makes progress from UCX's own queue, which signals nothing.
  poll(fds, 2, closing_.empty() ? 1000 : 1);
  uint64_t count;
  while (read(wake_fd_, &count, sizeof(count)) > 0) {
  }
}

absl::StatusOr<std::string> UcxTransport::Listen(const std::string& address,
                                                 AcceptHandler* handler) {
  OKV_ASSIGN_OR_RETURN(const SocketAddress where, ParseAddress(address));
  std::string bound;
  OKV_RETURN_IF_ERROR(RunOnThread([&]() -> absl::Status {
    OKV_CHECK(listener_ == nullptr);
    ucp_listener_params_t params = {};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&where.storage);
    params.sockaddr.addrlen = where.length;
    params.conn_handler = {.cb = OnConnectionRequest, .arg = this};
    const ucs_status_t status = ucp_listener_create(worker_, &params, &listener_);
    if (status != UCS_OK) {
      listener_ = nullptr;
      return UcxError(absl::StrCat("cannot listen on ", address), status);
    }
    acceptor_ = handler;
    ucp_listener_attr_t attributes = {};
    attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    OKV_CHECK(ucp_listener_query(listener_, &attributes) == UCS_OK);
    bound = AddressText(attributes.sockaddr);
    return absl::OkStatus();
  }));
  return bound;
}

absl::Status UcxTransport::MakeEndpoint(UcxConnection* connection, ucp_ep_params_t* params) {
  params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params->err_handler = {.cb = OnEndpointError, .arg = this};
  ucp_ep_h endpoint;
  const ucs_status_t status = ucp_ep_create(worker_, params, &endpoint);
  if (status != UCS_OK) return UcxError("cannot make an endpoint", status);
  connection->SetEndpoint(endpoint);
  endpoints_[endpoint] = connection;
  return absl::OkStatus();
}

absl::StatusOr<Connection*> UcxTransport::Connect(const std::string& address,
                                                  ConnectionHandler* handler) {
  OKV_CHECK(on_thread());
  OKV_ASSIGN_OR_RETURN(const SocketAddress where, ParseAddress(address));
  auto owned = std::make_unique<UcxConnection>(this, handler, address);
  UcxConnection* connection = owned.get();
  connections_[connection] = std::move(owned);
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&where.storage);
  params.sockaddr.addrlen = where.length;
  const absl::Status status = MakeEndpoint(connection, &params);
  if (!status.ok()) connection->Fail(status);
  return connection;
}

void UcxTransport::Accept(ucp_conn_request_h request) {
  if (!accepting_ || connections_.size() >= kConnectionsMax) {
    ucp_listener_reject(listener_, request);
    return;
  }
  ucp_conn_request_attr_t attributes = {};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  std::string peer = "?";
  if (ucp_conn_request_query(request, &attributes) == UCS_OK) {
    peer = AddressText(attributes.client_address);
  }
  auto owned = std::make_unique<UcxConnection>(this, acceptor_, std::move(peer));
  UcxConnection* connection = owned.get();
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  if (!MakeEndpoint(connection, &params).ok()) return;  // The peer left already.
  connections_[connection] = std::move(owned);
  acceptor_->OnAccept(connection);
}

void UcxTransport::Closing(UcxConnection* connection, ucp_ep_h endpoint) {
  if (endpoint != nullptr) endpoints_.erase(endpoint);
  closing_.push_back(connection);
}

absl::Status UcxTransport::RegisterMemory(absl::Span<uint8_t> memory, MemoryKind kind) {
  if (kind == MemoryKind::kDevice && options_.device == nullptr) {
    return absl::FailedPreconditionError(
        "a device's memory cannot be registered with a transport without a device");
  }
  if (kind == MemoryKind::kDevice) {
    // Once: what is registered is later taken for the device's without asking.
    const absl::StatusOr<MemoryKind> found = options_.device->KindOf(memory.data());
    if (!found.ok() || *found != MemoryKind::kDevice) {
      return absl::InvalidArgumentError(absl::StrCat(
          "memory to register: ", found.ok()
                                      ? absl::StrCat("it is not of ", options_.device->name())
                                      : std::string(found.status().message())));
    }
  }
  return RunOnThread([&]() -> absl::Status {
    OKV_RETURN_IF_ERROR(memories_.Register(context_, memory, kind));
    const bool needs_staging =
        kind == MemoryKind::kDevice && staging_ == nullptr && options_.device_staging_bytes > 0;
    return needs_staging ? MakeStaging() : absl::OkStatus();
  });
}

absl::Status UcxTransport::MakeStaging() {
  auto staging =
      DeviceStaging::Create(options_.device, options_.device_staging_bytes,
                            [this](std::function<void()> work) { Post(std::move(work)); });
  if (!staging.ok()) {
    return absl::Status(staging.status().code(),
                        absl::StrCat("device_staging_bytes ", options_.device_staging_bytes, ": ",
                                     staging.status().message()));
  }
  OKV_RETURN_IF_ERROR(memories_.Register(context_, (*staging)->memory(), MemoryKind::kDevice));
  staging_ = *std::move(staging);
  return absl::OkStatus();
}

ucs_status_t UcxTransport::OnActiveMessage(void* arg, const void* header, size_t header_length,
                                           void* data, size_t length,
                                           const ucp_am_recv_param_t* param) {
  const auto* handler = static_cast<const HandlerArg*>(arg);
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  const bool has_endpoint = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
  const auto& endpoints = handler->transport->endpoints_;
  const auto found = has_endpoint ? endpoints.find(param->reply_ep) : endpoints.end();
  if (found == endpoints.end()) return rendezvous ? UCS_ERR_CANCELED : UCS_OK;
  const absl::string_view header_bytes(static_cast<const char*>(header), header_length);
  return found->second->Arrived(handler->id, header_bytes, data, length, rendezvous);
}

void UcxTransport::OnConnectionRequest(ucp_conn_request_h request, void* arg) {
  static_cast<UcxTransport*>(arg)->Push({.kind = Event::Kind::kAccept, .request = request});
}

void UcxTransport::OnEndpointError(void* arg, ucp_ep_h endpoint, ucs_status_t status) {
  auto* transport = static_cast<UcxTransport*>(arg);
  const auto found = transport->endpoints_.find(endpoint);
  if (found == transport->endpoints_.end()) return;
  transport->Push({.kind = Event::Kind::kFailed, .connection = found->second, .status = status});
}

// ---- Start and stop

absl::Status UcxTransport::ReadConfig(ucp_config_t** config) {
  ucs_status_t status = ucp_config_read(nullptr, nullptr, config);
  if (status != UCS_OK) return UcxError("UCX configuration", status);
  std::vector<std::pair<const char*, std::string>> settings;
  // Peer error handling drops shared memory unless this says that it may stay.
  if (options_.uses_shared_memory()) settings.emplace_back("MM_ERROR_HANDLING", "y");
  if (!options_.tls.empty()) settings.emplace_back("TLS", options_.tls);
  if (!options_.net_devices.empty()) settings.emplace_back("NET_DEVICES", options_.net_devices);
  for (const auto& [name, value] : settings) {
    status = ucp_config_modify(*config, name, value.c_str());
    if (status != UCS_OK) return UcxError(absl::StrCat("UCX_", name, "=", value), status);
  }
  return absl::OkStatus();
}

absl::Status UcxTransport::StartUcx() {
  if (options_.device != nullptr) {
    SetUcxDeviceEnvironment();
    OKV_RETURN_IF_ERROR(options_.device->MakeCurrent());
  }
  SetUcxEnvironment();
  ucp_config_t* config = nullptr;
  absl::Status configured = ReadConfig(&config);
  ucs_status_t status = UCS_OK;
  if (configured.ok()) {
    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    // Never UCP_FEATURE_RMA: its software path lets any peer read and write all of this process.
    params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    status = ucp_init(&params, config, &context_);
  }
  if (config != nullptr) ucp_config_release(config);
  OKV_RETURN_IF_ERROR(configured);
  if (status != UCS_OK) {
    context_ = nullptr;
    return UcxError(absl::StrCat("UCX cannot start (transports '", options_.tls, "', devices '",
                                 options_.net_devices, "')"),
                    status);
  }
  OKV_RETURN_IF_ERROR(CheckPaths(options_, context_));
  return StartWorker();
}

absl::Status UcxTransport::StartWorker() {
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucs_status_t status = ucp_worker_create(context_, &params, &worker_);
  if (status != UCS_OK) {
    worker_ = nullptr;
    return UcxError("UCX cannot make a worker", status);
  }
  ucp_worker_attr_t attributes = {};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  status = ucp_worker_query(worker_, &attributes);
  if (status != UCS_OK) return UcxError("UCX cannot query a worker", status);
  OKV_CHECK(attributes.max_am_header > sizeof(WireHeader) + sizeof(WireAck));
  header_bytes_max_ = attributes.max_am_header - sizeof(WireHeader);
  for (unsigned id = 0; id <= kMessageTypeMax; ++id) {
    handler_args_[id] = {.transport = this, .id = id};
    ucp_am_handler_param_t handler = {};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = OnActiveMessage;
    handler.arg = &handler_args_[id];
    status = ucp_worker_set_am_recv_handler(worker_, &handler);
    if (status != UCS_OK) return UcxError("UCX refuses active messages", status);
  }
  status = ucp_worker_get_efd(worker_, &ucx_fd_);
  if (status != UCS_OK) return UcxError("UCX gives no event descriptor", status);
  return absl::OkStatus();
}

void UcxTransport::StopUcx() {
  if (worker_ != nullptr) {
    accepting_ = false;
    while (Step()) {
    }
    std::vector<UcxConnection*> open;
    for (const auto& [connection, owned] : connections_) open.push_back(connection);
    for (UcxConnection* connection : open) {
      connection->Fail(absl::CancelledError("the transport was closed"));
    }
    const auto started = std::chrono::steady_clock::now();
    while (!connections_.empty()) {
      Step();
      // Memory that UCX may still write into must not go back to its owner.
      OKV_CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(30));
    }
    if (staging_ != nullptr) staging_->Stop();
    RunPosted();
    OKV_CHECK(bulks_count_ == 0);
    // No progress behind it: whoever is about to connect would be announced to a listener that is
    // gone (1.13: ucp_cm_server_conn_request_cb ends the process).
    if (listener_ != nullptr) ucp_listener_destroy(listener_);
    memories_.UnregisterAll(context_);
    ucp_worker_destroy(worker_);
  }
  if (context_ != nullptr) ucp_cleanup(context_);
}

}  // namespace ucx

absl::StatusOr<std::unique_ptr<Transport>> CreateUcxTransport(const UcxTransportOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_RETURN_IF_ERROR(CheckNetworkDevices(options));
  OKV_RETURN_IF_ERROR(CheckSharedMemory(options));
  auto transport = std::make_unique<ucx::UcxTransport>(options);
  OKV_RETURN_IF_ERROR(transport->Start());
  return transport;
}

}  // namespace okv
