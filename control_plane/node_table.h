#ifndef OKV_CONTROL_PLANE_NODE_TABLE_H_
#define OKV_CONTROL_PLANE_NODE_TABLE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control_plane/prefix_index.h"
#include "proto/drain_report.h"

namespace okv {

struct TierState {
  std::string tier;
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;
  uint64_t objects_count = 0;
};

// What a node says of itself when it registers.
struct NodeDescription {
  std::string node_id;
  std::string data_address;
  std::string metrics_address;
  std::vector<TierState> tiers;
};

// What an operator asked of a node.
struct DrainRequest {
  uint64_t id = 0;  // 0: nothing.
  uint64_t limit_ms = 0;
};

struct NodeState {
  NodeSlot slot;
  NodeDescription description;
  uint64_t epoch = 0;           // 0: known from before, not registered since.
  int64_t heartbeat_nanos = 0;  // Clock::NowNanos() of the last sign of life.
  bool alive = false;
  uint64_t reserved_bytes = 0;   // Open reservations.
  uint64_t committed_bytes = 0;  // Committed since the last heartbeat, which does not count them.
  std::optional<HolderSlot> holder;     // Its list in the index; while alive.
  std::optional<HolderSlot> inventory;  // The list that will replace it, while it arrives.
  uint64_t inventory_id = 0;            // Which inventory that is.
  DrainRequest drain;
  DrainReport drain_report;

  bool draining() const { return drain.id != 0; }
  // May be given objects.
  bool takes_puts() const { return alive && !draining(); }

  // What may still be placed here: the free bytes of all tiers less what is promised.
  uint64_t FreeBytes() const;
};

// Who the nodes are and which of them live. A node keeps its slot for as long as this process
// lives. Thread-compatible: Control guards it.
class NodeTable {
 public:
  // A node that registered with an earlier control plane: dead until it registers again.
  void AddKnown(const NodeDescription& description, int64_t now_nanos);

  // A node (again): alive under `epoch`. What is said under an older epoch from now on is refused.
  // Its lists in the index are as before. REQUIRES: an epoch above all earlier ones.
  NodeState* Register(const NodeDescription& description, uint64_t epoch, int64_t now_nanos);

  // Null when no such node is known.
  const NodeState* Find(const std::string& node_id) const;
  NodeState* Find(const std::string& node_id) {
    return const_cast<NodeState*>(std::as_const(*this).Find(node_id));
  }

  // The node of that id and epoch. kAborted when it is not known, was given up, or registered anew
  // since: the caller registers again.
  absl::StatusOr<NodeState*> FindCurrent(const std::string& node_id, uint64_t epoch);

  // Marks nodes without a sign of life since `deadline_nanos` dead and returns them.
  std::vector<NodeSlot> Expire(int64_t deadline_nanos);

  // REQUIRES: a slot of this table.
  NodeState& at(NodeSlot slot) { return nodes_[slot.value()]; }
  const NodeState& at(NodeSlot slot) const { return nodes_[slot.value()]; }
  const std::vector<NodeState>& nodes() const { return nodes_; }  // By slot.
  size_t alive_count() const;

 private:
  NodeState* FindOrAdd(const std::string& node_id);

  std::vector<NodeState> nodes_;
  absl::flat_hash_map<std::string, NodeSlot> slots_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_NODE_TABLE_H_
