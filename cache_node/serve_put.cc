#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_node/serve.h"
#include "cache_node/serve_messages.h"
#include "proto/check.h"
#include "proto/object.h"
#include "proto/status_macros.h"
#include "proto/ticket.h"

// The data plane's writing half: what a worker offers, and how it is stored.
namespace okv {

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

}  // namespace okv
