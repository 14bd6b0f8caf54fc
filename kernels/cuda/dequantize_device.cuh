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

// Reads the lane's rows of a tile: `half` of the block, tokens row + 8 p.
template <int kDim, int kGroups>
__device__ __forceinline__ void DequantizeTile(const uint8_t* run, int half, bool is_value,
                                               int lane, RowFragment<kDim>* rows) {
  constexpr int kQuarterWords = kDim / 32;
  constexpr int kGroupWords = kDim / 8 / kGroups;
  CodePieces<kDim> pieces;
#pragma unroll
  for (int i = 0; i < kDim / 64; ++i) {
    const uint32_t offset =
        is_value ? ValuePieceOffset<kDim>(half, i, lane) : KeyPieceOffset<kDim>(half, i, lane);
    pieces.piece[i] = __ldg(reinterpret_cast<const uint4*>(run + offset));
  }
  uint2 params[2][kGroups];  // [token / 16]: of two tokens, 8 apart
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t token = 32 * half + 16 * m + (lane >> 2);
      const uint32_t offset = is_value ? int2::ValueParams(kDim, kGroups, token, g)
                                       : int2::KeyParams(kDim, kGroups, token, g);
      params[m][g] = __ldg(reinterpret_cast<const uint2*>(run + offset));
    }
  }
  CodeFragment<kDim> codes;
  if (is_value) {
    UnpackValues(pieces, lane, &codes);
  } else {
    UnpackKeys(pieces, lane, &codes);
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    CodeValues values[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      values[g] = MakeCodeValues(p % 2 == 0 ? params[p / 2][g].x : params[p / 2][g].y);
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
