#ifndef OKV_KERNELS_CUDA_ROW_LAUNCH_CUH_
#define OKV_KERNELS_CUDA_ROW_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/early_launch.h"
#include "kernels/cuda/row_rotate.cuh"
#include "kernels/cuda/row_tile.cuh"

// How the tokens of a launch (layers x KV heads x {K, V} x tokens) are cut into thread blocks. Four
// warps, a group, take a unit together: four tiles in sequence, multiplied by one rotation. A
// thread block works for one (layer, head, half), so that it loads one rotation, in groups that
// take its units in turn and wait for each other only for that rotation.
namespace okv::cuda {

template <int kDim>
inline constexpr int kUnitTokens = 4 * kTileTokens<kDim>;
template <int kDim>
inline constexpr int kUnitBlocks = kUnitTokens<kDim> / 64;

// Shared memory of a thread block.
struct SharedBytes {
  uint32_t fixed;
  uint32_t warp;

  uint32_t Of(uint32_t groups) const { return fixed + 4 * groups * warp; }
};

// What a kernel asks of a multiprocessor; of less shared memory it gets fewer warps.
template <int kWarps, int kBlocksPerSm>
struct RowShape {
  static_assert(kWarps % 4 == 0);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kBlocksPerSm;
};

// Blocks of a launch: 2^31 tokens, what a TokenMap's slots can name.
inline constexpr uint32_t kRowBlocksMax = 1u << 25;

// Units of a thread block, at most: more would only make the last wave's imbalance larger, fewer
// load rotations more often. By groups, or by tokens.
template <class Shape>
inline constexpr uint32_t kGroupsUnitsMax = 8 * Shape::kThreads / 128;
template <int kDim>
inline constexpr uint32_t kTokensUnitsMax = 1024 / kUnitTokens<kDim>;

struct RowGrid {
  uint32_t layers_count;
  uint32_t kv_heads;
  uint32_t halves;       // 2: K and V
  uint32_t units;        // Of one (layer, head, half)
  uint32_t block_units;  // Of them, those of one thread block
};

// Of a warp. Its tiles are 4 unit + its index in the group.
struct RowWork {
  int layer;
  int head;
  bool is_value;
  uint32_t unit;  // The first
  uint32_t units_end;
};

// Neighboring thread blocks have the heads of the same tokens: what they read at one time lies
// together.
__device__ __forceinline__ RowWork RowWorkOfWarp(const RowGrid& grid) {
  const uint32_t pair = blockIdx.x % (grid.kv_heads * grid.halves);
  const uint32_t range = blockIdx.x / (grid.kv_heads * grid.halves);
  return {.layer = static_cast<int>(blockIdx.y),
          .head = static_cast<int>(pair % grid.kv_heads),
          .is_value = pair >= grid.kv_heads,
          .unit = range * grid.block_units + threadIdx.x / 128,
          .units_end = min((range + 1) * grid.block_units, grid.units)};
}
__device__ __forceinline__ uint32_t UnitStep() { return blockDim.x / 128; }
__device__ __forceinline__ uint32_t TileOfUnit(uint32_t unit) {
  return 4 * unit + threadIdx.x / 32 % 4;
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

// The next kernel may start only when the one before this has ended: it may read what is older than
// this one, which may have begun before.
__device__ __forceinline__ void WaitAndLetStart() {
  WaitForKernelBefore();
  LetNextKernelStart();
}

// Comes before WaitAndLetStart(): queues the load of the thread block's rotation, if there is one,
// where that is allowed, as the first group of copies; true then. With early inputs it is not:
// their rows come first.
template <int kDim, bool kRotate>
__device__ __forceinline__ bool LoadEarlyRotation(const Rotations& rotations, const RowWork& work,
                                                  uint32_t rotation, bool early_inputs) {
  const bool loads = kRotate && rotations.early && !early_inputs;
  if (loads) {
    LoadRotation<kDim>(RotationOf(rotations, work, kDim), rotation);
    CopyAsyncCommit();
  }
  return loads;
}
// Shares the rotation. Comes behind the load of the first rows, which takes longer; they are
// kGroups groups of copies. Where the rotation comes last, they were waited for too.
template <int kDim, int kGroups>
__device__ __forceinline__ void FinishRotation(const Rotations& rotations, const RowWork& work,
                                               uint32_t rotation, bool is_loading) {
  if (is_loading) {
    CopyAsyncWait<kGroups>();
  } else {
    LoadRotation<kDim>(RotationOf(rotations, work, kDim), rotation);
    CopyAsyncCommit();
    CopyAsyncWait<0>();
  }
  ShareRotation();
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

// Launches kernel(params, grid) over the units of `grid`, whose block_units it chooses: so that one
// wave of thread blocks does all, up to units_max units each. The kernel may start before the one
// before it on the stream has ended: it waits for that before it reads or writes memory, but for
// what is said to be early.
template <class Shape, typename Params>
cudaError_t LaunchRows(void (*kernel)(Params, RowGrid), const SharedBytes& shared,
                       uint32_t units_max, const Params& params, RowGrid grid,
                       cudaStream_t stream) {
  if (grid.units == 0) return cudaSuccess;
  int device = 0;
  int sms = 0;
  int major = 0;
  int shared_max = 0;
  int shared_of_sm = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  error =
      cudaDeviceGetAttribute(&shared_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  uint32_t groups = Shape::kThreads / 128;
  while (groups > 1 && shared.Of(groups) > static_cast<uint32_t>(shared_max)) --groups;
  error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared.Of(groups)));
  if (error != cudaSuccess) return error;
  const uint64_t pairs = static_cast<uint64_t>(grid.kv_heads) * grid.halves;
  // A block takes 1 KiB more than it asks for; a smaller GPU holds fewer than the kernel allows.
  const uint32_t blocks_of_sm = static_cast<uint32_t>(shared_of_sm) / (shared.Of(groups) + 1024);
  const uint64_t resident_blocks =
      static_cast<uint64_t>(sms) * (blocks_of_sm == 0               ? 1
                                    : blocks_of_sm < Shape::kBlocks ? blocks_of_sm
                                                                    : Shape::kBlocks);
  const uint64_t all_units = pairs * grid.layers_count * grid.units;
  const uint64_t block_units = (all_units + resident_blocks - 1) / resident_blocks;
  grid.block_units = block_units < units_max ? static_cast<uint32_t>(block_units) : units_max;
  const uint64_t blocks = (grid.units + grid.block_units - 1) / grid.block_units * pairs;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidValue;
  return LaunchEarly(kernel,
                     {.gridDim = dim3(static_cast<uint32_t>(blocks), grid.layers_count),
                      .blockDim = dim3(128 * groups),
                      .dynamicSmemBytes = shared.Of(groups),
                      .stream = stream},
                     /*early=*/major >= 9, params, grid);
}

// Launches Kernel<kDim, kGroups, whether rows are rotated> for the groups of `params`.
template <int kDim, template <int, int, bool> class Kernel, class Params>
cudaError_t LaunchGroups(const Params& params, const RowGrid& grid, cudaStream_t stream) {
  const auto launch = [&]<int kGroups>() {
    const auto rotated = [&]<bool kRotate>() {
      using Instance = Kernel<kDim, kGroups, kRotate>;
      using Shape = typename Instance::Shape;
      return LaunchRows<Shape>(
          Instance::kFunction,
          {.fixed = kRotate ? kRotationBytes<kDim> : 0, .warp = kTileBytes<kDim>},
          kRotate ? kTokensUnitsMax<kDim> : kGroupsUnitsMax<Shape>, params, grid, stream);
    };
    return params.rotations.k == nullptr ? rotated.template operator()<false>()
                                         : rotated.template operator()<true>();
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
  const RowGrid grid = {
      .layers_count = params.layers_count,
      .kv_heads = params.kv_heads,
      .halves = 2,
      .units = params.head_dim == 64 ? (params.blocks_count + 1) / 2 : params.blocks_count,
      .block_units = 0};
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
