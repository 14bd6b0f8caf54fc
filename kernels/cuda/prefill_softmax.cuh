#ifndef OKV_KERNELS_CUDA_PREFILL_SOFTMAX_CUH_
#define OKV_KERNELS_CUDA_PREFILL_SOFTMAX_CUH_

#include <cstdint>

#include "kernels/cuda/prefill_plan.cuh"
#include "kernels/cuda/ptx.cuh"

// What a warp does with 16 rows of scores or outputs in the fragments that mma.sync and wgmma
// share: element e of x[j] is row lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2.
namespace okv::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

// How scores become exponents of 2. With a softcap the scale is in the cap.
struct PrefillScale {
  float log2;         // Factor of a score
  float cap;          // 0: off
  float inverse_cap;  // softmax_scale / cap, times 2 log2(e)
};
__device__ __forceinline__ PrefillScale PrefillScaleOf(const PrefillParams& params) {
  const float cap = params.logit_softcap;
  if (cap <= 0.0f) return {.log2 = params.softmax_scale * kLog2E, .cap = 0.0f, .inverse_cap = 0.0f};
  return {.log2 = kLog2E, .cap = cap, .inverse_cap = 2.0f * kLog2E * params.softmax_scale / cap};
}
// tanh x = 1 - 2 / (exp(2 x) + 1)
template <int kTiles>
__device__ __forceinline__ void CapScores(const PrefillScale& scale, float (&s)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float power = Exp2(s[j][e] * scale.inverse_cap);
      s[j][e] = scale.cap * (1.0f - __fdividef(2.0f, power + 1.0f));
    }
  }
}

// Which columns of a page a row sees: after `after`, up to `last`.
struct PrefillVisible {
  int after;
  int last;
};
__device__ __forceinline__ PrefillVisible PrefillVisibleOf(const PrefillShape& shape, int position,
                                                           int block) {
  const int last = position - block * kPrefillBlockTokens;
  const int window = static_cast<int>(shape.sliding_window);
  return {.after = window == 0 ? -1 : last - window, .last = last};
}
// Whether some row of `unit_block` does not see all of a page that its unit sees.
__device__ __forceinline__ bool PrefillNeedsMask(const PrefillShape& shape, int unit_block,
                                                 const PrefillPage& page) {
  const int64_t first_seen_by_last_row = int64_t{unit_block} * kPrefillBlockTokens +
                                         kPrefillBlockTokens -
                                         static_cast<int64_t>(shape.sliding_window);
  return page.block == unit_block ||
         (shape.sliding_window != 0 &&
          int64_t{page.block} * kPrefillBlockTokens < first_seen_by_last_row);
}

// Hides a score in its own register: one that is changed on some paths only would otherwise be
// copied on all of them, 64 moves a step.
__device__ __forceinline__ void HideScore(float& score) {
  asm volatile("mov.f32 %0, 0fff800000;" : "+f"(score));
}

// Scores of a page's 64 tokens, tiles kFirst .. kFirst + 7 of s, of the row `position` and the one
// 8 positions later.
template <int kFirst, int kTiles>
__device__ __forceinline__ void MaskScores(const PrefillShape& shape, int position, int block,
                                           int lane, float (&s)[kTiles][4]) {
  static_assert(kFirst + 8 <= kTiles, "a page is 8 tiles");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const PrefillVisible visible = PrefillVisibleOf(shape, position + 8 * half, block);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + 2 * (lane & 3) + e;
        if (column <= visible.after || column > visible.last) {
          HideScore(s[kFirst + j][2 * half + e]);
        }
      }
    }
  }
}
template <int kFirst, int kTiles>
__device__ __forceinline__ void HidePage(float (&s)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) HideScore(s[kFirst + j][e]);
  }
}

// Of the thread's two rows. `sum` is of the thread's own columns until the end.
struct PrefillRows {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // Of scores, without the scale
  float sum[2] = {0.0f, 0.0f};
};

// Scores to probabilities relative to the rows' new maximum; factor[h] is what earlier sums and
// outputs of row h must be multiplied by.
template <int kTiles>
__device__ __forceinline__ void SoftmaxStep(float scale_log2, float (&s)[kTiles][4],
                                            PrefillRows* rows, float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int j = 1; j < kTiles; ++j) {
      largest = fmaxf(largest, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    largest = fmaxf(largest, rows->max[half]);
    const float base = largest == kMinusInfinity ? 0.0f : largest * scale_log2;
    factor[half] = Exp2(fmaf(rows->max[half], scale_log2, -base));
    rows->max[half] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        s[j][e] = Exp2(fmaf(s[j][e], scale_log2, -base));
        sum += s[j][e];
      }
    }
    rows->sum[half] = fmaf(rows->sum[half], factor[half], sum);
  }
}

template <int kTiles>
__device__ __forceinline__ void ScaleRows(const float (&factor)[2], float (&o)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[j][e] *= factor[e / 2];
  }
}

// The factors that turn outputs into averages, and the logarithms of the sums: with the sink logit
// of the rows' head, if any.
__device__ __forceinline__ void FinishRows(const PrefillParams& params, float scale_log2, int head,
                                           const PrefillRows& rows, float (&factor)[2],
                                           float (&lse)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float max = rows.max[half] * scale_log2;
    float own = 1.0f;
    if (params.sink_logits != nullptr) {
      const float sink = params.sink_logits[head] * kLog2E;
      const float with_sink = fmaxf(max, sink);
      own = Exp2(max - with_sink);
      sum = fmaf(sum, own, Exp2(sink - with_sink));
      max = with_sink;
    }
    factor[half] = own / sum;
    lse[half] = (max + __log2f(sum)) * kLn2;
  }
}

// Of a unit, by its 128 threads, when its pages end. True: o and rows have the sums of all pieces,
// and the caller finishes them. False: another thread block will. `meet` is a barrier of the unit's
// threads, `flag` a word of theirs in shared memory. Pieces are merged in their order, whichever
// ends last: the same bits in every run.
template <int kTiles, class Meet>
__device__ __forceinline__ bool MergePieces(const PrefillLaunch& launch, const PrefillItem& item,
                                            int unit, uint32_t* flag, Meet meet,
                                            float (&o)[kTiles][4], PrefillRows* rows) {
  const PrefillGranule& granule = item.granule;
  if (granule.pieces_count == 1) return true;
  const PrefillShape& shape = launch.params.plan.shape;
  const int64_t stride = int64_t{PrefillItemsOfHeads(shape)} * 2;  // Units of a partial result
  const int64_t first =
      granule.partial * stride +
      (item.kv_head * static_cast<int>(PrefillItemsPerGranule(shape)) + item.pair) * 2 + unit;
  const int thread = static_cast<int>(threadIdx.x % 128);
  const auto part = [&](int piece) {
    return launch.plan.partials + (first + piece * stride) * (kTiles + 1) * 128 + thread;
  };
  float4* const own = part(granule.piece);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) own[j * 128] = make_float4(o[j][0], o[j][1], o[j][2], o[j][3]);
  own[kTiles * 128] = make_float4(rows->max[0], rows->max[1], rows->sum[0], rows->sum[1]);
  __threadfence();
  meet();
  if (thread == 0) {
    uint32_t* const merged = launch.plan.merged + first;
    const uint32_t before = AtomicAddAcquireRelease(merged, 1);
    *flag = before;
    if (before + 1 == static_cast<uint32_t>(granule.pieces_count))
      *merged = 0;  // For the next layer
  }
  meet();
  if (*flag + 1 != static_cast<uint32_t>(granule.pieces_count)) return false;
  __threadfence();
  *rows = PrefillRows();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[j][e] = 0.0f;
  }
  for (int piece = 0; piece < granule.pieces_count; ++piece) {
    const float4* const other = part(piece);
    const float4 numbers = __ldcg(other + kTiles * 128);
    const float max[2] = {numbers.x, numbers.y};
    const float sum[2] = {numbers.z, numbers.w};
    float kept[2];
    float added[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = fmaxf(rows->max[half], max[half]);
      const float scale = PrefillScaleOf(launch.params).log2;
      const float base = largest == kMinusInfinity ? 0.0f : largest * scale;
      kept[half] = Exp2(fmaf(rows->max[half], scale, -base));
      added[half] = Exp2(fmaf(max[half], scale, -base));
      rows->max[half] = largest;
      rows->sum[half] = fmaf(rows->sum[half], kept[half], sum[half] * added[half]);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float4 x = __ldcg(other + j * 128);
      o[j][0] = fmaf(o[j][0], kept[0], x.x * added[0]);
      o[j][1] = fmaf(o[j][1], kept[0], x.y * added[0]);
      o[j][2] = fmaf(o[j][2], kept[1], x.z * added[1]);
      o[j][3] = fmaf(o[j][3], kept[1], x.w * added[1]);
    }
  }
  return true;
}

// Two 8-column tiles as the A operand of a product over 16 columns: rounded to bf16, and what the
// rounding left.
__device__ __forceinline__ void PackTiles(const float (&low)[4], const float (&high)[4],
                                          uint32_t (&a)[4]) {
  a[0] = PackBf16(low[0], low[1]);
  a[1] = PackBf16(low[2], low[3]);
  a[2] = PackBf16(high[0], high[1]);
  a[3] = PackBf16(high[2], high[3]);
}
__device__ __forceinline__ void PackRest(const float (&low)[4], const float (&high)[4],
                                         const uint32_t (&a)[4], uint32_t (&rest)[4]) {
  rest[0] = PackBf16(low[0] - LowBf16(a[0]), low[1] - HighBf16(a[0]));
  rest[1] = PackBf16(low[2] - LowBf16(a[1]), low[3] - HighBf16(a[1]));
  rest[2] = PackBf16(high[0] - LowBf16(a[2]), high[1] - HighBf16(a[2]));
  rest[3] = PackBf16(high[2] - LowBf16(a[3]), high[3] - HighBf16(a[3]));
}

// The A operand of channels [16 k, 16 k + 16) of rows of q at `offset`, in elements; 0 where that
// is negative.
__device__ __forceinline__ void LoadQueries(const __nv_bfloat16* q, const int64_t (&offset)[2],
                                            int k, int lane, uint32_t (&a)[4]) {
  const int channel = 16 * k + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = offset[i & 1];
    a[i] = row < 0 ? 0 : __ldg(reinterpret_cast<const uint32_t*>(q + row + channel + (i >> 1) * 8));
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_SOFTMAX_CUH_
