#ifndef OKV_KERNELS_CUDA_PREFILL_LOAD_CUH_
#define OKV_KERNELS_CUDA_PREFILL_LOAD_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/prefill_plan.cuh"
#include "kernels/cuda/prefill_wgmma_ptx.cuh"

// Prefill attention on sm_90a, what happens beside the arithmetic (prefill_wgmma.cuh): shared
// memory, the warp that takes items, the warp that loads their pages.
namespace okv::cuda {

struct PrefillTensorMaps {
  CUtensorMap q;        // [query_tokens_max][query_heads][head_dim]
  CUtensorMap bf16;     // [slots][kv_heads][128 rows: K, V][head_dim]
  CUtensorMap history;  // The same, blocks of the workspace
  CUtensorMap r_k;      // [rotation_heads * head_dim][head_dim]
  CUtensorMap r_v;
};

template <int kDim>
struct PrefillWgmmaTile {
  static constexpr int kThreads = 384;
  // Tokens of a step: what 232 registers a thread hold of scores beside outputs.
  static constexpr int kTokens = kDim == 256 ? 64 : 128;
  static constexpr int kPages = kTokens / 64;
  static constexpr int kHalves = kDim / 64;  // Of 64 channels
  static constexpr int kStages = kDim == 64 ? 4 : kDim == 128 ? 3 : 2;
  static constexpr int kRotationRows = kDim < kTokens ? kDim : kTokens;
  static constexpr int kRotationSteps = kDim / kRotationRows;
  static constexpr uint32_t kHalfBytes = kTokens * kSwizzledRowBytes;
  static constexpr uint32_t kStageBytes = kHalves * kHalfBytes;
  static constexpr uint32_t kQueryBytes = kHalves * kSwizzledPageBytes;  // Of a unit
  // Units whose queries come in one stage of keys.
  static constexpr int kStageUnits = kStageBytes / kQueryBytes;
  static constexpr int kQueryStages = 2 / kStageUnits;

  static constexpr uint32_t kKeys = 2 * kQueryBytes;
  static constexpr uint32_t kValues = kKeys + kStages * kStageBytes;
  static constexpr uint32_t kBarriers = kValues + kStages * kStageBytes;
  // Items: the one that is computed, and the next.
  static constexpr int kItems = 2;
  static constexpr uint32_t kItemBarriers = kBarriers + 4 * kStages * 8;
  static constexpr uint32_t kFlags = kItemBarriers + 2 * kItems * 8;  // A word a unit
  static constexpr uint32_t kItemsAt = kFlags + 16;
  // The last 1,024 bytes are what aligns the beginning to as many.
  static constexpr uint32_t kSharedBytes = kItemsAt + kItems * sizeof(PrefillItem) + 1024;
};

// What follows is instructions that sm_90a alone has; the host's pass, too, must not see it.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A position in the ring.
template <int kStages>
struct PrefillTurn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
  __device__ __forceinline__ PrefillTurn After() const {
    PrefillTurn turn = *this;
    turn.Next();
    return turn;
  }
};

// The ring: keys and values have stages of their own. A stage is full when its bytes are there,
// empty when the 8 warps that compute have used it.
template <int kDim>
struct PrefillRing {
  using Tile = PrefillWgmmaTile<kDim>;
  using Turn = PrefillTurn<Tile::kStages>;
  uint32_t base;  // Of the shared memory

  __device__ uint32_t Keys(Turn turn) const {
    return base + Tile::kKeys + turn.stage * Tile::kStageBytes;
  }
  __device__ uint32_t Values(Turn turn) const {
    return base + Tile::kValues + turn.stage * Tile::kStageBytes;
  }
  __device__ uint32_t KeysFull(Turn turn) const { return Barrier(0, turn.stage); }
  __device__ uint32_t KeysEmpty(Turn turn) const { return Barrier(1, turn.stage); }
  __device__ uint32_t ValuesFull(Turn turn) const { return Barrier(2, turn.stage); }
  __device__ uint32_t ValuesEmpty(Turn turn) const { return Barrier(3, turn.stage); }
  __device__ void WaitKeys(Turn turn) const { BarrierWait(KeysFull(turn), turn.parity); }
  __device__ void WaitValues(Turn turn) const { BarrierWait(ValuesFull(turn), turn.parity); }
  __device__ void Init() const {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      BarrierInit(Barrier(0, stage), 1);
      BarrierInit(Barrier(1, stage), 8);
      BarrierInit(Barrier(2, stage), 1);
      BarrierInit(Barrier(3, stage), 8);
    }
  }

 private:
  __device__ uint32_t Barrier(int kind, int stage) const {
    return base + Tile::kBarriers + (kind * Tile::kStages + stage) * 8;
  }
};

// The thread block's items, as those who load and compute take them from the one who plans.
template <int kDim>
struct PrefillItems {
  using Tile = PrefillWgmmaTile<kDim>;
  using Turn = PrefillTurn<Tile::kItems>;
  uint8_t* shared;
  uint32_t base;

  __device__ PrefillItem* At(Turn turn) const {
    return reinterpret_cast<PrefillItem*>(shared + Tile::kItemsAt) + turn.stage;
  }
  __device__ uint32_t Full(Turn turn) const { return Barrier(turn.stage); }
  __device__ uint32_t Empty(Turn turn) const { return Barrier(Tile::kItems + turn.stage); }
  __device__ const PrefillItem& Wait(Turn turn) const {
    BarrierWait(Full(turn), turn.parity);
    return *At(turn);
  }
  __device__ void Init() const {
    for (int i = 0; i < Tile::kItems; ++i) {
      BarrierInit(Barrier(i), 1);
      BarrierInit(Barrier(Tile::kItems + i), 9 * 32);  // The loader and 8 warps that compute
    }
  }
  // By every lane that read the item: racecheck does not see that one lane's arrival is the others'
  // too. They come together first: otherwise what is the same in all of them is not in uniform
  // registers from here on.
  __device__ void Release(Turn turn) const {
    __syncwarp();
    BarrierArrive(Empty(turn));
  }

 private:
  __device__ uint32_t Barrier(int index) const { return base + Tile::kItemBarriers + index * 8; }
};

// The warp that plans: takes the next item, the longest first, when one has ended. Behind the last
// there is one with kv_head -1.
template <int kDim>
class PrefillPlanner {
 public:
  __device__ PrefillPlanner(const PrefillLaunch& launch, const PrefillItems<kDim>& items)
      : launch_(launch), items_(items), lane_(threadIdx.x % 32) {}

  __device__ void Run() const {
    const PrefillPlan& plan = launch_.plan;
    const PrefillShape& shape = launch_.params.plan.shape;
    const uint32_t count = *plan.granules_count * PrefillItemsOfHeads(shape);
    typename PrefillItems<kDim>::Turn turn;
    uint32_t index = blockIdx.x;
    while (true) {
      BarrierWait(items_.Empty(turn), turn.parity ^ 1);
      PrefillItem* const item = items_.At(turn);
      bool last = true;
      if (index < count) {
        PrefillItem next;
        const bool used = PrefillItemOf(shape, plan, index, &next);
        if (used && lane_ == 0) *item = next;
        index = Take();
        if (!used) continue;
        last = false;
      } else if (lane_ == 0) {
        item->kv_head = -1;
      }
      __syncwarp();
      if (lane_ == 0) BarrierArrive(items_.Full(turn));
      if (last) break;
      turn.Next();
    }
    if (lane_ == 0 && AtomicAddAcquireRelease(plan.ended, 1) + 1 == gridDim.x) {
      *plan.taken = 0;  // For the next layer
      *plan.ended = 0;
    }
  }

 private:
  __device__ uint32_t Take() const {
    uint32_t taken = 0;
    if (lane_ == 0) taken = atomicAdd(launch_.plan.taken, 1u);
    return gridDim.x + __shfl_sync(0xffffffffu, taken, 0);
  }

  const PrefillLaunch& launch_;
  const PrefillItems<kDim>& items_;
  const int lane_;
};

// The warp that loads.
template <int kDim>
class PrefillLoader {
 public:
  using Tile = PrefillWgmmaTile<kDim>;
  using Ring = PrefillRing<kDim>;

  __device__ PrefillLoader(const PrefillLaunch& launch, const PrefillTensorMaps& maps,
                           const PrefillItems<kDim>& items, const Ring& ring)
      : launch_(launch),
        maps_(maps),
        items_(items),
        shared_(items.shared),
        ring_(ring),
        lane_(threadIdx.x % 32) {}

  __device__ void Run() {
    typename PrefillItems<kDim>::Turn turn;
    while (true) {
      item_ = &items_.Wait(turn);
      if (item_->kv_head < 0) return;
      LoadItem();
      items_.Release(turn);
      turn.Next();
    }
  }

 private:
  // Pages of a step, the same in all lanes.
  struct Step {
    int slot[Tile::kPages];
    int what[Tile::kPages];  // Rows of it that hold tokens; kInt2 more for a page of the workspace
  };
  static constexpr int kInt2 = 128;

  // Keys are loaded a step ahead of values, as they are used.
  __device__ void LoadItem() {
    for (int i = 0; i < Tile::kQueryStages; ++i) LoadQueries(i);
    for (int i = 0; i < Tile::kRotationSteps; ++i) LoadFirstRotation(i);
    first_bf16_block_ = PrefillFirstBf16Block(launch_.params, item_->granule.request);
    pages_count_ = item_->pages_count;
    kv_head_ = item_->kv_head;
    const int steps = (pages_count_ + Tile::kPages - 1) / Tile::kPages;
    Step step = {};
    if (steps > 0) {
      LookUp(0);
      step = StepAt(0);
      LoadKeys(step);
    }
    for (int i = 1; i < steps; ++i) {
      if (i * Tile::kPages % 32 == 0) LookUp(i * Tile::kPages);
      const Step next = StepAt(i * Tile::kPages);
      LoadKeys(next);
      LoadValues(step);
      step = next;
    }
    LoadLastRotation(0);
    if (steps > 0) LoadValues(step);
    for (int i = 1; i < Tile::kRotationSteps; ++i) LoadLastRotation(i);
  }

  // Pages [first, first + 32), one a lane.
  __device__ void LookUp(int first) {
    const int index = first + lane_;
    slot_ = 0;
    what_ = 0;
    if (index >= pages_count_) return;
    const PrefillPage page = PrefillPageOf(*item_, index);
    slot_ = PrefillSlotOf(launch_.params, item_->granule, first_bf16_block_, page);
    what_ = min(64, item_->granule.tokens.end - page.block * kPrefillBlockTokens) +
            (page.is_int2 ? kInt2 : 0);
  }
  __device__ Step StepAt(int first) const {
    Step step;
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      step.slot[page] = __shfl_sync(0xffffffffu, slot_, (first + page) % 32);
      step.what[page] = __shfl_sync(0xffffffffu, what_, (first + page) % 32);
    }
    return step;
  }

  // As keys: the units that stage `index` of them holds. Rows in front of the request's first new
  // token and behind its last are other requests', or zeros beyond q: what becomes of them nobody
  // stores.
  __device__ void LoadQueries(int index) {
    BarrierWait(ring_.KeysEmpty(keys_), keys_.parity ^ 1);
    if (lane_ == 0) {
      const uint32_t full = ring_.KeysFull(keys_);
      const PrefillSpanOfTokens& tokens = item_->granule.tokens;
      BarrierExpect(full, Tile::kStageBytes);
      for (int i = 0; i < Tile::kStageUnits; ++i) {
        const int unit = index * Tile::kStageUnits + i;
        const int row = tokens.row + item_->block[unit] * kPrefillBlockTokens - tokens.begin;
        const uint32_t to = ring_.Keys(keys_) + i * Tile::kQueryBytes;
#pragma unroll
        for (int half = 0; half < Tile::kHalves; ++half) {
          TensorCopy3(to + half * kSwizzledPageBytes, &maps_.q, 64 * half, item_->head[unit], row,
                      full);
        }
      }
    }
    __syncwarp();
    keys_.Next();
  }

  __device__ void LoadFirstRotation(int step) {
    BarrierWait(ring_.ValuesEmpty(values_), values_.parity ^ 1);
    LoadRotation(maps_.r_k, step, ring_.Values(values_), ring_.ValuesFull(values_));
    values_.Next();
  }
  __device__ void LoadLastRotation(int step) {
    BarrierWait(ring_.KeysEmpty(keys_), keys_.parity ^ 1);
    LoadRotation(maps_.r_v, step, ring_.Keys(keys_), ring_.KeysFull(keys_));
    keys_.Next();
  }
  __device__ void LoadRotation(const CUtensorMap& map, int step, uint32_t stage,
                               uint32_t full) const {
    if (lane_ != 0) return;
    const int head = launch_.params.rotation_heads == 1 ? 0 : item_->kv_head;
    constexpr int kPages = Tile::kRotationRows / 64;
    BarrierExpect(full, Tile::kHalves * kPages * kSwizzledPageBytes);
    for (int half = 0; half < Tile::kHalves; ++half) {
      for (int page = 0; page < kPages; ++page) {
        TensorCopy2(stage + half * Tile::kHalfBytes + page * kSwizzledPageBytes, &map, 64 * half,
                    head * kDim + step * Tile::kRotationRows + 64 * page, full);
      }
    }
  }

  // Keys (row 0 of a run) or values (row 64) of a page.
  __device__ void CopyPage(const Step& step, int page, int row, uint32_t to, uint32_t full) const {
    const CUtensorMap* const map = step.what[page] >= kInt2 ? &maps_.history : &maps_.bf16;
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
      TensorCopy4(to + half * Tile::kHalfBytes + page * kSwizzledPageBytes, map, 64 * half, row,
                  kv_head_, step.slot[page], full);
    }
  }

  __device__ void LoadKeys(const Step& step) {
    BarrierWait(ring_.KeysEmpty(keys_), keys_.parity ^ 1);
    if (lane_ == 0) {
      const uint32_t full = ring_.KeysFull(keys_);
      uint32_t bytes = 0;
#pragma unroll
      for (int page = 0; page < Tile::kPages; ++page) {
        if (step.what[page] > 0) bytes += Tile::kHalves * kSwizzledPageBytes;
      }
      BarrierExpect(full, bytes);
#pragma unroll
      for (int page = 0; page < Tile::kPages; ++page) {
        if (step.what[page] > 0) CopyPage(step, page, 0, ring_.Keys(keys_), full);
      }
    }
    __syncwarp();
    keys_.Next();
  }

  // Probabilities of 0 meet the values of a page behind the last, and of rows behind the sequence's
  // end: these must be finite, so they are written as 0.
  __device__ void LoadValues(const Step& step) {
    BarrierWait(ring_.ValuesEmpty(values_), values_.parity ^ 1);
    const uint32_t stage = ring_.Values(values_);
    uint32_t bytes = 0;
#pragma unroll
    for (int page = 0; page < Tile::kPages; ++page) {
      if (step.what[page] % kInt2 == 64) {
        bytes += Tile::kHalves * kSwizzledPageBytes;
      } else {
        WriteRows(step.slot[page], step.what[page], stage - ring_.base + page * kSwizzledPageBytes);
        FenceBeforeBulkCopy();
      }
    }
    __syncwarp();
    if (lane_ == 0) {
      const uint32_t full = ring_.ValuesFull(values_);
      BarrierExpect(full, bytes);
#pragma unroll
      for (int page = 0; page < Tile::kPages; ++page) {
        if (step.what[page] % kInt2 == 64) CopyPage(step, page, 64, stage, full);
      }
    }
    __syncwarp();
    values_.Next();
  }

  // The first rows_count rows of values of a bf16 page, and zeros; by ordinary loads and stores.
  __device__ void WriteRows(int slot, int rows_count, uint32_t offset) const {
    const PrefillParams& params = launch_.params;
    const auto* const rows = reinterpret_cast<const __nv_bfloat16*>(
                                 params.bf16_pages + int64_t{slot} * params.bf16_block_stride) +
                             (int64_t{kv_head_} * 2 + 1) * kPrefillBlockTokens * kDim;
    constexpr int kUnits = kDim / 8;
#pragma unroll 4
    for (int index = lane_; index < 64 * kUnits; index += 32) {
      const int row = index / kUnits;
      const int unit = index % kUnits;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (row < rows_count) value = __ldg(reinterpret_cast<const uint4*>(rows + index * 8));
      *reinterpret_cast<uint4*>(shared_ + offset + unit / 8 * Tile::kHalfBytes +
                                SwizzledOffset(row, unit % 8)) = value;
    }
  }

  const PrefillLaunch& launch_;
  const PrefillTensorMaps& maps_;
  const PrefillItems<kDim>& items_;
  uint8_t* const shared_;
  const Ring& ring_;
  const int lane_;
  const PrefillItem* item_ = nullptr;
  typename Ring::Turn keys_;
  typename Ring::Turn values_;
  int pages_count_ = 0;
  int kv_head_ = 0;
  int first_bf16_block_ = 0;
  int slot_ = 0;  // Of the lane's page
  int what_ = 0;
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_LOAD_CUH_
