#include "control_plane/control.h"

#include <openssl/rand.h>

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "control_plane/placement.h"
#include "proto/check.h"
#include "proto/fields.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kTicketKey = "ticket_key";
constexpr absl::string_view kNodePrefix = "node/";
constexpr size_t kTicketKeyBytes = 32;
constexpr int64_t kNanosPerMs = 1'000'000;
constexpr size_t kNodeTextBytesMax = 255;
constexpr size_t kTiersMax = 16;
// Steps under the mutex: about 0.3 us an object, so that a lookup waits 0.1 ms for one.
constexpr size_t kObjectsPerStep = 256;
constexpr size_t kReservationsPerStep = 64;

absl::Status CheckText(absl::string_view field, const std::string& text, size_t bytes_max) {
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat(field, " is missing"));
  if (text.size() <= bytes_max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", text.size(), " bytes long; at most ", bytes_max));
}

absl::Status CheckTenant(const std::string& tenant) {
  return CheckText("tenant", tenant, kTicketTextBytesMax);
}

absl::Status CheckNode(const NodeDescription& node) {
  OKV_RETURN_IF_ERROR(CheckText("node_id", node.node_id, kNodeTextBytesMax));
  OKV_RETURN_IF_ERROR(CheckText("data_address", node.data_address, kNodeTextBytesMax));
  if (node.metrics_address.size() > kNodeTextBytesMax) {
    return CheckText("metrics_address", node.metrics_address, kNodeTextBytesMax);
  }
  if (node.tiers.size() <= kTiersMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(node.tiers.size(), " tiers; at most ", kTiersMax));
}

std::string EncodeNode(const NodeDescription& node) {
  std::string bytes;
  FieldWriter writer(&bytes);
  writer.Bytes(1, node.data_address);
  writer.Bytes(2, node.metrics_address);
  return bytes;
}

// The announcement fits its format: a writer's bug is told before a byte moves.
absl::Status CheckAnnouncement(const ObjectAnnouncement& object, const PageLayout& layout) {
  if (object.parent.has_value() != (object.index.value() > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("block ", object.index.value(),
                     object.parent.has_value() ? " has a" : " lacks its", " parent"));
  }
  const size_t expected = layout.block_bytes(object.id.codec);
  if (object.payload_bytes == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("payload_bytes is ", object.payload_bytes, "; a ",
                                                 CodecName(object.id.codec), " block of the format",
                                                 " has ", expected));
}

PlacementAnswer Refusal(absl::Status status) {
  PlacementAnswer answer;
  answer.status = std::move(status);
  return answer;
}

}  // namespace

absl::Status ControlOptions::Validate() const {
  if (heartbeat_interval_ms == 0) {
    return absl::InvalidArgumentError("heartbeat_interval_ms must be positive");
  }
  if (node_timeout_ms / 2 < heartbeat_interval_ms) {
    return absl::InvalidArgumentError("node_timeout_ms must be at least two heartbeat intervals");
  }
  if (reservation_timeout_ms == 0) {
    return absl::InvalidArgumentError("reservation_timeout_ms must be positive");
  }
  if (ticket_lifetime_s == 0) {
    return absl::InvalidArgumentError("ticket_lifetime_s must be positive");
  }
  if (nodes_max == 0) return absl::InvalidArgumentError("nodes_max must be positive");
  if (reservations_max == 0) return absl::InvalidArgumentError("reservations_max must be positive");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Control>> Control::Create(const ControlOptions& options,
                                                         State* state, const Clock* clock) {
  OKV_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<Control> control = absl::WrapUnique(new Control(options, state, clock));
  OKV_RETURN_IF_ERROR(control->Load());
  return control;
}

absl::Status Control::Load() {
  OKV_ASSIGN_OR_RETURN(rotations_, RotationRegistry::Open(state_, clock_));
  OKV_ASSIGN_OR_RETURN(ids_, IdAllocator::Open(state_));
  absl::StatusOr<std::string> key = state_->Get(kTicketKey);
  if (absl::IsNotFound(key.status())) {
    std::string fresh(kTicketKeyBytes, '\0');
    OKV_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(fresh.data()), kTicketKeyBytes) == 1);
    OKV_RETURN_IF_ERROR(state_->Put(kTicketKey, fresh));
    key = fresh;
  }
  OKV_RETURN_IF_ERROR(key.status());
  if (key->size() != kTicketKeyBytes) {
    return absl::DataLossError(absl::StrCat("state: the ticket key has ", key->size(), " bytes"));
  }
  ticket_key_ = *std::move(key);

  OKV_ASSIGN_OR_RETURN(const auto nodes, state_->List(kNodePrefix));
  FairMutexLock lock(&mu_);
  for (const auto& [name, bytes] : nodes) {
    FieldReader reader(bytes);
    NodeDescription node;
    node.node_id = name.substr(kNodePrefix.size());
    node.data_address = std::string(reader.Bytes(1, kNodeTextBytesMax));
    node.metrics_address = std::string(reader.Bytes(2, kNodeTextBytesMax));
    if (!reader.done()) return absl::DataLossError(absl::StrCat("state: '", name, "' is damaged"));
    nodes_.AddKnown(node, clock_->NowNanos());
  }
  return LoadDrains();
}

ScopeId Control::Scope(const std::string& tenant, const FormatId& format_id) {
  const ScopeId next(static_cast<uint32_t>(scopes_.size()));
  return scopes_.try_emplace({tenant, format_id}, next).first->second;
}

absl::StatusOr<Session> Control::OpenSession(const std::string& tenant, const std::string& format) {
  OKV_RETURN_IF_ERROR(CheckTenant(tenant));
  OKV_ASSIGN_OR_RETURN(const FormatId id, rotations_->RegisterFormat(format));
  const int64_t expires = clock_->WallMicros() + int64_t{options_.ticket_lifetime_s} * 1'000'000;
  const Ticket ticket = {.tenant = tenant, .format_id = id, .expires_wall_us = expires};
  return Session{.format_id = id,
                 .ticket = SealTicket(ticket, ticket_key_),
                 .ticket_expires_wall_us = expires,
                 // Never empty, so no two tenants share a key.
                 .tenant_salt = tenant};
}

absl::StatusOr<LookupAnswer> Control::Lookup(const std::string& tenant, const FormatId& format_id,
                                             absl::Span<const BlockKey> keys) {
  OKV_RETURN_IF_ERROR(CheckTenant(tenant));
  OKV_ASSIGN_OR_RETURN(const Format* format, rotations_->FindFormat(format_id));
  const PrefixWindows windows = {.sink_blocks = format->sink_blocks(),
                                 .recent_blocks = format->recent_blocks()};
  LookupAnswer answer;
  FairMutexLock lock(&mu_);
  const auto scope = scopes_.find({tenant, format_id});
  if (scope == scopes_.end()) return answer;
  const PrefixMatch match = index_.Match(scope->second, keys, windows);
  answer.prefix_blocks = match.prefix_blocks;
  answer.resume_boundary = match.resume_boundary;
  answer.locations.reserve(match.locations.size());
  absl::flat_hash_map<NodeSlot, uint32_t> places;
  for (const ObjectLocation& location : match.locations) {
    const auto [place, is_new] =
        places.try_emplace(location.node, static_cast<uint32_t>(answer.nodes.size()));
    if (is_new) {
      const NodeDescription& node = nodes_.at(location.node).description;
      answer.nodes.push_back({.node_id = node.node_id, .data_address = node.data_address});
    }
    answer.locations.push_back(
        {.block = location.block, .codec = location.codec, .node = place->second});
  }
  return answer;
}

std::vector<NodeSlot> Control::PreferredNodes(const ScopedObject& object,
                                              const std::optional<BlockKey>& parent) const {
  std::vector<NodeSlot> preferred;
  const BlockKey* const keys[] = {&object.id.key, parent.has_value() ? &*parent : nullptr};
  for (const BlockKey* key : keys) {
    if (key == nullptr) continue;
    for (const Codec codec : kCodecs) {
      const ObjectId id = {.key = *key, .codec = codec};
      for (const NodeSlot node : index_.Find(object.scope, id)) preferred.push_back(node);
      const PendingWrite* open =
          reservations_.Find({.scope = object.scope, .id = id}, clock_->NowNanos());
      if (open != nullptr) preferred.push_back(open->node);
    }
  }
  return preferred;
}

PlacementAnswer Control::Grant(const PendingWrite& reservation) const {
  const NodeDescription& node = nodes_.at(reservation.node).description;
  const int64_t left_us = (reservation.expires_nanos - clock_->NowNanos()) / 1000;
  PlacementAnswer answer;
  answer.node = {.node_id = node.node_id, .data_address = node.data_address};
  answer.write_id = reservation.write_id;
  answer.expires_wall_us = clock_->WallMicros() + std::max<int64_t>(0, left_us);
  return answer;
}

bool Control::Release(const ScopedObject& object, PendingWrite* released) {
  if (!reservations_.Take(object, released)) return false;
  nodes_.at(released->node).reserved_bytes -= released->payload_bytes;
  return true;
}

absl::StatusOr<PlacementAnswer> Control::ReserveOne(const ScopedObject& object,
                                                    const Writer& writer,
                                                    const ObjectAnnouncement& announcement,
                                                    absl::Span<const NodeSlot> avoid) {
  if (IsStored(object, writer)) {
    return Refusal(absl::AlreadyExistsError("the object is stored"));
  }
  const int64_t now = clock_->NowNanos();
  const int64_t lifetime = options_.reservation_timeout_ms * kNanosPerMs;
  if (const PendingWrite* open = reservations_.Find(object, now); open != nullptr) {
    const bool node_takes_it = nodes_.at(open->node).takes_puts() &&
                               std::find(avoid.begin(), avoid.end(), open->node) == avoid.end();
    if (node_takes_it && open->write_group != writer.group) {
      return Refusal(absl::AbortedError("another writer has reserved the object"));
    }
    if (node_takes_it) {
      if (open->expires_nanos - now < lifetime / 2) reservations_.Extend(object, now + lifetime);
      return Grant(*open);
    }
  }
  // Expired, or on a node that is gone or takes nothing: nobody can commit it any more.
  PendingWrite lost;
  Release(object, &lost);
  if (nodes_.alive_count() == 0) return Refusal(absl::UnavailableError("no node is alive"));
  if (reservations_.size() >= options_.reservations_max) {
    return Refusal(absl::ResourceExhaustedError("too many open reservations"));
  }
  const std::optional<NodeSlot> slot =
      PlaceObject(nodes_, PreferredNodes(object, announcement.parent), object.id.key,
                  announcement.payload_bytes, avoid);
  if (!slot.has_value()) {
    return Refusal(absl::ResourceExhaustedError(
        absl::StrCat("no node has ", announcement.payload_bytes, " bytes free")));
  }
  OKV_ASSIGN_OR_RETURN(const uint64_t write_id, ids_->Next());
  const PendingWrite reservation = {.write_group = writer.group,
                                    .write_id = WriteId(write_id),
                                    .node = *slot,
                                    .payload_bytes = announcement.payload_bytes,
                                    .expires_nanos = now + lifetime};
  reservations_.Add(object, reservation);
  nodes_.at(*slot).reserved_bytes += announcement.payload_bytes;
  return Grant(reservation);
}

absl::StatusOr<std::vector<PlacementAnswer>> Control::Reserve(
    const std::string& tenant, const FormatId& format_id, const std::string& write_group,
    absl::Span<const ObjectAnnouncement> objects) {
  return ReserveFor({.group = write_group}, tenant, format_id, objects);
}

absl::StatusOr<std::vector<PlacementAnswer>> Control::ReserveFor(
    const Writer& writer, const std::string& tenant, const FormatId& format_id,
    absl::Span<const ObjectAnnouncement> objects) {
  OKV_RETURN_IF_ERROR(CheckTenant(tenant));
  OKV_RETURN_IF_ERROR(CheckText("write_group", writer.group, kTicketTextBytesMax));
  OKV_ASSIGN_OR_RETURN(const Format* format, rotations_->FindFormat(format_id));
  const PageLayout layout = PageLayout::Of(*format);
  for (const ObjectAnnouncement& object : objects) {
    OKV_RETURN_IF_ERROR(CheckAnnouncement(object, layout));
  }
  std::vector<PlacementAnswer> answers;
  answers.reserve(objects.size());
  while (answers.size() < objects.size()) {
    const size_t end = std::min(objects.size(), answers.size() + kReservationsPerStep);
    FairMutexLock lock(&mu_);
    const ScopeId scope = Scope(tenant, format_id);
    OKV_ASSIGN_OR_RETURN(const std::vector<NodeSlot> avoid, Avoided(writer));
    while (answers.size() < end) {
      const ObjectAnnouncement& object = objects[answers.size()];
      OKV_ASSIGN_OR_RETURN(PlacementAnswer answer,
                           ReserveOne({.scope = scope, .id = object.id}, writer, object, avoid));
      answers.push_back(std::move(answer));
    }
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].status.ok()) continue;
    const Reservation reservation = {.tenant = tenant,
                                     .format_id = format_id,
                                     .object = objects[i].id,
                                     .node_id = answers[i].node.node_id,
                                     .write_id = answers[i].write_id,
                                     .expires_wall_us = answers[i].expires_wall_us};
    answers[i].reservation = SealReservation(reservation, ticket_key_);
  }
  return answers;
}

absl::Status Control::StoreNode(const NodeDescription& description) {
  {
    FairMutexLock lock(&mu_);
    const NodeState* known = nodes_.Find(description.node_id);
    if (known != nullptr && EncodeNode(known->description) == EncodeNode(description)) {
      return absl::OkStatus();
    }
    if (known == nullptr && nodes_.nodes().size() >= options_.nodes_max) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "node '", description.node_id, "': ", options_.nodes_max, " nodes are known already"));
    }
  }
  return state_->Put(absl::StrCat(kNodePrefix, description.node_id), EncodeNode(description));
}

absl::StatusOr<NodeRegistration> Control::RegisterNode(const NodeDescription& description) {
  OKV_RETURN_IF_ERROR(CheckNode(description));
  OKV_RETURN_IF_ERROR(StoreNode(description));
  NodeRegistration registration;
  registration.ticket_key = ticket_key_;
  {
    FairMutexLock lock(&mu_);
    // Under the mutex: of two registrations the later one has the higher epoch.
    OKV_ASSIGN_OR_RETURN(registration.epoch, ids_->Next());
    NodeState* node = nodes_.Register(description, registration.epoch, clock_->NowNanos());
    // The inventory that follows says what it holds.
    if (node->holder.has_value()) index_.Drop(*node->holder);
    if (node->inventory.has_value()) index_.Drop(*node->inventory);
    node->inventory.reset();
    node->holder = index_.AddHolder(node->slot);
    index_.Show(*node->holder);
  }
  CollectGarbage();
  return registration;
}

bool Control::Heartbeat(const NodeEpoch& node, std::vector<TierState> tiers) {
  FairMutexLock lock(&mu_);
  const absl::StatusOr<NodeState*> found = nodes_.FindCurrent(node.node_id, node.epoch);
  if (!found.ok()) return false;
  (*found)->heartbeat_nanos = clock_->NowNanos();
  (*found)->description.tiers = std::move(tiers);
  (*found)->committed_bytes = 0;
  return true;
}

void Control::RecordAdded(NodeState* node, const ObjectAnnouncement& object) {
  const ScopeId scope = Scope(object.tenant, object.format_id);
  const IndexedObject indexed = {
      .scope = scope, .id = object.id, .payload_bytes = object.payload_bytes};
  index_.Add(*node->holder, indexed);
  if (node->inventory.has_value()) index_.Add(*node->inventory, indexed);
  const ScopedObject scoped = {.scope = scope, .id = object.id};
  const PendingWrite* open = reservations_.Find(scoped, clock_->NowNanos());
  // A copy that another node reports leaves a write that is under way alone.
  if (open == nullptr || open->node != node->slot) return;
  PendingWrite committed;
  Release(scoped, &committed);
  node->committed_bytes += committed.payload_bytes;
}

absl::Status Control::ReportCommits(const NodeEpoch& node,
                                    absl::Span<const ObjectAnnouncement> added,
                                    absl::Span<const ObjectId> removed) {
  while (!added.empty() || !removed.empty()) {
    const auto adding = added.subspan(0, kObjectsPerStep);
    const auto removing = removed.subspan(0, kObjectsPerStep);
    added.remove_prefix(adding.size());
    removed.remove_prefix(removing.size());
    FairMutexLock lock(&mu_);
    OKV_ASSIGN_OR_RETURN(NodeState * state, nodes_.FindCurrent(node.node_id, node.epoch));
    state->heartbeat_nanos = clock_->NowNanos();
    for (const ObjectAnnouncement& object : adding) RecordAdded(state, object);
    for (const ObjectId& id : removing) {
      index_.Remove(*state->holder, id);
      if (state->inventory.has_value()) index_.Remove(*state->inventory, id);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Control::BeginInventory(const NodeEpoch& node) {
  FairMutexLock lock(&mu_);
  OKV_ASSIGN_OR_RETURN(NodeState * state, nodes_.FindCurrent(node.node_id, node.epoch));
  OKV_ASSIGN_OR_RETURN(state->inventory_id, ids_->Next());
  if (state->inventory.has_value()) index_.Drop(*state->inventory);
  state->inventory = index_.AddHolder(state->slot);
  state->heartbeat_nanos = clock_->NowNanos();
  return state->inventory_id;
}

absl::StatusOr<NodeState*> Control::FindInventory(const NodeEpoch& node, uint64_t inventory) {
  OKV_ASSIGN_OR_RETURN(NodeState * state, nodes_.FindCurrent(node.node_id, node.epoch));
  if (state->inventory.has_value() && state->inventory_id == inventory) return state;
  return absl::AbortedError(
      absl::StrCat("node '", node.node_id, "': another inventory began in the meantime"));
}

absl::Status Control::AddInventory(const NodeEpoch& node, uint64_t inventory,
                                   absl::Span<const ObjectAnnouncement> objects) {
  while (!objects.empty()) {
    const auto adding = objects.subspan(0, kObjectsPerStep);
    objects.remove_prefix(adding.size());
    FairMutexLock lock(&mu_);
    OKV_ASSIGN_OR_RETURN(NodeState * state, FindInventory(node, inventory));
    state->heartbeat_nanos = clock_->NowNanos();
    for (const ObjectAnnouncement& object : adding) {
      index_.Add(*state->inventory, {.scope = Scope(object.tenant, object.format_id),
                                     .id = object.id,
                                     .payload_bytes = object.payload_bytes});
    }
  }
  return absl::OkStatus();
}

absl::Status Control::EndInventory(const NodeEpoch& node, uint64_t inventory) {
  {
    FairMutexLock lock(&mu_);
    OKV_ASSIGN_OR_RETURN(NodeState * state, FindInventory(node, inventory));
    index_.Drop(*state->holder);
    index_.Show(*state->inventory);
    state->holder = state->inventory;
    state->inventory.reset();
    state->heartbeat_nanos = clock_->NowNanos();
  }
  CollectGarbage();
  return absl::OkStatus();
}

void Control::AbandonInventory(const NodeEpoch& node, uint64_t inventory) {
  {
    FairMutexLock lock(&mu_);
    const absl::StatusOr<NodeState*> state = FindInventory(node, inventory);
    if (!state.ok()) return;
    index_.Drop(*(*state)->inventory);
    (*state)->inventory.reset();
  }
  CollectGarbage();
}

void Control::CollectGarbage() {
  for (bool more = true; more;) {
    FairMutexLock lock(&mu_);
    more = index_.Collect(kObjectsPerStep);
  }
}

void Control::Sweep() {
  {
    FairMutexLock lock(&mu_);
    const int64_t now = clock_->NowNanos();
    for (const NodeSlot slot : nodes_.Expire(now - options_.node_timeout_ms * kNanosPerMs)) {
      NodeState& node = nodes_.at(slot);
      index_.Drop(*node.holder);
      node.holder.reset();
      if (node.inventory.has_value()) index_.Drop(*node.inventory);
      node.inventory.reset();
    }
    for (const PendingWrite& expired : reservations_.Expire(now)) {
      nodes_.at(expired.node).reserved_bytes -= expired.payload_bytes;
    }
  }
  CollectGarbage();
}

ClusterStatus Control::Status() const {
  ClusterStatus status;
  status.formats_count = rotations_->formats_count();
  status.rotations_count = rotations_->rotations_count();
  FairMutexLock lock(&mu_);
  for (const NodeState& node : nodes_.nodes()) {
    ClusterStatus::Node entry;
    entry.state = node;
    entry.heartbeat_age_ms = (clock_->NowNanos() - node.heartbeat_nanos) / kNanosPerMs;
    entry.objects_count = node.holder ? index_.holder_objects_count(*node.holder) : 0;
    entry.objects_bytes = node.holder ? index_.holder_objects_bytes(*node.holder) : 0;
    status.nodes.push_back(std::move(entry));
  }
  status.objects_count = index_.objects_count();
  status.reservations_count = reservations_.size();
  return status;
}

}  // namespace okv
