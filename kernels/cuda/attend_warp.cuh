#ifndef OKV_KERNELS_CUDA_ATTEND_WARP_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WARP_CUH_

#include "kernels/cuda/attend_tile.cuh"

// What one warp computes: scores and weighted values of its units.
//
// INT2 keys. A key's codes are used as bytes, code 4^j after one AND with 3 << 2j; a query row is
// fixed point of 16 bits, split in a high and a low byte: 4 F q in even slots j, F q in odd ones,
// so that both slots of a pair weigh the same. Integer products are exact: score = (scale * sum +
// offset * (64 F sum of q)) / (64 F). Nested masks: with one scale a row, slot j is read with the
// slots below it (masks 03, 0f, 3f and none: 3 AND for 4 codes instead of 4), and the query's
// coefficients are chosen, from slot 3 down, so that each slot's sum of coefficients is the wanted
// one to the same rounding. Slots 0 and 1 are read from the word shifted up by 4 bits, so 16 times
// as large: then all slots weigh the same. INT2 values. p v_scale is fixed point of 16 bits too,
// scaled so that the largest of a unit's fills them; a unit's integer sums are at most 128 tokens x
// 255 x 255 < 2^24, so that their bits are those of the float 2^-149 times as large, and are added
// to fp32 sums by two products. The price of that is these 2 fp32 operations a channel, row and
// unit; its gain is that no data takes a slower path (the alternative, integer sums over many units
// with a common scale, took one whenever scores jump: up to 40 % more time with 8 rows). Nested
// masks here mean nested sums, whose differences are taken at the end.
namespace okv::cuda {

inline constexpr float kNothing = -1e30f;  // Maximum of no score
inline constexpr float kHidden = -3e38f;   // Score of a key that a row does not see
// Sums of p v are kept times this: what a unit's integer sums are multiplied by, 2^149 times it, is
// then a normal number for weights from 2^-57 to 2^40.
inline constexpr float kOutputUnit = 0x1p-80f;

// Whether a query at `position` sees `token` in the codec of its segment.
__device__ __forceinline__ bool SeesToken(const DecodeShape& shape, int position, int token,
                                          bool int2) {
  constexpr int kTokens = kBlockTokens;
  if (token > position) return false;
  const int window = shape.sliding_window;
  if (window != 0 && token <= position - window) return false;
  const int block = token / kTokens;
  const bool recent = block >= position / kTokens - static_cast<int>(shape.recent_blocks);
  return int2 ? !recent : recent || block < static_cast<int>(shape.sink_blocks);
}

// Whether every query of a request of `length` tokens sees all int2 tokens from `first` to `last`.
__device__ __forceinline__ bool AllSeeInt2(const DecodeShape& shape, int length, int first,
                                           int last) {
  return SeesToken(shape, length - static_cast<int>(shape.query_tokens), last, true) &&
         SeesToken(shape, length - 1, first, true);
}

template <class T>
class WarpSums {
 public:
  // Starts a piece: sums become zero, queries are taken from shared memory.
  __device__ __forceinline__ void Begin(const AttendKernelParams& params, const Piece& piece,
                                        const Shared<T>& shared) {
    pair_ = threadIdx.x % 4;
    row_ = threadIdx.x % 32 / 4;
    SetPositions(params, piece);
    SetQueries(shared);
#pragma unroll
    for (int i = 0; i < T::kChannelTiles; ++i) {
#pragma unroll
      for (int v = 0; v < 2 * T::kLaneRows; ++v) output_[i][v] = 0.0f;
    }
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      maximum_[a] = kNothing;
      sum_[a] = 0.0f;
#pragma unroll
      for (int group = 0; group < T::kGroups; ++group) offset_[group][a] = 0.0f;
    }
  }

  __device__ __forceinline__ void AddBf16(const AttendKernelParams& params, const Piece& piece,
                                          int unit, const UnitSlots<T>& slots,
                                          const Shared<T>& shared);
  __device__ __forceinline__ void AddInt2(const AttendKernelParams& params, const Piece& piece,
                                          int unit, const UnitSlots<T>& slots);
  // Writes the sums, relative to 2^maximum, to shared memory; those of p v where `shared` has a
  // place for them.
  __device__ __forceinline__ void Finish(Shared<T>* shared);

 private:
  static constexpr int kValues = 2 * T::kLaneRows;       // Rows row_ and row_ + 8 of a tile of keys
  static constexpr int kTokenRows = T::kUnitTokens / 8;  // Of a lane in a BF16 unit: row_, row_ + 8

  __device__ __forceinline__ void SetPositions(const AttendKernelParams& params,
                                               const Piece& piece) {
    position_[0] = piece.plan.length - 1;
    if (T::kPlain) return;
    const int first = piece.plan.length - static_cast<int>(params.decode.shape.query_tokens);
#pragma unroll
    for (int a = 0; a < T::kLaneRows; ++a) {
      const int row = piece.row_begin + T::RowOf(a, pair_);
      position_[a] = min(first + row / static_cast<int>(params.query_group), piece.plan.length - 1);
    }
  }
  __device__ __forceinline__ void SetQueries(const Shared<T>& shared);
  __device__ __forceinline__ bool Sees(const DecodeShape& shape, int a, int token,
                                       bool int2) const {
    if (T::kPlain) return token <= position_[0];
    return SeesToken(shape, position_[a], token, int2);
  }

  __device__ __forceinline__ void Bf16Scores(const AttendKernelParams& params,
                                             const UnitSlots<T>& slots, const Shared<T>& shared,
                                             float (&score)[2][T::kLaneRows]);
  __device__ __forceinline__ void Bf16Probabilities(const float (&score)[2][T::kLaneRows],
                                                    uint32_t (&high)[2][T::kRowTiles],
                                                    uint32_t (&low)[2][T::kRowTiles]);
  __device__ __forceinline__ void Bf16Values(const UnitSlots<T>& slots,
                                             const uint32_t (&high)[2][T::kRowTiles],
                                             const uint32_t (&low)[2][T::kRowTiles]);
  __device__ __forceinline__ void Keys(const UnitSlots<T>& slots,
                                       float (&score)[T::kTiles][kValues]);
  __device__ __forceinline__ void TileSums(const uint8_t* page, int tile,
                                           int (&sums)[T::kGroups][T::kRowTiles * T::kParts][4]);
  __device__ __forceinline__ void AddGroup(const int (&sums)[T::kRowTiles * T::kParts][4],
                                           int group, const uint2& words, float (&score)[kValues]);
  __device__ __forceinline__ void Hide(const AttendKernelParams& params, int block,
                                       float (&score)[T::kTiles][kValues]);
  __device__ __forceinline__ void HideSecondPage(const UnitSlots<T>& slots,
                                                 float (&score)[T::kTiles][kValues]);
  __device__ __forceinline__ void Cap(float cap, float (&score)[T::kTiles][kValues]);
  __device__ __forceinline__ void Probabilities(const UnitSlots<T>& slots,
                                                float (&score)[T::kTiles][kValues],
                                                float (&weight)[T::kLaneRows]);
  __device__ __forceinline__ void Largest(const UnitSlots<T>& slots,
                                          const float (&score)[T::kTiles][kValues],
                                          float (&largest)[T::kLaneRows]);
  template <int kGroup>
  __device__ __forceinline__ void FixedPoint(const UnitSlots<T>& slots,
                                             const float (&p)[T::kTiles][kValues],
                                             uint32_t (&bytes)[T::kTiles][T::kLaneRows]);
  template <int kGroup>
  __device__ __forceinline__ void Values(const UnitSlots<T>& slots, float (&p)[T::kTiles][kValues],
                                         float (&weight)[T::kLaneRows]);
  template <int kGroup>
  __device__ __forceinline__ void AddValues(
      const UnitSlots<T>& slots, const uint32_t (&fixed)[T::kTiles][T::kRowTiles * T::kParts],
      const float (&weight)[T::kLaneRows]);
  __device__ __forceinline__ void Rescale(int a, float factor);

  __device__ __forceinline__ const uint4* Parameters(const UnitSlots<T>& slots, int tile,
                                                     int group) const {
    return reinterpret_cast<const uint4*>(slots.slot[tile / 4] + T::kParameters) +
           ((tile % 4 * 8 + row_) * T::kGroups + group);
  }

  int pair_;
  int row_;
  int position_[T::kLaneRows];  // of the query of the lane's a-th row; plain: only the first, of
                                // all
  uint32_t query_[T::kRowTiles * T::kParts][T::kKeySteps][2];
  float query_sum_[T::kGroups][T::kLaneRows];  // 64 F times the sum of the rounded query
  float unscale_[T::kLaneRows];                // 1 / (64 F)

  // All relative to 2^maximum_; sum_ and offset_ are of this lane's tokens only. output_ of channel
  // tile 4 h + j, in units of 1 / kOutputUnit: times 4^j; nested: sum of tiles 4 h + i, i <= j,
  // times 4^i.
  float output_[T::kChannelTiles][kValues];
  float maximum_[T::kLaneRows];
  float sum_[T::kLaneRows];                 // of p
  float offset_[T::kGroups][T::kLaneRows];  // of p v_offset
};

// The coefficients of the four codes of a byte for queries x, in units of 64 F each: e[j] = what
// code j is multiplied by in the end.
template <class T>
__device__ __forceinline__ void Coefficients(const float (&x)[4], float factor, int (&c)[4],
                                             int (&e)[4]) {
  if constexpr (T::kNested) {
    c[3] = __float2int_rn(x[3] * factor);
    const int both = __float2int_rn(x[2] * (4.0f * factor));
    c[2] = both - c[3];
    const float carried = static_cast<float>(both) * 0.0625f;
    c[1] = __float2int_rn(fmaf(x[1], factor, -carried));
    c[0] = __float2int_rn(fmaf(x[0], 4.0f * factor, -carried - static_cast<float>(c[1])));
    e[3] = 64 * c[3];
    e[2] = 16 * both;
    e[1] = 4 * (16 * c[1] + both);
    e[0] = 16 * (c[0] + c[1]) + both;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      c[j] = __float2int_rn(x[j] * (j % 2 == 1 ? factor : 4.0f * factor));
      e[j] = c[j] * (j % 2 == 1 ? 64 : 16);
    }
  }
}

// One row of queries to fixed point, by one warp: a lane has the four codes of every 32nd byte.
template <class T>
__device__ __forceinline__ void QuantizeQuery(const AttendKernelParams& params, int row,
                                              Shared<T>* shared) {
  constexpr int kBytes = T::kDim / 4;
  constexpr int kLaneBytes = (kBytes + 31) / 32;
  const int lane = threadIdx.x % 32;
  const __nv_bfloat16* high = shared->query_parts[T::HighColumn(row)];
  const __nv_bfloat16* low = shared->query_parts[T::LowColumn(row)];
  float x[kLaneBytes][4];
  float largest = 0.0f;
  float poison = 0.0f;  // NaN if the row has NaN or Inf
#pragma unroll
  for (int i = 0; i < kLaneBytes; ++i) {
    const int byte = lane + 32 * i;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = kBytes * j + byte;
      x[i][j] =
          byte < kBytes ? __bfloat162float(high[channel]) + __bfloat162float(low[channel]) : 0.0f;
      largest = fmaxf(largest, fabsf(x[i][j]));
      poison = fmaf(x[i][j], 0.0f, poison);
    }
  }
  // Not negative, so that they order as their bits.
  largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest)));
  largest = fmaxf(largest * params.scale_log2, 1e-30f);
  // F as large as it may be. A coefficient is at most 4 F |q|, nested 5.5 F |q| (less the carried
  // parts of three others), and must be below 127.5 * 256: the high byte stays below 128.
  constexpr float kLargestFixed = T::kNested ? 5930.0f : 8155.0f;
  const float factor = params.scale_log2 * __fdividef(kLargestFixed, largest);
  int sums[T::kGroups];  // At most 256 x 64 x 32,640
#pragma unroll
  for (int group = 0; group < T::kGroups; ++group) sums[group] = 0;
#pragma unroll
  for (int i = 0; i < kLaneBytes; ++i) {
    const int byte = lane + 32 * i;
    int c[4];
    int e[4];
    Coefficients<T>(x[i], factor, c, e);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (byte < kBytes) {
        shared->query_bytes[T::HighColumn(row)][kBytes * j + byte] = (c[j] + 128) >> 8 & 255;
        shared->query_bytes[T::LowColumn(row)][kBytes * j + byte] = c[j] & 255;
      }
      sums[(kBytes * j + 32 * i) * T::kGroups / T::kDim] += e[j];
    }
  }
  const bool poisoned = __any_sync(~0u, poison != poison);
#pragma unroll
  for (int group = 0; group < T::kGroups; ++group) {
    const float sum = static_cast<float>(__reduce_add_sync(~0u, sums[group]));
    if (lane == 0) shared->query_sums[row][group] = poisoned ? NAN : sum;
  }
  if (lane == 0) {
    shared->query_unscale[row] = largest * (1.0f / 64.0f / kLargestFixed);
  }
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::SetQueries(const Shared<T>& shared) {
#pragma unroll
  for (int part = 0; part < T::kRowTiles * T::kParts; ++part) {
#pragma unroll
    for (int i = 0; i < T::kKeyWords; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        query_[part][T::StepOf(j, i)][T::HalfOf(j, i)] = *reinterpret_cast<const uint32_t*>(
            &shared.query_bytes[8 * part + row_][T::kDim / 4 * j + 16 * i + 4 * pair_]);
      }
    }
  }
#pragma unroll
  for (int a = 0; a < T::kLaneRows; ++a) {
    const int row = T::RowOf(a, pair_);
    unscale_[a] = shared.query_unscale[row];
#pragma unroll
    for (int group = 0; group < T::kGroups; ++group) {
      query_sum_[group][a] = shared.query_sums[row][group];
    }
  }
}

template <class T>
__device__ __forceinline__ void WarpSums<T>::Rescale(int a, float factor) {
  sum_[a] *= factor;
#pragma unroll
  for (int group = 0; group < T::kGroups; ++group) offset_[group][a] *= factor;
#pragma unroll
  for (int i = 0; i < T::kChannelTiles; ++i) {
    output_[i][a] *= factor;
    output_[i][T::kLaneRows + a] *= factor;
  }
}

}  // namespace okv::cuda

#include "kernels/cuda/attend_bf16.cuh"
#include "kernels/cuda/attend_int2.cuh"

#endif  // OKV_KERNELS_CUDA_ATTEND_WARP_CUH_
