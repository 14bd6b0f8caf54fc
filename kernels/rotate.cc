// y = x R for rows of 64, 128 or 256 channels: 2 d^2 FLOP a row. R is widened to fp32 once per call
// (64 KiB at d 128) and stays in L1 or L2; register blocks of 6 rows reuse each load of it.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"
#include "kernels/simd.h"
#include "kernels/simd_targets.h"
#include "proto/bf16.h"
#include "proto/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rotate.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD

// scratch: [dim, dim] R, then [kBlockRows, dim] x, then [kBlockRows, dim] y.
void RotateRowsTarget(const RotateParams& params, uint16_t* y, size_t y_stride) {
  const DF d;
  const size_t dim = params.dim;
  float* const r = ThreadScratch(dim * dim + 2 * kBlockRows * dim);
  float* const x_rows = r + dim * dim;
  float* const y_rows = x_rows + kBlockRows * dim;
  LoadRotation(
      {.r = params.r, .dim = params.dim, .transpose = false, .column = 0, .columns_count = dim}, r);
  for (size_t row = 0; row < params.rows_count; row += kBlockRows) {
    const size_t rows_count = std::min(kBlockRows, params.rows_count - row);
    for (size_t i = 0; i < rows_count; ++i) {
      const uint16_t* const x = params.x + (row + i) * params.x_stride;
      for (size_t c = 0; c < dim; c += kLanes) hn::StoreU(LoadBf16(x + c), d, x_rows + i * dim + c);
    }
    MultiplyRows({.a = x_rows,
                  .a_stride = dim,
                  .b = r,
                  .b_stride = dim,
                  .c = y_rows,
                  .c_stride = dim,
                  .rows_count = rows_count,
                  .k_count = dim,
                  .n_count = dim,
                  .accumulate = false});
    for (size_t i = 0; i < rows_count; ++i) {
      for (size_t c = 0; c < dim; c += kLanes) {
        const VF value = hn::LoadU(d, y_rows + i * dim + c);
        // NaN has one spelling: the payload that an fma passes on depends on its operands' order.
        const VU32 bits = hn::IfThenElse(hn::RebindMask(DU32(), hn::IsNaN(value)),
                                         hn::Set(DU32(), 0x7fc0), Bf16BitsOfFinite(value));
        StoreU16(bits, y + (row + i) * y_stride + c);
      }
    }
  }
}

void RotateRowsF32Target(const RotateQueriesParams& params, float* y, size_t y_stride) {
  RotateF32({.x = params.x,
             .x_stride = params.x_stride,
             .r = params.r,
             .transpose = params.transpose,
             .dim = params.dim,
             .rows_count = params.rows_count,
             .y = y,
             .y_stride = y_stride,
             .columns = ThreadScratch(params.dim * kRotationColumns)});
}

#else

void RotateRowsTarget(const RotateParams& params, uint16_t* y, size_t y_stride) {
  reference::RotateRows(params, y, y_stride);
}
void RotateRowsF32Target(const RotateQueriesParams& params, float* y, size_t y_stride) {
  reference::RotateRowsF32(params, y, y_stride);
}

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(RotateRowsTarget);
HWY_EXPORT(RotateRowsF32Target);

void RotateRows(const RotateParams& params, uint16_t* y, size_t y_stride) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256);
  HWY_DYNAMIC_DISPATCH(RotateRowsTarget)(params, y, y_stride);
}

void RotateRowsF32(const RotateQueriesParams& params, float* y, size_t y_stride) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256);
  HWY_DYNAMIC_DISPATCH(RotateRowsF32Target)(params, y, y_stride);
}

}  // namespace okv
#endif  // HWY_ONCE
