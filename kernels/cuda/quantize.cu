// Rotate, clip, quantize, pack: rows of K and V to int2 pages.
//
// Per token, layer and KV head it reads 4 d bytes and writes d / 2 + 8 d / g: at d 128, g 128 and 8
// heads 4,096 + 576 B, 1.1 ns of an H200's copy rate. The rotation is 4 d^2 FLOP. What bounds it
// are the instructions, about 980 a warp for 16 rows of 128, 0.6 of which are issued a clock: the
// ALU, which takes two clocks for each, is nearly 60 % busy; by stall samples a fifth of the time
// goes to the product, a fifth to the counts, a sixth to the codes. Reached on an H200 at d 128:
// 519 us for 36 layers of 8,192 tokens in one launch (63 % of the copy rate), 18.6 us for one layer
// (48 %), 16.5 us (55 %) with early inputs.
//
// A warp takes a tile (row_tile.cuh) of one half of one head from its load to its bytes, in
// registers; four warps, a group, rotate their tiles together. The next tile's load goes on
// meanwhile.

#include <type_traits>

#include "kernels/cuda/quantize.h"
#include "kernels/cuda/quantize_device.cuh"
#include "kernels/cuda/row_launch.cuh"

namespace okv::cuda {
namespace {

// The warp's tile of a unit that is to be quantized: `unit` is units_end when there is none left.
struct TileAt {
  uint32_t unit;
  int64_t block_slot;  // Negative: the tile is not there
};

// What a warp reads and writes, and which blocks there are.
struct Source {
  RowFinder<const __nv_bfloat16> rows;
  uint32_t blocks;
  bool is_plain;  // Linear rows, no table: no block is left out

  // The slot of a block; negative when it is left out. REQUIRES: not is_plain.
  __device__ __forceinline__ int64_t LiveSlot(const Pages& pages, uint32_t block) const {
    if (block >= blocks) return -1;
    return rows.IsLeftOut(block * 64) ? -1 : BlockSlot(pages, block);
  }
};

// The first unit from `unit` on, in steps of the thread block's groups, with a block that is not
// left out: the same for the warps of a group, which rotate together.
template <int kDim>
__device__ __forceinline__ TileAt FindTile(const Pages& pages, const RowWork& work,
                                           const Source& source, uint32_t unit) {
  if (source.is_plain) {  // All units up to units_end have a block; the loop takes 1 % longer.
    const uint32_t block = TileOfUnit(unit) / kTilesPerBlock<kDim>;
    if (unit >= work.units_end) return {.unit = work.units_end, .block_slot = -1};
    return {.unit = unit,
            .block_slot = kUnitBlocks<kDim> == 1 || block < source.blocks ? int64_t{block} : -1};
  }
  for (; unit < work.units_end; unit += UnitStep()) {
    const uint32_t block = TileOfUnit(unit) / kTilesPerBlock<kDim>;
    const int64_t slot = source.LiveSlot(pages, block);
    if (slot >= 0) return {.unit = unit, .block_slot = slot};
    if (kUnitBlocks<kDim> == 2 && source.LiveSlot(pages, block ^ 1) >= 0) {
      return {.unit = unit, .block_slot = -1};
    }
  }
  return {.unit = work.units_end, .block_slot = -1};
}

template <int kDim>
__device__ __forceinline__ void LoadTileAt(const Source& source, const TileAt& at,
                                           const SharedRows& tile) {
  const int lane = threadIdx.x % 32;
  const uint32_t first = TileOfUnit(at.unit) * kTileTokens<kDim>;
  if (at.block_slot >= 0) {
    if (source.is_plain) {
      LoadTile<kDim, true>({source.rows.LinearRow(first), source.rows.Stride(1), 0xffffffffu}, tile,
                           lane);
    } else {
      LoadTile<kDim, false>(FindTileRows<kDim>(source.rows, first, source.blocks * 64, lane), tile,
                            lane);
    }
  }
  CopyAsyncCommit();
}

__device__ void ReportBadRow(const QuantizePagesParams& params, const RowWork& work,
                             uint64_t token) {
  const unsigned long long word = static_cast<unsigned long long>(work.layer) << 52 | token << 10 |
                                  static_cast<uint64_t>(work.head) << 1 | (work.is_value ? 1 : 0);
  atomicMin(reinterpret_cast<unsigned long long*>(params.bad_row), word);
}

__device__ TileTask MakeTask(const QuantizePagesParams& params, const RowWork& work) {
  const uint32_t* const ranks = work.is_value ? params.clip_rank_v : params.clip_rank_k;
  const int64_t pair = static_cast<int64_t>(work.layer) * params.kv_heads + work.head;
  return {.run = nullptr,
          .tile = 0,
          .is_value = work.is_value,
          .clip_rank = ranks == nullptr ? 0 : ranks[pair]};
}

// As many warps as registers allow, and no room for one block more on a multiprocessor than a wave
// has: the next launch's blocks would gather there, on some multiprocessors more than on others (20
// warps instead of 16 without rotation: 18.7 us for 16.2). In blocks of one group, so that the next
// launch begins wherever one has ended (18.7 us early for 19.1 with 8 warps a block). d 256 has 128
// KiB of rotation and 8.25 KiB a tile: one block a multiprocessor; 12 warps, with spills, take 57.8
// us a layer for 53.3 and 1,680 us for all for 1,814.
template <int kDim, bool kRotate>
using QuantizeShape =
    std::conditional_t<kDim == 256 && kRotate, RowShape<8, 1>, RowShape<4, kDim == 256 ? 3 : 4>>;

template <int kDim, int kGroups, bool kRotate, class Shape = QuantizeShape<kDim, kRotate>>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void QuantizeKernel(
    const __grid_constant__ QuantizePagesParams params, const __grid_constant__ RowGrid grid) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "a quad holds words of 8 channels each");
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  RowWork work = RowWorkOfWarp(grid);
  const uint32_t rotation = SharedAddress(shared);
  const RowFinder<const __nv_bfloat16> rows(work.is_value ? params.v : params.k, params.tokens,
                                            work.layer, work.head);
  const bool is_loading =
      LoadEarlyRotation<kDim, kRotate>(params.rotations, work, rotation, params.early_inputs);
  const bool is_plain = rows.IsLinear() && params.pages.table == nullptr;
  if (!params.early_inputs) {
    // Only rows that are read in any case: others need not be there.
    if (is_plain && params.tokens_count == nullptr) {
      PrefetchTile<kDim>(rows, TileOfUnit(work.unit) * kTileTokens<kDim>,
                         min(params.blocks_count * 64, work.units_end * kUnitTokens<kDim>), lane);
    }
    WaitAndLetStart();
  }
  // Before the first write. The next kernel starts behind it, so at d 64, where a warp has only two
  // tiles of a layer's chunk, it comes earlier (8,192 tokens at 93e71ed: 10.0 us for 10.9;
  // d 128: 18.5 for 17.7).
  constexpr bool kWaitsLate = kDim > 64;
  bool waits = params.early_inputs;
  const auto wait = [&] {
    if (waits) WaitAndLetStart();
    waits = false;
  };
  uint32_t blocks = params.blocks_count;
  if (params.tokens_count != nullptr) {
    blocks = min(blocks, static_cast<uint32_t>(max(*params.tokens_count, 0)) / 64);
  }
  // Units behind have no block.
  work.units_end = min(work.units_end, (blocks + kUnitBlocks<kDim> - 1) / kUnitBlocks<kDim>);
  const Source source = {.rows = rows, .blocks = blocks, .is_plain = is_plain};
  uint8_t* const runs = params.pages.base + work.layer * params.pages.layer_stride +
                        work.head * params.pages.head_stride;
  const SharedRows tile = WarpTile<kDim, kRotate>(shared);
  TileTask task = MakeTask(params, work);
  task.tile = static_cast<int>(TileOfUnit(0) % kTilesPerBlock<kDim>);
  TileAt at = FindTile<kDim>(params.pages, work, source, work.unit);
  LoadTileAt<kDim>(source, at, tile);
  if (kRotate) FinishRotation<kDim, 1>(params.rotations, work, rotation, is_loading);
  while (at.unit < work.units_end) {
    CopyAsyncWait<0>();
    __syncwarp();
    RowFragment<kDim> y;
    if (kRotate) {
      RotateTile<kDim, /*kTranspose=*/false>(tile, rotation, lane, &y);
    } else {
      ReadFragment<kDim>(tile, lane, &y);
    }
    __syncwarp();  // The tile was read by all lanes: the next one may come.
    const TileAt next = FindTile<kDim>(params.pages, work, source, at.unit + UnitStep());
    LoadTileAt<kDim>(source, next, tile);
    if (!kWaitsLate) wait();
    task.run = at.block_slot < 0 ? nullptr : runs + at.block_slot * params.pages.block_stride;
    if (!QuantizeTile<kDim, kGroups>(task, lane, wait, &y)) {
      ReportBadRow(
          params, work,
          uint64_t{TileOfUnit(at.unit)} * kTileTokens<kDim> + (lane >> 2) + 8 * OwnRow<kDim>(lane));
    }
    at = next;
  }
  wait();
}

template <int kDim, int kGroups, bool kRotates>
struct QuantizeInstance {
  using Shape = QuantizeShape<kDim, kRotates>;
  static constexpr auto kFunction = QuantizeKernel<kDim, kGroups, kRotates>;
};

}  // namespace

cudaError_t QuantizePages(const QuantizePagesParams& params, cudaStream_t stream) {
  if (params.bad_row == nullptr) return cudaErrorInvalidValue;
  return LaunchPages<QuantizeInstance>(params, stream);
}

}  // namespace okv::cuda
