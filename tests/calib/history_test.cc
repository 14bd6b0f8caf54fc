#include "calib/history.h"

#include <algorithm>
#include <cmath>

#include "calib/linalg.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

constexpr uint32_t kDim = 64;
constexpr uint32_t kTokens = 500;
constexpr uint32_t kHistoryEnd = 448 - 256;  // What the last block, 448 to 499, sees in INT2.

TEST(SplitWindowsTest, TheLastEighthReportsAndTheQuarterBeforeItJudges) {
  const HistoryWindows windows = SplitWindows({2048, 5000, 300, 400, 2048, 2048, 700}, 100, 100);
  EXPECT_EQ(windows.shape.sink_tokens, 64u);
  EXPECT_EQ(windows.shape.recent_tokens, 256u);
  // 2048; 2048 and two of 1,984 behind the sink's 64, the last cut; none; 400; 2048; 2048; 700.
  const std::vector<SequenceRange> fit = {{0, 2048},
                                          {2048, 2048},
                                          {2048 + 1984, 2048},
                                          {2048 + 2 * 1984, 5000 - 2 * 1984},
                                          {7348, 400}};
  EXPECT_EQ(windows.fit, fit);
  EXPECT_EQ(windows.judge, (std::vector<SequenceRange>{{7748, 2048}, {9796, 2048}}));
  EXPECT_EQ(windows.report, (std::vector<SequenceRange>{{11844, 700}}));
  EXPECT_TRUE(windows.reports_apart);
  EXPECT_EQ(windows.fit_tokens, 7748u);
}

// What judges or reports begins behind what is fitted on, in the middle of a sequence too.
TEST(SplitWindowsTest, NoTokenIsReadForTwoPurposes) {
  for (const std::vector<uint32_t>& lengths : {std::vector<uint32_t>{20000},
                                               {2048, 9000, 3000},
                                               std::vector<uint32_t>(16, 2048),
                                               {900, 900, 900}}) {
    const HistoryWindows windows = SplitWindows(lengths, 100, 100);
    ASSERT_FALSE(windows.fit.empty() || windows.judge.empty() || windows.report.empty());
    uint32_t end = 0;
    const auto in_order = [&](const std::vector<SequenceRange>& ranges) {
      for (const SequenceRange& range : ranges) {
        // The place of the sink in a later piece overlaps with the piece before it; it is not read.
        EXPECT_GE(range.first_token + windows.shape.sink_tokens, end);
        end = range.first_token + range.tokens_count;
      }
    };
    in_order(windows.fit);
    EXPECT_LE(end, windows.fit_tokens);
    in_order(windows.judge);
    EXPECT_TRUE(windows.reports_apart);
    in_order(windows.report);
  }
}

TEST(SplitWindowsTest, MaximaThinEvenly) {
  const HistoryWindows windows = SplitWindows(std::vector<uint32_t>(40, 400), 10, 5);
  ASSERT_THAT(windows.fit, SizeIs(10));
  ASSERT_THAT(windows.judge, SizeIs(5));
  ASSERT_THAT(windows.report, SizeIs(5));
  EXPECT_EQ(windows.fit[1].first_token, 2u * 400);
  EXPECT_EQ(windows.judge[0].first_token, 25u * 400);
  EXPECT_EQ(windows.judge[1].first_token, 27u * 400);
  EXPECT_EQ(windows.report[4].first_token, 39u * 400);
  EXPECT_EQ(windows.fit_tokens, 25u * 400);
}

TEST(SplitWindowsTest, ShortSequencesHaveNoBf16Windows) {
  const HistoryWindows windows = SplitWindows({100, 60, 64, 65}, 9, 3);
  EXPECT_EQ(windows.shape.sink_tokens + windows.shape.recent_tokens, 0u);
  ASSERT_THAT(windows.fit, SizeIs(1));
  EXPECT_EQ(windows.fit[0].tokens_count, 100u);
  ASSERT_THAT(windows.judge, SizeIs(1));
  EXPECT_EQ(windows.judge[0].tokens_count, 65u);
  EXPECT_FALSE(windows.reports_apart);
  EXPECT_EQ(windows.report, windows.judge);
  EXPECT_EQ(windows.fit_tokens, 224u);
  EXPECT_TRUE(SplitWindows({64, 3}, 9, 3).judge.empty());
}

TEST(SplitWindowsTest, OneWindowServesAllPurposes) {
  const HistoryWindows one = SplitWindows({500}, 9, 3);
  EXPECT_EQ(one.fit, one.judge);
  EXPECT_EQ(one.fit, one.report);
  EXPECT_FALSE(one.reports_apart);
  EXPECT_EQ(one.fit_tokens, 500u);
}

// One head over one window by the schoolbook, float64, with some rows of history replaced.
class SchoolbookTest : public testing::Test {
 protected:
  using Rows = std::vector<std::vector<double>>;

  Rows Gather(const std::vector<float>& tensor, uint32_t heads, uint32_t head) const {
    Rows rows;
    for (size_t t = 0; t < kTokens; ++t) {
      const float* row = tensor.data() + (t * heads + head) * kDim;
      rows.emplace_back(row, row + kDim);
    }
    return rows;
  }
  // The softmax weights of token n's query, with `k` in place of the keys of its history.
  std::vector<double> Softmax(const std::vector<double>& q, size_t n, const Rows& k) const {
    std::vector<double> p;
    double sum = 0;
    for (size_t t = 0; t <= n; ++t) {
      double score = 0;
      const Rows& keys = IsHistory(n, t) ? k : k_;
      for (uint32_t c = 0; c < kDim; ++c) score += q[c] * keys[t][c];
      p.push_back(std::exp(score / 8));
      sum += p.back();
    }
    for (double& one : p) one /= sum;
    return p;
  }
  static bool IsHistory(size_t n, size_t t) { return t >= 64 && t + 256 < n / 64 * 64; }
  std::vector<double> Output(const std::vector<double>& p, size_t n, const Rows& v) const {
    std::vector<double> output(kDim, 0.0);
    for (size_t t = 0; t <= n; ++t) {
      const Rows& values = IsHistory(n, t) ? v : v_;
      for (uint32_t c = 0; c < kDim; ++c) output[c] += p[t] * values[t][c];
    }
    return output;
  }

  const LayerDump layer_ = SyntheticLayer({.sequence_lengths = {kTokens}}, 5);
  const HeadHistory history_{layer_, 1, {}, {{.first_token = 0, .tokens_count = kTokens}}, 1};
  // KV head 1 is read by query heads 2 and 3.
  const Rows q_[2] = {Gather(layer_.q, 4, 2), Gather(layer_.q, 4, 3)};
  const Rows k_ = Gather(layer_.k, 2, 1);
  const Rows v_ = Gather(layer_.v, 2, 1);
};

TEST_F(SchoolbookTest, RowsAreThoseThatSomeQuerySeesInInt2) {
  for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
    const RowSample rows = history_.Rows(tensor);
    ASSERT_EQ(rows.rows.size(), size_t{kHistoryEnd - 64} * kDim);
    const Rows& expected = tensor == KvTensor::kKeys ? k_ : v_;
    EXPECT_EQ(Bf16ToFloat(rows.rows[kDim + 3]), expected[65][3]);
  }
}

void ExpectOfTraceDim(const std::vector<float>& measured, const std::vector<double>& expected) {
  ASSERT_THAT(measured, SizeIs(kDim * kDim));
  double trace = 0;
  for (size_t i = 0; i < kDim; ++i) trace += expected[i * kDim + i];
  for (size_t i = 0; i < measured.size(); ++i) {
    EXPECT_NEAR(measured[i], expected[i] * kDim / trace, 2e-3) << i;
  }
}

TEST_F(SchoolbookTest, WeightsAreSquaredInfluences) {
  for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
    std::vector<double> weights(kHistoryEnd - 64, 0.0);
    std::vector<double> masses(weights.size(), 0.0);
    std::vector<double> metric(kDim * kDim, 0.0);
    std::vector<double> mean_metric(kDim * kDim, 0.0);
    double shared = 0;
    for (const Rows& q : q_) {
      for (size_t n = 384; n < kTokens; ++n) {
        const std::vector<double> p = Softmax(q[n], n, k_);
        const std::vector<double> o = Output(p, n, v_);
        double q_norm = 0;
        for (const double x : q[n]) q_norm += x * x / kDim;
        std::vector<double> together(kDim, 0.0);
        double mass = 0;
        double felt_sum = 0;
        for (size_t t = 64; t <= n; ++t) {
          if (!IsHistory(n, t)) continue;
          double apart = 0;
          for (uint32_t c = 0; c < kDim; ++c) {
            apart += (v_[t][c] - o[c]) * (v_[t][c] - o[c]);
            together[c] += p[t] * (v_[t][c] - o[c]);
          }
          const double felt = p[t] * (tensor == KvTensor::kKeys ? std::sqrt(apart * q_norm) : 1.0);
          weights[t - 64] += felt * felt;
          masses[t - 64] += felt;
          mass += p[t];
          felt_sum += p[t] * p[t] * apart;
        }
        double moved = 0;
        for (const double x : together) moved += x * x;
        for (size_t i = 0; i < metric.size(); ++i) {
          const double square = q[n][i / kDim] * q[n][i % kDim];
          metric[i] += felt_sum * square;
          mean_metric[i] += moved * square;
        }
        if (tensor == KvTensor::kValues) {
          shared += mass * mass;
        } else {
          for (const double x : together) shared += x * x * q_norm;
        }
      }
    }
    double weights_sum = 0;
    double masses_sum = 0;
    for (const double x : weights) weights_sum += x;
    for (const double x : masses) masses_sum += x;
    const HeadWeights both = history_.Weights(1);
    const RowWeights& measured = both.tensor(tensor);
    ASSERT_EQ(measured.weights.size(), weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const double weight = weights[i] / weights_sum;
      const double share = masses[i] / masses_sum;
      EXPECT_NEAR(measured.weights[i], weight, 1e-3 * std::max(weight, 1.0 / 128)) << i;
      EXPECT_NEAR(measured.masses[i], share, 1e-3 * std::max(share, 1.0 / 128)) << i;
    }
    EXPECT_NEAR(measured.mean_factor, shared / weights_sum, 2e-3 * shared / weights_sum);
    if (tensor == KvTensor::kValues) {
      EXPECT_THAT(measured.metric, SizeIs(0));
      EXPECT_THAT(measured.mean_metric, SizeIs(0));
      continue;
    }
    ExpectOfTraceDim(measured.metric, metric);
    ExpectOfTraceDim(measured.mean_metric, mean_metric);
  }
}

TEST_F(SchoolbookTest, TheJudgeComparesOutputs) {
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  const RowCodec codec{.rotation = r.data(), .group_size = 32, .clip_rank = 57};
  for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
    const bool keys = tensor == KvTensor::kKeys;
    size_t bad_row = 0;
    const auto restored = RestoredRows(history_.Rows(tensor), codec, &bad_row);
    ASSERT_TRUE(restored.ok());
    Rows coded = keys ? k_ : v_;
    for (size_t t = 64; t < kHistoryEnd; ++t) {
      coded[t].assign(restored->begin() + static_cast<ptrdiff_t>((t - 64) * kDim),
                      restored->begin() + static_cast<ptrdiff_t>((t - 63) * kDim));
    }
    double error = 0;
    double signal = 0;
    for (const Rows& q : q_) {
      for (size_t n = 384; n < kTokens; ++n) {
        const std::vector<double> exact = Output(Softmax(q[n], n, k_), n, v_);
        const std::vector<double> changed =
            Output(Softmax(q[n], n, keys ? coded : k_), n, keys ? v_ : coded);
        for (uint32_t c = 0; c < kDim; ++c) {
          error += (changed[c] - exact[c]) * (changed[c] - exact[c]);
          signal += exact[c] * exact[c];
        }
      }
    }
    const auto judged = history_.Judge(tensor, codec);
    ASSERT_TRUE(judged.ok()) << judged.status();
    EXPECT_NEAR(judged->error, error, 1e-3 * error);
    EXPECT_NEAR(judged->signal, signal, 1e-3 * signal);
    EXPECT_GT(error, 0);
    const HeadHistory thin(layer_, 1, {}, {{.first_token = 0, .tokens_count = kTokens}}, 2);
    const auto every_second = thin.Judge(tensor, codec);
    ASSERT_TRUE(every_second.ok());
    EXPECT_LT(every_second->signal, judged->signal);
    EXPECT_GT(every_second->signal, 0);
  }
}

// |v - o|^2 of values that differ little from each other and much from 0: their squares and
// products agree to more digits than fp32 has.
TEST(HeadHistoryTest, KeysWeighTheSameWhereverTheValuesLie) {
  LayerDump layer = SyntheticLayer({.sequence_lengths = {kTokens}}, 5);
  const auto weights = [&] {
    return HeadHistory(layer, 0, {}, {{.first_token = 0, .tokens_count = kTokens}}, 0).Weights(1);
  };
  // Sums that bf16 holds exactly.
  for (float& v : layer.v) v = std::round(v * 4);
  for (float& v : layer.v) v = std::min(std::max(v, -60.0f), 60.0f);
  const RowWeights near = weights().keys;
  for (float& v : layer.v) v += 192;
  const RowWeights far = weights().keys;
  ASSERT_EQ(near.weights.size(), far.weights.size());
  for (size_t i = 0; i < near.weights.size(); ++i) {
    EXPECT_NEAR(far.weights[i], near.weights[i], 0.02 * near.weights[i] + 1e-6) << i;
  }
}

// A later piece of a sequence attends to the sequence's own sink, not to 64 rows of its middle.
TEST(HeadHistoryTest, ALaterPieceHasTheSinkOfItsSequence) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {100, 1300}}, 5);
  const SequenceRange piece = {.first_token = 100 + 640, .tokens_count = 600};
  // The same by hand: a layer that is the sink and what follows the piece's first 64 tokens.
  const LayerDump joined = [&] {
    LayerDump copy = ExtractRanges(layer, {{100, 64}, {piece.first_token + 64, 536}});
    copy.sequence_lengths = {600};
    return copy;
  }();
  const HeadHistory in_place(layer, 1, {}, {piece}, 1);
  const HeadHistory by_hand(joined, 1, {}, {{0, 600}}, 1);
  const HeadHistory without(ExtractRanges(layer, {piece}), 1, {}, {{0, 600}}, 1);
  const std::vector<uint16_t> r = RoundToBf16(Hadamard(kDim));
  const RowCodec codec{.rotation = r.data(), .group_size = 64, .clip_rank = 57};
  for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
    EXPECT_EQ(in_place.Rows(tensor).rows, by_hand.Rows(tensor).rows);
    const auto judged = in_place.Judge(tensor, codec);
    const auto expected = by_hand.Judge(tensor, codec);
    const auto other = without.Judge(tensor, codec);
    ASSERT_TRUE(judged.ok() && expected.ok() && other.ok());
    EXPECT_EQ(judged->error, expected->error);
    EXPECT_EQ(judged->signal, expected->signal);
    EXPECT_NE(judged->signal, other->signal);
  }
}

TEST(HeadHistoryTest, ARowThatTheCodecRefusesIsNamed) {
  LayerDump layer = SyntheticLayer({.sequence_lengths = {400, kTokens}}, 5);
  layer.v[((400 + 100) * 2 + 1) * kDim] = 3e38f;
  layer.v[((400 + 100) * 2 + 1) * kDim + 1] = -3e38f;
  const HeadHistory history(layer, 1, {}, {{.first_token = 400, .tokens_count = kTokens}}, 1);
  std::vector<uint16_t> r(size_t{kDim} * kDim, 0);
  for (size_t i = 0; i < kDim; ++i) r[i * kDim + i] = FloatToBf16(1);
  const RowCodec codec{.rotation = r.data(), .group_size = 64, .clip_rank = 0};
  EXPECT_TRUE(history.Judge(KvTensor::kKeys, codec).ok());
  const auto judged = history.Judge(KvTensor::kValues, codec);
  EXPECT_EQ(judged.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(judged.status().message()), HasSubstr("V of token 500, head 1"));
}

}  // namespace
}  // namespace okv
