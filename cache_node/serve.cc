#include "cache_node/serve.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_node/serve_messages.h"
#include "proto/check.h"
#include "proto/data_plane.h"
#include "proto/status_macros.h"
#include "proto/ticket.h"

namespace okv {
namespace {

// How long a refused peer may take to read why.
constexpr int64_t kRefusedNanos = 1'000'000'000;
constexpr size_t kClientNameBytesMax = 256;
// A peer that is stopped holds a connection's close up for milliseconds over TCP.
constexpr std::chrono::seconds kEndPatience{5};

}  // namespace

absl::Status DataPlaneOptions::Validate() const {
  if (sessions_max == 0 || objects_queued_max < kObjectsPerFetchMax || bulks_per_session_max == 0 ||
      bulks_max < bulks_per_session_max || puts_per_session_max == 0 || disk_threads == 0 ||
      copy_threads == 0 || merged_objects_max == 0 || merged_objects_max > kObjectsPerDeliveryMax) {
    return absl::InvalidArgumentError("a limit of the data plane is 0, or below what it must hold");
  }
  return absl::OkStatus();
}

DataPlane::DataPlane(const DataPlaneOptions& options, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      staging_(options.staging_kept_bytes_max),
      assemblies_(parts_.table, options.assembly_nanos_max),
      disk_(options.disk_threads),
      copiers_(options.copy_threads),
      rechecker_(options.recheck, {.table = parts_.table,
                                   .disk = parts_.disk,
                                   .spiller = parts_.spiller,
                                   .metrics = parts_.metrics,
                                   .clock = parts_.clock,
                                   .on_removed = parts_.on_removed,
                                   .log = parts_.log}) {
  OKV_CHECK(parts_.arena_bytes > 0);
}

DataPlane::~DataPlane() {
  StopThreads();
  OKV_CHECK(sessions_.empty());
}

absl::StatusOr<std::string> DataPlane::Listen(const std::string& address) {
  OKV_ASSIGN_OR_RETURN(std::string bound, parts_.transport->Listen(address, this));
  ticker_ = std::thread([this] { RunTicker(); });
  return bound;
}

void DataPlane::StopThreads() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    stop_changed_.SignalAll();
  }
  if (ticker_.joinable()) ticker_.join();
  disk_.Stop();
  copiers_.Stop();
  rechecker_.Stop();
}

bool DataPlane::EndSessions() {
  parts_.transport->Post([this] {
    ending_ = true;
    std::vector<Session*> open;
    for (const auto& [id, session] : sessions_) open.push_back(session.get());
    for (Session* session : open) Close(session, "the node stops");
    NoteIfAllEnded();
  });
  const auto until = std::chrono::steady_clock::now() + kEndPatience;
  MutexLock lock(&mu_);
  while (!all_ended_) {
    const auto left = until - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds(0)) return false;
    sessions_ended_.WaitFor(&mu_, left);
  }
  return true;
}

void DataPlane::NoteIfAllEnded() {
  if (!ending_ || !sessions_.empty()) return;
  MutexLock lock(&mu_);
  all_ended_ = true;
  sessions_ended_.SignalAll();
}

void DataPlane::RunTicker() {
  while (true) {
    {
      MutexLock lock(&mu_);
      if (!stopping_) stop_changed_.WaitFor(&mu_, std::chrono::milliseconds(kTickMillis));
      if (stopping_) return;
    }
    if (tick_posted_.exchange(true)) continue;  // The transport is busy: one tick is enough.
    parts_.transport->Post([this] {
      tick_posted_ = false;
      Tick();
    });
  }
}

// ---- Sessions.

DataPlane::Session* DataPlane::Find(Connection* connection) {
  const auto found = by_connection_.find(connection);
  if (found == by_connection_.end()) return nullptr;
  Session* session = FindById(found->second);
  return session->state == Session::State::kClosing ? nullptr : session;
}

DataPlane::Session* DataPlane::FindById(uint64_t session_id) {
  const auto found = sessions_.find(session_id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

void DataPlane::OnAccept(Connection* connection) {
  if (ending_) {
    connection->Close([] {});
    return;
  }
  if (sessions_.size() >= options_.sessions_max) {
    parts_.log(absl::StrCat("refused a connection: ", sessions_.size(), " sessions are open"));
    connection->Close([] {});
    return;
  }
  auto session = std::make_unique<Session>();
  session->id = next_session_id_++;
  session->connection = connection;
  session->since_nanos = parts_.clock->NowNanos();
  by_connection_[connection] = session->id;
  sessions_[session->id] = std::move(session);
  sessions_count_ = sessions_.size();
}

void DataPlane::OnClosed(Connection* connection, const absl::Status& why) {
  const auto found = by_connection_.find(connection);
  if (found != by_connection_.end()) Erase(found->second);
}

void DataPlane::Close(Session* session, absl::string_view why) {
  if (session->state == Session::State::kClosing) return;
  parts_.log(absl::StrCat("closing session ", session->id, " of '", session->client_name, "' (",
                          session->connection->description(), "): ", why));
  session->state = Session::State::kClosing;
  session->queue.clear();
  DropReads(session);
  session->connection->Close([this, session_id = session->id] { Erase(session_id); });
}

void DataPlane::Erase(uint64_t session_id) {
  const auto found = sessions_.find(session_id);
  OKV_CHECK(found != sessions_.end());
  by_connection_.erase(found->second->connection);
  // Every transfer has ended; what is left waits for room, for the disk or for a copy.
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  if (session->slots_count > 0) --slot_holders_;
  WithdrawAll(session.get());
  DropReads(session.get());
  sessions_count_ = sessions_.size();
  NoteIfAllEnded();
}

void DataPlane::OnMessage(Connection* connection, MessageType type, absl::string_view message) {
  Session* session = Find(connection);
  if (session == nullptr) return;
  if (type == MessageType::kHello && session->state == Session::State::kNew) {
    OnHello(session, message);
  } else if (type == MessageType::kFetchRequest && session->state == Session::State::kOpen) {
    OnFetchRequest(session, message);
  } else if (type == MessageType::kComplaint && session->state == Session::State::kOpen) {
    OnComplaint(session, message);
  } else {
    Close(session, absl::StrCat("message type ", static_cast<int>(type), " is out of place"));
  }
}

void DataPlane::OnBulk(Connection* connection, MessageType type, absl::string_view header,
                       std::unique_ptr<BulkReceive> payload) {
  Session* session = Find(connection);
  if (session == nullptr) return;
  if (type == MessageType::kPutOffer && session->state == Session::State::kOpen) {
    OnPutOffer(session, header, std::move(payload));
  } else {
    Close(session, absl::StrCat("bulk type ", static_cast<int>(type), " is out of place"));
  }
}

void DataPlane::OnHello(Session* session, absl::string_view message) {
  v1::Hello hello;
  const absl::Status status = ParseMessage(message, &hello)
                                  ? OpenSession(session, hello)
                                  : absl::InvalidArgumentError("the Hello cannot be read");
  session->state = status.ok() ? Session::State::kOpen : Session::State::kRefused;
  session->since_nanos = parts_.clock->NowNanos();
  v1::HelloReply reply;
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(Reason(status));
  reply.set_protocol_major(kProtocolMajor);
  reply.set_protocol_minor(kProtocolMinor);
  reply.set_node_id(parts_.node_id);
  reply.set_objects_per_fetch_max(kObjectsPerFetchMax);
  session->connection->Send(MessageType::kHelloReply, reply.SerializeAsString());
  if (!status.ok()) {
    parts_.log(absl::StrCat("refused '", session->client_name, "' (",
                            session->connection->description(), "): ", status.ToString()));
  }
}

absl::Status DataPlane::OpenSession(Session* session, const v1::Hello& hello) {
  session->client_name = hello.client_name().substr(0, kClientNameBytesMax);
  if (!ProtocolCompatible(hello.protocol_major(), hello.protocol_minor())) {
    return absl::FailedPreconditionError(
        absl::StrCat("the worker speaks data-plane protocol ", hello.protocol_major(), ".",
                     hello.protocol_minor(), ", this node ", kProtocolMajor, ".", kProtocolMinor));
  }
  const std::string ticket_key = parts_.ticket_key();
  if (ticket_key.empty()) {
    return absl::UnavailableError("this node is not registered with its control plane yet");
  }
  OKV_ASSIGN_OR_RETURN(const Ticket ticket,
                       OpenTicket(hello.ticket(), ticket_key, parts_.clock->WallMicros()));
  OKV_ASSIGN_OR_RETURN(const Format format, Format::Parse(hello.format()));
  session->format_id = format.id();
  if (session->format_id != ticket.format_id) {
    const Format* other = parts_.formats->Find(ticket.format_id);
    return FormatMismatch(absl::StrCat("the ticket is for format ", ticket.format_id.Short(),
                                       ", the session's is ", session->format_id.Short()),
                          other, format);
  }
  OKV_ASSIGN_OR_RETURN(session->format, parts_.formats->Add(format));
  session->tenant = ticket.tenant;
  session->layout = PageLayout::Of(format);
  return absl::OkStatus();
}

// ---- Time.

void DataPlane::Tick() {
  const int64_t now_nanos = parts_.clock->NowNanos();
  std::vector<std::pair<Session*, std::string>> overdue;
  for (const auto& [id, session] : sessions_) {
    if (session->state == Session::State::kClosing) continue;
    ExpireQueue(session.get(), now_nanos);
    std::string why = Overdue(*session, now_nanos);
    if (!why.empty()) overdue.emplace_back(session.get(), std::move(why));
  }
  for (const auto& [session, why] : overdue) Close(session, why);
  for (const Assemblies::Expired& expired : assemblies_.Expire(now_nanos)) {
    parts_.log(absl::StrCat("gave up ", expired.why.message()));
    parts_.metrics->BlockAbandoned();
    AnswerWaiting(expired.assembly.get(), expired.why);
  }
}

void DataPlane::ExpireQueue(Session* session, int64_t now_nanos) {
  if (session->queue.empty() || now_nanos < session->queue_deadline_nanos) return;
  std::deque<DeliveryRef> kept;
  int64_t earliest_nanos = now_nanos + options_.fetch_nanos_max;
  for (DeliveryRef& delivery : session->queue) {
    if (now_nanos >= delivery->deadline_nanos) {
      SendFailure(session, delivery->request_id, delivery->ordinal,
                  absl::DeadlineExceededError("the deadline passed"));
    } else {
      earliest_nanos = std::min(earliest_nanos, delivery->deadline_nanos);
      kept.push_back(std::move(delivery));
    }
  }
  session->queue = std::move(kept);
  session->queue_deadline_nanos = earliest_nanos;
}

std::string DataPlane::Overdue(const Session& session, int64_t now_nanos) const {
  const int64_t age_nanos = now_nanos - session.since_nanos;
  if (session.state == Session::State::kNew && age_nanos > options_.hello_nanos_max) {
    return "no Hello came";
  }
  if (session.state == Session::State::kRefused && age_nanos > kRefusedNanos) {
    return "it was refused";
  }
  for (const auto& [serial, delivery] : session.sending) {
    if (delivery->sending && now_nanos > delivery->deadline_nanos + options_.stall_nanos) {
      return "a fetch was not received long after its deadline";
    }
  }
  for (const auto& [serial, incoming] : session.incoming) {
    if (now_nanos > incoming->received_nanos + options_.put_nanos_max) {
      return "a put did not end in time";
    }
  }
  return "";
}

}  // namespace okv
