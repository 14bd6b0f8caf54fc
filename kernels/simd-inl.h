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

// Four vectors of four words: word w of vector c becomes word c of vector w, and back. A
// transposition is its own inverse.
using D16x8 = hn::FixedTag<uint8_t, 16>;
struct WordTile {
  hn::Vec<D16x8> words[4];
};
HWY_INLINE void TransposeWords(WordTile* tile) {
  const hn::FixedTag<uint32_t, 4> d32;
  const hn::FixedTag<uint64_t, 2> d64;
  const auto a = hn::BitCast(d32, tile->words[0]);
  const auto b = hn::BitCast(d32, tile->words[1]);
  const auto c = hn::BitCast(d32, tile->words[2]);
  const auto d = hn::BitCast(d32, tile->words[3]);
  const auto ab_low = hn::BitCast(d64, hn::InterleaveLower(d32, a, b));
  const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d32, a, b));
  const auto cd_low = hn::BitCast(d64, hn::InterleaveLower(d32, c, d));
  const auto cd_high = hn::BitCast(d64, hn::InterleaveUpper(d32, c, d));
  const D16x8 d8;
  tile->words[0] = hn::BitCast(d8, hn::InterleaveLower(d64, ab_low, cd_low));
  tile->words[1] = hn::BitCast(d8, hn::InterleaveUpper(d64, ab_low, cd_low));
  tile->words[2] = hn::BitCast(d8, hn::InterleaveLower(d64, ab_high, cd_high));
  tile->words[3] = hn::BitCast(d8, hn::InterleaveUpper(d64, ab_high, cd_high));
}

// bf16 [rows_count, columns_count] with rows `stride` apart to fp32 [columns_count, rows_count].
struct TransposedLoad {
  const uint16_t* from;
  size_t stride;
  size_t rows_count;     // A multiple of 4.
  size_t columns_count;  // A multiple of 8.
};
// Words are two neighbors in a row: four rows by four words make parts of eight rows of the result.
// Gathers down the columns took longer.
inline void LoadTransposed(const TransposedLoad& p, float* out) {
  const hn::FixedTag<uint32_t, 4> du;
  const hn::FixedTag<float, 4> d4;
  for (size_t k = 0; k < p.columns_count; k += 8) {
    for (size_t n = 0; n < p.rows_count; n += 4) {
      WordTile tile;
      for (size_t i = 0; i < 4; ++i) {
        const uint16_t* const row = p.from + (n + i) * p.stride + k;
        tile.words[i] = hn::LoadU(D16x8(), reinterpret_cast<const uint8_t*>(row));
      }
      TransposeWords(&tile);
      for (size_t w = 0; w < 4; ++w) {
        const auto words = hn::BitCast(du, tile.words[w]);
        float* const to = out + (k + 2 * w) * p.rows_count + n;
        hn::StoreU(hn::BitCast(d4, hn::ShiftLeft<16>(words)), d4, to);
        hn::StoreU(hn::BitCast(d4, hn::And(words, hn::Set(du, 0xffff0000u))), d4,
                   to + p.rows_count);
      }
    }
  }
}

// out [dim, columns_count] fp32 = columns from `column` on of R, or of R^T: row k of `out` is what
// element k of a vector is multiplied by. Columns are multiples of 64.
struct RotationLoad {
  const uint16_t* r;  // [dim, dim] bf16
  uint32_t dim;
  bool transpose;
  size_t column;
  size_t columns_count;
};
inline void LoadRotation(const RotationLoad& p, float* out) {
  if (p.transpose) {
    LoadTransposed({.from = p.r + p.column * p.dim,
                    .stride = p.dim,
                    .rows_count = p.columns_count,
                    .columns_count = p.dim},
                   out);
    return;
  }
  for (size_t k = 0; k < p.dim; ++k, out += p.columns_count) {
    const uint16_t* const row = p.r + k * p.dim + p.column;
    for (size_t n = 0; n < p.columns_count; n += kLanes)
      hn::StoreU(LoadBf16(row + n), DF(), out + n);
  }
}

// y = x R, or x R^T, in fp32. R is widened 64 columns at a time: whole, at dim 256, it would go
// through L2.
struct RowsRotation {
  const float* x;  // [rows_count, dim]
  size_t x_stride;
  const uint16_t* r;  // [dim, dim] bf16
  bool transpose;
  uint32_t dim;
  size_t rows_count;
  float* y;  // [rows_count, dim]
  size_t y_stride;
  float* columns;  // [dim, kRotationColumns] scratch
};
constexpr size_t kRotationColumns = 64;
HWY_INLINE void RotateF32(const RowsRotation& p) {
  for (size_t n = 0; n < p.dim; n += kRotationColumns) {
    LoadRotation({.r = p.r,
                  .dim = p.dim,
                  .transpose = p.transpose,
                  .column = n,
                  .columns_count = kRotationColumns},
                 p.columns);
    MultiplyRows({.a = p.x,
                  .a_stride = p.x_stride,
                  .b = p.columns,
                  .b_stride = kRotationColumns,
                  .c = p.y + n,
                  .c_stride = p.y_stride,
                  .rows_count = p.rows_count,
                  .k_count = p.dim,
                  .n_count = kRotationColumns,
                  .accumulate = false});
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_SIMD_INL_H_
