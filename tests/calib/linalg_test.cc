#include "calib/linalg.h"

#include <cmath>
#include <limits>
#include <random>

#include "calib/covariance.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

constexpr uint32_t kSeed = 20240611;

// A covariance whose eigenvalues fall by half from rank to rank (down to a floor).
Matrix RandomCovariance(uint32_t dim) {
  std::mt19937 random(kSeed);
  std::normal_distribution<double> normal;
  const size_t rows = 4 * size_t{dim};
  std::vector<double> samples(rows * dim);
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i] = normal(random) * (0.1 + std::pow(0.5, static_cast<double>(i % dim)) * 20);
  }
  Matrix sum(size_t{dim} * dim, 0.0);
  AddOuterProducts(samples.data(), rows, dim, &sum);
  Symmetrize(dim, &sum);
  Scale(1.0 / static_cast<double>(rows), &sum);
  return sum;
}

// A^T C A by the schoolbook.
Matrix Conjugate(const Matrix& a, const Matrix& c, uint32_t dim) {
  Matrix ca(c.size(), 0.0);
  Matrix result(c.size(), 0.0);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      for (uint32_t k = 0; k < dim; ++k) ca[i * dim + j] += c[i * dim + k] * a[k * dim + j];
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      for (uint32_t k = 0; k < dim; ++k) result[i * dim + j] += a[k * dim + i] * ca[k * dim + j];
    }
  }
  return result;
}

double Trace(const Matrix& matrix, uint32_t dim) {
  double trace = 0;
  for (uint32_t i = 0; i < dim; ++i) trace += matrix[size_t{i} * dim + i];
  return trace;
}

class LinalgTest : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(HeadDims, LinalgTest, testing::Values(64, 128, 256));

TEST_P(LinalgTest, HadamardIsSylvestersAndOrthogonal) {
  const uint32_t dim = GetParam();
  const Matrix h = Hadamard(dim);
  const double unit = 1 / std::sqrt(static_cast<double>(dim));
  // H_2n = [[H, H], [H, -H]], from H_1 = [1].
  for (uint32_t half = 1; half < dim; half *= 2) {
    for (uint32_t i = 0; i < half; ++i) {
      for (uint32_t j = 0; j < half; ++j) {
        const double corner = h[i * dim + j];
        ASSERT_DOUBLE_EQ(std::abs(corner), unit);
        ASSERT_EQ(h[i * dim + j + half], corner);
        ASSERT_EQ(h[(i + half) * dim + j], corner);
        ASSERT_EQ(h[(i + half) * dim + j + half], -corner);
      }
    }
  }
  EXPECT_GT(h[0], 0);
  const Matrix product = Conjugate(
      h,
      [&] {
        Matrix identity(h.size(), 0.0);
        for (uint32_t i = 0; i < dim; ++i) identity[i * dim + i] = 1;
        return identity;
      }(),
      dim);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      ASSERT_NEAR(product[i * dim + j], i == j ? 1.0 : 0.0, 1e-12);
    }
  }
}

TEST_P(LinalgTest, HadamardSpreadsASpectrumEvenlyOverTheDiagonal) {
  const uint32_t dim = GetParam();
  Matrix lambda(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) lambda[i * dim + i] = std::pow(0.8, i) * 1000 + 0.5;
  const Matrix mixed = Conjugate(Hadamard(dim), lambda, dim);
  const double mean = Trace(lambda, dim) / dim;
  for (uint32_t i = 0; i < dim; ++i) ASSERT_NEAR(mixed[i * dim + i], mean, 1e-9 * mean);
}

TEST_P(LinalgTest, EigenvaluesDescendAndTheVectorsDiagonalize) {
  const uint32_t dim = GetParam();
  const Matrix covariance = RandomCovariance(dim);
  const auto system = SymmetricEigen(covariance, dim);
  ASSERT_TRUE(system.ok()) << system.status();
  for (uint32_t i = 1; i < dim; ++i) ASSERT_GE(system->values[i - 1], system->values[i]);
  const Matrix diagonal = Conjugate(system->vectors, covariance, dim);
  const double tolerance = 1e-12 * system->values[0] * dim;
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      ASSERT_NEAR(diagonal[i * dim + j], i == j ? system->values[i] : 0.0, tolerance);
    }
  }
}

TEST_P(LinalgTest, TheLargestComponentOfEachEigenvectorIsPositive) {
  const uint32_t dim = GetParam();
  const auto system = SymmetricEigen(RandomCovariance(dim), dim);
  ASSERT_TRUE(system.ok());
  for (uint32_t rank = 0; rank < dim; ++rank) {
    double largest = 0;
    for (uint32_t c = 0; c < dim; ++c) {
      const double x = system->vectors[c * dim + rank];
      if (std::abs(x) > std::abs(largest)) largest = x;
    }
    ASSERT_GT(largest, 0) << "rank " << rank;
  }
}

TEST_P(LinalgTest, EveryRotatedChannelHasTheMeanVariance) {
  const uint32_t dim = GetParam();
  const Matrix covariance = RandomCovariance(dim);
  const auto system = SymmetricEigen(covariance, dim);
  ASSERT_TRUE(system.ok());
  const Matrix rotated = Conjugate(RotationFromEigenvectors(system->vectors, dim), covariance, dim);
  const double mean = Trace(covariance, dim) / dim;
  for (uint32_t i = 0; i < dim; ++i) ASSERT_NEAR(rotated[i * dim + i], mean, 1e-9 * mean);
}

TEST_P(LinalgTest, RoundedRotationsStayOrthogonalWithinBf16) {
  const uint32_t dim = GetParam();
  const auto system = SymmetricEigen(RandomCovariance(dim), dim);
  ASSERT_TRUE(system.ok());
  const auto bits = RoundToBf16(RotationFromEigenvectors(system->vectors, dim));
  const double error = OrthogonalityError(bits.data(), dim);
  EXPECT_LT(error, 1.0 / 256);
  EXPECT_GT(error, 1e-6);  // bf16 leaves a trace: a check of float64 matrices would not.
}

// The point of P_br: the ranks with the most energy are constant inside each group, so that the
// group's offset carries them; without it they alternate in sign inside the groups.
TEST_P(LinalgTest, TheTopRanksAreConstantInsideAGroup) {
  const uint32_t dim = GetParam();
  Matrix identity(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) identity[i * dim + i] = 1;
  const Matrix rotation = RotationFromEigenvectors(identity, dim);  // Row i: where rank i goes.
  for (uint32_t group = 32; group <= dim; group *= 2) {
    for (uint32_t rank = 0; rank < dim; ++rank) {
      for (uint32_t first = 0; first < dim; first += group) {
        double sum = 0;
        for (uint32_t c = 0; c < group; ++c) sum += rotation[rank * dim + first + c];
        const double all_one_sign = group / std::sqrt(static_cast<double>(dim));
        ASSERT_NEAR(std::abs(sum), rank < dim / group ? all_one_sign : 0.0, 1e-12)
            << "group of " << group << " at " << first << ", rank " << rank;
      }
    }
  }
}

TEST(LinalgBasicsTest, BitReverseMatchesThePublishedPositions) {
  EXPECT_EQ(BitReverse(0, 128), 0u);
  EXPECT_EQ(BitReverse(1, 128), 64u);
  EXPECT_EQ(BitReverse(2, 128), 32u);
  EXPECT_EQ(BitReverse(3, 128), 96u);
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(BitReverse(BitReverse(i, 256), 256), i);
}

// U H P_br = U P_br H: the rank enters the transform at its bit-reversed position.
TEST(LinalgBasicsTest, PermutingTheInputsOfTheTransformIsTheSame) {
  const uint32_t dim = 64;
  const auto system = SymmetricEigen(RandomCovariance(dim), dim);
  ASSERT_TRUE(system.ok());
  const Matrix rotation = RotationFromEigenvectors(system->vectors, dim);
  const Matrix h = Hadamard(dim);
  for (uint32_t row = 0; row < dim; ++row) {
    for (uint32_t j = 0; j < dim; ++j) {
      double sum = 0;
      for (uint32_t rank = 0; rank < dim; ++rank) {
        sum += system->vectors[row * dim + rank] * h[BitReverse(rank, dim) * dim + j];
      }
      ASSERT_NEAR(rotation[row * dim + j], sum, 1e-12);
    }
  }
}

TEST(LinalgBasicsTest, OrthogonalityErrorSeesOneWrongEntry) {
  const uint32_t dim = 64;
  auto bits = RoundToBf16(Hadamard(dim));
  EXPECT_EQ(OrthogonalityError(bits.data(), dim), 0);  // 1 / 8 is a bf16.
  bits[7] = FloatToBf16(0.25f);
  EXPECT_NEAR(OrthogonalityError(bits.data(), dim), 0.0625 - 0.015625, 1e-12);
}

TEST(LinalgBasicsTest, SymmetricEigenRefusesNan) {
  Matrix matrix(64 * 64, 0.0);
  matrix[5] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(SymmetricEigen(matrix, 64).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LinalgBasicsTest, QuadraticFormsMatchTheSchoolbook) {
  const uint32_t dim = 64;
  const Matrix c = RandomCovariance(dim);
  std::vector<double> rows(3 * dim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::sin(static_cast<double>(i));
  const std::vector<double> forms = QuadraticForms(rows.data(), 3, c, dim);
  for (size_t t = 0; t < 3; ++t) {
    double sum = 0;
    for (uint32_t i = 0; i < dim; ++i) {
      for (uint32_t j = 0; j < dim; ++j)
        sum += rows[t * dim + i] * c[i * dim + j] * rows[t * dim + j];
    }
    EXPECT_NEAR(forms[t], sum, 1e-9 * std::abs(sum));
  }
}

TEST(BasisWithLeadingTest, IsOrthonormalAndBeginsWithTheLeadingVectors) {
  const LayerDump layer = SyntheticLayer({}, 3);
  ThreadPool pool(1);
  const auto keys = SymmetricEigen(KeyCovariance(layer, &pool)[0], 64);
  ASSERT_TRUE(keys.ok());
  // A singular C: only three directions.
  Matrix c(size_t{64} * 64, 0.0);
  for (uint32_t i = 0; i < 3; ++i) c[size_t{i} * 64 + i] = 3.0 - i;
  const auto basis = BasisWithLeading(keys->vectors, 2, c, 64);
  ASSERT_TRUE(basis.ok()) << basis.status();
  for (uint32_t row = 0; row < 64; ++row) {
    EXPECT_EQ((*basis)[row * 64], keys->vectors[row * 64]);
    EXPECT_EQ((*basis)[row * 64 + 1], keys->vectors[row * 64 + 1]);
  }
  double worst = 0;
  for (uint32_t i = 0; i < 64; ++i) {
    for (uint32_t j = 0; j < 64; ++j) {
      double sum = i == j ? -1.0 : 0.0;
      for (uint32_t row = 0; row < 64; ++row) {
        sum += (*basis)[row * 64 + i] * (*basis)[row * 64 + j];
      }
      worst = std::max(worst, std::abs(sum));
    }
  }
  EXPECT_LT(worst, 1e-10);
}

// A turn by Cayley keeps a rotation orthogonal, and is the exponential to second order.
TEST(TurnByCayleyTest, IsARotationByTheAngles) {
  Matrix angles(size_t{64} * 64, 0.0);
  angles[1] = 0.02;  // Turns channels 0 and 1 into each other.
  angles[64] = -0.02;
  const Matrix start = Hadamard(64);
  const Matrix turned = TurnByCayley(start, angles, 64);
  EXPECT_LT(OrthogonalityErrorOf(turned, 64), 1e-12);
  const double angle = 2 * std::atan(0.01);
  for (size_t row = 0; row < 64; ++row) {
    const double a = start[row * 64];
    const double b = start[row * 64 + 1];
    EXPECT_NEAR(turned[row * 64], std::cos(angle) * a - std::sin(angle) * b, 1e-12);
    EXPECT_NEAR(turned[row * 64 + 1], std::sin(angle) * a + std::cos(angle) * b, 1e-12);
    EXPECT_NEAR(turned[row * 64 + 5], start[row * 64 + 5], 1e-12);
  }
}

// f(R) = sum of G * R: its change along R -> R exp(A) is the sum of (R^T G) * A.
TEST(SkewGradientTest, IsTheChangeAlongATurn) {
  std::vector<float> gradient(size_t{64} * 64);
  for (size_t i = 0; i < gradient.size(); ++i) {
    gradient[i] = static_cast<float>(std::sin(static_cast<double>(i)));
  }
  const Matrix start = Hadamard(64);
  const Matrix skew = SkewGradient(start, gradient, 64);
  for (const auto& [i, j] : {std::pair<size_t, size_t>{0, 1}, {5, 40}, {63, 2}}) {
    EXPECT_EQ(skew[i * 64 + j], -skew[j * 64 + i]);
    Matrix angles(start.size(), 0.0);
    angles[i * 64 + j] = 1e-5;
    angles[j * 64 + i] = -1e-5;
    const Matrix turned = TurnByCayley(start, angles, 64);
    double change = 0;
    for (size_t e = 0; e < start.size(); ++e) change += gradient[e] * (turned[e] - start[e]);
    EXPECT_NEAR(change / 1e-5, 2 * skew[i * 64 + j], 1e-4);
  }
}

}  // namespace
}  // namespace okv
