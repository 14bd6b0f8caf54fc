#include "control_plane/control_metrics.h"

#include <prometheus/counter.h>
#include <prometheus/histogram.h>

#include <utility>

namespace okv {
namespace {

prometheus::MetricFamily Gauge(const std::string& name, const std::string& help) {
  prometheus::MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = prometheus::MetricType::Gauge;
  return family;
}

void AddValue(prometheus::MetricFamily* family, double value, const std::string& label = "",
              const std::string& label_value = "") {
  prometheus::ClientMetric metric;
  metric.gauge.value = value;
  if (!label.empty()) {
    prometheus::ClientMetric::Label pair;
    pair.name = label;
    pair.value = label_value;
    metric.label.push_back(pair);
  }
  family->metric.push_back(std::move(metric));
}

}  // namespace

ControlMetrics::ControlMetrics(const Control* control) : control_(control) {
  lookups_ = &prometheus::BuildCounter()
                  .Name("okv_control_lookups_total")
                  .Help("Lookups by result: hit (a resume point), prefix, miss, error")
                  .Register(registry_);
  placements_ = &prometheus::BuildCounter()
                     .Name("okv_control_placements_total")
                     .Help("Objects that writers asked to place, by answer")
                     .Register(registry_);
  lookup_seconds_ = &prometheus::BuildHistogram()
                         .Name("okv_control_lookup_seconds")
                         .Help("Time of a lookup inside the control plane")
                         .Register(registry_)
                         .Add({}, prometheus::Histogram::BucketBoundaries{
                                      1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1});
}

void ControlMetrics::CountLookup(const std::string& result, double seconds) {
  lookups_->Add({{"result", result}}).Increment();
  lookup_seconds_->Observe(seconds);
}

void ControlMetrics::CountPlacement(const std::string& code) {
  placements_->Add({{"code", code}}).Increment();
}

std::vector<prometheus::MetricFamily> ControlMetrics::Collect() const {
  std::vector<prometheus::MetricFamily> families = registry_.Collect();
  const ClusterStatus status = control_->Status();
  size_t alive = 0;
  size_t draining = 0;
  for (const ClusterStatus::Node& node : status.nodes) {
    alive += node.state.alive ? 1 : 0;
    draining += node.state.draining() ? 1 : 0;
  }
  prometheus::MetricFamily nodes = Gauge("okv_control_nodes", "Nodes by state");
  AddValue(&nodes, static_cast<double>(alive), "state", "alive");
  AddValue(&nodes, static_cast<double>(status.nodes.size() - alive), "state", "dead");
  prometheus::MetricFamily drained =
      Gauge("okv_control_draining_nodes", "Nodes that an operator is draining, dead ones included");
  AddValue(&drained, static_cast<double>(draining));
  prometheus::MetricFamily objects =
      Gauge("okv_control_objects", "Distinct objects that live nodes hold");
  AddValue(&objects, static_cast<double>(status.objects_count));
  prometheus::MetricFamily reservations = Gauge("okv_control_reservations", "Open reservations");
  AddValue(&reservations, static_cast<double>(status.reservations_count));
  prometheus::MetricFamily rotations = Gauge("okv_control_rotations", "Published rotation sets");
  AddValue(&rotations, static_cast<double>(status.rotations_count));
  for (auto* family : {&nodes, &drained, &objects, &reservations, &rotations}) {
    families.push_back(std::move(*family));
  }
  return families;
}

}  // namespace okv
