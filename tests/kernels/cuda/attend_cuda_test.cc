// Decode attention on the GPU against float64. Data are new in every run; the seed is printed.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cmd/bench/attend_case.h"
#include "proto/bf16.h"
#include "tests/kernels/cuda/gpu.h"

namespace okv::cuda {
namespace {

// Every length at which a unit, a block, a window or a page pair begins or ends.
const std::vector<int32_t> kRagged = {0,   1,   63,  64,  65,  319,  320,  321,
                                      384, 385, 387, 449, 512, 1000, 2050, 4097};

uint64_t Seed() {
  static const uint64_t seed = std::random_device{}();
  return seed;
}

DecodeShape Shape(uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim, uint32_t group_size) {
  return {.batch = 0,
          .query_tokens = 1,
          .query_heads = query_heads,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .group_size = group_size,
          .sink_blocks = 1,
          .recent_blocks = 4,
          .ring_blocks = 6,
          .sliding_window = 0};
}

void ExpectRight(AttendCaseOptions options, const std::string& what) {
  SCOPED_TRACE(what);
  options.seed = Seed();
  const AttendCase attend(options);
  const AttendError error = attend.Check(options.layers_count - 1);
  EXPECT_LT(error.beyond_rounding, 1e-3) << "relative " << error.relative;
  // A logit is as exact as 16 bits of its query are.
  const double logit = options.query_sigma * std::sqrt(options.shape.head_dim) * 0.65;
  EXPECT_LT(error.lse, 1e-4 * std::max(1.0, logit));
  const std::vector<uint16_t> out = attend.Output();
  attend.Check(options.layers_count - 1);
  EXPECT_EQ(out, attend.Output()) << "a second run differs";
}

class AttendCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    OKV_SKIP_WITHOUT_GPU();
    std::printf("seed %llu\n", static_cast<unsigned long long>(Seed()));
  }
};

TEST_F(AttendCudaTest, MatchesFloat64ForEveryHeadDimGroupSizeAndQueryGroup) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (uint32_t group_size = dim; group_size >= 32; group_size /= 2) {
      for (const uint32_t group : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 11u, 16u}) {
        AttendCaseOptions options;
        options.shape = Shape(2 * group, 2, dim, group_size);
        options.lengths = kRagged;
        ExpectRight(options, "d " + std::to_string(dim) + " g " + std::to_string(group_size) +
                                 " GQA " + std::to_string(group));
      }
    }
  }
}

TEST_F(AttendCudaTest, MatchesFloat64WithEveryOptionAndSeveralQueryTokens) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint32_t tokens : {1u, 2u, 3u, 8u}) {
      for (const uint32_t group : {1u, 4u}) {
        for (const uint32_t window : {0u, 500u}) {
          AttendCaseOptions options;
          options.shape = Shape(2 * group, 2, dim, dim / 2);
          options.shape.query_tokens = tokens;
          options.shape.sliding_window = window;
          options.lengths = kRagged;
          options.layers_count = 2;
          options.rotation_heads = 2;
          options.query_sigma = 4.0f;
          options.logit_softcap = tokens == 3 ? 20.0f : 0.0f;
          options.sink_logits = tokens != 2;
          options.early_history = tokens == 8;
          ExpectRight(options, "d " + std::to_string(dim) + " tokens " + std::to_string(tokens) +
                                   " GQA " + std::to_string(group) + " window " +
                                   std::to_string(window));
        }
      }
    }
  }
}

// 9 to 16 query rows a KV head at head_dim 128 with one scale a row are another kernel on sm_90a,
// and more than 16 are several pairs of it.
TEST_F(AttendCudaTest, MatchesFloat64WithSixteenQueryRowsAndEveryOption) {
  for (const uint32_t tokens : {1u, 2u, 3u, 4u, 8u}) {
    for (const uint32_t group : {4u, 5u, 16u}) {
      for (const uint32_t window : {0u, 500u}) {
        AttendCaseOptions options;
        options.shape = Shape(2 * group, 2, 128, 128);
        options.shape.query_tokens = tokens;
        options.shape.sliding_window = window;
        options.lengths = kRagged;
        options.layers_count = 2;
        options.rotation_heads = 2;
        options.query_sigma = 4.0f;
        options.logit_softcap = tokens % 2 == 1 ? 20.0f : 0.0f;
        options.sink_logits = tokens != 2;
        options.early_history = tokens == 8;
        ExpectRight(options, "tokens " + std::to_string(tokens) + " GQA " + std::to_string(group) +
                                 " window " + std::to_string(window));
      }
    }
  }
}

// More than 96 units a thread block, 32 a warpgroup: what the ring asks for is found 32 units at a
// time.
TEST_F(AttendCudaTest, MatchesFloat64WithSixteenQueryRowsAndManyUnitsABlock) {
  for (const bool has_options : {false, true}) {
    AttendCaseOptions options;
    options.shape = Shape(has_options ? 64 : 128, 8, 128, 128);
    options.lengths = std::vector<int32_t>(8, 100000);
    options.lengths[3] = 77777;
    if (has_options) {
      options.shape.query_tokens = 2;
      options.shape.sliding_window = 90000;
      options.logit_softcap = 20.0f;
    }
    ExpectRight(options, has_options ? "2 tokens, window, softcap" : "plain");
  }
}

class AttendCudaWindowTest : public AttendCudaTest,
                             public ::testing::WithParamInterface<uint32_t> {};

TEST_P(AttendCudaWindowTest, MatchesFloat64WithOtherWindows) {
  const uint32_t group = GetParam();
  for (const uint32_t sinks : {0u, 1u, 2u}) {
    for (const uint32_t recent : {0u, 1u, 16u}) {
      AttendCaseOptions options;
      options.shape = Shape(2 * group, 2, 128, 128);
      options.shape.sink_blocks = sinks;
      options.shape.recent_blocks = recent;
      options.shape.ring_blocks = recent + 1;
      options.lengths = kRagged;
      ExpectRight(options, "sinks " + std::to_string(sinks) + " recent " + std::to_string(recent));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(QueryGroups, AttendCudaWindowTest, ::testing::Values(4u, 16u));

TEST_F(AttendCudaTest, MatchesFloat64WithLongAndPeakySequencesCutOverManyBlocks) {
  for (const float sigma : {1.0f, 8.0f, 16.0f}) {
    for (const uint32_t query_heads : {32u, 64u, 128u}) {
      AttendCaseOptions options;
      options.shape = Shape(query_heads, 8, 128, 128);
      options.lengths = {100003, 20000, 1};
      options.query_sigma = sigma;
      ExpectRight(options,
                  "sigma " + std::to_string(sigma) + " heads " + std::to_string(query_heads));
    }
  }
}

// Fewer pairs than thread blocks: some blocks have no work, a pair is merged from many, and in a
// short piece some warps have no unit, hence no sums.
TEST_F(AttendCudaTest, MatchesFloat64WithFewPairsInManyBlocks) {
  for (const uint32_t group : {4, 8, 16}) {
    for (const std::vector<int32_t>& lengths : std::vector<std::vector<int32_t>>{
             {1}, {65}, {700}, {5000}, {32768}, {40, 33000}, {1000, 0, 9000}}) {
      ExpectRight({.shape = Shape(8 * group, 8, 128, 128),
                   .lengths = lengths,
                   .early_history = lengths.size() == 1},
                  "query group " + std::to_string(group) + ", " + std::to_string(lengths.size()) +
                      " requests, the last of " + std::to_string(lengths.back()) + " tokens");
    }
  }
}

TEST_F(AttendCudaTest, MatchesFloat64WithZeroTinyAndHugeScales) {
  for (const uint32_t group_size : {128u, 32u}) {
    for (const uint32_t group : {4u, 8u, 16u}) {
      AttendCaseOptions options;
      options.shape = Shape(2 * group, 2, 128, group_size);
      options.lengths = kRagged;
      options.outliers = true;
      ExpectRight(options, "g " + std::to_string(group_size) + " GQA " + std::to_string(group));
    }
  }
}

TEST_F(AttendCudaTest, MatchesFloat64ForBatchesOfManyShortSequences) {
  std::mt19937_64 random(Seed());
  for (const uint32_t batch : {64u, 256u}) {
    AttendCaseOptions options;
    options.shape = Shape(32, 8, 128, 128);
    for (uint32_t i = 0; i < batch; ++i) {
      options.lengths.push_back(static_cast<int32_t>(random() % 4097));
    }
    ExpectRight(options, "batch " + std::to_string(batch));
  }
}

TEST_F(AttendCudaTest, AddressesBeyondFourGibibytes) {
  AttendCaseOptions options;
  options.shape = Shape(32, 8, 128, 128);
  options.lengths = {100000, 100000};
  options.layers_count = 40;  // 3,131 blocks x 40 layers x 36,864 bytes = 4.6 GB
  ExpectRight(options, "4.6 GB of pages");
}

TEST_F(AttendCudaTest, ACapturedGraphFollowsLengthsThatChangeBetweenReplays) {
  AttendCaseOptions options;
  options.shape = Shape(32, 8, 128, 128);
  options.lengths = {5000, 3000, 9000, 64};
  options.seed = Seed();
  AttendCase attend(options);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  attend.Plan(stream);
  ASSERT_EQ(Attend(attend.Params(0), stream), cudaSuccess);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{5000, 3000, 9000, 64}, {1, 0, 8999, 64}, {320, 321, 64, 63}}) {
    attend.SetLengths(lengths);
    attend.Check(0);
    const std::vector<uint16_t> expected = attend.Output();
    ASSERT_EQ(cudaMemset(attend.Params(0).out, 0xff, expected.size() * 2), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(attend.Output(), expected);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

class AttendCudaNanTest : public AttendCudaTest, public ::testing::WithParamInterface<uint32_t> {};

TEST_P(AttendCudaNanTest, ANanInOneRequestsQueryMakesThatRowNanAndNoOther) {
  AttendCaseOptions options;
  const uint32_t heads = GetParam();
  options.shape = Shape(heads, 2, 128, 128);
  options.lengths = {1000, 1000, 1000};
  options.seed = Seed();
  const AttendCase attend(options);
  attend.Check(0);
  const std::vector<uint16_t> expected = attend.Output();
  const DecodeParams params = attend.Params(0);
  const size_t row = (1 * heads + 3) * 128;  // Request 1, head 3
  const uint16_t nan = 0x7fc0;
  __nv_bfloat16* query = const_cast<__nv_bfloat16*>(params.q);
  ASSERT_EQ(cudaMemcpy(query + row, &nan, sizeof(nan), cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(Attend(params, nullptr), cudaSuccess);
  const std::vector<uint16_t> out = attend.Output();
  for (size_t i = 0; i < out.size(); ++i) {
    if (i >= row && i < row + 128) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(out[i]))) << i;
    } else {
      EXPECT_EQ(out[i], expected[i]) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(QueryHeads, AttendCudaNanTest, ::testing::Values(8u, 32u));

TEST_F(AttendCudaTest, ShapesItDoesNotSupportAreInvalidValue) {
  AttendCaseOptions options;
  options.shape = Shape(8, 2, 128, 128);
  options.lengths = {100};
  const AttendCase attend(options);
  const DecodeParams good = attend.Params(0);
  const auto refuses = [&good](auto change) {
    DecodeParams params = good;
    change(&params.shape);
    return DecodeWorkspaceBytes(params.shape) == 0 &&
           PlanDecode(params.shape, params.lengths, params.workspace, nullptr) ==
               cudaErrorInvalidValue &&
           Attend(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->head_dim = 96; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->group_size = 16; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->group_size = 256; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->query_heads = 7; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->query_heads = 34; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->query_tokens = 9; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->query_tokens = 0; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->ring_blocks = 4; }));
  EXPECT_TRUE(refuses([](DecodeShape* shape) { shape->batch = 0; }));
  DecodeParams misaligned = good;
  misaligned.q += 1;
  EXPECT_EQ(Attend(misaligned, nullptr), cudaErrorInvalidValue);
  DecodeParams rotations = good;
  rotations.rotation_heads = 3;
  EXPECT_EQ(Attend(rotations, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace okv::cuda
