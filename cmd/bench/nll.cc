#include "cmd/bench/nll.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/bench/contender.h"
#include "cmd/support/kv.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

absl::StatusOr<std::vector<Contender>> MakeContenders(const NllOptions& options,
                                                      const ModelConfig& config) {
  std::vector<Contender> contenders = {MakeBf16Contender(config)};
  for (const auto& [name, path] : options.rotations) {
    OKV_ASSIGN_OR_RETURN(RotationSet rotations, ReadRotationFile(path));
    OKV_ASSIGN_OR_RETURN(Contender contender,
                         MakeContender(config, std::move(rotations),
                                       {.name = name,
                                        .windows = {.sink_tokens = options.sink_tokens,
                                                    .recent_tokens = options.recent_tokens}}));
    contenders.push_back(std::move(contender));
  }
  return contenders;
}

NllReport Summarize(const NllOptions& options, absl::Span<const Contender> contenders,
                    absl::Span<const WindowScores> scores) {
  const uint64_t seed = options.windows.seed;
  NllReport report;
  report.windows = options.windows.windows_count();
  report.tokens = report.windows * (options.windows.window - 1);
  if (contenders.size() > 1) {
    report.history_tokens = CountBits(contenders[1], options.windows.window - 1).history_tokens;
  }
  std::vector<size_t> order;
  for (size_t i = 0; i < contenders.size(); ++i) {
    report.nll[contenders[i].name] = MeanInterval(scores[i].nll, seed).mean;
    if (i == 0) continue;
    report.gap[contenders[i].name] = PairedInterval(scores[i].nll, scores[0].nll, seed);
    order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return report.gap[contenders[a].name].mean < report.gap[contenders[b].name].mean;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    report.difference[absl::StrCat(contenders[order[i]].name, "-", contenders[order[i - 1]].name)] =
        PairedInterval(scores[order[i]].nll, scores[order[i - 1]].nll, seed);
  }
  return report;
}

}  // namespace

absl::Status NllOptions::Validate() const {
  OKV_RETURN_IF_ERROR(windows.Validate());
  for (const auto& [name, path] : rotations) {
    if (name != kBf16Name) continue;
    return absl::InvalidArgumentError("--rotations: the name 'bf16' is the baseline's");
  }
  return absl::OkStatus();
}

absl::StatusOr<NllReport> RunNll(const NllOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_ASSIGN_OR_RETURN(const LoadedWindows loaded, LoadWindows(options.windows));
  OKV_ASSIGN_OR_RETURN(const std::vector<Contender> contenders,
                       MakeContenders(options, loaded.model->config()));
  if (contenders.size() > 1) {
    OKV_RETURN_IF_ERROR(
        CheckHistory(absl::MakeConstSpan(contenders).subspan(1), options.windows.window));
  }
  OKV_ASSIGN_OR_RETURN(
      const std::vector<WindowScores> scores,
      ScoreWindows(options.windows, loaded, contenders, {.command = "nll", .compare = false}));
  return Summarize(options, contenders, scores);
}

std::string NllReport::ToTable() const {
  std::string table = absl::StrFormat(
      "%u tokens in %u windows, up to %u of a window read from INT2; intervals: 95 %%, %s\n"
      "%-12s %10s  %s\n",
      tokens, windows, history_tokens, IntervalMethod(windows), "KV history", "NLL", "gap to BF16");
  for (const auto& [name, value] : nll) {
    absl::StrAppendFormat(&table, "%-12s %10.5f", name, value);
    if (const auto found = gap.find(name); found != gap.end()) {
      absl::StrAppendFormat(&table, "  %.5f [%.5f, %.5f]", found->second.mean, found->second.low,
                            found->second.high);
    }
    table += "\n";
  }
  for (const auto& [names, value] : difference) {
    absl::StrAppendFormat(&table, "%-24s %.5f [%.5f, %.5f]\n", names, value.mean, value.low,
                          value.high);
  }
  return table;
}

std::string NllReport::ToJson() const {
  const auto intervals = [](const std::map<std::string, Interval>& map) {
    nlohmann::json json = nlohmann::json::object();
    for (const auto& [name, value] : map) {
      json[name] = {{"mean", value.mean}, {"low", value.low}, {"high", value.high}};
    }
    return json;
  };
  return nlohmann::json({{"tokens", tokens},
                         {"windows", windows},
                         {"history_tokens", history_tokens},
                         {"interval", IntervalMethod(windows)},
                         {"nll", nll},
                         {"gap", intervals(gap)},
                         {"difference", intervals(difference)}})
      .dump();
}

}  // namespace okv
