#include "cmd/bench/score.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cmd/engine/row_ops.h"
#include "cmd/engine/sampler.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Fed to one contender before the next has its turn.
constexpr size_t kTurnTokens = 128;

// The baseline's distributions behind the tokens of one turn. Rows are independent: several
// threads may keep or compare different ones.
class BaselineRows {
 public:
  BaselineRows(size_t rows_count, size_t vocab)
      : vocab_(vocab),
        logits_(rows_count * vocab),
        weights_(rows_count * vocab),
        sums_(rows_count),
        tops_(rows_count) {}

  void Keep(size_t row, absl::Span<const float> logits) {
    float* kept = logits_.data() + row * vocab_;
    float* weights = weights_.data() + row * vocab_;
    std::copy(logits.begin(), logits.end(), kept);
    tops_[row] = GreedyToken(logits);
    const double max = logits[tops_[row]];
    double sum = 0;
    for (size_t i = 0; i < vocab_; ++i) {
      const double weight = std::exp(logits[i] - max);
      weights[i] = static_cast<float>(weight);
      sum += weight;
    }
    sums_[row] = sum;
  }

  // sum p (log p - log q) = sum p (x_p - x_q) - (log Z_p - log Z_q) for logits x. Equal logits give
  // 0 exactly; what rounding leaves below 0 is 0.
  double Kl(size_t row, absl::Span<const float> logits) const {
    const float* kept = logits_.data() + row * vocab_;
    const float* weights = weights_.data() + row * vocab_;
    const double kept_max = kept[tops_[row]];
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    double weighted = 0;
    for (size_t i = 0; i < vocab_; ++i) {
      sum += std::exp(logits[i] - max);
      weighted += double{weights[i]} * (double{kept[i]} - double{logits[i]});
    }
    const double log_ratio = kept_max + std::log(sums_[row]) - (max + std::log(sum));
    return std::max(0.0, weighted / sums_[row] - log_ratio);
  }

  uint32_t top(size_t row) const { return tops_[row]; }

 private:
  const size_t vocab_;
  std::vector<float> logits_;   // [rows, vocab]
  std::vector<float> weights_;  // [rows, vocab], exp(logit - max)
  std::vector<double> sums_;    // [rows]: of the weights, before they were rounded.
  std::vector<uint32_t> tops_;  // [rows]
};

absl::Status Annotate(const Contender& contender, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(
      status.code(), absl::StrCat("'", contender.name, "': ", absl::string_view(status.message())));
}

// All tokens, but the last of which nothing is predicted, through the caches of all contenders.
class Lockstep {
 public:
  Lockstep(Model* model, absl::Span<const Contender> contenders, absl::Span<const uint32_t> tokens,
           const ScoreOptions& options)
      : model_(model),
        contenders_(contenders),
        tokens_(tokens),
        compare_(options.compare),
        first_(options.unscored_tokens),
        scores_(contenders.size(),
                std::vector<TokenScore>(tokens.size() - 1 - options.unscored_tokens)),
        rows_(options.compare ? std::min(kTurnTokens, scores_[0].size()) : 0,
              model->config().vocab) {}

  absl::Status Run(ThreadPool* pool) {
    for (const Contender& contender : contenders_) {
      OKV_RETURN_IF_ERROR(Annotate(contender, Start(contender, pool)));
    }
    const size_t scored = scores_[0].size();
    const size_t turn = compare_ ? kTurnTokens : scored;
    for (size_t start = 0; start < scored; start += turn) {
      for (size_t i = 0; i < contenders_.size(); ++i) {
        OKV_RETURN_IF_ERROR(
            Annotate(contenders_[i], Turn(i, start, std::min(turn, scored - start))));
      }
    }
    return absl::OkStatus();
  }

  std::vector<std::vector<TokenScore>> TakeScores() { return std::move(scores_); }

 private:
  absl::Status Start(const Contender& contender, ThreadPool* pool) {
    OKV_ASSIGN_OR_RETURN(
        std::unique_ptr<KvCache> cache,
        MakeCache(model_->config(), contender, static_cast<uint32_t>(tokens_.size()), pool));
    caches_.push_back(std::move(cache));
    if (first_ == 0) return absl::OkStatus();
    return model_->Forward(tokens_.first(first_), caches_.back().get()).status();
  }

  absl::Status Turn(size_t contender, size_t start, size_t count) {
    return model_->ForwardAll(tokens_.subspan(first_ + start, count), caches_[contender].get(),
                              [&](size_t row, absl::Span<const float> logits) {
                                if (compare_ && contender == 0) rows_.Keep(row, logits);
                                scores_[contender][start + row] =
                                    Score(row, tokens_[first_ + start + row + 1], logits);
                              });
  }

  TokenScore Score(size_t row, uint32_t token, absl::Span<const float> logits) const {
    const uint32_t top = GreedyToken(logits);
    TokenScore score = {.nll = NegativeLogLikelihood(logits, token), .is_top1 = top == token};
    if (compare_) {
      score.kl = rows_.Kl(row, logits);
      score.agrees = top == rows_.top(row);
    }
    return score;
  }

  Model* const model_;
  const absl::Span<const Contender> contenders_;
  const absl::Span<const uint32_t> tokens_;
  const bool compare_;
  const size_t first_;  // Tokens fed before the first score.
  std::vector<std::vector<TokenScore>> scores_;
  BaselineRows rows_;
  std::vector<std::unique_ptr<KvCache>> caches_;
};

}  // namespace

absl::StatusOr<std::vector<std::vector<TokenScore>>> ScoreTokens(
    Model* model, absl::Span<const Contender> contenders, absl::Span<const uint32_t> tokens,
    const ScoreOptions& options, ThreadPool* pool) {
  OKV_CHECK(!contenders.empty() && tokens.size() >= size_t{options.unscored_tokens} + 2);
  // The last token is fed to nobody: Model checks only what it is fed.
  if (tokens.back() >= model->config().vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("token ", tokens.back(), " of ", model->config().vocab));
  }
  Lockstep lockstep(model, contenders, tokens, options);
  OKV_RETURN_IF_ERROR(lockstep.Run(pool));
  return lockstep.TakeScores();
}

}  // namespace okv
