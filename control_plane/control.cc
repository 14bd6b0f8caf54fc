#include "control_plane/control.h"

#include <openssl/rand.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "control_plane/placement.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kTicketKey = "ticket_key";
constexpr absl::string_view kWriteIdsEnd = "write_ids_end";
// Write ids are leased from the state this many at a time: one durable write for a million of them.
constexpr uint64_t kWriteIdsLease = 1'000'000;
constexpr int64_t kNanosPerMs = 1'000'000;

// Both go into tickets, which have a limit.
absl::Status CheckName(absl::string_view field, const std::string& name) {
  if (!name.empty() && name.size() <= kTicketTextBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, name.empty() ? " is missing" : " is longer than ",
                   name.empty() ? "" : absl::StrCat(kTicketTextBytesMax, " bytes")));
}

}  // namespace

absl::Status ControlOptions::Validate() const {
  if (heartbeat_interval_ms == 0) {
    return absl::InvalidArgumentError("heartbeat_interval_ms must be positive");
  }
  if (node_timeout_ms < 2 * heartbeat_interval_ms) {
    return absl::InvalidArgumentError("node_timeout_ms must be at least two heartbeat intervals");
  }
  if (reservation_timeout_ms == 0) {
    return absl::InvalidArgumentError("reservation_timeout_ms must be positive");
  }
  if (ticket_lifetime_s == 0)
    return absl::InvalidArgumentError("ticket_lifetime_s must be positive");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Control>> Control::Create(const ControlOptions& options,
                                                         State* state, const Clock* clock) {
  OKV_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<Control> control(new Control(options, state, clock));
  OKV_RETURN_IF_ERROR(control->Load());
  return control;
}

absl::Status Control::Load() {
  OKV_ASSIGN_OR_RETURN(rotations_, RotationRegistry::Open(state_, clock_));
  absl::StatusOr<std::string> key = state_->Get(kTicketKey);
  if (absl::IsNotFound(key.status())) {
    std::string fresh(32, '\0');
    OKV_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(fresh.data()), 32) == 1);
    OKV_RETURN_IF_ERROR(state_->Put(kTicketKey, fresh));
    key = fresh;
  }
  OKV_RETURN_IF_ERROR(key.status());
  ticket_key_ = *std::move(key);

  MutexLock lock(&mu_);
  const absl::StatusOr<std::string> end = state_->Get(kWriteIdsEnd);
  if (!end.ok() && !absl::IsNotFound(end.status())) return end.status();
  if (end.ok() && !absl::SimpleAtoi(*end, &write_ids_end_)) {
    return absl::DataLossError(absl::StrCat("state: '", kWriteIdsEnd, "' is not a number"));
  }
  next_write_id_ = write_ids_end_;
  return absl::OkStatus();
}

absl::StatusOr<WriteId> Control::NextWriteId() {
  if (next_write_id_ == write_ids_end_) {
    const uint64_t end = write_ids_end_ + kWriteIdsLease;
    OKV_RETURN_IF_ERROR(state_->Put(kWriteIdsEnd, absl::StrCat(end)));
    write_ids_end_ = end;
  }
  return WriteId(++next_write_id_);
}

ScopeId Control::Scope(const std::string& tenant, const FormatId& format_id) {
  const ScopeId next(static_cast<uint32_t>(scopes_.size()));
  return scopes_.try_emplace({tenant, format_id}, next).first->second;
}

absl::StatusOr<Session> Control::OpenSession(const std::string& tenant, const std::string& format) {
  OKV_RETURN_IF_ERROR(CheckName("tenant", tenant));
  OKV_ASSIGN_OR_RETURN(const Format registered, rotations_->RegisterFormat(format));
  const int64_t expires = clock_->WallMicros() + int64_t{options_.ticket_lifetime_s} * 1'000'000;
  const FormatId id = registered.id();
  return Session{.format_id = id,
                 .ticket = SealTicket(
                     {.tenant = tenant, .format_id = id, .expires_wall_us = expires}, ticket_key_),
                 .ticket_expires_wall_us = expires,
                 .tenant_salt = tenant};
}

std::vector<uint32_t> Control::NodesOf(ScopeId scope, const ObjectId& id, LookupAnswer* answer,
                                       absl::flat_hash_map<NodeSlot, uint32_t>* places) const {
  std::vector<uint32_t> indexes;
  const PrefixIndex::Nodes* holders = index_.Find(scope, id);
  if (holders == nullptr) return indexes;
  for (const NodeSlot slot : *holders) {
    const auto [place, is_new] =
        places->try_emplace(slot, static_cast<uint32_t>(answer->nodes.size()));
    if (is_new) {
      const NodeState& node = nodes_.at(slot);
      answer->nodes.push_back({.node_id = node.node_id, .data_address = node.data_address});
    }
    indexes.push_back(place->second);
  }
  return indexes;
}

absl::StatusOr<LookupAnswer> Control::Lookup(const std::string& tenant, const FormatId& format_id,
                                             absl::Span<const BlockKey> keys) {
  OKV_ASSIGN_OR_RETURN(const Format format, rotations_->FindFormat(format_id));
  MutexLock lock(&mu_);
  LookupAnswer answer;
  const auto scope = scopes_.find({tenant, format_id});
  if (scope == scopes_.end()) return answer;
  answer.match =
      index_.Match(scope->second, keys,
                   {.sink_blocks = format.sink_blocks(), .recent_blocks = format.recent_blocks()});
  absl::flat_hash_map<NodeSlot, uint32_t> places;
  const uint32_t blocks = std::max(answer.match.prefix_blocks, answer.match.resume_boundary);
  answer.blocks.reserve(blocks);
  for (uint32_t i = 0; i < blocks; ++i) {
    LookupAnswer::Block block;
    block.int2_nodes =
        NodesOf(scope->second, {.key = keys[i], .codec = Codec::kInt2}, &answer, &places);
    block.bf16_nodes =
        NodesOf(scope->second, {.key = keys[i], .codec = Codec::kBf16}, &answer, &places);
    answer.blocks.push_back(std::move(block));
  }
  return answer;
}

std::vector<NodeSlot> Control::PreferredNodes(ScopeId scope,
                                              const ObjectAnnouncement& object) const {
  std::vector<NodeSlot> preferred;
  const auto add = [&](const BlockKey& key) {
    for (const Codec codec : kCodecs) {
      const ObjectId id = {.key = key, .codec = codec};
      if (const PrefixIndex::Nodes* holders = index_.Find(scope, id); holders != nullptr) {
        preferred.insert(preferred.end(), holders->begin(), holders->end());
      }
      if (const PendingWrite* open = reservations_.Find(id); open != nullptr) {
        preferred.push_back(open->node);
      }
    }
  };
  add(object.id.key);
  if (object.parent.has_value()) add(*object.parent);
  return preferred;
}

PlacementAnswer Control::Grant(const ObjectAnnouncement& object,
                               const PendingWrite& reservation) const {
  const NodeState& node = nodes_.at(reservation.node);
  const int64_t left_us =
      std::max<int64_t>(0, reservation.expires_nanos - clock_->NowNanos()) / 1000;
  const Reservation sealed = {.tenant = object.tenant,
                              .format_id = object.format_id,
                              .object = object.id,
                              .node_id = node.node_id,
                              .write_id = reservation.write_id,
                              .expires_wall_us = clock_->WallMicros() + left_us};
  return {.status = absl::OkStatus(),
          .node = {.node_id = node.node_id, .data_address = node.data_address},
          .write_id = reservation.write_id,
          .reservation = SealReservation(sealed, ticket_key_)};
}

absl::StatusOr<PlacementAnswer> Control::ReserveOne(ScopeId scope, const std::string& write_group,
                                                    const ObjectAnnouncement& object) {
  const auto refuse = [](absl::Status status) {
    return PlacementAnswer{
        .status = std::move(status), .node = {}, .write_id = {}, .reservation = {}};
  };
  if (index_.Find(scope, object.id) != nullptr) {
    return refuse(absl::AlreadyExistsError("the object is stored"));
  }
  if (const PendingWrite* open = reservations_.Find(object.id); open != nullptr) {
    if (nodes_.at(open->node).alive) {
      if (open->write_group == write_group) return Grant(object, *open);
      return refuse(absl::AbortedError("another writer has reserved the object"));
    }
    PendingWrite lost;  // Its node died: nobody can commit it any more.
    reservations_.Take(object.id, &lost);
    nodes_.at(lost.node).reserved_bytes -= lost.payload_bytes;
  }
  const bool any_alive = std::any_of(nodes_.nodes().begin(), nodes_.nodes().end(),
                                     [](const NodeState& node) { return node.alive; });
  if (!any_alive) return refuse(absl::UnavailableError("no node is alive"));
  const std::optional<NodeSlot> slot =
      PlaceObject(nodes_, PreferredNodes(scope, object), object.id.key, object.payload_bytes);
  if (!slot.has_value()) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat("no node has ", object.payload_bytes, " bytes free")));
  }
  OKV_ASSIGN_OR_RETURN(const WriteId write_id, NextWriteId());
  const PendingWrite reservation = {
      .write_group = write_group,
      .write_id = write_id,
      .node = *slot,
      .payload_bytes = object.payload_bytes,
      .expires_nanos = clock_->NowNanos() + options_.reservation_timeout_ms * kNanosPerMs};
  reservations_.Add(object.id, reservation);
  nodes_.at(*slot).reserved_bytes += object.payload_bytes;
  return Grant(object, reservation);
}

absl::StatusOr<std::vector<PlacementAnswer>> Control::Reserve(
    const std::string& tenant, const FormatId& format_id, const std::string& write_group,
    absl::Span<const ObjectAnnouncement> objects) {
  OKV_RETURN_IF_ERROR(rotations_->FindFormat(format_id).status());
  if (write_group.empty()) return absl::InvalidArgumentError("write_group is missing");
  MutexLock lock(&mu_);
  const ScopeId scope = Scope(tenant, format_id);
  std::vector<PlacementAnswer> answers;
  answers.reserve(objects.size());
  for (const ObjectAnnouncement& object : objects) {
    OKV_ASSIGN_OR_RETURN(PlacementAnswer answer, ReserveOne(scope, write_group, object));
    answers.push_back(std::move(answer));
  }
  return answers;
}

absl::StatusOr<NodeRegistration> Control::RegisterNode(const NodeState& description) {
  OKV_RETURN_IF_ERROR(CheckName("node_id", description.node_id));
  if (description.data_address.empty()) {
    return absl::InvalidArgumentError("data_address is missing");
  }
  MutexLock lock(&mu_);
  const NodeState* node = nodes_.Register(description, clock_->NowNanos());
  index_.RemoveNode(node->slot);  // The inventory that follows says what it holds.
  return NodeRegistration{.epoch = node->epoch, .ticket_key = ticket_key_};
}

bool Control::Heartbeat(const std::string& node_id, uint64_t epoch, std::vector<TierState> tiers) {
  MutexLock lock(&mu_);
  const absl::StatusOr<NodeState*> node = nodes_.FindCurrent(node_id, epoch);
  if (!node.ok()) return false;
  (*node)->heartbeat_nanos = clock_->NowNanos();
  (*node)->tiers = std::move(tiers);
  return true;
}

absl::Status Control::BeginInventory(const std::string& node_id, uint64_t epoch) {
  MutexLock lock(&mu_);
  OKV_ASSIGN_OR_RETURN(const NodeState* node, nodes_.FindCurrent(node_id, epoch));
  index_.RemoveNode(node->slot);
  return absl::OkStatus();
}

absl::Status Control::ReportObjects(const std::string& node_id, uint64_t epoch,
                                    absl::Span<const ObjectAnnouncement> added,
                                    absl::Span<const ObjectId> removed) {
  MutexLock lock(&mu_);
  OKV_ASSIGN_OR_RETURN(NodeState * node, nodes_.FindCurrent(node_id, epoch));
  node->heartbeat_nanos = clock_->NowNanos();
  for (const ObjectAnnouncement& object : added) {
    index_.Add(node->slot, {.scope = Scope(object.tenant, object.format_id),
                            .id = object.id,
                            .payload_bytes = object.payload_bytes});
    PendingWrite committed;
    if (!reservations_.Take(object.id, &committed)) continue;
    nodes_.at(committed.node).reserved_bytes -= committed.payload_bytes;
  }
  for (const ObjectId& id : removed) index_.Remove(node->slot, id);
  return absl::OkStatus();
}

void Control::Sweep() {
  MutexLock lock(&mu_);
  const int64_t now = clock_->NowNanos();
  for (const NodeSlot slot : nodes_.Expire(now - options_.node_timeout_ms * kNanosPerMs)) {
    index_.RemoveNode(slot);
  }
  for (const PendingWrite& expired : reservations_.Expire(now)) {
    nodes_.at(expired.node).reserved_bytes -= expired.payload_bytes;
  }
}

ClusterStatus Control::Status() const {
  ClusterStatus status;
  status.formats_count = rotations_->formats_count();
  status.rotations_count = rotations_->rotations_count();
  MutexLock lock(&mu_);
  for (const NodeState& node : nodes_.nodes()) {
    status.nodes.push_back(
        {.state = node,
         .heartbeat_age_ms = (clock_->NowNanos() - node.heartbeat_nanos) / kNanosPerMs,
         .objects_count = index_.node_objects_count(node.slot),
         .objects_bytes = index_.node_objects_bytes(node.slot)});
  }
  status.objects_count = index_.objects_count();
  status.reservations_count = reservations_.size();
  return status;
}

}  // namespace okv
