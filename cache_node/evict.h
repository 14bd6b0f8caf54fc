#ifndef OKV_CACHE_NODE_EVICT_H_
#define OKV_CACHE_NODE_EVICT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache_node/block_table.h"
#include "cache_node/node_metrics.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "cache_node/tiers/rocksdb_tier.h"

namespace okv {

// Keeps the disk tier below its limit and above the floor of free space. The coldest objects of the
// node leave it, children before their parents, until the groups they were in are empty. A group's
// file gives its space back only as a whole: where few are empty, those with the least alive are
// chosen, and what is alive in them moves to a new group first.
// Owned by the spill thread, and by whoever spills after it.
class Evictor {
 public:
  struct Parts {
    RocksdbTier* disk;
    BlockTable* table;
    NodeMetrics* metrics;
    // kDataLoss when the payload is not what the header says.
    std::function<absl::Status(const HeldObject& object, absl::Span<const uint8_t> payload)> verify;
    // Damaged on disk.
    std::function<void(ObjectPin pin, const absl::Status& why)> quarantine;
    // Evicted, for the control plane: kResourceExhausted says why.
    std::function<void(const ObjectId& id, const absl::Status& why)> on_removed;
  };
  // REQUIRES: the parts outlive it.
  explicit Evictor(const Parts& parts) : parts_(parts) {}

  // Evicts until the disk tier has room for `bytes` and, beside them, for one more group, which
  // moving warm objects takes; with 0 and 0, until limit and floor hold. kResourceExhausted when
  // nothing more can go, be it that all of it has children in memory; other errors are the disk's.
  // Blocks on the disk.
  absl::Status MakeRoom(uint64_t bytes, uint64_t group_bytes);
  // For a node that cannot spill: the coldest of what memory holds leave the node, children before
  // their parents, up to `bytes` of payload. Returns how much left memory, 0 when nothing may go.
  uint64_t DropFromMemory(uint64_t bytes);

 private:
  struct Plan {
    std::vector<uint32_t> groups;
    std::vector<ColdObject> cold;  // To leave the node, children first.
  };
  // Groups that free about `goal_bytes` when a beginning of `cold` goes; what stays of them takes
  // at most `room_bytes` meanwhile.
  Plan Choose(std::vector<ColdObject> cold, uint64_t goal_bytes, uint64_t room_bytes);
  absl::Status Drop(const Plan& plan, uint64_t group_bytes, NodeMetrics::Eviction reason);
  // Those of `cold` that still may leave the node. Returns their payload bytes that memory had.
  // When the disk fails, what is on it stays, and is served; *removed says why.
  uint64_t Leave(std::vector<ColdObject> cold, NodeMetrics::Eviction reason, absl::Status* removed);
  // Why the disk tier has not `bytes` more.
  NodeMetrics::Eviction ReasonFor(uint64_t bytes) const;
  struct Moves {
    uint64_t objects_count = 0;
    absl::Status unread;  // Of the last that the disk did not give.
  };
  // Writes what is left in the plan's groups into new ones. What cannot be read stays where it is,
  // and its group with it: the disk's error when that is all.
  absl::Status Move(const std::vector<uint32_t>& groups, uint64_t group_bytes);
  absl::Status MoveSome(std::vector<ObjectPin> pins, Moves* moves);
  // The verified payload, from DRAM or in a new one of `buffers`. kDataLoss: no copy is right.
  absl::StatusOr<absl::Span<const uint8_t>> Whole(const ObjectPin& pin,
                                                  std::vector<AlignedBuffer>* buffers) const;

  const Parts parts_;
  // Groups that did not go although all that is known of them did, or that cannot be read: a
  // restart sorts them out.
  absl::flat_hash_set<uint32_t> stuck_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_EVICT_H_
