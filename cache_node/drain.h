#ifndef OKV_CACHE_NODE_DRAIN_H_
#define OKV_CACHE_NODE_DRAIN_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_node/block_table.h"
#include "cache_node/formats.h"
#include "cache_node/membership.h"
#include "cache_node/spill.h"
#include "client/transport/transport.h"
#include "proto/clock.h"
#include "proto/control.grpc.pb.h"
#include "proto/control_channel.h"
#include "proto/mutex.h"

namespace okv {

struct DrainerOptions {
  std::string control_address;
  std::string node_id;
  // Of one round: what is in flight to peers, and pinned for it.
  uint64_t batch_bytes_max = uint64_t{32} << 20;
  size_t batch_objects_max = 64;
  // Asked of the control plane at once. Less than a reservation's life passes until they are
  // written: 256 x 1.27 MiB in 0.3 s at 1 GB/s.
  size_t reserve_objects_max = 256;
  int64_t transfer_nanos_max = 10'000'000'000;  // Of one batch.
  int64_t rpc_nanos_max = 5'000'000'000;
  int64_t avoid_nanos = 5'000'000'000;    // A peer that refused, or did not answer.
  int64_t retry_nanos = 200'000'000;      // After a pass that left something.
  int64_t recheck_nanos = 5'000'000'000;  // Once everything is elsewhere.
};

// Copies what only this node holds to peers when the control plane says so, as a worker writes:
// reserves a place for each object, offers it with the checksums that it has here, and the peer
// verifies it when it arrives. Blocks go before their children. What is here stays here, and is
// served: a reader finds either.
//
// It goes through everything again and again. What another node holds by the control plane's
// account is done; when everything has been for as long as the control plane takes to give a dead
// node up, the drain is done. Should a peer that took objects die, they are copied again, also
// after that. Thread-safe.
class Drainer {
 public:
  struct Parts {
    Transport* transport;
    BlockTable* table;
    Spiller* spiller;
    Formats* formats;
    const Clock* clock;
    std::function<uint64_t()> epoch;  // Of this node's registration.
    // A peer said that this object arrived damaged.
    std::function<void(const std::string& tenant, const ObjectId& id)> on_damaged;
    std::function<void(const std::string& line)> log;
  };
  // The parts outlive it.
  Drainer(const DrainerOptions& options, Parts parts);
  ~Drainer();

  // Begins, goes on, or ends when there is none. An order that it has already changes nothing.
  void SetOrder(const std::optional<DrainOrder>& order) ABSL_LOCKS_EXCLUDED(mu_);
  // From the first order on, until there is none: puts are refused.
  bool draining() const { return draining_.load(); }
  // Of the last order. Empty: none.
  std::optional<DrainReport> report() const ABSL_LOCKS_EXCLUDED(mu_);
  // Cuts what is on its way and joins the thread.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Objects that one session can carry.
  using Scope = std::pair<std::string, FormatId>;  // Tenant.
  struct Left {
    uint64_t objects = 0;
    uint64_t bytes = 0;
    std::string why;  // Of the last.
    void Add(const HeldObject& object, const std::string& reason);
  };
  struct Move {
    ObjectRef object;
    v1::Placement placement;
  };
  class Pass;

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // The order is another one by now, or there is none, or the node stops.
  bool Over(const DrainOrder& order) const ABSL_LOCKS_EXCLUDED(mu_);
  bool TimeIsUp(const DrainOrder& order) const ABSL_LOCKS_EXCLUDED(mu_);
  void Rest(int64_t nanos) ABSL_LOCKS_EXCLUDED(mu_);
  void Moved(const HeldObject& object) ABSL_LOCKS_EXCLUDED(mu_);
  // Notes what a pass left, the last one if `time_is_up`; logs what changed.
  void Note(const DrainOrder& order, const Left& left, bool time_is_up) ABSL_LOCKS_EXCLUDED(mu_);

  const DrainerOptions options_;
  const Parts parts_;
  const ControlChannel control_;
  std::thread thread_;
  std::atomic<bool> draining_{false};

  // Owned by the thread: peers by their ids, until when.
  std::map<std::string, int64_t> avoid_until_nanos_;

  mutable Mutex mu_;
  CondVar changed_;
  std::optional<DrainOrder> order_ ABSL_GUARDED_BY(mu_);
  int64_t begun_nanos_ ABSL_GUARDED_BY(mu_) = 0;  // The order.
  int64_t clean_nanos_ ABSL_GUARDED_BY(mu_) = 0;  // Since when nothing was left; 0: something was.
  DrainReport report_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_DRAIN_H_
