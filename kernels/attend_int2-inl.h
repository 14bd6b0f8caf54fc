// Attention to one int2 block, compiled once per target (see simd-inl.h). Codes are multiplied as
// integers, with queries and probabilities in 16-bit fixed point: exact sums, so the order in which
// an instruction set adds them does not show. Per row and block 2 x 64 x d products of 2 bytes.
#if defined(OKV_KERNELS_ATTEND_INT2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_ATTEND_INT2_INL_H_
#undef OKV_KERNELS_ATTEND_INT2_INL_H_
#else
#define OKV_KERNELS_ATTEND_INT2_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/attend_rows.h"
#include "kernels/int2_dot-inl.h"
#include "kernels/int2_tiles-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/softmax-inl.h"
#include "proto/int2_layout.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

constexpr size_t kGroupsMax = 8;

// Bits of |x| in every lane.
HWY_INLINE hn::Vec<DI32> MagnitudeBits(VF x) {
  return hn::And(hn::BitCast(DI32(), x), hn::Set(DI32(), 0x7fffffff));
}

HWY_INLINE void StoreLowBytes(hn::Vec<DI32> values, uint8_t* to) {
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3
  // Highway 1.0's TruncateTo takes the wrong lanes on AVX3_DL.
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(values.raw));
#else
  hn::StoreU(hn::TruncateTo(DU8(), hn::BitCast(DU32(), values)), DU8(), to);
#endif
}

// Rotated queries in fixed point.
struct FixedQueries {
  uint8_t* bytes;  // [rows][2][dim] high bytes, then low bytes
  float* factors;  // [rows] what an integer product with codes is worth as a score: unit * scale
  float* sums;     // [rows][groups] factor * the sum of a group's integers: what offsets multiply
};
// `scale`: of scores, in units of log 2.
inline void FixQuery(const float* q, size_t row, size_t dim, size_t groups, float scale,
                     const FixedQueries& queries) {
  const DF d;
  const DI32 di;
  auto max = hn::Zero(di);
  for (size_t c = 0; c < dim; c += kLanes) {
    max = hn::Max(max, MagnitudeBits(hn::LoadU(d, q + c)));
  }
  const FixedPoint point =
      FixedPointOf(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, max))), kQueryFixedMax);
  const VF inverse = hn::Set(d, point.inverse);
  const float factor = point.unit * scale;
  queries.factors[row] = factor;
  uint8_t* const bytes = queries.bytes + row * 2 * dim;
  const size_t group_size = dim / groups;
  for (size_t g = 0; g < groups; ++g) {
    auto sum = hn::Zero(di);
    for (size_t c = g * group_size; c < (g + 1) * group_size; c += kLanes) {
      const VF scaled = hn::Mul(hn::LoadU(d, q + c), inverse);
      const auto integers = hn::NearestInt(scaled);
      // The low byte is signed: what it takes away comes back in the high one.
      StoreLowBytes(hn::ShiftRight<8>(hn::Add(integers, hn::Set(di, 128))), bytes + c);
      StoreLowBytes(integers, bytes + dim + c);
      sum = hn::Add(sum, integers);
    }
    const float total = static_cast<float>(hn::GetLane(hn::SumOfLanes(di, sum)));
    queries.sums[row * groups + g] = total * factor;
  }
}

// A block as the rows read it. Floats [groups][64].
struct Int2Block {
  uint8_t* key_panel;
  uint8_t* value_panel;
  float* key_scales;
  float* key_offsets;
  float* value_scales;
  float* value_offsets;
};

template <class D>
HWY_INLINE void StoreWords(D du, hn::Vec<D> words, float* scales, float* offsets) {
  const hn::Rebind<float, D> d;
  hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(words)), d, scales);
  hn::StoreU(hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u))), d, offsets);
}
// 16 bytes of a run hold the words of tokens t and t + 8: K, K, V, V.
inline void LoadWords(const uint8_t* run, uint32_t dim, uint32_t groups, const Int2Block& block) {
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3
  if (groups == 1) {  // Usual, and the words of 16 tokens are two vectors.
    const __m512i keys =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i values = _mm512_add_epi32(keys, _mm512_set1_epi32(2));
    const uint8_t* from = run + int2::KeyParams(dim, 1, 0, 0);
    for (size_t t = 0; t < kTokens; t += 16, from += 128) {
      const __m512i a = _mm512_loadu_si512(from);
      const __m512i b = _mm512_loadu_si512(from + 64);
      StoreWords(DU32(), VU32{_mm512_permutex2var_epi32(a, keys, b)}, block.key_scales + t,
                 block.key_offsets + t);
      StoreWords(DU32(), VU32{_mm512_permutex2var_epi32(a, values, b)}, block.value_scales + t,
                 block.value_offsets + t);
    }
    return;
  }
#endif
  const hn::FixedTag<uint32_t, 4> du;
  for (uint32_t g = 0; g < groups; ++g) {
    for (uint32_t t = 0; t < kTokens; t += t % 16 == 0 ? 4 : 12) {  // 0, 4, 16, 20, ...
      WordTile tile;
      for (uint32_t i = 0; i < 4; ++i) {
        tile.words[i] = hn::LoadU(D16x8(), run + int2::KeyParams(dim, groups, t + i, g));
      }
      TransposeWords(&tile);
      const auto store = [&](size_t word, size_t token, float* scales, float* offsets) HWY_ATTR {
        const size_t at = g * kTokens + token;
        StoreWords(du, hn::BitCast(du, tile.words[word]), scales + at, offsets + at);
      };
      store(0, t, block.key_scales, block.key_offsets);
      store(1, t + 8, block.key_scales, block.key_offsets);
      store(2, t, block.value_scales, block.value_offsets);
      store(3, t + 8, block.value_scales, block.value_offsets);
    }
  }
}
inline void LoadInt2Block(const uint8_t* run, uint32_t dim, uint32_t groups,
                          const Int2Block& block) {
  ExpandKeys(run + int2::KeyCodesOffset(), dim, block.key_panel);
  ExpandValues(run + int2::ValueCodesOffset(dim), dim, block.value_panel);
  LoadWords(run, dim, groups, block);
}

// Rows of a task over one block.
struct Int2Rows {
  size_t dim;
  size_t groups;
  const Int2Block* block;
  size_t rows_count;  // At most kBlockRows.
  FixedQueries queries;
  float* p;           // [rows][64]
  uint8_t* weights;   // [rows][groups][2][64] probabilities times scales, fixed
  float* units;       // [rows][groups] of those
  int32_t* products;  // [rows][max(groups * 64, dim)]
};

// p = scores, in units of log 2.
inline void ScoreInt2(const Int2Rows& rows) {
  const DF d;
  const size_t quads = rows.dim / 4;
  const size_t out_stride = rows.groups * kTokens;
  for (size_t g = 0; g < rows.groups; ++g) {
    const size_t first = g * quads / rows.groups;
    MultiplyCodes<int8_t>(rows.rows_count, {.panel = rows.block->key_panel + first * kPanelVector,
                                            .vector_stride = quads * kPanelVector,
                                            .vectors_count = kTokens / 16,
                                            .quads_count = quads / rows.groups,
                                            .weights = rows.queries.bytes + first * 4,
                                            .weights_stride = 2 * rows.dim,
                                            .low_offset = rows.dim,
                                            .out = rows.products + g * kTokens,
                                            .out_stride = out_stride});
  }
  for (size_t row = 0; row < rows.rows_count; ++row) {
    const VF factor = hn::Set(d, rows.queries.factors[row]);
    const float* const sums = rows.queries.sums + row * rows.groups;
    for (size_t t = 0; t < kTokens; t += kLanes) {
      VF score = hn::Zero(d);
      for (size_t g = 0; g < rows.groups; ++g) {
        const size_t at = g * kTokens + t;
        const VF product =
            hn::ConvertTo(d, hn::LoadU(DI32(), rows.products + row * out_stride + at));
        score = hn::MulAdd(hn::LoadU(d, rows.block->key_offsets + at), hn::Set(d, sums[g]), score);
        score =
            hn::MulAdd(hn::LoadU(d, rows.block->key_scales + at), hn::Mul(product, factor), score);
      }
      hn::StoreU(score, d, rows.p + row * kTokens + t);
    }
  }
}

// A row's weights of one group, [64] floats in registers.
struct GroupWeights {
  VF weights[kTokens / kLanes];
  VF offset_sums[kSumVectors];
};

// Splits integers of 64 tokens, 0 to 65,535, into high bytes [64] and low bytes [64], of every 16
// tokens in the order of the panel's quads: 0, 8, 1, 9, ... 7, 15.
HWY_INLINE void StoreWeightBytes(const hn::Vec<DI32>* integers, uint8_t* to) {
#if HWY_TARGET == HWY_AVX3_DL
  // A pack takes four lanes from its two vectors by turns: integer 4 c + y of vector i becomes byte
  // 16 c + 4 i + y.
  alignas(64) static constexpr uint8_t kOrder[kTokens] = {
      0,  32, 1,  33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51,   //
      4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,   //
      8,  40, 9,  41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59,   //
      12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};  //
  const __m512i order = _mm512_load_si512(kOrder);
  const __m512i low_mask = _mm512_set1_epi16(0xff);
  const __m512i a = _mm512_packus_epi32(integers[0].raw, integers[1].raw);
  const __m512i b = _mm512_packus_epi32(integers[2].raw, integers[3].raw);
  const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i low =
      _mm512_packus_epi16(_mm512_and_si512(a, low_mask), _mm512_and_si512(b, low_mask));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi8(order, high));
  _mm512_storeu_si512(to + kTokens, _mm512_permutexvar_epi8(order, low));
#else
  HWY_ALIGN uint8_t bytes[2 * kTokens];
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    StoreLowBytes(hn::ShiftRight<8>(integers[i]), bytes + i * kLanes);
    StoreLowBytes(integers[i], bytes + kTokens + i * kLanes);
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < 2 * kTokens; i += 16) {
    const D16x8 d8;
    const auto sixteen = hn::LoadU(d8, bytes + i);
    hn::StoreU(hn::InterleaveLower(d8, sixteen, hn::ShiftRightBytes<8>(d8, sixteen)), d8, to + i);
  }
#endif
}

// To fixed point, in the order of the panel's quads: [2][64] high bytes, low bytes. The error goes
// to the sums of offsets. Returns what an integer is worth.
HWY_INLINE float FixWeights(GroupWeights* group, uint8_t* to) {
  const DF d;
  const DI32 di;
  auto max = hn::Zero(di);
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    max = hn::Max(max, MagnitudeBits(group->weights[i]));
  }
  const FixedPoint point =
      FixedPointOf(static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, max))), kWeightFixedMax);
  const VF inverse = hn::Set(d, point.inverse);
  const VF unit = hn::Set(d, point.unit);
  hn::Vec<DI32> integers[kTokens / kLanes];
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    const VF rounded = hn::Round(hn::Mul(group->weights[i], inverse));
    const VF error = hn::NegMulAdd(unit, rounded, group->weights[i]);
    VF* const sums = &group->offset_sums[i % kSumVectors];
    *sums = hn::MulAdd(hn::Set(d, kMiddleCode), error, *sums);
    integers[i] = hn::ConvertTo(di, rounded);
  }
  StoreWeightBytes(integers, to);
  return point.unit;
}

// Probabilities times the values' scales to fixed point, and times their offsets to the row's
// state. Tokens behind `visible` have p = 0, but their words may be anything.
HWY_INLINE void WeighInt2(const Int2Rows& rows, size_t row, uint32_t visible, float* offset_sums) {
  const DF d;
  const float* const p = rows.p + row * kTokens;
  for (size_t g = 0; g < rows.groups; ++g, offset_sums += kSumLanes) {
    GroupWeights group;
#pragma GCC unroll 4
    for (size_t part = 0; part < kSumVectors; ++part) {
      group.offset_sums[part] = hn::LoadU(d, offset_sums + part * kLanes);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < kTokens / kLanes; ++i) {
      const size_t at = g * kTokens + i * kLanes;
      VF scale = hn::LoadU(d, rows.block->value_scales + at);
      VF offset = hn::LoadU(d, rows.block->value_offsets + at);
      if (visible < kTokens) {
        const auto seen = SeenLanes(i, visible);
        scale = hn::IfThenElseZero(seen, scale);
        offset = hn::IfThenElseZero(seen, offset);
      }
      const VF probability = hn::LoadU(d, p + i * kLanes);
      VF* const sums = &group.offset_sums[i % kSumVectors];
      *sums = hn::MulAdd(probability, offset, *sums);
      group.weights[i] = hn::Mul(probability, scale);
    }
    const size_t at = row * rows.groups + g;
    rows.units[at] = FixWeights(&group, rows.weights + at * 2 * kTokens);
#pragma GCC unroll 4
    for (size_t part = 0; part < kSumVectors; ++part) {
      hn::StoreU(group.offset_sums[part], d, offset_sums + part * kLanes);
    }
  }
}

// o += unit * weights times codes, per row; row r's state starts at states + r * state_stride.
inline void AddInt2Values(const Int2Rows& rows, size_t state_stride, float* states) {
  const DF d;
  const size_t group_size = rows.dim / rows.groups;
  for (size_t g = 0; g < rows.groups; ++g) {
    MultiplyCodes<uint8_t>(rows.rows_count,
                           {.panel = rows.block->value_panel + g * group_size * kTokens,
                            .vector_stride = 16 * kPanelVector,
                            .vectors_count = group_size / 16,
                            .quads_count = kTokens / 4,
                            .weights = rows.weights + g * 2 * kTokens,
                            .weights_stride = rows.groups * 2 * kTokens,
                            .low_offset = kTokens,
                            .out = rows.products + g * group_size,
                            .out_stride = rows.dim});
  }
  for (size_t row = 0; row < rows.rows_count; ++row) {
    float* const o = states + row * state_stride;
    const int32_t* const products = rows.products + row * rows.dim;
    for (size_t g = 0; g < rows.groups; ++g) {
      const VF unit = hn::Set(d, rows.units[row * rows.groups + g]);
      for (size_t c = g * group_size; c < (g + 1) * group_size; c += kLanes) {
        const VF product = hn::ConvertTo(d, hn::LoadU(DI32(), products + c));
        hn::StoreU(hn::MulAdd(unit, product, hn::LoadU(d, o + c)), d, o + c);
      }
    }
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_ATTEND_INT2_INL_H_
