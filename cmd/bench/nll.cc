#include "cmd/bench/nll.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/engine/model.h"
#include "cmd/engine/tokenizer.h"
#include "cmd/support/kv.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr char kBaseline[] = "bf16";
constexpr uint32_t kResamplesCount = 10000;

struct Contender {
  std::string name;
  RotationSet rotations = {};
  Format format = {};
  std::vector<double> window_nll = {};  // Mean NLL of each window.
};

absl::StatusOr<std::vector<Contender>> MakeContenders(const NllOptions& options,
                                                      const ModelConfig& config) {
  std::vector<Contender> contenders;
  contenders.push_back({.name = kBaseline, .rotations = IdentityRotations(config)});
  contenders[0].format =
      MakeFormat(config, contenders[0].rotations, {.recent_tokens = kBf16RecentTokens});
  for (const auto& [name, path] : options.rotations) {
    Contender contender{.name = name};
    OKV_ASSIGN_OR_RETURN(contender.rotations, ReadRotationFile(path));
    contender.format =
        MakeFormat(config, contender.rotations,
                   {.sink_tokens = options.sink_tokens, .recent_tokens = options.recent_tokens});
    contenders.push_back(std::move(contender));
  }
  return contenders;
}

absl::StatusOr<double> WindowNll(Model* model, Contender* contender,
                                 absl::Span<const uint32_t> tokens, ThreadPool* pool) {
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Sequence> sequence,
                       MakeSequence(model->config(), contender->format, &contender->rotations,
                                    static_cast<uint32_t>(tokens.size()), pool));
  SequenceCache cache(sequence.get());
  OKV_ASSIGN_OR_RETURN(
      const std::vector<float> nll,
      model->ForwardNll(tokens.subspan(0, tokens.size() - 1), tokens.subspan(1), &cache));
  double sum = 0;
  for (const float value : nll) sum += value;
  return sum / static_cast<double>(nll.size());
}

Interval PairedDifference(const Contender& a, const Contender& b, uint64_t seed) {
  std::vector<double> differences;
  for (size_t i = 0; i < a.window_nll.size(); ++i) {
    differences.push_back(a.window_nll[i] - b.window_nll[i]);
  }
  return BootstrapMean(differences, kResamplesCount, seed);
}

NllReport Summarize(const NllOptions& options, std::vector<Contender> contenders) {
  NllReport report;
  report.windows = options.tokens / options.window;
  report.tokens = report.windows * (options.window - 1);
  for (const Contender& contender : contenders) {
    report.nll[contender.name] =
        BootstrapMean(contender.window_nll, /*resamples_count=*/1, options.seed).mean;
    if (contender.name == kBaseline) continue;
    report.gap[contender.name] = PairedDifference(contender, contenders[0], options.seed);
  }
  std::sort(contenders.begin() + 1, contenders.end(),
            [&report](const Contender& a, const Contender& b) {
              return report.gap[a.name].mean < report.gap[b.name].mean;
            });
  for (size_t i = 2; i < contenders.size(); ++i) {
    report.difference[absl::StrCat(contenders[i].name, "-", contenders[i - 1].name)] =
        PairedDifference(contenders[i], contenders[i - 1], options.seed);
  }
  return report;
}

}  // namespace

absl::Status NllOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is missing");
  if (text.empty()) return absl::InvalidArgumentError("--text is missing");
  OKV_RETURN_IF_ERROR(ValidateThreads(threads));
  if (window < 2 || tokens == 0 || tokens % window != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens ", tokens, " is not a multiple of --window ", window));
  }
  if (rotations.contains(kBaseline)) {
    return absl::InvalidArgumentError("--rotations: the name 'bf16' is the baseline's");
  }
  return absl::OkStatus();
}

absl::StatusOr<NllReport> RunNll(const NllOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  ThreadPool pool(options.threads != 0 ? options.threads
                                       : std::max(1u, std::thread::hardware_concurrency()));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options.model, &pool));
  OKV_ASSIGN_OR_RETURN(
      const std::vector<uint32_t> tokens,
      ReadTokens(model->tokenizer(), options.text,
                 {.skip_tokens = options.skip_tokens, .tokens_count = options.tokens}));
  OKV_ASSIGN_OR_RETURN(std::vector<Contender> contenders, MakeContenders(options, model->config()));
  for (uint32_t first = 0; first < options.tokens; first += options.window) {
    for (Contender& contender : contenders) {
      OKV_ASSIGN_OR_RETURN(const double nll,
                           WindowNll(model.get(), &contender,
                                     absl::MakeSpan(tokens).subspan(first, options.window), &pool));
      contender.window_nll.push_back(nll);
      std::fprintf(stderr, "okv-bench nll: window %u of %u, %-10s %.5f\n",
                   first / options.window + 1, options.tokens / options.window,
                   contender.name.c_str(), nll);
    }
  }
  return Summarize(options, std::move(contenders));
}

std::string NllReport::ToTable() const {
  std::string table = absl::StrFormat("%u tokens in %u windows\n%-12s %10s  %s\n", tokens, windows,
                                      "KV history", "NLL", "gap to BF16 (95 % interval)");
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
                         {"nll", nll},
                         {"gap", intervals(gap)},
                         {"difference", intervals(difference)}})
      .dump();
}

}  // namespace okv
