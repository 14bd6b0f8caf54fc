#include "cache_node/serve.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/data_plane.h"
#include "proto/object.h"
#include "proto/status_macros.h"
#include "proto/ticket.h"

namespace okv {
namespace {

// How long a refused peer may take to read why.
constexpr int64_t kRefusedNanos = 1'000'000'000;
constexpr size_t kClientNameBytesMax = 256;
// Bounds what a status text adds to a message.
constexpr size_t kReasonBytesMax = 1024;

std::string Reason(const absl::Status& status) {
  return std::string(status.message().substr(0, kReasonBytesMax));
}

bool ParseMessage(absl::string_view bytes, google::protobuf::MessageLite* message) {
  return bytes.size() <= kMessageBytesMax &&
         message->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
}

absl::Status FormatMismatch(absl::string_view what, const Format* other, const Format& session) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ",
                                                    other != nullptr
                                                        ? DescribeDifference(*other, session)
                                                        : "this node does not know its format"));
}

}  // namespace

absl::Status DataPlaneOptions::Validate() const {
  if (sessions_max == 0 || objects_queued_max < kObjectsPerFetchMax || bulks_per_session_max == 0 ||
      bulks_max < bulks_per_session_max || puts_per_session_max == 0 || disk_threads == 0) {
    return absl::InvalidArgumentError("a limit of the data plane is 0, or below what it must hold");
  }
  return absl::OkStatus();
}

DataPlane::DataPlane(const DataPlaneOptions& options, Parts parts)
    : options_(options), parts_(std::move(parts)), disk_(options.disk_threads) {}

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
  session->connection->Close([this, session_id = session->id] { Erase(session_id); });
}

void DataPlane::Erase(uint64_t session_id) {
  const auto found = sessions_.find(session_id);
  OKV_CHECK(found != sessions_.end());
  by_connection_.erase(found->second->connection);
  // Every transfer has ended; what is left waits for room or for the disk.
  const std::unique_ptr<Session> session = std::move(found->second);
  sessions_.erase(found);
  sessions_count_ = sessions_.size();
}

void DataPlane::OnMessage(Connection* connection, MessageType type, absl::string_view message) {
  Session* session = Find(connection);
  if (session == nullptr) return;
  if (type == MessageType::kHello && session->state == Session::State::kNew) {
    OnHello(session, message);
  } else if (type == MessageType::kFetchRequest && session->state == Session::State::kOpen) {
    OnFetchRequest(session, message);
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

// ---- Fetch.

void DataPlane::OnFetchRequest(Session* session, absl::string_view message) {
  v1::FetchRequest request;
  if (!ParseMessage(message, &request)) {
    Close(session, "a fetch request cannot be read");
    return;
  }
  const absl::Status status = CheckFetch(*session, request);
  if (!status.ok()) {
    const int count = std::min<int>(request.objects_size(), kObjectsPerFetchMax);
    for (int i = 0; i < count; ++i) {
      SendFailure(session, request.request_id(), static_cast<uint32_t>(i), status);
    }
    return;
  }
  const int64_t now_nanos = parts_.clock->NowNanos();
  const uint64_t max_us = static_cast<uint64_t>(options_.fetch_nanos_max / 1000);
  const uint64_t deadline_us =
      request.deadline_us() == 0 ? max_us : std::min(request.deadline_us(), max_us);
  const int64_t deadline_nanos = now_nanos + static_cast<int64_t>(deadline_us) * 1000;
  if (session->queue.empty() || deadline_nanos < session->queue_deadline_nanos) {
    session->queue_deadline_nanos = deadline_nanos;
  }
  for (int i = 0; i < request.objects_size(); ++i) {
    const v1::FetchObject& object = request.objects(i);
    const absl::StatusOr<BlockKey> key = BlockKey::FromBytes(object.key());
    if (!key.ok() || !IsCodec(static_cast<uint32_t>(object.codec()))) {
      SendFailure(session, request.request_id(), static_cast<uint32_t>(i),
                  absl::InvalidArgumentError("an object needs a key of 32 bytes and a codec"));
      continue;
    }
    auto delivery = std::make_shared<Delivery>();
    delivery->request_id = request.request_id();
    delivery->ordinal = static_cast<uint32_t>(i);
    delivery->id = {.key = *key, .codec = static_cast<Codec>(object.codec())};
    delivery->index = BlockIndex(object.index());
    delivery->received_nanos = now_nanos;
    delivery->deadline_nanos = deadline_nanos;
    session->queue.push_back(std::move(delivery));
  }
  TakeTurn(session);
  Pump();
}

absl::Status DataPlane::CheckFetch(const Session& session, const v1::FetchRequest& request) const {
  if (request.objects_size() > static_cast<int>(kObjectsPerFetchMax)) {
    return absl::InvalidArgumentError(absl::StrCat(
        request.objects_size(), " objects in one request, at most ", kObjectsPerFetchMax));
  }
  if (request.format_id() != session.format_id.view()) {
    const absl::StatusOr<FormatId> id = FormatId::FromBytes(request.format_id());
    return FormatMismatch("the request's format is not the session's",
                          id.ok() ? parts_.formats->Find(*id) : nullptr, *session.format);
  }
  const bool all_layers =
      request.layer_begin() == 0 &&
      (request.layer_end() == 0 || request.layer_end() == session.layout.layers_count);
  const bool all_heads = request.head_begin() == 0 &&
                         (request.head_end() == 0 || request.head_end() == session.layout.kv_heads);
  if (!all_layers || !all_heads) {
    return absl::InvalidArgumentError(
        "this node sends whole objects only: ask for all layers and "
        "heads");
  }
  if (session.queue.size() + static_cast<size_t>(request.objects_size()) >
      options_.objects_queued_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(session.queue.size(), " objects of this session wait already"));
  }
  return absl::OkStatus();
}

void DataPlane::TakeTurn(Session* session) {
  if (session->has_turn || session->state != Session::State::kOpen || session->queue.empty() ||
      session->sending.size() >= options_.bulks_per_session_max) {
    return;
  }
  session->has_turn = true;
  turns_.push_back(session->id);
}

void DataPlane::Pump() {
  while (!turns_.empty() && bulks_count_ < options_.bulks_max) {
    Session* session = FindById(turns_.front());
    turns_.pop_front();
    if (session == nullptr) continue;
    session->has_turn = false;
    if (session->queue.empty()) continue;
    DeliveryRef delivery = std::move(session->queue.front());
    session->queue.pop_front();
    Start(session, std::move(delivery));
    TakeTurn(session);
  }
}

void DataPlane::Start(Session* session, DeliveryRef delivery) {
  absl::Status status = PinFor(*session, delivery.get());
  if (status.ok() && parts_.clock->NowNanos() >= delivery->deadline_nanos) {
    status = absl::DeadlineExceededError("the deadline passed before its turn came");
  }
  if (!status.ok()) {
    SendFailure(session, delivery->request_id, delivery->ordinal, status);
    return;
  }
  const uint64_t serial = next_serial_++;
  session->sending[serial] = delivery;
  ++bulks_count_;
  if (!delivery->pin.dram().empty()) {
    SendDelivery(session, serial, delivery.get());
    return;
  }
  delivery->tier = "disk";
  disk_.Add([this, session_id = session->id, serial, delivery] {
    absl::StatusOr<std::unique_ptr<uint8_t[]>> own = parts_.spiller->Load(&delivery->pin);
    delivery->loaded = own.status();
    if (own.ok()) delivery->own = *std::move(own);
    parts_.transport->Post(
        [this, session_id, serial, delivery] { Loaded(session_id, serial, delivery); });
  });
}

absl::Status DataPlane::PinFor(const Session& session, Delivery* delivery) {
  absl::StatusOr<ObjectPin> found = parts_.table->Pin(delivery->id);
  if (!found.ok()) {
    parts_.metrics->FetchMiss(NodeMetrics::Miss::kNotHeld);
    return found.status();
  }
  ObjectPin pin = *std::move(found);
  const HeldObject& object = pin.object();
  if (object.tenant != session.tenant) {
    // The same answer as for a miss: a tenant learns nothing of another's objects.
    parts_.metrics->FetchMiss(NodeMetrics::Miss::kOtherTenant);
    return absl::NotFoundError(absl::StrCat(CodecName(delivery->id.codec), " object ",
                                            delivery->id.key.Short(), " is not held here"));
  }
  if (object.header.format_id != session.format_id) {
    return FormatMismatch(
        absl::StrCat("object ", delivery->id.key.Short(), " was stored under another format"),
        parts_.formats->Find(object.header.format_id), *session.format);
  }
  if (object.header.index != delivery->index) {
    return absl::FailedPreconditionError(absl::StrCat("object ", delivery->id.key.Short(),
                                                      " is block ", object.header.index.value(),
                                                      ", not ", delivery->index.value()));
  }
  delivery->pin = std::move(pin);
  return absl::OkStatus();
}

void DataPlane::Loaded(uint64_t session_id, uint64_t serial, DeliveryRef delivery) {
  Session* session = FindById(session_id);
  if (session != nullptr && session->state == Session::State::kOpen && delivery->loaded.ok()) {
    SendDelivery(session, serial, delivery.get());
    return;
  }
  --bulks_count_;
  if (session != nullptr) {
    session->sending.erase(serial);
    if (session->state == Session::State::kOpen) {
      SendFailure(session, delivery->request_id, delivery->ordinal, delivery->loaded);
    }
    TakeTurn(session);
  }
  Pump();
}

void DataPlane::SendDelivery(Session* session, uint64_t serial, Delivery* delivery) {
  const ObjectHeader& object = delivery->pin.object().header;
  v1::ObjectDelivery header;
  header.set_request_id(delivery->request_id);
  header.set_ordinal(delivery->ordinal);
  header.set_object_header(object.Encode());
  const std::string header_bytes = header.SerializeAsString();
  if (header_bytes.size() > session->connection->header_bytes_max()) {
    OnSent(
        session, serial,
        absl::FailedPreconditionError(absl::StrCat(
            "the object's header of ", header_bytes.size(), " bytes does not fit the ",
            session->connection->header_bytes_max(), " of ", session->connection->description())));
    return;
  }
  const absl::Span<const uint8_t> payload =
      delivery->own != nullptr ? absl::MakeConstSpan(delivery->own.get(), object.payload_bytes)
                               : delivery->pin.dram();
  delivery->sending = true;
  session->connection->SendBulk(
      MessageType::kObjectDelivery, header_bytes, payload,
      [this, session, serial](absl::Status status) { OnSent(session, serial, status); });
}

// A session lives until every done of its connection has run.
void DataPlane::OnSent(Session* session, uint64_t serial, const absl::Status& status) {
  const auto found = session->sending.find(serial);
  OKV_CHECK(found != session->sending.end());
  const DeliveryRef delivery = std::move(found->second);
  session->sending.erase(found);
  --bulks_count_;
  if (status.ok()) {
    const int64_t nanos = parts_.clock->NowNanos() - delivery->received_nanos;
    parts_.metrics->FetchHit(delivery->tier, static_cast<double>(nanos) * 1e-9);
  } else if (!delivery->sending) {
    SendFailure(session, delivery->request_id, delivery->ordinal, status);
  } else {
    parts_.metrics->FetchFailure(status.code());  // The reader is gone, or did not want it.
  }
  delivery->pin.Release();
  TakeTurn(session);
  Pump();
}

void DataPlane::SendFailure(Session* session, uint64_t request_id, uint32_t ordinal,
                            const absl::Status& status) {
  if (!absl::IsNotFound(status)) parts_.metrics->FetchFailure(status.code());  // Misses: PinFor.
  v1::ObjectFailure failure;
  failure.set_request_id(request_id);
  failure.set_ordinal(ordinal);
  failure.set_code(static_cast<int>(status.code()));
  failure.set_message(Reason(status));
  session->connection->Send(MessageType::kObjectFailure, failure.SerializeAsString());
}

// ---- Put.

void DataPlane::OnPutOffer(Session* session, absl::string_view header,
                           std::unique_ptr<BulkReceive> payload) {
  v1::PutOffer offer;
  if (!ParseMessage(header, &offer)) {
    Close(session, "a put offer cannot be read");
    return;
  }
  absl::StatusOr<ObjectRef> object = CheckOffer(*session, offer, payload->payload_bytes());
  if (object.ok() && session->incoming.size() >= options_.puts_per_session_max) {
    object = absl::ResourceExhaustedError(
        absl::StrCat(session->incoming.size(), " puts of this session are under way"));
  }
  absl::StatusOr<WriteClaim> claim = absl::UnknownError("");
  if (object.ok()) claim = parts_.table->Claim((*object)->header.id);
  if (!object.ok() || !claim.ok()) {
    AnswerPut(session, offer.request_id(), object.ok() ? claim.status() : object.status());
    return;  // The payload is refused as it goes.
  }
  const size_t payload_bytes = payload->payload_bytes();
  const uint64_t serial = next_serial_++;
  auto incoming = std::make_unique<Incoming>();
  incoming->request_id = offer.request_id();
  incoming->received_nanos = parts_.clock->NowNanos();
  incoming->object = *std::move(object);
  incoming->claim = *std::move(claim);
  incoming->payload = std::move(payload);
  session->incoming[serial] = std::move(incoming);
  parts_.spiller->Allocate(
      payload_bytes, [this, session_id = session->id, serial](absl::StatusOr<Extent> extent) {
        // Shared only because a posted function is copyable.
        auto moved = std::make_shared<absl::StatusOr<Extent>>(std::move(extent));
        parts_.transport->Post(
            [this, session_id, serial, moved] { OnRoom(session_id, serial, std::move(*moved)); });
      });
}

absl::StatusOr<ObjectRef> DataPlane::CheckOffer(const Session& session, const v1::PutOffer& offer,
                                                size_t payload_bytes) const {
  OKV_ASSIGN_OR_RETURN(
      const Reservation reservation,
      OpenReservation(offer.reservation(), parts_.ticket_key(), parts_.clock->WallMicros()));
  if (reservation.node_id != parts_.node_id) {
    return absl::PermissionDeniedError(absl::StrCat(
        "the reservation is for node '", reservation.node_id, "', this is '", parts_.node_id, "'"));
  }
  if (reservation.tenant != session.tenant) {
    return absl::PermissionDeniedError("the reservation is another tenant's");
  }
  OKV_ASSIGN_OR_RETURN(ObjectHeader header, ObjectHeader::Decode(offer.object_header()));
  if (reservation.object != header.id) {
    return absl::PermissionDeniedError(
        absl::StrCat("the reservation is for another object than ", header.id.key.Short()));
  }
  if (WriteId(header.generation) != reservation.write_id) {
    return absl::PermissionDeniedError(absl::StrCat("generation ", header.generation,
                                                    " is not the reserved write id ",
                                                    reservation.write_id.value()));
  }
  for (const FormatId& id : {reservation.format_id, header.format_id}) {
    if (id == session.format_id) continue;
    return FormatMismatch(absl::StrCat("object ", header.id.key.Short(), " has another format"),
                          parts_.formats->Find(id), *session.format);
  }
  const size_t block_bytes = session.layout.block_bytes(header.id.codec);
  if (payload_bytes != block_bytes || header.payload_bytes != block_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a ", CodecName(header.id.codec), " block of this format has ", block_bytes,
        " bytes, the header says ", header.payload_bytes, ", the payload has ", payload_bytes));
  }
  if (header.checksums.size() != session.layout.runs_count()) {
    return absl::InvalidArgumentError(absl::StrCat(header.checksums.size(),
                                                   " checksums, the format has ",
                                                   session.layout.runs_count(), " runs"));
  }
  if (header.parent.has_value() == (header.index == BlockIndex(0))) {
    return absl::InvalidArgumentError("block 0 has no parent, and every other block has one");
  }
  return std::make_shared<const HeldObject>(
      HeldObject{.header = std::move(header), .tenant = session.tenant, .layout = session.layout});
}

void DataPlane::OnRoom(uint64_t session_id, uint64_t serial, absl::StatusOr<Extent> extent) {
  Session* session = FindById(session_id);
  // Without its session the extent goes back as it came.
  if (session == nullptr || session->state != Session::State::kOpen) return;
  const auto found = session->incoming.find(serial);
  OKV_CHECK(found != session->incoming.end());
  Incoming* incoming = found->second.get();
  if (!extent.ok()) {
    const uint64_t request_id = incoming->request_id;
    session->incoming.erase(found);  // Before the answer: the writer may try again at once.
    AnswerPut(session, request_id, extent.status());
    return;
  }
  incoming->extent = *std::move(extent);
  incoming->payload->Receive(
      incoming->extent.span(),
      [this, session_id, serial](absl::Status status) { OnReceived(session_id, serial, status); });
}

void DataPlane::OnReceived(uint64_t session_id, uint64_t serial, const absl::Status& status) {
  Session* session = FindById(session_id);
  // A Receive that crossed the end of its connection may hear of it later than the session did;
  // then nothing wrote into the extent, which is free again.
  if (session == nullptr) return;
  const auto found = session->incoming.find(serial);
  OKV_CHECK(found != session->incoming.end());
  std::unique_ptr<Incoming> incoming = std::move(found->second);
  session->incoming.erase(found);
  const uint64_t request_id = incoming->request_id;
  const absl::Status end = status.ok() ? CommitIncoming(incoming.get()) : status;
  incoming.reset();  // Before the answer: the writer may try again at once.
  AnswerPut(session, request_id, end);
}

absl::Status DataPlane::CommitIncoming(Incoming* incoming) {
  const int64_t start_nanos = parts_.clock->NowNanos();
  const HeldObject& object = *incoming->object;
  const absl::Status status = VerifyObject(object.header, object.layout, incoming->extent.span());
  parts_.metrics->Verified(static_cast<double>(parts_.clock->NowNanos() - start_nanos) * 1e-9);
  OKV_RETURN_IF_ERROR(status);
  parts_.table->Commit(std::move(incoming->claim), incoming->object, std::move(incoming->extent));
  parts_.on_committed(incoming->object);
  return absl::OkStatus();
}

void DataPlane::AnswerPut(Session* session, uint64_t request_id, const absl::Status& status) {
  parts_.metrics->Put(status.code());
  v1::PutReply reply;
  reply.set_request_id(request_id);
  reply.set_code(static_cast<int>(status.code()));
  reply.set_message(Reason(status));
  session->connection->Send(MessageType::kPutReply, reply.SerializeAsString());
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
