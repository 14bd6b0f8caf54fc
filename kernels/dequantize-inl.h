// int2 and bf16 runs to fp32 vectors, compiled once per target (see simd-inl.h).
#if defined(OKV_KERNELS_DEQUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_DEQUANTIZE_INL_H_
#undef OKV_KERNELS_DEQUANTIZE_INL_H_
#else
#define OKV_KERNELS_DEQUANTIZE_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/int2_tiles-inl.h"
#include "kernels/simd-inl.h"
#include "proto/int2_layout.h"
#include "proto/page_layout.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

// Codes at bits kShift of each lane, as fp32.
template <int kShift>
HWY_INLINE VF CodesAt(VU32 bytes) {
  const VU32 codes = hn::And(hn::ShiftRight<kShift>(bytes), hn::Set(DU32(), 3));
  return hn::ConvertTo(DF(), hn::BitCast(DI32(), codes));
}
HWY_INLINE VU32 LoadBytes(const uint8_t* from) {
  return hn::PromoteTo(DU32(), hn::LoadU(DU8(), from));
}

struct ScaleOffset {
  VF scale;
  VF offset;
};
// One word in every lane.
HWY_INLINE ScaleOffset BroadcastScaleOffset(const uint8_t* word) {
  const DU32 du;
  uint32_t bits;
  std::memcpy(&bits, word, 4);
  return {.scale = hn::BitCast(DF(), hn::Set(du, bits << 16)),
          .offset = hn::BitCast(DF(), hn::Set(du, bits & 0xffff0000u))};
}
// offset + scale * code: one multiply, one add (the project is built with -ffp-contract=off).
HWY_INLINE VF Dequantize(const ScaleOffset& params, VF codes) {
  return hn::Add(params.offset, hn::Mul(params.scale, codes));
}

HWY_INLINE void StoreValues(VF value, float* to) { hn::StoreU(value, DF(), to); }
HWY_INLINE void StoreValues(VF value, uint16_t* to) {
  // A run whose checksum held has no NaN; one that has keeps it, as FloatToBf16 does.
  const VU32 quiet =
      hn::Or(hn::ShiftRight<16>(hn::BitCast(DU32(), value)), hn::Set(DU32(), 0x0040));
  const auto is_nan = hn::RebindMask(DU32(), hn::IsNaN(value));
  StoreU16(hn::IfThenElse(is_nan, quiet, Bf16BitsOfFinite(value)), to);
}

// One half of an int2 run.
struct HalfRun {
  const uint8_t* run;
  uint32_t dim;
  uint32_t group_size;
  bool is_value;
};
// The first tokens_count rows to out [tokens_count, dim], fp32 or bf16.
template <typename T>
HWY_INLINE void DequantizeHalf(const HalfRun& half, size_t tokens_count, T* out) {
  HWY_ALIGN uint8_t rows[size_t{kBlockTokens} * 256 / 4];
  if (half.is_value) {
    UnpackValueRows(half.run + int2::ValueCodesOffset(half.dim), half.dim, rows);
  } else {
    UnpackKeyRows(half.run + int2::KeyCodesOffset(), half.dim, rows);
  }
  const uint32_t quarter = half.dim / 4;
  const int group_shift = std::countr_zero(half.group_size);
  const uint32_t groups = half.dim >> group_shift;
  for (uint32_t t = 0; t < tokens_count; ++t, out += half.dim) {
    const auto params = [&](uint32_t c) HWY_ATTR {
      const uint32_t group = c >> group_shift;
      return BroadcastScaleOffset(half.run + (half.is_value
                                                  ? int2::ValueParams(half.dim, groups, t, group)
                                                  : int2::KeyParams(half.dim, groups, t, group)));
    };
    const auto store = [&](uint32_t c, VF codes)
                           HWY_ATTR { StoreValues(Dequantize(params(c), codes), out + c); };
    // Lanes are at most 16 and groups at least 32: a vector lies in one group.
    for (uint32_t r = 0; r < quarter; r += kLanes) {
      const VU32 bytes = LoadBytes(rows + t * quarter + r);
      store(r, CodesAt<0>(bytes));
      store(r + quarter, CodesAt<2>(bytes));
      store(r + 2 * quarter, CodesAt<4>(bytes));
      store(r + 3 * quarter, CodesAt<6>(bytes));
    }
  }
}

// K of a bf16 run, rows [64, dim], to kt [dim, 64] fp32.
inline void LoadKeysTransposedBf16(const PageLayout& layout, const uint8_t* run, float* kt) {
  LoadTransposed({.from = reinterpret_cast<const uint16_t*>(run),
                  .stride = layout.head_dim,
                  .rows_count = kBlockTokens,
                  .columns_count = layout.head_dim},
                 kt);
}

// The first tokens_count V rows of a bf16 run to v [tokens_count, dim] fp32.
inline void LoadValuesBf16(const PageLayout& layout, const uint8_t* run, size_t tokens_count,
                           float* v) {
  const uint16_t* const rows = reinterpret_cast<const uint16_t*>(run + layout.bf16_v_offset());
  for (size_t i = 0; i < tokens_count * layout.head_dim; i += kLanes) {
    hn::StoreU(LoadBf16(rows + i), DF(), v + i);
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_DEQUANTIZE_INL_H_
