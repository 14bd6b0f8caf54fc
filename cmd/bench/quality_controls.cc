#include "cmd/bench/quality_controls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cmd/support/kv.h"
#include "proto/format.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kControlBits = 8;
// SmolLM2-135M against its calibrated rotations, 4,094 tokens: control-none 159 times the KL,
// control-shifted 3.6 times, control-int8 0.007 times and 0.0003 nats.
constexpr double kFailBadlyKlRatio = 10;
constexpr double kFailKlRatio = 2;
constexpr double kPassKlRatio = 0.1;
constexpr double kPassGapNats = 0.005;

// `data` is [layers, ...].
template <typename T>
void ShiftByOneLayer(size_t layers, std::vector<T>* data) {
  const auto stride = static_cast<std::ptrdiff_t>(data->size() / layers);
  std::rotate(data->begin(), data->begin() + stride, data->end());
}

}  // namespace

RotationSet ShiftLayers(const RotationSet& set) {
  RotationSet shifted = set;
  const size_t layers = set.layer_ids.size();
  ShiftByOneLayer(layers, &shifted.r_k);
  ShiftByOneLayer(layers, &shifted.r_v);
  ShiftByOneLayer(layers, &shifted.clip_rank_k);
  ShiftByOneLayer(layers, &shifted.clip_rank_v);
  return shifted;
}

absl::StatusOr<std::vector<Control>> MakeControls(const ModelConfig& config,
                                                  const Contender& reference) {
  RotationSet shifted = ShiftLayers(reference.rotations);
  if (shifted.r_k == reference.rotations.r_k && shifted.r_v == reference.rotations.r_v) {
    return absl::InvalidArgumentError(
        absl::StrCat("--controls: the first rotation set, of '", reference.name,
                     "', has the same rotations in all layers: another layer's would not fail"));
  }
  RotationSet none = IdentityRotations(config);
  none.group_size = reference.rotations.group_size;
  const FormatOptions windows = {.sink_tokens = reference.format.sink_tokens,
                                 .recent_tokens = reference.format.recent_tokens};
  std::vector<Control> controls;
  const auto add = [&](Control::Must must, RotationSet rotations,
                       const ContenderOptions& options) -> absl::Status {
    OKV_ASSIGN_OR_RETURN(Contender contender, MakeContender(config, std::move(rotations), options));
    controls.push_back({.must = must, .contender = std::move(contender)});
    return absl::OkStatus();
  };
  OKV_RETURN_IF_ERROR(
      add(Control::Must::kFailBadly, std::move(none),
          {.name = "control-none", .windows = {.sink_tokens = kBlockTokens, .recent_tokens = 0}}));
  OKV_RETURN_IF_ERROR(add(Control::Must::kFail, std::move(shifted),
                          {.name = "control-shifted", .windows = windows}));
  OKV_RETURN_IF_ERROR(
      add(Control::Must::kPass, reference.rotations,
          {.name = "control-int8", .windows = windows, .history_bits = kControlBits}));
  return controls;
}

ControlVerdict JudgeControl(const Control& control, const ControlScores& scores, uint64_t seed) {
  const auto mean = [](const std::vector<double>& values) {
    return BootstrapMean(values, /*resamples_count=*/1, /*seed=*/0).mean;
  };
  const double kl = mean(scores.control->kl);
  const double reference_kl = mean(scores.reference->kl);
  ControlVerdict verdict;
  verdict.name = control.contender.name;
  verdict.gap_difference = PairedInterval(scores.control->nll, scores.reference->nll, seed);
  verdict.kl_difference = PairedInterval(scores.control->kl, scores.reference->kl, seed);
  verdict.kl_ratio = reference_kl > 0 ? kl / reference_kl : 0;
  const bool worse = verdict.kl_difference.low > 0 && verdict.gap_difference.low > 0;
  verdict.gap = PairedInterval(scores.control->nll, scores.baseline->nll, seed);
  switch (control.must) {
    case Control::Must::kFailBadly:
      verdict.expectation = "must fail badly";
      verdict.held = worse && kl >= kFailBadlyKlRatio * reference_kl;
      break;
    case Control::Must::kFail:
      verdict.expectation = "must fail";
      verdict.held = worse && kl >= kFailKlRatio * reference_kl;
      break;
    case Control::Must::kPass:
      verdict.expectation = "must pass";
      verdict.held = kl <= kPassKlRatio * reference_kl && verdict.gap.low >= -kPassGapNats &&
                     verdict.gap.high <= kPassGapNats;
      break;
  }
  return verdict;
}

}  // namespace okv
