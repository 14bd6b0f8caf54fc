#ifndef OKV_KERNELS_CUDA_ATTEND_WIDE_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WIDE_CUH_

#include "kernels/cuda/attend_kernel.cuh"
#include "kernels/cuda/attend_wide_ring.cuh"
#include "kernels/cuda/attend_wide_sums.cuh"

// The decode attention kernel for 16 query rows a KV head on sm_90a: attend_kernel.cuh with
// warpgroups in the place of warps.
//
// A page of 64 tokens and one KV head: 4,608 bytes; 8 products of 64 x 32 x 32 8-bit integers, 32
// AND and about 175 other instructions in each of four warps. Bound by instructions, issued in 53 %
// of all clocks, and products, with which their issue hardly overlaps, in 30 %. On an H200 at 8 x
// 102,400, 128/8 heads: 183 us, 62 % of the limit of memory, where mma.sync (attend_kernel.cuh)
// takes 250 (README.md).
namespace okv::cuda {

#if OKV_HAS_WGMMA
// Query bytes in the order in which wgmma reads them, in the same place: 16 bytes of all columns
// after the other.
template <class T>
__device__ __forceinline__ void ReorderQueryBytes(Shared<T>* shared) {
  constexpr int kSteps = T::kDim / 16;
  static_assert(T::kColumns * kSteps <= T::kThreads);
  const int column = threadIdx.x % T::kColumns;
  const int step = threadIdx.x / T::kColumns;
  uint4 word = {};
  if (step < kSteps) {
    word = *reinterpret_cast<const uint4*>(&shared->query_bytes[column][16 * step]);
  }
  __syncthreads();
  if (step < kSteps) reinterpret_cast<uint4*>(shared->query_bytes)[threadIdx.x] = word;
  FenceBeforeBulkCopy();
  __syncthreads();
}

// Asks for the first piece's queries and fills the ring, as StartLoads() in attend_kernel.cuh.
template <class T>
__device__ __forceinline__ void StartWideLoads(const AttendKernelParams& params, const Piece& piece,
                                               WideRing<T>* ring, Shared<T>* shared) {
  constexpr uint32_t kUnits = WideRing<T>::kUnits;
  const QueryCopy<T> queries(params, piece);
  uint32_t requested = 0;
  if (params.decode.early_history) {
    for (; requested < (kUnits + 1) / 2 && !ring->IsBf16(requested); ++requested) {
      ring->Request(requested);
    }
    WaitForKernelBefore();
  }
  queries.Request(shared->query_raw);
  for (; requested < kUnits; ++requested) ring->Request(requested);
  LetNextKernelStart();
}

// By one warp: what is behind the last row of BF16 unit `unit` of the pair becomes 0.
template <class T>
__device__ __forceinline__ void ClearBehind(const Piece& piece, int unit,
                                            const UnitSlots<T>& slots) {
  const int tokens = piece.plan.length - piece.Bf16Token(unit, T::kUnitTokens);
  if (tokens < T::kUnitTokens) ClearValues<T>(tokens, slots);
}

// The queries of a piece in all their forms; those of the next one, if there is one, are asked for.
template <class T>
__device__ __forceinline__ bool BeginWidePiece(const AttendKernelParams& params,
                                               const BlockPlan& block, const Piece& piece,
                                               Shared<T>* shared, WideSums<T>* sums) {
  const bool more = piece.pair < block.last_pair;
  uint32_t words[T::kDim / 16][4];
  BeginPiece<T>(params, piece, words, shared);
  ReorderQueryBytes(shared);
  sums->Begin(params, piece, *shared);
  if (more) {
    Piece next = piece;
    NextPiece(params, block, &next);
    QueryCopy<T>(params, next).Request(shared->query_raw);
  }
  return more;
}

// INT2 units of the piece before this one have all their pages; at most one has not, the pair's
// last.
template <class T>
__device__ __forceinline__ int FullUnitsEnd(const Piece& piece) {
  const int full = piece.plan.int2_blocks / T::kPages - piece.int2_begin;
  return piece.int2_index + min(piece.int2_count, full);
}

// All groups of a block meet equally often in a piece, twice a unit, or racecheck loses the block's
// barrier (tests/kernels/cuda/named_barriers.cu). The group has had `had` of the piece's units.
template <class T>
__device__ __forceinline__ void MeetAsOften(int group, int had, int units) {
  if (had < (units + T::kWarps - 1) / T::kWarps) {
    WarpgroupSync(group);
    WarpgroupSync(group);
  }
}

// The block's plan and first piece into shared memory. False: there is nothing to do.
template <class T>
__device__ __forceinline__ bool LoadPlan(const AttendKernelParams& params, WideState<T>* state) {
  const BlockPlan plan = LoadBlockPlan(params.workspace.blocks + blockIdx.x);
  if (plan.first_pair > plan.last_pair) return false;
  if (threadIdx.x == 0) {
    state->block = plan;
    state->piece = FirstPiece(plan);
  }
  return true;
}
#endif

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
    AttendWideKernel(const __grid_constant__ AttendKernelParams params) {
#if OKV_HAS_WGMMA
  constexpr uint32_t kUnits = WideRing<T>::kUnits;
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  Shared<T>* shared = reinterpret_cast<Shared<T>*>(shared_bytes);
  WideState<T>* state = WideState<T>::Of(shared);
  // Through shuffles, so that the compiler knows them to be the same in all lanes.
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x % 128 / 32, 0);  // in the group
  if (!params.decode.early_history) WaitForKernelBefore();
  if (!LoadPlan(params, state)) return;
  WideRing<T> ring(params, group, warp, shared);
  __syncthreads();
  const BlockPlan& block = state->block;
  const Piece& piece = state->piece;
  // Rotations and queries before the ring, as in attend_kernel.cuh.
  PrefetchRotation<T>(RotationOf<T>(params.decode.r_k, params, piece));
  PrefetchRotation<T>(RotationOf<T>(params.decode.r_v, params, piece));
  StartWideLoads<T>(params, piece, &ring, shared);
  WideSums<T> sums;
  int unit = group;                           // The group's next one in the piece
  uint32_t index = 0, place = 0, parity = 0;  // Of all its units, and in the ring
  while (true) {
    const bool more = BeginWidePiece<T>(params, block, piece, shared, &sums);
    const int units = piece.Units();
    const int int2_begin = piece.int2_index;
    const uint32_t int2_count = piece.int2_count;
    const int full_end = FullUnitsEnd<T>(piece);
#pragma unroll 1
    for (; unit < units; unit += T::kWarps) {
      const UnitSlots<T> slots = ring.Wait(place, parity);
      const bool is_int2 = static_cast<uint32_t>(unit - int2_begin) < int2_count;
      typename WideSums<T>::Scores scores;
      if (is_int2) {
        sums.ScoreInt2(params, piece, unit, unit < full_end, slots, shared, &scores);
      } else if (warp == 0) {
        ClearBehind<T>(piece, piece.Bf16Unit(unit), slots);
      }
      WarpgroupSync(group);
      // All four warps are done with the unit before; its place is asked for again a little later.
      const auto request = [&] { ring.RequestBehind(index); };
      if (is_int2) {
        sums.AddInt2(slots, &scores, shared, request);
      } else {
        request();
        WarpgroupSync(group);  // For MeetAsOften()
        sums.AddBf16(params, piece, piece.Bf16Unit(unit), slots, *shared);
      }
      ++index;
      if (++place == kUnits) {
        place = 0;
        parity ^= 1;
      }
    }
    MeetAsOften<T>(group, unit / T::kWarps, units);
    unit -= units;
    sums.Finish(shared);
    FinishPiece<T>(params, block, piece, shared);
    if (!more) return;
    __syncthreads();
    if (threadIdx.x == 0) NextPiece(params, block, &state->piece);
    __syncthreads();
    PrefetchRotation<T>(RotationOf<T>(params.decode.r_k, params, piece));
  }
#else
  __trap();  // Compiled for sm_90 instead of sm_90a: an error, not a wrong output
#endif
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_WIDE_CUH_
