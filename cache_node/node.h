#ifndef OKV_CACHE_NODE_NODE_H_
#define OKV_CACHE_NODE_NODE_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_node/drain.h"
#include "cache_node/membership.h"
#include "cache_node/node_metrics.h"
#include "cache_node/serve.h"
#include "cache_node/storage.h"
#include "client/metrics_server.h"
#include "client/transport/transport.h"
#include "proto/clock.h"

namespace okv {

struct NodeOptions {
  std::string control_address;
  // Loopback only: neither UCX nor /metrics authenticates or encrypts, and nothing else protects
  // them where there are no certificates.
  std::string listen_address = "127.0.0.1:0";
  std::string metrics_address = "127.0.0.1:0";
  std::string data_dir;
  std::string node_id;  // Empty: the one that data_dir remembers.
  uint64_t dram_bytes = 0;
  // The HBM tier: payloads in this device's memory. 0 bytes: there is none. The transport must have
  // the same device, which outlives the node.
  uint64_t hbm_bytes = 0;
  DeviceMemory* hbm_device = nullptr;
  uint64_t disk_bytes = 0;
  uint64_t disk_free_floor_bytes = 0;  // Left free on data_dir's file system.
  bool prefault = true;
  std::chrono::milliseconds control_timeout{30'000};  // At start; afterwards it tries for ever.
  std::chrono::milliseconds spill_timeout{20'000};    // At stop.
  SpillerOptions spill;
  HbmMoverOptions hbm;
  TenantBudgets tenant_budgets;
  DataPlaneOptions data_plane;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// A cache node: storage, data plane, metrics and membership, started and stopped in the order in
// which they need each other. Thread-compatible.
class Node {
 public:
  // Returns a node that is registered and serves. Blocks until then: for the arena's prefault, and
  // up to control_timeout. kInvalidArgument from Validate; kUnavailable for a port in use or an
  // absent control plane; kFailedPrecondition for a directory that cannot be used. Each names what
  // is wrong.
  static absl::StatusOr<std::unique_ptr<Node>> Start(
      const NodeOptions& options, std::unique_ptr<Transport> transport, const Clock* clock,
      std::function<void(const std::string& line)> log);
  // Ends sessions, spills what only DRAM holds, tells the control plane what it has not heard yet.
  ~Node();

  const std::string& node_id() const { return storage_->node_id(); }
  const std::string& data_address() const { return data_address_; }
  const std::string& metrics_address() const { return metrics_server_->address(); }
  Storage* storage() { return storage_.get(); }
  NodeMetrics* metrics() { return &metrics_; }

 private:
  Node(const NodeOptions& options, std::unique_ptr<Transport> transport, const Clock* clock,
       std::function<void(const std::string& line)> log);
  absl::Status StartParts();
  void OnDamaged(const std::string& tenant, const ObjectId& id);
  absl::Status Join();
  void SpillRest();
  StorageOptions MakeStorageOptions() const;
  MembershipOptions MakeMembershipOptions() const;

  const NodeOptions options_;
  const Clock* const clock_;
  const std::function<void(const std::string& line)> log_;
  NodeMetrics metrics_;
  std::unique_ptr<Storage> storage_;
  std::unique_ptr<Membership> membership_;
  // For the transport's thread, which runs before there is a membership.
  std::atomic<Membership*> live_membership_{nullptr};
  std::atomic<Drainer*> live_drainer_{nullptr};
  std::unique_ptr<DataPlane> data_plane_;
  std::unique_ptr<Drainer> drainer_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::string data_address_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_NODE_H_
