#ifndef OKV_CACHE_NODE_NODE_METRICS_H_
#define OKV_CACHE_NODE_NODE_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache_node/block_table.h"
#include "cache_node/membership.h"
#include "cache_node/tiers/rocksdb_tier.h"
#include "cache_node/tiers/tier.h"
#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "proto/mutex.h"

namespace okv {

// What /metrics shows of a node. Counters and histograms are told; gauges are read from their
// owners when somebody looks, so that they cannot drift. Thread-safe.
class NodeMetrics {
 public:
  NodeMetrics();

  // Where the gauges come from; all outlive the last Text() before ClearSources.
  struct Sources {
    const BlockTable* table = nullptr;
    std::vector<const Tier*> tiers;
    std::function<uint64_t()> sessions_count = {};
    std::function<IndexRecovery()> index_recovery = {};
    std::function<std::optional<DrainReport>()> drain_report = {};
  };
  void SetSources(Sources sources) ABSL_LOCKS_EXCLUDED(mu_);
  void ClearSources() ABSL_LOCKS_EXCLUDED(mu_) { SetSources({}); }

  // Objects that arrived, with the time each took. `tier`: where their payloads came from.
  void FetchHits(absl::string_view tier, absl::Span<const double> seconds);
  // One object each.
  enum class Miss { kNotHeld, kOtherTenant };
  void FetchMiss(Miss reason);
  void FetchFailure(absl::StatusCode code);
  void Put(absl::StatusCode code);
  // A block was given up: shares of it never came.
  void BlockAbandoned();
  void Spilled(uint64_t payload_bytes);
  void Promoted(uint64_t payload_bytes);
  // Between HBM and DRAM.
  void HbmSpilled(uint64_t payload_bytes);
  void HbmPromoted(uint64_t payload_bytes);
  // Delivered from HBM, by Connection::device_path.
  void HbmSent(absl::string_view path, uint64_t payload_bytes);
  // Objects that left HBM in the transfer of another one.
  void HbmMerged(uint64_t objects_count);
  // Objects that were put together in HBM to leave it.
  void HbmPacked(uint64_t objects_count);
  // Read from disk for one use, and not kept in DRAM.
  void Passed(uint64_t payload_bytes);
  // The disk could not take a group.
  void SpillFailed(absl::StatusCode code);
  enum class Eviction { kDiskLimit, kFreeFloor, kTenantBudget };
  // Objects that left the node.
  void Evicted(Eviction reason, uint64_t objects_count, uint64_t payload_bytes);
  void Corrupt(absl::string_view tier);
  // What a reader's complaint of damaged bytes came to.
  enum class Verdict { kConfirmed, kUnfounded, kNotHeld, kNotChecked };
  void Complained(Verdict verdict);
  void Verified(double seconds);

  // The Prometheus text format.
  std::string Text() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Read from their owners.
  std::vector<prometheus::MetricFamily> Gauges() const ABSL_LOCKS_EXCLUDED(mu_);
  static void AddDrain(const std::optional<DrainReport>& report,
                       std::vector<prometheus::MetricFamily>* families);
  static void AddRecovery(const IndexRecovery& recovery,
                          std::vector<prometheus::MetricFamily>* families);

  // Thread-safe themselves, constant after construction.
  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>* const hits_;
  prometheus::Family<prometheus::Counter>* const misses_;
  prometheus::Family<prometheus::Counter>* const failures_;
  prometheus::Family<prometheus::Counter>* const puts_;
  prometheus::Family<prometheus::Counter>* const corrupt_;
  prometheus::Family<prometheus::Counter>* const complaints_;
  prometheus::Counter* const abandoned_;
  prometheus::Family<prometheus::Counter>* const evicted_objects_;
  prometheus::Family<prometheus::Counter>* const evicted_bytes_;
  prometheus::Family<prometheus::Counter>* const spill_failures_;
  prometheus::Counter* const spilled_bytes_;
  prometheus::Counter* const promoted_bytes_;
  prometheus::Counter* const hbm_spilled_bytes_;
  prometheus::Counter* const hbm_promoted_bytes_;
  prometheus::Family<prometheus::Counter>* const hbm_sent_bytes_;
  prometheus::Counter* const hbm_merged_objects_;
  prometheus::Counter* const hbm_packed_objects_;
  prometheus::Counter* const passed_bytes_;
  prometheus::Histogram* const fetch_seconds_;
  prometheus::Histogram* const verify_seconds_;

  mutable Mutex mu_;
  Sources sources_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_NODE_METRICS_H_
