#ifndef OKV_KERNELS_CUDA_INT2_PACK_CUH_
#define OKV_KERNELS_CUDA_INT2_PACK_CUH_

#include <cstdint>

#include "kernels/cuda/row_tile.cuh"
#include "proto/int2_layout.h"

// Between the codes of a warp's tile of 32 tokens as RowFragment orders them and the 16-byte pieces
// of a run (proto/int2_layout.h) that each lane reads or writes.
namespace okv::cuda {

// Codes of a tile. Byte 2 (x & 1) + e of word[p][x / 2], x = 0 .. kDim / 32 - 1, holds those of
// token row + 8 p, channels r, r + q, r + 2 q, r + 3 q with r = 8 x + 2 pair + e, q = kDim / 4:
// what a byte of a run holds.
template <int kDim>
struct CodeFragment {
  uint32_t word[4][kDim / 64];
};
// A lane's pieces of the tile's codes, kDim / 64 of them.
template <int kDim>
struct CodePieces {
  uint4 piece[kDim / 64];
};

// Swaps halves between the lane and its partner, lane ^ mask: both give the half that the other's
// side wants. Low side: (own low, other's low); high side: (other's high, own high). Its own
// inverse.
__device__ __forceinline__ uint32_t ExchangeHalves(uint32_t word, int mask, bool high_side) {
  const uint32_t other = __shfl_xor_sync(kAllLanes, word, mask);
  return __byte_perm(word, other, high_side ? 0x3276 : 0x5410);
}

// Where the lane's piece `index` is inside a run; `half` is the tile's half of the block.
template <int kDim>
__device__ __forceinline__ uint32_t KeyPieceOffset(int half, int index, int lane) {
  const int column = (lane >> 1 & 1) + 2 * (lane & 1);
  constexpr int kPerToken16 = kDim == 64 ? 1 : kDim / 128;  // Pieces before the token's 16 change
  const int token = 32 * half + 16 * (index / kPerToken16) + (lane >> 2);
  return int2::KeyCode(kDim, token, 32 * (index % kPerToken16) + 4 * column).byte;
}
template <int kDim>
__device__ __forceinline__ uint32_t ValuePieceOffset(int half, int index, int lane) {
  const int token = 32 * half + 2 * (lane >> 3);
  const int channel = 16 * index + 2 * (lane & 3) + (lane >> 2 & 1);
  return int2::ValueCode(kDim, token, channel).byte;
}

// A key piece has one token's four channels in a word: neighbors in a quad swap pairs of channels.
template <int kDim>
__device__ __forceinline__ void PackKeys(const CodeFragment<kDim>& codes, int lane,
                                         CodePieces<kDim>* pieces) {
  uint32_t w[4][kDim / 64];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#pragma unroll
    for (int v = 0; v < kDim / 64; ++v) w[p][v] = ExchangeHalves(codes.word[p][v], 1, lane & 1);
  }
  if constexpr (kDim == 64) {
    pieces->piece[0] = make_uint4(w[0][0], w[1][0], w[2][0], w[3][0]);
  } else {
    constexpr int kColumns = kDim / 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < kColumns; ++h) {
        pieces->piece[i * kColumns + h] = make_uint4(w[2 * i][2 * h], w[2 * i + 1][2 * h],
                                                     w[2 * i][2 * h + 1], w[2 * i + 1][2 * h + 1]);
      }
    }
  }
}
template <int kDim>
__device__ __forceinline__ void UnpackKeys(const CodePieces<kDim>& pieces, int lane,
                                           CodeFragment<kDim>* codes) {
  uint32_t w[4][kDim / 64];
  if constexpr (kDim == 64) {
    const uint4 piece = pieces.piece[0];
    w[0][0] = piece.x;
    w[1][0] = piece.y;
    w[2][0] = piece.z;
    w[3][0] = piece.w;
  } else {
    constexpr int kColumns = kDim / 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < kColumns; ++h) {
        const uint4 piece = pieces.piece[i * kColumns + h];
        w[2 * i][2 * h] = piece.x;
        w[2 * i + 1][2 * h] = piece.y;
        w[2 * i][2 * h + 1] = piece.z;
        w[2 * i + 1][2 * h + 1] = piece.w;
      }
    }
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#pragma unroll
    for (int v = 0; v < kDim / 64; ++v) codes->word[p][v] = ExchangeHalves(w[p][v], 1, lane & 1);
  }
}

// A value piece has one channel byte's four tokens in a word: neighboring rows swap channels.
template <int kDim>
__device__ __forceinline__ void PackValues(const CodeFragment<kDim>& codes, int lane,
                                           CodePieces<kDim>* pieces) {
  const bool high_side = (lane & 4) != 0;
#pragma unroll
  for (int h = 0; h < kDim / 64; ++h) {
    uint32_t w[4];  // [token / 16][channel / 8]
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t first = codes.word[2 * m][h];
      const uint32_t second = codes.word[2 * m + 1][h];  // 8 tokens later
      w[2 * m] = ExchangeHalves(__byte_perm(first, second, 0x5140), 4, high_side);
      w[2 * m + 1] = ExchangeHalves(__byte_perm(first, second, 0x7362), 4, high_side);
    }
    pieces->piece[h] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}
template <int kDim>
__device__ __forceinline__ void UnpackValues(const CodePieces<kDim>& pieces, int lane,
                                             CodeFragment<kDim>* codes) {
  const bool high_side = (lane & 4) != 0;
#pragma unroll
  for (int h = 0; h < kDim / 64; ++h) {
    const uint4 piece = pieces.piece[h];
    const uint32_t w[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t low = ExchangeHalves(w[2 * m], 4, high_side);
      const uint32_t high = ExchangeHalves(w[2 * m + 1], 4, high_side);
      codes->word[2 * m][h] = __byte_perm(low, high, 0x6420);
      codes->word[2 * m + 1][h] = __byte_perm(low, high, 0x7531);
    }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_INT2_PACK_CUH_
