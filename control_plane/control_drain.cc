#include <algorithm>

#include "absl/strings/str_cat.h"
#include "control_plane/control.h"
#include "proto/fields.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

// The control plane's part of draining a node.
namespace okv {
namespace {

constexpr absl::string_view kDrainPrefix = "drain/";

std::string EncodeDrain(const DrainRequest& order) {
  std::string bytes;
  FieldWriter writer(&bytes);
  writer.U64(1, order.id);
  writer.U64(2, order.limit_ms);
  return bytes;
}

}  // namespace

absl::Status Control::LoadDrains() {
  OKV_ASSIGN_OR_RETURN(const auto drains, state_->List(kDrainPrefix));
  for (const auto& [name, bytes] : drains) {
    FieldReader reader(bytes);
    const DrainRequest order = {.id = reader.U64(1), .limit_ms = reader.U64(2)};
    if (!reader.done()) return absl::DataLossError(absl::StrCat("state: '", name, "' is damaged"));
    NodeState* node = nodes_.Find(name.substr(kDrainPrefix.size()));
    if (node != nullptr) node->drain = order;
  }
  return absl::OkStatus();
}

absl::Status Control::StoreDrain(const std::string& node_id, const DrainRequest& order) {
  {
    FairMutexLock lock(&mu_);
    if (nodes_.Find(node_id) == nullptr) {
      return absl::NotFoundError(absl::StrCat("no node '", node_id, "' is known"));
    }
  }
  // Two orders at once: the last one on disk is the last one here.
  MutexLock in_order(&drain_orders_mu_);
  OKV_RETURN_IF_ERROR(state_->Put(absl::StrCat(kDrainPrefix, node_id), EncodeDrain(order)));
  FairMutexLock lock(&mu_);
  NodeState* node = nodes_.Find(node_id);
  node->drain = order;
  node->drain_report = {};
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Control::DrainNode(const std::string& node_id, uint64_t limit_ms) {
  OKV_ASSIGN_OR_RETURN(const uint64_t id, ids_->Next());
  OKV_RETURN_IF_ERROR(StoreDrain(node_id, {.id = id, .limit_ms = limit_ms}));
  return id;
}

absl::Status Control::CancelDrain(const std::string& node_id) { return StoreDrain(node_id, {}); }

DrainRequest Control::ExchangeDrain(const NodeEpoch& node, const DrainReport& progress) {
  FairMutexLock lock(&mu_);
  const absl::StatusOr<NodeState*> found = nodes_.FindCurrent(node.node_id, node.epoch);
  if (!found.ok()) return {};
  // What it says of an earlier order is of no interest.
  if (progress.id == (*found)->drain.id) (*found)->drain_report = progress;
  return (*found)->drain;
}

absl::StatusOr<std::vector<NodeSlot>> Control::Avoided(const Writer& writer) {
  std::vector<NodeSlot> avoid;
  if (!writer.moves_from.has_value()) return avoid;
  const NodeEpoch& node = writer.moves_from->node;
  OKV_ASSIGN_OR_RETURN(const NodeState* source, nodes_.FindCurrent(node.node_id, node.epoch));
  if (!source->draining()) {
    return absl::FailedPreconditionError(
        absl::StrCat("node '", node.node_id, "' is not being drained"));
  }
  for (const std::string& node_id : writer.moves_from->avoid_node_ids) {
    if (const NodeState* other = nodes_.Find(node_id)) avoid.push_back(other->slot);
  }
  return avoid;
}

bool Control::IsStored(const ScopedObject& object, const Writer& writer) const {
  const auto holders = index_.Find(object.scope, object.id);
  if (!writer.moves_from.has_value()) return !holders.empty();
  for (const NodeSlot slot : holders) {
    if (!nodes_.at(slot).draining()) return true;
  }
  return false;
}

absl::StatusOr<std::vector<PlacementAnswer>> Control::ReserveMoves(
    const MoveSource& source, const std::string& tenant, const FormatId& format_id,
    absl::Span<const ObjectAnnouncement> objects) {
  return ReserveFor({.group = absl::StrCat("drain of ", source.node.node_id), .moves_from = source},
                    tenant, format_id, objects);
}

}  // namespace okv
