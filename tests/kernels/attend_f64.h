#ifndef OKV_TESTS_KERNELS_ATTEND_F64_H_
#define OKV_TESTS_KERNELS_ATTEND_F64_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/support.h"

// Attention in float64 with the textbook formula, over what the pages hold when dequantized.

namespace okv::kernels_test {

// What queries and probabilities in 16 bits may cost, relative L2, when scores are ordinary.
inline constexpr double kInt2Error = 3e-4;

// Attend on the fastest target with one thread, into a poisoned output.
inline std::vector<float> RunAttend(const Layer& layer, uint32_t first, uint32_t count,
                                    uint32_t seen) {
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(count), std::nanf(""));
  ThreadPool pool(1);
  EXPECT_TRUE(Attend(layer.Params(first, count, seen, &blocks, out.data()), &pool).ok());
  return out;
}

inline std::vector<float> RunReference(const Layer& layer, uint32_t first, uint32_t count,
                                       uint32_t seen) {
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(count), std::nanf(""));
  EXPECT_TRUE(reference::Attend(layer.Params(first, count, seen, &blocks, out.data())).ok());
  return out;
}

// x R or x R^T in float64.
inline std::vector<double> RotateF64(const std::vector<double>& x, const uint16_t* r,
                                     bool transpose) {
  const size_t d = x.size();
  std::vector<double> y(d, 0.0);
  for (size_t n = 0; n < d; ++n) {
    for (size_t k = 0; k < d; ++k) y[n] += x[k] * Bf16ToFloat(r[transpose ? n * d + k : k * d + n]);
  }
  return y;
}

// K and V rows of one KV head over all blocks, as they are stored.
struct History {
  std::vector<float> k;
  std::vector<float> v;
};
inline History LoadHistory(const AttendParams& params, uint32_t kv_head) {
  const size_t n = size_t{64} * params.head_dim;
  const PageLayout layout = OneRun(params.head_dim, params.group_size);
  History history;
  for (const AttendBlock& block : params.blocks) {
    const uint8_t* const run = block.page + layout.run_bytes(block.codec) * kv_head;
    std::vector<float> k(n);
    std::vector<float> v(n);
    if (block.codec == Codec::kInt2) {
      reference::DequantizeRunF32(
          {.run = run, .dim = params.head_dim, .group_size = params.group_size}, k.data(),
          v.data());
    } else {
      std::vector<uint16_t> rows(2 * n);
      std::memcpy(rows.data(), run, rows.size() * 2);
      for (size_t i = 0; i < n; ++i) k[i] = Bf16ToFloat(rows[i]);
      for (size_t i = 0; i < n; ++i) v[i] = Bf16ToFloat(rows[n + i]);
    }
    history.k.insert(history.k.end(), k.begin(), k.end());
    history.v.insert(history.v.end(), v.begin(), v.end());
  }
  return history;
}

// One row in float64, with the textbook formula.
inline std::vector<double> AttendF64(const AttendParams& params, const History& history,
                                     uint32_t query, uint32_t head) {
  const size_t d = params.head_dim;
  const uint32_t kv_head = head / (params.query_heads / params.kv_heads);
  const size_t rotation = params.rotation_heads == 1 ? 0 : kv_head * d * d;
  const float* const q = params.q + (size_t{query} * params.query_heads + head) * d;
  const std::vector<double> rotated =
      RotateF64(std::vector<double>(q, q + d), params.r_k + rotation, false);
  const size_t tokens = (params.blocks.size() - 1) * 64 + params.last_block_tokens + query;
  std::vector<double> scores(tokens, 0.0);
  double max = -std::numeric_limits<double>::infinity();
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t c = 0; c < d; ++c) scores[t] += rotated[c] * history.k[t * d + c];
    scores[t] *= params.softmax_scale;
    max = std::max(max, scores[t]);
  }
  double sum = 0;
  std::vector<double> o(d, 0.0);
  for (size_t t = 0; t < tokens; ++t) {
    const double p = std::exp(scores[t] - max);
    sum += p;
    for (size_t c = 0; c < d; ++c) o[c] += p * history.v[t * d + c];
  }
  for (double& value : o) value /= sum;
  return RotateF64(o, params.r_v + rotation, true);
}

// The largest relative L2 error of a row of params.out against float64.
inline double WorstErrorOf(const AttendParams& params) {
  double worst = 0;
  for (uint32_t head = 0; head < params.query_heads; ++head) {
    const History history = LoadHistory(params, head / (params.query_heads / params.kv_heads));
    for (uint32_t i = 0; i < params.queries_count; ++i) {
      const std::vector<double> expected = AttendF64(params, history, i, head);
      double error = 0;
      double norm = 0;
      for (uint32_t c = 0; c < params.head_dim; ++c) {
        const double got =
            params.out[(size_t{i} * params.query_heads + head) * params.head_dim + c];
        error += (got - expected[c]) * (got - expected[c]);
        norm += expected[c] * expected[c];
      }
      // Not std::max, which lets NaN through.
      if (!(std::sqrt(error / norm) <= worst)) worst = std::sqrt(error / norm);
    }
  }
  return worst;
}

inline double WorstError(const Layer& layer, uint32_t count, uint32_t seen) {
  std::vector<AttendBlock> blocks;
  std::vector<float> out(layer.out_floats(count), std::nanf(""));
  const AttendParams params = layer.Params(0, count, seen, &blocks, out.data());
  ThreadPool pool(1);
  EXPECT_TRUE(Attend(params, &pool).ok());
  return WorstErrorOf(params);
}

}  // namespace okv::kernels_test

#endif  // OKV_TESTS_KERNELS_ATTEND_F64_H_
