#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cmd/bench/recall.h"
#include "cmd/bench/score.h"
#include "cmd/engine/sampler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cmd/bench_tiny.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::LoadTiny;
using testing_support::RandomTokens;
using testing_support::TinyContender;
using testing_support::TinyModel;

class ScoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<KvCache> Cache(const Contender& contender) {
    auto cache = MakeCache(model_->config(), contender, TinyModel::kContext, &pool_);
    EXPECT_TRUE(cache.ok()) << cache.status();
    return *std::move(cache);
  }

  std::vector<std::vector<TokenScore>> Score(const std::vector<Contender>& contenders,
                                             const std::vector<uint32_t>& tokens,
                                             const ScoreOptions& options = {}) {
    auto scores = ScoreTokens(model_.get(), contenders, tokens, options, &pool_);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return *std::move(scores);
  }

  // log p of every token behind every token but the last.
  std::vector<std::vector<double>> LogProbabilities(const Contender& contender,
                                                    const std::vector<uint32_t>& tokens) {
    std::vector<std::vector<double>> rows(tokens.size() - 1);
    const std::unique_ptr<KvCache> cache = Cache(contender);
    const absl::Status status =
        model_->ForwardAll(absl::MakeConstSpan(tokens).first(tokens.size() - 1), cache.get(),
                           [&](size_t index, absl::Span<const float> logits) {
                             double sum = 0;
                             for (const float logit : logits) sum += std::exp(double{logit});
                             for (const float logit : logits)
                               rows[index].push_back(logit - std::log(sum));
                           });
    EXPECT_TRUE(status.ok()) << status;
    return rows;
  }

  ThreadPool pool_{2};
  const std::unique_ptr<Model> model_ = LoadTiny(&pool_);
  const ModelConfig& config_ = model_->config();
  const Contender bf16_ = MakeBf16Contender(config_);
  const Contender int2_ = TinyContender(config_, "hadamard", {.name = "a", .windows = {64, 64}});
  const Contender int8_ =
      TinyContender(config_, "hadamard", {.name = "b", .windows = {64, 64}, .history_bits = 8});
};

TEST_F(ScoreTest, NllsAreThoseOfEachContenderAloneBitForBit) {
  const std::vector<uint32_t> tokens = RandomTokens(450, 1);
  const std::vector<Contender> contenders = {bf16_, int2_, int8_};
  const auto scores = Score(contenders, tokens);
  const auto without = Score(contenders, tokens, {.compare = false});
  const auto later = Score(contenders, tokens, {.unscored_tokens = 131});
  for (size_t i = 0; i < contenders.size(); ++i) {
    const std::unique_ptr<KvCache> cache = Cache(contenders[i]);
    const auto nll = model_->ForwardNll(absl::MakeConstSpan(tokens).first(449),
                                        absl::MakeConstSpan(tokens).subspan(1), cache.get());
    ASSERT_TRUE(nll.ok()) << nll.status();
    ASSERT_EQ(scores[i].size(), 449u);
    ASSERT_EQ(later[i].size(), 449u - 131);
    for (size_t t = 0; t < 449; ++t) {
      EXPECT_EQ(scores[i][t].nll, (*nll)[t]) << contenders[i].name << ", token " << t;
      EXPECT_EQ(without[i][t].nll, (*nll)[t]);
      if (t >= 131) {
        EXPECT_EQ(later[i][t - 131].nll, (*nll)[t]);
      }
    }
  }
}

TEST_F(ScoreTest, ADivergenceIsThatOfTheDistributionsAndNeverNegative) {
  const std::vector<uint32_t> tokens = RandomTokens(400, 2);
  const auto scores = Score({bf16_, int2_, int8_}, tokens);
  const auto p = LogProbabilities(bf16_, tokens);
  const auto q = LogProbabilities(int2_, tokens);
  double total = 0;
  double total8 = 0;
  for (size_t t = 0; t < p.size(); ++t) {
    double kl = 0;
    size_t p_top = 0;
    size_t q_top = 0;
    for (size_t i = 0; i < p[t].size(); ++i) {
      kl += std::exp(p[t][i]) * (p[t][i] - q[t][i]);
      if (p[t][i] > p[t][p_top]) p_top = i;
      if (q[t][i] > q[t][q_top]) q_top = i;
    }
    EXPECT_NEAR(scores[1][t].kl, kl, 1e-7 + 1e-4 * kl) << t;
    EXPECT_EQ(scores[1][t].agrees, p_top == q_top) << t;
    EXPECT_EQ(scores[1][t].is_top1, q_top == tokens[t + 1]) << t;
    EXPECT_GE(scores[1][t].kl, 0);
    EXPECT_GE(scores[2][t].kl, 0);
    total += scores[1][t].kl;
    total8 += scores[2][t].kl;
  }
  EXPECT_GT(total, 0);
  EXPECT_LT(total8, total / 10);
}

TEST_F(ScoreTest, Bf16AgainstItselfHasNoDivergenceAndAlwaysAgrees) {
  const Contender same =
      TinyContender(config_, "none", {.name = "same", .windows = {64, kBf16RecentTokens}});
  const auto scores = Score({bf16_, same}, RandomTokens(300, 3));
  for (const auto& contender : scores) {
    for (const TokenScore& token : contender) {
      EXPECT_EQ(token.kl, 0);
      EXPECT_TRUE(token.agrees);
    }
  }
}

// What recall.h concludes a continuation from.
TEST_F(ScoreTest, AGreedyContinuationIsTheRunOfRightPredictionsUpToTheFirstWrongToken) {
  std::vector<uint32_t> tokens = RandomTokens(300, 4);
  const std::unique_ptr<KvCache> cache = Cache(int2_);
  auto logits = model_->Forward(tokens, cache.get());
  for (int i = 0; i < 150; ++i) {
    ASSERT_TRUE(logits.ok()) << logits.status();
    tokens.push_back(GreedyToken(*logits));
    logits = model_->Forward(absl::MakeConstSpan(tokens).last(1), cache.get());
  }
  const auto run = [&] {
    std::vector<bool> is_right;
    const auto scores = Score({bf16_, int2_}, tokens, {.unscored_tokens = 299});
    for (const TokenScore& token : scores[1]) is_right.push_back(token.is_top1);
    EXPECT_EQ(is_right.size(), 150u);
    is_right.push_back(false);  // Its own end, whatever follows.
    return std::find(is_right.begin(), is_right.end(), false) - is_right.begin();
  };
  EXPECT_EQ(run(), 150);
  tokens[300 + 70] = (tokens[300 + 70] + 1) % TinyModel::kVocab;
  EXPECT_EQ(run(), 70);
}

TEST_F(ScoreTest, AnErrorNamesTheContenderAndAForeignLastTokenIsRefused) {
  const std::vector<Contender> contenders = {bf16_, int2_};
  std::vector<uint32_t> tokens = RandomTokens(TinyModel::kContext + 2, 5);
  absl::Status status = ScoreTokens(model_.get(), contenders, tokens, {}, &pool_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'bf16'"));
  tokens = {1, 2, TinyModel::kVocab};
  status = ScoreTokens(model_.get(), contenders, tokens, {}, &pool_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("token 288"));
}

TEST(CountRunsTest, AreThoseFromEveryStart) {
  // From each start: 2, 1, 0, 3, 2, 1.
  const RunLengths runs = CountRuns({true, true, false, true, true, true});
  EXPECT_EQ(runs.longest, 3u);
  EXPECT_DOUBLE_EQ(runs.mean, 9.0 / 6);
  EXPECT_EQ(CountRuns({false, false}).longest, 0u);
  EXPECT_EQ(CountRuns({false, false}).mean, 0);
}

}  // namespace
}  // namespace okv
