#include "calib/choose.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "calib/linalg.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/page_layout.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::Ge;
using testing::SizeIs;

constexpr uint32_t kDim = 64;

Matrix Identity() {
  Matrix identity(size_t{kDim} * kDim, 0.0);
  for (uint32_t i = 0; i < kDim; ++i) identity[size_t{i} * kDim + i] = 1.0;
  return identity;
}

// Unit Gaussian rows around `mean` in each of the first `channels` channels.
RowSample GaussianRows(uint32_t rows_count, float mean, uint32_t channels, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  RowSample sample{.dim = kDim, .rows = {}};
  for (uint32_t i = 0; i < rows_count * kDim; ++i) {
    sample.rows.push_back(FloatToBf16(normal(random) + (i % kDim < channels ? mean : 0.0f)));
  }
  return sample;
}

TEST(SplitTokensTest, TheLastQuarterIsHeldOutAndSinksAreInNeitherPart) {
  const TokenSplit split = SplitTokens({200, 100, 300}, 1000);  // Held out: from token 450.
  EXPECT_THAT(split.fit, SizeIs(136 + 36 + 86));
  EXPECT_EQ(split.fit.front(), 64u);
  EXPECT_EQ(split.fit[136], 264u);
  EXPECT_EQ(split.fit.back(), 449u);
  EXPECT_THAT(split.held_out, SizeIs(150));
  EXPECT_THAT(split.held_out, Each(Ge(450u)));
  EXPECT_EQ(split.held_out_range.first_token, 450u);
  EXPECT_EQ(split.held_out_range.tokens_count, 150u);
}

TEST(SplitTokensTest, TokensMaxThinsEvenly) {
  const TokenSplit split = SplitTokens({864}, 100);
  EXPECT_THAT(split.fit, SizeIs(98));  // 584 tokens, every 6th.
  EXPECT_EQ(split.fit[1] - split.fit[0], 6u);
  EXPECT_EQ(split.held_out_range.tokens_count, 216u);
}

TEST(SplitTokensTest, ShortSequencesKeepTheirSinks) {
  EXPECT_THAT(SplitTokens({3}, 10).fit, ElementsAre(0, 1));
  EXPECT_THAT(SplitTokens({3}, 10).held_out, ElementsAre(2));
  EXPECT_THAT(SplitTokens({1}, 10).fit, ElementsAre(0));
  EXPECT_THAT(SplitTokens({1}, 10).held_out, ElementsAre(0));
}

// 150 rows: more than one call of the codec, and a part of another.
TEST(RowErrorTest, MatchesTheScalarCodec) {
  const RowSample sample = GaussianRows(150, 2, 3, 5);
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  Matrix weight = Identity();
  for (uint32_t i = 0; i < kDim; ++i) weight[size_t{i} * kDim + i] = 1.0 + i;
  weight[1] = weight[kDim] = 0.5;

  std::vector<std::vector<double>> errors;
  const PageLayout layout{.layers_count = 1, .kv_heads = 1, .head_dim = kDim, .group_size = 32};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  for (size_t row = 0; row < 150; ++row) {
    std::vector<uint16_t> y(size_t{64} * kDim, 0);
    reference::RotateRows({.x = sample.rows.data() + row * kDim,
                           .x_stride = kDim,
                           .r = r.data(),
                           .rows_count = 1,
                           .dim = kDim},
                          y.data(), kDim);
    BadRow bad;
    ASSERT_TRUE(reference::QuantizeRun({.k = y.data(),
                                        .v = y.data(),
                                        .row_stride = kDim,
                                        .dim = kDim,
                                        .group_size = 32,
                                        .clip_rank_k = 57,
                                        .clip_rank_v = 57},
                                       run.data(), &bad)
                    .ok());
    std::vector<float> k(y.size());
    std::vector<float> v(y.size());
    reference::DequantizeRunF32({.run = run.data(), .dim = kDim, .group_size = 32}, k.data(),
                                v.data());
    std::vector<double> error(kDim, 0.0);
    for (uint32_t c = 0; c < kDim; ++c) {
      for (uint32_t n = 0; n < kDim; ++n) error[c] += double{k[n]} * Bf16ToFloat(r[c * kDim + n]);
      error[c] -= Bf16ToFloat(sample.rows[row * kDim + c]);
    }
    errors.push_back(error);
  }
  std::vector<double> mean(kDim, 0.0);
  for (const auto& error : errors) {
    for (uint32_t c = 0; c < kDim; ++c) mean[c] += error[c] / 150;
  }
  const auto form = [&](const std::vector<double>& e) {
    double sum = 0;
    for (uint32_t i = 0; i < kDim; ++i) {
      for (uint32_t j = 0; j < kDim; ++j) sum += e[i] * weight[i * kDim + j] * e[j];
    }
    return sum;
  };
  double centered = 0;
  for (std::vector<double> error : errors) {
    for (uint32_t c = 0; c < kDim; ++c) error[c] -= mean[c];
    centered += form(error) / 150;
  }
  for (const double factor : {0.0, 1.0, 30.0}) {
    const auto error = RowError(sample, {.rotation = r.data(), .group_size = 32, .clip_rank = 57},
                                {.weight = weight, .mean_factor = factor});
    ASSERT_TRUE(error.ok()) << error.status();
    const double expected = centered + factor * form(mean);
    EXPECT_NEAR(*error, expected, 1e-4 * expected);
  }
}

TEST(RowErrorTest, ARowThatTheCodecRefusesIsAnInvalidArgument) {
  RowSample sample = GaussianRows(70, 0, 0, 1);
  sample.rows[65 * kDim] = 0x7f80;
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  const auto error = RowError(sample, {.rotation = r.data(), .group_size = 64, .clip_rank = 0},
                              {.weight = Identity(), .mean_factor = 1});
  EXPECT_EQ(error.status().code(), absl::StatusCode::kInvalidArgument);
}

// A mean in several basis vectors adds up in a few channels of the rotated row or spreads over
// all, as the signs have it.
TEST(ChooseRotationTest, TheSignFitLowersTheHeldOutErrorOfRowsWithAMean) {
  const std::vector<HeadRows> heads = {{.fit = GaussianRows(500, 6, 16, 1),
                                        .held_out = GaussianRows(500, 6, 16, 2),
                                        .objective = {.weight = Identity(), .mean_factor = 1}}};
  const auto choice = ChooseRotation({Identity()}, heads, {.group_size = 64, .clip_ranks = {56}});
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_TRUE(choice->signs_kept);
  EXPECT_LT(choice->error, 0.7 * choice->error_plain);
  EXPECT_LT(OrthogonalityError(choice->rotation.data(), kDim), 1.0 / 256);
  const auto held_out = RowError(
      heads[0].held_out, {.rotation = choice->rotation.data(), .group_size = 64, .clip_rank = 56},
      heads[0].objective);
  ASSERT_TRUE(held_out.ok());
  EXPECT_EQ(*held_out, choice->error);
  const auto again = ChooseRotation({Identity()}, heads, {.group_size = 64, .clip_ranks = {56}});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->rotation, choice->rotation);
}

// Rows to fit with a mean that the held-out rows do not have: at least one of the seeds fits signs
// that the held-out rows refuse, and no seed keeps signs that make them worse.
TEST(ChooseRotationTest, SignsThatDoNotHelpHeldOutRowsAreNotKept) {
  const std::vector<uint16_t> plain = RoundToBf16(RotationFromEigenvectors(Identity(), kDim));
  uint32_t refused = 0;
  for (uint32_t seed = 1; seed <= 8; ++seed) {
    const std::vector<HeadRows> heads = {{.fit = GaussianRows(40, 6, 16, seed),
                                          .held_out = GaussianRows(1000, 0, 0, seed + 100),
                                          .objective = {.weight = Identity(), .mean_factor = 1}}};
    const auto choice = ChooseRotation({Identity()}, heads, {.group_size = 64, .clip_ranks = {56}});
    ASSERT_TRUE(choice.ok()) << choice.status();
    EXPECT_EQ(choice->signs_kept, choice->error < choice->error_plain) << seed;
    EXPECT_EQ(choice->signs_kept, choice->rotation != plain) << seed;
    refused += choice->signs_kept ? 0 : 1;
  }
  EXPECT_GT(refused, 0u);
}

TEST(ChooseRotationTest, TheBasisIsTheOneOfLeastHeldOutErrorAndTheFirstOfEquals) {
  // Channel 9 holds the mean: it belongs at position 0, where the group's offset takes it.
  std::vector<HeadRows> heads = {{.fit = GaussianRows(300, 0, 0, 1),
                                  .held_out = GaussianRows(300, 0, 0, 2),
                                  .objective = {.weight = Identity(), .mean_factor = 1}}};
  for (RowSample* sample : {&heads[0].fit, &heads[0].held_out}) {
    for (size_t i = 9; i < sample->rows.size(); i += kDim) {
      sample->rows[i] = FloatToBf16(Bf16ToFloat(sample->rows[i]) + 40);
    }
  }
  Matrix swapped = Identity();
  swapped[0] = swapped[9 * kDim + 9] = 0;
  swapped[9 * kDim] = swapped[9] = 1;
  const ChooseOptions options = {.group_size = 64, .clip_ranks = {0, 57}, .fit_signs = false};
  const auto choice = ChooseRotation({Identity(), swapped, swapped}, heads, options);
  ASSERT_TRUE(choice.ok()) << choice.status();
  EXPECT_EQ(choice->basis, 1u);
  EXPECT_FALSE(choice->signs_kept);
  EXPECT_EQ(choice->rotation, RoundToBf16(RotationFromEigenvectors(swapped, kDim)));
}

TEST(BasisWithLeadingTest, IsOrthonormalAndBeginsWithTheLeadingVectors) {
  const LayerDump layer = SyntheticLayer({}, 3);
  ThreadPool pool(1);
  const auto keys = SymmetricEigen(KeyCovariance(layer, &pool)[0], kDim);
  ASSERT_TRUE(keys.ok());
  // A singular C: only three directions.
  Matrix c(size_t{kDim} * kDim, 0.0);
  for (uint32_t i = 0; i < 3; ++i) c[size_t{i} * kDim + i] = 3.0 - i;
  const auto basis = BasisWithLeading(keys->vectors, 2, c, kDim);
  ASSERT_TRUE(basis.ok()) << basis.status();
  for (uint32_t row = 0; row < kDim; ++row) {
    EXPECT_EQ((*basis)[row * kDim], keys->vectors[row * kDim]);
    EXPECT_EQ((*basis)[row * kDim + 1], keys->vectors[row * kDim + 1]);
  }
  double worst = 0;
  for (uint32_t i = 0; i < kDim; ++i) {
    for (uint32_t j = 0; j < kDim; ++j) {
      double sum = i == j ? -1.0 : 0.0;
      for (uint32_t row = 0; row < kDim; ++row) {
        sum += (*basis)[row * kDim + i] * (*basis)[row * kDim + j];
      }
      worst = std::max(worst, std::abs(sum));
    }
  }
  EXPECT_LT(worst, 1e-10);
}

}  // namespace
}  // namespace okv
