// int2 runs back to token-major rows, fp32 or bf16: what a worker without an int2 kernel attends
// to. Reads a run (4.5 KiB at d 128), writes 64 KiB (fp32) or 32 KiB.
#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"
#include "kernels/simd_targets.h"
#include "proto/check.h"
#include "proto/format.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dequantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dequantize-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

template <typename T>
HWY_INLINE void DequantizeTokens(const DequantizeRunParams& params, T* k, T* v) {
  HalfRun half{
      .run = params.run, .dim = params.dim, .group_size = params.group_size, .is_value = false};
  DequantizeHalf(half, kBlockTokens, k);
  half.is_value = true;
  DequantizeHalf(half, kBlockTokens, v);
}

}  // namespace

void DequantizeBf16Target(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  DequantizeTokens(params, k, v);
}
void DequantizeF32Target(const DequantizeRunParams& params, float* k, float* v) {
  DequantizeTokens(params, k, v);
}

#else

void DequantizeBf16Target(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  reference::DequantizeRun(params, k, v);
}
void DequantizeF32Target(const DequantizeRunParams& params, float* k, float* v) {
  reference::DequantizeRunF32(params, k, v);
}

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(DequantizeBf16Target);
HWY_EXPORT(DequantizeF32Target);

void DequantizeRun(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256 && params.group_size >= 32);
  HWY_DYNAMIC_DISPATCH(DequantizeBf16Target)(params, k, v);
}

void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256 && params.group_size >= 32);
  HWY_DYNAMIC_DISPATCH(DequantizeF32Target)(params, k, v);
}

}  // namespace okv
#endif  // HWY_ONCE
