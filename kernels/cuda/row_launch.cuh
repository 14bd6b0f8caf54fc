#ifndef OKV_KERNELS_CUDA_ROW_LAUNCH_CUH_
#define OKV_KERNELS_CUDA_ROW_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/row_tile.cuh"

// How the tiles of a launch (layers x KV heads x {K, V} x tokens / 32) are cut into thread blocks.
// A thread block works for one (layer, head, half), so that it loads one rotation, in warps that
// take its tiles in turn and wait for each other only for that rotation.
namespace okv::cuda {

// d 256 has 132 KiB of rotation and 16.5 KiB a tile, and over 200 registers a thread.
template <int kDim>
inline constexpr int kRowWarpsMax = kDim == 256 ? 4 : 8;
template <int kDim>
inline constexpr int kRowBlocksPerSm = kDim == 256 ? 1 : 2;

// Blocks of a launch: 2^31 tokens, what a TokenMap's slots can name.
inline constexpr uint32_t kRowBlocksMax = 1u << 25;

struct RowGrid {
  uint32_t layers_count;
  uint32_t kv_heads;
  uint32_t halves;       // 2: K and V
  uint32_t tiles;        // Of one (layer, head, half)
  uint32_t block_tiles;  // Of them, those of one thread block
};

struct RowWork {
  int layer;
  int head;
  bool is_value;
  uint32_t first_tile;
  uint32_t tiles_end;
};

// Neighboring thread blocks have the heads of the same tokens: what they read at one time lies
// together.
__device__ __forceinline__ RowWork RowWorkOfBlock(const RowGrid& grid) {
  const uint32_t pair = blockIdx.x % (grid.kv_heads * grid.halves);
  const uint32_t range = blockIdx.x / (grid.kv_heads * grid.halves);
  return {.layer = static_cast<int>(blockIdx.y),
          .head = static_cast<int>(pair % grid.kv_heads),
          .is_value = pair >= grid.kv_heads,
          .first_tile = range * grid.block_tiles,
          .tiles_end = min((range + 1) * grid.block_tiles, grid.tiles)};
}

// The shared memory of a thread block: the rotation, if any, then a tile a warp.
template <int kDim, bool kRotate>
__device__ __forceinline__ SharedRows WarpTile(uint8_t* shared) {
  return SharedRowsAt(shared + (kRotate ? kRotationBytes<kDim> : 0) +
                      threadIdx.x / 32 * kTileBytes<kDim>);
}

__device__ __forceinline__ const __nv_bfloat16* RotationOf(const Rotations& rotations,
                                                           const RowWork& work, int dim) {
  const __nv_bfloat16* const base = work.is_value ? rotations.v : rotations.k;
  const int head = rotations.rotation_heads == 1 ? 0 : work.head;
  return base + (static_cast<int64_t>(work.layer) * rotations.rotation_heads + head) * dim * dim;
}

inline bool IsRowShape(uint32_t layers_count, uint32_t kv_heads, uint32_t head_dim) {
  return layers_count >= 1 && layers_count <= 512 && kv_heads >= 1 && kv_heads <= 256 &&
         (head_dim == 64 || head_dim == 128 || head_dim == 256);
}
inline bool IsGroupSize(uint32_t group_size, uint32_t head_dim) {
  return group_size >= 32 && group_size <= head_dim && (group_size & (group_size - 1)) == 0;
}
inline bool IsAligned16(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0;
}
template <typename Element>
bool AreRows(const PagedRowsOf<Element>& rows) {
  const int64_t strides =
      rows.layer_stride | rows.page_stride | rows.token_stride | rows.head_stride;
  return rows.base != nullptr && IsAligned16(rows.base) && strides % 8 == 0 &&
         rows.page_tokens != 0 && rows.page_tokens <= 1u << 30 &&
         (rows.page_tokens & (rows.page_tokens - 1)) == 0;
}
inline bool IsMap(const TokenMap& map) { return map.slots == nullptr || map.pages == nullptr; }
template <typename Byte>
bool ArePages(const PagesOf<Byte>& pages) {
  const int64_t strides = pages.block_stride | pages.layer_stride | pages.head_stride;
  return pages.base != nullptr && IsAligned16(pages.base) && strides % 16 == 0;
}
// With rotations, both or neither.
inline bool AreRotations(const Rotations& rotations, uint32_t kv_heads) {
  if (rotations.k == nullptr && rotations.v == nullptr) return true;
  return rotations.k != nullptr && rotations.v != nullptr && IsAligned16(rotations.k) &&
         IsAligned16(rotations.v) &&
         (rotations.rotation_heads == 1 || rotations.rotation_heads == kv_heads);
}

// Launches kernel(params, grid) over the tiles of `grid`, whose block_tiles it chooses: so that one
// wave of thread blocks does all, up to 8 tiles a warp. (More would only make the last wave's
// imbalance larger.)
template <int kDim, bool kRotate, typename Params>
cudaError_t LaunchRows(void (*kernel)(Params, RowGrid), const Params& params, RowGrid grid,
                       cudaStream_t stream) {
  if (grid.tiles == 0) return cudaSuccess;
  int device = 0;
  int shared_max = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  constexpr uint32_t kFixedBytes = kRotate ? kRotationBytes<kDim> : 0;
  uint32_t warps = kRowWarpsMax<kDim>;
  while (warps > 1 &&
         kFixedBytes + warps * kTileBytes < kDim >> static_cast<uint32_t>(shared_max)) {
    warps /= 2;
  }
  const uint32_t shared_bytes = kFixedBytes + warps * kTileBytes<kDim>;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  const uint64_t pairs = static_cast<uint64_t>(grid.kv_heads) * grid.halves;
  const uint64_t resident_warps = static_cast<uint64_t>(sms) * kRowBlocksPerSm<kDim> * warps;
  const uint64_t all_tiles = pairs * grid.layers_count * grid.tiles;
  uint64_t warp_tiles = (all_tiles + resident_warps - 1) / resident_warps;
  if (warp_tiles > 8) warp_tiles = 8;
  grid.block_tiles = static_cast<uint32_t>(warp_tiles) * warps;
  const uint64_t blocks = (grid.tiles + grid.block_tiles - 1) / grid.block_tiles * pairs;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidValue;
  kernel<<<dim3(static_cast<uint32_t>(blocks), grid.layers_count), warps * 32, shared_bytes,
           stream>>>(params, grid);
  return cudaGetLastError();
}

// Launches Kernel<kDim, kGroups, whether rows are rotated>::kFunction for the groups of `params`.
template <int kDim, template <int, int, bool> class Kernel, class Params>
cudaError_t LaunchGroups(const Params& params, const RowGrid& grid, cudaStream_t stream) {
  const auto launch = [&]<int kGroups>() {
    if (params.rotations.k == nullptr) {
      return LaunchRows<kDim, false>(Kernel<kDim, kGroups, false>::kFunction, params, grid, stream);
    }
    return LaunchRows<kDim, true>(Kernel<kDim, kGroups, true>::kFunction, params, grid, stream);
  };
  switch (kDim / params.group_size) {
    case 1:
      return launch.template operator()<1>();
    case 2:
      return launch.template operator()<2>();
    case 4:
      if constexpr (kDim >= 128) return launch.template operator()<4>();
      break;
    case 8:
      if constexpr (kDim >= 256) return launch.template operator()<8>();
      break;
  }
  return cudaErrorInvalidValue;
}

// A kernel over rows and int2 pages (QuantizePagesParams, DequantizePagesParams): checks, then
// launches the instance of `params`. cudaErrorInvalidValue for what is not supported.
template <template <int, int, bool> class Kernel, class Params>
cudaError_t LaunchPages(const Params& params, cudaStream_t stream) {
  if (!IsRowShape(params.layers_count, params.kv_heads, params.head_dim) ||
      !IsGroupSize(params.group_size, params.head_dim) || params.blocks_count > kRowBlocksMax ||
      !AreRows(params.k) || !AreRows(params.v) || !IsMap(params.tokens) ||
      !AreRotations(params.rotations, params.kv_heads) || !ArePages(params.pages)) {
    return cudaErrorInvalidValue;
  }
  const RowGrid grid = {.layers_count = params.layers_count,
                        .kv_heads = params.kv_heads,
                        .halves = 2,
                        .tiles = params.blocks_count * kTilesPerBlock,
                        .block_tiles = 0};
  switch (params.head_dim) {
    case 64:
      return LaunchGroups<64, Kernel>(params, grid, stream);
    case 128:
      return LaunchGroups<128, Kernel>(params, grid, stream);
    default:
      return LaunchGroups<256, Kernel>(params, grid, stream);
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROW_LAUNCH_CUH_
