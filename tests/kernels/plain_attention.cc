#include "tests/kernels/plain_attention.h"

#include <algorithm>
#include <limits>

#include "kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/kernels/plain_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

constexpr size_t kRowsMax = 4;

struct Block {
  const uint16_t* k;  // [64, dim]
  const uint16_t* v;
  size_t dim;
};

using D4 = hn::FixedTag<float, 4>;

template <class V>
HWY_INLINE hn::Vec<D4> AddHalves(V v) {
  const hn::DFromV<V> d;
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<decltype(d)> half;
    return AddHalves(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

// The sums of four vectors' lanes, in one: about half the shuffles of four sums.
HWY_INLINE hn::Vec<D4> AddLanes(const VF* sums) {
  const DF d;
  const hn::Repartition<double, DF> d64;
  const VF ab =
      hn::Add(hn::InterleaveLower(d, sums[0], sums[1]), hn::InterleaveUpper(d, sums[0], sums[1]));
  const VF cd =
      hn::Add(hn::InterleaveLower(d, sums[2], sums[3]), hn::InterleaveUpper(d, sums[2], sums[3]));
  const auto low = hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, cd));
  const auto high = hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, cd));
  const VF four = hn::Add(hn::BitCast(d, low), hn::BitCast(d, high));
  return AddHalves(four);
}

// p[row][t] = q . k. Four tokens by all rows of sums in registers; lanes = channels, so that K is
// read as it lies.
template <size_t kRows>
void ScoreBlock(const Block& block, const float* q, float scale, float (*p)[kTokens]) {
  const DF d;
  for (size_t t = 0; t < kTokens; t += 4) {
    VF sums[kRows][4];
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < 4; ++i) sums[r][i] = hn::Zero(d);
    }
    for (size_t c = 0; c < block.dim; c += kLanes) {
      VF k[4];
#pragma GCC unroll 4
      for (size_t i = 0; i < 4; ++i) k[i] = LoadBf16(block.k + (t + i) * block.dim + c);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        const VF q_part = hn::LoadU(d, q + r * block.dim + c);
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) sums[r][i] = hn::MulAdd(q_part, k[i], sums[r][i]);
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      hn::StoreU(hn::Mul(AddLanes(sums[r]), hn::Set(D4(), scale)), D4(), p[r] + t);
    }
  }
}

// o[row] += p[row] V, two vectors of channels at a time.
template <size_t kRows>
void AddBlockValues(const Block& block, float (*p)[kTokens], float* o) {
  const DF d;
  for (size_t c = 0; c < block.dim; c += 2 * kLanes) {
    VF sums[kRows][2];
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < 2; ++i) sums[r][i] = hn::LoadU(d, o + r * block.dim + c + i * kLanes);
    }
    for (size_t t = 0; t < kTokens; ++t) {
      const VF v0 = LoadBf16(block.v + t * block.dim + c);
      const VF v1 = LoadBf16(block.v + t * block.dim + c + kLanes);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        const VF weight = hn::Set(d, p[r][t]);
        sums[r][0] = hn::MulAdd(weight, v0, sums[r][0]);
        sums[r][1] = hn::MulAdd(weight, v1, sums[r][1]);
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < 2; ++i) hn::StoreU(sums[r][i], d, o + r * block.dim + c + i * kLanes);
    }
  }
}

struct RowSums {
  float max[kRowsMax];
  float sum[kRowsMax];
};

void SoftmaxRow(size_t r, size_t dim, float* p, RowSums* rows, float* o) {
  const DF d;
  VF block_max = hn::Set(d, rows->max[r]);
  for (size_t t = 0; t < kTokens; t += kLanes) block_max = hn::Max(block_max, hn::LoadU(d, p + t));
  const float max = hn::GetLane(hn::MaxOfLanes(d, block_max));
  if (max > rows->max[r]) {
    const float factor = hn::GetLane(Exp2(hn::Set(d, rows->max[r] - max)));
    Scale(factor, dim, o);
    rows->sum[r] *= factor;
    rows->max[r] = max;
  }
  VF sum = hn::Zero(d);
  for (size_t t = 0; t < kTokens; t += kLanes) {
    const VF probability = Exp2(hn::Sub(hn::LoadU(d, p + t), hn::Set(d, max)));
    hn::StoreU(probability, d, p + t);
    sum = hn::Add(sum, probability);
  }
  rows->sum[r] += hn::GetLane(hn::SumOfLanes(d, sum));
}

template <size_t kRows>
void AttendPlainRows(const PlainAttentionParams& params) {
  const size_t dim = params.dim;
  HWY_ALIGN float p[kRows][kTokens];
  RowSums rows;
  std::fill_n(rows.max, kRowsMax, -std::numeric_limits<float>::infinity());
  std::fill_n(rows.sum, kRowsMax, 0.0f);
  std::fill_n(params.out, kRows * dim, 0.0f);
  for (size_t t = 0; t < params.tokens; t += kTokens) {
    const Block block{.k = params.k + t * dim, .v = params.v + t * dim, .dim = dim};
    ScoreBlock<kRows>(block, params.q, params.softmax_scale * kLog2E, p);
    for (size_t r = 0; r < kRows; ++r) SoftmaxRow(r, dim, p[r], &rows, params.out + r * dim);
    AddBlockValues<kRows>(block, p, params.out);
  }
  for (size_t r = 0; r < kRows; ++r) Scale(1.0f / rows.sum[r], dim, params.out + r * dim);
}

}  // namespace

bool AttendPlainTarget(const PlainAttentionParams& params) {
  switch (params.rows) {
    case 1:
      AttendPlainRows<1>(params);
      return true;
    case 3:
      AttendPlainRows<3>(params);
      return true;
    case 4:
      AttendPlainRows<4>(params);
      return true;
    default:
      return false;
  }
}

#else

bool AttendPlainTarget(const PlainAttentionParams&) { return false; }

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(AttendPlainTarget);

bool AttendPlain(const PlainAttentionParams& params) {
  return HWY_DYNAMIC_DISPATCH(AttendPlainTarget)(params);
}

}  // namespace okv
#endif  // HWY_ONCE
