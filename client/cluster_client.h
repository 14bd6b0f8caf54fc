#ifndef OKV_CLIENT_CLUSTER_CLIENT_H_
#define OKV_CLIENT_CLUSTER_CLIENT_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "client/cluster.h"
#include "client/node_session.h"
#include "client/transport/transport.h"
#include "proto/control.grpc.pb.h"
#include "proto/control_channel.h"
#include "proto/mutex.h"
#include "proto/page_layout.h"

namespace okv {

// Cluster over gRPC (control plane) and NodeSession (nodes). cluster.cc has the control plane's
// part, fetch.cc and put.cc what their names say.
//
// A call has its sessions to itself: cancelling it closes connections, which must not cut the
// transfers of another call. Sessions left over are kept for the next call.
// Thread-safe. `transport` outlives it.
class ClusterClient final : public Cluster {
 public:
  ClusterClient(const ClusterOptions& options, const Format& format, Transport* transport);
  ~ClusterClient() override;

  // Opens the session, retrying for connect_timeout. Errors as Cluster::Connect's.
  absl::Status Open();

  const Format& format() const override { return format_; }
  const std::string& tenant_salt() const override { return tenant_salt_; }
  absl::StatusOr<LookupResult> Lookup(absl::Span<const BlockKey> keys,
                                      absl::Duration deadline) override;
  using Cluster::Fetch;
  std::vector<absl::Status> Fetch(absl::Span<const FetchItem> items, const BlockRange& range,
                                  absl::Duration deadline) override;
  using Cluster::Put;
  std::vector<absl::Status> Put(absl::Span<const PutItem> items,
                                const PutOptions& options) override;
  ClusterStats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class FetchCall;
  class PutCall;

  struct Lease {
    std::shared_ptr<NodeSession> session;
    bool reused = false;  // It may have died since its last use.
  };

  // Which memory a buffer is in. kInvalidArgument for a device's without a device, or misaligned.
  absl::StatusOr<MemoryKind> KindOf(absl::Span<const uint8_t> memory,
                                    std::optional<MemoryKind> said) const;
  // One OpenSession; replaces the ticket.
  absl::Status RenewTicket(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // A ticket with at least half of its life left, if the control plane can be reached.
  std::string CurrentTicket() ABSL_LOCKS_EXCLUDED(mu_);
  // A session for one call, idle or new. Never fails: a session that cannot connect says so itself.
  Lease Acquire(const LookupResult::Node& node) ABSL_LOCKS_EXCLUDED(mu_);
  Lease AcquireNew(const LookupResult::Node& node) ABSL_LOCKS_EXCLUDED(mu_);
  void Release(const LookupResult::Node& node, std::shared_ptr<NodeSession> session)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `call` (a unary RPC that fills `response`); when the control plane has forgotten this
  // session's format (it was restarted), opens the session again and repeats it once.
  // Each RPC gets what is left until `end`, at most rpc_timeout. Errors name the control plane.
  using Rpc = std::function<grpc::Status(grpc::ClientContext*)>;
  absl::Status CallWithSession(absl::Time end, const Rpc& call);
  // At most rpc_timeout, at most what is left until `end`.
  absl::Duration RpcTimeout(absl::Time end) const;
  absl::Status Named(const absl::Status& status) const;
  void Count(const ClusterStats& call) ABSL_LOCKS_EXCLUDED(mu_);
  // Asks for places for `items` and puts the answers, or the error, into `placements`.
  void Reserve(absl::Span<const PutItem> items, const std::string& write_group, absl::Time end,
               std::vector<v1::Placement>* placements);

  // Constant after Open.
  const ClusterOptions options_;
  const Format format_;
  const FormatId format_id_;
  const PageLayout layout_;
  Transport* const transport_;
  const ControlChannel control_;
  std::string tenant_salt_;

  mutable Mutex mu_;
  ClusterStats stats_ ABSL_GUARDED_BY(mu_);
  std::string ticket_ ABSL_GUARDED_BY(mu_);
  absl::Time ticket_renew_at_ ABSL_GUARDED_BY(mu_);  // Half of its life.
  // Idle sessions by (node_id, address), most recently used last.
  absl::flat_hash_map<std::pair<std::string, std::string>,
                      std::vector<std::shared_ptr<NodeSession>>>
      idle_ ABSL_GUARDED_BY(mu_);
};

// Shared with the tests of what it does.
namespace internal {

// The delay before attempt `attempt` (1 = the first retry): doubles from 50 ms to 1 s, times a
// random share of a half to one, so that workers that lost a control plane together do not return
// together.
absl::Duration BackoffDelay(int attempt, double random_unit);

}  // namespace internal

}  // namespace okv

#endif  // OKV_CLIENT_CLUSTER_CLIENT_H_
