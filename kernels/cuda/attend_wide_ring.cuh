#ifndef OKV_KERNELS_CUDA_ATTEND_WIDE_RING_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WIDE_RING_CUH_

#include "kernels/cuda/attend_ring.cuh"
#include "kernels/cuda/attend_wide_tile.cuh"

namespace okv::cuda {

#if OKV_HAS_WGMMA

// As attend_ring.cuh does, whose tuned code is not changed for it. The piece of the block's unit
// `*index`, which becomes the unit's in the piece. False: the block has not so many.
__device__ __forceinline__ bool FindUnitOfBlock(const AttendKernelParams& params,
                                                const BlockPlan& block, int* index, Piece* piece) {
  *piece = FirstPiece(block);
  while (*index >= piece->Units()) {
    if (piece->pair == block.last_pair) return false;
    *index -= piece->Units();
    NextPiece(params, block, piece);
  }
  return true;
}

// Of the piece's pair: INT2 block `block`, counted from the first one that is read.
template <class T>
__device__ __forceinline__ const uint8_t* PageOfBlock(const AttendKernelParams& params,
                                                      const Piece& piece, int block) {
  const DecodeParams& decode = params.decode;
  const int32_t* table = decode.int2_table + piece.request * decode.int2_table_stride +
                         (piece.plan.int2_first_block - decode.shape.sink_blocks);
  return decode.int2_pages + table[block] * decode.int2_block_stride +
         static_cast<int64_t>(piece.kv_head) * T::kRunBytes;
}

// The same for the keys of BF16 rows from `token` on; the values are kBlockTokens rows behind.
template <class T>
__device__ __forceinline__ const uint8_t* KeysFrom(const AttendKernelParams& params,
                                                   const Piece& piece, int token) {
  const DecodeParams& decode = params.decode;
  const int sinks = decode.shape.sink_blocks;
  const int block = token / static_cast<int>(kBlockTokens);
  const int slot =
      block < sinks ? block : sinks + (block - sinks) % static_cast<int>(decode.shape.ring_blocks);
  const int64_t at = decode.bf16_table[piece.request * decode.bf16_table_stride + slot];
  constexpr int kRow = 2 * T::kDim;
  return decode.bf16_pages + at * decode.bf16_block_stride +
         static_cast<int64_t>(piece.kv_head) * (2 * kBlockTokens * kRow) +
         token % static_cast<int>(kBlockTokens) * kRow;
}

// A warpgroup's ring of units in shared memory (attend_ring.cuh has that of a warp). Warp w asks
// for page w of a unit, and for a quarter of a BF16 unit's rows: one warp for all took 900 clocks a
// unit, for which the others waited, 214 us instead of 202.
template <class T>
class WideRing {
 public:
  static constexpr uint32_t kUnits = RingUnits<T>();

  // REQUIRES: the block's plan is in shared memory. The caller's __syncthreads() comes before
  // Request().
  __device__ __forceinline__ WideRing(const AttendKernelParams& params, int group, int warp,
                                      Shared<T>* shared)
      : params_(params), shared_(shared), group_(group), warp_(warp) {
    if (threadIdx.x % 128 < kUnits) BarrierInit(Arrived(threadIdx.x % 128), 4);
    BarrierInitFence();
  }

  // Whether Request(index) reads BF16 rows, which the kernel in front may be writing. Called in
  // turn before Request(index).
  __device__ __forceinline__ bool IsBf16(uint32_t index) {
    if (index % 32 == 0) Find(index);
    return Found(index)->What() > UnitSource::kRows;
  }

  // Asks for the warp's part of the group's unit `index`, each in turn; its place is index %
  // kUnits. REQUIRES: all warps are done with unit index - kUnits; the warp's lanes have met since
  // Request(index - 1), or Find() writes over what one of them still reads.
  __device__ __forceinline__ void Request(uint32_t index) {
    if (index % 32 == 0) Find(index);
    const UnitSource source = *Found(index);
    if (__builtin_expect(source.What() <= UnitSource::kPage, 1)) {
      const bool arrives = source.What() != UnitSource::kNoUnit && Again(threadIdx.x) % 32 == 0;
      const bool copies = source.What() == UnitSource::kPage;
      BulkCopyIf<T::kRunBytes>(arrives, copies, source.to, source.from, source.Barrier());
    } else {
      CopyRows(source);
    }
  }

  // Asks for what follows the ring in the place of the unit before unit `index`, if there is one.
  __device__ __forceinline__ void RequestBehind(uint32_t index) {
    if (index > 0) Request(index - 1 + kUnits);
  }

  // Waits for the unit in `place`; parity changes with every round of places, from 0.
  __device__ __forceinline__ UnitSlots<T> Wait(uint32_t place, uint32_t parity) {
    BarrierWait(Arrived(place), parity);
    UnitSlots<T> unit;
#pragma unroll
    for (int part = 0; part < T::kPages; ++part) {
      unit.slot[part] = shared_->Unit(group_, kUnits, place) + part * T::kSlotBytes;
    }
    return unit;
  }

 private:
  static constexpr int kRow = 2 * T::kDim;

  __device__ __forceinline__ uint32_t Arrived(uint32_t place) const {
    return SharedAddress(&shared_->arrived[group_][place]);
  }
  __device__ __forceinline__ UnitSource* Found(uint32_t index) const {
    return &WideState<T>::Of(shared_)->found[4 * group_ + warp_][index % 32];
  }

  // Finds the warp's parts of units first .. first + 31 of the group, one a lane.
  __device__ __forceinline__ void Find(int first) {
    const int lane = Again(threadIdx.x) % 32;
    int index = group_ + (first + lane) * T::kWarps;
    const uint32_t place = static_cast<uint32_t>(first + lane) % kUnits;
    UnitSource source = {nullptr, SharedAddress(shared_->Unit(group_, kUnits, place)), 0};
    uint32_t what = UnitSource::kNoUnit;
    Piece piece;
    if (FindUnitOfBlock(params_, WideState<T>::Of(shared_)->block, &index, &piece)) {
      if (piece.IsInt2(index)) {
        const int block = piece.Int2Unit(index) * T::kPages + warp_;
        what = UnitSource::kNoPage;
        if (block < piece.plan.int2_blocks) {
          what = UnitSource::kPage;
          source.from = PageOfBlock<T>(params_, piece, block);
          source.to += warp_ * T::kSlotBytes;
        }
      } else {
        const int token = piece.Bf16Token(piece.Bf16Unit(index), T::kUnitTokens);
        source.from = KeysFrom<T>(params_, piece, token);
        what = UnitSource::kRows + min(T::kUnitTokens, piece.plan.length - token);
      }
    }
    source.Pack(Arrived(place), what);
    *Found(lane) = source;
    __syncwarp();
  }

  // Warps 0 and 1 copy the keys, 2 and 3 the values, a lane a row.
  __device__ __forceinline__ void CopyRows(const UnitSource& source) {
    constexpr int kShare = T::kUnitTokens / 2;
    const int lane = Again(threadIdx.x) % 32;
    const int is_value = warp_ / 2;
    const uint32_t row = warp_ % 2 * kShare + lane;
    const bool valid = lane < kShare && row < source.What() - UnitSource::kRows;
    const int rows = __popc(__ballot_sync(~0u, valid));
    if (lane == 0) BarrierExpect(source.Barrier(), rows * kRow);
    __syncwarp();
    if (valid) {
      BulkCopy(source.to + is_value * T::kValuesAt + row * T::kRowBytes,
               source.from + (is_value * static_cast<int>(kBlockTokens) + row) * kRow, kRow,
               source.Barrier());
    }
    __syncwarp();
  }

  const AttendKernelParams& params_;
  Shared<T>* const shared_;
  const int group_;
  const int warp_;
};

#endif  // OKV_HAS_WGMMA

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_WIDE_RING_CUH_
