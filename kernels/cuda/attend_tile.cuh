#ifndef OKV_KERNELS_CUDA_ATTEND_TILE_CUH_
#define OKV_KERNELS_CUDA_ATTEND_TILE_CUH_

#include <cstdint>

#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_tuning.h"
#include "kernels/cuda/ptx.cuh"

namespace okv::cuda {

// The constants of one instantiation. A lane is 4 row + pair in the fragments of mma.sync; it holds
// kLaneRows query rows of the pair's kRows = 4 kLaneRows: with 4 rows, a row's two bytes (of q, of
// p) are two columns of one matrix; with 8 or 16, they are two matrices with a row a column.
// Plain: one query token, no sliding window, no softcap. What the others need would, even unused,
// split the main loop and take registers from it.
template <int kDimT, int kGroupsT, int kLaneRowsT, bool kPlainT>
struct Tile {
  static constexpr bool kPlain = kPlainT;
  static constexpr int kDim = kDimT;
  static constexpr int kGroups = kGroupsT;  // Scales of a token's row
  static constexpr int kLaneRows = kLaneRowsT;
  static constexpr int kRows = 4 * kLaneRows;
  static constexpr DecodeTuning kTuning = TuningOf(kDim, kGroups, kRows);
  static constexpr int kWarps = kTuning.warps;
  static constexpr int kThreads = 32 * kWarps;

  // Whether a warp's part of R_K, and of R_V, finds room in registers while other things go on.
  static constexpr bool kPreloadsRotation = kDim * kLaneRows <= 128;
  static constexpr bool kPreloadsOutputRotation = kDim * kLaneRows <= 256 && kDim <= 128;

  // ---- Units
  static constexpr int kPages = kTuning.page_blocks;  // of an INT2 unit
  static constexpr int kTiles = 4 * kPages;           // of 16 tokens
  static constexpr int kUnitTokens = 8 * kPages;      // of a BF16 unit
  static constexpr int kRunBytes = 32 * kDim + 512 * kGroups;
  static constexpr int kValueCodes = 16 * kDim;
  static constexpr int kParameters = 32 * kDim;
  // A row of a BF16 unit in shared memory: 16 bytes longer, so that the eight rows of a matrix are
  // in different banks.
  static constexpr int kRowBytes = 2 * kDim + 16;
  // A slot of the ring holds a page; for a BF16 unit of 16 tokens the keys or the values, of 8
  // tokens both.
  static constexpr int kSlotBytes =
      ((16 * kRowBytes > kRunBytes ? 16 * kRowBytes : kRunBytes) + 127) / 128 * 128;

  // Where the values of a BF16 unit are in it.
  static constexpr int kValuesAt = kPages >= 2 ? kPages / 2 * kSlotBytes : kUnitTokens * kRowBytes;
  static constexpr int kExtraBytes = 0;  // Of shared memory, behind the rings

  // ---- Matrices
  static constexpr int kRowTiles = kLaneRows == 1 ? 1 : kLaneRows / 2;  // of 8 columns
  static constexpr int kParts = kLaneRows == 1 ? 1 : 2;                 // Matrices per row tile
  static constexpr int kColumns = kRowTiles * kParts * 8;
  static constexpr int kKeySteps = kDim / 32;
  static constexpr int kGroupSteps = kKeySteps / kGroups;
  static constexpr int kChannelTiles = kDim / 16;
  static constexpr int kQueryStride = kDim + 4;  // of a row of fp32 queries, in elements
  static constexpr int kHalfStride = kDim + 8;   // of a row of bf16 queries or outputs

  static constexpr int kByteStride = kDim + 16;  // of a row of query bytes: [4 slots][kDim / 4]

  // Between the ring's filling and the first unit used, the time of the query's rotation, memory
  // would stand still: so long pieces ask for one unit more, as far as the L2. With 8 rows, whose
  // rings are longer, it costs 1 us.
  static constexpr bool kPrefetchesUnit = kDim == 128 && kLaneRows == 1;
  static constexpr int kPrefetchPieceUnits = 5 * kWarps;

  // With 8 rows a warp's sums of p v, fp32 [kDim][kRows], wait for the merge in the ring's place of
  // the last unit used: a third unit a warp then finds room, 132 us for 136 at 8 x 102,400. With 4
  // rows, whose arithmetic leaves time, it gains nothing.
  static constexpr int kSumBytes = 4 * kDim * kRows;
  static constexpr bool kSumsInRing = kDim == 128 && kLaneRows == 2 && kPages == 2;
  static_assert(!kSumsInRing || kSumBytes <= kPages * kSlotBytes);

  // The row of a lane's a-th value: pair is lane % 4.
  __device__ __forceinline__ static int RowOf(int a, int pair) {
    return kLaneRows == 1 ? pair : 8 * (a >> 1) + 2 * pair + (a & 1);
  }
  // The column of the high and low part of a row in [kColumns] matrices.
  __device__ __forceinline__ static int HighColumn(int row) {
    return kLaneRows == 1 ? 2 * row : (row >> 3) * 16 + (row & 7);
  }
  __device__ __forceinline__ static int LowColumn(int row) {
    return kLaneRows == 1 ? 2 * row + 1 : (row >> 3) * 16 + 8 + (row & 7);
  }
  // Where the sums of a lane's a-th row and of key row_ + 8 r are in the results of the matrix
  // instructions, [matrix][element]: the high part; the low one is LowMatrix, LowElement.
  __device__ __forceinline__ static constexpr int HighMatrix(int a) {
    return kLaneRows == 1 ? 0 : a / 2 * 2;
  }
  __device__ __forceinline__ static constexpr int LowMatrix(int a) {
    return kLaneRows == 1 ? 0 : a / 2 * 2 + 1;
  }
  __device__ __forceinline__ static constexpr int HighElement(int r, int a) {
    return kLaneRows == 1 ? 2 * r : 2 * r + a % 2;
  }
  __device__ __forceinline__ static constexpr int LowElement(int r, int a) {
    return kLaneRows == 1 ? 2 * r + 1 : 2 * r + a % 2;
  }
  // The first channel of channel tile i, the order of value codes in a run.
  __device__ __forceinline__ static constexpr int ChannelOf(int i) {
    return kDim / 4 * (i & 3) + 16 * (i >> 2);
  }
  // The group of channel tile i.
  __device__ __forceinline__ static constexpr int GroupOf(int i) {
    return ChannelOf(i) / (kDim / kGroups);
  }
  // One scale a row: codes are read with nested masks (attend_warp.cuh), 3 AND for 4 codes.
  static constexpr bool kNested = kGroups == 1;
  // The channel of byte y of word half b of a lane in key step s; its slot of 2 bits is SlotOf().
  __device__ __forceinline__ static constexpr int KeyChannel(int s, int b) {
    return kDim == 64 ? 16 * (2 * s + b)
                      : kDim / 4 * (s / (kKeySteps / 4)) + 32 * (s % (kKeySteps / 4)) + 16 * b;
  }
  __device__ __forceinline__ static constexpr int KeySlot(int s, int b) {
    return kDim == 64 ? 2 * s + b : s / (kKeySteps / 4);
  }
  // The other way: step and half of slot j of a lane's i-th word of bytes.
  static constexpr int kKeyWords = kKeySteps * 2 / 4;
  __device__ __forceinline__ static constexpr int StepOf(int j, int i) {
    return kDim == 64 ? j / 2 : j * (kKeySteps / 4) + i / 2;
  }
  __device__ __forceinline__ static constexpr int HalfOf(int j, int i) {
    return kDim == 64 ? j % 2 : i % 2;
  }
  // What leaves code j of a byte, times 4^j; nested: also the codes below it.
  __device__ __forceinline__ static constexpr uint32_t CodeMask(int j) {
    return kNested ? 0x01010101u * ((4u << (2 * j)) - 1) : 0x03030303u << (2 * j);
  }
};

inline constexpr int kRingUnitsMax = 8;

// Shared memory of a thread block; the warps' rings follow it: [kWarps][units][kPages][kSlotBytes].
template <class T>
struct alignas(128) Shared {
  // Each warp's sums of p v, where they are not in its ring
  float output[T::kSumsInRing ? 1 : T::kWarps][T::kSumsInRing ? 1 : T::kDim][T::kRows];
  float maxima[T::kWarps][T::kRows];
  float sums[T::kWarps][T::kRows];
  union {
    // Rotated queries, high and low part; from a piece's begin on
    alignas(16) __nv_bfloat16 query_parts[T::kColumns][T::kHalfStride];
    // Normalized outputs, the same; at a piece's end
    alignas(16) __nv_bfloat16 output_parts[T::kColumns][T::kHalfStride];
  };
  // Fixed point: coefficient of slot j of byte i, high or low byte (attend_warp.cuh)
  alignas(16) uint8_t query_bytes[T::kColumns][T::kByteStride];
  float query_sums[T::kRows][T::kGroups];  // 64 F times the sum of the rounded query
  float query_unscale[T::kRows];           // 1 / (64 F)
  alignas(16) __nv_bfloat16 query_raw[T::kRows][T::kDim];  // This piece's, then the next one's
  alignas(8) uint64_t arrived[T::kWarps][kRingUnitsMax];
  int32_t sums_at[T::kWarps];  // Where in its ring a warp's sums are; -1: it had no unit
  int32_t last_arrival;
  BlockPlan block;

  // A warp's sums of p v, [kDim][kRows]; anything where HasSums() is false.
  __device__ __forceinline__ float* SumsOf(int warp, int units) {
    if constexpr (!T::kSumsInRing) return &output[warp][0][0];
    return reinterpret_cast<float*>(Unit(warp, units, max(sums_at[warp], 0)));
  }
  __device__ __forceinline__ bool HasSums(int warp) const {
    return !T::kSumsInRing || sums_at[warp] >= 0;
  }

  __device__ __forceinline__ uint8_t* Unit(int warp, int units, int index) {
    return reinterpret_cast<uint8_t*>(this + 1) +
           (warp * units + index) * (T::kPages * T::kSlotBytes);
  }
};

// What a thread block may have: 227 KiB from sm_90 on, 163 KiB on sm_80.
inline constexpr uint32_t kSharedBytesSm90 = 232448;
inline constexpr uint32_t kSharedBytesSm80 = 166912;

// Units of a warp's ring that fit into `shared_bytes`.
template <class T>
__host__ __device__ constexpr int RingUnitsOf(uint32_t shared_bytes) {
  const int units = static_cast<int>((shared_bytes - sizeof(Shared<T>) - T::kExtraBytes) /
                                     (T::kWarps * T::kPages * T::kSlotBytes));
  return units < kRingUnitsMax ? units : kRingUnitsMax;
}

// The same in device code, of the architecture it is compiled for.
template <class T>
__device__ constexpr int RingUnits() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return RingUnitsOf<T>(kSharedBytesSm80);
#else
  return RingUnitsOf<T>(kSharedBytesSm90);
#endif
}

// A unit in shared memory: INT2 pages; or keys and values of 16 tokens; or both of 8.
template <class T>
struct UnitSlots {
  uint8_t* slot[T::kPages];

  __device__ __forceinline__ const uint8_t* Values() const { return slot[0] + T::kValuesAt; }
};

// A piece of a pair: what a thread block works on between two merges: INT2 units, then BF16 units.
struct Piece {
  int pair;
  int request;
  int kv_head;
  int row_begin;
  int int2_begin;
  int int2_count;
  int bf16_begin;
  int bf16_count;
  int int2_index;  // Of the first INT2 unit in the piece: BF16 units are in front of them or behind
  RequestPlan plan;

  __device__ __forceinline__ int Units() const { return int2_count + bf16_count; }
  // The first token of BF16 unit `unit` of the pair.
  __device__ __forceinline__ int Bf16Token(int unit, int unit_tokens) const {
    return unit < plan.sink_units
               ? (plan.sink_first_unit + unit) * unit_tokens
               : plan.recent_first_token + (unit - plan.sink_units) * unit_tokens;
  }
  // Cut to the pair's units from `begin` to `end`, of which bf16_begin to bf16_end are BF16.
  __device__ __forceinline__ void Cut(int begin, int end, int bf16_first, int bf16_end) {
    int2_begin = begin - bf16_first;
    int2_count = end - bf16_end - int2_begin;
    bf16_begin = bf16_first;
    bf16_count = bf16_end - bf16_first;
    int2_index = 0;
  }
  __device__ __forceinline__ bool IsInt2(int index) const {
    return static_cast<uint32_t>(index - int2_index) < static_cast<uint32_t>(int2_count);
  }
  // Of the pair, for the unit `index` of the piece.
  __device__ __forceinline__ int Int2Unit(int index) const {
    return int2_begin + index - int2_index;
  }
  __device__ __forceinline__ int Bf16Unit(int index) const {
    return bf16_begin + (index < int2_index ? index : index - int2_count);
  }
};

__device__ __forceinline__ RequestPlan LoadRequestPlan(const RequestPlan* plan) {
  const int4* words = reinterpret_cast<const int4*>(plan);
  const int4 a = words[0];
  const int4 b = words[1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
__device__ __forceinline__ BlockPlan LoadBlockPlan(const BlockPlan* plan) {
  const int4* words = reinterpret_cast<const int4*>(plan);
  const int4 a = words[0];
  const int4 b = words[1];
  const int4 c = words[2];
  return {a.x,
          a.y,
          a.z,
          a.w,
          b.x,
          b.y,
          b.z,
          b.w,
          c.x,
          c.y,
          c.z,
          c.w,
          LoadRequestPlan(&plan->first_plan)};
}

__device__ __forceinline__ Piece FirstPiece(const BlockPlan& block) {
  Piece piece = {.pair = block.first_pair,
                 .request = block.first_request,
                 .kv_head = block.first_kv_head,
                 .row_begin = block.first_row,
                 .plan = block.first_plan};
  const bool only = block.first_pair == block.last_pair;
  piece.Cut(block.first_unit, only ? block.last_unit_end : piece.plan.units, block.first_bf16,
            only ? block.last_bf16_end : piece.plan.sink_units + piece.plan.recent_units);
  return piece;
}

// REQUIRES: piece->pair < block.last_pair
__device__ __forceinline__ void NextPiece(const AttendKernelParams& params, const BlockPlan& block,
                                          Piece* piece) {
  ++piece->pair;
  piece->row_begin += params.geometry.group_rows;
  if (piece->row_begin >= static_cast<int>(params.geometry.rows)) {
    piece->row_begin = 0;
    if (++piece->kv_head == static_cast<int>(params.decode.shape.kv_heads)) {
      piece->kv_head = 0;
      ++piece->request;
      piece->plan = LoadRequestPlan(params.workspace.requests + piece->request);
    }
  }
  const bool last = piece->pair == block.last_pair;
  piece->Cut(0, last ? block.last_unit_end : piece->plan.units, 0,
             last ? block.last_bf16_end : piece->plan.sink_units + piece->plan.recent_units);
  piece->int2_index = piece->bf16_count;
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_TILE_CUH_
