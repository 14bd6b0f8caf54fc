// Rotated rows to int2 runs: per KV head and block reads 64 x 2 rows of bf16 (32 KiB at d 128),
// writes one run (4.5 KiB). A row at a time, lanes = channels; packed rows are then shuffled into
// the run's tiles.
#include "kernels/quantize.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/simd_targets.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/format.h"
#include "proto/int2_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/int2_tiles-inl.h"
#include "kernels/simd-inl.h"

#ifndef OKV_KERNELS_QUANTIZE_CC_ONCE_
#define OKV_KERNELS_QUANTIZE_CC_ONCE_
namespace okv {
namespace {

constexpr uint32_t kDimMax = 256;

// The K half or the V half of a run.
struct QuantizeHalf {
  const uint16_t* rows;  // [64, dim] bf16
  size_t row_stride;
  uint32_t dim;
  uint32_t group_size;
  uint32_t clip_rank;
  uint8_t* run;
  bool is_value;
};

}  // namespace
}  // namespace okv
#endif  // OKV_KERNELS_QUANTIZE_CC_ONCE_

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

// 32 channels a vector, so that the smallest dim is a multiple.
using DI16 = hn::CappedTag<int16_t, 32>;
using VI16 = hn::Vec<DI16>;
constexpr size_t kLanes16 = hn::MaxLanes(DI16());

// Magnitudes are the bits without the sign: as int16 they order as |y| does.
struct Row {
  HWY_ALIGN int16_t y[kDimMax];
  HWY_ALIGN int16_t magnitudes[kDimMax];
};

// Subnormal y and -0 become +0. False when the row holds NaN or Inf.
HWY_INLINE bool SanitizeRow(const uint16_t* from, uint32_t dim, Row* row) {
  const DI16 d;
  auto bad = hn::MaskFromVec(hn::Zero(d));
  for (size_t c = 0; c < dim; c += kLanes16) {
    const VI16 bits = hn::LoadU(d, reinterpret_cast<const int16_t*>(from + c));
    const VI16 magnitude = hn::And(bits, hn::Set(d, 0x7fff));
    bad = hn::Or(bad, hn::Gt(magnitude, hn::Set(d, 0x7f7f)));
    const auto is_zero = hn::Lt(magnitude, hn::Set(d, 0x0080));
    hn::StoreU(hn::IfThenZeroElse(is_zero, bits), d, row->y + c);
    hn::StoreU(hn::IfThenZeroElse(is_zero, magnitude), d, row->magnitudes + c);
  }
  return hn::AllFalse(d, bad);
}

// The clip_rank-th smallest magnitude: the largest t with at most clip_rank magnitudes below it,
// found bit by bit. 15 counts over 2 to 8 vectors beat a selection, whose branches nothing
// predicts.
HWY_INLINE int16_t SelectMagnitude(const Row& row, uint32_t dim, uint32_t clip_rank) {
  const DI16 d;
  int32_t threshold = 0;
  for (int32_t bit = 0x4000; bit != 0; bit >>= 1) {
    const VI16 candidate = hn::Set(d, static_cast<int16_t>(threshold | bit));
    size_t below = 0;
    for (size_t c = 0; c < dim; c += kLanes16) {
      below += hn::CountTrue(d, hn::Lt(hn::LoadU(d, row.magnitudes + c), candidate));
    }
    if (below <= clip_rank) threshold |= bit;
  }
  return static_cast<int16_t>(threshold);
}

HWY_INLINE void ClipRow(uint32_t dim, uint32_t clip_rank, Row* row) {
  const DI16 d;
  const VI16 threshold = hn::Set(d, SelectMagnitude(*row, dim, clip_rank));
  for (size_t c = 0; c < dim; c += kLanes16) {
    const VI16 clipped = hn::Min(hn::LoadU(d, row->magnitudes + c), threshold);
    const VI16 sign = hn::And(hn::LoadU(d, row->y + c), hn::Set(d, static_cast<int16_t>(0x8000)));
    // What t = 0 clamps becomes +0 from either side.
    const auto is_zero = hn::Eq(clipped, hn::Zero(d));
    hn::StoreU(hn::IfThenZeroElse(is_zero, hn::Or(clipped, sign)), d, row->y + c);
  }
}

// Writes codes, one a byte, and the group's word. False when max - min or the scale is not finite.
HWY_INLINE bool QuantizeGroup(const uint16_t* y, uint32_t group_size, uint8_t* codes,
                              uint8_t* word) {
  const DF d;
  VF min = LoadBf16(y);
  VF max = min;
  for (size_t c = kLanes; c < group_size; c += kLanes) {
    const VF value = LoadBf16(y + c);
    min = hn::Min(min, value);
    max = hn::Max(max, value);
  }
  // No NaN and no -0 is left: minimum and maximum do not depend on the order.
  const float lo = hn::GetLane(hn::MinOfLanes(d, min));
  const float range = hn::GetLane(hn::MaxOfLanes(d, max)) - lo;
  if (!std::isfinite(range)) return false;
  uint16_t scale = FloatToBf16(range / 3.0f);
  if (scale >= 0x7f80) return false;
  if (scale < 0x0080) scale = 0;
  const uint16_t offset = FloatToBf16(lo);
  word[0] = static_cast<uint8_t>(scale);
  word[1] = static_cast<uint8_t>(scale >> 8);
  word[2] = static_cast<uint8_t>(offset);
  word[3] = static_cast<uint8_t>(offset >> 8);
  // y - offset is at least 0: times 0 it gives codes 0.
  const VF reciprocal = hn::Set(d, scale == 0 ? 0.0f : 1.0f / Bf16ToFloat(scale));
  for (size_t c = 0; c < group_size; c += kLanes) {
    const VF level = hn::Round(hn::Mul(hn::Sub(LoadBf16(y + c), hn::Set(d, lo)), reciprocal));
    const auto code = hn::ConvertTo(DI32(), hn::Min(level, hn::Set(d, 3.0f)));
    hn::StoreU(hn::DemoteTo(DU8(), code), DU8(), codes + c);
  }
  return true;
}

// One row: codes [dim], one a byte. False when it has no int2 form.
HWY_INLINE bool QuantizeRow(const QuantizeHalf& half, uint32_t token, uint8_t* codes) {
  Row row;
  if (!SanitizeRow(half.rows + token * half.row_stride, half.dim, &row)) return false;
  if (half.clip_rank != 0) ClipRow(half.dim, half.clip_rank, &row);
  const uint32_t groups = half.dim / half.group_size;
  for (uint32_t g = 0; g < groups; ++g) {
    const uint32_t c = g * half.group_size;
    const uint32_t word = half.is_value ? int2::ValueParams(half.dim, groups, token, g)
                                        : int2::KeyParams(half.dim, groups, token, g);
    const uint16_t* const y = reinterpret_cast<const uint16_t*>(row.y + c);
    if (!QuantizeGroup(y, half.group_size, codes + c, half.run + word)) return false;
  }
  return true;
}

// A row of codes [dim], one a byte, to packed bytes [dim / 4]: bits 2j, 2j + 1 of byte r hold the
// code of channel r + j dim / 4.
HWY_INLINE void PackRow(const uint8_t* codes, size_t dim, uint8_t* out) {
  const D16x8 d;
  const size_t quarter = dim / 4;
  for (size_t r = 0; r < quarter; r += 16) {
    const auto c0 = hn::LoadU(d, codes + r);
    const auto c1 = hn::LoadU(d, codes + r + quarter);
    const auto c2 = hn::LoadU(d, codes + r + 2 * quarter);
    const auto c3 = hn::LoadU(d, codes + r + 3 * quarter);
    // Codes are at most 3: added to itself a byte shifts left without touching its neighbor.
    const auto low = hn::Add(c0, hn::Add(hn::Add(c1, c1), hn::Add(c1, c1)));
    auto high = hn::Add(c2, hn::Add(hn::Add(c3, c3), hn::Add(c3, c3)));
    for (int i = 0; i < 4; ++i) high = hn::Add(high, high);
    hn::StoreU(hn::Or(low, high), d, out + r);
  }
}

}  // namespace

// Quantizes 64 rows. Returns the first token whose row has no int2 form, or 64.
uint32_t QuantizeHalfTarget(const QuantizeHalf& half) {
  HWY_ALIGN uint8_t codes[kDimMax];
  HWY_ALIGN uint8_t rows[size_t{kBlockTokens} * kDimMax / 4];
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    if (!QuantizeRow(half, t, codes)) return t;
    PackRow(codes, half.dim, rows + size_t{t} * half.dim / 4);
  }
  if (half.is_value) {
    PackValueRows(rows, half.dim, half.run + int2::ValueCodesOffset(half.dim));
  } else {
    PackKeyRows(rows, half.dim, half.run + int2::KeyCodesOffset());
  }
  return kBlockTokens;
}

#else

// The scalar twin takes the whole run: see okv::QuantizeRun.
uint32_t QuantizeHalfTarget(const QuantizeHalf&) { return UINT32_MAX; }

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(QuantizeHalfTarget);

absl::Status QuantizeRun(const QuantizeRunParams& params, uint8_t* run, BadRow* bad) {
  OKV_CHECK(params.dim == 64 || params.dim == 128 || params.dim == 256);
  OKV_CHECK(params.group_size >= 32 && params.group_size <= params.dim &&
            params.dim % params.group_size == 0);
  OKV_CHECK(params.clip_rank_k < params.dim && params.clip_rank_v < params.dim);
  for (const bool is_value : {false, true}) {
    const uint32_t token = HWY_DYNAMIC_DISPATCH(QuantizeHalfTarget)(
        {.rows = is_value ? params.v : params.k,
         .row_stride = params.row_stride,
         .dim = params.dim,
         .group_size = params.group_size,
         .clip_rank = is_value ? params.clip_rank_v : params.clip_rank_k,
         .run = run,
         .is_value = is_value});
    if (token == UINT32_MAX) return reference::QuantizeRun(params, run, bad);
    if (token < kBlockTokens) {
      *bad = {.token = token, .is_value = is_value};
      return absl::InvalidArgumentError(
          absl::StrCat(is_value ? "value" : "key", " row of token ", token,
                       " of the block holds NaN, Inf or a range that bf16 cannot hold"));
    }
  }
  return absl::OkStatus();
}

}  // namespace okv
#endif  // HWY_ONCE
