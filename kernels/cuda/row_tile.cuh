#ifndef OKV_KERNELS_CUDA_ROW_TILE_CUH_
#define OKV_KERNELS_CUDA_ROW_TILE_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"

// A warp's tile of 32 rows, in shared memory and in registers, and its product with a rotation.
// What quantize, rotate and dequantize share.
namespace okv::cuda {

inline constexpr int kTileTokens = 32;
inline constexpr int kTilesPerBlock = 2;  // A block is 64 tokens.
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// 32 rows of kDim bf16, or the kDim rows of a rotation, in units of 16 bytes. A row is one unit
// longer than its elements: the same unit of 8 rows in sequence then lies in 8 different groups of
// banks, and offsets are linear, so that unrolled loops have them as constants. (With units
// exchanged by row instead, a tile's load took 325 instructions.)
struct SharedRows {
  uint8_t* bytes;
  uint32_t address;  // The same, in the shared window

  template <int kDim>
  __device__ __forceinline__ static constexpr uint32_t Offset(int row, int unit) {
    return static_cast<uint32_t>(row * (kDim * 2 + 16) + unit * 16);
  }
};
template <int kDim>
inline constexpr uint32_t kTileBytes = kTileTokens*(kDim * 2 + 16);
template <int kDim>
inline constexpr uint32_t kRotationBytes = kDim*(kDim * 2 + 16);

__device__ __forceinline__ SharedRows SharedRowsAt(uint8_t* bytes) {
  return {.bytes = bytes, .address = SharedAddress(bytes)};
}

// The tile in registers, as mma has it: lane 4 row + pair holds tokens row + 8 p (p = 0..3), and of
// each the channels 8 u + 2 pair (low half) and 8 u + 2 pair + 1.
template <int kDim>
struct RowFragment {
  uint32_t word[4][kDim / 8];
};

// Where the row of one token of (layer, head) is; null when it is left out.
template <typename Element>
__device__ __forceinline__ Element* RowAddress(const PagedRowsOf<Element>& rows,
                                               const TokenMap& map, int64_t token, int layer,
                                               int head) {
  const int page_bits = __ffs(static_cast<int>(rows.page_tokens)) - 1;
  const int64_t in_page_mask = static_cast<int64_t>(rows.page_tokens) - 1;
  int64_t page = token >> page_bits;
  int64_t in_page = token & in_page_mask;
  if (map.pages != nullptr) {
    page = map.pages[page];
    if (page < 0) return nullptr;
  } else if (map.slots != nullptr) {
    const int64_t slot = map.slots[token];
    if (slot < 0) return nullptr;
    page = slot >> page_bits;
    in_page = slot & in_page_mask;
  }
  return rows.base + layer * rows.layer_stride + page * rows.page_stride +
         in_page * rows.token_stride + head * rows.head_stride;
}

// The slot of a block of the launch; negative: it is left out.
template <typename Byte>
__device__ __forceinline__ int64_t BlockSlot(const PagesOf<Byte>& pages, uint32_t block) {
  return pages.table == nullptr ? static_cast<int64_t>(block) : int64_t{pages.table[block]};
}

// Another lane's pointer.
template <typename T>
__device__ __forceinline__ T* ShufflePointer(T* pointer, int lane) {
  const unsigned long long bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(kAllLanes, bits, lane));
}

// Queues the copy of a tile; `row` is the calling lane's own row of it, null: not copied. The warp
// waits with CopyAsyncWait and __syncwarp.
template <int kDim>
__device__ __forceinline__ void LoadTile(const __nv_bfloat16* row, const SharedRows& tile,
                                         int lane) {
  constexpr int kUnits = kDim / 8;  // 32 lanes copy 32 / kUnits rows at a time
  constexpr int kRows = 32 / kUnits;
  const int first_row = lane / kUnits;
  const int unit = lane % kUnits;
  const uint32_t destination = tile.address + SharedRows::Offset<kDim>(first_row, unit);
#pragma unroll
  for (int r = 0; r < kTileTokens; r += kRows) {
    const __nv_bfloat16* const source = ShufflePointer(row, r + first_row);
    if (source != nullptr) {
      CopyAsync16(destination + SharedRows::Offset<kDim>(r, 0), source + unit * 8);
    }
  }
}

// Writes a tile to memory; `row` as in LoadTile. The tile must be visible to the warp.
template <int kDim>
__device__ __forceinline__ void StoreTile(const SharedRows& tile, __nv_bfloat16* row, int lane) {
  constexpr int kUnits = kDim / 8;
  constexpr int kRows = 32 / kUnits;
  const int first_row = lane / kUnits;
  const int unit = lane % kUnits;
  const uint8_t* const source = tile.bytes + SharedRows::Offset<kDim>(first_row, unit);
#pragma unroll 8
  for (int r = 0; r < kTileTokens; r += kRows) {
    __nv_bfloat16* const destination = ShufflePointer(row, r + first_row);
    const uint4 value = *reinterpret_cast<const uint4*>(source + SharedRows::Offset<kDim>(r, 0));
    if (destination != nullptr) *reinterpret_cast<uint4*>(destination + unit * 8) = value;
  }
}

// Queues the copy of a rotation by all threads of the block; each waits with CopyAsyncWait, then
// all with __syncthreads.
template <int kDim>
__device__ __forceinline__ void LoadRotation(const __nv_bfloat16* rotation,
                                             const SharedRows& shared) {
  constexpr int kUnits = kDim / 8;
  for (int index = threadIdx.x; index < kDim * kUnits; index += blockDim.x) {
    CopyAsync16(shared.address + SharedRows::Offset<kDim>(index / kUnits, index % kUnits),
                rotation + index * 8);
  }
}

template <int kDim>
__device__ __forceinline__ void ReadFragment(const SharedRows& tile, int lane,
                                             RowFragment<kDim>* fragment) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#pragma unroll
    for (int u = 0; u < kDim / 8; ++u) {
      fragment->word[p][u] = *reinterpret_cast<const uint32_t*>(
          tile.bytes + SharedRows::Offset<kDim>((lane >> 2) + 8 * p, u) + (lane & 3) * 4);
    }
  }
}
template <int kDim>
__device__ __forceinline__ void WriteFragment(const RowFragment<kDim>& fragment, int lane,
                                              const SharedRows& tile) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#pragma unroll
    for (int u = 0; u < kDim / 8; ++u) {
      *reinterpret_cast<uint32_t*>(tile.bytes + SharedRows::Offset<kDim>((lane >> 2) + 8 * p, u) +
                                   (lane & 3) * 4) = fragment.word[p][u];
    }
  }
}

// acc += tile[:, k_unit * 8 ...16 channels] times 64 columns of R (or of R^T) from `column` on.
template <int kDim, bool kTranspose>
__device__ __forceinline__ void MultiplyStep(const SharedRows& tile, const SharedRows& rotation,
                                             int k_unit, int column, int lane,
                                             float (&acc)[2][8][4]) {
  uint32_t a[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    LoadMatrix4(
        a[m], tile.address + SharedRows::Offset<kDim>(16 * m + (lane & 15), k_unit + (lane >> 4)));
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column_unit = column / 8 + 2 * n;
    uint32_t b[4];
    if (kTranspose) {
      // Rows of R are columns of R^T: a row of the stored matrix is a column of b already.
      LoadMatrix4(b, rotation.address +
                         SharedRows::Offset<kDim>(column_unit * 8 + (lane & 7) + ((lane >> 4) << 3),
                                                  k_unit + (lane >> 3 & 1)));
    } else {
      LoadMatrix4Transposed(
          b, rotation.address +
                 SharedRows::Offset<kDim>(k_unit * 8 + (lane & 15), column_unit + (lane >> 4)));
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      MmaBf16(acc[m][2 * n], a[m], b[0], b[1]);
      MmaBf16(acc[m][2 * n + 1], a[m], b[2], b[3]);
    }
  }
}

// The tile times R (or R^T): fp32 sums in the order of channels by 16, rounded to bf16 once. 64
// columns at a time, so that 64 registers of sums stand beside the words that are done.
template <int kDim, bool kTranspose>
__device__ __forceinline__ void RotateTile(const SharedRows& tile, const SharedRows& rotation,
                                           int lane, RowFragment<kDim>* y) {
#pragma unroll
  for (int column = 0; column < kDim; column += 64) {
    float acc[2][8][4] = {};
#pragma unroll 2
    for (int k_unit = 0; k_unit < kDim / 8; k_unit += 2) {
      MultiplyStep<kDim, kTranspose>(tile, rotation, k_unit, column, lane, acc);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        y->word[2 * m][column / 8 + j] = PackBf16(acc[m][j][0], acc[m][j][1]);
        y->word[2 * m + 1][column / 8 + j] = PackBf16(acc[m][j][2], acc[m][j][3]);
      }
    }
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROW_TILE_CUH_
