#ifndef OKV_CMD_BENCH_SCORE_H_
#define OKV_CMD_BENCH_SCORE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/bench/contender.h"
#include "cmd/engine/model.h"
#include "kernels/thread_pool.h"

namespace okv {

// How one token of a text was predicted from the true tokens before it.
struct TokenScore {
  float nll = 0;         // -log p(token), nats.
  double kl = 0;         // KL(baseline || this) of the distributions, nats; never negative.
  bool is_top1 = false;  // The token is the likeliest one, the lowest of equals.
  bool agrees = false;   // The likeliest token is the baseline's.
};

struct ScoreOptions {
  // The predictions of tokens 1 to unscored_tokens are not looked at.
  uint32_t unscored_tokens = 0;
  // Without, kl and agrees stay as they are, and less memory and time are needed.
  bool compare = true;
};

// Feeds `tokens` to every contender, each with an empty cache, the first being the baseline: by
// contender, the scores of tokens[unscored_tokens + 1] and all behind it. Contenders take turns
// every few rows, so that of distributions no more than those rows of the baseline are held: 128
// rows x 49,152 tokens x 8 bytes = 50 MB. That changes no bit of any score. Errors as MakeCache and
// Model::ForwardAll, beginning with the contender's name. REQUIRES: contenders not empty,
// tokens.size() >= unscored_tokens + 2. Blocks until done.
absl::StatusOr<std::vector<std::vector<TokenScore>>> ScoreTokens(
    Model* model, absl::Span<const Contender> contenders, absl::Span<const uint32_t> tokens,
    const ScoreOptions& options, ThreadPool* pool);

}  // namespace okv

#endif  // OKV_CMD_BENCH_SCORE_H_
