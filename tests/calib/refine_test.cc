#include "calib/refine.h"

#include <algorithm>
#include <cmath>

#include "calib/linalg.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kDim = 64;

RowWeights Even(const RowSample& rows) {
  const size_t count = rows.rows.size() / rows.dim;
  const std::vector<float> even(count, 1.0f / static_cast<float>(count));
  return {.weights = even, .masses = even, .mean_factor = 1};
}

// RowWeights' sum, through the codec itself.
double Error(const Matrix& rotation, const RowSample& sample, const RowWeights& weights,
             uint32_t group_size, uint32_t clip_rank) {
  const std::vector<uint16_t> bits = RoundToBf16(rotation);
  size_t bad_row = 0;
  const auto restored = RestoredRows(
      sample, {.rotation = bits.data(), .group_size = group_size, .clip_rank = clip_rank},
      &bad_row);
  EXPECT_TRUE(restored.ok()) << restored.status();
  const size_t dim = sample.dim;
  std::vector<double> mean(dim, 0.0);
  std::vector<double> errors(restored->size());
  for (size_t i = 0; i < errors.size(); ++i) {
    errors[i] = double{(*restored)[i]} - Bf16ToFloat(sample.rows[i]);
    mean[i % dim] += double{weights.masses[i / dim]} * errors[i];
  }
  double sum = 0;
  for (size_t i = 0; i < errors.size(); ++i) {
    const double own = errors[i] - mean[i % dim];
    sum += weights.weights[i / dim] * own * own;
  }
  for (const double m : mean) sum += weights.mean_factor * m * m;
  return sum;
}

class RefineTest : public testing::TestWithParam<std::pair<uint32_t, uint32_t>> {};
INSTANTIATE_TEST_SUITE_P(DimAndGroup, RefineTest,
                         testing::Values(std::pair(64u, 64u), std::pair(64u, 32u),
                                         std::pair(128u, 64u), std::pair(256u, 256u)));

// Rows of a few large directions that no transform by signs knows: the descent finds a basis in
// which they fit four levels better, for rows that it has not seen.
TEST_P(RefineTest, ADescentLowersTheErrorOfUnseenRowsAndStaysOrthogonal) {
  const auto [dim, group_size] = GetParam();
  const RowSample fit = SpikedRows(dim, 1500, 3, 7);
  const RowSample unseen = SpikedRows(dim, 700, 3, 8);
  const RowWeights weights = Even(fit);
  const WeightedRows head{.rows = &fit, .weights = &weights};
  const uint32_t rank = dim * 7 / 8;
  const Matrix refined =
      RefineRotation(Hadamard(dim), {&head, 1}, rank, {.group_size = group_size, .steps = 150});
  EXPECT_LT(OrthogonalityErrorOf(refined, dim), 1e-9);
  const RowWeights judge = Even(unseen);
  EXPECT_LT(Error(refined, unseen, judge, group_size, rank),
            0.9 * Error(Hadamard(dim), unseen, judge, group_size, rank));
  EXPECT_EQ(
      RefineRotation(Hadamard(dim), {&head, 1}, rank, {.group_size = group_size, .steps = 150}),
      refined)
      << "not deterministic";
}

// What weighs nothing is not cared for.
TEST(RefineWeightsTest, WeightsDecideWhichRowsGetBetter) {
  RowSample both = SpikedRows(kDim, 600, 3, 1);
  const RowSample other = SpikedRows(kDim, 600, 3, 99);
  both.rows.insert(both.rows.end(), other.rows.begin(), other.rows.end());
  const auto refined = [&](bool first) {
    RowWeights weights = Even(both);
    for (size_t i = 0; i < 1200; ++i) {
      weights.weights[i] = weights.masses[i] = (i < 600) == first ? 1.0f / 600 : 0.0f;
    }
    const WeightedRows head{.rows = &both, .weights = &weights};
    return RefineRotation(Hadamard(kDim), {&head, 1}, 56, {.group_size = kDim, .steps = 200});
  };
  const Matrix for_first = refined(true);
  const Matrix for_second = refined(false);
  const RowSample first{.dim = kDim, .rows = {both.rows.begin(), both.rows.begin() + 600 * kDim}};
  EXPECT_LT(Error(for_first, first, Even(first), kDim, 56),
            0.95 * Error(for_second, first, Even(first), kDim, 56));
  EXPECT_LT(Error(for_second, other, Even(other), kDim, 56),
            0.95 * Error(for_first, other, Even(other), kDim, 56));
}

// Clipping takes from a mean; a mean factor says how much that matters.
TEST(RefineWeightsTest, AMeanFactorLowersWhatRowsLoseTogether) {
  const RowSample rows = GaussianRows(kDim, 1000, 3, 8, 4);
  const auto shared = [&](double mean_factor) {
    RowWeights weights = Even(rows);
    weights.mean_factor = mean_factor;
    const WeightedRows head{.rows = &rows, .weights = &weights};
    const Matrix refined =
        RefineRotation(Hadamard(kDim), {&head, 1}, 52, {.group_size = kDim, .steps = 200});
    RowWeights mean_only = Even(rows);
    std::fill(mean_only.weights.begin(), mean_only.weights.end(), 0.0f);
    return Error(refined, rows, mean_only, kDim, 52);
  };
  EXPECT_LT(shared(100), 0.5 * shared(0));
}

// Heads that share a rotation: each counts, and those that agree do not outvote the others by size.
TEST(RefineHeadsTest, ASharedRotationServesAllOfItsHeads) {
  const RowSample first = SpikedRows(kDim, 800, 3, 1);
  const RowSample second = SpikedRows(kDim, 800, 3, 99);
  RowSample loud = second;  // The same rows 64 times as large: their error is 4,096 times that.
  for (uint16_t& x : loud.rows) x = FloatToBf16(64 * Bf16ToFloat(x));
  const RowWeights weights = Even(first);
  const auto refined = [&](const std::vector<WeightedRows>& heads) {
    return RefineRotation(Hadamard(kDim), heads, 56, {.group_size = kDim, .steps = 200});
  };
  const auto error = [&](const Matrix& rotation, const RowSample& rows) {
    return Error(rotation, rows, weights, kDim, 56);
  };
  const Matrix shared = refined({{&first, &weights}, {&second, &weights}});
  EXPECT_LT(error(shared, first), 0.97 * error(Hadamard(kDim), first));
  EXPECT_LT(error(shared, second), 0.97 * error(Hadamard(kDim), second));
  const Matrix of_second = refined({{&second, &weights}});
  EXPECT_LT(error(shared, first), 0.97 * error(of_second, first));
  const Matrix with_loud = refined({{&first, &weights}, {&loud, &weights}});
  EXPECT_NEAR(error(with_loud, first), error(shared, first), 0.03 * error(shared, first));
}

TEST(RefineHeadsTest, FewRowsAreDrawnAgainAndAgain) {
  for (const uint32_t rows_count : {1u, 2u, 5u}) {
    const RowSample rows = SpikedRows(kDim, rows_count, 3, 7);
    const RowWeights weights = Even(rows);
    const WeightedRows head{.rows = &rows, .weights = &weights};
    const Matrix refined =
        RefineRotation(Hadamard(kDim), {&head, 1}, 56, {.group_size = kDim, .steps = 300});
    EXPECT_LT(OrthogonalityErrorOf(refined, kDim), 1e-9);
    // So few rows fit into four levels nearly as they are.
    EXPECT_LT(Error(refined, rows, weights, kDim, 56),
              0.5 * Error(Hadamard(kDim), rows, weights, kDim, 56))
        << rows_count;
  }
}

TEST(RefineEdgeTest, RowsWithoutAFiniteGradientOrWithoutLossLeaveTheRotation) {
  for (const uint16_t value : {uint16_t{0}, FloatToBf16(3e38f)}) {
    RowSample rows{.dim = kDim, .rows = std::vector<uint16_t>(10 * kDim, value)};
    if (value != 0) {
      for (size_t i = 0; i < rows.rows.size(); i += 3) rows.rows[i] = FloatToBf16(-3e38f);
    }
    const RowWeights weights = Even(rows);
    const WeightedRows head{.rows = &rows, .weights = &weights};
    for (const uint32_t rank : {0u, 52u}) {
      EXPECT_EQ(RefineRotation(Hadamard(kDim), {&head, 1}, rank, {.group_size = kDim, .steps = 5}),
                Hadamard(kDim));
      EXPECT_EQ(BestClipRank(Hadamard(kDim), {&head, 1}, kDim, {rank}), rank);
    }
  }
}

// Without clipping the range of such rows is infinite.
TEST(BestClipRankTest, ARankOfInfiniteLossIsNotTaken) {
  RowSample rows = GaussianRows(kDim, 100, 0, 0, 3);
  for (size_t row = 0; row < 100; ++row) {
    rows.rows[row * kDim] = FloatToBf16(3e38f);
    rows.rows[row * kDim + 1] = FloatToBf16(-3e38f);
  }
  Matrix identity(size_t{kDim} * kDim, 0.0);
  for (size_t i = 0; i < kDim; ++i) identity[i * kDim + i] = 1;
  RowWeights weights = Even(rows);
  const WeightedRows head{.rows = &rows, .weights = &weights};
  EXPECT_EQ(BestClipRank(identity, {&head, 1}, kDim, {0, 52}), 52u);
}

TEST(BestClipRankTest, GaussianRowsLikeOneAndAHalfDeviations) {
  const RowSample rows = GaussianRows(kDim, 2000, 0, 0, 2);
  const RowWeights weights = Even(rows);
  const WeightedRows head{.rows = &rows, .weights = &weights};
  const std::vector<uint32_t> ranks = {0, 40, 48, 52, 55, 58, 61, 63};
  const uint32_t best = BestClipRank(Hadamard(kDim), {&head, 1}, kDim, ranks);
  EXPECT_GE(best, 52u);
  EXPECT_LE(best, 58u);
  for (const uint32_t rank : ranks) {
    EXPECT_LE(Error(Hadamard(kDim), rows, weights, kDim, best),
              1.01 * Error(Hadamard(kDim), rows, weights, kDim, rank))
        << rank;
  }
}

}  // namespace
}  // namespace okv
