#include "calib/fit.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "calib/covariance.h"
#include "calib/linalg.h"
#include "calib/measure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

class FitTest : public testing::Test {
 protected:
  absl::StatusOr<FitResult> Fit(const FitOptions& options, ThreadPool* pool) {
    const auto dump = DumpReader::Open(directory_.path());
    if (!dump.ok()) return dump.status();
    return FitRotations(*dump, options, pool, nullptr);
  }

  const TempDirectory directory_;
  ThreadPool pool_{2};
};

TEST_F(FitTest, AFittedSetIsValidAndComplete) {
  WriteDump(directory_.path(), {3, 7}, {}, 1);
  std::vector<uint32_t> seen;
  const auto dump = DumpReader::Open(directory_.path());
  ASSERT_TRUE(dump.ok()) << dump.status();
  const auto result = FitRotations(
      *dump, Quick(), &pool_, [&](const LayerReport& report) { seen.push_back(report.layer_id); });
  ASSERT_TRUE(result.ok()) << result.status();
  const RotationSet& set = result->rotations;
  EXPECT_TRUE(set.Validate().ok());
  EXPECT_EQ(set.model, "synthetic");
  EXPECT_EQ(set.weights_revision, "r1");
  EXPECT_EQ(set.method, "oscar");
  EXPECT_EQ(set.layer_ids, (std::vector<uint32_t>{3, 7}));
  EXPECT_EQ(seen, set.layer_ids);
  EXPECT_EQ(set.rotation_heads, 2u);
  EXPECT_EQ(set.kv_heads, 2u);
  EXPECT_EQ(set.group_size, 64u);
  EXPECT_EQ(set.clip_rank_k.size(), 4u);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(set.clip_rank_k[2 * layer], result->layers[layer].clip_rank_k[0]);
    EXPECT_EQ(set.clip_rank_v[2 * layer + 1], result->layers[layer].clip_rank_v[1]);
    EXPECT_EQ(result->layers[layer].key_objectives.size(), 2u);
  }
  EXPECT_EQ(result->value_tokens, 160u);
  for (const LayerReport& report : result->layers) {
    EXPECT_LT(report.orthogonality_error, 1.0 / 256);
    EXPECT_EQ(report.int2.tokens_count, 100u);  // The only window.
    EXPECT_FALSE(report.reports_apart);
  }
  ASSERT_THAT(set.promised_error_k, SizeIs(2));
  for (uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_FLOAT_EQ(set.promised_error_k[layer], result->layers[layer].promised_k.ratio());
    EXPECT_FLOAT_EQ(set.promised_error_v[layer], result->layers[layer].promised_v.ratio());
    EXPECT_GT(set.promised_error_k[layer], 0.001f);
    EXPECT_LT(set.promised_error_v[layer], 0.5f);
  }
  const auto parsed = RotationSet::Parse(set.Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, set);
}

TEST_F(FitTest, ThePublishedRecipeDiagonalizesTheLayersCovariances) {
  const LayerDump layer = SyntheticLayer({}, 1);
  const auto fitted = FitLayer(layer, FitOptions::Published(Method::kOscar), &pool_);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  const uint32_t dim = layer.head_dim;
  const auto expect_rotation = [&](const Matrix& covariance, const std::vector<uint16_t>& bits) {
    const auto system = SymmetricEigen(covariance, dim);
    ASSERT_TRUE(system.ok());
    EXPECT_EQ(RoundToBf16(RotationFromEigenvectors(system->vectors, dim)), bits);
  };
  const std::vector<SequenceRange> whole = {{0, 100}, {100, 60}};
  expect_rotation(MeanMatrix(QueryCovariance(layer, &pool_)), fitted->rotation.r_k);
  expect_rotation(MeanMatrix(SoftmaxValueCovariance(layer, whole, &pool_)), fitted->rotation.r_v);
  EXPECT_THAT(fitted->rotation.clip_rank_k, Each(61u));  // floor(0.96 * 64)
  EXPECT_THAT(fitted->rotation.clip_rank_v, Each(58u));  // floor(0.92 * 64)
  EXPECT_EQ(fitted->report.refined, 0u);
}

// Other text where judging and reporting windows lie: the rotation that is not chosen by it stays.
TEST_F(FitTest, NothingIsFittedOnTextThatJudgesOrReports) {
  const SyntheticShape shape = {.sequence_lengths = {500, 500, 500, 500}};
  const LayerDump layer = SyntheticLayer(shape, 1);
  const FitOptions options = {.key_objective = KeyObjective::kQqt, .refine_steps = 0};
  const auto fit = [&](const LayerDump& of) {
    auto fitted = FitLayer(of, options, &pool_);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return *std::move(fitted);
  };
  const FittedLayer before = fit(layer);
  EXPECT_TRUE(before.report.reports_apart);
  EXPECT_NE(before.report.reported_k.error, before.report.judged_k.error);
  const LayerDump other = SyntheticLayer(shape, 2);
  const auto replace = [&](size_t first_token, size_t end_token) {
    LayerDump changed = layer;
    const auto copy = [&](const std::vector<float>& from, size_t heads, std::vector<float>* to) {
      std::copy(from.begin() + static_cast<ptrdiff_t>(first_token * heads * 64),
                from.begin() + static_cast<ptrdiff_t>(end_token * heads * 64),
                to->begin() + static_cast<ptrdiff_t>(first_token * heads * 64));
    };
    copy(other.q, 4, &changed.q);
    copy(other.k, 2, &changed.k);
    copy(other.v, 2, &changed.v);
    return changed;
  };
  const FittedLayer judged = fit(replace(1000, 1500));
  EXPECT_EQ(judged.rotation.r_k, before.rotation.r_k);
  EXPECT_EQ(judged.rotation.r_v, before.rotation.r_v);
  EXPECT_NE(judged.report.judged_k.error, before.report.judged_k.error);
  const FittedLayer reported = fit(replace(1500, 2000));
  EXPECT_EQ(reported.rotation.r_k, before.rotation.r_k);
  EXPECT_EQ(reported.rotation.clip_rank_k, before.rotation.clip_rank_k);
  EXPECT_EQ(reported.rotation.clip_rank_v, before.rotation.clip_rank_v);
  EXPECT_EQ(reported.report.judged_k.error, before.report.judged_k.error);
  EXPECT_NE(reported.report.promised_k.error, before.report.promised_k.error);
  EXPECT_NE(fit(replace(0, 1000)).rotation.r_k, before.rotation.r_k);
}

TEST_F(FitTest, ScopeKvHeadGivesEachHeadItsOwnRotation) {
  WriteDump(directory_.path(), {0, 1}, {}, 1);
  const auto result = Fit(Quick({.scope = RotationScope::kKvHead}), &pool_);
  ASSERT_TRUE(result.ok()) << result.status();
  const RotationSet& set = result->rotations;
  EXPECT_EQ(set.rotation_heads, 2u);
  EXPECT_EQ(set.r_k.size(), size_t{2} * 2 * 64 * 64);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<uint16_t> heads[] = {
        {set.RotationK(layer, 0), set.RotationK(layer, 0) + 64 * 64},
        {set.RotationK(layer, 1), set.RotationK(layer, 1) + 64 * 64}};
    EXPECT_NE(heads[0], heads[1]);
  }
}

TEST_F(FitTest, ScopeLayerSharesOneRotation) {
  WriteDump(directory_.path(), {0, 1}, {}, 1);
  const auto result = Fit(Quick({.scope = RotationScope::kLayer}), &pool_);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->rotations.rotation_heads, 1u);
  EXPECT_EQ(result->rotations.r_v.size(), size_t{2} * 64 * 64);
}

TEST_F(FitTest, HadamardAndNoneNeedNoData) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {3}}, 1);
  const auto hadamard = FitLayer(layer, {.method = Method::kHadamard}, &pool_);
  ASSERT_TRUE(hadamard.ok()) << hadamard.status();
  EXPECT_EQ(hadamard->rotation.r_k, RoundToBf16(Hadamard(64)));
  EXPECT_EQ(hadamard->rotation.r_v, hadamard->rotation.r_k);
  const auto none = FitLayer(layer, FitOptions::Published(Method::kNone), &pool_);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(OrthogonalityError(none->rotation.r_k.data(), 64), 0);
  EXPECT_EQ(none->rotation.r_k[65], 0x3f80);  // 1.0 on the diagonal.
  EXPECT_THAT(none->rotation.clip_rank_k, Each(0u));
  EXPECT_THAT(none->rotation.clip_rank_v, Each(0u));
  const auto clipped = FitLayer(layer, {.method = Method::kNone, .clip_k = 0.5}, &pool_);
  ASSERT_TRUE(clipped.ok());
  EXPECT_THAT(clipped->rotation.clip_rank_k, Each(32u));
}

TEST_F(FitTest, TwoFitsGiveTheSameBytesWhateverTheThreads) {
  WriteDump(directory_.path(), {0, 1}, {.sequence_lengths = {450, 450, 450}}, 1);
  ThreadPool one(1);
  ThreadPool four(4);
  for (const ValueObjective objective : {ValueObjective::kSoftmax, ValueObjective::kEnergy}) {
    const FitOptions options =
        Quick({.scope = RotationScope::kKvHead, .value_objective = objective});
    const auto first = Fit(options, &one);
    const auto second = Fit(options, &four);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_EQ(first->rotations.Serialize(), second->rotations.Serialize());
  }
}

TEST_F(FitTest, TheValueObjectivesDiffer) {
  const LayerDump layer = SyntheticLayer({}, 1);
  const auto softmax = FitLayer(layer, Quick(), &pool_);
  const auto energy = FitLayer(layer, Quick({.value_objective = ValueObjective::kEnergy}), &pool_);
  ASSERT_TRUE(softmax.ok() && energy.ok());
  EXPECT_EQ(softmax->rotation.r_k, energy->rotation.r_k);
  EXPECT_NE(softmax->rotation.r_v, energy->rotation.r_v);
}

// Keys of a Gaussian around a large common mean; queries and values plain Gaussians.
LayerDump KeysWithAMean(double mean, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  LayerDump layer = SyntheticLayer({.sequence_lengths = {700, 500}, .query_heads = 2}, seed);
  for (std::vector<float>* tensor : {&layer.q, &layer.k, &layer.v}) {
    for (float& x : *tensor) x = Bf16ToFloat(FloatToBf16(normal(random)));
  }
  for (size_t i = 0; i < layer.k.size(); ++i) {
    if (i % 64 == 5 || i % 64 == 22) {
      layer.k[i] = Bf16ToFloat(FloatToBf16(layer.k[i] + static_cast<float>(mean)));
    }
  }
  return layer;
}

TEST_F(FitTest, TheClipOfGaussianRowsIsNearOneAndAHalfDeviations) {
  const LayerDump layer = KeysWithAMean(0, 21);
  const auto fitted = FitLayer(layer, {.method = Method::kHadamard}, &pool_);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  for (const std::vector<uint32_t>& ranks :
       {fitted->report.clip_rank_k, fitted->report.clip_rank_v}) {
    ASSERT_THAT(ranks, SizeIs(layer.kv_heads));
    EXPECT_THAT(ranks, Each(testing::AllOf(testing::Ge(51u), testing::Le(60u))));
  }
}

TEST_F(FitTest, ScopeLayerSharesOneClipRankAndScopeKvHeadHasItsOwn) {
  // The values of head 1 hold one large channel each, which clipping would cut off.
  LayerDump layer = SyntheticLayer({.sequence_lengths = {500, 500}}, 4);
  for (size_t row = 0; row < 1000; ++row) layer.v[(row * 2 + 1) * 64 + row % 64] = 60;
  const FitOptions options = {.method = Method::kNone, .measure_tokens = 0};
  const auto own = FitLayer(layer, options, &pool_);
  FitOptions layers = options;
  layers.scope = RotationScope::kLayer;
  const auto shared = FitLayer(layer, layers, &pool_);
  ASSERT_TRUE(own.ok() && shared.ok());
  EXPECT_NE(own->report.clip_rank_v[0], own->report.clip_rank_v[1]);
  EXPECT_EQ(shared->report.clip_rank_v[0], shared->report.clip_rank_v[1]);
}

TEST_F(FitTest, ClipsLowerTheJudgedErrorsAndDescentsDoNotRaiseThem) {
  LayerDump layer = SyntheticLayer({.sequence_lengths = {900, 900, 900, 900}, .query_heads = 2}, 4);
  for (float& q : layer.q) q *= 0.0625f;  // Attention to many tokens, as in most real heads.
  const auto fit = [&](std::optional<double> clip, uint32_t steps) {
    const auto fitted = FitLayer(
        layer, {.clip_k = clip, .clip_v = clip, .refine_steps = steps, .measure_tokens = 0},
        &pool_);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return fitted->report;
  };
  const LayerReport off = fit(0.0, 1);  // One step: so that it is judged.
  const LayerReport plain = fit(std::nullopt, 0);
  const LayerReport refined = fit(std::nullopt, 50);
  EXPECT_LT(plain.judged_k.error, off.judged_k.error);
  EXPECT_LT(plain.judged_v.error, off.judged_v.error);
  EXPECT_LE(refined.judged_k.error, plain.judged_k.error);
  EXPECT_LE(refined.judged_v.error, plain.judged_v.error);
  EXPECT_EQ(plain.refined, 0u);
  // SearchTest has descents that help.
  EXPECT_EQ(refined.refined > 0, refined.judged_k.error < plain.judged_k.error ||
                                     refined.judged_v.error < plain.judged_v.error);
}

TEST_F(FitTest, WhereNothingIsHistoryThePublishedRatiosStand) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {64, 64, 64}}, 4);
  const auto fitted = FitLayer(layer, {}, &pool_);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_THAT(fitted->report.clip_rank_k, ElementsAre(61u, 61u));
  EXPECT_THAT(fitted->report.clip_rank_v, ElementsAre(58u, 58u));
  EXPECT_EQ(fitted->report.judged_k.signal, 0);
  EXPECT_EQ(fitted->report.refined, 0u);
}

// The mean takes the group's offset when it enters the transform at position 0: C_Q knows nothing
// of it, the keys' own covariance does.
TEST_F(FitTest, AutoPrefersABasisThatPutsTheKeysMeanIntoTheOffset) {
  const LayerDump layer = KeysWithAMean(8, 22);
  const auto fit = [&](KeyObjective objective) {
    const auto fitted = FitLayer(
        layer, {.scope = RotationScope::kLayer, .key_objective = objective, .refine_steps = 0},
        &pool_);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return *fitted;
  };
  const FittedLayer chosen = fit(KeyObjective::kAuto);
  const FittedLayer published = fit(KeyObjective::kQqt);
  EXPECT_EQ(published.report.key_objectives, std::vector<KeyObjective>{KeyObjective::kQqt});
  EXPECT_NE(chosen.report.key_objectives, std::vector<KeyObjective>{KeyObjective::kQqt});
  EXPECT_LT(chosen.report.int2.output, 0.8 * published.report.int2.output);
}

TEST_F(FitTest, OneTokenIsEnoughForTheMethodsWithoutData) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {1}}, 1);
  EXPECT_TRUE(FitLayer(layer, {.method = Method::kHadamard}, &pool_).ok());
}

// Queries and keys with a few large directions and outlier channels: what the method is for. With 2
// bits, U H P_br beats H, and H beats no rotation.
class Int2ErrorTest : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(HeadDims, Int2ErrorTest, testing::Values(64, 128, 256));

TEST_P(Int2ErrorTest, OscarBeatsHadamardBeatsNoneOnASpikedSpectrum) {
  ThreadPool pool(2);
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {320}, .head_dim = GetParam()}, 11);
  const auto measure = [&](Method method) {
    FitOptions options = FitOptions::Published(method);
    options.group_size = std::max(32u, GetParam() / 4);
    const auto fitted = FitLayer(layer, options, &pool);
    EXPECT_TRUE(fitted.ok()) << fitted.status();
    return fitted->report.int2;
  };
  const Int2Errors oscar = measure(Method::kOscar);
  const Int2Errors hadamard = measure(Method::kHadamard);
  const Int2Errors none = measure(Method::kNone);
  EXPECT_GT(oscar.logit, 0);
  EXPECT_LT(oscar.logit, hadamard.logit);
  EXPECT_LT(hadamard.logit, 0.5 * none.logit);
  EXPECT_LT(oscar.value, 0.75 * hadamard.value);
  EXPECT_LT(oscar.output, 0.75 * hadamard.output);
  EXPECT_LT(hadamard.output, 0.75 * none.output);
}

struct BadFit {
  const char* name;
  std::function<void(LayerDump*, FitOptions*)> change;
  const char* message;
};

class BadFitTest : public testing::TestWithParam<BadFit> {};

TEST_P(BadFitTest, IsAnInvalidArgumentByName) {
  ThreadPool pool(1);
  LayerDump layer = SyntheticLayer({.layer_id = 5}, 1);
  FitOptions options;
  GetParam().change(&layer, &options);
  const absl::Status status = FitLayer(layer, options, &pool).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 5: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, BadFitTest,
    testing::Values(
        BadFit{"GroupTooSmall", [](LayerDump*, FitOptions* o) { o->group_size = 16; },
               "group_size is 16"},
        BadFit{"GroupTooLarge", [](LayerDump*, FitOptions* o) { o->group_size = 128; },
               "group_size is 128"},
        BadFit{"GroupNoPowerOfTwo", [](LayerDump*, FitOptions* o) { o->group_size = 48; },
               "group_size is 48"},
        BadFit{"ClipOne", [](LayerDump*, FitOptions* o) { o->clip_k = 1.0; }, "clip_k is 1"},
        BadFit{"ClipNegative", [](LayerDump*, FitOptions* o) { o->clip_v = -0.5; },
               "clip_v is -0.5"},
        BadFit{"ClipNan", [](LayerDump*, FitOptions* o) { o->clip_v = std::nan(""); },
               "clip_v is nan"},
        BadFit{"ClipBelowOneRank", [](LayerDump*, FitOptions* o) { o->clip_v = 0.01; }, "rank 0"},
        BadFit{"NoFitWindows", [](LayerDump*, FitOptions* o) { o->fit_windows = 0; },
               "fit_windows is 0"},
        BadFit{"NoJudgeWindows", [](LayerDump*, FitOptions* o) { o->judge_windows = 0; },
               "judge_windows is 0"},
        BadFit{"AllKeysZero",
               [](LayerDump* layer, FitOptions*) {
                 std::fill(layer->k.begin(), layer->k.end(), 0.0f);
               },
               "all keys are zero"},
        BadFit{"TooFewTokens",
               [](LayerDump* layer, FitOptions*) {
                 *layer = SyntheticLayer({.sequence_lengths = {40, 23}, .layer_id = 5}, 1);
               },
               "rank 63 at most"},
        BadFit{"TooSmallAValueSample",
               [](LayerDump*, FitOptions* o) { o->value_sample.tokens_max = 50; },
               "rank 50 at most"},
        BadFit{"AllValuesZero",
               [](LayerDump* layer, FitOptions*) {
                 std::fill(layer->v.begin(), layer->v.end(), 0.0f);
               },
               "all values are zero"},
        BadFit{"AllQueriesZero",
               [](LayerDump* layer, FitOptions*) {
                 std::fill(layer->q.begin(), layer->q.end(), 0.0f);
               },
               "all queries are zero"},
        BadFit{"ARowThatTheCodecRefuses",
               [](LayerDump* layer, FitOptions* o) {
                 *o = FitOptions::Published(Method::kNone);
                 // Finite, but its range is not: max - min overflows.
                 layer->k[70 * 2 * 64 + 64] = 3e38f;
                 layer->k[70 * 2 * 64 + 65] = -3e38f;
               },
               "K of token 70, head 1"},
        BadFit{"AJudgedRowThatTheCodecRefuses",
               [](LayerDump* layer, FitOptions* o) {
                 o->method = Method::kNone;
                 o->clip_v = 0;
                 o->measure_tokens = 0;
                 layer->v[30 * 2 * 64] = 3e38f;
                 layer->v[30 * 2 * 64 + 1] = -3e38f;
               },
               "V of token 30, head 0"}),
    [](const testing::TestParamInfo<BadFit>& info) { return info.param.name; });

TEST(ParseNamesTest, KnownNamesRoundTripAndOthersListThem) {
  for (const Method method : {Method::kOscar, Method::kHadamard, Method::kNone}) {
    EXPECT_EQ(*ParseMethod(MethodName(method)), method);
  }
  for (const RotationScope scope : {RotationScope::kLayer, RotationScope::kKvHead}) {
    EXPECT_EQ(*ParseScope(ScopeName(scope)), scope);
  }
  for (const ValueObjective objective : {ValueObjective::kSoftmax, ValueObjective::kEnergy}) {
    EXPECT_EQ(*ParseValueObjective(ValueObjectiveName(objective)), objective);
  }
  for (const KeyObjective objective :
       {KeyObjective::kAuto, KeyObjective::kQqt, KeyObjective::kKkt, KeyObjective::kOffset}) {
    EXPECT_EQ(*ParseKeyObjective(KeyObjectiveName(objective)), objective);
  }
  EXPECT_THAT(std::string(ParseMethod("quarot").status().message()),
              HasSubstr("'quarot' is not known; there are: oscar, hadamard, none"));
}

}  // namespace
}  // namespace okv
