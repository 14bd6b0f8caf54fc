#include "control_plane/node_table.h"

#include "absl/strings/str_cat.h"

namespace okv {

uint64_t NodeState::FreeBytes() const {
  uint64_t free = 0;
  for (const TierState& tier : tiers) {
    if (tier.capacity_bytes > tier.used_bytes) free += tier.capacity_bytes - tier.used_bytes;
  }
  return free > reserved_bytes ? free - reserved_bytes : 0;
}

NodeState* NodeTable::Register(const NodeState& description, int64_t now_nanos) {
  const auto [found, is_new] =
      slots_.try_emplace(description.node_id, NodeSlot(static_cast<uint32_t>(nodes_.size())));
  if (is_new) nodes_.emplace_back();
  NodeState& node = nodes_[found->second.value()];
  const uint64_t reserved_bytes = node.reserved_bytes;
  node = description;
  node.slot = found->second;
  node.epoch = next_epoch_++;
  node.heartbeat_nanos = now_nanos;
  node.alive = true;
  node.reserved_bytes = reserved_bytes;
  return &node;
}

absl::StatusOr<NodeState*> NodeTable::FindCurrent(const std::string& node_id, uint64_t epoch) {
  const auto found = slots_.find(node_id);
  if (found == slots_.end()) {
    return absl::AbortedError(absl::StrCat("node '", node_id, "' is not registered"));
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

}  // namespace okv
