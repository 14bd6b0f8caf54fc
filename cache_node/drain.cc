#include "cache_node/drain.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "client/call_board.h"
#include "client/node_session.h"
#include "proto/data_plane.h"
#include "proto/object.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// How soon a stop cuts transfers.
constexpr absl::Duration kStopWatch = absl::Milliseconds(100);

void SetDeadline(grpc::ClientContext* context, int64_t nanos) {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::nanoseconds(nanos));
}

}  // namespace

void Drainer::Left::Add(const HeldObject& object, const std::string& reason) {
  ++objects;
  bytes += object.header.payload_bytes;
  if (!reason.empty()) why = reason;
}

// One time through everything. Used by the drainer's thread.
class Drainer::Pass {
 public:
  Pass(Drainer* drainer, const DrainOrder& order) : drainer_(drainer), order_(order) {}
  ~Pass() {
    for (const auto& [peer, session] : sessions_) session->Break(absl::CancelledError("closed"));
  }

  Left Run();

 private:
  void RunScope(const Scope& scope, const std::vector<ObjectRef>& objects);
  absl::StatusOr<v1::ReserveResponse> Reserve(const Scope& scope,
                                              absl::Span<const ObjectRef> objects);
  absl::StatusOr<std::string> Ticket(const Scope& scope);
  absl::StatusOr<std::shared_ptr<NodeSession>> Session(const Scope& scope,
                                                       const v1::NodeAddress& node);
  // Writes them to their places.
  void Write(const Scope& scope, absl::Span<const Move> moves);
  void Settle(const Move& move, const absl::Status& status);
  // Nothing more is to be moved.
  bool Ended() const { return drainer_->Over(order_) || drainer_->TimeIsUp(order_); }

  Drainer* const drainer_;
  const DrainOrder order_;
  Left left_;
  std::map<Scope, std::string> tickets_;
  std::map<std::pair<Scope, std::string>, std::shared_ptr<NodeSession>> sessions_;  // By address.
};

Drainer::Left Drainer::Pass::Run() {
  std::map<Scope, std::vector<ObjectRef>> scopes;
  // Puts that were taken before the drain began: asked for first, so that none of them is missed.
  // They count without their bytes.
  left_.objects = drainer_->parts_.table->stats().claims_count;
  if (left_.objects > 0) left_.why = "puts are still arriving";
  for (ObjectRef& object : drainer_->parts_.table->Objects()) {
    scopes[{object->tenant, object->header.format_id}].push_back(std::move(object));
  }
  for (auto& [scope, objects] : scopes) {
    // Parents first: what is cut short by the limit is of use as far as it came.
    std::sort(objects.begin(), objects.end(), [](const ObjectRef& a, const ObjectRef& b) {
      return std::pair(a->header.index, a->header.id) < std::pair(b->header.index, b->header.id);
    });
    RunScope(scope, objects);
  }
  return left_;
}

void Drainer::Pass::RunScope(const Scope& scope, const std::vector<ObjectRef>& objects) {
  const DrainerOptions& options = drainer_->options_;
  for (size_t begin = 0; begin < objects.size(); begin += options.reserve_objects_max) {
    const auto part = absl::MakeConstSpan(objects).subspan(begin, options.reserve_objects_max);
    if (drainer_->Over(order_)) {
      for (const ObjectRef& object : part) left_.Add(*object, "");
      continue;
    }
    const absl::StatusOr<v1::ReserveResponse> answer = Reserve(scope, part);
    if (!answer.ok()) {
      for (const ObjectRef& object : part)
        left_.Add(*object, std::string(answer.status().message()));
      continue;
    }
    std::vector<Move> moves;
    for (size_t i = 0; i < part.size(); ++i) {
      const v1::Placement& placement = answer->placements(static_cast<int>(i));
      const auto code = static_cast<absl::StatusCode>(placement.code());
      if (code == absl::StatusCode::kAlreadyExists) continue;  // Another node has it.
      if (code == absl::StatusCode::kOk && !drainer_->TimeIsUp(order_)) {
        moves.push_back({.object = part[i], .placement = placement});
      } else {
        left_.Add(*part[i], placement.message());  // Empty: there was no time for it.
      }
    }
    for (size_t first = 0; first < moves.size();) {
      uint64_t bytes = 0;
      size_t end = first;
      while (end < moves.size() && end - first < options.batch_objects_max &&
             (end == first || bytes < options.batch_bytes_max)) {
        bytes += moves[end++].object->header.payload_bytes;
      }
      Write(scope, absl::MakeConstSpan(moves).subspan(first, end - first));
      first = end;
    }
  }
}

absl::StatusOr<v1::ReserveResponse> Drainer::Pass::Reserve(const Scope& scope,
                                                           absl::Span<const ObjectRef> objects) {
  v1::ReserveRequest request;
  request.set_tenant(scope.first);
  request.set_format_id(std::string(scope.second.view()));
  request.mutable_move_from()->set_node_id(drainer_->options_.node_id);
  request.mutable_move_from()->set_epoch(drainer_->parts_.epoch());
  for (const auto& [node_id, until_nanos] : drainer_->avoid_until_nanos_) {
    if (drainer_->parts_.clock->NowNanos() < until_nanos) {
      request.mutable_move_from()->add_avoid_node_ids(node_id);
    }
  }
  for (const ObjectRef& object : objects) {
    const ObjectHeader& header = object->header;
    v1::ReserveObject* message = request.add_objects();
    message->set_key(std::string(header.id.key.view()));
    if (header.parent.has_value()) message->set_parent(std::string(header.parent->view()));
    message->set_index(header.index.value());
    message->set_codec(static_cast<v1::CodecId>(header.id.codec));
    message->set_payload_bytes(header.payload_bytes);
  }
  v1::ReserveResponse response;
  const auto call = [&] {
    grpc::ClientContext context;
    SetDeadline(&context, drainer_->options_.rpc_nanos_max);
    return FromGrpc(drainer_->control_.stub()->Reserve(&context, request, &response));
  };
  absl::Status status = call();
  // A control plane that was restarted knows no format until somebody opens a session.
  if (absl::IsFailedPrecondition(status) && Ticket(scope).ok()) status = call();
  OKV_RETURN_IF_ERROR(status);
  if (static_cast<size_t>(response.placements_size()) == objects.size()) return response;
  return absl::InternalError("the control plane answered another number of objects");
}

absl::StatusOr<std::string> Drainer::Pass::Ticket(const Scope& scope) {
  if (const auto found = tickets_.find(scope); found != tickets_.end()) return found->second;
  const Format* format = drainer_->parts_.formats->Find(scope.second);
  if (format == nullptr) return absl::InternalError("an object has no format");
  v1::OpenSessionRequest request;
  request.set_protocol_major(kProtocolMajor);
  request.set_protocol_minor(kProtocolMinor);
  request.set_tenant(scope.first);
  request.set_format(format->Canonical());
  v1::OpenSessionResponse response;
  grpc::ClientContext context;
  SetDeadline(&context, drainer_->options_.rpc_nanos_max);
  OKV_RETURN_IF_ERROR(
      FromGrpc(drainer_->control_.stub()->OpenSession(&context, request, &response)));
  return tickets_[scope] = response.ticket();
}

absl::StatusOr<std::shared_ptr<NodeSession>> Drainer::Pass::Session(const Scope& scope,
                                                                    const v1::NodeAddress& node) {
  const std::pair<Scope, std::string> peer(scope, node.data_address());
  const auto found = sessions_.find(peer);
  if (found != sessions_.end() && !found->second->broken()) return found->second;
  OKV_ASSIGN_OR_RETURN(const std::string ticket, Ticket(scope));
  return sessions_[peer] = NodeSession::Create(
             drainer_->parts_.transport,
             {.address = node.data_address(),
              .node_id = node.node_id(),
              .client_name = absl::StrCat("node ", drainer_->options_.node_id),
              .ticket = ticket,
              .format = drainer_->parts_.formats->Find(scope.second)->Canonical(),
              .format_id = scope.second});
}

void Drainer::Pass::Settle(const Move& move, const absl::Status& status) {
  const HeldObject& object = *move.object;
  // A peer that has it already need not have said so yet.
  const bool is_there = status.ok() || absl::IsAlreadyExists(status);
  if (status.ok()) drainer_->Moved(object);
  if (absl::IsDataLoss(status)) {
    drainer_->parts_.on_damaged(object.tenant, object.header.id);
  } else if (!is_there) {
    drainer_->avoid_until_nanos_[move.placement.node().node_id()] =
        drainer_->parts_.clock->NowNanos() + drainer_->options_.avoid_nanos;
  }
  left_.Add(object, is_there ? "on its way" : std::string(status.message()));
}

void Drainer::Pass::Write(const Scope& scope, absl::Span<const Move> moves) {
  struct Batch {
    std::vector<size_t> members;  // Of moves.
    std::vector<NodeSession::PutTarget> targets;
    std::shared_ptr<NodeSession> session;
  };
  std::vector<ObjectPin> pins(moves.size());
  std::vector<AlignedBuffer> buffers(moves.size());
  std::map<std::string, Batch> batches;  // By the peer's address.
  for (size_t i = 0; i < moves.size(); ++i) {
    const HeldObject& object = *moves[i].object;
    if (Ended()) {
      left_.Add(object, "");
      continue;
    }
    absl::StatusOr<ObjectPin> pin = drainer_->parts_.table->Pin(object.header.id);
    if (!pin.ok()) continue;  // It left meanwhile.
    absl::StatusOr<AlignedBuffer> own = drainer_->parts_.spiller->Load(&*pin);
    if (!own.ok()) {
      if (!absl::IsDataLoss(own.status())) left_.Add(object, std::string(own.status().message()));
      continue;
    }
    const v1::NodeAddress& node = moves[i].placement.node();
    absl::StatusOr<std::shared_ptr<NodeSession>> session = Session(scope, node);
    if (!session.ok()) {
      left_.Add(object, std::string(session.status().message()));
      continue;
    }
    Batch& batch = batches[node.data_address()];
    // One that broke meanwhile ends its calls itself.
    if (batch.session == nullptr) batch.session = *std::move(session);
    ObjectHeader header = object.header;  // With the checksums that it has here.
    header.generation = moves[i].placement.write_id();
    buffers[i] = *std::move(own);
    pins[i] = *std::move(pin);
    const absl::Span<const uint8_t> payload =
        buffers[i] != nullptr ? absl::MakeConstSpan(buffers[i].get(), header.payload_bytes)
                              : pins[i].dram();
    batch.members.push_back(i);
    batch.targets.push_back({.reservation = moves[i].placement.reservation(),
                             .object_header = header.Encode(),
                             .payload = payload});
  }
  CallBoard board;
  size_t outstanding = 0;
  for (auto& [address, batch] : batches) {
    outstanding += batch.targets.size();
    batch.session->Put(std::move(batch.targets), BlockRange{},
                       [&board, &batch = batch](size_t target, absl::Status status) {
                         board.Post({.group = 0,
                                     .item = batch.members[target],
                                     .status = std::move(status),
                                     .header = std::nullopt});
                       });
  }
  const absl::Time deadline =
      absl::Now() + absl::Nanoseconds(drainer_->options_.transfer_nanos_max);
  while (outstanding > 0) {
    if (absl::Now() >= deadline || Ended()) {  // Once more does no harm.
      for (auto& [address, batch] : batches) {
        batch.session->Break(absl::DeadlineExceededError("a peer did not take it in time"));
      }
    }
    for (const CallBoard::Result& result : board.Take(absl::Now() + kStopWatch)) {
      --outstanding;
      Settle(moves[result.item], result.status);
    }
  }
}

Drainer::Drainer(const DrainerOptions& options, Parts parts)
    : options_(options), parts_(std::move(parts)), control_(options.control_address) {
  thread_ = std::thread([this] { Run(); });
}

Drainer::~Drainer() { Stop(); }

void Drainer::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Drainer::SetOrder(const std::optional<DrainOrder>& order) {
  MutexLock lock(&mu_);
  draining_ = order.has_value();
  if (order.has_value() == order_.has_value() && (!order.has_value() || order->id == order_->id)) {
    return;
  }
  order_ = order;
  clean_nanos_ = 0;
  report_ = {};
  if (order.has_value()) {
    begun_nanos_ = parts_.clock->NowNanos();
    report_.id = order->id;
    report_.state = DrainReport::State::kRunning;
    parts_.log("draining: no more puts, and what only this node holds goes to others");
  } else {
    parts_.log("the drain was ended: puts are taken again");
  }
  changed_.SignalAll();
}

std::optional<DrainReport> Drainer::report() const {
  MutexLock lock(&mu_);
  if (report_.id == 0) return std::nullopt;
  return report_;
}

bool Drainer::Over(const DrainOrder& order) const {
  MutexLock lock(&mu_);
  return stopping_ || !order_.has_value() || order_->id != order.id;
}

bool Drainer::TimeIsUp(const DrainOrder& order) const {
  MutexLock lock(&mu_);
  return report_.state != DrainReport::State::kDone &&
         parts_.clock->NowNanos() - begun_nanos_ >= order.limit_nanos;
}

void Drainer::Rest(int64_t nanos) {
  MutexLock lock(&mu_);
  const uint64_t id = report_.id;
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanos);
  while (!stopping_ && report_.id == id && std::chrono::steady_clock::now() < end) {
    changed_.WaitFor(&mu_, end - std::chrono::steady_clock::now());
  }
}

void Drainer::Moved(const HeldObject& object) {
  MutexLock lock(&mu_);
  ++report_.objects_moved;
  report_.bytes_moved += object.header.payload_bytes;
}

void Drainer::Note(const DrainOrder& order, const Left& left, bool time_is_up) {
  if (Over(order)) return;  // A pass that was cut short knows nothing.
  MutexLock lock(&mu_);
  using State = DrainReport::State;
  report_.objects_left = left.objects;
  report_.bytes_left = left.bytes;
  // When the time is up a pass only counts, and the reasons are those of the one before.
  if (left.objects == 0 || !left.why.empty()) report_.message = left.why;
  const int64_t now_nanos = parts_.clock->NowNanos();
  if (left.objects > 0) {
    clean_nanos_ = 0;
  } else if (clean_nanos_ == 0) {
    clean_nanos_ = now_nanos;
  }
  State state = State::kRunning;
  if (left.objects == 0 && now_nanos - clean_nanos_ >= order.settle_nanos) {
    state = State::kDone;
  } else if (report_.state == State::kDone) {
    begun_nanos_ = now_nanos;  // A peer went: there is as much time again.
  } else if (time_is_up) {
    state = State::kGivenUp;
  }
  if (state == report_.state) return;
  report_.state = state;
  if (state == State::kDone) {
    parts_.log(absl::StrCat("drained: other nodes have everything; ", report_.objects_moved,
                            " objects were copied"));
  } else if (state == State::kGivenUp) {
    parts_.log(absl::StrCat("the drain's time is up: ", left.objects, " objects of ", left.bytes,
                            " bytes are on this node only: ", report_.message));
  } else {
    parts_.log(absl::StrCat("draining again: ", left.objects, " objects are on this node only"));
  }
}

void Drainer::Run() {
  while (true) {
    DrainOrder order;
    {
      MutexLock lock(&mu_);
      while (!stopping_ && (!order_.has_value() || report_.state == DrainReport::State::kGivenUp)) {
        changed_.WaitFor(&mu_, std::chrono::seconds(1));
      }
      if (stopping_) return;
      order = *order_;
    }
    const bool time_is_up = TimeIsUp(order);
    Note(order, Pass(this, order).Run(), time_is_up);
    const std::optional<DrainReport> now = report();
    const bool done = now.has_value() && now->state == DrainReport::State::kDone;
    Rest(done ? options_.recheck_nanos : options_.retry_nanos);
  }
}

}  // namespace okv
