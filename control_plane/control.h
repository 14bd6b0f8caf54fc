#ifndef OKV_CONTROL_PLANE_CONTROL_H_
#define OKV_CONTROL_PLANE_CONTROL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "control_plane/node_table.h"
#include "control_plane/prefix_index.h"
#include "control_plane/reservations.h"
#include "control_plane/rotation_registry.h"
#include "control_plane/state.h"
#include "proto/clock.h"
#include "proto/mutex.h"
#include "proto/ticket.h"

namespace okv {

struct ControlOptions {
  uint32_t heartbeat_interval_ms = 1000;
  uint32_t node_timeout_ms = 5000;  // Without a heartbeat a node is given up.
  uint32_t reservation_timeout_ms = 30000;
  uint32_t ticket_lifetime_s = 3600;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// An object as nodes report it and writers announce it.
struct ObjectAnnouncement {
  FormatId format_id;
  std::string tenant;
  ObjectId id;
  std::optional<BlockKey> parent;
  BlockIndex index;
  uint64_t payload_bytes = 0;
};

struct Session {
  FormatId format_id;
  std::string ticket;
  int64_t ticket_expires_wall_us = 0;
  std::string tenant_salt;
};

struct NodeAddressInfo {
  std::string node_id;
  std::string data_address;
};

struct LookupAnswer {
  PrefixMatch match;
  struct Block {
    std::vector<uint32_t> int2_nodes;  // Indexes into nodes.
    std::vector<uint32_t> bf16_nodes;
  };
  std::vector<Block> blocks;
  std::vector<NodeAddressInfo> nodes;
};

struct PlacementAnswer {
  absl::Status status;  // OK: write it. Otherwise as control.proto's Placement.code says.
  NodeAddressInfo node;
  WriteId write_id;
  std::string reservation;
};

struct NodeRegistration {
  uint64_t epoch;
  std::string ticket_key;
};

struct ClusterStatus {
  struct Node {
    NodeState state;
    int64_t heartbeat_age_ms;
    uint64_t objects_count;
    uint64_t objects_bytes;
  };
  std::vector<Node> nodes;
  uint64_t objects_count = 0;
  uint64_t formats_count = 0;
  uint64_t rotations_count = 0;
  uint64_t reservations_count = 0;
};

// The control plane without its wire: sessions, the index, placement, reservations, nodes. What
// nodes hold is theirs to say; the index is rebuilt from their inventories. Thread-safe.
class Control {
 public:
  // `state` and `clock` outlive it. Errors as the state's.
  static absl::StatusOr<std::unique_ptr<Control>> Create(const ControlOptions& options,
                                                         State* state, const Clock* clock);

  // Errors as RotationRegistry::RegisterFormat; kInvalidArgument for an empty tenant.
  absl::StatusOr<Session> OpenSession(const std::string& tenant, const std::string& format);

  // kFailedPrecondition: the format has no session.
  absl::StatusOr<LookupAnswer> Lookup(const std::string& tenant, const FormatId& format_id,
                                      absl::Span<const BlockKey> keys);

  // One answer per object, in order. kFailedPrecondition: the format has no session.
  absl::StatusOr<std::vector<PlacementAnswer>> Reserve(
      const std::string& tenant, const FormatId& format_id, const std::string& write_group,
      absl::Span<const ObjectAnnouncement> objects);

  // kInvalidArgument: no node id or address.
  absl::StatusOr<NodeRegistration> RegisterNode(const NodeState& description);
  // False: not known (any more), register again.
  bool Heartbeat(const std::string& node_id, uint64_t epoch, std::vector<TierState> tiers);
  // Each: kAborted when (node_id, epoch) is not current.
  absl::Status BeginInventory(const std::string& node_id, uint64_t epoch);
  absl::Status ReportObjects(const std::string& node_id, uint64_t epoch,
                             absl::Span<const ObjectAnnouncement> added,
                             absl::Span<const ObjectId> removed);

  // Gives up silent nodes and expired reservations. Called every heartbeat interval.
  void Sweep();

  ClusterStatus Status() const;
  RotationRegistry* rotations() { return rotations_.get(); }
  const ControlOptions& options() const { return options_; }

 private:
  Control(const ControlOptions& options, State* state, const Clock* clock)
      : options_(options), state_(state), clock_(clock) {}
  absl::Status Load();
  absl::StatusOr<WriteId> NextWriteId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  ScopeId Scope(const std::string& tenant, const FormatId& format_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<PlacementAnswer> ReserveOne(ScopeId scope, const std::string& write_group,
                                             const ObjectAnnouncement& object)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  PlacementAnswer Grant(const ObjectAnnouncement& object, const PendingWrite& reservation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<NodeSlot> PreferredNodes(ScopeId scope, const ObjectAnnouncement& object) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<uint32_t> NodesOf(ScopeId scope, const ObjectId& id, LookupAnswer* answer,
                                absl::flat_hash_map<NodeSlot, uint32_t>* places) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Constant after construction.
  const ControlOptions options_;
  State* const state_;
  const Clock* const clock_;
  std::string ticket_key_;
  std::unique_ptr<RotationRegistry> rotations_;

  mutable Mutex mu_;
  NodeTable nodes_ ABSL_GUARDED_BY(mu_);
  PrefixIndex index_ ABSL_GUARDED_BY(mu_);
  Reservations reservations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::pair<std::string, FormatId>, ScopeId> scopes_ ABSL_GUARDED_BY(mu_);
  uint64_t next_write_id_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t write_ids_end_ ABSL_GUARDED_BY(mu_) = 0;  // Durable: ids below are given out or lost.
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_CONTROL_H_
