#include "calib/refine_batch.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "calib/linalg.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kDim = 64;
constexpr uint32_t kSeed = 7;

std::vector<float> ToFloat(const Matrix& matrix) { return {matrix.begin(), matrix.end()}; }

// A symmetric positive matrix of trace dim with a few directions above the others.
std::vector<float> SomeMetric(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Matrix sum(size_t{kDim} * kDim, 0.0);
  for (uint32_t k = 0; k < 2 * kDim; ++k) {
    std::vector<double> x(kDim);
    for (double& one : x) one = normal(random) * (k < 3 ? 10 : 1);
    AddOuterProducts(x.data(), 1, kDim, &sum);
  }
  Symmetrize(kDim, &sum);
  double trace = 0;
  for (size_t i = 0; i < kDim; ++i) trace += sum[i * kDim + i];
  Scale(kDim / trace, &sum);
  return ToFloat(sum);
}

// Skew angles of unit norm.
Matrix SomeTurn(uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Matrix turn(size_t{kDim} * kDim, 0.0);
  for (size_t i = 0; i < kDim; ++i) {
    for (size_t j = 0; j < i; ++j) {
      turn[i * kDim + j] = normal(random) / kDim;
      turn[j * kDim + i] = -turn[i * kDim + j];
    }
  }
  return turn;
}

// The loss at R exp(size turn), and what the gradient at R promises per unit of size.
class BatchGradientTest : public testing::Test {
 protected:
  void Draw(size_t count, uint32_t group_size, uint32_t rank) {
    rank_ = rank;
    batch_ = std::make_unique<HeadBatch>(kDim, count, group_size);
    RowDeck deck({.rows = &rows_, .weights = &weights_});
    batch_->Draw(&deck);
  }
  double LossAt(const Matrix& turn, double size) {
    Matrix angles = turn;
    Scale(size, &angles);
    return batch_->Loss(ToFloat(TurnByCayley(start_, angles, kDim)), rank_);
  }
  double Measured(const Matrix& turn, double size) {
    return (LossAt(turn, size) - LossAt(turn, -size)) / (2 * size);
  }
  double Promised(const Matrix& turn) {
    batch_->Loss(ToFloat(start_), rank_);
    std::vector<float> gradient(size_t{kDim} * kDim, 0.0f);
    batch_->AddGradient(1, &gradient);
    const Matrix skew = SkewGradient(start_, gradient, kDim);
    double sum = 0;
    for (size_t i = 0; i < skew.size(); ++i) sum += skew[i] * turn[i];
    return sum;
  }

  const Matrix start_ = Hadamard(kDim);
  uint32_t rank_ = 0;
  RowSample rows_;
  RowWeights weights_;
  std::unique_ptr<HeadBatch> batch_;
};

// Rows without mass have no mean, only squares, of which the gradient at fixed codes is exact.
TEST_F(BatchGradientTest, OfTheSquaresItIsTheDifferenceQuotient) {
  rows_ = SpikedRows(kDim, 300, 3, kSeed);
  for (const uint32_t group_size : {64u, 32u}) {
    for (const uint32_t rank : {0u, 45u, 57u}) {
      for (const bool with_metric : {false, true}) {
        weights_ = {.weights = std::vector<float>(300, 1.0f / 300),
                    .masses = std::vector<float>(300, 0.0f)};
        if (with_metric) weights_.metric = SomeMetric(kSeed);
        Draw(300, group_size, rank);
        for (const uint32_t seed : {1u, 2u, 3u}) {
          const Matrix turn = SomeTurn(seed);
          const double promised = Promised(turn);
          EXPECT_NEAR(Measured(turn, 2e-4), promised, 0.03 * std::abs(promised) + 0.01)
              << group_size << " " << rank << " " << with_metric << " " << seed;
        }
      }
    }
  }
}

// The mean of many rows' errors is smooth although no row's error is: a quotient over a turn that
// changes many codes is what its gradient must be.
TEST_F(BatchGradientTest, OfTheMeanItIsTheDifferenceQuotientOverManyRows) {
  rows_ = GaussianRows(kDim, 20000, 3, 8, kSeed);
  for (const bool with_metric : {false, true}) {
    weights_ = {.weights = std::vector<float>(20000, 0.0f),
                .masses = std::vector<float>(20000, 1.0f / 20000),
                .mean_factor = 1};
    if (with_metric) weights_.mean_metric = SomeMetric(kSeed);
    Draw(20000, kDim, 52);
    // Along the gradient itself, where it is largest: other directions drown in the rows' noise.
    batch_->Loss(ToFloat(start_), rank_);
    std::vector<float> gradient(size_t{kDim} * kDim, 0.0f);
    batch_->AddGradient(1, &gradient);
    Matrix turn = SkewGradient(start_, gradient, kDim);
    double square = 0;
    for (const double one : turn) square += one * one;
    ASSERT_GT(square, 0);
    Scale(1 / std::sqrt(square), &turn);
    const double promised = Promised(turn);
    EXPECT_NEAR(Measured(turn, 0.02), promised, 0.1 * promised) << with_metric;
  }
}

// Small batches overrate |m|^2 by a row's variance over their size, here many times |m|^2 itself.
TEST(HeadBatchTest, SmallBatchesRateTheMeanAsAllRowsDo) {
  const RowSample rows = GaussianRows(kDim, 8192, 3, 8, kSeed);
  RowWeights weights = {.weights = std::vector<float>(8192, 0.0f),
                        .masses = std::vector<float>(8192, 1.0f / 8192),
                        .mean_factor = 1};
  const std::vector<float> rotation = ToFloat(Hadamard(kDim));
  RowDeck all({.rows = &rows, .weights = &weights});
  HeadBatch whole(kDim, 65536, kDim);
  whole.Draw(&all);
  const double expected = whole.Loss(rotation, 52);
  RowDeck deck({.rows = &rows, .weights = &weights});
  HeadBatch batch(kDim, 32, kDim);
  double mean = 0;
  const int batches = 2000;
  for (int i = 0; i < batches; ++i) {
    batch.Draw(&deck);
    mean += batch.Loss(rotation, 52) / batches;
  }
  EXPECT_GT(expected, 0);
  EXPECT_NEAR(mean, expected, 0.1 * expected);
}

// Where nearly all mass is one row's, the mean of the others is unknown: no division by nothing.
TEST(HeadBatchTest, OneRowOfAllMassGivesAFiniteLoss) {
  const RowSample rows = SpikedRows(kDim, 4, 3, kSeed);
  RowWeights weights = {.weights = {1, 0, 0, 0}, .masses = {1, 0, 0, 0}, .mean_factor = 50};
  for (const size_t count : {size_t{1}, size_t{2}, size_t{64}}) {
    RowDeck deck({.rows = &rows, .weights = &weights});
    HeadBatch batch(kDim, count, kDim);
    batch.Draw(&deck);
    EXPECT_TRUE(std::isfinite(batch.Loss(ToFloat(Hadamard(kDim)), 57)));
    std::vector<float> gradient(size_t{kDim} * kDim, 0.0f);
    batch.AddGradient(1, &gradient);
    EXPECT_TRUE(
        std::all_of(gradient.begin(), gradient.end(), [](float x) { return std::isfinite(x); }));
  }
}

}  // namespace
}  // namespace okv
