// Prefill attention on the GPU against float64. Data are new in every run; the seed is printed.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cmd/bench/prefill_case.h"
#include "kernels/cuda/prefill_launch.h"
#include "proto/bf16.h"
#include "tests/kernels/cuda/gpu.h"

namespace okv::cuda {
namespace {

// Chunks that begin and end at, before and behind the edges of blocks, windows and tiles; with and
// without history; one request without new tokens.
const std::vector<int32_t> kNewTokens = {1, 63, 64, 65, 0, 200, 130, 1, 300, 64, 64, 5};
const std::vector<int32_t> kLengths = {1, 63, 64, 65, 10, 200, 450, 500, 1000, 640, 1111, 2050};

uint64_t Seed() {
  static const uint64_t seed = std::random_device{}();
  return seed;
}

PrefillCaseOptions Options(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim,
                           uint32_t group_size) {
  PrefillCaseOptions options;
  options.shape = {.batch = 0,
                   .query_tokens_max = 0,
                   .query_heads = query_heads,
                   .kv_heads = kv_heads,
                   .head_dim = head_dim,
                   .group_size = group_size,
                   .sink_blocks = 1,
                   .recent_blocks = 4,
                   .sliding_window = 0,
                   .history_blocks_max = 0};
  options.new_tokens = kNewTokens;
  options.lengths = kLengths;
  options.rows_checked = 2500;
  return options;
}

// Probabilities are rounded to bf16, as the output is, and each of the two roundings alone
// is 1.7e-3 of it. (A request of one row with few keys may have twice that.)
constexpr double kTolerance = 2.5e-3;

void ExpectRight(PrefillCaseOptions options, const std::string& what) {
  SCOPED_TRACE(what);
  options.seed = Seed();
  const PrefillCase prefill(options);
  const uint32_t layer = options.layers_count - 1;
  const PrefillError error = prefill.Check(layer);
  EXPECT_LT(error.beyond_rounding, kTolerance) << "relative " << error.relative;
  EXPECT_LT(error.few_rows, 2 * kTolerance) << "relative " << error.relative;
  // Now and then a rotated query is rounded the other way than the reference's: by 2^-8 of up to 4
  // sigma, times a key of up to 1.65, times the softmax scale.
  const double scale = 1.0 / std::sqrt(options.shape.head_dim);
  EXPECT_LT(error.lse, 4 * 0x1p-8 * 2 * 1.65 * scale * std::max(1.0f, options.query_sigma));
  const std::vector<uint16_t> out = prefill.Output();
  prefill.Check(layer);
  EXPECT_EQ(out, prefill.Output()) << "a second run differs";
}

class PrefillCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    OKV_SKIP_WITHOUT_GPU();
    std::printf("seed %llu\n", static_cast<unsigned long long>(Seed()));
  }
};

TEST_F(PrefillCudaTest, MatchesFloat64ForEveryHeadDimAndQueryGroup) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 16u}) {
      ExpectRight(Options(2 * group, 2, dim, dim),
                  "d " + std::to_string(dim) + " GQA " + std::to_string(group));
    }
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64ForEveryGroupSize) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group_size = 32; group_size < dim; group_size *= 2) {
      ExpectRight(Options(8, 2, dim, group_size),
                  "d " + std::to_string(dim) + " g " + std::to_string(group_size));
    }
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64WithEveryOption) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 4u}) {
      for (const uint32_t window : {0u, 100u, 500u}) {
        for (const bool softcap : {false, true}) {
          PrefillCaseOptions options = Options(2 * group, 2, dim, dim / 2);
          options.shape.sliding_window = window;
          options.layers_count = 2;
          options.rotation_heads = 2;
          options.query_sigma = 4.0f;
          options.logit_softcap = softcap ? 20.0f : 0.0f;
          options.sink_logits = window != 100;
          options.whole_bf16 = softcap;
          ExpectRight(options, "d " + std::to_string(dim) + " GQA " + std::to_string(group) +
                                   " window " + std::to_string(window) + " softcap " +
                                   std::to_string(softcap));
        }
      }
    }
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64WithOtherWindows) {
  for (const uint32_t sinks : {0u, 1u, 2u}) {
    for (const uint32_t recent : {0u, 1u, 16u}) {
      for (const uint32_t group : {1u, 4u}) {
        PrefillCaseOptions options = Options(2 * group, 2, 128, 128);
        options.shape.sink_blocks = sinks;
        options.shape.recent_blocks = recent;
        ExpectRight(options, "sinks " + std::to_string(sinks) + " recent " +
                                 std::to_string(recent) + " GQA " + std::to_string(group));
      }
    }
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64WithLongHistoryAndPeakyScores) {
  for (const float sigma : {1.0f, 8.0f, 16.0f}) {
    PrefillCaseOptions options = Options(32, 8, 128, 128);
    options.new_tokens = {2048, 100, 1};
    options.lengths = {20003, 7000, 9000};
    options.query_sigma = sigma;
    options.rows_checked = 1000;
    ExpectRight(options, "sigma " + std::to_string(sigma));
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64WithZeroTinyAndHugeScales) {
  for (const uint32_t group_size : {128u, 32u}) {
    PrefillCaseOptions options = Options(8, 2, 128, group_size);
    options.outliers = true;
    ExpectRight(options, "g " + std::to_string(group_size));
  }
}

TEST_F(PrefillCudaTest, MatchesFloat64ForABatchOfManyRequests) {
  std::mt19937_64 random(Seed());
  PrefillCaseOptions options = Options(8, 8, 128, 128);
  options.new_tokens.clear();
  options.lengths.clear();
  for (int i = 0; i < 1100; ++i) {
    const int32_t length = 1 + static_cast<int32_t>(random() % 700);
    options.lengths.push_back(length);
    options.new_tokens.push_back(random() % 3 == 0 ? 0 : static_cast<int32_t>(random() % length));
  }
  ExpectRight(options, "1,100 requests");
}

// What other architectures run. (The other tests run what this one chooses.)
TEST_F(PrefillCudaTest, TheKernelOfEveryArchitectureMatchesTheChosenOne) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t group : {1u, 4u}) {
      SCOPED_TRACE("d " + std::to_string(dim) + " GQA " + std::to_string(group));
      PrefillCaseOptions options = Options(2 * group, 2, dim, dim);
      options.seed = Seed();
      const PrefillCase prefill(options);
      prefill.Check(0);
      const std::vector<uint16_t> chosen = prefill.Output();
      const PrefillParams params = prefill.Params(0);
      ASSERT_EQ(cudaMemset(params.out, 0xff, chosen.size() * 2), cudaSuccess);
      const PrefillLaunch launch = {
          .params = params, .plan = PrefillPlanAt(params.plan.shape, params.plan.workspace)};
      ASSERT_EQ(LaunchPrefillMma(launch, nullptr), cudaSuccess);
      const std::vector<uint16_t> out = prefill.Output();
      double difference = 0.0;
      double norm = 0.0;
      for (size_t i = 0; i < out.size(); ++i) {
        if (chosen[i] == 0xffff && out[i] == 0xffff) continue;  // Rows of nobody
        const double got = Bf16ToFloat(out[i]);
        const double expected = Bf16ToFloat(chosen[i]);
        difference += (got - expected) * (got - expected);
        norm += expected * expected;
      }
      // Two roundings to bf16; NaN fails too.
      EXPECT_LT(std::sqrt(difference / norm), 3e-3);
    }
  }
}

TEST_F(PrefillCudaTest, AddressesBeyondFourGibibytes) {
  PrefillCaseOptions options = Options(32, 8, 128, 128);
  options.new_tokens = {200, 100};
  options.lengths = {60000, 60000};
  options.layers_count = 64;  // 1,881 blocks x 64 layers x 36,864 bytes = 4.4 GB
  options.rows_checked = 200;
  ExpectRight(options, "4.4 GB of pages");
}

TEST_F(PrefillCudaTest, ACapturedGraphFollowsTokensThatChangeBetweenReplays) {
  PrefillCaseOptions options = Options(8, 2, 128, 128);
  options.new_tokens = {500, 300, 900, 64};
  options.lengths = {5000, 300, 900, 640};
  options.whole_bf16 = true;  // The tables must hold for shorter sequences too.
  options.seed = Seed();
  PrefillCase prefill(options);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(PlanPrefill(prefill.Params(0).plan, stream), cudaSuccess);
  ASSERT_EQ(Prefill(prefill.Params(0), stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  const std::vector<std::vector<int32_t>> new_tokens = {
      {500, 300, 900, 64}, {1, 0, 899, 64}, {320, 300, 64, 63}};
  const std::vector<std::vector<int32_t>> lengths = {
      {5000, 300, 900, 640}, {1, 0, 899, 640}, {4321, 300, 64, 63}};
  for (size_t i = 0; i < lengths.size(); ++i) {
    prefill.SetTokens(new_tokens[i], lengths[i]);
    prefill.Check(0);
    const std::vector<uint16_t> expected = prefill.Output();
    ASSERT_EQ(cudaMemset(prefill.Params(0).out, 0xff, expected.size() * 2), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(prefill.Output(), expected);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(PrefillCudaTest, ARequestWithoutRoomForItsHistoryGetsNanAndNoOtherDoes) {
  PrefillCaseOptions options = Options(8, 2, 128, 128);
  options.new_tokens = {100, 300, 100};
  options.lengths = {1000, 1500, 100};  // 10 and 18 history blocks, none
  options.seed = Seed();
  const PrefillCase prefill(options);
  prefill.Check(0);
  const std::vector<uint16_t> expected = prefill.Output();
  PrefillParams params = prefill.Params(0);
  params.plan.shape.history_blocks_max -= 1;
  ASSERT_EQ(PlanPrefill(params.plan, nullptr), cudaSuccess);
  ASSERT_EQ(Prefill(params, nullptr), cudaSuccess);
  const std::vector<uint16_t> out = prefill.Output();
  constexpr size_t kRow = 8 * 128;
  for (size_t i = 0; i < 500 * kRow; ++i) {
    if (i >= 100 * kRow && i < 400 * kRow) {
      ASSERT_TRUE(std::isnan(Bf16ToFloat(out[i]))) << i;
    } else {
      ASSERT_EQ(out[i], expected[i]) << i;
    }
  }
}

class PrefillHeadDimCudaTest : public PrefillCudaTest,
                               public ::testing::WithParamInterface<uint32_t> {};

// Also a row that stands in front of the next request's first one, which reads it with its tile.
TEST_P(PrefillHeadDimCudaTest, ANanInOneQueryMakesThatRowNanAndNoOther) {
  const size_t dim = GetParam();
  PrefillCaseOptions options = Options(8, 2, GetParam(), GetParam());
  options.new_tokens = {100, 100};
  options.lengths = {1000, 110};
  options.seed = Seed();
  const PrefillCase prefill(options);
  prefill.Check(0);
  const std::vector<uint16_t> expected = prefill.Output();
  const PrefillParams params = prefill.Params(0);
  const size_t rows[] = {57 * 8 + 3, 95 * 8 + 3};  // Tokens 57 and 95, head 3
  const uint16_t nan = 0x7fc0;
  __nv_bfloat16* query = const_cast<__nv_bfloat16*>(params.q);
  for (const size_t row : rows) {
    ASSERT_EQ(cudaMemcpy(query + row * dim, &nan, sizeof(nan), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ASSERT_EQ(Prefill(params, nullptr), cudaSuccess);
  const std::vector<uint16_t> out = prefill.Output();
  for (size_t i = 0; i < out.size(); ++i) {
    if (i / dim == rows[0] || i / dim == rows[1]) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(out[i]))) << i;
    } else {
      EXPECT_EQ(out[i], expected[i]) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryHeadDim, PrefillHeadDimCudaTest, ::testing::Values(64u, 128u, 256u));

TEST_F(PrefillCudaTest, ShapesItDoesNotSupportAreInvalidValue) {
  PrefillCaseOptions options = Options(8, 2, 128, 128);
  options.new_tokens = {100};
  options.lengths = {1000};
  const PrefillCase prefill(options);
  const PrefillParams good = prefill.Params(0);
  const auto refuses = [&good](auto change) {
    PrefillParams params = good;
    change(&params.plan.shape);
    return PrefillWorkspaceBytes(params.plan.shape) == 0 &&
           PlanPrefill(params.plan, nullptr) == cudaErrorInvalidValue &&
           Prefill(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->head_dim = 96; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->group_size = 16; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->group_size = 256; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->query_heads = 7; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->query_heads = 34; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->batch = 0; }));
  EXPECT_TRUE(refuses([](PrefillShape* shape) { shape->query_tokens_max = 0; }));
  const auto refuses_params = [&good](auto change) {
    PrefillParams params = good;
    change(&params);
    return Prefill(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->q += 1; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->out += 4; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->bf16_block_stride += 8; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->int2_pages += 8; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->rotation_heads = 3; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->softmax_scale = 0.0f; }));
  EXPECT_TRUE(refuses_params([](PrefillParams* params) { params->r_v = nullptr; }));
}

}  // namespace
}  // namespace okv::cuda
