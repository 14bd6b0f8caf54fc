#ifndef OKV_CMD_WORKER_METRICS_H_
#define OKV_CMD_WORKER_METRICS_H_

#include <atomic>
#include <string>
#include <vector>

#include "client/cluster.h"
#include "client/drift.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"
#include "proto/format.h"

namespace okv {

// A DriftMonitor's sums as Prometheus counters, and what calibration promised as gauges, by
// rotation (the first digits of its hash), layer and tensor (k, v). A series is there before its
// first row. Thread-safe.
class DriftMetrics final : public prometheus::Collectable {
 public:
  // `monitor` outlives it.
  DriftMetrics(const DriftMonitor* monitor, const RotationHash& rotation)
      : monitor_(monitor), rotation_(rotation.Short()) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

  // The Prometheus text format.
  std::string Text() const;

 private:
  const DriftMonitor* const monitor_;
  const std::string rotation_;
};

// What a Cluster counts (ClusterStats) as Prometheus counters; zeros until there is one.
// Thread-safe.
class ClusterMetrics final : public prometheus::Collectable {
 public:
  // The cluster's counts from now on; it outlives the last look.
  void Watch(const Cluster* cluster) { cluster_.store(cluster); }

  std::vector<prometheus::MetricFamily> Collect() const override;
  static std::vector<prometheus::MetricFamily> FamiliesOf(const ClusterStats& stats);

  // The Prometheus text format.
  std::string Text() const;

 private:
  std::atomic<const Cluster*> cluster_{nullptr};
};

}  // namespace okv

#endif  // OKV_CMD_WORKER_METRICS_H_
