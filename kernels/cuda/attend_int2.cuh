#ifndef OKV_KERNELS_CUDA_ATTEND_INT2_CUH_
#define OKV_KERNELS_CUDA_ATTEND_INT2_CUH_

#include "kernels/cuda/attend_ring.cuh"
#include "kernels/cuda/attend_warp.cuh"

// WarpSums over INT2 units. The arithmetic is described in attend_warp.cuh, the order of bytes in
// proto/page_layout.md.
namespace okv::cuda {

// The codes of slot j of four bytes, times 4^j; nested: and those below, slots 0 and 1 times 16
// more.
template <class T>
__device__ __forceinline__ uint32_t KeyBytes(uint32_t word, int j) {
  return T::kNested && j < 2 ? word << 4 & T::CodeMask(j) << 4 : word & T::CodeMask(j);
}

// The weighted integer sums of 16 keys (one matrix tile) and all rows.
template <class T>
__device__ __forceinline__ void WarpSums<T>::TileSums(
    const uint8_t* page, int tile, int (&sums)[T::kGroups][T::kRowTiles * T::kParts][4]) {
  const uint4* codes = reinterpret_cast<const uint4*>(page) + threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < (T::kDim == 256 ? 2 : 1); ++half) {
    const uint4 w = codes[(T::kDim == 64 ? tile / 2 : tile * (T::kDim / 128) + half) * 32];
    const uint32_t first = T::kDim == 64 && tile % 2 == 1 ? w.z : w.x;
    const uint32_t second = T::kDim == 64 && tile % 2 == 1 ? w.w : w.y;
    const uint32_t third = T::kDim == 64 ? first : w.z;
    const uint32_t fourth = T::kDim == 64 ? second : w.w;
    constexpr int kHalves = T::kDim == 256 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < T::kKeySteps / kHalves; ++i) {
      const int s = i * kHalves + half;
      const int low = T::KeySlot(s, 0);
      const int high = T::KeySlot(s, 1);
      const uint32_t a[4] = {KeyBytes<T>(first, low), KeyBytes<T>(second, low),
                             KeyBytes<T>(third, high), KeyBytes<T>(fourth, high)};
      const int set = s / T::kGroupSteps;
      const bool begins = T::kGroups == 1 ? half == 0 && i == 0 : s % T::kGroupSteps == 0;
#pragma unroll
      for (int part = 0; part < T::kRowTiles * T::kParts; ++part) {
        if (begins) {
          MmaU8S8(sums[set][part], a, query_[part][s], 0);
        } else {
          MmaU8S8(sums[set][part], a, query_[part][s], sums[set][part]);
        }
      }
    }
  }
}

// score = 64 F times the logit (in units of log 2).
template <class T>
__device__ __forceinline__ void WarpSums<T>::Keys(const UnitSlots<T>& slots,
                                                  float (&score)[T::kTiles][kValues]) {
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    int sums[T::kGroups][T::kRowTiles * T::kParts][4];
    TileSums(slots.slot[tile / 4], tile % 4, sums);
#pragma unroll
    for (int group = 0; group < T::kGroups; ++group) {
      const uint2 words = *reinterpret_cast<const uint2*>(Parameters(slots, tile, group));
      AddGroup(sums[group], group, words, score[tile]);
    }
  }
}

// One group's part of the scores of 16 keys.
template <class T>
__device__ __forceinline__ void WarpSums<T>::AddGroup(
    const int (&sums)[T::kRowTiles * T::kParts][4], int group, const uint2& words,
    float (&score)[kValues]) {
  // Without nesting, the groups of slots 0 and 1 weigh a sixteenth.
  const int weight = T::kGroups > 1 && group < T::kGroups / 2 ? 16 : 1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t word = r == 0 ? words.x : words.y;
    const float scale = LowBf16(word);
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      const int high = sums[T::HighMatrix(a)][T::HighElement(r, a)];
      const int low = sums[T::LowMatrix(a)][T::LowElement(r, a)];
      float& result = score[r * T::kLaneRows + a];
      const float offset = group == 0 ? HighBf16(word) * query_sum_[group][a]
                                      : fmaf(HighBf16(word), query_sum_[group][a], result);
      // Floats without conversion, sums on the bits of 2^23 + 2^22, took as long.
      result = fmaf(static_cast<float>((high * 256 + low) * weight), scale, offset);
    }
  }
}

// Tokens outside a sliding window, and the block that two queries of one step see in two codecs.
template <class T>
__device__ __forceinline__ void WarpSums<T>::Hide(const AttendKernelParams& params, int block,
                                                  float (&score)[T::kTiles][kValues]) {
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int token = (block * 4 + tile) * 16 + row_ + v / T::kLaneRows * 8;
      if (!Sees(params.decode.shape, v % T::kLaneRows, token, true)) score[tile][v] = kHidden;
    }
  }
}

// The last unit of an odd number of pages. What an earlier unit left in the place of the second one
// must not be read as scales.
template <class T>
__device__ __forceinline__ void WarpSums<T>::HideSecondPage(const UnitSlots<T>& slots,
                                                            float (&score)[T::kTiles][kValues]) {
#pragma unroll
  for (int tile = 4; tile < T::kTiles; ++tile) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) score[tile][v] = kHidden;
  }
  uint4* parameters = reinterpret_cast<uint4*>(slots.slot[T::kPages - 1] + T::kParameters);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < T::kGroups; ++i) parameters[32 * i + threadIdx.x % 32] = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
  FenceBeforeBulkCopy();
#endif
  __syncwarp();
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::Cap(float cap, float (&score)[T::kTiles][kValues]) {
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    const float in = unscale_[a] / cap;
    const float out = cap / unscale_[a];
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      score[tile][a] = out * tanhf(score[tile][a] * in);
      score[tile][T::kLaneRows + a] = out * tanhf(score[tile][T::kLaneRows + a] * in);
    }
  }
}

// log2 of a positive bf16, here the low half of `word`, is its bits / 128 - 127, at most 0.087 too
// small. No scale is taken for smaller than 2^-40: probabilities stay finite.
__device__ __forceinline__ float LogOfScale(uint32_t word) {
  const float bits = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7410));  // 2^23 + low half
  return fmaxf(fmaf(bits, 1.0f / 128, -65536.0f - 127.0f), -40.0f);
}

// Per row, log2 of the unit's largest p v_scale, less 0.087. (The largest score with the largest
// scale instead, checked afterwards, took fewer instructions and more time: 84 us of arithmetic
// for 77.)
template <class T>
__device__ __forceinline__ void WarpSums<T>::Largest(const UnitSlots<T>& slots,
                                                     const float (&score)[T::kTiles][kValues],
                                                     float (&largest)[T::kLaneRows]) {
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) largest[a] = -1e25f;
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    uint32_t scales[2] = {0, 0};
#pragma unroll
    for (int group = 0; group < T::kGroups; ++group) {
      const uint2 words = *(reinterpret_cast<const uint2*>(Parameters(slots, tile, group)) + 1);
      scales[0] = T::kGroups == 1 ? words.x : max(scales[0], words.x & 0xffff);
      scales[1] = T::kGroups == 1 ? words.y : max(scales[1], words.y & 0xffff);
    }
    const float log_scale[2] = {LogOfScale(scales[0]), LogOfScale(scales[1])};
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int a = v % T::kLaneRows;
      largest[a] =
          fmaxf(largest[a], fmaf(score[tile][v], unscale_[a], log_scale[v / T::kLaneRows]));
    }
  }
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      largest[a] = fmaxf(largest[a], __shfl_xor_sync(~0u, largest[a], lanes));
    }
  }
}

// Scores become probabilities relative to a power of two with which max(p v_scale) is at most
// 65,000; weight is what that is relative to 2^maximum_.
template <class T>
__device__ __forceinline__ void WarpSums<T>::Probabilities(const UnitSlots<T>& slots,
                                                           float (&score)[T::kTiles][kValues],
                                                           float (&weight)[T::kLaneRows]) {
  float largest[T::kLaneRows];
  Largest(slots, score, largest);
  bool grows = false;
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    largest[a] -= 15.9f;  // 15.9 + 0.087 < log2(65,535)
    grows |= largest[a] > maximum_[a] + 40.0f;
  }
  // fp32 sums have room for 2^40: their scale seldom changes.
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      const float maximum = fmaxf(maximum_[a], largest[a]);
      Rescale(a, Exp2(maximum_[a] - maximum));
      maximum_[a] = maximum;
    }
  }
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    weight[a] = Exp2(largest[a] - maximum_[a]);
    float sum = 0.0f;
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& p = score[tile][r * T::kLaneRows + a];
        p = Exp2(fmaf(p, unscale_[a], -largest[a]));
        sum += p;
      }
    }
    sum_[a] = fmaf(sum, weight[a], sum_[a]);
  }
}

// round(p v_scale) of tokens row_ and row_ + 8 of each tile: high bytes, then low bytes.
template <class T>
template <int kGroup>
__device__ __forceinline__ void WarpSums<T>::FixedPoint(
    const UnitSlots<T>& slots, const float (&p)[T::kTiles][kValues],
    uint32_t (&bytes)[T::kTiles][T::kLaneRows]) {
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    const uint2 words = *(reinterpret_cast<const uint2*>(Parameters(slots, tile, kGroup)) + 1);
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      const float first = fmaf(p[tile][a], LowBf16(words.x), 8388608.0f);
      const float second = fmaf(p[tile][T::kLaneRows + a], LowBf16(words.y), 8388608.0f);
      bytes[tile][a] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x4051);
    }
  }
}

// Adds p v of the channels of one group.
template <class T>
template <int kGroup>
__device__ __forceinline__ void WarpSums<T>::Values(const UnitSlots<T>& slots,
                                                    float (&p)[T::kTiles][kValues],
                                                    float (&weight)[T::kLaneRows]) {
  constexpr int kMatrices = T::kRowTiles * T::kParts;
  uint32_t bytes[T::kTiles][T::kLaneRows];
  FixedPoint<kGroup>(slots, p, bytes);
  uint32_t fixed[T::kTiles][kMatrices];
  float offsets[T::kLaneRows];
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) offsets[a] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    const uint2 words = *(reinterpret_cast<const uint2*>(Parameters(slots, tile, kGroup)) + 1);
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      offsets[a] = fmaf(p[tile][a], HighBf16(words.x), offsets[a]);
      offsets[a] = fmaf(p[tile][T::kLaneRows + a], HighBf16(words.y), offsets[a]);
    }
    if (T::kLaneRows == 1) {
      fixed[tile][0] = Transpose8x8(bytes[tile][0]);
    } else {
#pragma unroll
      for (int i = 0; i < T::kRowTiles; ++i) {
        const uint32_t even = bytes[tile][2 * i % T::kLaneRows];
        const uint32_t odd = bytes[tile][(2 * i + 1) % T::kLaneRows];
        fixed[tile][2 * i % kMatrices] = Transpose8x8(__byte_perm(even, odd, 0x5410));
        fixed[tile][(2 * i + 1) % kMatrices] = Transpose8x8(__byte_perm(even, odd, 0x7632));
      }
    }
  }
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    offset_[kGroup][a] = fmaf(offsets[a], weight[a], offset_[kGroup][a]);
  }
  AddValues<kGroup>(slots, fixed, weight);
  if constexpr (kGroup + 1 < T::kGroups) Values<kGroup + 1>(slots, p, weight);
}

template <class T>
template <int kGroup>
__device__ __forceinline__ void WarpSums<T>::AddValues(
    const UnitSlots<T>& slots, const uint32_t (&fixed)[T::kTiles][T::kRowTiles * T::kParts],
    const float (&weight)[T::kLaneRows]) {
  constexpr int kMatrices = T::kRowTiles * T::kParts;
  float weight_high[T::kLaneRows];
  float weight_low[T::kLaneRows];
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    weight_low[a] = weight[a] * (kOutputUnit * 0x1p100f * 0x1p49f);
    weight_high[a] = weight_low[a] * 256.0f;
  }
#pragma unroll
  for (int hg = 0; hg < T::kDim / 64; ++hg) {
    int sums[4][kMatrices][4];
#pragma unroll
    for (int u = 0; u < T::kTiles / 2; ++u) {
      const uint8_t* codes = slots.slot[u / 2] + T::kValueCodes;
      const uint4 w = *(reinterpret_cast<const uint4*>(codes) + (u % 2 * (T::kDim / 64) + hg) * 32 +
                        threadIdx.x % 32);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (T::GroupOf(4 * hg + j) != kGroup) continue;
        const uint32_t mask = T::CodeMask(j);
        const uint32_t a[4] = {w.x & mask, w.y & mask, w.z & mask, w.w & mask};
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          if (u == 0) {
            MmaU8U8(sums[j][m], a, fixed[2 * u][m], fixed[2 * u + 1][m], 0);
          } else {
            MmaU8U8(sums[j][m], a, fixed[2 * u][m], fixed[2 * u + 1][m], sums[j][m]);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (T::GroupOf(4 * hg + j) != kGroup) continue;
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        const int r = v / T::kLaneRows;
        const int a = v % T::kLaneRows;
        const int high = sums[j][T::HighMatrix(a)][T::HighElement(r, a)];
        const int low = sums[j][T::LowMatrix(a)][T::LowElement(r, a)];
        // The bits of an integer below 2^24 are those of the float 2^-149 times as large.
        float& output = output_[4 * hg + j][v];
        output = fmaf(__int_as_float(high), weight_high[a], output);
        output = fmaf(__int_as_float(low), weight_low[a], output);
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::AddInt2(const AttendKernelParams& params,
                                                     const Piece& piece, int unit,
                                                     const UnitSlots<T>& slots) {
  const int page = unit * T::kPages;
  float score[T::kTiles][kValues];
  Keys(slots, score);
  if constexpr (!T::kPlain) {
    if (params.cap_log2 > 0.0f) Cap(params.cap_log2, score);
    const int block = piece.plan.int2_first_block + page;
    constexpr int kTokens = kBlockTokens;
    if (!AllSeeInt2(params.decode.shape, piece.plan.length, block * kTokens,
                    (block + T::kPages) * kTokens - 1)) {
      Hide(params, block, score);
    }
  }
  if (T::kPages == 2 && page + 1 >= piece.plan.int2_blocks) HideSecondPage(slots, score);
  float weight[T::kLaneRows];
  Probabilities(slots, score, weight);
  Values<0>(slots, score, weight);
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::Finish(Shared<T>* shared) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum_[a] += __shfl_xor_sync(~0u, sum_[a], lanes);
#pragma unroll
      for (int group = 0; group < T::kGroups; ++group) {
        offset_[group][a] += __shfl_xor_sync(~0u, offset_[group][a], lanes);
      }
    }
    if (row_ == 0) {
      shared->maxima[warp][T::RowOf(a, pair_)] = maximum_[a];
      shared->sums[warp][T::RowOf(a, pair_)] = sum_[a];
    }
  }
  if (!shared->HasSums(warp)) return;
  float* output = shared->SumsOf(warp, Ring<T>::kUnits);
#pragma unroll
  for (int i = 0; i < T::kChannelTiles; ++i) {
    constexpr float kSlotWeight[4] = {1.0f, 1.0f / 4, 1.0f / 16, 1.0f / 64};
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int a = v % T::kLaneRows;
      const int channel = T::ChannelOf(i) + row_ + v / T::kLaneRows * 8;
      const float slot_weight = kSlotWeight[i % 4] / kOutputUnit;
      float value = output_[i][v];
      if (T::kNested && i % 4 != 0) value -= output_[i - 1][v];
      value *= slot_weight;
      output[channel * T::kRows + T::RowOf(a, pair_)] = value + offset_[T::GroupOf(i)][a];
    }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_INT2_CUH_
