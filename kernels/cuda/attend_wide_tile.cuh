#ifndef OKV_KERNELS_CUDA_ATTEND_WIDE_TILE_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WIDE_TILE_CUH_

#include "kernels/cuda/attend_tile.cuh"
#include "kernels/cuda/attend_wide_ptx.cuh"

namespace okv::cuda {

// The constants of the kernel for 16 query rows (attend_wide.cuh): what has a ring of units and
// sums of its own is a warpgroup, not a warp. kWarps counts those.
template <bool kPlainT>
struct WideTile : Tile<128, 1, 4, kPlainT> {
  using Base = Tile<128, 1, 4, kPlainT>;
  static constexpr int kWarps = kWideTuning.warps;
  static constexpr int kThreads = 128 * kWarps;
  static constexpr int kPages = kWideTuning.page_blocks;
  static constexpr int kUnitTokens = 8 * kPages;
  static constexpr int kValuesAt = kPages / 2 * Base::kSlotBytes;
  static constexpr bool kPreloadsRotation = false;
  static constexpr bool kPreloadsOutputRotation = false;
  static_assert(kPages == 4 && !Base::kSumsInRing);

  // Of an operand in shared memory: 16 bytes of all 32 columns.
  static constexpr int kStepBytes = 16 * Base::kColumns;
  static constexpr int kExtraBytes = 512 * 4 * kWarps + 512 * kWarps + 256;  // WideState
};

// What one warp copies of a unit.
struct alignas(16) UnitSource {
  const uint8_t* from;  // A page, or null; of a BF16 unit the first key
  int rows;             // of a BF16 unit, otherwise 0; negative: there is no such unit
};

// What is behind the rings in shared memory, mostly because registers are scarce.
template <class T>
struct WideState {
  UnitSource found[T::kThreads / 32][32];     // Each warp's parts of the next units
  float exchange[T::kWarps][2][T::kRows][4];  // What the four warps of a group tell each other
  BlockPlan block;
  Piece piece;

  __device__ __forceinline__ static WideState* Of(const Shared<T>* shared) {
    static_assert(sizeof(WideState) <= T::kExtraBytes);
    return reinterpret_cast<WideState*>(
        const_cast<Shared<T>*>(shared)->Unit(T::kWarps, RingUnits<T>(), 0));
  }
};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_WIDE_TILE_CUH_
