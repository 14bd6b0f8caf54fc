#include "calib/linalg.h"

#include <cblas.h>
#include <lapacke.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {

void UseSingleThreadedBlas() { openblas_set_num_threads(1); }

absl::StatusOr<EigenSystem> SymmetricEigen(Matrix matrix, uint32_t dim) {
  OKV_CHECK(matrix.size() == size_t{dim} * dim);
  for (const double entry : matrix) {
    if (!std::isfinite(entry)) return absl::InvalidArgumentError("the covariance has NaN or Inf");
  }
  std::vector<double> ascending(dim);
  const lapack_int n = static_cast<lapack_int>(dim);
  // Column-major over a symmetric matrix: eigenvector i comes back in matrix[i * dim ...].
  const lapack_int info =
      LAPACKE_dsyevd(LAPACK_COL_MAJOR, 'V', 'U', n, matrix.data(), n, ascending.data());
  if (info != 0) return absl::InternalError(absl::StrCat("dsyevd did not converge: info ", info));

  EigenSystem system;
  system.values.assign(ascending.rbegin(), ascending.rend());
  system.vectors.resize(matrix.size());
  for (uint32_t rank = 0; rank < dim; ++rank) {
    const double* vector = matrix.data() + size_t{dim - 1 - rank} * dim;
    const double* largest = std::max_element(
        vector, vector + dim, [](double a, double b) { return std::abs(a) < std::abs(b); });
    const double sign = *largest < 0 ? -1.0 : 1.0;
    for (uint32_t c = 0; c < dim; ++c) system.vectors[size_t{c} * dim + rank] = sign * vector[c];
  }
  return system;
}

Matrix Hadamard(uint32_t dim) {
  OKV_CHECK(std::has_single_bit(dim));
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  Matrix h(size_t{dim} * dim);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      h[size_t{i} * dim + j] = std::popcount(i & j) % 2 == 0 ? scale : -scale;
    }
  }
  return h;
}

uint32_t BitReverse(uint32_t index, uint32_t dim) {
  OKV_CHECK(std::has_single_bit(dim) && index < dim);
  uint32_t reversed = 0;
  for (uint32_t bit = 1; bit < dim; bit <<= 1) {
    reversed = (reversed << 1) | (index & 1);
    index >>= 1;
  }
  return reversed;
}

Matrix RotationFromEigenvectors(const Matrix& vectors, uint32_t dim) {
  const Matrix h = Hadamard(dim);
  Matrix mixed(vectors.size());
  const int n = static_cast<int>(dim);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0, vectors.data(), n, h.data(),
              n, 0.0, mixed.data(), n);
  Matrix rotation(vectors.size());
  for (uint32_t row = 0; row < dim; ++row) {
    for (uint32_t j = 0; j < dim; ++j) {
      rotation[size_t{row} * dim + j] = mixed[size_t{row} * dim + BitReverse(j, dim)];
    }
  }
  return rotation;
}

absl::StatusOr<Matrix> BasisWithLeading(const Matrix& leading, uint32_t count, Matrix c,
                                        uint32_t dim) {
  OKV_CHECK(count <= dim && leading.size() == size_t{dim} * dim && c.size() == leading.size());
  const int n = static_cast<int>(dim);
  const int taken = static_cast<int>(count);
  // P C P with P = I - B B^T, then B's directions moved below every other: C has no negative
  // eigenvalue, so that they come last even where C is singular.
  Matrix projector(c.size(), 0.0);
  for (uint32_t i = 0; i < dim; ++i) projector[size_t{i} * dim + i] = 1.0;
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, taken, -1.0, leading.data(), n,
              leading.data(), n, 1.0, projector.data(), n);
  Matrix half(c.size());
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0, projector.data(), n,
              c.data(), n, 0.0, half.data(), n);
  double trace = 0;
  for (uint32_t i = 0; i < dim; ++i) trace += c[size_t{i} * dim + i];
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, taken, -(trace + 1.0), leading.data(),
              n, leading.data(), n, 0.0, c.data(), n);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0, half.data(), n,
              projector.data(), n, 1.0, c.data(), n);
  OKV_ASSIGN_OR_RETURN(const EigenSystem system, SymmetricEigen(std::move(c), dim));
  Matrix basis(leading.size());
  for (size_t row = 0; row < dim; ++row) {
    std::copy_n(leading.begin() + static_cast<ptrdiff_t>(row * dim), count,
                basis.begin() + static_cast<ptrdiff_t>(row * dim));
    std::copy_n(system.vectors.begin() + static_cast<ptrdiff_t>(row * dim), dim - count,
                basis.begin() + static_cast<ptrdiff_t>(row * dim + count));
  }
  return basis;
}

std::vector<uint16_t> RoundToBf16(const Matrix& matrix) {
  std::vector<uint16_t> bits(matrix.size());
  std::transform(matrix.begin(), matrix.end(), bits.begin(),
                 [](double value) { return FloatToBf16(static_cast<float>(value)); });
  return bits;
}

double OrthogonalityError(const uint16_t* rotation, uint32_t dim) {
  Matrix r(size_t{dim} * dim);
  std::transform(rotation, rotation + r.size(), r.begin(), Bf16ToFloat);
  Matrix product(r.size());
  const int n = static_cast<int>(dim);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, n, n, 1.0, r.data(), n, r.data(), n, 0.0,
              product.data(), n);
  double error = 0;
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      error = std::max(error, std::abs(product[size_t{i} * dim + j] - (i == j ? 1.0 : 0.0)));
    }
  }
  return error;
}

void AddOuterProducts(const double* rows, size_t rows_count, uint32_t dim, Matrix* sum) {
  OKV_CHECK(sum->size() == size_t{dim} * dim);
  const int n = static_cast<int>(dim);
  cblas_dsyrk(CblasRowMajor, CblasUpper, CblasTrans, n, static_cast<int>(rows_count), 1.0, rows, n,
              1.0, sum->data(), n);
}

void Symmetrize(uint32_t dim, Matrix* matrix) {
  for (uint32_t i = 1; i < dim; ++i) {
    for (uint32_t j = 0; j < i; ++j) {
      (*matrix)[size_t{i} * dim + j] = (*matrix)[size_t{j} * dim + i];
    }
  }
}

void Scale(double factor, Matrix* matrix) {
  for (double& entry : *matrix) entry *= factor;
}

void MultiplyRows(const float* rows, size_t rows_count, const float* matrix, uint32_t dim,
                  float* out) {
  const int n = static_cast<int>(dim);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows_count), n, n, 1.0f,
              rows, n, matrix, n, 0.0f, out, n);
}

void AddProductOfTransposed(const float* a, const float* b, size_t rows_count, uint32_t dim,
                            float* sum) {
  const int n = static_cast<int>(dim);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, n, static_cast<int>(rows_count), 1.0f, a,
              n, b, n, 1.0f, sum, n);
}

Matrix SkewGradient(const Matrix& rotation, const std::vector<float>& gradient, uint32_t dim) {
  const int n = static_cast<int>(dim);
  const Matrix wide(gradient.begin(), gradient.end());
  Matrix product(rotation.size());
  cblas_dgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n, n, n, 1.0, rotation.data(), n,
              wide.data(), n, 0.0, product.data(), n);
  Matrix skew(rotation.size());
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      skew[i * dim + j] = (product[i * dim + j] - product[j * dim + i]) / 2;
    }
  }
  return skew;
}

Matrix TurnByCayley(const Matrix& rotation, const Matrix& angles, uint32_t dim) {
  Matrix left(angles.size());
  Matrix turn(angles.size());
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      const double unit = i == j ? 1.0 : 0.0;
      left[i * dim + j] = unit - angles[i * dim + j] / 2;
      turn[i * dim + j] = unit + angles[i * dim + j] / 2;
    }
  }
  const lapack_int n = static_cast<lapack_int>(dim);
  std::vector<lapack_int> pivots(dim);
  // I - A/2 with A skew has no eigenvalue below 1 in magnitude: it cannot be singular.
  OKV_CHECK(LAPACKE_dgesv(LAPACK_ROW_MAJOR, n, n, left.data(), n, pivots.data(), turn.data(), n) ==
            0);
  Matrix turned(rotation.size());
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0, rotation.data(), n,
              turn.data(), n, 0.0, turned.data(), n);
  return turned;
}

std::vector<double> QuadraticForms(const double* rows, size_t rows_count, const Matrix& c,
                                   uint32_t dim) {
  Matrix product(rows_count * dim);
  const int n = static_cast<int>(dim);
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows_count), n, n, 1.0,
              rows, n, c.data(), n, 0.0, product.data(), n);
  std::vector<double> forms(rows_count, 0.0);
  for (size_t t = 0; t < rows_count; ++t) {
    for (uint32_t i = 0; i < dim; ++i) forms[t] += rows[t * dim + i] * product[t * dim + i];
  }
  return forms;
}

}  // namespace okv
