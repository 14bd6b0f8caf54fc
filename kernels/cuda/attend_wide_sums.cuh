#ifndef OKV_KERNELS_CUDA_ATTEND_WIDE_SUMS_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WIDE_SUMS_CUH_

#include "kernels/cuda/attend_warp.cuh"
#include "kernels/cuda/attend_wide_tile.cuh"

// What one warpgroup computes with 16 query rows. The arithmetic is that of attend_warp.cuh; what
// differs is who does it. A unit is four pages, and warp w of the group has
// - of the keys tokens 16 w .. 16 w + 15 of each page (rows of wgmma's A), against all 32 columns
//   of query bytes, which lie in shared memory;
// - of the softmax the same tokens; the scale of p is the group's, by an exchange of maxima;
// - of the values channels 32 j + 16 (w / 2) .. + 15 of slots j = 2 (w % 2) and the next one,
//   against the p v_scale of all tokens, which the four warps wrote to shared memory as bytes;
// - of BF16 units all tokens and its own channels: their scores are computed four times, which
//   costs less than to exchange them.
namespace okv::cuda {

#if OKV_HAS_WGMMA

// A group's sums are relative to 2^maximum, which is set this much above the first unit's, so that
// it seldom changes: weights are at most 1.
inline constexpr float kHeadroom = 40.0f;
inline constexpr float kWideOutputUnit = 0x1p-40f;

template <class T>
class WideSums {
 public:
  static constexpr int kA = T::kLaneRows;
  static constexpr int kSlots = 2;  // Channel tiles of a warp
  static constexpr int kPageTokens = kBlockTokens;
  static constexpr int kValues = 8;  // Of a tile: rows row_ and row_ + 8 of 4 query rows

  // Scores of the warp's tokens of a unit.
  struct Scores {
    float score[T::kPages][kValues];  // 64 F times the logit (in units of log 2)
    float unscale[kA];                // 1 / (64 F)
  };

  __device__ __forceinline__ void Begin(const AttendKernelParams& params, const Piece& piece,
                                        const Shared<T>& shared);
  // Up to the maxima of the warp's tokens, which it writes to shared memory.
  __device__ __forceinline__ void ScoreInt2(const AttendKernelParams& params, const Piece& piece,
                                            int index, bool is_full, const UnitSlots<T>& slots,
                                            Shared<T>* shared, Scores* scores);
  // Calls `meanwhile` while the last products are computed. REQUIRES: WarpgroupSync() since
  // ScoreInt2().
  template <class Function>
  __device__ __forceinline__ void AddInt2(const UnitSlots<T>& slots, Scores* scores,
                                          Shared<T>* shared, const Function& meanwhile);
  // REQUIRES: what is behind the last row of the unit is 0, and WarpgroupSync() since.
  __device__ __forceinline__ void AddBf16(const AttendKernelParams& params, const Piece& piece,
                                          int unit, const UnitSlots<T>& slots,
                                          const Shared<T>& shared);
  // Writes the sums, relative to 2^maximum, to the group's part of shared memory.
  __device__ __forceinline__ void Finish(Shared<T>* shared);

 private:
  __device__ __forceinline__ bool Sees(const DecodeShape& shape, int a, int token, bool int2) const;
  __device__ __forceinline__ void IssueKeys(const uint4& codes, uint64_t query,
                                            int (&sums)[16]) const;
  __device__ __forceinline__ void ScorePage(const UnitSlots<T>& slots, int page,
                                            const float (&query_sum)[kA], const int (&sums)[16],
                                            Scores* scores) const;
  // Softcap; what a query does not see, of the unit whose first token is `first`.
  __device__ __forceinline__ void CapAndHide(const AttendKernelParams& params, int first,
                                             Scores* scores) const;
  __device__ __forceinline__ void WriteMaxima(const UnitSlots<T>& slots, const Scores& scores,
                                              Shared<T>* shared) const;
  __device__ __forceinline__ void ReadMaxima(const Shared<T>& shared, float (&largest)[kA]) const;
  __device__ __forceinline__ void Probabilities(Scores* scores, const Shared<T>& shared,
                                                float (&weight)[kA]);
  __device__ __forceinline__ void StoreProbabilities(const UnitSlots<T>& slots,
                                                     const Scores& scores, uint32_t operand,
                                                     float (&offsets)[kA]) const;
  struct ValueCodes {
    uint32_t a[2][kSlots][4];
  };
  __device__ __forceinline__ void LoadValues(const UnitSlots<T>& slots, int page,
                                             ValueCodes& codes) const;
  __device__ __forceinline__ void AddValues(const UnitSlots<T>& slots, uint64_t operand,
                                            ValueCodes (&codes)[2], int (&sums)[kSlots][16]);
  __device__ __forceinline__ void AddSums(const float (&weight)[kA], int (&sums)[kSlots][16]);
  __device__ __forceinline__ void Bf16Scores(const AttendKernelParams& params, uint32_t keys,
                                             const Shared<T>& shared, float (&score)[2][kA]) const;
  __device__ __forceinline__ void Bf16Probabilities(const float (&score)[2][kA],
                                                    uint32_t (&high)[2][T::kRowTiles],
                                                    uint32_t (&low)[2][T::kRowTiles]);
  __device__ __forceinline__ void Rescale(int a, float factor);
  // Of output_[0]; that of output_[1] is 4 times as large.
  __device__ __forceinline__ float SlotUnit() const {
    return first_slot_ == 0 ? kWideOutputUnit : 16.0f * kWideOutputUnit;
  }
  __device__ __forceinline__ int ChannelOf(int slot) const {
    return T::kDim / 4 * (first_slot_ + slot) + 16 * half_;
  }
  // Scales and offsets of keys row_ and row_ + 8 of the warp's of a page; behind them the values'.
  __device__ __forceinline__ uint2* Parameters(const UnitSlots<T>& slots, int page) const {
    return reinterpret_cast<uint2*>(slots.slot[page] + T::kParameters) + 2 * (8 * warp_ + row_);
  }
  // What the group's warps tell each other of each row.
  __device__ __forceinline__ float (&Exchange(const Shared<T>* shared, int what)
                                        const)[T::kRows][4] {
    return WideState<T>::Of(shared)->exchange[group_][what];
  }
  // p v_scale of the group's unit as bytes, where its sums will be at the piece's end.
  __device__ __forceinline__ uint32_t Operand(const Shared<T>* shared) const {
    return SharedAddress(shared->output[group_]);
  }

  int pair_;
  int row_;
  int group_;
  int warp_;        // in the group
  int half_;        // Words of the values' bytes: channels 16 half_ .. of each 32
  int first_slot_;  // of the values
  uint64_t query_;  // Operands of wgmma
  uint64_t operand_;
  int position_[kA];

  // All relative to 2^maximum_; sum_ and offset_ are of this lane's tokens only. output_ of slot j
  // is times 4^j kWideOutputUnit.
  float output_[kSlots][kValues];
  float maximum_[kA];
  float sum_[kA];     // of p
  float offset_[kA];  // of p v_offset
};

template <class T>
__device__ __forceinline__ void WideSums<T>::Begin(const AttendKernelParams& params,
                                                   const Piece& piece, const Shared<T>& shared) {
  pair_ = threadIdx.x % 4;
  row_ = threadIdx.x % 32 / 4;
  // Through a shuffle, so that the compiler knows them to be the same in all lanes.
  group_ = __shfl_sync(~0u, threadIdx.x / 128, 0);
  warp_ = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);
  // Through shuffles too, or each use needs a move to a uniform register, 30 a unit.
  query_ = CoreMatrices(__shfl_sync(~0u, SharedAddress(shared.query_bytes), 0), T::kStepBytes);
  operand_ = CoreMatrices(__shfl_sync(~0u, Operand(&shared), 0), T::kStepBytes);
  half_ = warp_ / 2;
  first_slot_ = warp_ % 2 * 2;
  position_[0] = piece.plan.length - 1;
  if (!T::kPlain) {
    const int first = piece.plan.length - static_cast<int>(params.decode.shape.query_tokens);
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      const int row = piece.row_begin + T::RowOf(a, pair_);
      position_[a] = min(first + row / static_cast<int>(params.query_group), piece.plan.length - 1);
    }
  }
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    maximum_[a] = kNothing;
    sum_[a] = 0.0f;
    offset_[a] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) output_[i][v] = 0.0f;
  }
}

template <class T>
__device__ __forceinline__ bool WideSums<T>::Sees(const DecodeShape& shape, int a, int token,
                                                  bool int2) const {
  if (T::kPlain) return token <= position_[0];
  return SeesToken(shape, position_[a], token, int2);
}

template <class T>
__device__ __forceinline__ void WideSums<T>::Rescale(int a, float factor) {
  sum_[a] *= factor;
  offset_[a] *= factor;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    output_[i][a] *= factor;
    output_[i][kA + a] *= factor;
  }
}

// Starts the products of the warp's 16 keys of a page with all rows.
template <class T>
__device__ __forceinline__ void WideSums<T>::IssueKeys(const uint4& codes, uint64_t query,
                                                       int (&sums)[16]) const {
  uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
  PinWords(w);
  uint32_t a[T::kKeySteps][4];
#pragma unroll
  for (int s = 0; s < T::kKeySteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[s][i] = KeyBytes<T>(w[i], s);
    PinWords(a[s]);
  }
  PinWords(sums);
  WgmmaBegin();
#pragma unroll
  for (int s = 0; s < T::kKeySteps; ++s) {
    WgmmaU8S8(sums, a[s], Further(query, 2 * s * T::kStepBytes), s != 0);
  }
  WgmmaCommit();
}

template <class T>
__device__ __forceinline__ void WideSums<T>::ScorePage(const UnitSlots<T>& slots, int page,
                                                       const float (&query_sum)[kA],
                                                       const int (&sums)[16],
                                                       Scores* scores) const {
  const uint2 words = *Parameters(slots, page);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const int r = v / kA;
    const int a = v % kA;
    const uint32_t word = r == 0 ? words.x : words.y;
    const int high = sums[4 * T::HighMatrix(a) + T::HighElement(r, a)];
    const int low = sums[4 * T::LowMatrix(a) + T::LowElement(r, a)];
    const float offset = HighBf16(word) * query_sum[a];
    scores->score[page][v] = fmaf(static_cast<float>(high * 256 + low), LowBf16(word), offset);
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::CapAndHide(const AttendKernelParams& params, int first,
                                                        Scores* scores) const {
  const float cap = params.cap_log2;
#pragma unroll
  for (int page = 0; page < T::kPages; ++page) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      float& score = scores->score[page][v];
      const float unscale = scores->unscale[v % kA];
      if (cap > 0.0f) score = cap / unscale * tanhf(score * (unscale / cap));
      const int token = first + page * kPageTokens + warp_ * 16 + row_ + v / kA * 8;
      if (!Sees(params.decode.shape, v % kA, token, true)) score = kHidden;
    }
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::ScoreInt2(const AttendKernelParams& params,
                                                       const Piece& piece, int index, bool is_full,
                                                       const UnitSlots<T>& slots, Shared<T>* shared,
                                                       Scores* scores) {
  const auto codes = [&](int page) {
    return reinterpret_cast<const uint4*>(slots.slot[page])[32 * warp_ + threadIdx.x % 32];
  };
  float query_sum[kA];  // 64 F times the sum of the rounded query
#pragma unroll
  for (int a = 0; a < kA; ++a) query_sum[a] = shared->query_sums[T::RowOf(a, pair_)][0];
  int sums[2][16];
  IssueKeys(codes(0), query_, sums[0]);
#pragma unroll
  for (int page = 0; page < T::kPages; ++page) {
    if (page + 1 < T::kPages) {  // Queued behind the products of this page
      IssueKeys(codes(page + 1), query_, sums[(page + 1) % 2]);
      WgmmaWait<1>();
    } else {
      WgmmaWait<0>();
    }
    PinWords(sums[page % 2]);
    ScorePage(slots, page, query_sum, sums[page % 2], scores);
  }
#pragma unroll
  for (int a = 0; a < kA; ++a) scores->unscale[a] = shared->query_unscale[T::RowOf(a, pair_)];
  if (!is_full) {
    const int pages = piece.plan.int2_blocks - piece.Int2Unit(index) * T::kPages;
    // The last unit. What an earlier one left in the place of pages must not be read as scales.
#pragma unroll
    for (int page = 1; page < T::kPages; ++page) {
      if (page < pages) continue;
      Parameters(slots, page)[1] = {0, 0};
#pragma unroll
      for (int v = 0; v < kValues; ++v) scores->score[page][v] = kHidden;
    }
    __syncwarp();
  }
  if constexpr (!T::kPlain) {
    const int first =
        (piece.plan.int2_first_block + piece.Int2Unit(index) * T::kPages) * kPageTokens;
    if (params.cap_log2 > 0.0f || !AllSeeInt2(params.decode.shape, piece.plan.length, first,
                                              first + T::kPages * kPageTokens - 1)) {
      CapAndHide(params, first, scores);
    }
  }
  WriteMaxima(slots, *scores, shared);
}

// log2 of a positive bf16, at most 0.087 too small, as in attend_int2.cuh, but as a fraction of the
// range from kLogBegin on, which bounds it below at no cost.
inline constexpr float kLogBegin = -40.0f;
inline constexpr float kLogRange = 256.0f;
__device__ __forceinline__ float LogFraction(uint32_t word) {
  float bits;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f32.u16 %0, low;\n}"
      : "=f"(bits)
      : "r"(word));
  return __saturatef(fmaf(bits, 1.0f / 128 / kLogRange, (-127.0f - kLogBegin) / kLogRange));
}

// Per row the exponent of the fixed point's unit with which the warp's tokens fit: log2 of their
// largest p v_scale, at most 0.087 too small, less 15.9.
template <class T>
__device__ __forceinline__ void WideSums<T>::WriteMaxima(const UnitSlots<T>& slots,
                                                         const Scores& scores,
                                                         Shared<T>* shared) const {
  float largest[kA];
  float unscale[kA];
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    largest[a] = -1e25f;
    unscale[a] = scores.unscale[a] * (1.0f / kLogRange);
  }
#pragma unroll
  for (int page = 0; page < T::kPages; ++page) {
    const uint2 words = Parameters(slots, page)[1];
    const float log_scale[2] = {LogFraction(words.x), LogFraction(words.y)};
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int a = v % kA;
      const float log = fmaf(scores.score[page][v], unscale[a], log_scale[v / kA]);
      // The first page of a unit exists and is seen by all rows, if there is nothing to hide.
      largest[a] = T::kPlain && page == 0 && v < kA ? log : fmaxf(largest[a], log);
    }
  }
  // Halves of the lanes keep halves of the rows.
  const bool second = (threadIdx.x & 16) != 0;
  const bool odd = (threadIdx.x & 8) != 0;
  float pairs[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = second ? largest[i] : largest[2 + i];
    pairs[i] = fmaxf(second ? largest[2 + i] : largest[i], __shfl_xor_sync(~0u, sent, 16));
  }
  const float sent = odd ? pairs[0] : pairs[1];
  float one = fmaxf(odd ? pairs[1] : pairs[0], __shfl_xor_sync(~0u, sent, 8));
  one = fmaxf(one, __shfl_xor_sync(~0u, one, 4));
  const int row = T::RowOf((second ? 2 : 0) + (odd ? 1 : 0), pair_);
  // In units of log 2; 15.9 + 0.087 < log2(65,535).
  one = fmaf(one, kLogRange, kLogBegin - 15.9f);
  if ((threadIdx.x & 4) == 0) Exchange(shared, 0)[row][warp_] = one;
}

template <class T>
__device__ __forceinline__ void WideSums<T>::ReadMaxima(const Shared<T>& shared,
                                                        float (&largest)[kA]) const {
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    const float4 warps = *reinterpret_cast<const float4*>(Exchange(&shared, 0)[T::RowOf(a, pair_)]);
    largest[a] = fmaxf(fmaxf(warps.x, warps.y), fmaxf(warps.z, warps.w));
  }
}

// Scores become probabilities relative to a power of two with which max(p v_scale) of the unit is
// at most 65,000; weight is what that is relative to 2^maximum_.
template <class T>
__device__ __forceinline__ void WideSums<T>::Probabilities(Scores* scores, const Shared<T>& shared,
                                                           float (&weight)[kA]) {
  float largest[kA];
  ReadMaxima(shared, largest);
  bool grows = false;
#pragma unroll
  for (int a = 0; a < kA; ++a) grows |= largest[a] > maximum_[a];
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      if (largest[a] <= maximum_[a]) continue;
      Rescale(a, Exp2(maximum_[a] - (largest[a] + kHeadroom)));
      maximum_[a] = largest[a] + kHeadroom;
    }
  }
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    weight[a] = Exp2(largest[a] - maximum_[a]);
    float sum = 0.0f;
#pragma unroll
    for (int page = 0; page < T::kPages; ++page) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& p = scores->score[page][r * kA + a];
        p = Exp2(fmaf(p, scores->unscale[a], -largest[a]));
        sum = page + r == 0 ? p : sum + p;
      }
    }
    sum_[a] = fmaf(sum, weight[a], sum_[a]);
  }
}

// round(p v_scale) as bytes, 16 tokens of all columns a step of the operand: the order of the
// values' codes, tokens t and t + 8 side by side, is that in which a lane has them. Columns: high
// and low byte of a row side by side, a lane's a-th rows together.
template <class T>
__device__ __forceinline__ void WideSums<T>::StoreProbabilities(const UnitSlots<T>& slots,
                                                                const Scores& scores,
                                                                uint32_t operand,
                                                                float (&offsets)[kA]) const {
#pragma unroll
  for (int a = 0; a < kA; ++a) offsets[a] = 0.0f;
#pragma unroll
  for (int page = 0; page < T::kPages; ++page) {
    const uint2 words = Parameters(slots, page)[1];
    uint32_t bytes[kA];
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      const float p[2] = {scores.score[page][a], scores.score[page][kA + a]};
      const float first = fmaf(p[0], LowBf16(words.x), 8388608.0f);
      const float second = fmaf(p[1], LowBf16(words.y), 8388608.0f);
      bytes[a] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x4051);
      offsets[a] = fmaf(p[0], HighBf16(words.x), offsets[a]);
      offsets[a] = fmaf(p[1], HighBf16(words.y), offsets[a]);
    }
    StoreMatrix4Transposed(operand + (4 * page + warp_) * T::kStepBytes + 16 * (threadIdx.x % 32),
                           bytes);
  }
}

// The values of a page as operands: their codes of the warp's slots, 32 tokens a step.
template <class T>
__device__ __forceinline__ void WideSums<T>::LoadValues(const UnitSlots<T>& slots, int page,
                                                        ValueCodes& codes) const {
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint4 w = reinterpret_cast<const uint4*>(
        slots.slot[page] + T::kValueCodes)[(2 * u + half_) * 32 + threadIdx.x % 32];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t mask = (i == 0 ? 0x03030303u : 0x0c0c0c0cu) << (2 * first_slot_);
      codes.a[u][i][0] = w.x & mask;
      codes.a[u][i][1] = w.y & mask;
      codes.a[u][i][2] = w.z & mask;
      codes.a[u][i][3] = w.w & mask;
      PinWords(codes.a[u][i]);
    }
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::AddValues(const UnitSlots<T>& slots, uint64_t operand,
                                                       ValueCodes (&codes)[2],
                                                       int (&sums)[kSlots][16]) {
#pragma unroll
  for (int page = 0; page < T::kPages; ++page) {
    if (page >= 2) LoadValues(slots, page, codes[page % 2]);
    if (page == 0) {
      PinWords(sums[0]);
      PinWords(sums[1]);
    }
    WgmmaBegin();
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int i = (k + page) % kSlots;  // The slot that the page before ended with goes on.
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint64_t b = Further(operand, (4 * page + 2 * u) * T::kStepBytes);
        WgmmaU8U8(sums[i], codes[page % 2].a[u][i], b, page + u != 0);
      }
    }
    WgmmaCommit();
    if (page + 1 < T::kPages) WgmmaWait<1>();
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::AddSums(const float (&weight)[kA],
                                                     int (&sums)[kSlots][16]) {
  // The bits of an integer below 2^24 are those of the float 2^-149 times as large; a unit's sums
  // are at most 256 x 192 x 255.
  constexpr float kFactor = kWideOutputUnit * 0x1p100f * 0x1p49f;
  float factor[kA];
#pragma unroll
  for (int a = 0; a < kA; ++a) factor[a] = weight[a] * kFactor;
  WgmmaWait<0>();
  PinWords(sums[0]);
  PinWords(sums[1]);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int r = v / kA;
      const int a = v % kA;
      const float high = __int_as_float(sums[i][4 * a + 2 * r]);
      const float low = __int_as_float(sums[i][4 * a + 2 * r + 1]);
      output_[i][v] = fmaf(fmaf(high, 256.0f, low), factor[a], output_[i][v]);
    }
  }
}

template <class T>
template <class Function>
__device__ __forceinline__ void WideSums<T>::AddInt2(const UnitSlots<T>& slots, Scores* scores,
                                                     Shared<T>* shared, const Function& meanwhile) {
  float weight[kA];
  Probabilities(scores, *shared, weight);
  float offsets[kA];
  StoreProbabilities(slots, *scores, Operand(shared), offsets);
#pragma unroll
  for (int a = 0; a < kA; ++a) offset_[a] = fmaf(offsets[a], weight[a], offset_[a]);
  FenceBeforeBulkCopy();  // wgmma reads shared memory as bulk copies write it
  ValueCodes codes[2];
  LoadValues(slots, 0, codes[0]);
  LoadValues(slots, 1, codes[1]);
  WarpgroupSync(group_);
  int values[kSlots][16];
  AddValues(slots, operand_, codes, values);
  meanwhile();
  AddSums(weight, values);
}

// As in attend_bf16.cuh, for 16 tokens.
template <class T>
__device__ __forceinline__ void WideSums<T>::Bf16Scores(const AttendKernelParams& params,
                                                        uint32_t keys, const Shared<T>& shared,
                                                        float (&score)[2][kA]) const {
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
  for (int a = 0; a < kA; ++a) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float s = products[a / 2][2 * r + a % 2] * params.scale_log2;
      if (!T::kPlain && params.cap_log2 > 0.0f) s = params.cap_log2 * tanhf(s / params.cap_log2);
      score[r][a] = s;
    }
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::Bf16Probabilities(const float (&score)[2][kA],
                                                               uint32_t (&high)[2][T::kRowTiles],
                                                               uint32_t (&low)[2][T::kRowTiles]) {
  float part_high[2][kA];
  float part_low[2][kA];
#pragma unroll
  for (int a = 0; a < kA; ++a) {
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
      if (warp_ == 0) sum_[a] += p;  // All four warps have them.
      part_high[r][a] = __bfloat162float(__float2bfloat16(p));
      part_low[r][a] = p - part_high[r][a];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < T::kRowTiles; ++i) {
      high[r][i] = Transpose8x8(PackBf16(part_high[r][2 * i], part_high[r][2 * i + 1]));
      low[r][i] = Transpose8x8(PackBf16(part_low[r][2 * i], part_low[r][2 * i + 1]));
    }
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::AddBf16(const AttendKernelParams& params,
                                                     const Piece& piece, int unit,
                                                     const UnitSlots<T>& slots,
                                                     const Shared<T>& shared) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int first = piece.Bf16Token(unit, T::kUnitTokens);
  const int tiles = (min(T::kUnitTokens, piece.plan.length - first) + 15) / 16;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const uint32_t row = 16 * tile + lane % 8;
    float score[2][kA];
    Bf16Scores(
        params,
        SharedAddress(slots.slot[0]) + (row + matrix % 2 * 8) * T::kRowBytes + matrix / 2 * 16,
        shared, score);
#pragma unroll
    for (int a = 0; a < kA; ++a) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = first + 16 * tile + row_ + 8 * r;
        if (!Sees(params.decode.shape, a, token, false)) score[r][a] = kHidden;
      }
    }
    uint32_t high[2][T::kRowTiles];
    uint32_t low[2][T::kRowTiles];
    Bf16Probabilities(score, high, low);
    const float unit[kSlots] = {SlotUnit(), 4.0f * SlotUnit()};
    const uint32_t values =
        SharedAddress(slots.Values()) + (row + matrix / 2 * 8) * T::kRowBytes + matrix % 2 * 16;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      uint32_t a[4];
      LoadMatrix4Transposed(a, values + 2 * ChannelOf(i));
#pragma unroll
      for (int part = 0; part < T::kRowTiles; ++part) {
        float sums[4] = {};
        MmaBf16(sums, a, high[0][part], high[1][part]);
        MmaBf16(sums, a, low[0][part], low[1][part]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float& output = output_[i][k / 2 * kA + 2 * part + k % 2];
          output = fmaf(sums[k], unit[i], output);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void WideSums<T>::Finish(Shared<T>* shared) {
#pragma unroll
  for (int a = 0; a < kA; ++a) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      sum_[a] += __shfl_xor_sync(~0u, sum_[a], lanes);
      offset_[a] += __shfl_xor_sync(~0u, offset_[a], lanes);
    }
  }
  WarpgroupSync(group_);  // Maxima are read.
  if (row_ == 0) {
#pragma unroll
    for (int a = 0; a < kA; ++a) {
      const int row = T::RowOf(a, pair_);
      Exchange(shared, 0)[row][warp_] = sum_[a];
      Exchange(shared, 1)[row][warp_] = offset_[a];
    }
  }
  WarpgroupSync(group_);
#pragma unroll
  for (int a = 0; a < kA; ++a) {
    const int row = T::RowOf(a, pair_);
    float sum = 0.0f;
    float offset = 0.0f;
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      sum += Exchange(shared, 0)[row][warp];
      offset += Exchange(shared, 1)[row][warp];
    }
    if (warp_ == 0 && row_ == 0) {
      shared->maxima[group_][row] = maximum_[a];
      shared->sums[group_][row] = sum;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shared->output[group_][ChannelOf(i) + row_ + 8 * r][row] =
            fmaf(output_[i][r * kA + a], (i == 0 ? 1.0f : 0.25f) / SlotUnit(), offset);
      }
    }
  }
}

#endif  // OKV_HAS_WGMMA

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_WIDE_SUMS_CUH_
