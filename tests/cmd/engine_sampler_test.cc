#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cmd/engine/sampler.h"

namespace okv {
namespace {

using ::testing::HasSubstr;

TEST(SamplerTest, GreedyTakesTheLikeliestAndTheLowestOfEquals) {
  Sampler sampler({});
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, 5, 3, 5}), 1u);
  EXPECT_EQ(sampler.Sample(std::vector<float>{-2, -7}), 0u);
}

TEST(SamplerTest, TheSameSeedGivesTheSameDrawsAndThoseNeverChange) {
  const std::vector<float> logits(1000, 0.0f);
  Sampler first({.temperature = 1, .seed = 7}), second({.temperature = 1, .seed = 7});
  std::vector<uint32_t> draws;
  for (int i = 0; i < 4; ++i) {
    draws.push_back(first.Sample(logits));
    EXPECT_EQ(second.Sample(logits), draws.back());
  }
  // floor(1000 u) of mt19937_64(7): the generator's output is fixed by the standard.
  std::mt19937_64 random(7);
  for (const uint32_t draw : draws) {
    EXPECT_EQ(draw, static_cast<uint32_t>(static_cast<double>(random() >> 11) * 0x1p-53 * 1000));
  }
}

TEST(SamplerTest, DrawsFollowTheTemperedProbabilities) {
  // Probabilities 1/6, 2/6, 3/6 at temperature 2.
  const std::vector<float> logits = {0, 2 * std::log(2.0f), 2 * std::log(3.0f)};
  Sampler sampler({.temperature = 2, .seed = 1});
  std::vector<int> counts(3);
  constexpr int kDraws = 60000;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.Sample(logits)];
  // Five standard deviations of a binomial count at p = 1/2: 612.
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(counts[i], kDraws * (i + 1) / 6, 612);
}

TEST(SamplerTest, TopKAndTopPKeepOnlyTheLikeliest) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f),
                                     std::log(0.3f)};
  Sampler top_k({.temperature = 1, .top_k = 2, .seed = 1});
  Sampler top_p({.temperature = 1, .top_p = 0.65f, .seed = 1});
  Sampler one({.temperature = 1, .top_p = 0.01f, .seed = 1});
  std::vector<int> by_k(4), by_p(4);
  for (int i = 0; i < 2000; ++i) {
    ++by_k[top_k.Sample(logits)];
    ++by_p[top_p.Sample(logits)];
    EXPECT_EQ(one.Sample(logits), 1u);
  }
  for (const std::vector<int>& counts : {by_k, by_p}) {
    EXPECT_EQ(counts[0] + counts[2], 0);
    EXPECT_GT(counts[1], counts[3]);
    EXPECT_GT(counts[3], 0);
  }
}

TEST(SamplerTest, ValidateNamesTheField) {
  EXPECT_TRUE(SamplerOptions().Validate().ok());
  const auto message = [](const SamplerOptions& options) {
    EXPECT_EQ(options.Validate().code(), absl::StatusCode::kInvalidArgument);
    return std::string(options.Validate().message());
  };
  EXPECT_THAT(message({.temperature = -1}), HasSubstr("temperature"));
  EXPECT_THAT(message({.temperature = std::numeric_limits<float>::quiet_NaN()}),
              HasSubstr("temperature"));
  EXPECT_THAT(message({.top_p = 0}), HasSubstr("top_p"));
  EXPECT_THAT(message({.top_p = 1.5f}), HasSubstr("top_p"));
}

}  // namespace
}  // namespace okv
