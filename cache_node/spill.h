#ifndef OKV_CACHE_NODE_SPILL_H_
#define OKV_CACHE_NODE_SPILL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_node/block_table.h"
#include "cache_node/evict.h"
#include "cache_node/node_metrics.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "cache_node/tiers/dram_tier.h"
#include "cache_node/tiers/rocksdb_tier.h"
#include "proto/clock.h"
#include "proto/mutex.h"

namespace okv {

struct SpillerOptions {
  // Shares of the arena: spilling starts above the high one and ends below the low one.
  double high_watermark = 0.90;
  double low_watermark = 0.80;
  // One group is one file and three syncs: large enough that these cost little beside the writing,
  // small enough that whoever waits for room gets it soon (45 ms at 1.5 GB/s). At most a sixteenth
  // of the arena and of the disk's limit, but one object.
  uint64_t group_bytes_max = uint64_t{64} << 20;
  size_t group_objects_max = 1024;
  size_t waiters_max = 4096;
  int64_t allocate_wait_nanos = 5'000'000'000;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// Moves objects between the tiers. Its thread spills the coldest unpinned objects when DRAM fills,
// and evicts from disk what must make room for them; a load from disk promotes; all of them verify
// every checksum on the way, and quarantine what fails. A disk that fails or is full is tried again
// with every group, and the log says when that begins and ends: until then DRAM goes on.
// Thread-safe.
class Spiller {
 public:
  struct Parts {
    DramTier* dram;
    RocksdbTier* disk;
    BlockTable* table;
    NodeMetrics* metrics;
    const Clock* clock;
    // An object is gone: quarantined (kDataLoss) or evicted (kResourceExhausted). For the control
    // plane. Any thread.
    std::function<void(const ObjectId& id, const absl::Status& why)> on_removed;
    std::function<void(const std::string& line)> log;
  };
  // REQUIRES: options.Validate() is OK. The parts outlive it.
  Spiller(const SpillerOptions& options, const Parts& parts);
  ~Spiller();

  void Start();
  // Joins the thread. Who still waits for memory, or asks later, gets kUnavailable.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Memory for a payload: `done` runs at once, or on the spill thread when room had to be made.
  // `may_drop`: should the disk be full too, and nothing on it may go, what memory alone holds may
  // leave the node for this payload, the coldest first. kResourceExhausted when DRAM is full and
  // nothing can go (everything pinned for allocate_wait_nanos, or waiters_max wait already): back
  // off.
  using AllocateDone = std::function<void(absl::StatusOr<Extent>)>;
  void Allocate(size_t bytes, bool may_drop, AllocateDone done) ABSL_LOCKS_EXCLUDED(mu_);
  size_t waiters_count() const ABSL_LOCKS_EXCLUDED(mu_);
  // The same without waiting, and without a place among those who wait: what may go from DRAM at
  // once goes. kResourceExhausted when that is not enough.
  absl::StatusOr<Extent> AllocateNow(size_t bytes);

  // VerifyPayload, its time counted.
  absl::Status Verify(const HeldObject& object, const Payload& payload) const;
  absl::Status Verify(const HeldObject& object, absl::Span<const uint8_t> payload) const {
    return Verify(object, Payload{.bytes = payload});
  }

  // The object is damaged in `tier`: it is gone, counted and reported.
  void Quarantine(ObjectPin pin, const Tier& tier, const absl::Status& why);

  // Makes an object that is not in DRAM readable there. Null: it is in DRAM now, as pin->dram()
  // says; else the payload itself, which DRAM had no room for, or not on its first use, or which
  // only HBM holds. kDataLoss when the disk's copy is damaged: it is quarantined, and the pin gone
  // unless another load found the damage first.
  // Other errors are the disk's or the device's.
  // Blocks on the disk.
  absl::StatusOr<AlignedBuffer> Load(ObjectPin* pin);

  // Copies down what only DRAM holds, until the clock says deadline_nanos. Returns how many objects
  // the disk does not have then, those that are pinned or only in HBM too. REQUIRES: stopped.
  size_t SpillAll(int64_t deadline_nanos);

 private:
  struct Waiter {
    size_t bytes;
    bool may_drop;
    int64_t deadline_nanos;
    AllocateDone done;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  bool AboveWatermark(double watermark) const;
  uint64_t GroupBytes() const;
  // Tries again for those who wait, in order; gives up on those past their deadline.
  void ServeWaiters() ABSL_LOCKS_EXCLUDED(mu_);
  // Of the first one who waits; nothing when nobody does.
  std::optional<bool> FirstMayDrop() const ABSL_LOCKS_EXCLUDED(mu_);
  // All, or the first one alone.
  void FailWaiters(const absl::Status& status, bool first_only = false) ABSL_LOCKS_EXCLUDED(mu_);
  // Copies one group down and frees its DRAM copies. Returns the bytes freed: 0 when everything is
  // pinned; kResourceExhausted when the disk is full. `may_drop`: what a full disk does not take
  // may leave the node, for somebody who waits; his claim keeps the block before his.
  absl::StatusOr<uint64_t> SpillGroup(bool may_drop);
  // Stores those of `pins` that the disk lacks. What is damaged leaves `pins`, and so do all of
  // these when the disk has no room for them: then *disk_full is set.
  absl::Status CopyDown(std::vector<ObjectPin>* pins, bool* disk_full);
  // Frees DRAM copies that the disk has too, without any write. Returns the bytes freed.
  uint64_t EvictClean(uint64_t bytes);
  // Memory for an object on its way up, if it may stay there: with free memory always, without it
  // from the second load on within a window as long as DRAM is large. So a scan over the disk
  // displaces nothing, and what is used again is promoted.
  absl::StatusOr<Extent> AllocateForLoad(const ObjectPin& pin);
  absl::Status ReadFromDisk(const ObjectPin& pin, absl::Span<uint8_t> buffer);
  // Evicts what limit and floor ask for while nothing is spilled: others fill the disk too.
  void WatchFloor();
  void NoteDisk(const absl::Status& status);

  const SpillerOptions options_;
  const Parts parts_;
  std::thread thread_;

  // Owned by the spill thread, and by SpillAll after it.
  Evictor evictor_;
  absl::Status disk_status_;  // Of the last group: the log tells of changes only.

  mutable Mutex mu_;
  CondVar wake_;
  std::deque<Waiter> waiters_ ABSL_GUARDED_BY(mu_);
  bool work_ ABSL_GUARDED_BY(mu_) = false;  // Somebody saw DRAM above the high watermark.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_SPILL_H_
