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
#include "kernels/simd-inl.h"
#include "proto/page_layout.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

// Codes at bits `shift` of each lane, as fp32.
HWY_INLINE VF CodesAt(VU32 bytes, int shift) {
  const VU32 codes = hn::And(hn::ShiftRightSame(bytes, shift), hn::Set(DU32(), 3));
  return hn::ConvertTo(DF(), hn::BitCast(DI32(), codes));
}
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
// kLanes words. Like every load here it takes a little-endian machine, as all targets are.
HWY_INLINE ScaleOffset LoadScaleOffsets(const uint8_t* words) {
  const DU32 du;
  const VU32 word = hn::LoadU(du, reinterpret_cast<const uint32_t*>(words));
  return {.scale = hn::BitCast(DF(), hn::ShiftLeft<16>(word)),
          .offset = hn::BitCast(DF(), hn::And(word, hn::Set(du, 0xffff0000u)))};
}
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

// K of an int2 run to kt [dim, 64] fp32: the run is channel-major already.
inline void LoadKeysTransposedInt2(const PageLayout& layout, const uint8_t* run, float* kt) {
  constexpr size_t kParts = 16 / kLanes;  // Vectors of 16 tokens.
  for (uint32_t g = 0; g < layout.groups(); ++g) {
    const uint8_t* const words = run + layout.k_params_offset() + size_t{g} * kBlockTokens * 4;
    ScaleOffset params[4 * kParts];
    for (size_t i = 0; i < 4 * kParts; ++i) params[i] = LoadScaleOffsets(words + i * kLanes * 4);
    for (uint32_t c = g * layout.group_size; c < (g + 1) * layout.group_size; ++c) {
#pragma GCC unroll 4
      for (size_t part = 0; part < kParts; ++part) {
        const VU32 bytes = LoadBytes(run + size_t{c} * 16 + part * kLanes);
        const ScaleOffset* const tokens = params + part;
        float* const out = kt + size_t{c} * kBlockTokens + part * kLanes;
        hn::StoreU(Dequantize(tokens[0], CodesAt<0>(bytes)), DF(), out);
        hn::StoreU(Dequantize(tokens[kParts], CodesAt<2>(bytes)), DF(), out + 16);
        hn::StoreU(Dequantize(tokens[2 * kParts], CodesAt<4>(bytes)), DF(), out + 32);
        hn::StoreU(Dequantize(tokens[3 * kParts], CodesAt<6>(bytes)), DF(), out + 48);
      }
    }
  }
}

// The first tokens_count V rows of an int2 run to v [tokens_count, dim] fp32.
inline void LoadValuesInt2(const PageLayout& layout, const uint8_t* run, size_t tokens_count,
                           float* v) {
  const size_t dim = layout.head_dim;
  const size_t quarter = dim / 4;
  const int group_shift = std::countr_zero(layout.group_size);
  for (size_t t = 0; t < tokens_count; ++t) {
    const uint8_t* const codes = run + layout.v_codes_offset() + t * quarter;
    const uint8_t* const words = run + layout.v_params_offset() + t * layout.groups() * 4;
    // Lanes are at most 16 and groups at least 32: a vector lies in one group. Shifts and one load
    // of codes for its four vectors, because a division per vector took half of the time.
    for (size_t b = 0; b < quarter; b += kLanes) {
      const VU32 bytes = LoadBytes(codes + b);
      const auto params = [=](size_t c) HWY_ATTR {
        return BroadcastScaleOffset(words + (c >> group_shift) * 4);
      };
      float* const out = v + t * dim + b;
      hn::StoreU(Dequantize(params(b), CodesAt<0>(bytes)), DF(), out);
      hn::StoreU(Dequantize(params(b + quarter), CodesAt<2>(bytes)), DF(), out + quarter);
      hn::StoreU(Dequantize(params(b + 2 * quarter), CodesAt<4>(bytes)), DF(), out + 2 * quarter);
      hn::StoreU(Dequantize(params(b + 3 * quarter), CodesAt<6>(bytes)), DF(), out + 3 * quarter);
    }
  }
}

// K of a bf16 run, rows [64, dim], to kt [dim, 64] fp32: a gather of words gives two channels.
inline void LoadKeysTransposedBf16(const PageLayout& layout, const uint8_t* run, float* kt) {
  const DF d;
  const DU32 du;
  const size_t dim = layout.head_dim;
  const auto rows = hn::Mul(hn::Iota(DI32(), 0), hn::Set(DI32(), static_cast<int32_t>(dim / 2)));
  for (size_t t = 0; t < kBlockTokens; t += kLanes) {
    const uint32_t* const base = reinterpret_cast<const uint32_t*>(run + t * dim * 2);
    for (size_t c = 0; c < dim; c += 2) {
      const VU32 words = hn::GatherIndex(du, base + c / 2, rows);
      hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(words)), d, kt + c * kBlockTokens + t);
      hn::StoreU(hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u))), d,
                 kt + (c + 1) * kBlockTokens + t);
    }
  }
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
