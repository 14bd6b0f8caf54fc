#ifndef OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_
#define OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_

#include <cstdint>

#include "kernels/cuda/bf16x2.cuh"
#include "kernels/cuda/int2_pack.cuh"
#include "kernels/cuda/row_tile.cuh"

// The codec's rule (kernels/quantize.h) on a tile in registers. All arithmetic that decides a bit
// is a single correctly rounded operation: nothing is contracted, no subnormal is flushed.
//
// Terms: a row of the tile is spread over the four lanes of a quad; a part is 32 of its channels,
// the smallest group there is: words 4 s .. 4 s + 3 of each lane.
namespace okv::cuda {

inline constexpr uint32_t kBf16Infinity = 0x7f80;
inline constexpr uint32_t kBf16SmallestNormal = 0x0080;

// Subnormals and -0 become +0.
template <int kWords>
__device__ __forceinline__ void SanitizeRow(uint32_t (&word)[kWords]) {
  uint32_t smallest = word[0];
#pragma unroll
  for (int u = 1; u < kWords; ++u) smallest = SmallerMagnitude2(smallest, word[u]);
  if ((smallest & 0x7f80u) != 0 && (smallest & 0x7f800000u) != 0) return;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    if ((word[u] & 0x7f80u) == 0) word[u] &= 0xffff0000u;
    if ((word[u] & 0x7f800000u) == 0) word[u] &= 0x0000ffffu;
  }
}

// Largest element (high half) and minus the smallest (low half) of each group. NaN in a group makes
// both NaN.
template <int kDim, int kGroups>
__device__ __forceinline__ void GroupExtremes(const uint32_t (&word)[kDim / 8],
                                              uint32_t (&extremes)[kGroups]) {
  constexpr int kGroupWords = kDim / 8 / kGroups;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    uint32_t low = word[g * kGroupWords];
    uint32_t high = low;
#pragma unroll
    for (int u = 1; u < kGroupWords; ++u) {
      low = Min2(low, word[g * kGroupWords + u]);
      high = Max2(high, word[g * kGroupWords + u]);
    }
    const uint32_t even = __byte_perm(low, high, 0x5410) ^ 0x00008000u;
    const uint32_t odd = __byte_perm(low, high, 0x7632) ^ 0x00008000u;
    uint32_t both = Max2(even, odd);
    both = Max2(both, __shfl_xor_sync(kAllLanes, both, 1));
    extremes[g] = Max2(both, __shfl_xor_sync(kAllLanes, both, 2));
  }
}

// The row's largest magnitude as bits; 0x7f80 or more when it holds Inf or NaN.
template <int kGroups>
__device__ __forceinline__ uint32_t LargestMagnitude(const uint32_t (&extremes)[kGroups]) {
  uint32_t largest = extremes[0];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) largest = Max2(largest, extremes[g]);
  return Max2(largest, __byte_perm(largest, largest, 0x1032)) & 0x7fffu;
}

// How many magnitudes of two rows are below `bounds` (low half: of row a, high half: of row b); 256
// at most, so exact. The same in all lanes of a quad.
template <typename Count, int kWords>
__device__ __forceinline__ uint32_t CountBelow(const uint32_t (&a)[kWords],
                                               const uint32_t (&b)[kWords], uint32_t bounds) {
  const uint32_t bound_a = LowTwice(bounds);
  const uint32_t bound_b = HighTwice(bounds);
  uint32_t sum_a = 0;
  uint32_t sum_b = 0;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    sum_a = Count::Add(sum_a, Count::Below(a[u], bound_a));
    sum_b = Count::Add(sum_b, Count::Below(b[u], bound_b));
  }
  uint32_t sum = Count::Add(__byte_perm(sum_a, sum_b, 0x5410), __byte_perm(sum_a, sum_b, 0x7632));
  sum = Count::Add(sum, __shfl_xor_sync(kAllLanes, sum, 1));
  return Count::Add(sum, __shfl_xor_sync(kAllLanes, sum, 2));
}

// Raises both thresholds by each of the bits, from `bit` (the same in both halves) down, with which
// at most `rank` magnitudes are below.
template <typename Count, int kDim>
__device__ __forceinline__ void RaiseThresholds(const RowFragment<kDim>& rows, uint32_t rank,
                                                uint32_t bit, uint32_t (&thresholds)[2]) {
  const uint32_t rank_twice = LowTwice(Count::FromCount(rank));
#pragma unroll 1
  for (; (bit & 0xffffu) != 0; bit = bit >> 1 & 0x7fff7fffu) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t count =
          CountBelow<Count>(rows.word[2 * i], rows.word[2 * i + 1], thresholds[i] + bit);
      thresholds[i] += Count::AtMostMask(count, rank_twice) & bit;
    }
  }
}

// The rank-th smallest magnitude of each row, counted from 0: the largest T with at most `rank`
// magnitudes below it. largest[p] is row p's maximum, thresholds[i] has rows 2 i and 2 i + 1.
//
// T is built bit by bit of the bf16's own bits. Usual ranks lie within a factor of 4 of the
// maximum, 255 steps of bf16 below it: where one count says that this is so for all rows of the
// warp, T starts there, and 8 bits do instead of 15. No candidate is NaN: in finite rows all
// magnitudes are below infinity, which is therefore refused, and the numbers above it are not
// reached. REQUIRES: no -0 and no subnormal in the rows; rank < kDim. Rows with NaN or Inf get some
// T.
template <int kDim>
__device__ __forceinline__ void ClipThresholds(const RowFragment<kDim>& rows,
                                               const uint32_t (&largest)[4], uint32_t rank,
                                               uint32_t (&thresholds)[2]) {
  const uint32_t rank_twice = LowTwice(CountInFp16::FromCount(rank));
  bool near = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = largest[2 * i];
    const uint32_t b = largest[2 * i + 1];
    thresholds[i] = (a > 255 ? a - 255 : 0) | (b > 255 ? b - 255 : 0) << 16;
    const uint32_t count =
        CountBelow<CountInFp16>(rows.word[2 * i], rows.word[2 * i + 1], thresholds[i]);
    near = near && CountInFp16::AtMostMask(count, rank_twice) == 0xffffffffu &&
           max(a, b) <= CountInFp16::kLargestBits;
  }
  if (__all_sync(kAllLanes, near)) {
    RaiseThresholds<CountInFp16>(rows, rank, 0x00800080u, thresholds);
  } else {
    thresholds[0] = thresholds[1] = 0;
    RaiseThresholds<CountInBf16>(rows, rank, 0x40004000u, thresholds);
  }
  // Below the smallest normal there are only zeros; a comparison may take a subnormal bound for 0.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if ((thresholds[i] & 0xffffu) < kBf16SmallestNormal) thresholds[i] &= 0xffff0000u;
    if (thresholds[i] >> 16 < kBf16SmallestNormal) thresholds[i] &= 0x0000ffffu;
  }
}

struct GroupCodec {
  uint32_t word;  // Low half scale, high half offset
  float offset;
  float reciprocal;  // 0 for scale 0: all codes come out 0
};

// False when max - min or the scale is not finite.
__device__ __forceinline__ bool MakeGroupCodec(uint32_t extremes, GroupCodec* codec) {
  uint32_t low = (extremes ^ 0x8000u) & 0xffffu;
  if ((low & 0x7fffu) == 0) low = 0;
  const float offset = __uint_as_float(low << 16);
  const float range = __fsub_rn(HighBf16(extremes), offset);
  uint32_t scale = PackBf16(__fdiv_rn(range, 3.0f), 0.0f) & 0x7fffu;
  const bool finite = scale < kBf16Infinity;
  if (scale < kBf16SmallestNormal) scale = 0;
  codec->word = scale | low << 16;
  codec->offset = offset;
  codec->reciprocal = scale == 0 ? 0.0f : __frcp_rn(__uint_as_float(scale << 16));
  return finite;
}

// A float whose lowest two bits are the code. Adding 1.5 * 2^23 rounds to an integer, half to even.
// What it rounds is 0 to 3.02: y is neither below the offset nor above the maximum, and the scale
// is within 2^-8 of a third of the range; so nothing has to be clamped.
__device__ __forceinline__ uint32_t Code(float y, const GroupCodec& codec) {
  const float level = __fmul_rn(__fsub_rn(y, codec.offset), codec.reciprocal);
  return __float_as_uint(__fadd_rn(level, 12582912.0f));
}

// Codes of one row, as CodeFragment has them.
template <int kDim, int kGroups>
__device__ __forceinline__ void RowCodes(const uint32_t (&word)[kDim / 8],
                                         const GroupCodec (&codecs)[kGroups],
                                         uint32_t (&codes)[kDim / 64]) {
  constexpr int kQuarterWords = kDim / 32;
  constexpr int kGroupWords = kDim / 8 / kGroups;
#pragma unroll
  for (int v = 0; v < kDim / 64; ++v) {
    uint32_t bytes[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      bytes[b] = 0;
#pragma unroll
      for (int j = 3; j >= 0; --j) {
        const int u = 2 * v + b / 2 + kQuarterWords * j;
        const float y = b % 2 == 0 ? LowBf16(word[u]) : HighBf16(word[u]);
        // Only the lowest 8 bits count; what is above comes from the floats' exponents.
        bytes[b] = bytes[b] * 4 + Code(y, codecs[u / kGroupWords]);
      }
    }
    const uint32_t low = __byte_perm(bytes[0], bytes[1], 0x0040);
    const uint32_t high = __byte_perm(bytes[2], bytes[3], 0x0040);
    codes[v] = __byte_perm(low, high, 0x5410);
  }
}

// Where and how a tile is quantized.
struct TileTask {
  uint8_t* run;
  int half;  // Of the block: tokens 32 half ..
  bool is_value;
  uint32_t clip_rank;  // 0: off
};

// One row: clips it, makes its codes and parameter words. False when it has no int2 form.
template <int kDim, int kGroups>
__device__ __forceinline__ bool QuantizeRow(uint32_t (&word)[kDim / 8],
                                            uint32_t (&extremes)[kGroups], bool clip,
                                            uint32_t threshold, uint32_t (&codes)[kDim / 64],
                                            uint32_t (&params)[kGroups]) {
  if (clip) {
    const uint32_t bound = LowTwice(threshold);
#pragma unroll
    for (int u = 0; u < kDim / 8; ++u) word[u] = Clamp2(word[u], bound);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) extremes[g] = Clamp2(extremes[g], bound);
  }
  GroupCodec codecs[kGroups];
  bool finite = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    finite &= MakeGroupCodec(extremes[g], &codecs[g]);
    params[g] = codecs[g].word;
  }
  RowCodes<kDim, kGroups>(word, codecs, codes);
  return finite;
}

// Writes the parameter words of tokens row + 8 p: lanes 0 and 1 of a quad those of two tokens each.
template <int kDim, int kGroups>
__device__ __forceinline__ void StoreParams(const TileTask& task, int lane,
                                            const uint32_t (&params)[4][kGroups]) {
  const int pair = lane & 3;
  if (pair >= 2) return;
  const uint32_t token = 32 * task.half + 16 * pair + (lane >> 2);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t offset = task.is_value ? int2::ValueParams(kDim, kGroups, token, g)
                                          : int2::KeyParams(kDim, kGroups, token, g);
    *reinterpret_cast<uint2*>(task.run + offset) =
        pair == 0 ? make_uint2(params[0][g], params[1][g]) : make_uint2(params[2][g], params[3][g]);
  }
}

template <int kDim>
__device__ __forceinline__ void StoreCodes(const TileTask& task, int lane,
                                           const CodeFragment<kDim>& codes) {
  CodePieces<kDim> pieces;
  if (task.is_value) {
    PackValues(codes, lane, &pieces);
  } else {
    PackKeys(codes, lane, &pieces);
  }
#pragma unroll
  for (int i = 0; i < kDim / 64; ++i) {
    const uint32_t offset = task.is_value ? ValuePieceOffset<kDim>(task.half, i, lane)
                                          : KeyPieceOffset<kDim>(task.half, i, lane);
    *reinterpret_cast<uint4*>(task.run + offset) = pieces.piece[i];
  }
}

// Quantizes a tile and writes its part of the run. Bit p of the result: the lane's row p has no
// int2 form. Destroys *rows.
template <int kDim, int kGroups>
__device__ __forceinline__ uint32_t QuantizeTile(const TileTask& task, int lane,
                                                 RowFragment<kDim>* rows) {
  uint32_t extremes[4][kGroups];
  uint32_t largest[4];
  uint32_t bad_rows = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    SanitizeRow(rows->word[p]);
    GroupExtremes<kDim, kGroups>(rows->word[p], extremes[p]);
    largest[p] = LargestMagnitude(extremes[p]);
    if (largest[p] >= kBf16Infinity) bad_rows |= 1u << p;
  }
  const bool clip = task.clip_rank != 0;
  uint32_t thresholds[2] = {};
  if (clip) ClipThresholds<kDim>(*rows, largest, task.clip_rank, thresholds);
  CodeFragment<kDim> codes;
  uint32_t params[4][kGroups];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t threshold = thresholds[p / 2] >> (16 * (p % 2));
    if (!QuantizeRow<kDim, kGroups>(rows->word[p], extremes[p], clip, threshold, codes.word[p],
                                    params[p])) {
      bad_rows |= 1u << p;
    }
  }
  StoreCodes<kDim>(task, lane, codes);
  StoreParams<kDim, kGroups>(task, lane, params);
  return bad_rows;
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_
