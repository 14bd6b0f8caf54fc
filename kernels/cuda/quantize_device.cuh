#ifndef OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_
#define OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_

#include <cstdint>

#include "kernels/cuda/bf16x2.cuh"
#include "kernels/cuda/int2_pack.cuh"
#include "kernels/cuda/row_tile.cuh"

// The codec's rule (kernels/quantize.h) on a tile in registers. All arithmetic that decides a bit
// is correctly rounded: nothing is contracted, and no subnormal is flushed but where it cannot
// decide one, which is said there.
//
// A row of the tile is spread over the four lanes of a quad; what is one for a row, the lanes that
// own it work out for all.
namespace okv::cuda {

inline constexpr uint32_t kBf16Infinity = 0x7f80;
inline constexpr uint32_t kBf16SmallestNormal = 0x0080;

// Subnormals and -0 become +0.
__device__ __forceinline__ uint32_t Sanitize2(uint32_t word) {
  if ((word & 0x7f80u) == 0) word &= 0xffff0000u;
  if ((word & 0x7f800000u) == 0) word &= 0x0000ffffu;
  return word;
}

// A lane owns one row of its quad's: lane `pair` row pair at d 64, elsewhere two lanes row pair
// / 2.
template <int kDim>
inline constexpr int kRowLanes = 4 / RowFragment<kDim>::kRows;
template <int kDim>
__device__ __forceinline__ int OwnRow(int lane) {
  return (lane & 3) / kRowLanes<kDim>;
}
// What the owner of row p has.
template <int kDim, typename T>
__device__ __forceinline__ T FromOwner(T value, int p, int lane) {
  return __shfl_sync(kAllLanes, value, (lane & ~3) + p * kRowLanes<kDim>);
}

// Of two words the lane keeps the one of its side, and gets the partner's of the same side.
struct Exchanged {
  uint32_t kept;
  uint32_t received;
};
__device__ __forceinline__ Exchanged Exchange(uint32_t low, uint32_t high, int mask, int lane) {
  const bool is_high = (lane & mask) != 0;
  return {is_high ? high : low, __shfl_xor_sync(kAllLanes, is_high ? low : high, mask)};
}

// All that the quad has of the lane's own row, or half of it where two lanes share a row: kRows
// times as many words. `words` are the lane's own, of each row.
template <int kDim, int kWords>
__device__ __forceinline__ void GatherOwnRow(
    const uint32_t (&words)[RowFragment<kDim>::kRows][kWords], int lane,
    uint32_t (&own)[RowFragment<kDim>::kRows * kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (kDim == 64) {
      const Exchanged even = Exchange(words[0][w], words[2][w], 2, lane);
      const Exchanged odd = Exchange(words[1][w], words[3][w], 2, lane);
      const Exchanged kept = Exchange(even.kept, odd.kept, 1, lane);
      const Exchanged received = Exchange(even.received, odd.received, 1, lane);
      own[4 * w] = kept.kept;
      own[4 * w + 1] = kept.received;
      own[4 * w + 2] = received.kept;
      own[4 * w + 3] = received.received;
    } else {
      const Exchanged both = Exchange(words[0][w], words[1][w], 2, lane);
      own[2 * w] = both.kept;
      own[2 * w + 1] = both.received;
    }
  }
}

// Largest element (high half) and minus the smallest (low half) of each group of the own row,
// subnormals as they are. NaN in a group makes both NaN.
template <int kDim, int kGroups>
__device__ __forceinline__ void OwnExtremes(const RowFragment<kDim>& rows, int lane,
                                            uint32_t (&extremes)[kGroups]) {
  constexpr int kRows = RowFragment<kDim>::kRows;
  constexpr int kGroupWords = kDim / 8 / kGroups;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    uint32_t both[kRows][1];
#pragma unroll
    for (int p = 0; p < kRows; ++p) {
      uint32_t low = rows.word[p][g * kGroupWords];
      uint32_t high = low;
#pragma unroll
      for (int u = 1; u < kGroupWords; ++u) {
        low = Min2(low, rows.word[p][g * kGroupWords + u]);
        high = Max2(high, rows.word[p][g * kGroupWords + u]);
      }
      const uint32_t minus_low = low ^ 0x80008000u;
      both[p][0] = Max2(__byte_perm(minus_low, high, 0x5410), __byte_perm(minus_low, high, 0x7632));
    }
    uint32_t own[kRows];
    GatherOwnRow<kDim, 1>(both, lane, own);
    extremes[g] = own[0];
#pragma unroll
    for (int i = 1; i < kRows; ++i) extremes[g] = Max2(extremes[g], own[i]);
    if (kRowLanes<kDim> == 2) {
      extremes[g] = Max2(extremes[g], __shfl_xor_sync(kAllLanes, extremes[g], 1));
    }
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
template <int kWords>
__device__ __forceinline__ uint32_t CountBelow(const uint32_t (&a)[kWords],
                                               const uint32_t (&b)[kWords], uint32_t bounds) {
  const uint32_t bound_a = LowTwice(bounds);
  const uint32_t bound_b = HighTwice(bounds);
  uint32_t sum_a = 0;
  uint32_t sum_b = 0;
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    sum_a = Add2(sum_a, MagnitudeBelow2(a[u], bound_a));
    sum_b = Add2(sum_b, MagnitudeBelow2(b[u], bound_b));
  }
  uint32_t sum = Add2(__byte_perm(sum_a, sum_b, 0x5410), __byte_perm(sum_a, sum_b, 0x7632));
  sum = Add2(sum, __shfl_xor_sync(kAllLanes, sum, 1));
  return Add2(sum, __shfl_xor_sync(kAllLanes, sum, 2));
}

// Raises all rows' thresholds, rows 2 i and 2 i + 1 in thresholds[i], by each of the bits, from the
// highest down, with which at most `rank` magnitudes are below.
template <int kDim>
__device__ __forceinline__ void RaiseThresholds(const RowFragment<kDim>& rows, uint32_t rank,
                                                uint32_t (&thresholds)[kTileParts<kDim>]) {
  const uint32_t rank_twice = LowTwice(Bf16OfCount(rank));
  uint32_t bit = 0x40004000u;
#pragma unroll 1
  for (; (bit & 0xffffu) != 0; bit = bit >> 1 & 0x7fff7fffu) {
#pragma unroll
    for (int i = 0; i < kTileParts<kDim>; ++i) {
      const uint32_t count =
          CountBelow(rows.word[2 * i], rows.word[2 * i + 1], thresholds[i] + bit);
      thresholds[i] += AtMostMask2(count, rank_twice) & bit;
    }
  }
}

// Bits of a where the mask has ones, of b elsewhere. (From C++ it takes two operations.)
__device__ __forceinline__ uint32_t Merge(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

// Exchanges bits so that word b holds bit b of all 32 bytes of the words; a byte's bits come from
// bytes of its own place.
__device__ __forceinline__ void BytesToPlanes(uint32_t (&word)[8]) {
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
    const uint32_t low = distance == 4 ? 0x0f0f0f0fu : distance == 2 ? 0x33333333u : 0x55555555u;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t a = word[i];
      const uint32_t b = word[i + distance];
      word[i] = Merge(a, b << distance, low);
      word[i + distance] = Merge(a >> distance, b, low);
    }
  }
}

// Bit planes of the elements' distances above the base of their row, 0 for what is below it; of the
// own row's elements that GatherOwnRow gives.
template <int kDim>
struct RowPlanes {
  static constexpr int kRows = RowFragment<kDim>::kRows;
  static constexpr int kRowBytes = kDim / 16;            // Words of a row's distances, a byte each
  static constexpr int kPlanes = kRows * kRowBytes / 8;  // Words of a plane
  uint32_t word[kPlanes][8];

  __device__ __forceinline__ RowPlanes(const RowFragment<kDim>& rows,
                                       const uint32_t (&bases)[kRows], int lane) {
    uint32_t bytes[kRows][kRowBytes];
#pragma unroll
    for (int p = 0; p < kRows; ++p) {
      const uint32_t minus_base = LowTwice(0u - bases[p]);
      const auto above = [&](uint32_t y) { return __viaddmax_s16x2(Magnitude2(y), minus_base, 0); };
#pragma unroll
      for (int i = 0; i < kRowBytes; ++i) {
        // A byte each; by the multiplier, where __byte_perm() takes the ALU.
        bytes[p][i] = above(rows.word[p][2 * i + 1]) * 256 + above(rows.word[p][2 * i]);
      }
    }
    uint32_t own[kRows * kRowBytes];
    GatherOwnRow<kDim, kRowBytes>(bytes, lane, own);
#pragma unroll
    for (int w = 0; w < kPlanes; ++w) {
#pragma unroll
      for (int i = 0; i < 8; ++i) word[w][i] = own[8 * w + i];
      BytesToPlanes(word[w]);
    }
  }

  // The number-th largest distance, two bits a step from the highest down: the digit is the largest
  // with which, or with a larger one, there are at least so many of the elements that are left.
  // Those that have it stay; those above it are looked for no more.
  __device__ __forceinline__ uint32_t Select(uint32_t number) const {
    uint32_t left[kPlanes];
#pragma unroll
    for (int w = 0; w < kPlanes; ++w) left[w] = 0xffffffffu;
    uint32_t result = 0;
#pragma unroll
    for (int b = 7; b > 0; b -= 2) {
      uint32_t from3 = 0;
      uint32_t from2 = 0;
      uint32_t from1 = 0;
#pragma unroll
      for (int w = 0; w < kPlanes; ++w) {
        from3 += __popc(left[w] & word[w][b] & word[w][b - 1]);
        from2 += __popc(left[w] & word[w][b]);
        from1 += __popc(left[w] & (word[w][b] | word[w][b - 1]));
      }
      if (kRowLanes<kDim> == 2) {
        from3 += __shfl_xor_sync(kAllLanes, from3, 1);
        from2 += __shfl_xor_sync(kAllLanes, from2, 1);
        from1 += __shfl_xor_sync(kAllLanes, from1, 1);
      }
      const bool high = from2 >= number;
      const bool low = (high ? from3 : from1) >= number;
      const uint32_t above_low = high ? 0 : from2;
      const uint32_t above_high = high ? from3 : from1;
      number -= low ? above_low : above_high;
      const uint32_t flip_high = high ? 0 : 0xffffffffu;
      const uint32_t flip_low = low ? 0 : 0xffffffffu;
#pragma unroll
      for (int w = 0; w < kPlanes; ++w) {
        left[w] &= (word[w][b] ^ flip_high) & (word[w][b - 1] ^ flip_low);
      }
      if (high) result |= 1u << b;
      if (low) result |= 1u << (b - 1);
    }
    return result;
  }
};

// The rank-th smallest magnitude of the own row, counted from 0: the largest T with at most `rank`
// magnitudes below it. `largest` is that row's maximum.
//
// Usual ranks lie within a factor of 4 of the maximum, 255 steps of bf16 below it: 8 bits of the
// distance above that, turned into bit planes, hold all that matters. Where one of the warp's rows
// has its threshold further down, T is built bit by bit of the bf16's own bits. No candidate is
// NaN: in finite rows all magnitudes are below infinity, which is therefore refused, and the
// numbers above it are not reached. A subnormal T becomes 0: the rule takes subnormals for 0, and T
// keeps their order with others. REQUIRES: rank < kDim. Rows with NaN or Inf get some T.
template <int kDim>
__device__ __forceinline__ uint32_t ClipThreshold(const RowFragment<kDim>& rows, uint32_t largest,
                                                  uint32_t rank, int lane) {
  constexpr int kRows = RowFragment<kDim>::kRows;
  const uint32_t base = max(largest, 255u) - 255;
  uint32_t bases[kRows];
#pragma unroll
  for (int p = 0; p < kRows; ++p) bases[p] = FromOwner<kDim>(base, p, lane);
  const uint32_t above = RowPlanes<kDim>(rows, bases, lane).Select(kDim - rank);
  uint32_t threshold = base + above;
  if (!__all_sync(kAllLanes, above != 0 || base == 0)) {
    uint32_t thresholds[kRows / 2] = {};
    RaiseThresholds<kDim>(rows, rank, thresholds);
    const int own = OwnRow<kDim>(lane);
    threshold = own >= 2 ? thresholds[kRows / 2 - 1] : thresholds[0];
    threshold = own % 2 == 0 ? threshold & 0xffffu : threshold >> 16;
  }
  // Below the smallest normal there are only zeros; a comparison may take a subnormal bound for 0.
  return threshold < kBf16SmallestNormal ? 0 : threshold;
}

// Codes are made as numbers of FP8 E4M3: 0, 1, 2 and 3 times this are its smallest ones, the bytes
// 0 to 3. A power of two, so that products are rounded as they would be without it.
inline constexpr float kCodeUnit = 0x1p-9f;

struct GroupCodec {
  uint32_t word;     // Low half scale, high half offset
  float reciprocal;  // Times kCodeUnit, of a scale in [2^-126, kLargeScale)
};

// From here down a subnormal element may have another code than 0 has: its difference from the
// offset, or the offset itself, is no longer far below a level.
inline constexpr uint32_t kSmallScale = 0x1000;  // 2^-95
// Above 2^117 the reciprocal times kCodeUnit would be subnormal. From here on groups are divided by
// kShrink and the reciprocal is multiplied by it. What becomes subnormal by that are elements
// below 2^-106, too small beside the scale to decide a code.
inline constexpr uint32_t kLargeScale = 0x7180;  // 2^100
inline constexpr float kShrink = 0x1p20f;

// x / 3, correctly rounded: without the branch for extreme x that __fdiv_rn() has. The remainder is
// a multiple of the smallest float, so it is exact for subnormal quotients too; infinite x gives
// NaN.
__device__ __forceinline__ float Third(float x) {
  constexpr float kThird = 0x1.555556p-2f;
  const float quotient = __fmul_rn(x, kThird);
  return __fmaf_rn(__fmaf_rn(quotient, -3.0f, x), kThird, quotient);
}

// kCodeUnit over a normal scale below kLargeScale, given by its bits; some number for others. What
// __frcp_rn() times the unit is, without the branch for extremes.
__device__ __forceinline__ float Reciprocal(uint32_t scale) {
  const float mantissa = __uint_as_float((scale & 0x7fu) << 16 | 0x3f800000u);
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(mantissa));
  const float rounded = __fmaf_rn(estimate, __fmaf_rn(-mantissa, estimate, 1.0f), estimate);
  // Less the scale's exponent and the unit's 9.
  return __uint_as_float(__float_as_uint(rounded) + ((127u - 9 - (scale >> 7)) << 23));
}

// False when max - min or the scale is not finite.
__device__ __forceinline__ bool MakeGroupCodec(uint32_t extremes, GroupCodec* codec) {
  uint32_t low = extremes & 0xffffu;
  low = (low & 0x7f80u) == 0 ? 0 : low ^ 0x8000u;
  float range;  // Subnormals are taken for 0; one that comes out has no scale.
  asm("sub.rn.ftz.f32 %0, %1, %2;"
      : "=f"(range)
      : "f"(HighBf16(extremes)), "f"(__uint_as_float(low << 16)));
  uint32_t scale = PackBf16(Third(range), 0.0f) & 0x7fffu;
  const bool finite = scale < kBf16Infinity;
  if (scale < kBf16SmallestNormal) scale = 0;
  codec->word = scale | low << 16;
  codec->reciprocal = Reciprocal(scale);
  return finite;
}

// The level of an element, times kCodeUnit: 0 to 3.02 of it, since y is neither below the offset
// nor above the maximum, and the scale is within 2^-8 of a third of the range; so nothing has to be
// clamped. It must not be -0 either, whose byte is 0x80: beside an offset of 0, y is no -0 and no
// subnormal.
__device__ __forceinline__ float Level(float y, const GroupCodec& codec) {
  return __fmul_rn(__fsub_rn(y, HighBf16(codec.word)), codec.reciprocal);
}
// The codes of two words' four elements, one a byte: levels rounded to integers, half to even.
__device__ __forceinline__ uint32_t FourCodes(uint32_t a, uint32_t b, const GroupCodec& codec) {
  const float level[4] = {Level(LowBf16(a), codec), Level(HighBf16(a), codec),
                          Level(LowBf16(b), codec), Level(HighBf16(b), codec)};
  uint32_t codes;
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(codes)
      : "f"(level[0]), "f"(level[1]), "f"(level[2]), "f"(level[3]));
#else
  // Added to this, a number is rounded to a multiple of the unit, in the lowest bits.
  constexpr float kRound = 1.5f * 0x1p23f * kCodeUnit;
  const auto bits = [&](int i) { return __float_as_uint(__fadd_rn(level[i], kRound)); };
  codes = __byte_perm(__byte_perm(bits(0), bits(1), 0x0040), __byte_perm(bits(2), bits(3), 0x0040),
                      0x5410);
#endif
  return codes;
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
    codes[v] = 0;
#pragma unroll
    for (int j = 3; j >= 0; --j) {
      const int u = 2 * v + kQuarterWords * j;
      codes[v] = codes[v] * 4 + FourCodes(word[u], word[u + 1], codecs[u / kGroupWords]);
    }
  }
}

// Where and how a tile is quantized.
struct TileTask {
  uint8_t* run;
  int tile;  // Its index in the block
  bool is_value;
  uint32_t clip_rank;  // 0: off
};

// The codecs of all rows of a tile, each made by the lanes that own the row. `extremes` are the own
// row's, clipped. False when the own row has no int2 form.
template <int kDim, int kGroups>
__device__ __forceinline__ bool MakeCodecs(
    const uint32_t (&extremes)[kGroups], int lane,
    GroupCodec (&codecs)[RowFragment<kDim>::kRows][kGroups]) {
  bool finite = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    GroupCodec codec;
    finite &= MakeGroupCodec(extremes[g], &codec);
#pragma unroll
    for (int p = 0; p < RowFragment<kDim>::kRows; ++p) {
      codecs[p][g].word = FromOwner<kDim>(codec.word, p, lane);
      codecs[p][g].reciprocal = FromOwner<kDim>(codec.reciprocal, p, lane);
    }
  }
  return finite;
}

// Clips one row and makes its codes.
template <int kDim, int kGroups>
__device__ __forceinline__ void QuantizeRow(uint32_t (&word)[kDim / 8],
                                            const GroupCodec (&codecs)[kGroups], bool clip,
                                            uint32_t bound, uint32_t (&codes)[kDim / 64]) {
  constexpr int kGroupWords = kDim / 8 / kGroups;
  if (clip) {
#pragma unroll
    for (int u = 0; u < kDim / 8; ++u) word[u] = Clamp2(word[u], bound);
  }
  GroupCodec used[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    used[g] = codecs[g];
    const uint32_t scale = codecs[g].word & 0xffffu;
    const bool has_offset = codecs[g].word > 0xffffu;  // Level() needs it
    if (has_offset && scale - kSmallScale < kLargeScale - kSmallScale) continue;
#pragma unroll
    for (int u = g * kGroupWords; u < (g + 1) * kGroupWords; ++u) word[u] = Sanitize2(word[u]);
    if (scale == 0) used[g].reciprocal = 0;  // All codes come out 0.
    if (scale < kLargeScale) continue;
    used[g].reciprocal = __fmul_rn(__frcp_rn(__uint_as_float(scale << 16)), kShrink * kCodeUnit);
    used[g].word = Divide2(used[g].word, kShrink);
#pragma unroll
    for (int u = g * kGroupWords; u < (g + 1) * kGroupWords; ++u) {
      word[u] = Divide2(word[u], kShrink);
    }
  }
  RowCodes<kDim, kGroups>(word, used, codes);
}

// Writes the parameter words: 8 bytes have those of two tokens, 8 apart. The lanes of a quad take
// turns.
template <int kDim, int kGroups>
__device__ __forceinline__ void StoreParams(
    const TileTask& task, int lane, const GroupCodec (&codecs)[2 * kTileParts<kDim>][kGroups]) {
#pragma unroll
  for (int m = 0; m < kTileParts<kDim>; ++m) {
    const uint32_t token = kTileTokens<kDim> * task.tile + 16 * m + (lane >> 2);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if ((lane & 3) != (m * kGroups + g) % 4) continue;
      const uint32_t offset = task.is_value ? int2::ValueParams(kDim, kGroups, token, g)
                                            : int2::KeyParams(kDim, kGroups, token, g);
      *reinterpret_cast<uint2*>(task.run + offset) =
          make_uint2(codecs[2 * m][g].word, codecs[2 * m + 1][g].word);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void StoreCodes(const TileTask& task, int lane,
                                           const CodeFragment<kDim>& codes) {
  CodePieces<kDim> pieces;
  if (task.is_value) {
    PackValues<kDim>(codes, lane, &pieces);
  } else {
    PackKeys<kDim>(codes, lane, &pieces);
  }
  WritePieces<kDim>(task.run, task.is_value, task.tile, lane, pieces);
}

// Quantizes a tile and, where `task` has a run, calls before_write() and writes its part of it.
// False when the lane's own row has no int2 form. Destroys *rows.
template <int kDim, int kGroups, typename BeforeWrite>
__device__ __forceinline__ bool QuantizeTile(const TileTask& task, int lane,
                                             BeforeWrite before_write, RowFragment<kDim>* rows) {
  constexpr int kRows = RowFragment<kDim>::kRows;
  uint32_t extremes[kGroups];
  OwnExtremes<kDim, kGroups>(*rows, lane, extremes);
  const uint32_t largest = LargestMagnitude(extremes);
  bool good = largest < kBf16Infinity;
  const bool clip = task.clip_rank != 0;
  uint32_t bound = 0;
  if (clip) {
    bound = LowTwice(ClipThreshold<kDim>(*rows, largest, task.clip_rank, lane));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) extremes[g] = Clamp2(extremes[g], bound);
  }
  GroupCodec codecs[kRows][kGroups];
  good &= MakeCodecs<kDim, kGroups>(extremes, lane, codecs);
  CodeFragment<kDim> codes;
#pragma unroll
  for (int p = 0; p < kRows; ++p) {
    QuantizeRow<kDim, kGroups>(rows->word[p], codecs[p], clip, FromOwner<kDim>(bound, p, lane),
                               codes.word[p]);
  }
  if (task.run == nullptr) return true;
  before_write();
  StoreCodes<kDim>(task, lane, codes);
  StoreParams<kDim, kGroups>(task, lane, codecs);
  return good;
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_QUANTIZE_DEVICE_CUH_
