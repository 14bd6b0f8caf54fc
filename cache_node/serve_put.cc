#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_node/serve.h"
#include "cache_node/serve_messages.h"
#include "proto/block_range.h"
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
  const uint64_t request_id = offer.request_id();
  absl::StatusOr<Share> share = CheckOffer(*session, offer, payload->payload_bytes());
  const size_t open_count = session->incoming.size() + session->shares_waiting;
  if (share.ok() && open_count >= options_.puts_per_session_max) {
    share = absl::ResourceExhaustedError(
        absl::StrCat(open_count, " puts of this session are under way"));
  }
  const int64_t now_nanos = parts_.clock->NowNanos();
  absl::StatusOr<Assemblies::Joined> joined = absl::UnknownError("");
  if (share.ok()) joined = assemblies_.Join(*share, now_nanos);
  if (!share.ok() || !joined.ok()) {
    AnswerPut(session, request_id, share.ok() ? joined.status() : share.status());
    return;  // The payload is refused as it goes.
  }
  if (joined->is_here) {
    WaitForOthers(session, request_id, joined->assembly.get());
    return;  // Its bytes are not needed again.
  }
  const uint64_t serial = next_serial_++;
  auto incoming = std::make_shared<Incoming>();
  incoming->request_id = request_id;
  incoming->received_nanos = now_nanos;
  incoming->share = *std::move(share);
  incoming->assembly = joined->assembly;
  incoming->payload = std::move(payload);
  session->incoming[serial] = incoming;
  if (joined->assembly->extent.has_memory()) {
    ReceiveShare(session->id, serial, incoming.get());
    return;
  }
  joined->assembly->wait_for_room.push_back({.session_id = session->id, .serial = serial});
  if (joined->is_first) FindRoom(joined->assembly);
}

absl::StatusOr<Share> DataPlane::CheckOffer(const Session& session, const v1::PutOffer& offer,
                                            size_t payload_bytes) const {
  if (parts_.draining && parts_.draining()) {
    return absl::UnavailableError("this node is being drained: reserve another place");
  }
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
  OKV_ASSIGN_OR_RETURN(const BlockRange range, ResolveRange({.layer_begin = offer.layer_begin(),
                                                             .layer_end = offer.layer_end(),
                                                             .head_begin = offer.head_begin(),
                                                             .head_end = offer.head_end()},
                                                            session.layout));
  const size_t block_bytes = session.layout.block_bytes(header.id.codec);
  const size_t range_bytes = range.bytes(session.layout, header.id.codec);
  if (payload_bytes != range_bytes || header.payload_bytes != block_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", CodecName(header.id.codec), " block of this format has ", block_bytes,
                     " bytes, the header says ", header.payload_bytes, "; ", range.ToString(),
                     " have ", range_bytes, ", the payload has ", payload_bytes));
  }
  if (block_bytes > parts_.arena_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a block of ", block_bytes,
                                                   " bytes can never fit the arena of ",
                                                   parts_.arena_bytes, " (dram_bytes)"));
  }
  if (header.checksums.size() != range.runs_count()) {
    return absl::InvalidArgumentError(absl::StrCat(header.checksums.size(), " checksums, ",
                                                   range.ToString(), " have ", range.runs_count(),
                                                   " runs"));
  }
  if (header.parent.has_value() == (header.index == BlockIndex(0))) {
    return absl::InvalidArgumentError("block 0 has no parent, and every other block has one");
  }
  return Share{.header = std::move(header),
               .tenant = session.tenant,
               .layout = session.layout,
               .range = range};
}

void DataPlane::FindRoom(const AssemblyRef& assembly) {
  if (parts_.hbm != nullptr) {
    absl::StatusOr<Extent> extent = parts_.hbm->Allocate(assembly->block_bytes());
    if (extent.ok()) {
      OnRoom(assembly, std::move(extent));
      return;
    }
  }
  parts_.spiller->Allocate(
      assembly->block_bytes(), /*may_drop=*/assembly->parent_is_here(),
      [this, assembly](absl::StatusOr<Extent> extent) {
        // Shared only because a posted function is copyable.
        auto moved = std::make_shared<absl::StatusOr<Extent>>(std::move(extent));
        parts_.transport->Post([this, assembly, moved] { OnRoom(assembly, std::move(*moved)); });
      });
}

void DataPlane::OnRoom(const AssemblyRef& assembly, absl::StatusOr<Extent> extent) {
  // Without its writers the extent goes back as it came.
  if (assembly->ended()) return;
  const std::vector<Assembly::Offer> waiting = std::exchange(assembly->wait_for_room, {});
  if (extent.ok()) {
    assembly->extent = *std::move(extent);
  } else {
    assemblies_.Abandon(assembly);  // Before the answers: a writer may try again at once.
  }
  for (const Assembly::Offer& offer : waiting) {
    Session* session = FindById(offer.session_id);
    if (session == nullptr || session->state != Session::State::kOpen) continue;
    const auto found = session->incoming.find(offer.serial);
    OKV_CHECK(found != session->incoming.end());
    if (extent.ok()) {
      ReceiveShare(offer.session_id, offer.serial, found->second.get());
      continue;
    }
    const uint64_t request_id = found->second->request_id;
    session->incoming.erase(found);
    AnswerPut(session, request_id, extent.status());
  }
}

void DataPlane::ReceiveShare(uint64_t session_id, uint64_t serial, Incoming* incoming) {
  const Share& share = incoming->share;
  const std::vector<BlockPiece> pieces =
      RangePieces(share.range, share.layout, share.header.id.codec);
  absl::Span<uint8_t> buffer;
  if (pieces.size() == 1) {
    buffer = incoming->assembly->extent.span().subspan(pieces[0].offset, pieces[0].bytes);
  } else {
    incoming->staged = staging_.Take(incoming->payload->payload_bytes());
    buffer = incoming->staged.span();
  }
  incoming->payload->Receive(buffer, [this, session_id, serial](const absl::Status& status) {
    OnReceived(session_id, serial, status);
  });
}

void DataPlane::OnReceived(uint64_t session_id, uint64_t serial, const absl::Status& status) {
  Session* session = FindById(session_id);
  // A Receive that crossed the end of its connection may hear of it later than the session did;
  // then nothing wrote into the extent, where somebody else may be by now.
  if (session == nullptr) return;
  const auto found = session->incoming.find(serial);
  OKV_CHECK(found != session->incoming.end());
  const IncomingRef incoming = std::move(found->second);
  session->incoming.erase(found);
  incoming->payload.reset();
  incoming->stored = status;
  const bool on_device = incoming->assembly->extent.device() != nullptr;
  if (status.ok() && (on_device || incoming->staged.span().size() > kCopyHereBytesMax)) {
    copiers_.Add([this, session_id, incoming] {
      Store(incoming.get());
      parts_.transport->Post([this, session_id, incoming] { OnStored(session_id, incoming); });
    });
    return;
  }
  if (status.ok()) Store(incoming.get());
  OnStored(session_id, incoming);
}

void DataPlane::Store(Incoming* incoming) const {
  const int64_t start_nanos = parts_.clock->NowNanos();
  incoming->stored = incoming->assembly->Store(incoming->share, incoming->staged.span());
  parts_.metrics->Verified(static_cast<double>(parts_.clock->NowNanos() - start_nanos) * 1e-9);
}

void DataPlane::OnStored(uint64_t session_id, const IncomingRef& incoming) {
  Session* session = FindById(session_id);
  const AssemblyRef& assembly = incoming->assembly;
  if (!incoming->stored.ok()) {
    // Before the answer: the writer may try again at once.
    assemblies_.Withdraw(assembly, incoming->share.range);
    if (session != nullptr) AnswerPut(session, incoming->request_id, incoming->stored);
    return;
  }
  const ObjectRef object = assemblies_.Complete(assembly, incoming->share);
  if (object != nullptr) {
    parts_.on_committed(object);
    if (session != nullptr) AnswerPut(session, incoming->request_id, absl::OkStatus());
    AnswerWaiting(assembly.get(), absl::OkStatus());
  } else if (session != nullptr) {
    WaitForOthers(session, incoming->request_id, assembly.get());
  }
}

void DataPlane::WithdrawAll(Session* session) {
  for (const auto& [serial, incoming] : std::exchange(session->incoming, {})) {
    assemblies_.Withdraw(incoming->assembly, incoming->share.range);
  }
}

void DataPlane::AnswerWaiting(Assembly* assembly, const absl::Status& status) {
  for (const Assembly::Waiter& waiter : std::exchange(assembly->wait_for_others, {})) {
    Session* session = FindById(waiter.session_id);
    if (session == nullptr) continue;
    --session->shares_waiting;
    AnswerPut(session, waiter.request_id, status);
  }
}

void DataPlane::WaitForOthers(Session* session, uint64_t request_id, Assembly* assembly) {
  ++session->shares_waiting;
  assembly->wait_for_others.push_back({.session_id = session->id, .request_id = request_id});
  v1::PutReply reply;
  reply.set_request_id(request_id);
  reply.set_pending(true);
  session->connection->Send(MessageType::kPutReply, reply.SerializeAsString());
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
