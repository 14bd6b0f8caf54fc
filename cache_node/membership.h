#ifndef OKV_CACHE_NODE_MEMBERSHIP_H_
#define OKV_CACHE_NODE_MEMBERSHIP_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cache_node/tiers/tier.h"
#include "proto/control.grpc.pb.h"
#include "proto/control_channel.h"
#include "proto/drain_report.h"
#include "proto/mutex.h"

namespace okv {

struct MembershipOptions {
  std::string control_address;  // host:port of okv-control.
  std::string node_id;
  std::string data_address;
  std::string metrics_address;
  std::chrono::milliseconds rpc_timeout{5000};
  std::chrono::milliseconds inventory_timeout{120'000};
  std::chrono::milliseconds backoff_min{100};
  std::chrono::milliseconds backoff_max{1000};
  // Objects a message: about 150 B each, and gRPC refuses more than 4 MiB.
  size_t objects_per_message = 4096;
  // Reports waiting for an absent control plane; beyond it they are dropped and the inventory,
  // which says the same, is sent again instead.
  size_t reports_max = 65536;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// What an operator asked of this node (control.proto).
struct DrainOrder {
  uint64_t id = 0;
  int64_t limit_nanos = 0;
  int64_t settle_nanos = 0;
};

// The node's side of its relation to the control plane: registers, sends heartbeats, reports what
// was committed and removed, and says everything again when the control plane forgot. All of it on
// a thread of its own: without a control plane reads go on, and reports wait. Thread-safe.
class Membership {
 public:
  struct Parts {
    std::function<std::vector<std::pair<std::string, TierStats>>()> tiers;
    std::function<std::vector<ObjectRef>()> objects;  // Everything held.
    std::function<void(const std::string& line)> log;
    // With every heartbeat that the control plane answers. Empty: this node is never drained.
    std::function<void(const std::optional<DrainOrder>& order)> on_drain = {};
    std::function<std::optional<DrainReport>()> drain_report = {};
  };
  // REQUIRES: options.Validate() is OK.
  Membership(const MembershipOptions& options, Parts parts);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Starts the thread and waits until the node is registered and its inventory is there.
  // kUnavailable naming the address and the last error after `timeout`; kFailedPrecondition or
  // kInvalidArgument at once when the control plane refuses this node. After an error the thread is
  // gone.
  absl::Status Start(std::chrono::milliseconds timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Cuts the call in flight and joins.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Checks tickets and reservations; empty until the first registration.
  std::string ticket_key() const ABSL_LOCKS_EXCLUDED(mu_);
  // Of the last registration; 0 before it.
  uint64_t epoch() const ABSL_LOCKS_EXCLUDED(mu_);

  // Queues a report; it is kept until the control plane acknowledged it. Never blocks.
  void Committed(ObjectRef object) ABSL_LOCKS_EXCLUDED(mu_);
  void Removed(const ObjectId& id) ABSL_LOCKS_EXCLUDED(mu_);
  // True once nothing is queued; false after `timeout`.
  bool Drain(std::chrono::milliseconds timeout) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Report {
    ObjectId id;
    ObjectRef added;  // Null: removed.
  };
  using Time = std::chrono::steady_clock::time_point;

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // One step of the thread once registered: reports, and a heartbeat when it is due.
  absl::Status Tend() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Register() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status SendInventory();
  absl::Status SendReports() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Heartbeat();
  void Enqueue(Report report) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes how a step ended; returns how long to wait before the next.
  std::chrono::milliseconds Settle(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  bool stopping() const ABSL_LOCKS_EXCLUDED(mu_);

  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::ControlPlane::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                    const Request& request, Response* response) ABSL_LOCKS_EXCLUDED(mu_);
  // False when stopping. While a call runs, Stop can cut it.
  bool BeginCall(grpc::ClientContext* context) ABSL_LOCKS_EXCLUDED(mu_);
  void EndCall() ABSL_LOCKS_EXCLUDED(mu_);

  const MembershipOptions options_;
  const Parts parts_;
  const ControlChannel control_;
  std::thread thread_;

  // Owned by the thread.
  uint64_t epoch_ = 0;
  bool registered_ = false;
  std::chrono::milliseconds heartbeat_interval_{1000};
  Time heartbeat_due_;
  std::chrono::milliseconds backoff_{0};
  bool outage_logged_ = false;

  mutable Mutex mu_;
  CondVar changed_;
  std::string ticket_key_ ABSL_GUARDED_BY(mu_);
  uint64_t shown_epoch_ ABSL_GUARDED_BY(mu_) = 0;    // epoch_, for others.
  std::deque<Report> reports_ ABSL_GUARDED_BY(mu_);  // In the order of the events.
  bool inventory_needed_ ABSL_GUARDED_BY(mu_) = false;
  bool joined_ ABSL_GUARDED_BY(mu_) = false;  // Registered once, inventory sent.
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_MEMBERSHIP_H_
