// Rotate, clip, quantize, pack: rows of K and V to int2 pages.
//
// Per token, layer and KV head it reads 4 d bytes and writes d / 2 + 8 d / g: at d 128, g 128 and 8
// heads 4,096 + 576 B, 1.1 ns of an H200's copy rate. The rotation is 4 d^2 FLOP (0.84 ns at the
// rate of mma.sync), the clip threshold 9 counts over the row, two operations for two channels
// each.
//
// A warp takes 32 tokens of one half of one head from their load to their bytes, in registers
// behind the rotation; the next tile's load goes on meanwhile.

#include "kernels/cuda/quantize.h"
#include "kernels/cuda/quantize_device.cuh"
#include "kernels/cuda/row_launch.cuh"

namespace okv::cuda {
namespace {

// A tile that is to be quantized: `index` is tiles_end when there is none left.
struct TileAt {
  uint32_t index;
  int64_t block_slot;
};

// The first tile from `index` on, in steps of the block's warps, whose block is not left out.
__device__ TileAt FindTile(const QuantizePagesParams& params, const RowWork& work,
                           const ConstPagedRows& rows, uint32_t index) {
  for (; index < work.tiles_end; index += blockDim.x / 32) {
    const uint32_t block = index / kTilesPerBlock;
    const int64_t slot = BlockSlot(params.pages, block);
    if (slot < 0) continue;
    const int64_t first_token = static_cast<int64_t>(block) * 64;
    if (RowAddress(rows, params.tokens, first_token, work.layer, work.head) == nullptr) continue;
    return {.index = index, .block_slot = slot};
  }
  return {.index = work.tiles_end, .block_slot = -1};
}

template <int kDim>
__device__ void LoadTileAt(const QuantizePagesParams& params, const RowWork& work,
                           const ConstPagedRows& rows, const TileAt& at, const SharedRows& tile) {
  const int lane = threadIdx.x % 32;
  if (at.index < work.tiles_end) {
    const int64_t token = static_cast<int64_t>(at.index) * kTileTokens + lane;
    LoadTile<kDim>(RowAddress(rows, params.tokens, token, work.layer, work.head), tile, lane);
  }
  CopyAsyncCommit();
}

__device__ void ReportBadRows(const QuantizePagesParams& params, const RowWork& work,
                              const TileAt& at, uint32_t bad_rows) {
  const int lane = threadIdx.x % 32;
  if ((lane & 3) != 0) return;
  for (int p = 0; p < 4; ++p) {
    if ((bad_rows >> p & 1) == 0) continue;
    const uint64_t token = static_cast<uint64_t>(at.index) * kTileTokens + (lane >> 2) + 8 * p;
    const unsigned long long word = static_cast<unsigned long long>(work.layer) << 52 |
                                    token << 10 | static_cast<uint64_t>(work.head) << 1 |
                                    (work.is_value ? 1 : 0);
    atomicMin(reinterpret_cast<unsigned long long*>(params.bad_row), word);
  }
}

__device__ TileTask MakeTask(const QuantizePagesParams& params, const RowWork& work) {
  const uint32_t* const ranks = work.is_value ? params.clip_rank_v : params.clip_rank_k;
  const int64_t pair = static_cast<int64_t>(work.layer) * params.kv_heads + work.head;
  return {.run = nullptr,
          .half = 0,
          .is_value = work.is_value,
          .clip_rank = ranks == nullptr ? 0 : ranks[pair]};
}

template <int kDim, int kGroups, bool kRotate>
__global__ __launch_bounds__(kRowWarpsMax<kDim> * 32, kRowBlocksPerSm<kDim>) void QuantizeKernel(
    const __grid_constant__ QuantizePagesParams params, const __grid_constant__ RowGrid grid) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "a quad holds words of 8 channels each");
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  RowWork work = RowWorkOfBlock(grid);
  if (params.tokens_count != nullptr) {
    const int blocks = max(*params.tokens_count, 0) / 64;
    work.tiles_end = min(work.tiles_end, static_cast<uint32_t>(blocks) * kTilesPerBlock);
  }
  if (work.first_tile >= work.tiles_end) return;
  const ConstPagedRows& rows = work.is_value ? params.v : params.k;
  const SharedRows tile = WarpTile<kDim, kRotate>(shared);
  const SharedRows rotation = SharedRowsAt(shared);

  TileAt at = FindTile(params, work, rows, work.first_tile + threadIdx.x / 32);
  LoadTileAt<kDim>(params, work, rows, at, tile);
  if (kRotate) {
    LoadRotation<kDim>(RotationOf(params.rotations, work, kDim), rotation);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
    __syncthreads();
  }
  TileTask task = MakeTask(params, work);
  while (at.index < work.tiles_end) {
    CopyAsyncWait<0>();
    __syncwarp();
    RowFragment<kDim> y;
    if (kRotate) {
      RotateTile<kDim, /*kTranspose=*/false>(tile, rotation, lane, &y);
    } else {
      ReadFragment<kDim>(tile, lane, &y);
    }
    __syncwarp();  // The tile was read by all lanes: the next one may come.
    const TileAt next = FindTile(params, work, rows, at.index + blockDim.x / 32);
    LoadTileAt<kDim>(params, work, rows, next, tile);
    task.run = params.pages.base + at.block_slot * params.pages.block_stride +
               work.layer * params.pages.layer_stride + work.head * params.pages.head_stride;
    task.half = static_cast<int>(at.index % kTilesPerBlock);
    const uint32_t bad_rows = QuantizeTile<kDim, kGroups>(task, lane, &y);
    if (bad_rows != 0) ReportBadRows(params, work, at, bad_rows);
    at = next;
  }
}

template <int kDim, int kGroups, bool kRotates>
struct QuantizeInstance {
  static constexpr auto kFunction = QuantizeKernel<kDim, kGroups, kRotates>;
};

}  // namespace

cudaError_t QuantizePages(const QuantizePagesParams& params, cudaStream_t stream) {
  if (params.bad_row == nullptr) return cudaErrorInvalidValue;
  return LaunchPages<QuantizeInstance>(params, stream);
}

}  // namespace okv::cuda
