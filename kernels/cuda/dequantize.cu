// int2 pages to bf16 rows, in the rotated basis or in the model's own.
//
// Per token, layer and KV head it reads d / 2 + 8 d / g bytes and writes 4 d: at d 128, g 128 and 8
// heads 576 + 4,096 B. A code selects one of the four values that its token's group can have: three
// operations for two channels.

#include "kernels/cuda/dequantize.h"
#include "kernels/cuda/dequantize_device.cuh"
#include "kernels/cuda/row_launch.cuh"

namespace okv::cuda {
namespace {

template <int kDim, int kGroups, bool kRotate>
__global__ __launch_bounds__(kRowWarpsMax<kDim> * 32, kRowBlocksPerSm<kDim>) void DequantizeKernel(
    const __grid_constant__ DequantizePagesParams params, const __grid_constant__ RowGrid grid) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "a quad holds words of 8 channels each");
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  const RowWork work = RowWorkOfBlock(grid);
  if (work.first_tile >= work.tiles_end) return;
  const PagedRows& rows = work.is_value ? params.v : params.k;
  const SharedRows tile = WarpTile<kDim, kRotate>(shared);
  const SharedRows rotation = SharedRowsAt(shared);
  if (kRotate) {
    LoadRotation<kDim>(RotationOf(params.rotations, work, kDim), rotation);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();
  }
  for (uint32_t index = work.first_tile + threadIdx.x / 32; index < work.tiles_end;
       index += blockDim.x / 32) {
    const uint32_t block = index / kTilesPerBlock;
    const int64_t slot = BlockSlot(params.pages, block);
    if (slot < 0) continue;
    const uint8_t* const run = params.pages.base + slot * params.pages.block_stride +
                               work.layer * params.pages.layer_stride +
                               work.head * params.pages.head_stride;
    RowFragment<kDim> y;
    DequantizeTile<kDim, kGroups>(run, static_cast<int>(index % kTilesPerBlock), work.is_value,
                                  lane, &y);
    WriteFragment<kDim>(y, lane, tile);
    __syncwarp();
    if (kRotate) {
      RotateTile<kDim, /*kTranspose=*/true>(tile, rotation, lane, &y);
      __syncwarp();
      WriteFragment<kDim>(y, lane, tile);
      __syncwarp();
    }
    const int64_t token = static_cast<int64_t>(index) * kTileTokens + lane;
    StoreTile<kDim>(tile, RowAddress(rows, params.tokens, token, work.layer, work.head), lane);
    __syncwarp();  // The tile was read by all lanes: the next one may be written.
  }
}

template <int kDim, int kGroups, bool kRotates>
struct DequantizeInstance {
  static constexpr auto kFunction = DequantizeKernel<kDim, kGroups, kRotates>;
};

}  // namespace

cudaError_t DequantizePages(const DequantizePagesParams& params, cudaStream_t stream) {
  return LaunchPages<DequantizeInstance>(params, stream);
}

}  // namespace okv::cuda
