#ifndef OKV_CONTROL_PLANE_CONTROL_METRICS_H_
#define OKV_CONTROL_PLANE_CONTROL_METRICS_H_

#include <prometheus/collectable.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <vector>

#include "control_plane/control.h"

namespace prometheus {
class Histogram;
}

namespace okv {

// What an operator sees of the control plane. Gauges are read from Control when they are scraped,
// so they cannot drift from it. Thread-safe. `control` outlives it.
class ControlMetrics final : public prometheus::Collectable {
 public:
  explicit ControlMetrics(const Control* control);

  // `result`: "hit" (a resume point), "prefix" (only an int2 prefix), "miss", "error".
  void CountLookup(const std::string& result, double seconds);
  // `code`: the placement's status.
  void CountPlacement(const std::string& code);

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const Control* const control_;
  prometheus::Registry registry_;
  prometheus::Family<prometheus::Counter>* lookups_;
  prometheus::Family<prometheus::Counter>* placements_;
  prometheus::Histogram* lookup_seconds_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_CONTROL_METRICS_H_
