#include "cmd/bench/windows.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/bench/score.h"
#include "cmd/support/kv.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kResamplesCount = 10000;

void AddWindow(absl::Span<const TokenScore> tokens, WindowScores* scores) {
  double nll = 0;
  double kl = 0;
  double agreement = 0;
  for (const TokenScore& token : tokens) {
    nll += token.nll;
    kl += token.kl;
    agreement += token.agrees ? 1 : 0;
  }
  const double count = static_cast<double>(tokens.size());
  scores->nll.push_back(nll / count);
  scores->kl.push_back(kl / count);
  scores->agreement.push_back(agreement / count);
}

}  // namespace

absl::Status WindowsOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is missing");
  if (text.empty()) return absl::InvalidArgumentError("--text is missing");
  OKV_RETURN_IF_ERROR(ValidateThreads(threads));
  if (window < 2 || tokens == 0 || tokens % window != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tokens ", tokens, " is not a multiple of --window ", window));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadedWindows> LoadWindows(const WindowsOptions& options) {
  LoadedWindows loaded;
  loaded.pool = std::make_unique<ThreadPool>(
      options.threads != 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency()));
  OKV_ASSIGN_OR_RETURN(loaded.model, Model::Load(options.model, loaded.pool.get()));
  const uint32_t context = loaded.model->config().context_tokens;
  // The last token of a window is predicted, not fed.
  if (options.window - 1 > context) {
    return absl::InvalidArgumentError(
        absl::StrCat("--window ", options.window, ": the model has ", context, " positions"));
  }
  OKV_ASSIGN_OR_RETURN(loaded.tokens, ReadTokens(loaded.model->tokenizer(), options.text,
                                                 {.skip_tokens = options.skip_tokens,
                                                  .tokens_count = options.tokens}));
  return loaded;
}

absl::StatusOr<std::vector<WindowScores>> ScoreWindows(const WindowsOptions& options,
                                                       const LoadedWindows& loaded,
                                                       absl::Span<const Contender> contenders,
                                                       const ScoreWindowsOptions& score_options) {
  std::vector<WindowScores> scores(contenders.size());
  for (uint32_t window = 0; window < options.windows_count(); ++window) {
    const auto tokens =
        absl::MakeConstSpan(loaded.tokens).subspan(size_t{window} * options.window, options.window);
    OKV_ASSIGN_OR_RETURN(const std::vector<std::vector<TokenScore>> tokens_scores,
                         ScoreTokens(loaded.model.get(), contenders, tokens,
                                     {.compare = score_options.compare}, loaded.pool.get()));
    for (size_t i = 0; i < contenders.size(); ++i) {
      AddWindow(tokens_scores[i], &scores[i]);
      absl::FPrintF(stderr, "okv-bench %s: window %d of %d, %-10s %.5f\n", score_options.command,
                    window + 1, options.windows_count(), contenders[i].name, scores[i].nll.back());
    }
  }
  return scores;
}

absl::Status CheckHistory(absl::Span<const Contender> variants, uint32_t window) {
  uint32_t least = UINT32_MAX;
  for (const Contender& variant : variants) {
    if (CountBits(variant, window - 1).history_tokens > 0) return absl::OkStatus();
    least = std::min(least, variant.format.sink_tokens + variant.format.recent_tokens);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--window ", window, ": no token would be read from INT2 behind ", least,
                   " sink and recent tokens and the block that is being written"));
}

Interval MeanInterval(absl::Span<const double> values, uint64_t seed) {
  return BootstrapMean(values, kResamplesCount, seed);
}

Interval PairedInterval(absl::Span<const double> values, absl::Span<const double> baseline,
                        uint64_t seed) {
  OKV_CHECK(values.size() == baseline.size());
  std::vector<double> differences;
  for (size_t i = 0; i < values.size(); ++i) differences.push_back(values[i] - baseline[i]);
  return MeanInterval(differences, seed);
}

}  // namespace okv
