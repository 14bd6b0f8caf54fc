#ifndef OKV_CMD_BENCH_RECALL_H_
#define OKV_CMD_BENCH_RECALL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/bench/contender.h"
#include "cmd/bench/windows.h"

namespace okv {

// Verbatim recall. A sequence is passage + separator + the same passage; of its second half the
// first cue_tokens tell the model that the text repeats, and all others are counted. Each counted
// token must be predicted from what it wrote into the cache one passage ago, which lies in the
// history: neither in the sink (those tokens are in the cue) nor in the recent window (the passage
// is longer than that).
//
// Per passage: the share of counted tokens that are the likeliest one behind the true text before
// them (teacher-forced), and the greedy continuations that stay verbatim. A model that continues
// greedily from some counted token on reads the true text for as long as its tokens are the true
// ones, and an engine gives the same bits for any split into calls: so the tokens it gets right
// before its first error are the run of right teacher-forced predictions that begins there. One
// pass therefore gives the continuation from every start, and no start is chosen by hand:
//   mean_run     its length, mean over all counted tokens as starts, up to the passage's end
//   longest_run  the longest of them
// A model need not be able to recall its text: BF16 KV's own figures are the measure.
struct RecallOptions {
  uint32_t passage_tokens = 2048;  // Long texts: simple needle tests passed on broken caches.
  uint32_t passages = 4;           // The unit of the intervals.
  uint32_t cue_tokens = 64;        // At least the sink of every contender.
};

// By passage.
struct RecallScores {
  std::vector<double> accuracy;
  std::vector<double> agreement;  // Share of counted tokens with the baseline's likeliest token.
  std::vector<double> mean_run;
  std::vector<double> longest_run;
};

struct RunLengths {
  double mean = 0;
  uint32_t longest = 0;
};
// Of the runs of right predictions that begin at each of them. REQUIRES: not empty.
RunLengths CountRuns(const std::vector<bool>& is_right);

// The cue that all contenders need.
uint32_t CueTokens(absl::Span<const Contender> contenders);

// The passages are the first passages * passage_tokens of loaded.tokens. By contender, the first
// being the baseline. kInvalidArgument naming --recall_tokens: twice the passage does not fit into
// the model's context, or a contender's recent window would hold the first half. Otherwise errors
// as ScoreTokens. Progress goes to stderr. REQUIRES: so many tokens; passage_tokens > cue_tokens,
// all of them positive. Blocks until done.
absl::StatusOr<std::vector<RecallScores>> ScoreRecall(const LoadedWindows& loaded,
                                                      absl::Span<const Contender> contenders,
                                                      const RecallOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_RECALL_H_
