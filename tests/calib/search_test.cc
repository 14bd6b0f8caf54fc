#include "calib/search.h"

#include "calib/refine.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kDim = 64;

// Two windows of one head; the keys of the second can have another distribution.
class SearchTest : public testing::Test {
 protected:
  // Adds `mean` to channel `channel` of all keys and values of the first window, or of both.
  void Make(float mean, uint32_t channel, bool both) {
    layer_ = SyntheticLayer({.sequence_lengths = {800, 800}, .query_heads = 2, .kv_heads = 1}, 5);
    const size_t end = (both ? 1600 : 800) * size_t{kDim};
    for (size_t i = channel; i < end; i += kDim) {
      layer_.k[i] = Bf16ToFloat(FloatToBf16(layer_.k[i] + mean));
      layer_.v[i] = Bf16ToFloat(FloatToBf16(layer_.v[i] + mean));
    }
    fit_ = std::make_unique<HeadHistory>(layer_, 0, HistoryShape{},
                                         std::vector<SequenceRange>{{0, 800}}, 0);
    judge_ = std::make_unique<HeadHistory>(layer_, 0, HistoryShape{},
                                           std::vector<SequenceRange>{{800, 800}}, 1);
    weights_ = fit_->Weights(1);
    heads_ = {{.fit = fit_.get(), .weights = &weights_, .judge = judge_.get()}};
  }
  double Judged(const FoundRotation& found, KvTensor tensor) const {
    return judge_
        ->Judge(tensor,
                {.rotation = found.rotation.data(), .group_size = 64, .clip_rank = found.clip_rank})
        ->error;
  }

  LayerDump layer_;
  std::unique_ptr<HeadHistory> fit_;
  std::unique_ptr<HeadHistory> judge_;
  HeadWeights weights_;
  std::vector<HeadData> heads_;
};

Matrix Swapped(uint32_t channel) {
  Matrix basis(size_t{kDim} * kDim, 0.0);
  for (size_t i = 0; i < kDim; ++i) {
    const size_t to = i == 0 ? channel : i == channel ? 0 : i;
    basis[i * kDim + to] = 1;
  }
  return RotationFromEigenvectors(basis, kDim);
}

TEST_F(SearchTest, TheStartOfLeastJudgedErrorIsTakenAndTheFirstOfEquals) {
  Make(30, 9, true);  // It belongs at position 0, where the group's offset takes it.
  const auto found = SearchRotation({Hadamard(kDim), Swapped(9), Swapped(9)}, KvTensor::kKeys,
                                    heads_, {.group_size = 64, .clip_ranks = {0, 52, 57, 61}});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->start, 1u);
  EXPECT_FALSE(found->refined);
  EXPECT_EQ(found->rotation, RoundToBf16(Swapped(9)));
  EXPECT_EQ(found->error.error, Judged(*found, KvTensor::kKeys));
}

TEST_F(SearchTest, ADescentIsKeptWhenItHelpsHeldOutText) {
  Make(0, 0, true);
  for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
    SearchOptions options{.group_size = 64, .clip_ranks = {0, 52, 54, 56, 58, 61}};
    const auto plain = SearchRotation({Hadamard(kDim)}, tensor, heads_, options);
    options.refine_steps = 150;
    const auto refined = SearchRotation({Hadamard(kDim)}, tensor, heads_, options);
    ASSERT_TRUE(plain.ok() && refined.ok());
    EXPECT_TRUE(refined->refined);
    EXPECT_LT(refined->error.error, 0.95 * plain->error.error);
    EXPECT_EQ(refined->error.error, Judged(*refined, tensor));
    EXPECT_LT(OrthogonalityError(refined->rotation.data(), kDim), 1.0 / 128);
  }
}

// The text to fit on has a mean that the held-out text does not have: descents cater to it.
TEST_F(SearchTest, WhatDoesNotHelpHeldOutTextIsNotKept) {
  Make(200, 9, false);
  const Matrix start = Swapped(3);
  const RowSample rows = fit_->Rows(KvTensor::kValues);
  const WeightedRows weighted{.rows = &rows, .weights = &weights_.values};
  FoundRotation descent;
  descent.rotation =
      RoundToBf16(RefineRotation(start, {&weighted, 1}, 57, {.group_size = 64, .steps = 100}));
  descent.clip_rank = 57;
  const auto found = SearchRotation({start}, KvTensor::kValues, heads_,
                                    {.group_size = 64, .clip_ranks = {57}, .refine_steps = 100});
  ASSERT_TRUE(found.ok());
  ASSERT_GT(Judged(descent, KvTensor::kValues), found->error.error) << "a descent that helped";
  EXPECT_FALSE(found->refined);
  EXPECT_EQ(found->rotation, RoundToBf16(start));
}

TEST_F(SearchTest, TheSettledClipIsLeftOnlyForOneThatIsWorthIt) {
  Make(0, 0, true);
  SearchOptions options{.group_size = 64, .clip_ranks = {0, 48, 50, 52, 54, 56, 58, 60, 61, 62}};
  const auto best = SearchRotation({Hadamard(kDim)}, KvTensor::kValues, heads_, options);
  ASSERT_TRUE(best.ok()) << best.status();
  size_t kept = 0;
  size_t left = 0;
  for (const uint32_t rank : {0u, 48u, 50u, 52u, 54u, 56u, 57u, 58u, 60u, 62u}) {
    if (rank == best->clip_rank) continue;
    options.settled_rank = rank;
    const auto found = SearchRotation({Hadamard(kDim)}, KvTensor::kValues, heads_, options);
    ASSERT_TRUE(found.ok()) << found.status();
    FoundRotation settled = *best;
    settled.clip_rank = rank;
    const double settled_error = Judged(settled, KvTensor::kValues);
    const bool worth = best->error.error < settled_error * (1 - kClipWorthLeaving);
    EXPECT_EQ(found->clip_rank, worth ? best->clip_rank : rank);
    EXPECT_EQ(found->error.error, worth ? best->error.error : settled_error);
    ++(worth ? left : kept);
  }
  EXPECT_GT(kept, 0u);
  EXPECT_GT(left, 0u);
}

// A gain that is mostly one window's of four (nine times that of the others, 1.5 standard errors)
// is no reason to leave the settled clip, the same gain in all of them is.
TEST_F(SearchTest, TheSettledClipIsLeftOnlyForAGainOfMoreThanOneWindow) {
  LayerDump layer = SyntheticLayer(
      {.sequence_lengths = {800, 800, 800, 800, 800}, .query_heads = 2, .kv_heads = 1}, 5);
  const HeadHistory fit(layer, 0, {}, {{0, 800}}, 0);
  const HeadWeights weights = fit.Weights(1);
  const std::vector<SequenceRange> windows = {{800, 800}, {1600, 800}, {2400, 800}, {3200, 800}};
  const SearchOptions options{.group_size = 64, .clip_ranks = {0, 56}, .settled_rank = 40};
  const auto search = [&](const HeadHistory& judge) {
    const std::vector<HeadData> heads = {{.fit = &fit, .weights = &weights, .judge = &judge}};
    return SearchRotation({Hadamard(kDim)}, KvTensor::kValues, heads, options);
  };
  const auto in_all = search(HeadHistory(layer, 0, {}, windows, 1));
  ASSERT_TRUE(in_all.ok()) << in_all.status();
  EXPECT_NE(in_all->clip_rank, 40u);
  for (size_t i = size_t{3200} * kDim; i < layer.v.size(); ++i) layer.v[i] *= 3;
  const HeadHistory loud(layer, 0, {}, windows, 1);
  const auto in_one = search(loud);
  ASSERT_TRUE(in_one.ok()) << in_one.status();
  EXPECT_EQ(in_one->clip_rank, 40u);
  const auto judged = loud.JudgeWindows(
      KvTensor::kValues,
      {.rotation = in_all->rotation.data(), .group_size = 64, .clip_rank = in_all->clip_rank});
  ASSERT_TRUE(judged.ok()) << judged.status();
  double all = 0;
  for (const SquaredError& window : *judged) all += window.error;
  EXPECT_LT(all, in_one->error.error * (1 - kClipWorthLeaving)) << "the gain is large enough";
}

TEST_F(SearchTest, OutputsThatAreNotFiniteAreAnError) {
  Make(0, 0, true);
  for (float& q : layer_.q) q *= 1e19f;
  for (float& k : layer_.k) k *= 1e19f;
  const HeadHistory fit(layer_, 0, {}, {{0, 800}}, 0);
  const HeadHistory judge(layer_, 0, {}, {{800, 800}}, 1);
  const std::vector<HeadData> heads = {{.fit = &fit, .weights = &weights_, .judge = &judge}};
  const auto found = SearchRotation({Hadamard(kDim)}, KvTensor::kKeys, heads,
                                    {.group_size = 64, .clip_ranks = {0, 57}});
  EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SearchTest, NothingIsMeasuredWhereNothingIsOpen) {
  Make(0, 0, true);
  const auto found = SearchRotation({Hadamard(kDim)}, KvTensor::kValues, heads_,
                                    {.group_size = 64, .clip_ranks = {58}});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->rotation, RoundToBf16(Hadamard(kDim)));
  EXPECT_EQ(found->clip_rank, 58u);
  EXPECT_EQ(found->error.signal, 0);
}

}  // namespace
}  // namespace okv
