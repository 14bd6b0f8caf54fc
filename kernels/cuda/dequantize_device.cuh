#ifndef OKV_KERNELS_CUDA_DEQUANTIZE_DEVICE_CUH_
#define OKV_KERNELS_CUDA_DEQUANTIZE_DEVICE_CUH_

#include <cstdint>

#include "kernels/cuda/int2_pack.cuh"
#include "kernels/cuda/row_tile.cuh"

namespace okv::cuda {

// The four values of a token's group, in bf16: codes 0 and 1, 2 and 3.
struct CodeValues {
  uint32_t low;
  uint32_t high;
};
// `word`: low half scale, high half offset. One product, one sum, one rounding each.
__device__ __forceinline__ CodeValues MakeCodeValues(uint32_t word) {
  const float scale = LowBf16(word);
  const float offset = HighBf16(word);
  const auto value = [&](float code) { return __fadd_rn(offset, __fmul_rn(scale, code)); };
  return {.low = PackBf16(value(0.0f), value(1.0f)), .high = PackBf16(value(2.0f), value(3.0f))};
}

// The values of two codes: in bits 0, 1 and 8, 9 of `codes`, the rest of its low half 0. A code c
// selects bytes 2 c and 2 c + 1 of the four values.
__device__ __forceinline__ uint32_t TwoValues(uint32_t codes, const CodeValues& values) {
  return __byte_perm(values.low, values.high, codes * 0x22 + 0x1010);
}

// What a lane reads of a tile.
template <int kDim, int kGroups>
struct PackedTile {
  CodePieces<kDim> pieces;
  uint2 params[kTileParts<kDim>][kGroups];  // Of two tokens, 8 apart
};
template <int kDim, int kGroups>
__device__ __forceinline__ void ReadPackedTile(const uint8_t* run, int tile, bool is_value,
                                               int lane, PackedTile<kDim, kGroups>* packed) {
  ReadPieces<kDim>(run, is_value, tile, lane, &packed->pieces);
#pragma unroll
  for (int m = 0; m < kTileParts<kDim>; ++m) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t token = kTileTokens<kDim> * tile + 16 * m + (lane >> 2);
      const uint32_t offset = is_value ? int2::ValueParams(kDim, kGroups, token, g)
                                       : int2::KeyParams(kDim, kGroups, token, g);
      packed->params[m][g] = __ldg(reinterpret_cast<const uint2*>(run + offset));
    }
  }
}

template <int kDim, int kGroups>
__device__ __forceinline__ void DequantizeTile(const PackedTile<kDim, kGroups>& packed,
                                               bool is_value, int lane, RowFragment<kDim>* rows) {
  constexpr int kQuarterWords = kDim / 32;
  constexpr int kGroupWords = kDim / 8 / kGroups;
  CodeFragment<kDim> codes;
  if (is_value) {
    UnpackValues<kDim>(packed.pieces, lane, &codes);
  } else {
    UnpackKeys<kDim>(packed.pieces, lane, &codes);
  }
#pragma unroll
  for (int p = 0; p < RowFragment<kDim>::kRows; ++p) {
    CodeValues values[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint2 params = packed.params[p / 2][g];
      values[g] = MakeCodeValues(p % 2 == 0 ? params.x : params.y);
    }
#pragma unroll
    for (int v = 0; v < kDim / 64; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t four = codes.word[p][v] >> (2 * j) & 0x03030303u;
        const int u = 2 * v + kQuarterWords * j;
        rows->word[p][u] = TwoValues(four & 0xffffu, values[u / kGroupWords]);
        rows->word[p][u + 1] = TwoValues(four >> 16, values[(u + 1) / kGroupWords]);
      }
    }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_DEQUANTIZE_DEVICE_CUH_
