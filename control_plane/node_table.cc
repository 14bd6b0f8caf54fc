#include "control_plane/node_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace okv {

uint64_t NodeState::FreeBytes() const {
  uint64_t free = 0;
  for (const TierState& tier : description.tiers) {
    if (tier.capacity_bytes > tier.used_bytes) free += tier.capacity_bytes - tier.used_bytes;
  }
  const uint64_t promised = reserved_bytes + committed_bytes;
  return free > promised ? free - promised : 0;
}

NodeState* NodeTable::FindOrAdd(const std::string& node_id) {
  const auto [found, is_new] =
      slots_.try_emplace(node_id, NodeSlot(static_cast<uint32_t>(nodes_.size())));
  if (is_new) nodes_.emplace_back().slot = found->second;
  return &nodes_[found->second.value()];
}

void NodeTable::AddKnown(const NodeDescription& description, int64_t now_nanos) {
  NodeState* node = FindOrAdd(description.node_id);
  node->description = description;
  node->heartbeat_nanos = now_nanos;
}

NodeState* NodeTable::Register(const NodeDescription& description, uint64_t epoch,
                               int64_t now_nanos) {
  NodeState* node = FindOrAdd(description.node_id);
  node->description = description;
  node->epoch = epoch;
  node->heartbeat_nanos = now_nanos;
  node->alive = true;
  node->committed_bytes = 0;
  return node;
}

const NodeState* NodeTable::Find(const std::string& node_id) const {
  const auto found = slots_.find(node_id);
  return found == slots_.end() ? nullptr : &nodes_[found->second.value()];
}

absl::StatusOr<NodeState*> NodeTable::FindCurrent(const std::string& node_id, uint64_t epoch) {
  const auto found = slots_.find(node_id);
  if (found == slots_.end() || nodes_[found->second.value()].epoch == 0) {
    return absl::AbortedError(absl::StrCat("node '", node_id, "' is not registered: register"));
  }
  NodeState& node = nodes_[found->second.value()];
  if (node.epoch != epoch) {
    return absl::AbortedError(absl::StrCat("node '", node_id, "': epoch ", epoch,
                                           " is over, it registered again as ", node.epoch));
  }
  if (!node.alive) {
    return absl::AbortedError(absl::StrCat("node '", node_id, "' was given up: register again"));
  }
  return &node;
}

std::vector<NodeSlot> NodeTable::Expire(int64_t deadline_nanos) {
  std::vector<NodeSlot> dead;
  for (NodeState& node : nodes_) {
    if (!node.alive || node.heartbeat_nanos >= deadline_nanos) continue;
    node.alive = false;
    dead.push_back(node.slot);
  }
  return dead;
}

size_t NodeTable::alive_count() const {
  return static_cast<size_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [](const NodeState& n) { return n.alive; }));
}

}  // namespace okv
