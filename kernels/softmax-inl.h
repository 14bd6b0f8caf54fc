// The online softmax of attention, compiled once per target (see simd-inl.h): one row, one block.
#if defined(OKV_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_SOFTMAX_INL_H_
#undef OKV_KERNELS_SOFTMAX_INL_H_
#else
#define OKV_KERNELS_SOFTMAX_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/attend_rows.h"
#include "kernels/simd-inl.h"
#include "kernels/softmax_exp2.h"
#include "proto/format.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

constexpr size_t kTokens = kBlockTokens;
constexpr size_t kSumVectors = kSumLanes / kLanes;

// Exp2Softmax in every lane.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const auto tiny = hn::Lt(x, hn::Set(d, kExp2Min));  // Not NaN, which reaches the result by f.
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3
  const VF n = hn::Round(x);
#else
  const VF n = hn::Round(hn::Max(x, hn::Set(d, kExp2Min)));
#endif
  const VF f = hn::Sub(x, n);
  VF q = hn::Set(d, kExp2C6);
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C5));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C4));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C3));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C2));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C1));
  const VF fraction = hn::MulAdd(q, f, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3
  return hn::IfThenZeroElse(tiny, VF{_mm512_scalef_ps(fraction.raw, n.raw)});
#else
  const DI32 di;
  const auto power = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenZeroElse(tiny, hn::Mul(fraction, hn::BitCast(d, power)));
#endif
}

HWY_INLINE void Scale(float factor, size_t count, float* values) {
  const DF d;
  const VF factors = hn::Set(d, factor);
  for (size_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, values + i), factors), d, values + i);
  }
}

// A row's state over a span, in floats: o [dim], partial sums of p [kSumLanes], of p * offset of
// int2 values [groups][kSumLanes], and in a cache line of its own the largest score.
struct StateLayout {
  size_t dim;
  size_t groups;

  size_t sums_offset() const { return dim; }
  size_t offsets_offset() const { return dim + kSumLanes; }
  size_t max_offset() const { return dim + kSumLanes * (1 + groups); }
  size_t stride() const { return max_offset() + 16; }
};

struct SoftmaxRow {
  float* p;  // [64] in: scores over `scale`, out: probabilities, 0 from `visible` on
  uint32_t visible;
  float scale;
  StateLayout layout;
  float* state;
};

// The lanes i * kLanes .. of a block that hold tokens before `visible`.
HWY_INLINE hn::Mask<DF> SeenLanes(size_t i, uint32_t visible) {
  const DF d;
  return hn::Lt(hn::Iota(d, static_cast<float>(i * kLanes)),
                hn::Set(d, static_cast<float>(visible)));
}

// The online softmax of one row and block. Whatever the tokens behind `visible` gave, NaN included,
// is replaced before it is compared or added.
HWY_INLINE void UpdateSoftmax(const SoftmaxRow& row) {
  const DF d;
  const VF none = hn::Set(d, -std::numeric_limits<float>::infinity());
  const VF scale = hn::Set(d, row.scale);
  VF scores[kTokens / kLanes];
  VF block_max = none;
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    scores[i] = hn::Mul(hn::LoadU(d, row.p + i * kLanes), scale);
    if (row.visible < kTokens) {
      scores[i] = hn::IfThenElse(SeenLanes(i, row.visible), scores[i], none);
    }
    block_max = hn::Max(block_max, scores[i]);
  }
  // Most blocks raise no maximum: the reduction across lanes is only for those that do.
  float* const state_max = row.state + row.layout.max_offset();
  if (!hn::AllFalse(d, hn::Gt(block_max, hn::Set(d, *state_max)))) {
    const float max = hn::GetLane(hn::MaxOfLanes(d, block_max));
    const float factor = hn::GetLane(Exp2(hn::Set(d, *state_max - max)));
    Scale(factor, row.layout.max_offset(), row.state);
    *state_max = max;
  }
  const VF max = hn::Set(d, *state_max);
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    scores[i] = Exp2(hn::Sub(scores[i], max));
    hn::StoreU(scores[i], d, row.p + i * kLanes);
  }
  float* const sums = row.state + row.layout.sums_offset();
#pragma GCC unroll 4
  for (size_t part = 0; part < kSumVectors; ++part) {
    VF sum = hn::LoadU(d, sums + part * kLanes);
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) sum = hn::Add(sum, scores[i * kSumVectors + part]);
    hn::StoreU(sum, d, sums + part * kLanes);
  }
}

inline void ClearState(const StateLayout& layout, float* state) {
  const DF d;
  for (size_t i = 0; i < layout.max_offset(); i += kLanes) hn::StoreU(hn::Zero(d), d, state + i);
  state[layout.max_offset()] = -std::numeric_limits<float>::infinity();
}

// Folds a later span's state into that of the spans before.
HWY_INLINE void FoldState(const StateLayout& layout, const float* span, float* state) {
  const DF d;
  const float before_max = state[layout.max_offset()];
  const float span_max = span[layout.max_offset()];
  const float max = before_max > span_max ? before_max : span_max;
  const VF factor = Exp2(hn::Set(d, before_max - max));
  const VF span_factor = Exp2(hn::Set(d, span_max - max));
  for (size_t i = 0; i < layout.max_offset(); i += kLanes) {
    const VF before = hn::Mul(hn::LoadU(d, state + i), factor);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, span + i), span_factor, before), d, state + i);
  }
  state[layout.max_offset()] = max;
}

// The sum of kSumLanes partial sums, which it overwrites.
inline float AddPartialSums(float* sums) {
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// o = (o + the offsets' sums of each channel's group) / sum of p, in place.
inline void FinishState(const StateLayout& layout, float* state) {
  const DF d;
  const VF sum = hn::Set(d, AddPartialSums(state + layout.sums_offset()));
  const size_t group_size = layout.dim / layout.groups;
  for (size_t g = 0; g < layout.groups; ++g) {
    const VF offset = hn::Set(d, AddPartialSums(state + layout.offsets_offset() + g * kSumLanes));
    for (size_t c = g * group_size; c < (g + 1) * group_size; c += kLanes) {
      hn::StoreU(hn::Div(hn::Add(hn::LoadU(d, state + c), offset), sum), d, state + c);
    }
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_SOFTMAX_INL_H_
