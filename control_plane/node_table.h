#ifndef OKV_CONTROL_PLANE_NODE_TABLE_H_
#define OKV_CONTROL_PLANE_NODE_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control_plane/prefix_index.h"

namespace okv {

struct TierState {
  std::string tier;
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t objects_count = 0;
};

struct NodeState {
  NodeSlot slot;
  std::string node_id;
  std::string data_address;
  std::string metrics_address;
  uint64_t epoch = 0;
  int64_t heartbeat_nanos = 0;  // Clock::NowNanos() of the last sign of life.
  bool alive = false;
  uint64_t reserved_bytes = 0;  // Open reservations.
  std::vector<TierState> tiers;

  // What may still be placed here: the free bytes of all tiers less what is promised.
  uint64_t FreeBytes() const;
};

// Who the nodes are and which of them live. Thread-compatible: the control plane guards it.
class NodeTable {
 public:
  // A node (again): a new epoch, alive. What an older process of the same id says from now on is
  // refused.
  NodeState* Register(const NodeState& description, int64_t now_nanos);

  // The node of that id and epoch. kAborted when it is not known, was given up, or registered anew
  // since: the caller registers again.
  absl::StatusOr<NodeState*> FindCurrent(const std::string& node_id, uint64_t epoch);

  // Marks nodes without a sign of life since `deadline_nanos` dead and returns them.
  std::vector<NodeSlot> Expire(int64_t deadline_nanos);

  // REQUIRES: given by Register.
  NodeState& at(NodeSlot slot) { return nodes_[slot.value()]; }
  const NodeState& at(NodeSlot slot) const { return nodes_[slot.value()]; }
  const std::vector<NodeState>& nodes() const { return nodes_; }

 private:
  std::vector<NodeState> nodes_;  // By slot. A node that comes back keeps its slot.
  absl::flat_hash_map<std::string, NodeSlot> slots_;
  uint64_t next_epoch_ = 1;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_NODE_TABLE_H_
