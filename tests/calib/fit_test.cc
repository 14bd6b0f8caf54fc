#include "calib/fit.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "calib/linalg.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::Each;
using testing::HasSubstr;

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
      *dump, {}, &pool_, [&](const LayerReport& report) { seen.push_back(report.layer_id); });
  ASSERT_TRUE(result.ok()) << result.status();
  const RotationSet& set = result->rotations;
  EXPECT_TRUE(set.Validate().ok());
  EXPECT_EQ(set.model, "synthetic");
  EXPECT_EQ(set.weights_revision, "r1");
  EXPECT_EQ(set.method, "oscar");
  EXPECT_EQ(set.layer_ids, (std::vector<uint32_t>{3, 7}));
  EXPECT_EQ(seen, set.layer_ids);
  EXPECT_EQ(set.rotation_heads, 1u);
  EXPECT_EQ(set.kv_heads, 2u);
  EXPECT_EQ(set.group_size, 64u);
  EXPECT_EQ(set.clip_rank_k.size(), 4u);
  EXPECT_THAT(set.clip_rank_k, Each(61u));  // floor(0.96 * 64)
  EXPECT_THAT(set.clip_rank_v, Each(58u));  // floor(0.92 * 64)
  EXPECT_EQ(result->value_tokens, 160u);
  for (const LayerReport& report : result->layers) {
    EXPECT_LT(report.orthogonality_error, 1.0 / 256);
    EXPECT_EQ(report.int2.tokens_count, 160u);
  }
  const auto parsed = RotationSet::Parse(set.Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, set);
}

TEST_F(FitTest, TheRotationsDiagonalizeTheLayersCovariances) {
  const LayerDump layer = SyntheticLayer({}, 1);
  const auto fitted = FitLayer(layer, {}, &pool_);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  const uint32_t dim = layer.head_dim;
  const auto expect_rotation = [&](const Matrix& covariance, const std::vector<uint16_t>& bits) {
    const auto system = SymmetricEigen(covariance, dim);
    ASSERT_TRUE(system.ok());
    EXPECT_EQ(RoundToBf16(RotationFromEigenvectors(system->vectors, dim)), bits);
  };
  expect_rotation(MeanMatrix(QueryCovariance(layer, &pool_)), fitted->rotation.r_k);
  const std::vector<SequenceRange> whole = {{0, 100}, {100, 60}};
  expect_rotation(MeanMatrix(SoftmaxValueCovariance(layer, whole, &pool_)), fitted->rotation.r_v);
}

TEST_F(FitTest, ScopeKvHeadGivesEachHeadItsOwnRotation) {
  WriteDump(directory_.path(), {0, 1}, {}, 1);
  const auto result = Fit({.scope = RotationScope::kKvHead}, &pool_);
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

TEST_F(FitTest, HadamardAndNoneNeedNoData) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {3}}, 1);
  const auto hadamard = FitLayer(layer, {.method = Method::kHadamard}, &pool_);
  ASSERT_TRUE(hadamard.ok()) << hadamard.status();
  EXPECT_EQ(hadamard->rotation.r_k, RoundToBf16(Hadamard(64)));
  EXPECT_EQ(hadamard->rotation.r_v, hadamard->rotation.r_k);
  EXPECT_EQ(hadamard->rotation.clip_rank_k, 61u);
  const auto none = FitLayer(layer, {.method = Method::kNone}, &pool_);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(OrthogonalityError(none->rotation.r_k.data(), 64), 0);
  EXPECT_EQ(none->rotation.r_k[65], 0x3f80);  // 1.0 on the diagonal.
  EXPECT_EQ(none->rotation.clip_rank_k, 0u);
  EXPECT_EQ(none->rotation.clip_rank_v, 0u);
  const auto clipped = FitLayer(layer, {.method = Method::kNone, .clip_k = 0.5}, &pool_);
  ASSERT_TRUE(clipped.ok());
  EXPECT_EQ(clipped->rotation.clip_rank_k, 32u);
}

TEST_F(FitTest, TwoFitsGiveTheSameBytesWhateverTheThreads) {
  WriteDump(directory_.path(), {0, 1}, {}, 1);
  ThreadPool one(1);
  ThreadPool four(4);
  for (const ValueObjective objective : {ValueObjective::kSoftmax, ValueObjective::kEnergy}) {
    const auto first = Fit({.value_objective = objective}, &one);
    const auto second = Fit({.value_objective = objective}, &four);
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_EQ(first->rotations.Serialize(), second->rotations.Serialize());
  }
}

TEST_F(FitTest, TheValueObjectivesDiffer) {
  const LayerDump layer = SyntheticLayer({}, 1);
  const auto softmax = FitLayer(layer, {}, &pool_);
  const auto energy = FitLayer(layer, {.value_objective = ValueObjective::kEnergy}, &pool_);
  ASSERT_TRUE(softmax.ok() && energy.ok());
  EXPECT_EQ(softmax->rotation.r_k, energy->rotation.r_k);
  EXPECT_NE(softmax->rotation.r_v, energy->rotation.r_v);
}

// Queries and keys with a few large directions and outlier channels: what the method is for. With 2
// bits, U H P_br beats H, and H beats no rotation.
class Int2ErrorTest : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(HeadDims, Int2ErrorTest, testing::Values(64, 128, 256));

TEST_P(Int2ErrorTest, OscarBeatsHadamardBeatsNoneOnASpikedSpectrum) {
  ThreadPool pool(2);
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {320}, .head_dim = GetParam()}, 11);
  const auto measure = [&](Method method) {
    const auto fitted =
        FitLayer(layer, {.method = method, .group_size = std::max(32u, GetParam() / 4)}, &pool);
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
                 o->method = Method::kNone;
                 // Finite, but its range is not: max - min overflows.
                 layer->k[70 * 2 * 64 + 64] = 3e38f;
                 layer->k[70 * 2 * 64 + 65] = -3e38f;
               },
               "K of token 70, head 1"}),
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
  EXPECT_THAT(std::string(ParseMethod("quarot").status().message()),
              HasSubstr("'quarot' is not known; there are: oscar, hadamard, none"));
}

}  // namespace
}  // namespace okv
