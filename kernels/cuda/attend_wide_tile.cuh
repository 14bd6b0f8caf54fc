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

// What one warp copies of a unit, and to where in shared memory.
struct alignas(16) UnitSource {
  static constexpr uint32_t kNoUnit = 0;  // The block has not so many.
  static constexpr uint32_t kNoPage = 1;  // Of the pair's last unit
  static constexpr uint32_t kPage = 2;
  static constexpr uint32_t kRows = 3;  // kRows + n: n BF16 rows

  const uint8_t* from;  // A page; of a BF16 unit the first key
  uint32_t to;          // The page's place; of a BF16 unit the unit's
  uint32_t packed;      // Bits 0 .. 19 the barrier, bits 20 .. one of the values above

  // REQUIRES: barrier < 2^20: outside a cluster addresses in shared memory are below 2^18.
  __device__ __forceinline__ void Pack(uint32_t barrier, uint32_t what) {
    packed = barrier | what << 20;
  }
  __device__ __forceinline__ uint32_t What() const { return packed >> 20; }
  __device__ __forceinline__ uint32_t Barrier() const { return packed & 0xfffff; }
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
