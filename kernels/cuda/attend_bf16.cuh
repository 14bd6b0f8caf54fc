#ifndef OKV_KERNELS_CUDA_ATTEND_BF16_CUH_
#define OKV_KERNELS_CUDA_ATTEND_BF16_CUH_

#include "kernels/cuda/attend_warp.cuh"

// WarpSums over BF16 units: 8 or 16 tokens of the sink or of the recent window. Queries and
// probabilities are split in a high and a low bf16, so that they keep 16 bits. A tile has rows for
// 16 tokens; a unit of 8 leaves rows 8 .. 15 unused.
namespace okv::cuda {

// A probability of 0 times what an earlier unit left in the rows behind `tokens` must not be NaN.
template <class T>
__device__ __forceinline__ void ClearValues(int tokens, const UnitSlots<T>& slots) {
  uint8_t* values = const_cast<uint8_t*>(slots.Values());
  const int first = tokens * T::kRowBytes + 16 * (threadIdx.x % 32);
  for (int i = first; i < T::kUnitTokens * T::kRowBytes; i += 512) {
    *reinterpret_cast<uint4*>(values + i) = {0, 0, 0, 0};
  }
#if __CUDA_ARCH__ >= 900
  FenceBeforeBulkCopy();
#endif
  __syncwarp();
}

// Scores in units of log 2: keys [16 tokens x d] times queries [d x columns].
template <class T>
__device__ __forceinline__ void WarpSums<T>::Bf16Scores(const AttendKernelParams& params,
                                                        const UnitSlots<T>& slots,
                                                        const Shared<T>& shared,
                                                        float (&score)[2][T::kLaneRows]) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const uint32_t keys = SharedAddress(slots.slot[0]) +
                        ((kTokenRows == 2 ? matrix % 2 * 8 : 0) + lane % 8) * T::kRowBytes +
                        matrix / 2 * 16;
  float products[T::kRowTiles][4] = {};
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step) {
    uint32_t a[4];
    LoadMatrix4(a, keys + 32 * step);
#pragma unroll
    for (int part = 0; part < T::kRowTiles * T::kParts; ++part) {
      const uint32_t* query = reinterpret_cast<const uint32_t*>(
          &shared.query_parts[8 * part + row_][16 * step + 2 * pair_]);
      MmaBf16(products[part / T::kParts], a, query[0], query[4]);
    }
  }
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float s = T::kLaneRows == 1 ? products[0][2 * r] + products[0][2 * r + 1]
                                  : products[a / 2][2 * r + a % 2];
      s *= params.scale_log2;
      if (!T::kPlain && params.cap_log2 > 0.0f) s = params.cap_log2 * tanhf(s / params.cap_log2);
      score[r][a] = s;
    }
  }
}

// Scores become probabilities relative to 2^maximum_, split in two bf16 each, as the second operand
// of a matrix product.
template <class T>
__device__ __forceinline__ void WarpSums<T>::Bf16Probabilities(
    const float (&score)[2][T::kLaneRows], uint32_t (&high)[2][T::kRowTiles],
    uint32_t (&low)[2][T::kRowTiles]) {
  float part_high[2][T::kLaneRows];
  float part_low[2][T::kLaneRows];
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    float largest = fmaxf(fmaxf(score[0][a], score[1][a]), -1e25f);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    const float maximum = fmaxf(maximum_[a], largest);
    Rescale(a, Exp2(maximum_[a] - maximum));
    maximum_[a] = maximum;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float p = Exp2(score[r][a] - maximum);
      sum_[a] += p;
      part_high[r][a] = __bfloat162float(__float2bfloat16(p));
      part_low[r][a] = p - part_high[r][a];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
      if (T::kLaneRows == 1) {
        high[r][i] = Transpose8x8(PackBf16(part_high[r][0], part_low[r][0]));
      } else {
        const int even = 2 * i % T::kLaneRows;
        const int odd = (2 * i + 1) % T::kLaneRows;
        high[r][i] = Transpose8x8(PackBf16(part_high[r][even], part_high[r][odd]));
        low[r][i] = Transpose8x8(PackBf16(part_low[r][even], part_low[r][odd]));
      }
    }
  }
}

// Values [d x 16 tokens] times probabilities [16 tokens x columns].
template <class T>
__device__ __forceinline__ void WarpSums<T>::Bf16Values(const UnitSlots<T>& slots,
                                                        const uint32_t (&high)[2][T::kRowTiles],
                                                        const uint32_t (&low)[2][T::kRowTiles]) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const uint32_t values = SharedAddress(slots.Values()) +
                          ((kTokenRows == 2 ? matrix / 2 * 8 : 0) + lane % 8) * T::kRowBytes +
                          matrix % 2 * 16;
  float nested[kValues] = {};  // output_ has sums of channel tiles
#pragma unroll
  for (int i = 0; i < T::kChannelTiles; ++i) {
    uint32_t a[4];
    LoadMatrix4Transposed(a, values + 2 * T::ChannelOf(i));
    if (kTokenRows == 1) a[2] = a[3] = 0;
    constexpr float kSlotFactor[4] = {1.0f, 4.0f, 16.0f, 64.0f};
#pragma unroll
    for (int tile = 0; tile < T::kRowTiles; ++tile) {
      float sums[4] = {};
      MmaBf16(sums, a, high[0][tile], high[1][tile]);
      if (T::kLaneRows > 1) MmaBf16(sums, a, low[0][tile], low[1][tile]);
#pragma unroll
      for (int k = 0; k < (T::kLaneRows == 1 ? 2 : 4); ++k) {
        const int v = T::kLaneRows == 1 ? k : k / 2 * T::kLaneRows + (2 * tile + k % 2);
        const float sum = T::kLaneRows == 1 ? sums[2 * k % 4] + sums[(2 * k + 1) % 4] : sums[k];
        const float sum_slot = sum * (kSlotFactor[i % 4] * kOutputUnit);
        nested[v] = T::kNested && i % 4 != 0 ? nested[v] + sum_slot : sum_slot;
        output_[i][v] += nested[v];
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::AddBf16(const AttendKernelParams& params,
                                                     const Piece& piece, int unit,
                                                     const UnitSlots<T>& slots,
                                                     const Shared<T>& shared) {
  const int first = piece.Bf16Token(unit, T::kUnitTokens);
  const int tokens = min(T::kUnitTokens, piece.plan.length - first);
  if (tokens < T::kUnitTokens) ClearValues<T>(tokens, slots);
  float score[2][T::kLaneRows];
  Bf16Scores(params, slots, shared, score);
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool sees = r < kTokenRows && Sees(params.decode.shape, a, first + row_ + 8 * r, false);
      if (!sees) score[r][a] = kHidden;
    }
  }
  uint32_t high[2][T::kRowTiles];
  uint32_t low[2][T::kRowTiles];
  Bf16Probabilities(score, high, low);
  Bf16Values(slots, high, low);
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_BF16_CUH_
