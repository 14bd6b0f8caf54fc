#ifndef OKV_KERNELS_CUDA_PREFILL_WGMMA_CUH_
#define OKV_KERNELS_CUDA_PREFILL_WGMMA_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill_load.cuh"
#include "kernels/cuda/prefill_plan.cuh"
#include "kernels/cuda/prefill_softmax.cuh"
#include "kernels/cuda/prefill_wgmma_ptx.cuh"

// Prefill attention on sm_90a: thread blocks that stay, one a multiprocessor. One warp takes items,
// one loads their pages into a ring, two warpgroups compute a unit each from it. The rotations pass
// through the same ring: queries as keys and R_K's rows as values before an item's first page,
// R_V's rows as keys behind its last, so that q R_K and the output times R_V^T are products like
// the others.
//
// Registers are what this is made around: a thread of a warpgroup has 160 of scores, probabilities
// and outputs. Spilled ones in the loop over pages halve the speed: see what ptxas says with -v,
// and in which loop, after every change.
namespace okv::cuda {

// Instructions that sm_90a alone has; the host's pass, too, must not see them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup that computes a unit of each item.
template <int kDim>
class PrefillWarpgroup {
 public:
  using Tile = PrefillWgmmaTile<kDim>;
  using Ring = PrefillRing<kDim>;
  static constexpr int kUnits = kDim / 8;
  static constexpr int kScoreTiles = Tile::kTokens / 8;
  static constexpr int kRotated = Tile::kRotationRows;  // Columns of a step of the last product

  __device__ PrefillWarpgroup(const PrefillLaunch& launch, int unit,
                              const PrefillItems<kDim>& items, const Ring& ring)
      : launch_(launch),
        params_(launch.params),
        unit_(unit),
        items_(items),
        ring_(ring),
        lane_(threadIdx.x % 32),
        warp_row_(threadIdx.x / 32 % 4 * 16),
        flag_(reinterpret_cast<uint32_t*>(items.shared + Tile::kFlags) + unit),
        queries_(items.shared + unit * Tile::kQueryBytes),
        queries_operand_(SwizzledOperand::At(ring.base + unit * Tile::kQueryBytes)) {}

  __device__ void Run() {
    typename PrefillItems<kDim>::Turn turn;
    while (true) {
      item_ = &items_.Wait(turn);
      if (item_->kv_head < 0) return;
      block_ = item_->block[unit_];
      position_ = block_ * kPrefillBlockTokens + warp_row_ + lane_ / 4;
      clear_pages_ = PrefillClearPages(params_.plan.shape, *item_);
      RunItem();
      items_.Release(turn);
      turn.Next();
    }
  }

 private:
  __device__ void RunItem() {
    float o[kUnits][4];
    RotateQueries(o);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[j][e] = 0.0f;
    }
    const PrefillScale scale = PrefillScaleOf(params_);
    PrefillRows rows;
    const int steps = (item_->pages_count + Tile::kPages - 1) / Tile::kPages;
    if (steps > 0) AddPages(scale, steps, &rows, o);
    if (item_->no_room) rows.sum[0] = rows.sum[1] = __int_as_float(0x7fc00000);
    if (MergePieces(
            launch_, *item_, unit_, flag_, [this] { Meet(); }, o, &rows)) {
      Finish(scale, rows, o);
    } else {
      for (int i = 0; i < Tile::kRotationSteps; ++i) {  // R_V arrives all the same.
        ring_.WaitKeys(keys_);
        Release(ring_.KeysEmpty(keys_));
        keys_.Next();
      }
    }
  }

  // Of a stage of the ring.
  __device__ void Release(uint32_t empty) const {
    if (lane_ == 0) BarrierArrive(empty);
  }
  // Waits for the warpgroup's other warps.
  __device__ void Meet() const { NamedWait(1 + unit_, 128); }

  // Tiles of fp32 as bf16 to the warp's rows of the unit's queries, channels from 8 `first` on.
  template <int kTiles>
  __device__ void WriteRows(const float (&x)[kTiles][4], int first) const {
    const int row = static_cast<int>(Again(warp_row_ + lane_ / 4));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int unit = first + j;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(queries_ + unit / 8 * kSwizzledPageBytes +
                                     SwizzledOffset(row + 8 * half, unit % 8) + (lane_ & 3) * 4) =
            PackBf16(x[j][2 * half], x[j][2 * half + 1]);
      }
    }
  }

  // q R_K, rounded, to shared memory. `o` is scratch.
  __device__ void RotateQueries(float (&o)[kUnits][4]) {
    constexpr int kSteps = Tile::kRotationRows / 16;
    uint32_t queries = 0;
    typename Ring::Turn turn = keys_;
#pragma unroll
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      ring_.WaitKeys(turn);
      if (i == unit_ / Tile::kStageUnits) {
        queries = ring_.Keys(turn) + unit_ % Tile::kStageUnits * Tile::kQueryBytes;
      }
      turn.Next();
    }
#pragma unroll
    for (int i = 0; i < Tile::kRotationSteps; ++i) {
      uint32_t a[kSteps][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int unit = 2 * (i * kSteps + k) + (lane_ >> 4);
        LoadMatrix4(a[k], queries + unit / 8 * kSwizzledPageBytes +
                              SwizzledOffset(warp_row_ + (lane_ & 15), unit % 8));
      }
      ring_.WaitValues(values_);
      const SwizzledOperand rotation = Values();
      WgmmaBegin();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        Wgmma<kDim>::RegistersByRows(o, a[k], RowsOf(rotation, k), i + k > 0);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      PinSums(o);
      Release(ring_.ValuesEmpty(values_));
      values_.Next();
    }
#pragma unroll
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      Release(ring_.KeysEmpty(keys_));
      keys_.Next();
    }
    __syncwarp();  // The output of the item before, in the same place, was read by all lanes.
    WriteRows(o, 0);
    FenceBeforeBulkCopy();
    Meet();
  }

  // Rows [16 k, 16 k + 16) of values.
  __device__ static uint64_t RowsOf(const SwizzledOperand& values, int k) {
    return values.Descriptor<Tile::kHalfBytes>(k * 16 * kSwizzledRowBytes);
  }
  // Channels [16 k, 16 k + 16) of keys, and of the queries.
  __device__ static uint64_t ChannelsOf(const SwizzledOperand& keys, int k) {
    return keys.Descriptor<16>(k / 4 * Tile::kHalfBytes + k % 4 * 32);
  }
  __device__ static uint64_t QueriesOf(const SwizzledOperand& queries, int k) {
    return queries.Descriptor<16>(k / 4 * kSwizzledPageBytes + k % 4 * 32);
  }
  __device__ SwizzledOperand Keys() const {
    return SwizzledOperand::At(Uniform(ring_.Keys(keys_)));
  }
  __device__ SwizzledOperand Values() const {
    return SwizzledOperand::At(Uniform(ring_.Values(values_)));
  }

  __device__ void QueueScores(float (&s)[kScoreTiles][4]) const {
    const SwizzledOperand keys = Keys();
    const SwizzledOperand queries = {Uniform(queries_operand_.low)};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      Wgmma<Tile::kTokens>::Shared(s, QueriesOf(queries, k), ChannelsOf(keys, k), k > 0);
    }
    WgmmaCommit();
  }
  __device__ void QueueOutputs(const uint32_t (&p)[kScoreTiles / 2][4],
                               float (&o)[kUnits][4]) const {
    const SwizzledOperand values = Values();
#pragma unroll
    for (int k = 0; k < kScoreTiles / 2; ++k) {
      Wgmma<kDim>::RegistersByRows(o, p[k], RowsOf(values, k), 1);
    }
    WgmmaCommit();
  }

  template <int kPage>
  __device__ void MaskPage(int step, float (&s)[kScoreTiles][4]) const {
    const PrefillShape& shape = params_.plan.shape;
    const int index = step * Tile::kPages + kPage;
    const PrefillPage page = PrefillPageOf(*item_, index);
    if (index >= item_->pages_count || !PrefillSees(shape, block_, page)) {
      HidePage<8 * kPage>(s);
    } else if (PrefillNeedsMask(shape, block_, page)) {
      MaskScores<8 * kPage>(shape, position_, page.block, lane_, s);
    }
  }
  __device__ void CapAndMask(const PrefillScale& scale, int step,
                             float (&s)[kScoreTiles][4]) const {
    if (scale.cap > 0.0f) CapScores(scale, s);
    if ((step + 1) * Tile::kPages <= clear_pages_) return;
    MaskPage<0>(step, s);
    if constexpr (Tile::kPages == 2) MaskPage<1>(step, s);
  }

  // Scores of a step are computed beside the outputs of the step before, and the softmax of one
  // beside the outputs of the other.
  __device__ void AddPages(const PrefillScale& scale, int steps, PrefillRows* rows,
                           float (&o)[kUnits][4]) {
    float s[kScoreTiles][4];
    uint32_t p[kScoreTiles / 2][4];
    float factor[2];
    ring_.WaitKeys(keys_);
    WgmmaBegin();
    QueueScores(s);
    WgmmaWait<0>();
    PinSums(s);
    Release(ring_.KeysEmpty(keys_));
    keys_.Next();
    CapAndMask(scale, 0, s);
    SoftmaxStep(scale.log2, s, rows, factor);
    Pack(s, p);
    ring_.WaitKeys(keys_);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      PinSums(s);
      PinSums(o);
      WgmmaBegin();
      QueueScores(s);
      ring_.WaitValues(values_);
      WgmmaBegin();  // Behind the loop of the wait the compiler wants it again.
      QueueOutputs(p, o);
      WgmmaWait<1>();
      PinSums(s);
      Release(ring_.KeysEmpty(keys_));
      keys_.Next();
      CapAndMask(scale, step, s);
      SoftmaxStep(scale.log2, s, rows, factor);
      // The next step's keys, or R_V. Being a loop, this also keeps the wait behind it from moving
      // in front of the softmax, where ptxas puts it in straight code.
      PinSums(s);
      ring_.WaitKeys(keys_);
      WgmmaWait<0>();
      PinSums(o);
      Release(ring_.ValuesEmpty(values_));
      values_.Next();
      ScaleRows(factor, o);
      Pack(s, p);
    }
    ring_.WaitValues(values_);
    PinSums(o);
    WgmmaBegin();
    QueueOutputs(p, o);
    WgmmaWait<0>();
    PinSums(o);
    Release(ring_.ValuesEmpty(values_));
    values_.Next();
  }
  __device__ static void Pack(const float (&s)[kScoreTiles][4], uint32_t (&p)[kScoreTiles / 2][4]) {
#pragma unroll
    for (int k = 0; k < kScoreTiles / 2; ++k) PackTiles(s[2 * k], s[2 * k + 1], p[k]);
  }

  __device__ void Finish(const PrefillScale& scale, const PrefillRows& rows,
                         float (&o)[kUnits][4]) {
    float factor[2];
    float lse[2];
    FinishRows(params_, scale.log2, item_->head[unit_], rows, factor, lse);
    ScaleRows(factor, o);
    uint32_t a[kUnits / 2][4];
    uint32_t rest[kUnits / 2][4];
#pragma unroll
    for (int k = 0; k < kUnits / 2; ++k) {
      PackTiles(o[2 * k], o[2 * k + 1], a[k]);
      PackRest(o[2 * k], o[2 * k + 1], a[k], rest[k]);
    }
    Meet();  // Nobody reads the queries any more: their place is the output's.
#pragma unroll
    for (int i = 0; i < Tile::kRotationSteps; ++i) {
      float x[kRotated / 8][4];
      ring_.WaitKeys(keys_);
      const SwizzledOperand rotation = Keys();
      WgmmaBegin();
#pragma unroll
      for (int k = 0; k < kUnits / 2; ++k) {
        Wgmma<kRotated>::RegistersByColumns(x, a[k], ChannelsOf(rotation, k), k > 0);
        Wgmma<kRotated>::RegistersByColumns(x, rest[k], ChannelsOf(rotation, k), 1);
      }
      WgmmaCommit();
      WgmmaWait<0>();
      PinSums(x);
      Release(ring_.KeysEmpty(keys_));
      keys_.Next();
      WriteRows(x, i * kRotated / 8);
    }
    __syncwarp();
    Store(lse);
  }

  __device__ void Store(const float (&lse)[2]) const {
    constexpr int kStep = 32 / kUnits;  // Rows that the warp stores at a time
    const PrefillUnitRows rows = PrefillUnitRowsOf(params_.plan.shape, *item_, unit_);
    const int first = warp_row_ + lane_ / kUnits;
    const int unit = lane_ % kUnits;
    const uint8_t* const from = queries_ + unit / 8 * kSwizzledPageBytes;
    __nv_bfloat16* to = params_.out + rows.Row(first) * kDim + unit * 8;
#pragma unroll
    for (int i = 0; i < 16; i += kStep) {
      const uint4 value =
          *reinterpret_cast<const uint4*>(from + SwizzledOffset(first + i, unit % 8));
      if (rows.Has(first + i)) *reinterpret_cast<uint4*>(to) = value;
      to += kStep * rows.stride * kDim;
    }
    if (params_.lse == nullptr || lane_ % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row_ + lane_ / 4 + 8 * half;
      if (rows.Has(row)) params_.lse[rows.Row(row)] = lse[half];
    }
  }

  const PrefillLaunch& launch_;
  const PrefillParams& params_;
  const int unit_;
  const PrefillItems<kDim>& items_;
  const Ring& ring_;
  const int lane_;
  const int warp_row_;
  uint32_t* const flag_;
  uint8_t* const queries_;
  const SwizzledOperand queries_operand_;
  const PrefillItem* item_ = nullptr;
  int block_ = 0;
  int position_ = 0;     // Of the thread's first row
  int clear_pages_ = 0;  // So many pages at the beginning need no look at masks.
  typename Ring::Turn keys_;
  typename Ring::Turn values_;
};

template <int kDim>
__device__ __forceinline__ void PrefillWgmma(const PrefillLaunch& launch,
                                             const PrefillTensorMaps& maps, uint8_t* unaligned) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "rotations come 64 rows at a time");
  static_assert(PrefillWgmmaTile<kDim>::kSharedBytes <= 232448,
                "what a thread block of sm_90 can have");
  const uint32_t padding = (1024 - SharedAddress(unaligned) % 1024) % 1024;
  uint8_t* const shared = unaligned + padding;
  const PrefillRing<kDim> ring = {.base = SharedAddress(shared)};
  const PrefillItems<kDim> items = {.shared = shared, .base = ring.base};
  if (threadIdx.x == 0) {
    ring.Init();
    items.Init();
    BarrierInitFence();
  }
  __syncthreads();
  WaitForKernelBefore();
  LetNextKernelStart();
  if (threadIdx.x < 128) {
    FewerRegisters<40>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp == 0) PrefillLoader<kDim>(launch, maps, items, ring).Run();
    if (warp == 1) PrefillPlanner<kDim>(launch, items).Run();
  } else {
    MoreRegisters<232>();
    const int unit = static_cast<int>(threadIdx.x / 128) - 1;
    PrefillWarpgroup<kDim>(launch, unit, items, ring).Run();
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_WGMMA_CUH_
