#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/all_reduce_nccl.h"
#include "calib/covariance.h"
#include "calib/cuda/gpu_covariance.h"
#include "calib/linalg.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/check.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

class GpuCovarianceTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto devices = GpuCovariance::DevicesCount();
    if (!devices.ok() || *devices == 0) {
      GTEST_SKIP() << (devices.ok() ? "no GPU" : devices.status().ToString());
    }
    devices_ = *devices;
    UseSingleThreadedBlas();
  }
  static std::unique_ptr<GpuCovariance> Gpu(int device = 0) {
    auto gpu = GpuCovariance::Create(device);
    OKV_CHECK(gpu.ok());
    return *std::move(gpu);
  }

  int devices_ = 0;
  ThreadPool pool_{4};
};

double LargestDifference(const std::vector<Matrix>& a, const std::vector<Matrix>& b) {
  double largest = 0;
  double scale = 0;
  EXPECT_EQ(a.size(), b.size());
  for (size_t head = 0; head < a.size(); ++head) {
    EXPECT_EQ(a[head].size(), b[head].size());
    for (size_t i = 0; i < a[head].size(); ++i) {
      largest = std::max(largest, std::fabs(a[head][i] - b[head][i]));
      scale = std::max(scale, std::fabs(a[head][i]));
    }
  }
  EXPECT_GT(scale, 0);
  return largest / scale;
}

TEST_F(GpuCovarianceTest, IsTheCpus) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    // More than a chunk of 4,096 rows, in sequences that no tile divides.
    const LayerDump layer = SyntheticLayer(
        {.sequence_lengths = {700, 1, 4300, 33}, .query_heads = 6, .kv_heads = 2, .head_dim = dim},
        dim);
    const std::vector<SequenceRange> ranges = {{0, 700}, {700, 1}, {701, 1500}, {5001, 33}};
    const std::unique_ptr<GpuCovariance> gpu = Gpu();
    const auto queries = gpu->Queries(layer, AllTokens(layer));
    ASSERT_TRUE(queries.ok()) << queries.status();
    EXPECT_LT(LargestDifference(QueryCovariance(layer, &pool_), *queries), 1e-13) << dim;
    const auto keys = gpu->Keys(layer, AllTokens(layer));
    ASSERT_TRUE(keys.ok()) << keys.status();
    EXPECT_LT(LargestDifference(KeyCovariance(layer, &pool_), *keys), 1e-13) << dim;
    const auto values = gpu->SoftmaxValues(layer, ranges);
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_LT(LargestDifference(SoftmaxValueCovariance(layer, ranges, &pool_), *values), 1e-4)
        << dim;
    EXPECT_GT(gpu->work().flop, 2.0 * layer.tokens_count * 8 * dim * dim);
    EXPECT_GT(gpu->work().seconds, 0);
  }
}

TEST_F(GpuCovarianceTest, ASequenceDoesNotDependOnTheOthers) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {900, 700}}, 9);
  const std::unique_ptr<GpuCovariance> gpu = Gpu();
  const auto both = *gpu->SoftmaxValues(layer, {{0, 900}, {900, 700}});
  const auto first = *gpu->SoftmaxValues(layer, {{0, 900}});
  const auto second = *gpu->SoftmaxValues(layer, {{900, 700}});
  std::vector<Matrix> sum = first;
  for (size_t head = 0; head < sum.size(); ++head) {
    for (size_t i = 0; i < sum[head].size(); ++i) {
      sum[head][i] = (900 * first[head][i] + 700 * second[head][i]) / 1600;
    }
  }
  EXPECT_LT(LargestDifference(both, sum), 1e-13);
}

TEST_F(GpuCovarianceTest, TheLimitIsMeasured) {
  const auto limit = Gpu()->MeasureLimit();
  ASSERT_TRUE(limit.ok()) << limit.status();
  EXPECT_GT(limit->flop_per_s(), 1e11);
}

TEST_F(GpuCovarianceTest, ADeviceThatIsNotThereIsNotFound) {
  EXPECT_EQ(GpuCovariance::Create(devices_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(GpuCovariance::Create(-1).status().code(), absl::StatusCode::kNotFound);
}

// One rank a GPU, at most two.
class NcclTest : public GpuCovarianceTest {
 protected:
  template <typename Work>
  void OnEachRank(uint32_t count, const Work& work) {
    std::vector<std::unique_ptr<AllReduce>> controls = MakeThreadRanks(count);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < count; ++rank) {
      threads.emplace_back([&, control = std::move(controls[rank]), rank]() mutable {
        auto ranks = MakeNcclRank(std::move(control), static_cast<int>(rank));
        ASSERT_TRUE(ranks.ok()) << ranks.status();
        work(ranks->get());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  uint32_t ranks_max() const { return static_cast<uint32_t>(std::min(devices_, 2)); }
};

TEST_F(NcclTest, SumsAreExactAndEqualOnAllRanks) {
  for (uint32_t count = 1; count <= ranks_max(); ++count) {
    OnEachRank(count, [&](AllReduce* ranks) {
      EXPECT_EQ(ranks->ranks_count(), count);
      for (const size_t size : {5u, 300'000u, 1u}) {
        std::vector<double> values(size, 0.0);
        for (size_t i = 0; i < size; ++i) {
          if (i % count == ranks->rank()) values[i] = std::sin(1.0 + i);
        }
        const absl::Status status = ranks->Sum(absl::MakeSpan(values));
        ASSERT_TRUE(status.ok()) << status;
        for (size_t i = 0; i < size; ++i) ASSERT_EQ(values[i], std::sin(1.0 + i));
      }
    });
  }
}

TEST_F(NcclTest, CovariancesOfAllRanksAreThoseOfOne) {
  const LayerDump layer = SyntheticLayer({.sequence_lengths = {900, 40, 700, 1300}}, 10);
  const std::vector<SequenceRange> text = {{0, 900}, {900, 40}, {940, 700}, {1640, 1000}};
  OneRank alone;
  const std::unique_ptr<GpuCovariance> gpu = Gpu();
  SharedCovariance one(layer, text, gpu.get(), &alone);
  const auto queries = *one.Queries();
  const auto keys = *one.Keys();
  const auto values = *one.SoftmaxValues({});
  for (uint32_t count = 1; count <= ranks_max(); ++count) {
    OnEachRank(count, [&](AllReduce* ranks) {
      const std::unique_ptr<GpuCovariance> mine = Gpu(static_cast<int>(ranks->rank()));
      SharedCovariance shared(layer, text, mine.get(), ranks);
      EXPECT_LT(LargestDifference(queries, *shared.Queries()), 1e-10);
      EXPECT_LT(LargestDifference(keys, *shared.Keys()), 1e-10);
      EXPECT_LT(LargestDifference(values, *shared.SoftmaxValues({})), 1e-10);
    });
  }
}

TEST_F(NcclTest, ARankThatLeavesEndsTheOthersWait) {
  if (ranks_max() < 2) GTEST_SKIP() << "one GPU";
  OnEachRank(2, [&](AllReduce* ranks) {
    double one = 1;
    ASSERT_TRUE(ranks->Sum({&one, 1}).ok());
    EXPECT_EQ(one, 2);
    if (ranks->rank() == 1) return;
    EXPECT_EQ(ranks->Sum({&one, 1}).code(), absl::StatusCode::kUnavailable);
  });
}

}  // namespace
}  // namespace okv
