#include "calib/measure.h"

#include <algorithm>
#include <cmath>

#include "calib/fit.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/page_layout.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

// A head's rows of one range, float64.
using Rows = std::vector<std::vector<double>>;

Rows Gather(const std::vector<float>& tensor, uint32_t heads, uint32_t head, uint32_t dim,
            const SequenceRange& range) {
  Rows rows;
  for (uint32_t t = 0; t < range.tokens_count; ++t) {
    const float* row = tensor.data() + ((size_t{range.first_token} + t) * heads + head) * dim;
    rows.emplace_back(row, row + dim);
  }
  return rows;
}

// Rows of at most one block through the scalar codec, and back by y R^T in float64.
void Quantize(const LayerRotation& rotation, uint32_t head, uint32_t dim, Rows* k, Rows* v) {
  const size_t matrix = rotation.rotation_heads == 1 ? 0 : size_t{head} * dim * dim;
  const uint16_t* r[] = {rotation.r_k.data() + matrix, rotation.r_v.data() + matrix};
  Rows* tensors[] = {k, v};
  std::vector<uint16_t> y[2];
  for (size_t i = 0; i < 2; ++i) {
    std::vector<uint16_t> x(size_t{kBlockTokens} * dim, 0);
    for (size_t t = 0; t < tensors[i]->size(); ++t) {
      for (uint32_t c = 0; c < dim; ++c) {
        x[t * dim + c] = FloatToBf16(static_cast<float>((*tensors[i])[t][c]));
      }
    }
    y[i].resize(x.size());
    reference::RotateRows(
        {.x = x.data(), .x_stride = dim, .r = r[i], .rows_count = kBlockTokens, .dim = dim},
        y[i].data(), dim);
  }
  const PageLayout layout{
      .layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = rotation.group_size};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  BadRow bad;
  ASSERT_TRUE(reference::QuantizeRun({.k = y[0].data(),
                                      .v = y[1].data(),
                                      .row_stride = dim,
                                      .dim = dim,
                                      .group_size = rotation.group_size,
                                      .clip_rank_k = rotation.clip_rank_k[head],
                                      .clip_rank_v = rotation.clip_rank_v[head]},
                                     run.data(), &bad)
                  .ok());
  std::vector<float> restored[] = {std::vector<float>(y[0].size()),
                                   std::vector<float>(y[1].size())};
  reference::DequantizeRunF32({.run = run.data(), .dim = dim, .group_size = rotation.group_size},
                              restored[0].data(), restored[1].data());
  for (size_t i = 0; i < 2; ++i) {
    for (size_t t = 0; t < tensors[i]->size(); ++t) {
      for (uint32_t c = 0; c < dim; ++c) {
        double sum = 0;
        for (uint32_t n = 0; n < dim; ++n) {
          sum += double{restored[i][t * dim + n]} * Bf16ToFloat(r[i][c * dim + n]);
        }
        (*tensors[i])[t][c] = sum;
      }
    }
  }
}

Rows Attention(const Rows& q, const Rows& k, const Rows& v) {
  Rows outputs;
  const size_t dim = q[0].size();
  for (size_t i = 0; i < q.size(); ++i) {
    std::vector<double> output(dim, 0.0);
    std::vector<double> scores(i + 1, 0.0);
    for (size_t j = 0; j <= i; ++j) {
      for (size_t c = 0; c < dim; ++c) scores[j] += q[i][c] * k[j][c];
      scores[j] /= std::sqrt(static_cast<double>(dim));
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (double& score : scores) total += score = std::exp(score - highest);
    for (size_t j = 0; j <= i; ++j) {
      for (size_t c = 0; c < dim; ++c) output[c] += scores[j] / total * v[j][c];
    }
    outputs.push_back(output);
  }
  return outputs;
}

double SquaredNorm(const Rows& a, const Rows* minus) {
  double sum = 0;
  for (size_t t = 0; t < a.size(); ++t) {
    for (size_t c = 0; c < a[t].size(); ++c) {
      const double x = a[t][c] - (minus == nullptr ? 0 : (*minus)[t][c]);
      sum += x * x;
    }
  }
  return sum;
}

double TraceForm(const Rows& rows, const Matrix& c_q) {
  double sum = 0;
  for (const std::vector<double>& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      for (size_t j = 0; j < row.size(); ++j) sum += row[i] * c_q[i * row.size() + j] * row[j];
    }
  }
  return sum;
}

class MeasureTest : public testing::TestWithParam<RotationScope> {};
INSTANTIATE_TEST_SUITE_P(Scopes, MeasureTest,
                         testing::Values(RotationScope::kLayer, RotationScope::kKvHead));

TEST_P(MeasureTest, ErrorsMatchTheSchoolbook) {
  ThreadPool pool(2);
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {100, 60}}, 3);
  const SequenceRange range = {.first_token = 100, .tokens_count = 60};  // Fits in one block.
  const auto fitted =
      FitLayer(layer, Quick({.scope = GetParam(), .group_size = 32, .measure_tokens = 0}), &pool);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_EQ(fitted->report.int2.tokens_count, 0u);
  const std::vector<Matrix> c_q = QueryCovariance(layer, &pool);
  const auto measured = MeasureInt2(layer, fitted->rotation, c_q, {range}, &pool);
  ASSERT_TRUE(measured.ok()) << measured.status();

  double errors[3] = {};
  double signals[3] = {};
  for (uint32_t head = 0; head < layer.query_heads; ++head) {
    const uint32_t group = layer.query_heads / layer.kv_heads;
    const uint32_t kv_head = head / group;
    const Rows q = Gather(layer.q, layer.query_heads, head, layer.head_dim, range);
    const Rows k = Gather(layer.k, layer.kv_heads, kv_head, layer.head_dim, range);
    const Rows v = Gather(layer.v, layer.kv_heads, kv_head, layer.head_dim, range);
    Rows k_hat = k;
    Rows v_hat = v;
    Quantize(fitted->rotation, kv_head, layer.head_dim, &k_hat, &v_hat);
    if (head % group == 0) {
      Rows difference = k_hat;
      for (size_t t = 0; t < k.size(); ++t) {
        for (size_t c = 0; c < k[t].size(); ++c) difference[t][c] -= k[t][c];
      }
      errors[0] += TraceForm(difference, c_q[kv_head]);
      signals[0] += TraceForm(k, c_q[kv_head]);
    }
    const Rows exact = Attention(q, k, v);
    const Rows approximations[] = {Attention(q, k, v_hat), Attention(q, k_hat, v_hat)};
    for (size_t i = 0; i < 2; ++i) {
      errors[i + 1] += SquaredNorm(approximations[i], &exact);
      signals[i + 1] += SquaredNorm(exact, nullptr);
    }
  }
  EXPECT_EQ(measured->tokens_count, 60u);
  EXPECT_NEAR(measured->logit, errors[0] / signals[0], 1e-4 * errors[0] / signals[0]);
  EXPECT_NEAR(measured->value, errors[1] / signals[1], 1e-4 * errors[1] / signals[1]);
  EXPECT_NEAR(measured->output, errors[2] / signals[2], 1e-4 * errors[2] / signals[2]);
  EXPECT_GT(measured->logit, 1e-3);
  EXPECT_NE(measured->value, measured->output);
}

TEST(MeasureGroupsTest, FinerGroupsGiveSmallerErrors) {
  ThreadPool pool(2);
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {200}, .head_dim = 128}, 12);
  double last = 1e9;
  for (const uint32_t group_size : {128u, 64u, 32u}) {
    const auto fitted = FitLayer(layer, Quick({.group_size = group_size}), &pool);
    ASSERT_TRUE(fitted.ok()) << fitted.status();
    EXPECT_LT(fitted->report.int2.output, last);
    last = fitted->report.int2.output;
  }
}

}  // namespace
}  // namespace okv
