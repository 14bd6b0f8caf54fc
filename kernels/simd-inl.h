// What the SIMD kernels share, compiled once per target. The guard is Highway's: it flips for every
// target.
#if defined(OKV_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_SIMD_INL_H_
#undef OKV_KERNELS_SIMD_INL_H_
#else
#define OKV_KERNELS_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using DU32 = hn::Rebind<uint32_t, DF>;
using DI32 = hn::Rebind<int32_t, DF>;
using DU16 = hn::Rebind<uint16_t, DF>;
using DU8 = hn::Rebind<uint8_t, DF>;
using VF = hn::Vec<DF>;
using VU32 = hn::Vec<DU32>;
constexpr size_t kLanes = hn::MaxLanes(DF());

// The register block: 6 rows x 4 vectors of sums, 4 vectors of B and one of A are 29 of AVX-512's
// and NEON's 32 registers; AVX2 has 16, 6 x 2 + 2 + 1 of them.
constexpr size_t kBlockRows = 6;
constexpr size_t kBlockVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;

HWY_INLINE VF WidenBf16(hn::Vec<DU16> bits) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU32(), bits)));
}
HWY_INLINE VF LoadBf16(const uint16_t* from) { return WidenBf16(hn::LoadU(DU16(), from)); }

// bf16 bits of fp32, round to nearest even, for values that are not NaN.
HWY_INLINE VU32 Bf16BitsOfFinite(VF value) {
  const DU32 du;
  const VU32 bits = hn::BitCast(du, value);
  const VU32 odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff))));
}
HWY_INLINE void StoreU16(VU32 values, uint16_t* to) {
  hn::StoreU(hn::DemoteTo(DU16(), hn::BitCast(DI32(), values)), DU16(), to);
}

// C = A B, or C += A B, in fp32. Each element of C is one chain of fma with k ascending from 0 or
// from C: it depends on its row of A alone, on no neighbor, block or thread.
struct RowsProduct {
  const float* a;  // [rows_count, k_count]
  size_t a_stride;
  const float* b;  // [k_count, n_count]; n_count a multiple of 64
  size_t b_stride;
  float* c;  // [rows_count, n_count]
  size_t c_stride;
  size_t rows_count;
  size_t k_count;
  size_t n_count;
  bool accumulate;
};

template <size_t kRows>
HWY_NOINLINE void MultiplyRowBlock(const RowsProduct& p) {
  const DF d;
  for (size_t n = 0; n < p.n_count; n += kBlockVectors * kLanes) {
    VF sums[kRows][kBlockVectors];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (size_t i = 0; i < kBlockVectors; ++i) {
        sums[r][i] =
            p.accumulate ? hn::LoadU(d, p.c + r * p.c_stride + n + i * kLanes) : hn::Zero(d);
      }
    }
    const float* b = p.b + n;
    for (size_t k = 0; k < p.k_count; ++k, b += p.b_stride) {
      VF row[kBlockVectors];
#pragma GCC unroll 8
      for (size_t i = 0; i < kBlockVectors; ++i) row[i] = hn::LoadU(d, b + i * kLanes);
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        const VF a = hn::Set(d, p.a[r * p.a_stride + k]);
#pragma GCC unroll 8
        for (size_t i = 0; i < kBlockVectors; ++i) sums[r][i] = hn::MulAdd(a, row[i], sums[r][i]);
      }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (size_t i = 0; i < kBlockVectors; ++i) {
        hn::StoreU(sums[r][i], d, p.c + r * p.c_stride + n + i * kLanes);
      }
    }
  }
}

HWY_INLINE void MultiplyRows(RowsProduct p) {
  while (p.rows_count >= kBlockRows) {
    MultiplyRowBlock<kBlockRows>(p);
    p.a += kBlockRows * p.a_stride;
    p.c += kBlockRows * p.c_stride;
    p.rows_count -= kBlockRows;
  }
  switch (p.rows_count) {
    case 1:
      return MultiplyRowBlock<1>(p);
    case 2:
      return MultiplyRowBlock<2>(p);
    case 3:
      return MultiplyRowBlock<3>(p);
    case 4:
      return MultiplyRowBlock<4>(p);
    case 5:
      return MultiplyRowBlock<5>(p);
    default:
      return;
  }
}

// out [dim, dim] fp32 = R, or R^T: row k of `out` is what output k of a product multiplies by.
struct RotationLoad {
  const uint16_t* r;  // [dim, dim] bf16
  uint32_t dim;
  bool transpose;
};
inline void LoadRotation(const RotationLoad& p, float* out) {
  const DF d;
  if (!p.transpose) {
    for (size_t i = 0; i < size_t{p.dim} * p.dim; i += kLanes)
      hn::StoreU(LoadBf16(p.r + i), d, out + i);
    return;
  }
  // Words of two neighbors in a row of R: a gather down a column gives two rows of R^T.
  const DU32 du;
  const auto rows = hn::Mul(hn::Iota(DI32(), 0), hn::Set(DI32(), static_cast<int32_t>(p.dim / 2)));
  for (size_t n = 0; n < p.dim; n += kLanes) {
    const uint32_t* const base = reinterpret_cast<const uint32_t*>(p.r + n * p.dim);
    for (size_t k = 0; k < p.dim; k += 2) {
      const VU32 words = hn::GatherIndex(du, base + k / 2, rows);
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(words)), d, out + k * p.dim + n);
      hn::StoreU(hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u))), d,
                 out + (k + 1) * p.dim + n);
    }
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_SIMD_INL_H_
