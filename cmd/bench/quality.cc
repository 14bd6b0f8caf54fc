#include "cmd/bench/quality.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cmd/support/kv.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Everything that runs: the baseline, the variants, the controls.
struct Lineup {
  std::vector<Contender> contenders;
  size_t variants_count = 0;  // contenders[1] and on; behind them the controls.
  std::vector<Control> controls;
};

absl::StatusOr<Lineup> MakeLineup(const QualityOptions& options, const ModelConfig& config) {
  Lineup lineup;
  lineup.contenders.push_back(MakeBf16Contender(config));
  for (const auto& [name, path] : options.rotations) {
    OKV_ASSIGN_OR_RETURN(const RotationSet rotations, ReadRotationFile(path));
    for (const FormatOptions& windows : options.windows) {
      OKV_ASSIGN_OR_RETURN(Contender contender,
                           MakeContender(config, rotations,
                                         {.name = absl::StrCat(name, "@", windows.sink_tokens, "/",
                                                               windows.recent_tokens),
                                          .windows = windows}));
      lineup.contenders.push_back(std::move(contender));
    }
  }
  lineup.variants_count = lineup.contenders.size() - 1;
  if (!options.controls) return lineup;
  OKV_ASSIGN_OR_RETURN(lineup.controls, MakeControls(config, lineup.contenders[1]));
  for (const Control& control : lineup.controls) lineup.contenders.push_back(control.contender);
  return lineup;
}

VariantQuality Describe(const QualityOptions& options, const Contender& contender,
                        const WindowScores& scores, const WindowScores& baseline) {
  const uint64_t seed = options.text.seed;
  VariantQuality variant;
  variant.name = contender.name;
  variant.rotation_hash = contender.format.rotation_hash.Hex();
  variant.group_size = contender.format.group_size;
  variant.bits = CountBits(contender, options.text.window - 1);  // The last one is not fed.
  variant.nll = MeanInterval(scores.nll, seed);
  variant.perplexity = {.mean = std::exp(variant.nll.mean),
                        .low = std::exp(variant.nll.low),
                        .high = std::exp(variant.nll.high)};
  variant.gap = PairedInterval(scores.nll, baseline.nll, seed);
  variant.kl = MeanInterval(scores.kl, seed);
  variant.agreement = MeanInterval(scores.agreement, seed);
  return variant;
}

RecallFigures DescribeRecall(const RecallScores& scores, const RecallScores& baseline,
                             uint64_t seed) {
  return {.accuracy = MeanInterval(scores.accuracy, seed),
          .accuracy_loss = PairedInterval(baseline.accuracy, scores.accuracy, seed),
          .agreement = MeanInterval(scores.agreement, seed),
          .mean_run = MeanInterval(scores.mean_run, seed),
          .longest_run = static_cast<uint32_t>(
              *std::max_element(scores.longest_run.begin(), scores.longest_run.end()))};
}

QualityReport Summarize(const QualityOptions& options, const Lineup& lineup,
                        absl::Span<const WindowScores> scores,
                        absl::Span<const RecallScores> recall) {
  const uint64_t seed = options.text.seed;
  QualityReport report;
  report.seed = seed;
  report.windows = options.text.windows_count();
  report.window = options.text.window;
  report.tokens = report.windows * (report.window - 1);
  for (size_t i = 0; i < lineup.contenders.size(); ++i) {
    report.variants.push_back(Describe(options, lineup.contenders[i], scores[i], scores[0]));
    if (recall.empty()) continue;
    report.variants.back().recall = DescribeRecall(recall[i], recall[0], seed);
  }
  for (size_t a = 1; a <= lineup.variants_count; ++a) {
    for (size_t b = a + 1; b <= lineup.variants_count; ++b) {
      report.differences.push_back(
          {.a = lineup.contenders[b].name,
           .b = lineup.contenders[a].name,
           .difference = PairedInterval(scores[b].nll, scores[a].nll, seed)});
    }
  }
  for (size_t i = 0; i < lineup.controls.size(); ++i) {
    const WindowScores& control = scores[1 + lineup.variants_count + i];
    report.verdicts.push_back(
        JudgeControl(lineup.controls[i],
                     {.control = &control, .reference = &scores[1], .baseline = &scores[0]}, seed));
  }
  return report;
}

absl::Status CheckRecall(const QualityOptions& options) {
  if (options.recall_tokens == 0) return absl::OkStatus();
  if (options.recall_passages < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("--recall_passages ", options.recall_passages, ": an interval needs 2"));
  }
  const uint64_t needed = uint64_t{options.recall_tokens} * options.recall_passages;
  if (needed > options.text.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("--recall_tokens ", options.recall_tokens, " x --recall_passages ",
                     options.recall_passages, " are more than --tokens ", options.text.tokens));
  }
  uint32_t cue = 0;
  for (const FormatOptions& windows : options.windows) cue = std::max(cue, windows.sink_tokens);
  if (options.recall_tokens <= cue) {
    return absl::InvalidArgumentError(absl::StrCat("--recall_tokens ", options.recall_tokens,
                                                   ": the sink of ", cue, " tokens holds them"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status QualityOptions::Validate() const {
  OKV_RETURN_IF_ERROR(text.Validate());
  if (text.windows_count() < 2) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens ", text.tokens, " are one window of ",
                                                   text.window, ": an interval needs 2"));
  }
  if (rotations.empty()) return absl::InvalidArgumentError("--rotations is missing");
  if (windows.empty()) return absl::InvalidArgumentError("--windows is missing");
  return CheckRecall(*this);
}

absl::StatusOr<QualityReport> RunQuality(const QualityOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_ASSIGN_OR_RETURN(const LoadedWindows loaded, LoadWindows(options.text));
  OKV_ASSIGN_OR_RETURN(const Lineup lineup, MakeLineup(options, loaded.model->config()));
  OKV_RETURN_IF_ERROR(
      CheckHistory(absl::MakeConstSpan(lineup.contenders).subspan(1, lineup.variants_count),
                   options.text.window));
  RecallOptions recall_options = {.passage_tokens = options.recall_tokens,
                                  .passages = options.recall_passages,
                                  .cue_tokens = CueTokens(lineup.contenders)};
  if (options.recall_tokens == 0) recall_options.passages = 0;
  std::vector<RecallScores> recall;
  if (recall_options.passages > 0) {
    OKV_ASSIGN_OR_RETURN(recall, ScoreRecall(loaded, lineup.contenders, recall_options));
  }
  OKV_ASSIGN_OR_RETURN(
      const std::vector<WindowScores> scores,
      ScoreWindows(options.text, loaded, lineup.contenders, {.command = "quality"}));
  QualityReport report = Summarize(options, lineup, scores, recall);
  report.model = loaded.model->config().name;
  report.recall = recall_options;
  return report;
}

}  // namespace okv
