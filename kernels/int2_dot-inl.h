// Integer products with the codes of int2 runs, compiled once per target (see simd-inl.h): a run's
// tiles to panels of code bytes, and sums of 16-bit weights times codes over a panel.
#if defined(OKV_KERNELS_INT2_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_INT2_DOT_INL_H_
#undef OKV_KERNELS_INT2_DOT_INL_H_
#else
#define OKV_KERNELS_INT2_DOT_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/int2_tiles-inl.h"
#include "kernels/simd-inl.h"
#include "proto/int2_layout.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

// A panel holds codes as bytes 0..3 in vectors of 16 lanes by 4 bytes, in the order in which the
// products read them:
//   keys    [4][d / 4][16][4]: lanes are tokens 16 i to 16 i + 15, bytes channels 4 k to 4 k + 3
//   values  [d / 16][16][16][4]: lanes are channels 16 n to 16 n + 15; bytes of quad 4 i + c are
//           tokens 16 i + {2 c, 2 c + 8, 2 c + 1, 2 c + 9}, the order of the run's words
// 64 d bytes: both panels stay in L1 while the rows pass over them.
constexpr size_t kPanelVector = 64;

// Where a tile's vectors go. Its transposition has eight, k = 2 c + (upper words), of four quarters
// j each: vector k of quarter j goes to k / 2 + (k % 2) * upper_stride + j * quarter_stride.
struct TilePanel {
  uint8_t* base;
  size_t upper_stride;  // In vectors.
  size_t quarter_stride;

  uint8_t* at(size_t k, size_t j) const {
    return base + (k / 2 + k % 2 * upper_stride + j * quarter_stride) * kPanelVector;
  }
};

// Writes a tile of 512 bytes, [8 rows][4 c][upper][lower] words, to its places: vector k has words
// [lower][8 rows] of c and `upper`.
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3
inline void ExpandTile(const uint8_t* tile, const TilePanel& panel) {
  // Pairs of rows, then c 0, 1 or 2, 3 of four rows, then one c of all eight: 24 shuffles.
  const __m512i gather_low =
      _mm512_setr_epi32(0, 2, 16, 18, 1, 3, 17, 19, 4, 6, 20, 22, 5, 7, 21, 23);
  const __m512i gather_high = _mm512_add_epi32(gather_low, _mm512_set1_epi32(8));
  const __m512i join_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i join_high = _mm512_add_epi64(join_low, _mm512_set1_epi64(4));
  __m512i pairs[2][4];
#pragma GCC unroll 4
  for (size_t i = 0; i < 4; ++i) {
    const __m512i a = _mm512_loadu_si512(tile + (2 * i) * kPanelVector);
    const __m512i b = _mm512_loadu_si512(tile + (2 * i + 1) * kPanelVector);
    pairs[0][i] = _mm512_unpacklo_epi64(a, b);
    pairs[1][i] = _mm512_unpackhi_epi64(a, b);
  }
  __m512i vectors[8];
#pragma GCC unroll 2
  for (size_t upper = 0; upper < 2; ++upper) {
    const __m512i* const p = pairs[upper];
    const __m512i c01_rows0 = _mm512_permutex2var_epi32(p[0], gather_low, p[1]);
    const __m512i c23_rows0 = _mm512_permutex2var_epi32(p[0], gather_high, p[1]);
    const __m512i c01_rows4 = _mm512_permutex2var_epi32(p[2], gather_low, p[3]);
    const __m512i c23_rows4 = _mm512_permutex2var_epi32(p[2], gather_high, p[3]);
    vectors[0 + upper] = _mm512_permutex2var_epi64(c01_rows0, join_low, c01_rows4);
    vectors[2 + upper] = _mm512_permutex2var_epi64(c01_rows0, join_high, c01_rows4);
    vectors[4 + upper] = _mm512_permutex2var_epi64(c23_rows0, join_low, c23_rows4);
    vectors[6 + upper] = _mm512_permutex2var_epi64(c23_rows0, join_high, c23_rows4);
  }
  const __m512i mask = _mm512_set1_epi32(0x03030303);
#pragma GCC unroll 8
  for (size_t k = 0; k < 8; ++k) {
    const __m512i v = vectors[k];
    _mm512_storeu_si512(panel.at(k, 0), _mm512_and_si512(v, mask));
    _mm512_storeu_si512(panel.at(k, 1), _mm512_and_si512(_mm512_srli_epi32(v, 2), mask));
    _mm512_storeu_si512(panel.at(k, 2), _mm512_and_si512(_mm512_srli_epi32(v, 4), mask));
    _mm512_storeu_si512(panel.at(k, 3), _mm512_and_si512(_mm512_srli_epi32(v, 6), mask));
  }
}
#else
// Vectors of 16 bytes: four rows of one c at a time, as TransposeWords does.
inline void ExpandTile(const uint8_t* tile, const TilePanel& panel) {
  const hn::FixedTag<uint8_t, 16> d8;
  const hn::FixedTag<uint32_t, 4> d32;
  const auto mask = hn::Set(d32, 0x03030303u);
  for (size_t c = 0; c < 4; ++c) {
    for (size_t half = 0; half < 2; ++half) {  // Rows 0 to 3 or 4 to 7.
      WordTile words;
      for (size_t i = 0; i < 4; ++i)
        words.words[i] = hn::LoadU(d8, tile + ((half * 4 + i) * 4 + c) * 16);
      TransposeWords(&words);
      for (size_t w = 0; w < 4; ++w) {
        const auto bits = hn::BitCast(d32, words.words[w]);
        const size_t k = 2 * c + w / 2;
        const size_t at = w % 2 * 32 + half * 16;
        const auto store = [&](size_t j, auto codes) HWY_ATTR {
          hn::StoreU(hn::BitCast(d8, hn::And(codes, mask)), d8, panel.at(k, j) + at);
        };
        store(0, bits);
        store(1, hn::ShiftRight<2>(bits));
        store(2, hn::ShiftRight<4>(bits));
        store(3, hn::ShiftRight<6>(bits));
      }
    }
  }
}
#endif

inline void ExpandKeys(const uint8_t* codes, size_t dim, uint8_t* panel) {
  const size_t quads = dim / 4;
  for (size_t tile = 0; tile < dim / 32; ++tile, codes += int2::kTileBytes) {
    if (dim == 64) {
      ExpandTile(codes, {.base = panel + 2 * tile * quads * kPanelVector,
                         .upper_stride = quads,
                         .quarter_stride = quads / 4});
    } else {
      const size_t halves = dim / 128;
      const size_t first = tile / halves * quads + tile % halves * 8;
      ExpandTile(
          codes,
          {.base = panel + first * kPanelVector, .upper_stride = 4, .quarter_stride = quads / 4});
    }
  }
}

inline void ExpandValues(const uint8_t* codes, size_t dim, uint8_t* panel) {
  const size_t byte_tiles = dim / 64;
  for (size_t tile = 0; tile < dim / 32; ++tile, codes += int2::kTileBytes) {
    const size_t first = tile % byte_tiles * 16 + tile / byte_tiles * 8;
    ExpandTile(codes, {.base = panel + first * kPanelVector,
                       .upper_stride = 4,
                       .quarter_stride = byte_tiles * 16});
  }
}

// out[row][16 v + lane] = sum over quads k and bytes y of weight[row][4 k + y] times
// code[v][k][lane][y]. Integers: any order of the sum gives the same bits. Functions have the type
// of a weight's bytes, W: int8_t for queries, uint8_t for probabilities.
struct CodeProduct {
  const uint8_t* panel;
  size_t vector_stride;  // Bytes from a vector of lanes to the next.
  size_t vectors_count;  // Even.
  size_t quads_count;
  const uint8_t* weights;  // Of a row: its high bytes, and low_offset behind them its low bytes.
  size_t weights_stride;   // Bytes from one row to the next.
  size_t low_offset;
  int32_t* out;
  size_t out_stride;  // From one row to the next.
};

HWY_INLINE int32_t LoadQuad(const uint8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, 4);
  return quad;
}

#if HWY_TARGET == HWY_AVX3_DL

// Four products a lane. Codes are at most 3: they can be the unsigned operand or the signed one.
// Not the intrinsic: g++ 12 then copies the sums around, which takes 1.5 times as long; and
// Highway 1.0 leaves VNNI out of the features of this target, although its run-time check asks for
// it.
template <typename W>
HWY_INLINE __m512i AddProducts(__m512i sums, __m512i codes, __m512i weights) {
  if constexpr (std::is_same_v<W, int8_t>) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(weights));
  } else {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(codes));
  }
  return sums;
}

// Rows x vectors x 2 sums: 6 x 2 x 2 of the 32 registers, and never fewer than 8, so that the 5
// cycles of an instruction are covered.
template <typename W, size_t kRows, size_t kVectors>
HWY_NOINLINE void MultiplyCodeRows(const CodeProduct& p) {
  for (size_t v = 0; v < p.vectors_count; v += kVectors) {
    __m512i high[kRows][kVectors];
    __m512i low[kRows][kVectors];
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (size_t i = 0; i < kVectors; ++i) high[r][i] = low[r][i] = _mm512_setzero_si512();
    }
    const uint8_t* codes = p.panel + v * p.vector_stride;
    const uint8_t* weights = p.weights;
    for (size_t k = 0; k < p.quads_count; ++k, codes += kPanelVector, weights += 4) {
      __m512i code[kVectors];
#pragma GCC unroll 8
      for (size_t i = 0; i < kVectors; ++i)
        code[i] = _mm512_loadu_si512(codes + i * p.vector_stride);
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        const uint8_t* const row = weights + r * p.weights_stride;
        const __m512i w_high = _mm512_set1_epi32(LoadQuad(row));
        const __m512i w_low = _mm512_set1_epi32(LoadQuad(row + p.low_offset));
#pragma GCC unroll 8
        for (size_t i = 0; i < kVectors; ++i) {
          high[r][i] = AddProducts<W>(high[r][i], code[i], w_high);
          low[r][i] = AddProducts<W>(low[r][i], code[i], w_low);
        }
      }
    }
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (size_t i = 0; i < kVectors; ++i) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][i], 8), low[r][i]);
        _mm512_storeu_si512(p.out + r * p.out_stride + (v + i) * 16, sum);
      }
    }
  }
}

constexpr size_t kCodeRows = 6;
template <typename W>
HWY_INLINE void MultiplyCodeBlock(size_t rows_count, const CodeProduct& p) {
  const bool wide = p.vectors_count % 4 == 0;
  switch (rows_count) {
    case 1:
      return wide ? MultiplyCodeRows<W, 1, 4>(p) : MultiplyCodeRows<W, 1, 2>(p);
    case 2:
      return wide ? MultiplyCodeRows<W, 2, 4>(p) : MultiplyCodeRows<W, 2, 2>(p);
    case 3:
      return MultiplyCodeRows<W, 3, 2>(p);
    case 4:
      return MultiplyCodeRows<W, 4, 2>(p);
    case 5:
      return MultiplyCodeRows<W, 5, 2>(p);
    default:
      return MultiplyCodeRows<W, 6, 2>(p);
  }
}

#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

#if HWY_TARGET == HWY_AVX2
using CodeVector = __m256i;
HWY_INLINE CodeVector LoadCodes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
HWY_INLINE CodeVector BroadcastQuad(const uint8_t* from) {
  return _mm256_set1_epi32(LoadQuad(from));
}
HWY_INLINE CodeVector ZeroCodes() { return _mm256_setzero_si256(); }
// Pairs of products of unsigned and signed bytes, to 16 bits.
HWY_INLINE CodeVector MulAddBytes(CodeVector sum, CodeVector bytes, CodeVector signed_bytes) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(bytes, signed_bytes));
}
HWY_INLINE CodeVector WidenSums(CodeVector high, CodeVector low) {
  const __m256i ones = _mm256_set1_epi16(1);
  return _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(high, ones), 8),
                          _mm256_madd_epi16(low, ones));
}
HWY_INLINE void AddToSums(CodeVector sums, bool first, int32_t* out) {
  __m256i* const at = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(at, first ? sums : _mm256_add_epi32(sums, _mm256_loadu_si256(at)));
}
#else
using CodeVector = __m512i;
HWY_INLINE CodeVector LoadCodes(const uint8_t* from) { return _mm512_loadu_si512(from); }
HWY_INLINE CodeVector BroadcastQuad(const uint8_t* from) {
  return _mm512_set1_epi32(LoadQuad(from));
}
HWY_INLINE CodeVector ZeroCodes() { return _mm512_setzero_si512(); }
// Pairs of products of unsigned and signed bytes, to 16 bits.
HWY_INLINE CodeVector MulAddBytes(CodeVector sum, CodeVector bytes, CodeVector signed_bytes) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(bytes, signed_bytes));
}
HWY_INLINE CodeVector WidenSums(CodeVector high, CodeVector low) {
  const __m512i ones = _mm512_set1_epi16(1);
  return _mm512_add_epi32(_mm512_slli_epi32(_mm512_madd_epi16(high, ones), 8),
                          _mm512_madd_epi16(low, ones));
}
HWY_INLINE void AddToSums(CodeVector sums, bool first, int32_t* out) {
  _mm512_storeu_si512(out, first ? sums : _mm512_add_epi32(sums, _mm512_loadu_si512(out)));
}
#endif

// Codes are at most 3: they can be the unsigned operand or the signed one.
template <typename W>
HWY_INLINE CodeVector AddProducts(CodeVector sums, CodeVector codes, CodeVector weights) {
  if constexpr (std::is_same_v<W, int8_t>) return MulAddBytes(sums, codes, weights);
  return MulAddBytes(sums, weights, codes);
}

constexpr size_t kCodeVectorBytes = sizeof(CodeVector);
constexpr size_t kCodeParts = kPanelVector / kCodeVectorBytes;
// A pair of products is at most 2 * 3 * 255 = 1,530: 16 of them fit in 16 bits.
constexpr size_t kQuadsMax = 16;

// 16-bit sums, widened every 16 quads. 2 rows x 2 vectors x 2 sums of AVX2's 16 registers.
template <typename W, size_t kRows>
HWY_NOINLINE void MultiplyCodeRows(const CodeProduct& p) {
  constexpr size_t kVectors = 2;
  for (size_t v = 0; v < p.vectors_count * kCodeParts; v += kVectors) {
    const uint8_t* codes[kVectors];
    for (size_t i = 0; i < kVectors; ++i) {
      codes[i] = p.panel + (v + i) / kCodeParts * p.vector_stride +
                 (v + i) % kCodeParts * kCodeVectorBytes;
    }
    for (size_t begin = 0; begin < p.quads_count; begin += kQuadsMax) {
      const size_t end = std::min(begin + kQuadsMax, p.quads_count);
      CodeVector high[kRows][kVectors];
      CodeVector low[kRows][kVectors];
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t i = 0; i < kVectors; ++i) high[r][i] = low[r][i] = ZeroCodes();
      }
      for (size_t k = begin; k < end; ++k) {
        const CodeVector code0 = LoadCodes(codes[0] + k * kPanelVector);
        const CodeVector code1 = LoadCodes(codes[1] + k * kPanelVector);
#pragma GCC unroll 8
        for (size_t r = 0; r < kRows; ++r) {
          const uint8_t* const row = p.weights + r * p.weights_stride + k * 4;
          const CodeVector w_high = BroadcastQuad(row);
          high[r][0] = AddProducts<W>(high[r][0], code0, w_high);
          high[r][1] = AddProducts<W>(high[r][1], code1, w_high);
          const CodeVector w_low = BroadcastQuad(row + p.low_offset);
          low[r][0] = AddProducts<W>(low[r][0], code0, w_low);
          low[r][1] = AddProducts<W>(low[r][1], code1, w_low);
        }
      }
#pragma GCC unroll 8
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t i = 0; i < kVectors; ++i) {
          AddToSums(WidenSums(high[r][i], low[r][i]), begin == 0,
                    p.out + r * p.out_stride + (v + i) * (kCodeVectorBytes / 4));
        }
      }
    }
  }
}

constexpr size_t kCodeRows = HWY_TARGET == HWY_AVX2 ? 2 : 4;
template <typename W>
HWY_INLINE void MultiplyCodeBlock(size_t rows_count, const CodeProduct& p) {
  if (rows_count == 1) return MultiplyCodeRows<W, 1>(p);
  if (rows_count == 2) return MultiplyCodeRows<W, 2>(p);
  if constexpr (kCodeRows > 2) {
    if (rows_count == 3) return MultiplyCodeRows<W, 3>(p);
    return MultiplyCodeRows<W, 4>(p);
  }
}

#else

// Without instructions for bytes: lanes of 32 bits, one code of a quad at a time.
constexpr size_t kCodeRows = 1;
template <typename W>
HWY_INLINE void MultiplyCodeBlock(size_t rows_count, const CodeProduct& p) {
  const DI32 d;
  const auto mask = hn::Set(d, 0xff);
  constexpr size_t kParts = 16 / kLanes;
  for (size_t v = 0; v < p.vectors_count * kParts; ++v) {
    const uint8_t* const codes = p.panel + v / kParts * p.vector_stride + v % kParts * kLanes * 4;
    auto sum = hn::Zero(d);
    for (size_t k = 0; k < p.quads_count; ++k) {
      const auto quad =
          hn::BitCast(d, hn::LoadU(hn::Repartition<uint8_t, DI32>(), codes + k * kPanelVector));
      const auto weight = [&](size_t y) HWY_ATTR {
        const uint8_t* const at = p.weights + k * 4 + y;
        return hn::Set(d, static_cast<W>(at[0]) * 256 + static_cast<W>(at[p.low_offset]));
      };
      sum = hn::Add(sum, hn::Mul(hn::And(quad, mask), weight(0)));
      sum = hn::Add(sum, hn::Mul(hn::And(hn::ShiftRight<8>(quad), mask), weight(1)));
      sum = hn::Add(sum, hn::Mul(hn::And(hn::ShiftRight<16>(quad), mask), weight(2)));
      sum = hn::Add(sum, hn::Mul(hn::ShiftRight<24>(quad), weight(3)));
    }
    hn::StoreU(sum, d, p.out + v * kLanes);
  }
}

#endif

template <typename W>
inline void MultiplyCodes(size_t rows_count, CodeProduct p) {
  while (rows_count > 0) {
    // Even blocks: 8 rows are 4 and 4, not 6 and 2.
    const size_t blocks = (rows_count + kCodeRows - 1) / kCodeRows;
    const size_t count = (rows_count + blocks - 1) / blocks;
    MultiplyCodeBlock<W>(count, p);
    p.weights += count * p.weights_stride;
    p.out += count * p.out_stride;
    rows_count -= count;
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_INT2_DOT_INL_H_
