#ifndef OKV_KERNELS_CUDA_ATTEND_RING_CUH_
#define OKV_KERNELS_CUDA_ATTEND_RING_CUH_

#include "kernels/cuda/attend_tile.cuh"

namespace okv::cuda {

// A warp's private ring of units in shared memory: the warp asks for its units in the order in
// which it will use them, over the borders of pieces. No other warp waits for it. (Four warps that
// load for all, with registers taken from them, were slower with 4 rows, 126 us for 119, and as
// fast with 8.)
template <class T>
class Ring {
 public:
  // Where not even one fits, LaunchTile() refuses.
  static constexpr int kUnits = RingUnits<T>() > 0 ? RingUnits<T>() : 1;

  __device__ __forceinline__ Ring(const AttendKernelParams& params, const BlockPlan& block,
                                  Shared<T>* shared)
      : params_(params),
        block_(block),
        shared_(shared),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    if (lane_ < kUnits) BarrierInit(Arrived(lane_), kArrivals);
#if __CUDA_ARCH__ >= 900
    BarrierInitFence();
#endif
    __syncwarp();
  }

  // Whether the next Request() reads BF16 rows, which the kernel in front may be writing.
  __device__ __forceinline__ bool NextIsBf16() {
    FindIfUsed();
    return (bf16_units_ >> (requested_ % 32) & 1) != 0;
  }

  // Asks for the warp's next unit, into `place`: 0, 1, ... to fill the ring, then LastUsed() once
  // that is read. If there is no unit left, nothing happens.
  __device__ __forceinline__ void Request(int place) {
    FindIfUsed();
    const int source = requested_ % 32;
    if ((bf16_units_ >> source & 1) != 0) {
      CopyRows(source, place);
    } else {
      CopyPages(source, place);
    }
    ++requested_;
  }

  // Asks for the pages of the next unit as far as the L2.
  __device__ __forceinline__ void PrefetchNext() {
#if __CUDA_ARCH__ >= 900
    FindIfUsed();
    if (lane_ != requested_ % 32 || rows_ > 0 || first_ == nullptr) return;
    PrefetchBulkToL2(first_, T::kRunBytes);
    if (second_ != nullptr) PrefetchBulkToL2(second_, T::kRunBytes);
#endif
  }

  // The place of the unit that Wait() gave last.
  __device__ __forceinline__ int LastUsed() const {
    return wait_index_ == 0 ? kUnits - 1 : wait_index_ - 1;
  }

  // Waits for the oldest unit asked for.
  __device__ __forceinline__ UnitSlots<T> Wait() {
    BarrierWait(Arrived(wait_index_), wait_parity_);
    UnitSlots<T> unit;
#pragma unroll
    for (int part = 0; part < T::kPages; ++part) {
      unit.slot[part] = shared_->Unit(warp_, kUnits, wait_index_) + part * T::kSlotBytes;
    }
    if (++wait_index_ == kUnits) {
      wait_index_ = 0;
      wait_parity_ ^= 1;
    }
    return unit;
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr int kArrivals = 1;
#else
  static constexpr int kArrivals = 32;
#endif

  __device__ __forceinline__ uint32_t Arrived(int index) const {
    return SharedAddress(&shared_->arrived[warp_][index]);
  }

  // Finds the next 32 units of the warp, one a lane, when the last ones are used up.
  __device__ __forceinline__ void FindIfUsed() {
    if (requested_ != found_end_) return;
    Find(requested_ + lane_);
    found_end_ += 32;
    __syncwarp();
    bf16_units_ = __ballot_sync(~0u, rows_ > 0);
  }

  // Locates the warp's unit `index` for this lane.
  __device__ __forceinline__ void Find(int index) {
    rows_ = 0;
    first_ = second_ = nullptr;
    int offset = warp_ + index * T::kWarps;
    Piece piece = FirstPiece(block_);
    bool exists = true;
    while (exists) {
      const int units = piece.Units();
      if (offset < units) break;
      exists = piece.pair < block_.last_pair;
      offset -= units;
      if (exists) NextPiece(params_, block_, &piece);
    }
    if (exists) Locate(piece, offset);
  }

  // Unit `index` of the piece.
  __device__ __forceinline__ void Locate(const Piece& piece, int index) {
    const DecodeParams& decode = params_.decode;
    if (piece.IsInt2(index)) {
      const int block = piece.Int2Unit(index) * T::kPages;
      const int32_t* table = decode.int2_table + piece.request * decode.int2_table_stride +
                             (piece.plan.int2_first_block - decode.shape.sink_blocks) + block;
      const int64_t head = static_cast<int64_t>(piece.kv_head) * T::kRunBytes;
      first_ = decode.int2_pages + table[0] * decode.int2_block_stride + head;
      if (T::kPages == 2 && block + 1 < piece.plan.int2_blocks) {
        second_ = decode.int2_pages + table[1] * decode.int2_block_stride + head;
      }
      return;
    }
    const int sinks = decode.shape.sink_blocks;
    const int token = piece.Bf16Token(piece.Bf16Unit(index), T::kUnitTokens);
    const int block = token / static_cast<int>(kBlockTokens);
    const int slot = block < sinks
                         ? block
                         : sinks + (block - sinks) % static_cast<int>(decode.shape.ring_blocks);
    const int64_t at = decode.bf16_table[piece.request * decode.bf16_table_stride + slot];
    constexpr int kRow = 2 * T::kDim;
    first_ = decode.bf16_pages + at * decode.bf16_block_stride +
             static_cast<int64_t>(piece.kv_head) * (2 * kBlockTokens * kRow) +
             token % static_cast<int>(kBlockTokens) * kRow;
    second_ = first_ + kBlockTokens * kRow;
    rows_ = min(T::kUnitTokens, piece.plan.length - token);
  }

  __device__ __forceinline__ static const uint8_t* Broadcast(const uint8_t* pointer, int source) {
    return reinterpret_cast<const uint8_t*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), source));
  }

  __device__ __forceinline__ void CopyPages(int source, int place) {
    const uint32_t slot = SharedAddress(shared_->Unit(warp_, kUnits, place));
    const uint32_t barrier = Arrived(place);
#if __CUDA_ARCH__ >= 900
    if (lane_ == source && first_ != nullptr) {
      const bool two = second_ != nullptr;
      BarrierExpect(barrier, two ? 2 * T::kRunBytes : T::kRunBytes);
      BulkCopy(slot, first_, T::kRunBytes, barrier);
      if (two) BulkCopy(slot + T::kSlotBytes, second_, T::kRunBytes, barrier);
    }
    __syncwarp();
#else
    const uint8_t* first = Broadcast(first_, source);
    const uint8_t* second = Broadcast(second_, source);
    if (first == nullptr) return;
    for (int i = 16 * lane_; i < T::kRunBytes; i += 512) {
      CopyAsync16(slot + i, first + i);
      if (second != nullptr) CopyAsync16(slot + T::kSlotBytes + i, second + i);
    }
    BarrierArriveAfterCopies(barrier);
#endif
  }

  // Lane i copies row i: keys, then values.
  __device__ __forceinline__ void CopyRows(int source, int place) {
    constexpr int kRow = 2 * T::kDim;
    const int rows = __shfl_sync(~0u, rows_, source);
    const uint8_t* keys = Broadcast(first_, source);
    const uint8_t* values = Broadcast(second_, source);
    const int row = lane_ % T::kUnitTokens;
    const bool is_value = lane_ / T::kUnitTokens == 1;
    const bool valid = lane_ < 2 * T::kUnitTokens && row < rows;
    const uint32_t values_at = T::kPages == 2 ? T::kSlotBytes : T::kUnitTokens * T::kRowBytes;
    const uint32_t destination = SharedAddress(shared_->Unit(warp_, kUnits, place)) +
                                 (is_value ? values_at : 0) + row * T::kRowBytes;
    const uint8_t* from = (is_value ? values : keys) + row * kRow;
    const uint32_t barrier = Arrived(place);
#if __CUDA_ARCH__ >= 900
    if (lane_ == 0) BarrierExpect(barrier, 2 * rows * kRow);
    __syncwarp();
    if (valid) BulkCopy(destination, from, kRow, barrier);
    __syncwarp();
#else
    if (valid) {
      for (int i = 0; i < kRow; i += 16) CopyAsync16(destination + i, from + i);
    }
    BarrierArriveAfterCopies(barrier);
#endif
  }

  const AttendKernelParams& params_;
  const BlockPlan& block_;
  Shared<T>* const shared_;
  const int warp_;
  const int lane_;
  int requested_ = 0;
  int found_end_ = 0;
  int wait_index_ = 0;
  uint32_t wait_parity_ = 0;
  uint32_t bf16_units_ = 0;  // Which of the 32 units found last are rows
  // This lane's one of them.
  int rows_ = 0;                     // of a BF16 unit, otherwise 0
  const uint8_t* first_ = nullptr;   // Page, or keys; null: there is no such unit
  const uint8_t* second_ = nullptr;  // Second page or null, or values
};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_RING_CUH_
