// int2 runs back to token-major rows, fp32 or bf16: what a worker without an int2 kernel attends
// to. Reads a run (4.5 KiB at d 128), writes 64 KiB (fp32) or 32 KiB.
#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"
#include "kernels/simd_targets.h"
#include "proto/check.h"
#include "proto/page_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/dequantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dequantize-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

HWY_INLINE void StoreValues(VF value, float* to) { hn::StoreU(value, DF(), to); }
HWY_INLINE void StoreValues(VF value, uint16_t* to) {
  // A run whose checksum held has no NaN; one that has keeps it, as FloatToBf16 does.
  const VU32 quiet =
      hn::Or(hn::ShiftRight<16>(hn::BitCast(DU32(), value)), hn::Set(DU32(), 0x0040));
  const auto is_nan = hn::RebindMask(DU32(), hn::IsNaN(value));
  StoreU16(hn::IfThenElse(is_nan, quiet, Bf16BitsOfFinite(value)), to);
}

// A row of packed codes, dim / 4 or dim bytes, at bits `shift`; kStep channels from byte 0 on.
struct CodeRow {
  const uint8_t* bytes;
  int shift;
  const uint8_t* words;  // The token's word of group 0.
  size_t group_stride;
  size_t group_size;
  size_t channel;  // Of bytes[0].
  size_t channels_count;
};
template <typename T>
HWY_INLINE void DequantizeRow(const CodeRow& row, T* out) {
  for (size_t b = 0; b < row.channels_count; b += kLanes) {
    const size_t group = (row.channel + b) / row.group_size;
    const ScaleOffset params = BroadcastScaleOffset(row.words + group * row.group_stride);
    StoreValues(Dequantize(params, CodesAt(LoadBytes(row.bytes + b), row.shift)), out + b);
  }
}

// Packed K codes [dim, 16] to [16, dim] bytes, whose rows are then dequantized as V's are.
HWY_INLINE void TransposeKeyCodes(const uint8_t* codes, size_t dim, uint8_t* out) {
  for (size_t c = 0; c < dim; c += 16) {
    ByteTile tile;
    for (size_t i = 0; i < 16; ++i) tile.rows[i] = hn::LoadU(D16x8(), codes + (c + i) * 16);
    TransposeBytes(&tile);
    for (size_t b = 0; b < 16; ++b) hn::StoreU(tile.rows[b], D16x8(), out + b * dim + c);
  }
}

template <typename T>
HWY_INLINE void DequantizeTokens(const DequantizeRunParams& params, T* k, T* v) {
  const size_t dim = params.dim;
  const size_t quarter = dim / 4;
  const PageLayout layout{
      .layers_count = 1, .kv_heads = 1, .head_dim = params.dim, .group_size = params.group_size};
  HWY_ALIGN uint8_t key_codes[16 * 256];
  TransposeKeyCodes(params.run, dim, key_codes);
  for (size_t t = 0; t < kBlockTokens; ++t) {
    DequantizeRow({.bytes = key_codes + t % 16 * dim,
                   .shift = static_cast<int>(t / 16 * 2),
                   .words = params.run + layout.k_params_offset() + t * 4,
                   .group_stride = size_t{kBlockTokens} * 4,
                   .group_size = params.group_size,
                   .channel = 0,
                   .channels_count = dim},
                  k + t * dim);
    for (size_t j = 0; j < 4; ++j) {
      DequantizeRow({.bytes = params.run + layout.v_codes_offset() + t * quarter,
                     .shift = static_cast<int>(2 * j),
                     .words = params.run + layout.v_params_offset() + t * layout.groups() * 4,
                     .group_stride = 4,
                     .group_size = params.group_size,
                     .channel = j * quarter,
                     .channels_count = quarter},
                    v + t * dim + j * quarter);
    }
  }
}

}  // namespace

void DequantizeBf16Target(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  DequantizeTokens(params, k, v);
}
void DequantizeF32Target(const DequantizeRunParams& params, float* k, float* v) {
  DequantizeTokens(params, k, v);
}

#else

void DequantizeBf16Target(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  reference::DequantizeRun(params, k, v);
}
void DequantizeF32Target(const DequantizeRunParams& params, float* k, float* v) {
  reference::DequantizeRunF32(params, k, v);
}

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {

HWY_EXPORT(DequantizeBf16Target);
HWY_EXPORT(DequantizeF32Target);

void DequantizeRun(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256 && params.group_size >= 32);
  HWY_DYNAMIC_DISPATCH(DequantizeBf16Target)(params, k, v);
}

void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v) {
  OKV_CHECK(params.dim % 64 == 0 && params.dim <= 256 && params.group_size >= 32);
  HWY_DYNAMIC_DISPATCH(DequantizeF32Target)(params, k, v);
}

}  // namespace okv
#endif  // HWY_ONCE
