// int2 pages to bf16 rows, in the rotated basis or in the model's own.
//
// Per token, layer and KV head it reads d / 2 + 8 d / g bytes and writes 4 d: at d 128, g 128 and 8
// heads 576 + 4,096 B. A code selects one of the four values that its token's group can have: three
// operations for two channels. Memory-bound: 36 layers of 8,192 tokens in one launch take 369 us on
// an H200 (89 % of the copy rate), in the model's basis 398 us (82 %); one layer 11.2 us (82 %),
// with early inputs 10.0 us (91 %).

#include <type_traits>

#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/dequantize_device.cuh"
#include "kernels/cuda/row_launch.cuh"

namespace okv::cuda {
namespace {

// Blocks of one group with a rotation: 405 us for 422 with two (d 128, all layers). d 256 has 128
// KiB of rotation: one block a multiprocessor, of as many warps as there is room for tiles; they
// have registers for 64 columns of a product at a time (all layers, half as many of them: 611 us; 8
// warps and 128 columns: 685). At d 128 20 warps so take 479 for 398, at d 64 226 for 223.
template <int kDim, bool kRotate>
using DequantizeShape =
    std::conditional_t<kRotate, std::conditional_t<kDim == 256, RowShape<12, 1>, RowShape<4, 4>>,
                       RowShape<8, kDim == 256 ? 2 : 4>>;
template <int kDim>
inline constexpr int kDequantizeTiles = kDim == 256 ? 8 : kRotateTiles<kDim>;

// The run of a unit's tile; null when its block is left out or not there.
template <int kDim>
__device__ __forceinline__ const uint8_t* RunOf(const DequantizePagesParams& params,
                                                const RowWork& work, uint32_t unit) {
  const uint32_t block = TileOfUnit(unit) / kTilesPerBlock<kDim>;
  if (unit >= work.units_end || block >= params.blocks_count) return nullptr;
  const int64_t slot = BlockSlot(params.pages, block);
  if (slot < 0) return nullptr;
  return params.pages.base + slot * params.pages.block_stride +
         work.layer * params.pages.layer_stride + work.head * params.pages.head_stride;
}

template <int kDim, int kGroups, bool kRotate, class Shape = DequantizeShape<kDim, kRotate>>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void DequantizeKernel(
    const __grid_constant__ DequantizePagesParams params, const __grid_constant__ RowGrid grid) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "a quad holds words of 8 channels each");
  extern __shared__ __align__(1024) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  const RowWork work = RowWorkOfWarp(grid);
  const uint32_t rotation = SharedAddress(shared);
  const bool is_loading =
      LoadEarlyRotation<kDim, kRotate>(params.rotations, work, rotation, params.early_inputs);
  if (!params.early_inputs) WaitAndLetStart();
  bool waits = params.early_inputs;
  const RowFinder<__nv_bfloat16> rows(work.is_value ? params.v : params.k, params.tokens,
                                      work.layer, work.head);
  const SharedRows tile = WarpTile<kDim, kRotate>(shared);
  const int warp_tile = TileOfUnit(0) % kTilesPerBlock<kDim>;
  PackedTile<kDim, kGroups> packed;
  const uint8_t* run = RunOf<kDim>(params, work, work.unit);
  if (run != nullptr) ReadPackedTile(run, warp_tile, work.is_value, lane, &packed);
  if (kRotate) {
    FinishRotation<kDim, 0>(params.rotations, work, rotation, is_loading);
    if (waits) WaitAndLetStart();  // Inside the loop it takes registers that the product needs
    waits = false;
  }
  for (uint32_t unit = work.unit; unit < work.units_end; unit += UnitStep()) {
    RowFragment<kDim> values;
    DequantizeTile(packed, work.is_value, lane, &values);
    const bool is_there = run != nullptr;
    run = RunOf<kDim>(params, work, unit + UnitStep());
    if (run != nullptr) ReadPackedTile(run, warp_tile, work.is_value, lane, &packed);
    TileRows<__nv_bfloat16> to = {};
    const auto find_rows = [&] {
      if (!is_there) return;
      to = FindTileRows<kDim>(rows, TileOfUnit(unit) * kTileTokens<kDim>, params.blocks_count * 64,
                              lane);
    };
    if (kRotate) {
      RotateFragment<kDim, /*kTranspose=*/true, kDequantizeTiles<kDim>>(values, rotation, lane,
                                                                        tile);
      find_rows();  // In front of the product it takes registers that that needs
    } else {
      find_rows();
      WriteFragment<kDim>(values, lane, tile);
    }
    __syncwarp();
    if (!kRotate && waits) {
      WaitAndLetStart();
      waits = false;
    }
    StoreTile<kDim, /*kStreaming=*/true>(tile, to, lane);
    __syncwarp();  // The tile was read by all lanes: the next one may be written.
  }
  if (waits) WaitAndLetStart();
}

template <int kDim, int kGroups, bool kRotates>
struct DequantizeInstance {
  using Shape = DequantizeShape<kDim, kRotates>;
  static constexpr auto kFunction = DequantizeKernel<kDim, kGroups, kRotates>;
};

}  // namespace

cudaError_t DequantizePages(const DequantizePagesParams& params, cudaStream_t stream) {
  return LaunchPages<DequantizeInstance>(params, stream);
}

}  // namespace okv::cuda
