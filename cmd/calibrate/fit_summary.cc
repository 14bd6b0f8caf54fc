#include "cmd/calibrate/fit_summary.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "cmd/bench/bootstrap.h"

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint32_t kResamplesCount = 10000;
constexpr uint64_t kSeed = 1;

struct LayerRatio {
  uint32_t layer_id;
  double ratio;
};

Json ClipJson(const std::vector<LayerRatio>& ratios) {
  const auto worst =
      std::max_element(ratios.begin(), ratios.end(),
                       [](const LayerRatio& a, const LayerRatio& b) { return a.ratio < b.ratio; });
  double sum = 0;
  for (const LayerRatio& one : ratios) sum += one.ratio;
  return {
      {"mean", sum / static_cast<double>(ratios.size())},
      {"worst", worst->ratio},
      {"worst_layer", worst->layer_id},
      {"layers_above_1.01", std::count_if(ratios.begin(), ratios.end(),
                                          [](const LayerRatio& one) { return one.ratio > 1.01; })}};
}

void AddReported(const FitResult& result, Json* json) {
  std::vector<LayerRatio> ratios_k;
  std::vector<LayerRatio> ratios_v;
  double reported_k = 0;
  double reported_v = 0;
  bool apart = true;
  for (const LayerReport& layer : result.layers) {
    if (layer.reported_k.signal == 0 || layer.reported_v.signal == 0) return;
    reported_k += layer.reported_k.ratio();
    reported_v += layer.reported_v.ratio();
    apart = apart && layer.reports_apart;
    const auto add = [&](const SquaredError& fitted, const SquaredError& published,
                         std::vector<LayerRatio>* ratios) {
      if (published.error > 0) ratios->push_back({layer.layer_id, fitted.error / published.error});
    };
    add(layer.reported_k, layer.published_clip_k, &ratios_k);
    add(layer.reported_v, layer.published_clip_v, &ratios_v);
  }
  if (result.layers.empty()) return;
  const double layers_count = static_cast<double>(result.layers.size());
  (*json)["reported_error_k_mean"] = reported_k / layers_count;
  (*json)["reported_error_v_mean"] = reported_v / layers_count;
  (*json)["reports_apart"] = apart;
  if (ratios_k.empty() || ratios_v.empty()) return;
  (*json)["clips"] = {{"k", ClipJson(ratios_k)}, {"v", ClipJson(ratios_v)}};
}

void AddValueObjectives(const FitResult& result, Json* json) {
  std::vector<double> logs;
  size_t softmax = 0;
  size_t energy = 0;
  for (const LayerReport& layer : result.layers) {
    for (size_t i = 0; i < layer.softmax_v.size(); ++i) {
      ++(layer.value_objectives[i] == ValueObjective::kSoftmax ? softmax : energy);
      if (layer.softmax_v[i].error > 0 && layer.energy_v[i].error > 0) {
        logs.push_back(std::log(layer.energy_v[i].error / layer.softmax_v[i].error));
      }
    }
  }
  if (logs.empty()) return;
  const Interval interval = BootstrapMean(logs, kResamplesCount, kSeed);
  (*json)["value_objectives"] = {{"softmax", softmax},
                                 {"energy", energy},
                                 {"energy_over_softmax",
                                  {{"mean", std::exp(interval.mean)},
                                   {"low", std::exp(interval.low)},
                                   {"high", std::exp(interval.high)}}}};
}

}  // namespace

Json FitComparisons(const FitResult& result) {
  Json json = Json::object();
  AddReported(result, &json);
  AddValueObjectives(result, &json);
  return json;
}

std::string FitComparisonLines(const Json& comparisons) {
  std::string lines;
  if (comparisons.contains("reported_error_k_mean")) {
    absl::StrAppendFormat(&lines, "output error on text that %s: by K %.5f, by V %.5f\n",
                          comparisons["reports_apart"] ? "nothing was chosen by" : "judged",
                          comparisons["reported_error_k_mean"].get<double>(),
                          comparisons["reported_error_v_mean"].get<double>());
  }
  if (comparisons.contains("clips")) {
    for (const char* tensor : {"k", "v"}) {
      const Json& one = comparisons["clips"][tensor];
      absl::StrAppendFormat(&lines,
                            "clips of %s over the published ratio's, errors: mean %.3f, worst %.3f "
                            "(layer %d), %d layers above 1.01\n",
                            tensor, one["mean"].get<double>(), one["worst"].get<double>(),
                            one["worst_layer"].get<uint32_t>(),
                            one["layers_above_1.01"].get<int>());
    }
  }
  if (comparisons.contains("value_objectives")) {
    const Json& one = comparisons["value_objectives"];
    const Json& ratio = one["energy_over_softmax"];
    absl::StrAppendFormat(&lines,
                          "value objectives: softmax taken %d times, energy %d; errors of energy "
                          "over softmax %.3f [%.3f, %.3f]\n",
                          one["softmax"].get<int>(), one["energy"].get<int>(),
                          ratio["mean"].get<double>(), ratio["low"].get<double>(),
                          ratio["high"].get<double>());
  }
  return lines;
}

}  // namespace okv
