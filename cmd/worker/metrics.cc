#include "cmd/worker/metrics.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/client_metric.h"
#include "prometheus/text_serializer.h"

namespace okv {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

struct DriftFamily {
  const char* name;
  const char* help;
  MetricType type;
  // Empty: this layer has no such figure.
  std::optional<double> (*value)(const DriftTensor& tensor);
};

const DriftFamily kFamilies[] = {
    {"okv_worker_drift_sampled_rows_total", "Demoted rows that were measured", MetricType::Counter,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.rows; }},
    {"okv_worker_drift_sampled_elements_total", "Elements of the sampled rows", MetricType::Counter,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.elements; }},
    {"okv_worker_drift_clipped_elements_total",
     "Elements of the sampled rows beyond their row's clip threshold", MetricType::Counter,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.clipped_elements; }},
    {"okv_worker_drift_squared_error_total",
     "Sum over sampled rows of the squared error that int2 leaves, in the rotated basis",
     MetricType::Counter,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.squared_error; }},
    {"okv_worker_drift_squared_norm_total",
     "Sum over sampled rows of their squared norm, in the rotated basis", MetricType::Counter,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.squared_norm; }},
    {"okv_worker_drift_promised_error_ratio",
     "Squared error over squared norm that calibration measured; absent when the set lacks it",
     MetricType::Gauge, [](const DriftTensor& tensor) { return tensor.promised_error; }},
    {"okv_worker_drift_promised_clip_ratio",
     "Clipped elements over elements that the set's clip ranks ask for", MetricType::Gauge,
     [](const DriftTensor& tensor) -> std::optional<double> { return tensor.promised_clip_rate; }},
};

}  // namespace

std::vector<MetricFamily> DriftMetrics::Collect() const {
  const DriftStats stats = monitor_->Stats();
  std::vector<MetricFamily> families;
  for (const DriftFamily& from : kFamilies) {
    MetricFamily family;
    family.name = from.name;
    family.help = from.help;
    family.type = from.type;
    for (const DriftLayer& layer : stats.layers) {
      for (const bool is_value : {false, true}) {
        const std::optional<double> value = from.value(is_value ? layer.v : layer.k);
        if (!value.has_value()) continue;
        ClientMetric metric;
        metric.label = {{"rotation", rotation_},
                        {"layer", absl::StrCat(layer.layer_id)},
                        {"tensor", is_value ? "v" : "k"}};
        (from.type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = *value;
        family.metric.push_back(std::move(metric));
      }
    }
    if (!family.metric.empty()) families.push_back(std::move(family));
  }
  return families;
}

std::string DriftMetrics::Text() const { return prometheus::TextSerializer().Serialize(Collect()); }

std::vector<MetricFamily> ClusterMetrics::FamiliesOf(const ClusterStats& stats) {
  struct Value {
    const char* label;  // "": none.
    const char* label_value;
    uint64_t count;
  };
  std::vector<MetricFamily> families;
  const auto add = [&](const char* name, const char* help, const std::vector<Value>& values) {
    MetricFamily family;
    family.name = name;
    family.help = help;
    family.type = MetricType::Counter;
    for (const Value& value : values) {
      ClientMetric metric;
      if (value.label[0] != '\0') metric.label = {{value.label, value.label_value}};
      metric.counter.value = static_cast<double>(value.count);
      family.metric.push_back(std::move(metric));
    }
    families.push_back(std::move(family));
  };
  add("okv_worker_fetched_objects_total", "Objects asked of nodes, by result",
      {{"result", "ok", stats.fetched}, {"result", "failed", stats.fetch_failed}});
  add("okv_worker_fetched_bytes_total", "Verified payload bytes that arrived",
      {{"", "", stats.fetched_bytes}});
  add("okv_worker_failovers_total",
      "Times that an object was asked of its next node, by what the one before did",
      {{"reason", "unavailable", stats.failovers_unavailable},
       {"reason", "stalled", stats.failovers_stalled},
       {"reason", "damaged", stats.failovers_damaged},
       {"reason", "missing", stats.failovers_missing}});
  add("okv_worker_complaints_total", "Payloads that failed verification, reported to their node",
      {{"", "", stats.complaints}});
  return families;
}

std::vector<MetricFamily> ClusterMetrics::Collect() const {
  const Cluster* cluster = cluster_.load();
  return FamiliesOf(cluster != nullptr ? cluster->stats() : ClusterStats());
}

std::string ClusterMetrics::Text() const {
  return prometheus::TextSerializer().Serialize(Collect());
}

}  // namespace okv
