#ifndef OKV_KERNELS_QUANTIZE_H_
#define OKV_KERNELS_QUANTIZE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

namespace okv {

// Rotate, clip, quantize and pack on the CPU, and back. Each function exists twice: okv::reference
// (scalar, reference.cc) and okv (SIMD by run-time dispatch). Both give the same bits.

struct RotateParams {
  const uint16_t* x;  // [rows_count, dim] bf16; row i starts at x + i * x_stride
  size_t x_stride;    // Elements from one row to the next, >= dim.
  const uint16_t* r;  // [dim, dim] bf16, row-major: y = x R
  size_t rows_count;
  uint32_t dim;  // 64, 128 or 256
};

// y[i, n] = bf16(sum over k ascending of fma(x[i, k], R[k, n], acc)), acc fp32 from 0. A row's y
// depends on no other row. `y` is [rows_count, dim] bf16, row i at y + i * y_stride.
void RotateRows(const RotateParams& params, uint16_t* y, size_t y_stride);

struct RotateQueriesParams {
  const float* x;  // [rows_count, dim] fp32, row i at x + i * x_stride
  size_t x_stride;
  const uint16_t* r;  // [dim, dim] bf16
  size_t rows_count;
  uint32_t dim;
  bool
      transpose;  // false: y = x R (queries). true: y = x R^T (outputs, back to the model's basis).
};
// The same sum, kept in fp32. `y` may not overlap x.
void RotateRowsF32(const RotateQueriesParams& params, float* y, size_t y_stride);

struct QuantizeRunParams {
  const uint16_t* k;  // [64, dim] rotated rows y, bf16; row t at k + t * row_stride
  const uint16_t* v;  // [64, dim], the same
  size_t row_stride;
  uint32_t dim;          // 64, 128 or 256
  uint32_t group_size;   // 32 to dim, a power of two
  uint32_t clip_rank_k;  // 0 = off, otherwise < dim
  uint32_t clip_rank_v;
};

// Names the row that could not be quantized.
struct BadRow {
  uint32_t token;
  bool is_value;  // False: the K row.
};

// Fills one int2 run (page_layout.h: PageLayout::run_bytes) from 64 tokens of one KV head, by the
// codec's rule: subnormal y and -0 become +0; t = the clip_rank-th smallest |y| of the row
// (0-based), clamp to +-t; per group offset = min, s = bf16((max - min) / 3), 0 if subnormal; s =
// 0: codes 0, otherwise code = clamp(round_half_even((y - offset) * (1 / s)), 0, 3). fp32, no FMA.
// kInvalidArgument when a row holds NaN or Inf, or max - min or s is not finite: *bad names the
// row, the run's bytes are unspecified, and the caller stores nothing.
absl::Status QuantizeRun(const QuantizeRunParams& params, uint8_t* run, BadRow* bad);

struct DequantizeRunParams {
  const uint8_t* run;
  uint32_t dim;
  uint32_t group_size;
};
// x = offset + s * code in fp32 (one multiply, one add), rounded to bf16 at the end. `k` and `v`
// are [64, dim] bf16 in the rotated basis.
void DequantizeRun(const DequantizeRunParams& params, uint16_t* k, uint16_t* v);
// The same without the last rounding.
void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v);

namespace reference {
void RotateRows(const RotateParams& params, uint16_t* y, size_t y_stride);
void RotateRowsF32(const RotateQueriesParams& params, float* y, size_t y_stride);
absl::Status QuantizeRun(const QuantizeRunParams& params, uint8_t* run, BadRow* bad);
void DequantizeRun(const DequantizeRunParams& params, uint16_t* k, uint16_t* v);
void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v);
}  // namespace reference

}  // namespace okv

#endif  // OKV_KERNELS_QUANTIZE_H_
