#include "cmd/bench/recall.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/bench/score.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr char kSeparator[] = "\n\n";

absl::Status CheckWindows(absl::Span<const Contender> contenders, uint32_t passage_tokens) {
  for (const Contender& contender : contenders.subspan(1)) {
    // The token read and the token predicted are at least W + 1 blocks apart.
    const uint64_t needed = uint64_t{contender.format.recent_tokens} + kBlockTokens;
    if (passage_tokens >= needed) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--recall_tokens ", passage_tokens, ": with the recent window of '",
                     contender.name, "' history holds the passage only from ", needed, " on"));
  }
  return absl::OkStatus();
}

void AddPassage(absl::Span<const TokenScore> tokens, RecallScores* scores) {
  std::vector<bool> is_right;
  double right = 0;
  double agreement = 0;
  for (const TokenScore& token : tokens) {
    is_right.push_back(token.is_top1);
    right += token.is_top1 ? 1 : 0;
    agreement += token.agrees ? 1 : 0;
  }
  const double count = static_cast<double>(tokens.size());
  const RunLengths runs = CountRuns(is_right);
  scores->accuracy.push_back(right / count);
  scores->agreement.push_back(agreement / count);
  scores->mean_run.push_back(runs.mean);
  scores->longest_run.push_back(runs.longest);
}

}  // namespace

RunLengths CountRuns(const std::vector<bool>& is_right) {
  OKV_CHECK(!is_right.empty());
  RunLengths lengths;
  uint32_t run = 0;
  double sum = 0;
  for (size_t i = is_right.size(); i-- > 0;) {
    run = is_right[i] ? run + 1 : 0;
    sum += run;
    lengths.longest = std::max(lengths.longest, run);
  }
  lengths.mean = sum / static_cast<double>(is_right.size());
  return lengths;
}

uint32_t CueTokens(absl::Span<const Contender> contenders) {
  uint32_t cue = 0;
  for (const Contender& contender : contenders) {
    cue = std::max(cue, contender.format.sink_tokens);
  }
  return cue;
}

absl::StatusOr<std::vector<RecallScores>> ScoreRecall(const LoadedWindows& loaded,
                                                      absl::Span<const Contender> contenders,
                                                      const RecallOptions& options) {
  const uint32_t passage_tokens = options.passage_tokens;
  OKV_CHECK(options.cue_tokens > 0 && passage_tokens > options.cue_tokens);
  OKV_CHECK(loaded.tokens.size() >= uint64_t{passage_tokens} * options.passages);
  OKV_RETURN_IF_ERROR(CheckWindows(contenders, passage_tokens));
  const std::vector<uint32_t> separator = loaded.model->tokenizer().Encode(kSeparator);
  const uint64_t length = 2 * uint64_t{passage_tokens} + separator.size();
  const uint32_t context = loaded.model->config().context_tokens;
  if (length - 1 > context) {
    return absl::InvalidArgumentError(
        absl::StrCat("--recall_tokens ", passage_tokens, ": twice that and a separator are ",
                     length, " tokens, the model has ", context, " positions"));
  }
  std::vector<RecallScores> scores(contenders.size());
  for (uint32_t passage = 0; passage < options.passages; ++passage) {
    const auto first = loaded.tokens.begin() + int64_t{passage} * passage_tokens;
    std::vector<uint32_t> tokens(first, first + passage_tokens);
    tokens.insert(tokens.end(), separator.begin(), separator.end());
    tokens.insert(tokens.end(), first, first + passage_tokens);
    const uint32_t uncounted = static_cast<uint32_t>(length) - passage_tokens + options.cue_tokens;
    OKV_ASSIGN_OR_RETURN(const std::vector<std::vector<TokenScore>> tokens_scores,
                         ScoreTokens(loaded.model.get(), contenders, tokens,
                                     {.unscored_tokens = uncounted - 1}, loaded.pool.get()));
    for (size_t i = 0; i < contenders.size(); ++i) {
      AddPassage(tokens_scores[i], &scores[i]);
      absl::FPrintF(stderr, "okv-bench quality: passage %d of %d, %-10s %.4f recalled\n",
                    passage + 1, options.passages, contenders[i].name, scores[i].accuracy.back());
    }
  }
  return scores;
}

}  // namespace okv
