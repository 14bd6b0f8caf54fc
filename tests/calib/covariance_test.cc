#include "calib/covariance.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kSeed = 7;

void ExpectClose(const Matrix& actual, const Matrix& expected, double relative) {
  ASSERT_EQ(actual.size(), expected.size());
  double largest = 0;
  for (const double x : expected) largest = std::max(largest, std::abs(x));
  ASSERT_GT(largest, 0);
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], relative * largest) << "entry " << i;
  }
}

void AddRow(const std::vector<double>& row, Matrix* sum) {
  for (size_t i = 0; i < row.size(); ++i) {
    for (size_t j = 0; j < row.size(); ++j) (*sum)[i * row.size() + j] += row[i] * row[j];
  }
}

const float* QueryRow(const LayerDump& layer, uint32_t token, uint32_t head) {
  return layer.q.data() + (size_t{token} * layer.query_heads + head) * layer.head_dim;
}
const float* KeyRow(const LayerDump& layer, uint32_t token, uint32_t head) {
  return layer.k.data() + (size_t{token} * layer.kv_heads + head) * layer.head_dim;
}
const float* ValueRow(const LayerDump& layer, uint32_t token, uint32_t head) {
  return layer.v.data() + (size_t{token} * layer.kv_heads + head) * layer.head_dim;
}

double Dot(const float* a, const float* b, uint32_t dim) {
  double sum = 0;
  for (uint32_t c = 0; c < dim; ++c) sum += double{a[c]} * b[c];
  return sum;
}

// V^T S^T S V / N by its definition: S as a whole matrix, float64.
Matrix NaiveSoftmaxCovariance(const LayerDump& layer, const std::vector<SequenceRange>& ranges,
                              uint32_t kv_head) {
  const uint32_t dim = layer.head_dim;
  const uint32_t group = layer.query_heads / layer.kv_heads;
  Matrix sum(size_t{dim} * dim, 0.0);
  double rows_count = 0;
  for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (const SequenceRange& range : ranges) {
      for (uint32_t i = 0; i < range.tokens_count; ++i) {
        std::vector<double> weights(i + 1);
        double total = 0;
        for (uint32_t j = 0; j <= i; ++j) {
          const double score = Dot(QueryRow(layer, range.first_token + i, head),
                                   KeyRow(layer, range.first_token + j, kv_head), dim);
          weights[j] = std::exp(score / std::sqrt(static_cast<double>(dim)));
          total += weights[j];
        }
        std::vector<double> output(dim, 0.0);
        for (uint32_t j = 0; j <= i; ++j) {
          const float* value = ValueRow(layer, range.first_token + j, kv_head);
          for (uint32_t c = 0; c < dim; ++c) output[c] += weights[j] / total * value[c];
        }
        AddRow(output, &sum);
        ++rows_count;
      }
    }
  }
  Scale(1 / rows_count, &sum);
  return sum;
}

class CovarianceTest : public testing::Test {
 protected:
  // 300 tokens cross the tile of 256 rows.
  const LayerDump layer_ = SyntheticLayer({.sequence_lengths = {300, 40, 1}}, kSeed);
  const std::vector<SequenceRange> whole_ = {{0, 300}, {300, 40}, {340, 1}};
  ThreadPool pool_{2};
};

TEST_F(CovarianceTest, QueryCovarianceMatchesTheSchoolbook) {
  const std::vector<Matrix> c_q = QueryCovariance(layer_, &pool_);
  ASSERT_EQ(c_q.size(), layer_.kv_heads);
  const uint32_t group = layer_.query_heads / layer_.kv_heads;
  for (uint32_t kv_head = 0; kv_head < layer_.kv_heads; ++kv_head) {
    Matrix expected(c_q[0].size(), 0.0);
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (uint32_t t = 0; t < layer_.tokens_count; ++t) {
        const float* row = QueryRow(layer_, t, head);
        AddRow({row, row + layer_.head_dim}, &expected);
      }
    }
    Scale(1.0 / (layer_.tokens_count * group), &expected);
    ExpectClose(c_q[kv_head], expected, 1e-12);
  }
}

TEST_F(CovarianceTest, SoftmaxCovarianceMatchesTheFullMatrixInFloat64) {
  const std::vector<Matrix> c_s = SoftmaxValueCovariance(layer_, whole_, &pool_);
  ASSERT_EQ(c_s.size(), layer_.kv_heads);
  for (uint32_t head = 0; head < layer_.kv_heads; ++head) {
    ExpectClose(c_s[head], NaiveSoftmaxCovariance(layer_, whole_, head), 1e-5);
  }
}

TEST_F(CovarianceTest, SequencesDoNotSeeEachOther) {
  // The second sequence's outputs must not change with what the first one holds.
  LayerDump other = layer_;
  const size_t first_sequence = size_t{300} * layer_.kv_heads * layer_.head_dim;
  for (size_t i = 0; i < first_sequence; ++i) {
    other.k[i] = -other.k[i];
    other.v[i] = 3 * other.v[i] + 1;
  }
  const std::vector<SequenceRange> second = {{300, 40}};
  EXPECT_EQ(SoftmaxValueCovariance(layer_, second, &pool_),
            SoftmaxValueCovariance(other, second, &pool_));
  // Nor is a fit over both sequences that of one sequence of 341 tokens.
  const std::vector<SequenceRange> merged = {{0, 341}};
  const Matrix apart = SoftmaxValueCovariance(layer_, whole_, &pool_)[0];
  const Matrix together = SoftmaxValueCovariance(layer_, merged, &pool_)[0];
  double difference = 0;
  for (size_t i = 0; i < apart.size(); ++i) {
    difference = std::max(difference, std::abs(apart[i] - together[i]));
  }
  EXPECT_GT(difference, 1e-3);
}

TEST_F(CovarianceTest, LaterTokensDoNotChangeEarlierOutputs) {
  LayerDump other = layer_;
  for (size_t i = size_t{100} * layer_.kv_heads * layer_.head_dim; i < other.k.size(); ++i) {
    other.k[i] += 5;
    other.v[i] += 5;
  }
  const AttentionHead heads[] = {layer_.Head(0, 300, 1, 2), other.Head(0, 300, 1, 2)};
  std::vector<float> outputs[2];
  for (size_t i = 0; i < 2; ++i) {
    TiledAttention attention;
    attention.Run(heads[i], [&](uint32_t, uint32_t rows_count, const float* rows) {
      outputs[i].insert(outputs[i].end(), rows, rows + size_t{rows_count} * layer_.head_dim);
    });
    ASSERT_EQ(outputs[i].size(), size_t{300} * layer_.head_dim);
  }
  for (size_t i = 0; i < size_t{100} * layer_.head_dim; ++i) {
    ASSERT_NEAR(outputs[0][i], outputs[1][i], 1e-5);
  }
  EXPECT_GT(std::abs(outputs[0][150 * layer_.head_dim] - outputs[1][150 * layer_.head_dim]), 0.1);
}

TEST_F(CovarianceTest, EnergyCovarianceMatchesTheSchoolbook) {
  const std::vector<Matrix> c_q = QueryCovariance(layer_, &pool_);
  for (const std::vector<Matrix>& given : {c_q, std::vector<Matrix>{MeanMatrix(c_q)}}) {
    const std::vector<Matrix> energy = EnergyValueCovariance(layer_, given, &pool_);
    ASSERT_EQ(energy.size(), layer_.kv_heads);
    for (uint32_t head = 0; head < layer_.kv_heads; ++head) {
      const Matrix& c = given[given.size() == 1 ? 0 : head];
      std::vector<double> weights;
      for (uint32_t t = 0; t < layer_.tokens_count; ++t) {
        const float* k = KeyRow(layer_, t, head);
        double weight = 0;
        for (uint32_t i = 0; i < layer_.head_dim; ++i) {
          for (uint32_t j = 0; j < layer_.head_dim; ++j) {
            weight += double{k[i]} * c[i * layer_.head_dim + j] * k[j];
          }
        }
        weights.push_back(weight);
      }
      double mean = 0;
      for (const double weight : weights) mean += weight / layer_.tokens_count;
      Matrix expected(c.size(), 0.0);
      for (uint32_t t = 0; t < layer_.tokens_count; ++t) {
        std::vector<double> row(ValueRow(layer_, t, head),
                                ValueRow(layer_, t, head) + layer_.head_dim);
        for (double& x : row) x *= std::sqrt(weights[t] / mean);
        AddRow(row, &expected);
      }
      Scale(1.0 / layer_.tokens_count, &expected);
      ExpectClose(energy[head], expected, 1e-9);
    }
  }
}

TEST_F(CovarianceTest, ResultsDoNotDependOnTheNumberOfThreads) {
  UseSingleThreadedBlas();
  ThreadPool one(1);
  EXPECT_EQ(QueryCovariance(layer_, &pool_), QueryCovariance(layer_, &one));
  EXPECT_EQ(SoftmaxValueCovariance(layer_, whole_, &pool_),
            SoftmaxValueCovariance(layer_, whole_, &one));
}

TEST(SampleSequencesTest, TakesPrefixesUntilTheBudgetIsSpent) {
  const auto ranges =
      SampleSequences({100, 3000, 50, 2000, 10}, {.tokens_max = 2500, .sequence_tokens_max = 2000});
  ASSERT_EQ(ranges.size(), 4u);
  EXPECT_EQ(ranges[0].first_token, 0u);
  EXPECT_EQ(ranges[0].tokens_count, 100u);
  EXPECT_EQ(ranges[1].first_token, 100u);
  EXPECT_EQ(ranges[1].tokens_count, 2000u);  // Cut to the limit of a sequence.
  EXPECT_EQ(ranges[2].first_token, 3100u);
  EXPECT_EQ(ranges[2].tokens_count, 50u);
  EXPECT_EQ(ranges[3].first_token, 3150u);
  EXPECT_EQ(ranges[3].tokens_count, 350u);  // Cut to what is left; the fifth gets nothing.
}

}  // namespace
}  // namespace okv
