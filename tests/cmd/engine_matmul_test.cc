#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cmd/engine/matmul.h"
#include "tests/cmd/engine_test_targets.h"

namespace okv {
namespace {

using testing_support::OnEveryTarget;

struct Problem {
  std::vector<float> x;  // [rows, inputs]
  std::vector<float> w;  // [outputs, inputs]
  PackedMatrix packed;
  std::vector<float> expected;  // [rows, outputs]
};

Problem MakeProblem(size_t rows, size_t inputs, size_t outputs, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Problem problem;
  problem.packed = PackedMatrix(outputs, inputs);
  problem.x.resize(rows * inputs);
  problem.w.resize(outputs * inputs);
  for (float& value : problem.x) value = normal(random);
  for (float& value : problem.w) value = normal(random);
  for (size_t n = 0; n < outputs; ++n) {
    problem.packed.SetRow(n, absl::MakeConstSpan(problem.w.data() + n * inputs, inputs));
  }
  for (size_t m = 0; m < rows; ++m) {
    for (size_t n = 0; n < outputs; ++n) {
      float sum = 0;
      for (size_t k = 0; k < inputs; ++k) {
        sum = std::fma(problem.x[m * inputs + k], problem.w[n * inputs + k], sum);
      }
      problem.expected.push_back(sum);
    }
  }
  return problem;
}

TEST(MatMulTest, EqualsANaiveFmaChainBitForBitOnEveryTargetAndThreadCount) {
  struct Shape {
    size_t rows, inputs, outputs;
  };
  for (const Shape& shape :
       {Shape{1, 64, 48}, Shape{7, 33, 96}, Shape{8, 1, 50}, Shape{13, 200, 192},
        Shape{131, 40, 100}, Shape{1, 96, 600}, Shape{3, 5, 1}}) {
    SCOPED_TRACE(testing::Message()
                 << shape.rows << " x " << shape.inputs << " x " << shape.outputs);
    const Problem problem = MakeProblem(shape.rows, shape.inputs, shape.outputs, 11);
    OnEveryTarget([&] {
      for (const size_t threads : {1, 2, 3}) {
        ThreadPool pool(threads);
        std::vector<float> y(shape.rows * shape.outputs, -1.0f);
        MatMul({.x = problem.x.data(),
                .x_stride = shape.inputs,
                .rows_count = shape.rows,
                .w = &problem.packed,
                .y = y.data(),
                .y_stride = shape.outputs},
               &pool);
        EXPECT_EQ(std::memcmp(y.data(), problem.expected.data(), y.size() * sizeof(float)), 0);
      }
    });
  }
}

TEST(MatMulTest, LeavesWhatIsBetweenOutputRowsAlone) {
  const Problem problem = MakeProblem(9, 20, 50, 5);
  ThreadPool pool(2);
  constexpr size_t kStride = 64;
  std::vector<float> y(9 * kStride, -1.0f);
  MatMul({.x = problem.x.data(),
          .x_stride = 20,
          .rows_count = 9,
          .w = &problem.packed,
          .y = y.data(),
          .y_stride = kStride},
         &pool);
  for (size_t m = 0; m < 9; ++m) {
    for (size_t n = 0; n < kStride; ++n) {
      EXPECT_EQ(y[m * kStride + n], n < 50 ? problem.expected[m * 50 + n] : -1.0f);
    }
  }
}

TEST(PackedMatrixTest, RowsComeBackAsTheyWent) {
  const Problem problem = MakeProblem(1, 37, 101, 9);
  std::vector<float> row(37);
  for (size_t n = 0; n < 101; ++n) {
    problem.packed.CopyRow(n, absl::MakeSpan(row));
    EXPECT_EQ(std::memcmp(row.data(), problem.w.data() + n * 37, 37 * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace okv
