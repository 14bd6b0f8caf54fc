#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_node/serve.h"
#include "cache_node/serve_messages.h"
#include "proto/block_range.h"
#include "proto/check.h"
#include "proto/data_plane.h"
#include "proto/object.h"
#include "proto/status_macros.h"

// The data plane's reading half: what a worker asks for, and how it leaves.
namespace okv {

void DataPlane::OnFetchRequest(Session* session, absl::string_view message) {
  v1::FetchRequest request;
  if (!ParseMessage(message, &request)) {
    Close(session, "a fetch request cannot be read");
    return;
  }
  const absl::StatusOr<BlockRange> range = CheckFetch(*session, request);
  if (!range.ok()) {
    const int count = std::min<int>(request.objects_size(), kObjectsPerFetchMax);
    for (int i = 0; i < count; ++i) {
      SendFailure(session, request.request_id(), static_cast<uint32_t>(i), range.status());
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
    delivery->range = *range;
    delivery->follows = object.follows() && i > 0;
    delivery->pack_bytes_max = request.pack_bytes_max();
    delivery->received_nanos = now_nanos;
    delivery->deadline_nanos = deadline_nanos;
    session->queue.push_back(std::move(delivery));
  }
  TakeTurn(session);
  Pump();
}

absl::StatusOr<BlockRange> DataPlane::CheckFetch(const Session& session,
                                                 const v1::FetchRequest& request) const {
  if (request.objects_size() > static_cast<int>(kObjectsPerFetchMax)) {
    return absl::InvalidArgumentError(absl::StrCat(
        request.objects_size(), " objects in one request, at most ", kObjectsPerFetchMax));
  }
  if (request.format_id() != session.format_id.view()) {
    const absl::StatusOr<FormatId> id = FormatId::FromBytes(request.format_id());
    return FormatMismatch("the request's format is not the session's",
                          id.ok() ? parts_.formats->Find(*id) : nullptr, *session.format);
  }
  if (session.queue.size() + static_cast<size_t>(request.objects_size()) >
      options_.objects_queued_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(session.queue.size(), " objects of this session wait already"));
  }
  return ResolveRange({.layer_begin = request.layer_begin(),
                       .layer_end = request.layer_end(),
                       .head_begin = request.head_begin(),
                       .head_end = request.head_end()},
                      session.layout);
}

void DataPlane::OnComplaint(Session* session, absl::string_view message) {
  v1::Complaint complaint;
  if (!ParseMessage(message, &complaint)) {
    Close(session, "a complaint cannot be read");
    return;
  }
  const absl::StatusOr<BlockKey> key = BlockKey::FromBytes(complaint.key());
  if (!key.ok() || !IsCodec(static_cast<uint32_t>(complaint.codec()))) {
    Close(session, "a complaint needs a key of 32 bytes and a codec");
    return;
  }
  rechecker_.Complain(session->tenant,
                      {.key = *key, .codec = static_cast<Codec>(complaint.codec())});
}

void DataPlane::TakeTurn(Session* session) {
  if (session->has_turn || session->waits_for_slot || session->state != Session::State::kOpen ||
      session->queue.empty() || session->sending.size() >= options_.bulks_per_session_max) {
    return;
  }
  session->has_turn = true;
  turns_.push_back(session->id);
}

void DataPlane::Pump() {
  // Those that are passed over go round once, and keep their order.
  size_t passed_count = 0;
  while (passed_count < turns_.size()) {
    const uint64_t session_id = turns_.front();
    turns_.pop_front();
    Session* session = FindById(session_id);
    if (session == nullptr) continue;
    if (bulks_count_ >= options_.bulks_max && !session->sending.empty()) {
      turns_.push_back(session_id);
      ++passed_count;
      continue;
    }
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
  if (delivery->pin.memory().device != nullptr && !JoinOthers(session, delivery.get())) {
    delivery->pin.Release();
    session->queue.push_front(std::move(delivery));
    session->waits_for_slot = true;
    return;
  }
  const uint64_t serial = next_serial_++;
  session->sending[serial] = delivery;
  ++bulks_count_;
  const Payload memory = delivery->pin.memory();
  if (memory.device != nullptr) delivery->tier = "hbm";
  if (memory.empty()) {
    delivery->tier = "disk";
    reads_.Add(session->id, serial);
    PumpDisk();
    return;
  }
  if (memory.device != nullptr) {
    StartFromHbm(session, serial, delivery);
    return;
  }
  const bool copy_here = BytesOf(*session, *delivery) <= kCopyHereBytesMax;
  if (!copy_here && RangePieces(delivery->range, session->layout, delivery->id.codec).size() > 1) {
    GatherAside(session->id, serial, delivery);
    return;
  }
  Gather(delivery.get());
  SendDelivery(session, serial, delivery.get());
}

void DataPlane::GatherAside(uint64_t session_id, uint64_t serial, DeliveryRef delivery) {
  copiers_.Add([this, session_id, serial, delivery] {
    Gather(delivery.get());
    parts_.transport->Post(
        [this, session_id, serial, delivery] { Loaded(session_id, serial, delivery); });
  });
}

void DataPlane::StartFromHbm(Session* session, uint64_t serial, const DeliveryRef& first) {
  if (!first->packed.has_memory()) {
    if (RangePieces(first->range, session->layout, first->id.codec).size() > 1) {
      GatherAside(session->id, serial, first);  // Through host memory.
    } else {
      SendDelivery(session, serial, first.get());
    }
    return;
  }
  std::vector<MemoryCopy> copies;
  uint8_t* to = first->packed.span().data();
  const auto add = [&](const Delivery& delivery) {
    const uint8_t* const from = delivery.pin.memory().bytes.data();
    for (const BlockPiece& piece :
         RangePieces(delivery.range, session->layout, delivery.id.codec)) {
      copies.push_back({.to = to, .from = from + piece.offset, .bytes = piece.bytes});
      to += piece.bytes;
    }
  };
  add(*first);
  for (const DeliveryRef& next : first->more) add(*next);
  parts_.transport->device_staging()->Copy(
      std::move(copies), [this, session_id = session->id, serial, first](absl::Status status) {
        first->loaded = std::move(status);
        Loaded(session_id, serial, first);
      });
}

bool DataPlane::TakeSlot(Session* session, uint64_t bytes, Delivery* first, bool* busy) {
  if (bytes > first->pack_bytes_max) return false;
  DeviceStaging* const staging = parts_.transport->device_staging();
  if (staging == nullptr || bytes > staging->slot_bytes()) return false;
  if (first->packed.has_memory()) return true;
  const uint32_t holders = slot_holders_ + (session->slots_count == 0 ? 1 : 0);
  const uint32_t share = std::max(1u, DeviceStaging::kSlots / (holders + 1));
  if (session->slots_count < share) first->packed = staging->TryTake();
  if (!first->packed.has_memory()) {
    *busy = session->slots_count > 0;
    return false;
  }
  if (session->slots_count++ == 0) ++slot_holders_;
  return true;
}

void DataPlane::GiveSlot(Session* session, Delivery* first) {
  if (!first->packed.has_memory()) return;
  first->packed = {};
  if (session != nullptr && --session->slots_count == 0) --slot_holders_;
}

bool DataPlane::JoinOthers(Session* session, Delivery* first) {
  const Payload payload = first->pin.memory();
  bool busy = false;
  const bool whole = first->range == BlockRange::Whole(session->layout);
  // The pieces of a range lie apart.
  if (!whole && RangePieces(first->range, session->layout, first->id.codec).size() > 1 &&
      !TakeSlot(session, BytesOf(*session, *first), first, &busy)) {
    return !busy;
  }
  const uint8_t* end = payload.bytes.data() + payload.bytes.size();
  uint64_t bytes = BytesOf(*session, *first);
  bool follow = true;  // All so far, at the reader.
  // Their headers are one message.
  const size_t header_bytes = first->pin.object().header.Encode().size() + 16;
  const size_t objects_max =
      std::min<size_t>(options_.merged_objects_max, kMessageBytesMax / 2 / header_bytes);
  while (!session->queue.empty() && first->more.size() + 1 < objects_max) {
    Delivery* next = session->queue.front().get();
    if (next->request_id != first->request_id ||
        next->ordinal != first->ordinal + first->more.size() + 1) {
      break;
    }
    if (first->pack_bytes_max == 0 && !(whole && next->follows)) break;
    const absl::Status status = PinFor(*session, next);
    if (!status.ok()) {
      SendFailure(session, next->request_id, next->ordinal, status);
      session->queue.pop_front();
      break;  // A delivery is of objects next to each other in the request.
    }
    const Payload its = next->pin.memory();
    const bool behind = whole && its.bytes.data() == end && !first->packed.has_memory();
    const bool direct = behind && follow && next->follows;
    bytes += BytesOf(*session, *next);
    bool joins = its.device == payload.device;
    if (joins && direct) {
      joins = bytes <= options_.merged_bytes_max;
    } else if (joins) {
      const bool had_enough = follow && !first->packed.has_memory() &&
                              first->more.size() + 1 >= options_.merged_objects_min;
      joins = !had_enough && bytes <= std::min(first->pack_bytes_max, options_.merged_bytes_max) &&
              (behind || TakeSlot(session, bytes, first, &busy));
    }
    if (!joins) {
      next->pin.Release();  // Its turn comes.
      break;
    }
    follow = follow && next->follows;
    end = its.bytes.data() + its.bytes.size();
    next->tier = "hbm";
    first->more.push_back(std::move(session->queue.front()));
    session->queue.pop_front();
  }
  return !busy || !first->more.empty();
}

void DataPlane::PumpDisk() {
  while (reads_running_ < options_.disk_threads) {
    const auto next = reads_.Next();
    if (!next.has_value()) return;
    const auto [session_id, serial] = *next;
    Session* session = FindById(session_id);
    OKV_CHECK(session != nullptr);  // DropReads.
    const auto found = session->sending.find(serial);
    OKV_CHECK(found != session->sending.end());
    const DeliveryRef delivery = found->second;
    if (parts_.clock->NowNanos() >= delivery->deadline_nanos) {
      delivery->loaded = absl::DeadlineExceededError("the deadline passed before it was read");
      // By way of the queue: this may run inside a Pump.
      parts_.transport->Post([this, session_id = session_id, serial = serial, delivery] {
        Loaded(session_id, serial, delivery);
      });
      continue;
    }
    ReadFromDisk(session_id, serial, delivery);
  }
}

void DataPlane::ReadFromDisk(uint64_t session_id, uint64_t serial, DeliveryRef delivery) {
  ++reads_running_;
  disk_.Add([this, session_id, serial, delivery] {
    absl::StatusOr<AlignedBuffer> own = parts_.spiller->Load(&delivery->pin);
    delivery->loaded = own.status();
    if (own.ok()) {
      delivery->own = *std::move(own);
      Gather(delivery.get());
    }
    parts_.transport->Post([this, session_id, serial, delivery] {
      --reads_running_;
      PumpDisk();
      Loaded(session_id, serial, delivery);
    });
  });
}

void DataPlane::DropReads(Session* session) {
  for (const uint64_t serial : reads_.Drop(session->id)) {
    session->sending.erase(serial);
    --bulks_count_;
  }
}

void DataPlane::Gather(Delivery* delivery) {
  const HeldObject& object = delivery->pin.object();
  const Codec codec = object.header.id.codec;
  const std::vector<BlockPiece> pieces = RangePieces(delivery->range, object.layout, codec);
  if (pieces.size() == 1) return;  // Sent from where it is.
  delivery->staged = staging_.Take(delivery->range.bytes(object.layout, codec));
  const absl::Status gathered = GatherPieces(PayloadOf(*delivery), pieces, delivery->staged.span());
  if (!gathered.ok()) delivery->loaded = gathered;
}

Payload DataPlane::PayloadOf(const Delivery& delivery) {
  if (delivery.own == nullptr) return delivery.pin.memory();
  return {.bytes =
              absl::MakeConstSpan(delivery.own.get(), delivery.pin.object().header.payload_bytes)};
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
    return absl::NotFoundError(absl::StrCat(delivery->id.Name(), " is not held here"));
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
      for (const DeliveryRef& next : delivery->more) {
        SendFailure(session, next->request_id, next->ordinal, delivery->loaded);
      }
    }
    session->waits_for_slot = false;
  }
  GiveSlot(session, delivery.get());
  if (session != nullptr) TakeTurn(session);
  Pump();
}

std::string DataPlane::DeliveryHeader(Session* session, uint64_t serial, const Delivery& delivery) {
  v1::ObjectDelivery header;
  header.set_request_id(delivery.request_id);
  header.set_ordinal(delivery.ordinal);
  if (delivery.more.empty()) {
    header.set_object_header(delivery.pin.object().header.Encode());
  } else {
    header.set_count(static_cast<uint32_t>(delivery.more.size()) + 1);
    v1::ObjectHeaders headers;
    headers.set_request_id(delivery.request_id);
    headers.set_ordinal(delivery.ordinal);
    delivery.pin.object().header.AppendTo(headers.add_object_headers());
    for (const DeliveryRef& next : delivery.more) {
      next->pin.object().header.AppendTo(headers.add_object_headers());
    }
    session->connection->Send(MessageType::kObjectHeaders, headers.SerializeAsString());
  }
  std::string bytes = header.SerializeAsString();
  if (bytes.size() <= session->connection->header_bytes_max()) return bytes;
  OnSent(session, serial,
         absl::FailedPreconditionError(absl::StrCat(
             "the object's header of ", bytes.size(), " bytes does not fit the ",
             session->connection->header_bytes_max(), " of ", session->connection->description())));
  return "";
}

void DataPlane::SendDelivery(Session* session, uint64_t serial, Delivery* delivery) {
  const std::string header = DeliveryHeader(session, serial, *delivery);
  if (header.empty()) return;
  absl::Span<const uint8_t> payload = delivery->staged.span();
  if (delivery->packed.has_memory()) {
    uint64_t bytes = BytesOf(*session, *delivery);
    for (const DeliveryRef& next : delivery->more) bytes += BytesOf(*session, *next);
    payload = delivery->packed.span().first(bytes);
  } else if (!delivery->staged.has_memory()) {
    const absl::Span<const uint8_t> whole = PayloadOf(*delivery).bytes;
    const BlockPiece piece = RangePieces(delivery->range, session->layout, delivery->id.codec)[0];
    payload = whole.subspan(piece.offset, piece.bytes);
    if (!delivery->more.empty()) {
      const absl::Span<const uint8_t> last = delivery->more.back()->pin.memory().bytes;
      payload = absl::MakeConstSpan(payload.data(), last.data() + last.size());
    }
  }
  delivery->sending = true;
  for (const DeliveryRef& next : delivery->more) next->sending = true;
  session->connection->SendBulk(
      MessageType::kObjectDelivery, header, payload,
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
    NoteHits(session, *delivery);
  } else {
    NoteFailed(session, *delivery, status);
    for (const DeliveryRef& next : delivery->more) NoteFailed(session, *next, status);
  }
  delivery->pin.Release();
  for (const DeliveryRef& next : delivery->more) next->pin.Release();
  GiveSlot(session, delivery.get());  // Before the next one looks for a place.
  session->waits_for_slot = false;
  TakeTurn(session);
  Pump();
}

void DataPlane::NoteHits(Session* session, const Delivery& first) {
  const int64_t now_nanos = parts_.clock->NowNanos();
  const auto seconds = [&](const Delivery& delivery) {
    return static_cast<double>(now_nanos - delivery.received_nanos) * 1e-9;
  };
  std::vector<double> all = {seconds(first)};
  for (const DeliveryRef& next : first.more) all.push_back(seconds(*next));
  parts_.metrics->FetchHits(first.tier, all);
  if (!first.more.empty()) parts_.metrics->HbmMerged(first.more.size());
  if (first.packed.has_memory()) parts_.metrics->HbmPacked(all.size());
  if (parts_.hbm == nullptr) return;
  if (first.tier != "hbm") {
    // A use that another tier served; not what was read from disk for one use.
    if (!first.pin.dram().empty()) parts_.hbm->Used(first.pin);
    return;
  }
  if (session->device_path.empty()) {
    session->device_path = session->connection->device_path();
    parts_.log(absl::StrCat("session ", session->id, " of '", session->client_name,
                            "' reads HBM by ", session->device_path, " (",
                            session->connection->description(), ")"));
  }
  uint64_t bytes = BytesOf(*session, first);
  for (const DeliveryRef& next : first.more) bytes += BytesOf(*session, *next);
  // Ranges, where the staging has no place for them.
  const bool staged = first.staged.has_memory();
  parts_.metrics->HbmSent(staged ? "staged" : session->device_path, bytes);
}

void DataPlane::NoteFailed(Session* session, const Delivery& delivery, const absl::Status& status) {
  if (!delivery.sending) {
    SendFailure(session, delivery.request_id, delivery.ordinal, status);
  } else {
    parts_.metrics->FetchFailure(status.code());  // The reader is gone, or did not want it.
  }
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

}  // namespace okv
