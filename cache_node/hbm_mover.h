#ifndef OKV_CACHE_NODE_HBM_MOVER_H_
#define OKV_CACHE_NODE_HBM_MOVER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_node/block_table.h"
#include "cache_node/node_metrics.h"
#include "cache_node/spill.h"
#include "cache_node/tiers/hbm_tier.h"
#include "proto/mutex.h"

namespace okv {

struct HbmMoverOptions {
  // Shares of HBM: spilling starts above the high one and ends below the low one.
  double high_watermark = 0.90;
  double low_watermark = 0.80;
  // What moves at once: one verification and one wait for the device. At most a sixteenth of HBM
  // and of DRAM, but one object.
  uint64_t group_bytes_max = uint64_t{64} << 20;
  size_t group_objects_max = 1024;
  // Each holds a pin, and with it memory in DRAM: all of them at most a sixteenth of that.
  size_t promotions_max = 1024;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// Moves objects between HBM and DRAM, as the Spiller does between DRAM and disk: its thread spills
// the coldest unpinned objects when HBM fills, and brings up what is used again and again.
// Checksums are verified on the GPU on both ways; what fails is quarantined. Thread-safe.
class HbmMover {
 public:
  struct Parts {
    HbmTier* hbm;
    DramTier* dram;
    BlockTable* table;
    Spiller* spiller;  // Gives memory in DRAM, and quarantines.
    NodeMetrics* metrics;
    // A copy of the object is damaged, perhaps not all.
    std::function<void(const std::string& tenant, const ObjectId& id)> on_damaged;
    std::function<void(const std::string& line)> log;
  };
  // REQUIRES: options.Validate() is OK. The parts outlive it.
  HbmMover(const HbmMoverOptions& options, const Parts& parts);
  ~HbmMover();

  void Start();
  // Joins the thread; what waits to be promoted is let go. After Spiller::Stop, or it may wait for
  // memory in DRAM.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);

  // Memory for a payload in HBM. kResourceExhausted when there is none without waiting: DRAM will
  // do. Never blocks.
  absl::StatusOr<Extent> Allocate(size_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // The object was used from DRAM: it is promoted when HBM has free memory or, in place of others,
  // when it was used so before and no more than HBM holds since. Never blocks.
  void Used(const ObjectPin& pin) ABSL_LOCKS_EXCLUDED(mu_);

  // Copies down a group of what only HBM holds, as far as DRAM has room at once. Returns how many
  // objects that was, damaged ones that are quarantined too. REQUIRES: stopped.
  size_t SpillSome();

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  bool AboveWatermark(double watermark) const;
  uint64_t GroupBytes() const;
  // Copies one group down and frees its HBM copies. Returns the bytes freed: 0 when everything is
  // pinned, or DRAM has no room.
  uint64_t SpillGroup();
  // Gives those of `pins` that are only in HBM a copy in DRAM; those for which that fails leave
  // `pins`. Returns how many were copied, or quarantined.
  size_t CopyDown(std::vector<ObjectPin>* pins, bool may_wait);
  // Frees HBM copies that DRAM or the disk has too. Returns the bytes freed.
  uint64_t EvictClean(uint64_t bytes);
  absl::StatusOr<Extent> AllocateDram(size_t bytes, bool may_wait);
  void Promote(std::vector<ObjectPin> pins);
  void PromoteGroup(std::vector<ObjectPin> pins);
  // One status for each.
  std::vector<absl::Status> Verify(const std::vector<ObjectPin>& pins,
                                   const std::vector<const uint8_t*>& payloads);
  void Note(const absl::Status& status);

  const HbmMoverOptions options_;
  const Parts parts_;
  std::thread thread_;
  absl::Status device_status_;  // Of the last group: the log tells of changes only.

  mutable Mutex mu_;
  CondVar wake_;
  std::vector<ObjectPin> promotions_ ABSL_GUARDED_BY(mu_);
  uint64_t promotions_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool work_ ABSL_GUARDED_BY(mu_) = false;  // Somebody saw HBM above the high watermark.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_HBM_MOVER_H_
