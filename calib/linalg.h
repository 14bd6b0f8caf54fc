#ifndef OKV_CALIB_LINALG_H_
#define OKV_CALIB_LINALG_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

namespace okv {

// Small dense float64 matrices, [dim, dim] row-major. The only file that calls LAPACK.
using Matrix = std::vector<double>;

// Makes BLAS run on the calling thread alone. Calibration spreads heads over its own threads, and a
// sum that BLAS splits over a number of threads would make the bits of a rotation depend on it.
// Idempotent; call it before the first product.
void UseSingleThreadedBlas();

struct EigenSystem {
  std::vector<double> values;  // Descending.
  Matrix vectors;              // [dim, dim] row-major: column i belongs to values[i].
};

// Eigenvalues and orthonormal eigenvectors of a symmetric matrix. The component of an eigenvector
// with the largest magnitude (the first of equals) is positive, so that equal input gives equal
// bits. kInvalidArgument: an entry is NaN or Inf. kInternal: LAPACK did not converge.
absl::StatusOr<EigenSystem> SymmetricEigen(Matrix matrix, uint32_t dim);

// Sylvester's Hadamard matrix / sqrt(dim), symmetric and orthogonal. REQUIRES: dim is a power of
// two.
Matrix Hadamard(uint32_t dim);

// `index` with its log2(dim) bits in reverse. REQUIRES: dim is a power of two, index < dim.
uint32_t BitReverse(uint32_t index, uint32_t dim);

// U * H * P_br with U's columns in order of descending eigenvalue. Column j of the result is column
// BitReverse(j) of U * H. H commutes with bit reversal, so this is the same as U * P_br * H: rank i
// enters the transform at position BitReverse(i). The first dim / g ranks, which hold most of the
// energy, then enter at multiples of g, where a row of H has one sign over each g adjacent columns:
// they shift a group as a whole, and the group's offset absorbs them.
Matrix RotationFromEigenvectors(const Matrix& vectors, uint32_t dim);

// An orthonormal basis that begins with the first `count` columns of `leading` (orthonormal) and
// goes on with the eigenvectors of `c` restricted to what is orthogonal to those. Errors as
// SymmetricEigen. REQUIRES: count <= dim.
absl::StatusOr<Matrix> BasisWithLeading(const Matrix& leading, uint32_t count, Matrix c,
                                        uint32_t dim);

// Rounds to bf16 (by way of fp32), to nearest even.
std::vector<uint16_t> RoundToBf16(const Matrix& matrix);

// max |R R^T - I| of bf16 bits, in float64.
double OrthogonalityError(const uint16_t* rotation, uint32_t dim);

// Adds rows^T rows to `sum`'s upper triangle; `rows` is [rows_count, dim] row-major.
void AddOuterProducts(const double* rows, size_t rows_count, uint32_t dim, Matrix* sum);
// Copies the upper triangle over the lower one.
void Symmetrize(uint32_t dim, Matrix* matrix);
// Scales every entry.
void Scale(double factor, Matrix* matrix);

// out = rows * matrix in fp32; `rows` and `out` are [rows_count, dim], `matrix` is [dim, dim].
void MultiplyRows(const float* rows, size_t rows_count, const float* matrix, uint32_t dim,
                  float* out);
// Adds a^T b to `sum`, [dim, dim], in fp32; `a` and `b` are [rows_count, dim].
void AddProductOfTransposed(const float* a, const float* b, size_t rows_count, uint32_t dim,
                            float* sum);
// (A - A^T) / 2 for A = rotation^T gradient: how a function with this gradient changes as the
// rotation turns, R exp(angles) with skew angles.
Matrix SkewGradient(const Matrix& rotation, const std::vector<float>& gradient, uint32_t dim);
// R (I - A/2)^-1 (I + A/2), the Cayley transform of skew angles A: orthogonal if R is.
Matrix TurnByCayley(const Matrix& rotation, const Matrix& angles, uint32_t dim);

// out[t] = x_t C x_t^T for each row x_t of `rows`, [rows_count, dim] row-major.
std::vector<double> QuadraticForms(const double* rows, size_t rows_count, const Matrix& c,
                                   uint32_t dim);

}  // namespace okv

#endif  // OKV_CALIB_LINALG_H_
