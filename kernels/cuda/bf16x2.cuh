#ifndef OKV_KERNELS_CUDA_BF16X2_CUH_
#define OKV_KERNELS_CUDA_BF16X2_CUH_

#include <cuda_bf16.h>

#include <cstdint>

// Arithmetic on two bf16 in a word.
namespace okv::cuda {

__device__ __forceinline__ __nv_bfloat162 AsBf16x2(uint32_t word) {
  return *reinterpret_cast<const __nv_bfloat162*>(&word);
}
__device__ __forceinline__ uint32_t AsWord(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// NaN when either is NaN, +0 above -0.
__device__ __forceinline__ uint32_t Max2(uint32_t a, uint32_t b) {
  return AsWord(__hmax2_nan(AsBf16x2(a), AsBf16x2(b)));
}
__device__ __forceinline__ uint32_t Min2(uint32_t a, uint32_t b) {
  return AsWord(__hmin2_nan(AsBf16x2(a), AsBf16x2(b)));
}
// The smaller magnitude of each half; the sign bits are of no meaning. NaN loses.
__device__ __forceinline__ uint32_t SmallerMagnitude2(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t result;
  asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  return AsWord(__hmin2(__habs2(AsBf16x2(a)), __habs2(AsBf16x2(b))));
#endif
}

// x within +-bound. REQUIRES: bound is not negative. Zeros may become -0 when it is 0.
__device__ __forceinline__ uint32_t Clamp2(uint32_t x, uint32_t bound) {
#if __CUDA_ARCH__ >= 860
  // The smaller magnitude, and the signs' exclusive or, which is x's: one operation.
  return SmallerMagnitude2(x, bound);
#else
  return Max2(Min2(x, bound), bound ^ 0x80008000u);
#endif
}

// By the multiplier, not the ALU.
__device__ __forceinline__ uint32_t Magnitude2(uint32_t x) { return AsWord(__habs2(AsBf16x2(x))); }
// REQUIRES: `power` is a power of two.
__device__ __forceinline__ uint32_t Divide2(uint32_t x, float power) {
  return AsWord(__hmul2_rn(AsBf16x2(x), __float2bfloat162_rn(1.0f / power)));
}
__device__ __forceinline__ uint32_t Add2(uint32_t a, uint32_t b) {
  return AsWord(__hadd2_rn(AsBf16x2(a), AsBf16x2(b)));
}
// 1.0 where |a| < b, otherwise 0.
__device__ __forceinline__ uint32_t MagnitudeBelow2(uint32_t a, uint32_t b) {
  return AsWord(__hlt2(__habs2(AsBf16x2(a)), AsBf16x2(b)));
}
// 0xffff where a <= b, otherwise 0.
__device__ __forceinline__ uint32_t AtMostMask2(uint32_t a, uint32_t b) {
  return __hle2_mask(AsBf16x2(a), AsBf16x2(b));
}
// REQUIRES: count <= 256, so that nothing is rounded.
__device__ __forceinline__ uint32_t Bf16OfCount(uint32_t count) {
  return __float_as_uint(static_cast<float>(count)) >> 16;
}

__device__ __forceinline__ uint32_t LowTwice(uint32_t word) {
  return __byte_perm(word, word, 0x1010);
}
__device__ __forceinline__ uint32_t HighTwice(uint32_t word) {
  return __byte_perm(word, word, 0x3232);
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_BF16X2_CUH_
