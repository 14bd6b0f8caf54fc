#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cmd/bench/fake_quantized_cache.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "tests/cmd/bench_tiny.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using testing_support::LoadTiny;
using testing_support::RandomTokens;
using testing_support::TinyContender;
using testing_support::TinyModel;
using testing_support::TinyRotations;

std::vector<uint16_t> RandomRows(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.5f, 3.0f);
  std::vector<uint16_t> rows(size);
  for (uint16_t& y : rows) y = FloatToBf16(normal(random));
  return rows;
}

TEST(FakeQuantizeRowTest, TwoBitsAreWhatTheCodecGivesBackBitForBit) {
  constexpr uint32_t kDim = 128, kGroup = 32;
  std::vector<uint16_t> k = RandomRows(kBlockTokens * kDim, 1);
  std::vector<uint16_t> v = RandomRows(kBlockTokens * kDim, 2);
  std::fill(v.begin(), v.begin() + kGroup, FloatToBf16(1.5f));  // A group without a range.
  const PageLayout layout = {
      .layers_count = 1, .kv_heads = 1, .head_dim = kDim, .group_size = kGroup};
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  BadRow bad;
  ASSERT_TRUE(QuantizeRun({.k = k.data(),
                           .v = v.data(),
                           .row_stride = kDim,
                           .dim = kDim,
                           .group_size = kGroup,
                           .clip_rank_k = 0,
                           .clip_rank_v = 0},
                          run.data(), &bad)
                  .ok());
  std::vector<uint16_t> k_back(k.size());
  std::vector<uint16_t> v_back(v.size());
  DequantizeRun({.run = run.data(), .dim = kDim, .group_size = kGroup}, k_back.data(),
                v_back.data());
  ASSERT_TRUE(FakeQuantizeRow(kGroup, 2, absl::MakeSpan(k)).ok());
  ASSERT_TRUE(FakeQuantizeRow(kGroup, 2, absl::MakeSpan(v)).ok());
  EXPECT_EQ(k, k_back);
  EXPECT_EQ(v, v_back);
}

TEST(FakeQuantizeRowTest, ErrorsShrinkWithEveryBit) {
  const std::vector<uint16_t> row = RandomRows(4096, 3);
  double previous = std::numeric_limits<double>::max();
  for (const uint32_t bits : {1u, 2u, 4u, 6u}) {
    std::vector<uint16_t> copy = row;
    ASSERT_TRUE(FakeQuantizeRow(64, bits, absl::MakeSpan(copy)).ok());
    double error = 0;
    for (size_t i = 0; i < row.size(); ++i) {
      error += std::pow(Bf16ToFloat(row[i]) - Bf16ToFloat(copy[i]), 2);
    }
    EXPECT_LT(error, previous / 3) << bits;
    previous = error;
  }
}

TEST(FakeQuantizeRowTest, NanInfAndARangeBeyondFloatAreRefused) {
  const float huge = 3e38f;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), HUGE_VALF, -HUGE_VALF, huge}) {
    std::vector<uint16_t> row(64, FloatToBf16(-huge));
    row[5] = FloatToBf16(bad);
    EXPECT_EQ(FakeQuantizeRow(64, 8, absl::MakeSpan(row)).code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

class FakeQuantizedCacheTest : public ::testing::Test {
 protected:
  std::vector<float> Nll(KvCache* cache, const std::vector<uint32_t>& tokens) {
    auto nll = model_->ForwardNll(absl::MakeConstSpan(tokens).first(tokens.size() - 1),
                                  absl::MakeConstSpan(tokens).subspan(1), cache);
    EXPECT_TRUE(nll.ok()) << nll.status();
    EXPECT_EQ(cache->tokens_count(), tokens.size() - 1);
    return *std::move(nll);
  }

  std::vector<float> Nll(const FormatOptions& windows, uint32_t bits,
                         const std::vector<uint32_t>& tokens) {
    const RotationSet rotations = TinyRotations(model_->config(), "mixed");
    const Format format = MakeFormat(model_->config(), rotations, windows);
    FakeQuantizedCache cache(model_->config(), format, &rotations, bits, &pool_);
    return Nll(&cache, tokens);
  }

  std::vector<float> SequenceNll(const FormatOptions& windows,
                                 const std::vector<uint32_t>& tokens) {
    const Contender contender =
        TinyContender(model_->config(), "mixed", {.name = "a", .windows = windows});
    auto cache = MakeCache(model_->config(), contender, TinyModel::kContext, &pool_);
    EXPECT_TRUE(cache.ok()) << cache.status();
    return Nll(cache->get(), tokens);
  }

  static double Distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
    return sum / static_cast<double>(a.size());
  }

  ThreadPool pool_{2};
  const std::unique_ptr<Model> model_ = LoadTiny(&pool_);
};

TEST_F(FakeQuantizedCacheTest, WithoutADemotionItIsASequenceBitForBit) {
  const std::vector<uint32_t> tokens = RandomTokens(64 * 6 + 1, 6);
  EXPECT_EQ(Nll({64, 256}, 2, tokens), SequenceNll({64, 256}, tokens));
}

// Attention over int2 pages is in fixed point (kernels/attend.h), so the bits differ; a block
// demoted too early or late would differ by as much as the codec does.
TEST_F(FakeQuantizedCacheTest, WithTwoBitsItSeesWhatASequenceSees) {
  const std::vector<uint32_t> tokens = RandomTokens(700, 7);
  for (const FormatOptions& windows : {FormatOptions{64, 0}, {64, 64}, {128, 256}}) {
    const std::vector<float> sequence = SequenceNll(windows, tokens);
    const double codec = Distance(sequence, SequenceNll({64, kBf16RecentTokens}, tokens));
    EXPECT_GT(codec, 0) << windows.recent_tokens;
    EXPECT_LT(Distance(sequence, Nll(windows, 2, tokens)), codec / 50) << windows.recent_tokens;
    EXPECT_LT(Distance(SequenceNll({64, kBf16RecentTokens}, tokens), Nll(windows, 8, tokens)),
              codec / 10)
        << windows.recent_tokens;
  }
}

}  // namespace
}  // namespace okv
