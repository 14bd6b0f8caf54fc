#ifndef OKV_CONTROL_PLANE_PREFIX_INDEX_H_
#define OKV_CONTROL_PLANE_PREFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "proto/ids.h"

namespace okv {

// A node's place in the index's tables; given by NodeTable, never reused while the process lives.
using NodeSlot = StrongInt<struct NodeSlotTag, uint32_t>;
// One (tenant, format): what is recorded under one scope is invisible under any other.
using ScopeId = StrongInt<struct ScopeIdTag, uint32_t>;

struct IndexedObject {
  ScopeId scope;
  ObjectId id;
  uint64_t payload_bytes = 0;
};

struct PrefixMatch {
  uint32_t prefix_blocks = 0;    // Blocks 0..n-1 are held: sink as bf16, the others as int2.
  uint32_t resume_boundary = 0;  // The last exact resume point; 0 = none.
};

struct PrefixWindows {
  uint32_t sink_blocks;    // S
  uint32_t recent_blocks;  // W
};

// Which node holds which object: soft state, rebuilt from what nodes report. Thread-compatible: the
// control plane guards it.
class PrefixIndex {
 public:
  using Nodes = absl::InlinedVector<NodeSlot, 2>;

  // Records that `node` holds the object. Idempotent.
  void Add(NodeSlot node, const IndexedObject& object);
  // Forgets it. Idempotent.
  void Remove(NodeSlot node, const ObjectId& id);
  // Forgets all that `node` holds: O(objects of that node).
  void RemoveNode(NodeSlot node);

  // Nodes that hold the object under `scope`; null when there is none.
  const Nodes* Find(ScopeId scope, const ObjectId& id) const;

  // How far the chain `keys` (block 0 first) is held. O(blocks that match).
  PrefixMatch Match(ScopeId scope, absl::Span<const BlockKey> keys,
                    const PrefixWindows& windows) const;

  size_t objects_count() const { return objects_.size(); }
  size_t node_objects_count(NodeSlot node) const;
  uint64_t node_objects_bytes(NodeSlot node) const;

 private:
  struct Entry {
    ScopeId scope;
    uint64_t payload_bytes;
    Nodes nodes;
  };
  struct NodeObjects {
    absl::flat_hash_set<ObjectId> ids;
    uint64_t bytes = 0;
  };

  absl::flat_hash_map<ObjectId, Entry> objects_;
  absl::flat_hash_map<NodeSlot, NodeObjects> nodes_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_PREFIX_INDEX_H_
