// The codes of an int2 run (proto/int2_layout.h) from and to token-major rows of packed bytes, [64,
// dim / 4], compiled once per target (see simd-inl.h). Shuffles of 16-byte vectors, on every
// target.
#if defined(OKV_KERNELS_INT2_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OKV_KERNELS_INT2_TILES_INL_H_
#undef OKV_KERNELS_INT2_TILES_INL_H_
#else
#define OKV_KERNELS_INT2_TILES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/simd-inl.h"
#include "proto/int2_layout.h"

#if OKV_TARGET_IS_SIMD
HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

// Transposes 16 x 16 bytes in registers: four perfect shuffles.
struct ByteTile {
  hn::Vec<D16x8> rows[16];
};
HWY_INLINE void TransposeBytes(ByteTile* tile) {
  const D16x8 d;
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    ByteTile next;
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; ++i) {
      next.rows[2 * i] = hn::InterleaveLower(d, tile->rows[i], tile->rows[i + 8]);
      next.rows[2 * i + 1] = hn::InterleaveUpper(d, tile->rows[i], tile->rows[i + 8]);
    }
    *tile = next;
  }
}

// The four lanes of `row` of a tile, whose words are four pieces of a packed row each (token % 8 of
// keys, byte % 8 of values).
HWY_INLINE WordTile LoadLanes(const uint8_t* tile, size_t row) {
  WordTile lanes;
  for (size_t c = 0; c < 4; ++c) lanes.words[c] = hn::LoadU(D16x8(), tile + (row * 4 + c) * 16);
  TransposeWords(&lanes);
  return lanes;
}
HWY_INLINE void StoreLanes(WordTile lanes, size_t row, uint8_t* tile) {
  TransposeWords(&lanes);
  for (size_t c = 0; c < 4; ++c) hn::StoreU(lanes.words[c], D16x8(), tile + (row * 4 + c) * 16);
}

// Where the 16 bytes of word w of a K tile's row start in rows [64, dim / 4].
HWY_INLINE size_t KeyRowOffset(size_t dim, size_t tile, size_t row, size_t w) {
  if (dim == 64) return (tile * 32 + w * 8 + row) * 16;
  const size_t halves = dim / 128;
  const size_t token = tile / halves * 16 + (w & 1) * 8 + row;
  return token * (dim / 4) + tile % halves * 32 + (w >> 1) * 16;
}

inline void UnpackKeyRows(const uint8_t* codes, size_t dim, uint8_t* rows) {
  for (size_t tile = 0; tile < dim / 32; ++tile) {
    for (size_t row = 0; row < 8; ++row) {
      const WordTile lanes = LoadLanes(codes + tile * int2::kTileBytes, row);
      for (size_t w = 0; w < 4; ++w)
        hn::StoreU(lanes.words[w], D16x8(), rows + KeyRowOffset(dim, tile, row, w));
    }
  }
}

inline void PackKeyRows(const uint8_t* rows, size_t dim, uint8_t* codes) {
  for (size_t tile = 0; tile < dim / 32; ++tile) {
    for (size_t row = 0; row < 8; ++row) {
      WordTile lanes;
      for (size_t w = 0; w < 4; ++w)
        lanes.words[w] = hn::LoadU(D16x8(), rows + KeyRowOffset(dim, tile, row, w));
      StoreLanes(lanes, row, codes + tile * int2::kTileBytes);
    }
  }
}

// Where byte `at` of the 16 tokens in words 2 rh, 2 rh + 1 of a V tile goes in rows [64, dim / 4].
HWY_INLINE size_t ValueRowOffset(size_t dim, size_t tile, size_t rh, size_t at) {
  const size_t byte_tiles = dim / 64;
  const size_t token = tile / byte_tiles * 32 + rh * 16 + (at & 1) * 8 + at / 4 * 2 + (at >> 1 & 1);
  return token * (dim / 4) + tile % byte_tiles * 16;
}

inline void UnpackValueRows(const uint8_t* codes, size_t dim, uint8_t* rows) {
  for (size_t tile = 0; tile < dim / 32; ++tile) {
    ByteTile halves[2];
    for (size_t row = 0; row < 8; ++row) {
      const WordTile lanes = LoadLanes(codes + tile * int2::kTileBytes, row);
      for (size_t w = 0; w < 4; ++w) halves[w >> 1].rows[(w & 1) * 8 + row] = lanes.words[w];
    }
    for (size_t rh = 0; rh < 2; ++rh) {
      TransposeBytes(&halves[rh]);
      for (size_t at = 0; at < 16; ++at)
        hn::StoreU(halves[rh].rows[at], D16x8(), rows + ValueRowOffset(dim, tile, rh, at));
    }
  }
}

inline void PackValueRows(const uint8_t* rows, size_t dim, uint8_t* codes) {
  for (size_t tile = 0; tile < dim / 32; ++tile) {
    ByteTile halves[2];
    for (size_t rh = 0; rh < 2; ++rh) {
      for (size_t at = 0; at < 16; ++at)
        halves[rh].rows[at] = hn::LoadU(D16x8(), rows + ValueRowOffset(dim, tile, rh, at));
      TransposeBytes(&halves[rh]);
    }
    for (size_t row = 0; row < 8; ++row) {
      WordTile lanes;
      for (size_t w = 0; w < 4; ++w) lanes.words[w] = halves[w >> 1].rows[(w & 1) * 8 + row];
      StoreLanes(lanes, row, codes + tile * int2::kTileBytes);
    }
  }
}

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OKV_TARGET_IS_SIMD

#endif  // OKV_KERNELS_INT2_TILES_INL_H_
