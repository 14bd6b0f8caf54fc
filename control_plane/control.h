#ifndef OKV_CONTROL_PLANE_CONTROL_H_
#define OKV_CONTROL_PLANE_CONTROL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "control_plane/fair_mutex.h"
#include "control_plane/ids.h"
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
  // Above these a caller is told to back off.
  uint32_t nodes_max = 4096;
  uint32_t reservations_max = 1 << 20;  // About 250 B each.

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
  uint32_t prefix_blocks = 0;
  uint32_t resume_boundary = 0;
  struct Location {
    uint32_t block;  // Place in the chain: 0..max(prefix_blocks, resume_boundary)-1, ascending.
    Codec codec;
    uint32_t node;  // Index into nodes.
  };
  std::vector<Location> locations;
  std::vector<NodeAddressInfo> nodes;
};

struct PlacementAnswer {
  absl::Status status;  // OK: write it. Otherwise as control.proto's Placement.code says.
  NodeAddressInfo node;
  WriteId write_id;
  int64_t expires_wall_us = 0;
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

// Which node speaks, and under which registration.
struct NodeEpoch {
  std::string node_id;
  uint64_t epoch = 0;
};

// A node that is being drained and reserves places for what it holds.
struct MoveSource {
  NodeEpoch node;
  std::vector<std::string> avoid_node_ids;  // Not there.
};

// The control plane without its wire: sessions, the index, placement, reservations, nodes. What
// nodes hold is theirs to say; the index is rebuilt from their inventories.
//
// One mutex guards it all. It is held for a few hundred objects at a time, signing and reading
// messages happen outside, so a lookup waits for at most one such step. Thread-safe.
class Control {
 public:
  // `state` and `clock` outlive it. Errors as the state's; kDataLoss when what it holds is damaged.
  static absl::StatusOr<std::unique_ptr<Control>> Create(const ControlOptions& options,
                                                         State* state, const Clock* clock);

  // Errors as RotationRegistry::RegisterFormat; kInvalidArgument for a bad tenant.
  absl::StatusOr<Session> OpenSession(const std::string& tenant, const std::string& format);

  // kFailedPrecondition: the format has no session. kInvalidArgument for a bad tenant.
  absl::StatusOr<LookupAnswer> Lookup(const std::string& tenant, const FormatId& format_id,
                                      absl::Span<const BlockKey> keys) ABSL_LOCKS_EXCLUDED(mu_);

  // One answer per object, in order. The same write group gets the same place and write id again
  // while its reservation is open, and a new one when the node is gone.
  // kFailedPrecondition: the format has no session. kInvalidArgument: a bad tenant, write group,
  // parent or payload size. kUnavailable: the state cannot be written.
  absl::StatusOr<std::vector<PlacementAnswer>> Reserve(const std::string& tenant,
                                                       const FormatId& format_id,
                                                       const std::string& write_group,
                                                       absl::Span<const ObjectAnnouncement> objects)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The same for what a node that is being drained holds: copies on such nodes do not count as
  // stored. Also kAborted: the node is not registered under that epoch (any more);
  // kFailedPrecondition: it is not being drained.
  absl::StatusOr<std::vector<PlacementAnswer>> ReserveMoves(
      const MoveSource& source, const std::string& tenant, const FormatId& format_id,
      absl::Span<const ObjectAnnouncement> objects) ABSL_LOCKS_EXCLUDED(mu_);

  // kInvalidArgument: a bad id or address. kResourceExhausted: nodes_max. kUnavailable: the state
  // cannot be written.
  absl::StatusOr<NodeRegistration> RegisterNode(const NodeDescription& description)
      ABSL_LOCKS_EXCLUDED(mu_);
  // False: not known (any more), register again.
  bool Heartbeat(const NodeEpoch& node, std::vector<TierState> tiers) ABSL_LOCKS_EXCLUDED(mu_);

  // From now on nothing is placed on the node; its next heartbeat asks it to copy what only it
  // holds to others. Remembered over restarts. Returns the order's id, another one each time.
  // kNotFound: no such node. kUnavailable: the state cannot be written.
  absl::StatusOr<uint64_t> DrainNode(const std::string& node_id, uint64_t limit_ms)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Errors as DrainNode's.
  absl::Status CancelDrain(const std::string& node_id) ABSL_LOCKS_EXCLUDED(mu_);
  // A heartbeat's part: notes what the node says and returns what is asked of it.
  DrainRequest ExchangeDrain(const NodeEpoch& node, const DrainReport& progress)
      ABSL_LOCKS_EXCLUDED(mu_);

  // What a node has committed and dropped. All reports: kAborted when it is not registered under
  // that epoch (any more).
  absl::Status ReportCommits(const NodeEpoch& node, absl::Span<const ObjectAnnouncement> added,
                             absl::Span<const ObjectId> removed) ABSL_LOCKS_EXCLUDED(mu_);

  // An inventory arrives in parts between Begin and End; then it replaces, at once, what the index
  // knew of the node. Begin gives the number for the other calls, which answer kAborted once
  // another inventory of the node has begun. A broken one is abandoned and changes nothing.
  absl::StatusOr<uint64_t> BeginInventory(const NodeEpoch& node) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status AddInventory(const NodeEpoch& node, uint64_t inventory,
                            absl::Span<const ObjectAnnouncement> objects) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status EndInventory(const NodeEpoch& node, uint64_t inventory) ABSL_LOCKS_EXCLUDED(mu_);
  void AbandonInventory(const NodeEpoch& node, uint64_t inventory) ABSL_LOCKS_EXCLUDED(mu_);

  // Gives up silent nodes and expired reservations. Called every heartbeat interval.
  void Sweep() ABSL_LOCKS_EXCLUDED(mu_);

  ClusterStatus Status() const ABSL_LOCKS_EXCLUDED(mu_);
  RotationRegistry* rotations() { return rotations_.get(); }
  const ControlOptions& options() const { return options_; }

 private:
  Control(const ControlOptions& options, State* state, const Clock* clock)
      : options_(options), state_(state), clock_(clock) {}
  absl::Status Load() ABSL_LOCKS_EXCLUDED(mu_);
  // Remembers a node that is new or moved.
  absl::Status StoreNode(const NodeDescription& description) ABSL_LOCKS_EXCLUDED(mu_);
  ScopeId Scope(const std::string& tenant, const FormatId& format_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  struct Writer {
    std::string group;
    std::optional<MoveSource> moves_from = std::nullopt;
  };
  absl::StatusOr<std::vector<PlacementAnswer>> ReserveFor(
      const Writer& writer, const std::string& tenant, const FormatId& format_id,
      absl::Span<const ObjectAnnouncement> objects) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<PlacementAnswer> ReserveOne(const ScopedObject& object, const Writer& writer,
                                             const ObjectAnnouncement& announcement,
                                             absl::Span<const NodeSlot> avoid)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Where this writer's objects cannot go, whatever the nodes say. Errors as ReserveMoves'.
  absl::StatusOr<std::vector<NodeSlot>> Avoided(const Writer& writer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Somebody holds it whose copy counts.
  bool IsStored(const ScopedObject& object, const Writer& writer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LoadDrains() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status StoreDrain(const std::string& node_id, const DrainRequest& order)
      ABSL_LOCKS_EXCLUDED(mu_, drain_orders_mu_);
  // The open reservation as an answer, not signed yet.
  PlacementAnswer Grant(const PendingWrite& reservation) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<NodeSlot> PreferredNodes(const ScopedObject& object,
                                       const std::optional<BlockKey>& parent) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes the object's reservation away and gives its room back; false when it has none.
  bool Release(const ScopedObject& object, PendingWrite* released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RecordAdded(NodeState* node, const ObjectAnnouncement& object)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The node, when that inventory of it is still the one arriving.
  absl::StatusOr<NodeState*> FindInventory(const NodeEpoch& node, uint64_t inventory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes dropped lists apart, step by step.
  void CollectGarbage() ABSL_LOCKS_EXCLUDED(mu_);

  // Constant after construction.
  const ControlOptions options_;
  State* const state_;
  const Clock* const clock_;
  std::string ticket_key_;
  std::unique_ptr<RotationRegistry> rotations_;
  std::unique_ptr<IdAllocator> ids_;  // Write ids, epochs, inventory numbers.

  Mutex drain_orders_mu_;  // Held while a drain order is stored, before mu_.
  mutable FairMutex mu_;
  NodeTable nodes_ ABSL_GUARDED_BY(mu_);
  PrefixIndex index_ ABSL_GUARDED_BY(mu_);
  Reservations reservations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::pair<std::string, FormatId>, ScopeId> scopes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_CONTROL_H_
