#ifndef OKV_KERNELS_SIMD_TARGETS_H_
#define OKV_KERNELS_SIMD_TARGETS_H_

// Included before any header of Highway. Only targets whose MulAdd is a true fma keep the bits of
// the scalar twins: SSE has none. Vectors without a compile-time size (SVE, RVV) cannot be array
// elements, which the register blocks are; such CPUs use NEON or the scalar twins.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_PPC8 | \
   HWY_WASM | HWY_WASM_EMU256)

// AVX-512 with VNNI, which 1.0 leaves out unless asked: int8 products for attention.
#define HWY_WANT_AVX3_DL

// Inside a foreach_target file: whether this target has vectors, or calls the scalar twins.
#define OKV_TARGET_IS_SIMD (HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)

#endif  // OKV_KERNELS_SIMD_TARGETS_H_
