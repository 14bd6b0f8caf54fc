// y = bf16(x R) for rows of K and V: 8 d bytes moved and 4 d^2 FLOP per token, layer and KV head.

#include "kernels/cuda/rotate.h"
#include "kernels/cuda/row_launch.cuh"

namespace okv::cuda {
namespace {

// Queues the load of tile `index`, where there is one.
template <int kDim>
__device__ void LoadTileAt(const RotateRowsParams& params, const RowWork& work, int64_t tokens,
                           uint32_t index, const SharedRows& tile) {
  const int lane = threadIdx.x % 32;
  if (index < work.tiles_end) {
    const int64_t token = static_cast<int64_t>(index) * kTileTokens + lane;
    const ConstPagedRows& rows = work.is_value ? params.v : params.k;
    LoadTile<kDim>(
        token < tokens ? RowAddress(rows, params.tokens, token, work.layer, work.head) : nullptr,
        tile, lane);
  }
  CopyAsyncCommit();
}

template <int kDim>
__device__ void StoreTileAt(const RotateRowsParams& params, const RowWork& work, int64_t tokens,
                            uint32_t index, const SharedRows& tile) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(index) * kTileTokens + lane;
  const PagedRows& rows = work.is_value ? params.v_out : params.k_out;
  __nv_bfloat16* row = nullptr;
  // What the source map leaves out was not loaded.
  if (token < tokens &&
      RowAddress(params.k, params.tokens, token, work.layer, work.head) != nullptr) {
    row = RowAddress(rows, params.tokens_out, token, work.layer, work.head);
  }
  StoreTile<kDim>(tile, row, lane);
}

// Rows that are not there leave the old content of the tile, and affect only their own results.
template <int kDim, bool kTranspose>
__global__ __launch_bounds__(kRowWarpsMax<kDim> * 32, kRowBlocksPerSm<kDim>) void RotateKernel(
    const __grid_constant__ RotateRowsParams params, const __grid_constant__ RowGrid grid) {
  static_assert(kDim % 64 == 0 && kDim <= 256, "a quad holds words of 8 channels each");
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32;
  RowWork work = RowWorkOfBlock(grid);
  int64_t tokens = params.tokens_count;
  if (params.tokens_count_device != nullptr) {
    tokens = min(tokens, static_cast<int64_t>(max(*params.tokens_count_device, 0)));
  }
  work.tiles_end =
      min(work.tiles_end, static_cast<uint32_t>((tokens + kTileTokens - 1) / kTileTokens));
  if (work.first_tile >= work.tiles_end) return;
  const SharedRows tile = WarpTile<kDim, /*kRotate=*/true>(shared);
  const SharedRows rotation = SharedRowsAt(shared);

  const uint32_t first = work.first_tile + threadIdx.x / 32;
  LoadTileAt<kDim>(params, work, tokens, first, tile);
  LoadRotation<kDim>(RotationOf(params.rotations, work, kDim), rotation);
  CopyAsyncCommit();
  CopyAsyncWait<0>();
  __syncthreads();
  for (uint32_t index = first; index < work.tiles_end; index += blockDim.x / 32) {
    CopyAsyncWait<0>();
    __syncwarp();
    RowFragment<kDim> y;
    RotateTile<kDim, kTranspose>(tile, rotation, lane, &y);
    __syncwarp();
    WriteFragment<kDim>(y, lane, tile);
    __syncwarp();
    StoreTileAt<kDim>(params, work, tokens, index, tile);
    __syncwarp();
    LoadTileAt<kDim>(params, work, tokens, index + blockDim.x / 32, tile);
  }
}

template <int kDim>
cudaError_t Launch(const RotateRowsParams& params, const RowGrid& grid, cudaStream_t stream) {
  return params.to_model_basis
             ? LaunchRows<kDim, true>(RotateKernel<kDim, true>, params, grid, stream)
             : LaunchRows<kDim, true>(RotateKernel<kDim, false>, params, grid, stream);
}

}  // namespace

cudaError_t RotateRows(const RotateRowsParams& params, cudaStream_t stream) {
  if (!IsRowShape(params.layers_count, params.kv_heads, params.head_dim) ||
      params.tokens_count > 1u << 31 || !AreRows(params.k) || !AreRows(params.v) ||
      !AreRows(params.k_out) || !AreRows(params.v_out) || !IsMap(params.tokens) ||
      !IsMap(params.tokens_out) || params.rotations.k == nullptr ||
      !AreRotations(params.rotations, params.kv_heads)) {
    return cudaErrorInvalidValue;
  }
  const RowGrid grid = {.layers_count = params.layers_count,
                        .kv_heads = params.kv_heads,
                        .halves = 2,
                        .tiles = (params.tokens_count + kTileTokens - 1) / kTileTokens,
                        .block_tiles = 0};
  switch (params.head_dim) {
    case 64:
      return Launch<64>(params, grid, stream);
    case 128:
      return Launch<128>(params, grid, stream);
    default:
      return Launch<256>(params, grid, stream);
  }
}

}  // namespace okv::cuda
