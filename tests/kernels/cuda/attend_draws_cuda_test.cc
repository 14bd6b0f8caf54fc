// What attention benchmarks are made of: rows drawn as a model's, and the loads that stand for it.

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cmd/bench/attend_case.h"
#include "cmd/bench/drawn_rows.h"
#include "kernels/cuda/device_buffer.h"
#include "proto/bf16.h"
#include "tests/kernels/cuda/gpu.h"

namespace okv::cuda {
namespace {

constexpr uint32_t kDim = 128;

std::vector<uint16_t> Diagonal(double first, double last) {
  std::vector<uint16_t> matrix(kDim * kDim, 0);
  for (uint32_t i = 0; i < kDim; ++i) {
    const double entry = first + (last - first) * i / (kDim - 1);
    matrix[i * kDim + i] = FloatToBf16(static_cast<float>(entry));
  }
  return matrix;
}

// Rows whose channels deviate by 0.25 to 4 (K) and 1 (V), served as they are.
RowDraws Draws() {
  return {.head_dim = kDim,
          .mix_k = Diagonal(0.25, 4.0),
          .mix_v = Diagonal(1.0, 1.0),
          .r_k = Diagonal(1.0, 1.0),
          .r_v = Diagonal(1.0, 1.0)};
}

AttendCaseOptions Options(const RowDraws* draws) {
  return {.shape = {.batch = 0,
                    .query_tokens = 1,
                    .query_heads = 16,
                    .kv_heads = 4,
                    .head_dim = kDim,
                    .group_size = 128,
                    .sink_blocks = 1,
                    .recent_blocks = 4,
                    .ring_blocks = 5,
                    .sliding_window = 0},
          .lengths = {0, 1, 63, 64, 320, 321, 449, 4097, 1000},
          .layers_count = 2,
          .draws = draws,
          .seed = std::random_device{}()};
}

TEST(AttendDrawsCudaTest, QueriesDeviateAsTheMatrixSays) {
  OKV_SKIP_WITHOUT_GPU();
  constexpr size_t kRows = 20'000;
  DrawnRows rows(Draws(), {.layers_count = 1, .kv_heads = 1, .head_dim = kDim, .group_size = 128},
                 std::random_device{}());
  DeviceBuffer buffer;
  ASSERT_EQ(buffer.Allocate(kRows * kDim * 2), cudaSuccess);
  rows.FillQueries(buffer.as<__nv_bfloat16>(), kRows, 2.0f);
  std::vector<uint16_t> values(kRows * kDim);
  ASSERT_EQ(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (const uint32_t channel : {0u, 64u, kDim - 1}) {
    double sum = 0;
    for (size_t row = 0; row < kRows; ++row) {
      const double value = Bf16ToFloat(values[row * kDim + channel]);
      sum += value * value;
    }
    const double expected = 2.0 * (0.25 + 3.75 * channel / (kDim - 1));
    EXPECT_NEAR(std::sqrt(sum / kRows) / expected, 1.0, 0.03) << channel;
  }
}

TEST(AttendDrawsCudaTest, AttentionOverDrawnRowsIsRight) {
  OKV_SKIP_WITHOUT_GPU();
  const RowDraws draws = Draws();
  const AttendCase attend(Options(&draws));
  for (const uint32_t layer : {0u, 1u}) {
    EXPECT_LT(attend.Check(layer).beyond_rounding, 1e-3);
  }
}

TEST(AttendDrawsCudaTest, LoadsHaveTheBytesThatAttentionReads) {
  OKV_SKIP_WITHOUT_GPU();
  const AttendCase attend(Options(nullptr));
  const std::vector<LoadItem> items = attend.LoadItems();
  uint64_t bytes = 0;
  for (const LoadItem& item : items) {
    EXPECT_LE(item.bytes, kLoadBytesMax);
    EXPECT_EQ(item.bytes % 16, 0);
    bytes += item.bytes;
  }
  EXPECT_EQ(bytes, attend.BytesRead());
  DeviceBuffer on_device;
  ASSERT_EQ(on_device.Allocate(items.size() * sizeof(LoadItem)), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(on_device.data(), items.data(), on_device.bytes(), cudaMemcpyHostToDevice),
            cudaSuccess);
  for (const bool early : {false, true}) {
    LoadOnlyParams params = attend.LoadParams(on_device, 1);
    params.early = early;
    const cudaError_t error = LoadOnly(params, nullptr);
    if (error == cudaErrorNotSupported) GTEST_SKIP() << "no bulk copies before sm_90";
    ASSERT_EQ(error, cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
}

}  // namespace
}  // namespace okv::cuda
