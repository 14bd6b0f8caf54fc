#ifndef OKV_KERNELS_CUDA_INT2_PACK_CUH_
#define OKV_KERNELS_CUDA_INT2_PACK_CUH_

#include <cstdint>

#include "kernels/cuda/row_tile.cuh"
#include "proto/int2_layout.h"

// Between the codes of a warp's tile as RowFragment orders them and the pieces of a run
// (proto/int2_layout.h) that each lane reads or writes: 16 bytes each, or 8 of values from d 128
// on, whose 16 bytes are of the tokens of two tiles.
namespace okv::cuda {

// Codes of a tile. Byte 2 (x & 1) + e of word[p][x / 2], x = 0 .. kDim / 32 - 1, holds those of
// token row + 8 p, channels r, r + q, r + 2 q, r + 3 q with r = 8 x + 2 pair + e, q = kDim / 4:
// what a byte of a run holds.
template <int kDim>
struct CodeFragment {
  uint32_t word[RowFragment<kDim>::kRows][kDim / 64];
};
// A lane's pieces of the tile's codes, in sequence.
template <int kDim>
struct CodePieces {
  static constexpr int kWords = RowFragment<kDim>::kRows * kDim / 64;
  uint32_t word[kWords];
};

// Swaps halves between the lane and its partner, lane ^ mask: both give the half that the other's
// side wants. Low side: (own low, other's low); high side: (other's high, own high). Its own
// inverse.
__device__ __forceinline__ uint32_t ExchangeHalves(uint32_t word, int mask, bool high_side) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, word, mask);
  return __byte_perm(word, other, high_side ? 0x3276 : 0x5410);
}

// Where the lane's piece `index` is inside a run; `tile` is the tile's index in the block.
template <int kDim>
__device__ __forceinline__ uint32_t KeyPieceOffset(int tile, int index, int lane) {
  const int column = (lane >> 1 & 1) + 2 * (lane & 1);
  const int token = kTileTokens<kDim> * tile + (lane >> 2);
  return int2::KeyCode(kDim, token, 32 * index + 4 * column).byte;
}
template <int kDim>
__device__ __forceinline__ uint32_t ValuePieceOffset(int tile, int index, int lane) {
  const int token = kTileTokens<kDim> * tile + 2 * (lane >> 3);
  const int channel = 16 * index + 2 * (lane & 3) + (lane >> 2 & 1);
  return int2::ValueCode(kDim, token, channel).byte;
}

// Visits the lane's pieces: at(first word, words, byte of the run).
template <int kDim, typename At>
__device__ __forceinline__ void ForEachPiece(bool is_value, int tile, int lane, At at) {
  constexpr int kWords = CodePieces<kDim>::kWords;
  if (is_value && kDim > 64) {
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) at.Two(2 * i, ValuePieceOffset<kDim>(tile, i, lane));
  } else {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      at.Four(4 * i, is_value ? ValuePieceOffset<kDim>(tile, i, lane)
                              : KeyPieceOffset<kDim>(tile, i, lane));
    }
  }
}
template <int kDim>
struct PieceWriter {
  uint8_t* run;
  const CodePieces<kDim>& pieces;
  __device__ __forceinline__ void Two(int i, uint32_t offset) const {
    *reinterpret_cast<uint2*>(run + offset) = make_uint2(pieces.word[i], pieces.word[i + 1]);
  }
  __device__ __forceinline__ void Four(int i, uint32_t offset) const {
    *reinterpret_cast<uint4*>(run + offset) =
        make_uint4(pieces.word[i], pieces.word[i + 1], pieces.word[i + 2], pieces.word[i + 3]);
  }
};
template <int kDim>
struct PieceReader {
  const uint8_t* run;
  CodePieces<kDim>& pieces;
  __device__ __forceinline__ void Two(int i, uint32_t offset) const {
    const uint2 piece = __ldg(reinterpret_cast<const uint2*>(run + offset));
    pieces.word[i] = piece.x;
    pieces.word[i + 1] = piece.y;
  }
  __device__ __forceinline__ void Four(int i, uint32_t offset) const {
    const uint4 piece = __ldg(reinterpret_cast<const uint4*>(run + offset));
    pieces.word[i] = piece.x;
    pieces.word[i + 1] = piece.y;
    pieces.word[i + 2] = piece.z;
    pieces.word[i + 3] = piece.w;
  }
};
template <int kDim>
__device__ __forceinline__ void WritePieces(uint8_t* run, bool is_value, int tile, int lane,
                                            const CodePieces<kDim>& pieces) {
  ForEachPiece<kDim>(is_value, tile, lane, PieceWriter<kDim>{run, pieces});
}
template <int kDim>
__device__ __forceinline__ void ReadPieces(const uint8_t* run, bool is_value, int tile, int lane,
                                           CodePieces<kDim>* pieces) {
  ForEachPiece<kDim>(is_value, tile, lane, PieceReader<kDim>{run, *pieces});
}

// A key piece has one token's four channels in a word: neighbors in a quad swap pairs of channels.
// Word i of the pieces is of row KeyRow(i) and word KeyWord(i) of CodeFragment.
template <int kDim>
__device__ __forceinline__ constexpr int KeyRow(int i) {
  return kDim == 64 ? i : i & 1;
}
template <int kDim>
__device__ __forceinline__ constexpr int KeyWord(int i) {
  return kDim == 64 ? 0 : i >> 1;
}
template <int kDim>
__device__ __forceinline__ void PackKeys(const CodeFragment<kDim>& codes, int lane,
                                         CodePieces<kDim>* pieces) {
#pragma unroll
  for (int i = 0; i < CodePieces<kDim>::kWords; ++i) {
    pieces->word[i] = ExchangeHalves(codes.word[KeyRow<kDim>(i)][KeyWord<kDim>(i)], 1, lane & 1);
  }
}
template <int kDim>
__device__ __forceinline__ void UnpackKeys(const CodePieces<kDim>& pieces, int lane,
                                           CodeFragment<kDim>* codes) {
#pragma unroll
  for (int i = 0; i < CodePieces<kDim>::kWords; ++i) {
    codes->word[KeyRow<kDim>(i)][KeyWord<kDim>(i)] = ExchangeHalves(pieces.word[i], 1, lane & 1);
  }
}

// A value piece has one channel byte's four tokens in a word: neighboring rows swap channels.
template <int kDim>
__device__ __forceinline__ void PackValues(const CodeFragment<kDim>& codes, int lane,
                                           CodePieces<kDim>* pieces) {
  constexpr int kParts = kTileParts<kDim>;
  const bool high_side = (lane & 4) != 0;
#pragma unroll
  for (int h = 0; h < kDim / 64; ++h) {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const uint32_t first = codes.word[2 * m][h];
      const uint32_t second = codes.word[2 * m + 1][h];  // 8 tokens later
      uint32_t* const word = &pieces->word[(h * kParts + m) * 2];
      word[0] = ExchangeHalves(__byte_perm(first, second, 0x5140), 4, high_side);
      word[1] = ExchangeHalves(__byte_perm(first, second, 0x7362), 4, high_side);
    }
  }
}
template <int kDim>
__device__ __forceinline__ void UnpackValues(const CodePieces<kDim>& pieces, int lane,
                                             CodeFragment<kDim>* codes) {
  constexpr int kParts = kTileParts<kDim>;
  const bool high_side = (lane & 4) != 0;
#pragma unroll
  for (int h = 0; h < kDim / 64; ++h) {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      const uint32_t* const word = &pieces.word[(h * kParts + m) * 2];
      const uint32_t low = ExchangeHalves(word[0], 4, high_side);
      const uint32_t high = ExchangeHalves(word[1], 4, high_side);
      codes->word[2 * m][h] = __byte_perm(low, high, 0x6420);
      codes->word[2 * m + 1][h] = __byte_perm(low, high, 0x7531);
    }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_INT2_PACK_CUH_
