#ifndef OKV_CACHE_NODE_RECHECK_H_
#define OKV_CACHE_NODE_RECHECK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "cache_node/block_table.h"
#include "cache_node/node_metrics.h"
#include "cache_node/spill.h"
#include "cache_node/tiers/tier.h"
#include "proto/clock.h"
#include "proto/mutex.h"

namespace okv {

struct RecheckerOptions {
  // Unfounded complaints cost the node a read of the disk each: a tenant may make so many at once,
  // and then one every refill_nanos. What turns out to be true costs nothing.
  uint32_t complaints_max = 32;
  int64_t refill_nanos = 250'000'000;
  size_t queue_max = 256;
};

// What a node does when a reader says that an object arrived damaged: verifies its own copy in each
// tier, on a thread of its own. A bad copy goes and is counted; a good one stays, and then the
// complaint was the reader's or the link's. The whole object goes when no copy is good.
// Thread-safe.
class Rechecker {
 public:
  struct Parts {
    BlockTable* table;
    Tier* disk;
    Spiller* spiller;  // Gives memory.
    NodeMetrics* metrics;
    const Clock* clock;
    std::function<void(const ObjectId& id, const absl::Status& why)> on_removed;
    std::function<void(const std::string& line)> log;
  };
  Rechecker(const RecheckerOptions& options, Parts parts);
  ~Rechecker();

  // Queues a check, unless there are too many; counts the complaint either way. Another tenant's
  // object is as one that is not here. Never blocks.
  void Complain(const std::string& tenant, const ObjectId& id) ABSL_LOCKS_EXCLUDED(mu_);
  // Drops what has not begun, puts back what waited for readers, if they have left, and joins the
  // thread.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  enum class Step {
    kCheck,
    kEvict,   // Copies in memory are bad, and leave when their readers have.
    kReturn,  // The copy below is gone; the good one comes back when the readers have left.
  };
  struct Job {
    ObjectId id;
    std::string tenant;
    Step step = Step::kCheck;
    bool evict_hbm = false;  // kEvict: which.
    bool evict_dram = false;
    ObjectRef object = nullptr;  // kReturn: what, and its payload.
    Extent extent = {};
  };
  struct Bucket {
    double left;
    int64_t at_nanos;
  };
  struct Findings {
    bool in_hbm = false;
    bool in_dram = false;
    bool on_disk = false;
    absl::Status hbm = absl::OkStatus();
    absl::Status dram = absl::OkStatus();
    absl::Status disk = absl::OkStatus();
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  // False: try again later.
  bool Do(Job* job) ABSL_LOCKS_EXCLUDED(mu_);
  bool Check(Job* job) ABSL_LOCKS_EXCLUDED(mu_);
  Findings Look(const ObjectPin& pin) const;
  bool Evict(Job* job);
  // Takes the object away, of which a copy below `good` is bad, and keeps that one, in `job`.
  bool Rescue(Job* job, ObjectPin pin, const Payload& good, const absl::Status& why);
  bool Return(Job* job);
  void Quarantine(ObjectPin pin, const absl::Status& why);
  // Memory for a copy; none when there is no room.
  absl::StatusOr<Extent> Allocate(size_t bytes);
  bool TakeToken(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReturnToken(const std::string& tenant) ABSL_LOCKS_EXCLUDED(mu_);

  const RecheckerOptions options_;
  const Parts parts_;
  std::thread thread_;

  Mutex mu_;
  CondVar changed_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<ObjectId> queued_ ABSL_GUARDED_BY(mu_);  // Of jobs_ and of the running one.
  absl::flat_hash_map<std::string, Bucket> buckets_ ABSL_GUARDED_BY(mu_);  // By tenant.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_RECHECK_H_
