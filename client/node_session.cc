#include "client/node_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Deliveries of several objects of one request that are under way; a node has 32 at most.
constexpr size_t kBatchesMax = 128;

absl::Status StatusOf(int32_t code, const std::string& message) {
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace

std::shared_ptr<NodeSession> NodeSession::Create(Transport* transport, NodeSessionOptions options) {
  std::shared_ptr<NodeSession> session =
      std::unique_ptr<NodeSession>(new NodeSession(transport, std::move(options)));
  transport->Post([session] { session->Connect(); });
  return session;
}

void NodeSession::Connect() {
  if (state_ != State::kConnecting) return;  // Broken before it began.
  absl::StatusOr<Connection*> connection = transport_->Connect(options_.address, this);
  if (!connection.ok()) {
    BreakNow(connection.status());
    return;
  }
  connection_ = *connection;
  self_ = shared_from_this();
  v1::Hello hello;
  hello.set_protocol_major(kProtocolMajor);
  hello.set_protocol_minor(kProtocolMinor);
  hello.set_ticket(options_.ticket);
  hello.set_format(options_.format);
  hello.set_client_name(options_.client_name);
  connection_->Send(MessageType::kHello, hello.SerializeAsString());
}

void NodeSession::WhenOpen(std::function<void()> call) {
  if (state_ == State::kConnecting) {
    waiting_.push_back(std::move(call));
  } else {
    call();
  }
}

void NodeSession::Fetch(std::vector<FetchTarget> targets, const BlockRange& range,
                        absl::Duration deadline, FetchDone done) {
  // Shared: functions are copied on their way.
  transport_->Post([self = shared_from_this(),
                    targets = std::make_shared<const std::vector<FetchTarget>>(std::move(targets)),
                    range, deadline, done = std::move(done)] {
    self->WhenOpen([self, targets, range, deadline, done] {
      self->StartFetch(*targets, range, deadline, done);
    });
  });
}

absl::Status NodeSession::TooOld(absl::string_view what) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "node ", options_.node_id, " speaks protocol ", kProtocolMajor, ".", node_minor_,
      ", which has no ", what, "; this client speaks ", kProtocolMajor, ".", kProtocolMinor));
}

void NodeSession::StartFetch(const std::vector<FetchTarget>& targets, const BlockRange& range,
                             absl::Duration deadline, const FetchDone& done) {
  // A closing session ends its calls when the connection is gone; this one never reached it.
  absl::Status refused = state_ == State::kOpen ? absl::OkStatus() : why_;
  if (refused.ok() && range != BlockRange{} && node_minor_ < kProtocolMinorRanges) {
    refused = TooOld("ranges");
  }
  if (!refused.ok()) {
    for (size_t i = 0; i < targets.size(); ++i) done(i, refused);
    return;
  }
  v1::FetchRequest request;
  request.set_format_id(std::string(options_.format_id.view()));
  request.set_deadline_us(
      static_cast<uint64_t>(std::max<int64_t>(1, absl::ToInt64Microseconds(deadline))));
  request.set_layer_begin(range.layer_begin);
  request.set_layer_end(range.layer_end);
  request.set_head_begin(range.head_begin);
  request.set_head_end(range.head_end);
  for (size_t first = 0; first < targets.size(); first += objects_per_fetch_) {
    const size_t count = std::min<size_t>(objects_per_fetch_, targets.size() - first);
    SendFetch(request, {targets.begin() + first, targets.begin() + first + count}, first, done);
  }
}

bool NodeSession::Follows(absl::Span<const uint8_t> before,
                          absl::Span<const uint8_t> buffer) const {
  if (before.data() + before.size() != buffer.data() || before.empty()) return false;
  // A device's allocations may be neighbours, and no transfer reaches over two of them.
  return !transport_->has_device_memory(buffer) ||
         transport_->has_device_memory({before.data(), before.size() + buffer.size()});
}

void NodeSession::SendFetch(v1::FetchRequest request, std::vector<FetchTarget> targets,
                            size_t first, const FetchDone& done) {
  request.set_request_id(next_request_++);
  bool on_device = targets.size() > 1;
  absl::Span<const uint8_t> before;
  for (const FetchTarget& target : targets) {
    // What DeviceMemory::CopyWithin takes.
    on_device = on_device && reinterpret_cast<uintptr_t>(target.buffer.data()) % 16 == 0 &&
                target.buffer.size() % 16 == 0 && transport_->has_device_memory(target.buffer);
    v1::FetchObject* object = request.add_objects();
    object->set_follows(Follows(before, target.buffer));
    before = target.buffer;
    object->set_key(std::string(target.id.key.view()));
    object->set_codec(static_cast<v1::CodecId>(target.id.codec));
    object->set_index(target.index.value());
  }
  PendingFetch pending;
  if (DeviceStaging* staging = on_device ? transport_->device_staging() : nullptr) {
    request.set_pack_bytes_max(staging->slot_bytes());
    pending.may_pack = true;
  }
  pending.states.assign(targets.size(), TargetState::kAsked);
  pending.first = first;
  pending.remaining = targets.size();
  pending.targets = std::move(targets);
  pending.done = done;
  fetches_[request.request_id()] = std::move(pending);
  connection_->Send(MessageType::kFetchRequest, request.SerializeAsString());
}

void NodeSession::Put(std::vector<PutTarget> targets, const BlockRange& range, PutDone done) {
  transport_->Post(
      [self = shared_from_this(), targets = std::move(targets), range, done = std::move(done)] {
        self->WhenOpen([self, targets, range, done] {
          absl::Status refused = self->state_ == State::kOpen ? absl::OkStatus() : self->why_;
          if (refused.ok() && range != BlockRange{} && self->node_minor_ < kProtocolMinorRanges) {
            refused = self->TooOld("ranges");
          }
          for (size_t i = 0; i < targets.size(); ++i) {
            if (!refused.ok()) {
              done(i, refused);
            } else {
              self->put_queue_.push_back(
                  {.target = targets[i], .range = range, .index = i, .done = done});
            }
          }
          self->SendPuts();
        });
      });
}

void NodeSession::SendPuts() {
  while (state_ == State::kOpen && !put_queue_.empty() && puts_on_offer_ < kPutsInFlightMax) {
    QueuedPut put = std::move(put_queue_.front());
    put_queue_.pop_front();
    const uint64_t request_id = next_request_++;
    v1::PutOffer offer;
    offer.set_request_id(request_id);
    offer.set_reservation(put.target.reservation);
    offer.set_object_header(put.target.object_header);
    offer.set_layer_begin(put.range.layer_begin);
    offer.set_layer_end(put.range.layer_end);
    offer.set_head_begin(put.range.head_begin);
    offer.set_head_end(put.range.head_end);
    const std::string header = offer.SerializeAsString();
    if (header.size() > connection_->header_bytes_max()) {
      put.done(put.index, absl::InvalidArgumentError(absl::StrCat(
                              "an object header of ", header.size(), " bytes exceeds the ",
                              connection_->header_bytes_max(), " that the transport carries")));
      continue;
    }
    const absl::Span<const uint8_t> payload = put.target.payload;
    puts_[request_id] = {.put = std::move(put), .status = absl::OkStatus()};
    ++puts_on_offer_;
    connection_->SendBulk(MessageType::kPutOffer, header, payload,
                          [this, request_id](const absl::Status& status) {
                            const auto found = puts_.find(request_id);
                            OKV_CHECK(found != puts_.end());
                            found->second.sent = true;
                            // kAborted: the node does not want it; its PutReply says why. Otherwise
                            // the connection failed, and what ends the session ends this put.
                            if (!status.ok()) found->second.status.Update(status);
                            LeaveOffer(found->second);
                            FinishPut(request_id);
                          });
  }
}

void NodeSession::LeaveOffer(const PendingPut& pending) {
  if (pending.sent && (pending.pending || pending.replied)) --puts_on_offer_;
}

void NodeSession::FinishPut(uint64_t request_id) {
  const auto found = puts_.find(request_id);
  OKV_CHECK(found != puts_.end());
  if (found->second.sent && found->second.replied) {
    const PendingPut pending = std::move(found->second);
    puts_.erase(found);
    pending.put.done(pending.put.index, pending.status);
  }
  SendPuts();
}

void NodeSession::Complain(const ObjectId& id, const std::string& why) {
  v1::Complaint complaint;
  complaint.set_key(std::string(id.key.view()));
  complaint.set_codec(static_cast<v1::CodecId>(id.codec));
  complaint.set_message(why);
  transport_->Post([self = shared_from_this(), message = complaint.SerializeAsString()] {
    if (self->state_ != State::kOpen || self->node_minor_ < kProtocolMinorComplaints) return;
    self->connection_->Send(MessageType::kComplaint, message);
  });
}

void NodeSession::Break(const absl::Status& why) {
  broken_ = true;
  transport_->Post([self = shared_from_this(), why] { self->BreakNow(why); });
}

void NodeSession::BreakNow(const absl::Status& why) {
  if (state_ == State::kClosing || state_ == State::kClosed) return;
  broken_ = true;
  why_ = why;
  if (connection_ == nullptr) {
    state_ = State::kClosed;
    EndCalls();
    return;
  }
  state_ = State::kClosing;
  connection_->Close([this] {
    const std::shared_ptr<NodeSession> self = std::move(self_);
    connection_ = nullptr;
    state_ = State::kClosed;
    EndCalls();
  });
}

void NodeSession::OnClosed(Connection* /*connection*/, const absl::Status& why) {
  const std::shared_ptr<NodeSession> self = std::move(self_);
  connection_ = nullptr;
  broken_ = true;
  state_ = State::kClosed;
  why_ = absl::UnavailableError(absl::StrCat("node ", options_.node_id, " at ", options_.address,
                                             ": ", std::string(why.message())));
  EndCalls();
}

void NodeSession::EndCalls() {
  packed_offers_.clear();
  if (unpacking_ > 0) return;  // The last of them calls again.
  for (auto& [request_id, pending] : std::exchange(fetches_, {})) {
    for (size_t i = 0; i < pending.targets.size(); ++i) {
      if (pending.states[i] != TargetState::kDone) pending.done(pending.first + i, why_);
    }
  }
  for (auto& [request_id, pending] : std::exchange(puts_, {})) {
    pending.put.done(pending.put.index, pending.replied ? pending.status : why_);
  }
  for (QueuedPut& put : std::exchange(put_queue_, {})) put.done(put.index, why_);
  for (const auto& call : std::exchange(waiting_, {})) call();  // They fail with why_.
}

void NodeSession::Violation(absl::string_view what) {
  BreakNow(absl::UnavailableError(absl::StrCat("node ", options_.node_id, " at ", options_.address,
                                               " broke the protocol: ", what)));
}

void NodeSession::OnMessage(Connection* /*connection*/, MessageType type,
                            absl::string_view message) {
  if (state_ == State::kClosing) return;
  if ((type == MessageType::kHelloReply) != (state_ == State::kConnecting)) {
    Violation("a message out of turn");
    return;
  }
  switch (type) {
    case MessageType::kHelloReply:
      HandleHelloReply(message);
      return;
    case MessageType::kObjectFailure:
      HandleFailure(message);
      return;
    case MessageType::kObjectHeaders:
      HandleHeaders(message);
      return;
    case MessageType::kPutReply:
      HandlePutReply(message);
      return;
    default:
      Violation("an unexpected message");
  }
}

void NodeSession::HandleHelloReply(absl::string_view message) {
  v1::HelloReply reply;
  if (!reply.ParseFromArray(message.data(), static_cast<int>(message.size()))) {
    Violation("a HelloReply that cannot be parsed");
    return;
  }
  if (reply.code() != 0) {
    BreakNow(StatusOf(reply.code(), reply.message()));
    return;
  }
  if (!ProtocolCompatible(reply.protocol_major(), reply.protocol_minor())) {
    BreakNow(absl::FailedPreconditionError(absl::StrCat(
        "node ", options_.node_id, " speaks protocol ", reply.protocol_major(), ".",
        reply.protocol_minor(), ", this client ", kProtocolMajor, ".", kProtocolMinor)));
    return;
  }
  if (reply.node_id() != options_.node_id) {
    BreakNow(absl::UnavailableError(absl::StrCat(
        "node ", options_.node_id, " is gone: ", options_.address, " is node ", reply.node_id())));
    return;
  }
  node_minor_ = reply.protocol_minor();
  if (reply.objects_per_fetch_max() != 0) {
    objects_per_fetch_ = std::min(objects_per_fetch_, reply.objects_per_fetch_max());
  }
  state_ = State::kOpen;
  for (const auto& call : std::exchange(waiting_, {})) call();
}

void NodeSession::HandleFailure(absl::string_view message) {
  v1::ObjectFailure failure;
  if (!failure.ParseFromArray(message.data(), static_cast<int>(message.size())) ||
      failure.code() == 0) {
    Violation("an ObjectFailure that cannot be parsed");
    return;
  }
  const auto found = fetches_.find(failure.request_id());
  if (found == fetches_.end() || failure.ordinal() >= found->second.states.size() ||
      found->second.states[failure.ordinal()] != TargetState::kAsked) {
    Violation("a failure of something not asked for");
    return;
  }
  Received(failure.request_id(), failure.ordinal(), StatusOf(failure.code(), failure.message()));
}

void NodeSession::HandleHeaders(absl::string_view message) {
  v1::ObjectHeaders headers;
  if (!headers.ParseFromArray(message.data(), static_cast<int>(message.size()))) {
    Violation("ObjectHeaders that cannot be parsed");
    return;
  }
  const auto found = fetches_.find(headers.request_id());
  const auto count = static_cast<uint64_t>(headers.object_headers_size());
  if (found == fetches_.end() || count < 2 || count > kObjectsPerDeliveryMax ||
      headers.ordinal() + count > found->second.states.size()) {
    Violation("headers of something not asked for");
    return;
  }
  if (found->second.batches.size() >= kBatchesMax) {
    Violation("headers of too many deliveries");
    return;
  }
  Batch& batch = found->second.batches[headers.ordinal()];
  if (!batch.headers.empty() || (batch.count != 0 && batch.count != count)) {
    Violation("headers of another delivery");
    return;
  }
  // While the payload is on its way.
  batch.headers.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    const FetchTarget& target = found->second.targets[headers.ordinal() + i];
    batch.headers.push_back(
        CheckHeader(target, headers.object_headers(static_cast<int>(i)), target.buffer.size()));
  }
  FinishBatch(headers.request_id(), headers.ordinal());
}

void NodeSession::ReceiveBatch(uint64_t request_id, uint32_t ordinal, uint32_t count,
                               std::unique_ptr<BulkReceive> payload) {
  PendingFetch& pending = fetches_.at(request_id);
  bool sound =
      count <= kObjectsPerDeliveryMax && uint64_t{ordinal} + count <= pending.targets.size();
  bool side_by_side = true;
  uint64_t bytes = 0;
  absl::Span<const uint8_t> before;
  for (uint32_t i = ordinal; sound && i < ordinal + count; ++i) {
    const absl::Span<const uint8_t> buffer = pending.targets[i].buffer;
    sound = pending.states[i] == TargetState::kAsked;
    side_by_side = side_by_side && (i == ordinal || Follows(before, buffer));
    bytes += buffer.size();
    before = buffer;
  }
  DeviceStaging* const staging =
      sound && !side_by_side && pending.may_pack ? transport_->device_staging() : nullptr;
  sound = sound && (side_by_side || (staging != nullptr && bytes <= staging->slot_bytes()));
  Batch& batch = pending.batches[ordinal];
  if (!sound || payload->payload_bytes() != bytes || batch.count != 0 ||
      (!batch.headers.empty() && batch.headers.size() != count)) {
    Violation("a delivery of objects that do not belong together");
    return;
  }
  batch.count = count;
  for (uint32_t i = 0; i < count; ++i) pending.states[ordinal + i] = TargetState::kReceiving;
  if (staging != nullptr) {
    packed_offers_.push_back(
        {.request_id = request_id, .ordinal = ordinal, .payload = std::move(payload)});
    StartPacked();
    return;
  }
  payload->Receive(absl::MakeSpan(pending.targets[ordinal].buffer.data(), payload->payload_bytes()),
                   [this, request_id, ordinal](const absl::Status& status) {
                     // As of a single one: EndCalls reports why.
                     if (!status.ok()) return;
                     fetches_.at(request_id).batches.at(ordinal).received = true;
                     FinishBatch(request_id, ordinal);
                   });
}

void NodeSession::StartPacked() {
  while (!packed_offers_.empty() && slots_count_ < DeviceStaging::kSlots / 2) {
    ++slots_count_;
    transport_->device_staging()->Take(
        [self = shared_from_this(),
         offer = std::move(packed_offers_.front())](DeviceStaging::Slot slot) mutable {
          self->ReceivePacked(offer.request_id, offer.ordinal, std::move(offer.payload),
                              std::make_shared<DeviceStaging::Slot>(std::move(slot)));
        });
    packed_offers_.pop_front();
  }
}

void NodeSession::ReceivePacked(uint64_t request_id, uint32_t ordinal,
                                std::shared_ptr<BulkReceive> payload,
                                std::shared_ptr<DeviceStaging::Slot> slot) {
  if (state_ != State::kOpen) return;  // It broke meanwhile.
  BulkReceive* const receive = payload.get();
  receive->Receive(
      slot->span().first(receive->payload_bytes()),
      [this, request_id, ordinal, payload = std::move(payload), slot](const absl::Status& status) {
        // When the connection fails, EndCalls reports why.
        if (status.ok()) Unpack(request_id, ordinal, slot);
      });
}

void NodeSession::Unpack(uint64_t request_id, uint32_t ordinal,
                         std::shared_ptr<DeviceStaging::Slot> slot) {
  const PendingFetch& pending = fetches_.at(request_id);
  std::vector<MemoryCopy> copies;
  size_t offset = 0;
  for (uint32_t i = 0; i < pending.batches.at(ordinal).count; ++i) {
    const absl::Span<uint8_t> buffer = pending.targets[ordinal + i].buffer;
    copies.push_back(
        {.to = buffer.data(), .from = slot->span().data() + offset, .bytes = buffer.size()});
    offset += buffer.size();
  }
  ++unpacking_;
  transport_->device_staging()->Copy(
      std::move(copies), [self = shared_from_this(), request_id, ordinal,
                          slot = std::move(slot)](const absl::Status& status) mutable {
        slot.reset();
        --self->slots_count_;
        --self->unpacking_;
        if (self->state_ == State::kClosed) {
          self->EndCalls();
          return;
        }
        if (self->state_ == State::kClosing) return;
        Batch& batch = self->fetches_.at(request_id).batches.at(ordinal);
        batch.received = true;
        // A device that fails is no fault of the node's.
        if (!status.ok()) batch.copied = absl::InternalError(status.message());
        self->FinishBatch(request_id, ordinal);
        self->StartPacked();
      });
}

void NodeSession::FinishBatch(uint64_t request_id, uint32_t ordinal) {
  PendingFetch& pending = fetches_.at(request_id);
  if (!pending.batches.at(ordinal).received || pending.batches.at(ordinal).headers.empty()) return;
  Batch batch = std::move(pending.batches.at(ordinal));
  pending.batches.erase(ordinal);
  for (uint32_t i = 0; i < batch.count; ++i) {
    absl::StatusOr<ObjectHeader>& header = batch.headers[i];
    if (header.ok() && !batch.copied.ok()) header = batch.copied;
    Received(request_id, ordinal + i, std::move(header));
  }
}

void NodeSession::HandlePutReply(absl::string_view message) {
  v1::PutReply reply;
  if (!reply.ParseFromArray(message.data(), static_cast<int>(message.size()))) {
    Violation("a PutReply that cannot be parsed");
    return;
  }
  const auto found = puts_.find(reply.request_id());
  if (found == puts_.end() || found->second.replied || (reply.pending() && found->second.pending)) {
    Violation("a reply to nothing");
    return;
  }
  PendingPut& put = found->second;
  const bool was_pending = put.pending;
  if (reply.pending()) {
    put.pending = true;
  } else {
    put.replied = true;
    put.status = StatusOf(reply.code(), reply.message());
  }
  if (!was_pending) LeaveOffer(put);
  FinishPut(reply.request_id());
}

absl::StatusOr<ObjectHeader> NodeSession::CheckHeader(const FetchTarget& target,
                                                      absl::string_view encoded,
                                                      size_t payload_bytes) const {
  OKV_ASSIGN_OR_RETURN(ObjectHeader header, ObjectHeader::Decode(encoded));
  const char* wrong = nullptr;
  if (header.format_id != options_.format_id) wrong = "format_id";
  if (header.id != target.id) wrong = "key or codec";
  if (header.index != target.index) wrong = "block index";
  if (payload_bytes != target.buffer.size()) wrong = "size";
  if (wrong != nullptr) {
    return absl::DataLossError(absl::StrCat("node ", options_.node_id, " sent another object than ",
                                            target.id.key.Short(), ": its ", wrong, " differs"));
  }
  return header;
}

void NodeSession::OnBulk(Connection* /*connection*/, MessageType type, absl::string_view header,
                         std::unique_ptr<BulkReceive> payload) {
  if (state_ == State::kClosing) return;
  v1::ObjectDelivery delivery;
  if (state_ != State::kOpen || type != MessageType::kObjectDelivery ||
      !delivery.ParseFromArray(header.data(), static_cast<int>(header.size()))) {
    Violation("an unexpected bulk message");
    return;
  }
  const uint64_t request_id = delivery.request_id();
  const uint32_t ordinal = delivery.ordinal();
  const auto found = fetches_.find(request_id);
  if (found == fetches_.end() || ordinal >= found->second.states.size() ||
      found->second.states[ordinal] != TargetState::kAsked) {
    Violation("an object not asked for");
    return;
  }
  if (delivery.count() > 1) {
    ReceiveBatch(request_id, ordinal, delivery.count(), std::move(payload));
    return;
  }
  const FetchTarget& target = found->second.targets[ordinal];
  absl::StatusOr<ObjectHeader> checked =
      CheckHeader(target, delivery.object_header(), payload->payload_bytes());
  if (!checked.ok()) {
    Received(request_id, ordinal, checked.status());  // The payload goes unreceived: refused.
    return;
  }
  found->second.states[ordinal] = TargetState::kReceiving;
  payload->Receive(target.buffer, [this, request_id, ordinal,
                                   object = *std::move(checked)](const absl::Status& status) {
    // When the connection fails, EndCalls reports why, after everything has stopped.
    if (status.ok()) Received(request_id, ordinal, object);
  });
}

void NodeSession::Received(uint64_t request_id, uint32_t ordinal,
                           absl::StatusOr<ObjectHeader> header) {
  const auto found = fetches_.find(request_id);
  OKV_CHECK(found != fetches_.end());
  PendingFetch& pending = found->second;
  OKV_CHECK(pending.states[ordinal] != TargetState::kDone);
  pending.states[ordinal] = TargetState::kDone;
  const size_t target = pending.first + ordinal;
  if (--pending.remaining > 0) {
    pending.done(target, std::move(header));
    return;
  }
  const FetchDone done = std::move(pending.done);
  fetches_.erase(found);
  done(target, std::move(header));
}

}  // namespace okv
