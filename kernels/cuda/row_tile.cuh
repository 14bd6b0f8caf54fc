#ifndef OKV_KERNELS_CUDA_ROW_TILE_CUH_
#define OKV_KERNELS_CUDA_ROW_TILE_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.h"

// A warp's tile of rows, in shared memory and in registers. What quantize, rotate and dequantize
// share.
namespace okv::cuda {

// A tile is of 16 tokens, 32 at d 64, so that it takes 4 KiB or more and its codes at d 64 fill
// 16-byte pieces of a run; a part is 16 of them.
template <int kDim>
inline constexpr int kTileParts = kDim == 64 ? 2 : 1;
template <int kDim>
inline constexpr int kTileTokens = 16 * kTileParts<kDim>;
template <int kDim>
inline constexpr int kTilesPerBlock = 64 / kTileTokens<kDim>;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Rows of kDim bf16 in units of 16 bytes. A row is one unit longer than its elements: the same unit
// of 8 rows in sequence then lies in 8 different groups of banks, and offsets are linear, so that
// unrolled loops have them as constants. (With units exchanged by row instead, a tile's load took
// 325 instructions.)
struct SharedRows {
  uint8_t* bytes;
  uint32_t address;  // The same, in the shared window

  template <int kDim>
  __device__ __forceinline__ static constexpr uint32_t Offset(int row, int unit) {
    return static_cast<uint32_t>(row * (kDim * 2 + 16) + unit * 16);
  }
};
template <int kDim>
inline constexpr uint32_t kTileBytes = SharedRows::Offset<kDim>(kTileTokens<kDim>, 0);

__device__ __forceinline__ SharedRows SharedRowsAt(uint8_t* bytes) {
  return {.bytes = bytes, .address = SharedAddress(bytes)};
}

// The tile in registers, as mma has it: lane 4 row + pair holds tokens row + 8 p, and of each the
// channels 8 u + 2 pair (low half) and 8 u + 2 pair + 1.
template <int kDim>
struct RowFragment {
  static constexpr int kRows = 2 * kTileParts<kDim>;  // Of a lane
  uint32_t word[kRows][kDim / 8];
};

// log2 of a power of two.
__device__ __forceinline__ int BitsBelow(uint32_t power) {
  return __ffs(static_cast<int>(power)) - 1;
}

// Finds the rows of one (layer, KV head).
template <typename Element>
class RowFinder {
 public:
  __device__ __forceinline__ RowFinder(const PagedRowsOf<Element>& rows, const TokenMap& map,
                                       int layer, int head)
      : base_(rows.base + layer * rows.layer_stride + head * rows.head_stride),
        page_stride_(rows.page_stride),
        token_stride_(rows.token_stride),
        page_bits_(BitsBelow(rows.page_tokens)),
        in_page_mask_(rows.page_tokens - 1),
        map_(map) {}

  __device__ __forceinline__ bool IsLeftOut(uint32_t token) const {
    if (map_.pages != nullptr) return map_.pages[token >> page_bits_] < 0;
    return map_.slots != nullptr && map_.slots[token] < 0;
  }
  // Of a token that is left out, some row.
  __device__ __forceinline__ Element* Row(uint32_t token) const {
    uint32_t page = token >> page_bits_;
    uint32_t in_page = token & in_page_mask_;
    if (map_.pages != nullptr) {
      page = max(map_.pages[page], 0);
    } else if (map_.slots != nullptr) {
      const uint32_t slot = max(map_.slots[token], 0);
      page = slot >> page_bits_;
      in_page = slot & in_page_mask_;
    }
    return base_ + page * page_stride_ + in_page * token_stride_;
  }
  // True when all tokens' rows lie at one distance, Stride(1), from each other.
  __device__ __forceinline__ bool IsLinear() const {
    return map_.slots == nullptr && map_.pages == nullptr && in_page_mask_ == 0;
  }
  // REQUIRES: IsLinear().
  __device__ __forceinline__ Element* LinearRow(uint32_t token) const {
    return base_ + token * page_stride_;
  }
  // From one row to the next in `tokens` tokens that begin at a multiple of it; 0 when they may lie
  // anywhere.
  __device__ __forceinline__ int64_t Stride(uint32_t tokens) const {
    if (map_.slots != nullptr) return 0;
    if (IsLinear()) return page_stride_;
    return in_page_mask_ >= tokens - 1 ? token_stride_ : 0;
  }

 private:
  Element* base_;
  int64_t page_stride_;
  int64_t token_stride_;
  int page_bits_;
  uint32_t in_page_mask_;
  TokenMap map_;
};

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

// The rows of a tile, for a lane: 32 lanes take kTileStep rows at a time, 16 bytes each.
template <int kDim>
inline constexpr int kTileStep = 256 / kDim;
template <typename Element>
struct TileRows {
  // With a stride the first of the lane's part (lane / 16 % kTileParts), otherwise that of token
  // lane % kTileTokens.
  Element* row;
  int64_t stride;  // Inside a part; 0: none
  uint32_t there;  // Bit r: row r is there. With a stride all of them, or none, as found
};

// The rows of tokens [first, first + kTileTokens), those from `tokens` on are not there.
template <int kDim, typename Element>
__device__ __forceinline__ TileRows<Element> FindTileRows(const RowFinder<Element>& finder,
                                                          uint32_t first, uint32_t tokens,
                                                          int lane) {
  const int64_t stride = finder.Stride(16);
  if (stride != 0 && first + kTileTokens<kDim> <= tokens) {
    const uint32_t part = first + 16 * (lane / 16 % kTileParts<kDim>);
    const bool left_out = finder.IsLeftOut(part);
    const bool any = kTileParts<kDim> == 1 ? left_out : __any_sync(kAllLanes, left_out);
    const bool all = kTileParts<kDim> == 1 ? left_out : __all_sync(kAllLanes, left_out);
    if (any == all) return {finder.Row(part), stride, all ? 0 : 0xffffffffu};
  }
  const uint32_t token = first + lane % kTileTokens<kDim>;
  const bool is_there = token < tokens && !finder.IsLeftOut(token);
  const uint32_t there = __ballot_sync(kAllLanes, is_there);
  if (there == 0) return {nullptr, 0, 0};
  Element* const row = is_there ? finder.Row(token) : nullptr;
  Element* const other = ShufflePointer(row, __ffs(static_cast<int>(there)) - 1);
  return {is_there ? row : other, 0, there};
}

// Calls at(r, the lane's 16 bytes of row r + lane / (32 / kTileStep)) for r = 0, kTileStep, ... In
// the place of a row that is not there it gives another one of the tile. kHasStride: known to have
// one, the same through the tile.
template <int kDim, bool kHasStride, typename Element, typename At>
__device__ __forceinline__ void ForEachTileRow(const TileRows<Element>& rows, int lane, At at) {
  constexpr int kUnits = kDim / 8;
  const int first_row = lane / kUnits;
  const int channel = lane % kUnits * 8;
  if (!kHasStride && rows.there == 0) return;
  if (kHasStride || rows.stride != 0) {
    const int64_t from_part = first_row * rows.stride + channel;
    const int64_t step = kTileStep<kDim> * rows.stride;
    Element* row = rows.row + from_part;
#pragma unroll
    for (int r = 0; r < kTileTokens<kDim>; r += kTileStep<kDim>) {
      if (!kHasStride && kTileParts<kDim> == 2 && r % 16 == 0) {
        row = ShufflePointer(rows.row, r) + from_part;
      }
      at(r, row);
      row += step;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kTileTokens<kDim>; r += kTileStep<kDim>) {
      at(r, ShufflePointer(rows.row, r + first_row) + channel);
    }
  }
}

// Asks for the tile of tokens [first, tokens) in the L2, when its rows are linear. They are not
// read: the kernel in front may still be writing them. REQUIRES: they are memory of the caller's.
template <int kDim>
__device__ __forceinline__ void PrefetchTile(const RowFinder<const __nv_bfloat16>& finder,
                                             uint32_t first, uint32_t tokens, int lane) {
  constexpr int kLineChannels = 64;  // 128 bytes
  constexpr int kRowLines = kDim / kLineChannels;
  if (!finder.IsLinear()) return;
#pragma unroll
  for (int line = lane; line < kTileTokens<kDim> * kRowLines; line += 32) {
    const uint32_t token = first + line / kRowLines;
    if (token >= tokens) continue;
    const __nv_bfloat16* const from = finder.LinearRow(token) + line % kRowLines * kLineChannels;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

// Queues the copy of a tile. The warp waits with CopyAsyncWait and __syncwarp.
template <int kDim, bool kHasStride>
__device__ __forceinline__ void LoadTile(const TileRows<const __nv_bfloat16>& rows,
                                         const SharedRows& tile, int lane) {
  constexpr int kUnits = kDim / 8;
  const uint32_t destination =
      tile.address + SharedRows::Offset<kDim>(lane / kUnits, lane % kUnits);
  ForEachTileRow<kDim, kHasStride>(rows, lane, [&](int r, const __nv_bfloat16* from) {
    CopyAsync16(destination + SharedRows::Offset<kDim>(r, 0), from);
  });
}

// Writes the rows of a tile that are there. The tile must be visible to the warp. kStreaming:
// nobody reads them soon (1 % of dequantize's time).
template <int kDim, bool kStreaming>
__device__ __forceinline__ void StoreTile(const SharedRows& tile,
                                          const TileRows<__nv_bfloat16>& rows, int lane) {
  constexpr int kUnits = kDim / 8;
  constexpr uint32_t kAllRows = 0xffffffffu >> (32 - kTileTokens<kDim>);
  const uint8_t* const source = tile.bytes + SharedRows::Offset<kDim>(lane / kUnits, lane % kUnits);
  const auto store = [&](int r, __nv_bfloat16* to) {
    const uint4 value = *reinterpret_cast<const uint4*>(source + SharedRows::Offset<kDim>(r, 0));
    if (kStreaming) {
      __stcs(reinterpret_cast<uint4*>(to), value);
    } else {
      *reinterpret_cast<uint4*>(to) = value;
    }
  };
  if ((rows.there & kAllRows) == kAllRows) {
    ForEachTileRow<kDim, false>(rows, lane, store);
    return;
  }
  if (rows.there == 0) return;
#pragma unroll 1
  for (int r = 0; r < kTileTokens<kDim>; r += kTileStep<kDim>) {
    const int row = r + lane / kUnits;
    __nv_bfloat16* const of_row = ShufflePointer(rows.row, rows.stride != 0 ? row & ~15 : row);
    __nv_bfloat16* const to = of_row + row % 16 * rows.stride;
    if ((rows.there >> row & 1) != 0) store(r, to + lane % kUnits * 8);
  }
}

template <int kDim>
__device__ __forceinline__ uint32_t MatrixOffset(int part, int step, int lane) {
  return SharedRows::Offset<kDim>(16 * part + (lane & 15), 2 * step + (lane >> 4));
}
template <int kDim>
__device__ __forceinline__ void ReadFragment(const SharedRows& tile, int lane,
                                             RowFragment<kDim>* fragment) {
#pragma unroll
  for (int m = 0; m < kTileParts<kDim>; ++m) {
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s) {
      uint32_t matrix[4];
      LoadMatrix4(matrix, tile.address + MatrixOffset<kDim>(m, s, lane));
      fragment->word[2 * m][2 * s] = matrix[0];
      fragment->word[2 * m + 1][2 * s] = matrix[1];
      fragment->word[2 * m][2 * s + 1] = matrix[2];
      fragment->word[2 * m + 1][2 * s + 1] = matrix[3];
    }
  }
}
// Writes four 8 x 8 matrices of 16-bit elements, a lane's words of which are its registers; the
// address is of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void StoreMatrix4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                             uint32_t d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
#else
  const uint32_t words[4] = {a, b, c, d};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(kAllLanes, address, 8 * i + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(words[i]) : "memory");
  }
#endif
}
// 8-column tiles from tile `first` on, an even one, of rows lane / 4 and 8 more of a part.
template <int kDim, int kTiles>
__device__ __forceinline__ void WriteColumns(const uint32_t (&columns)[2][kTiles], int part,
                                             int first, int lane, const SharedRows& tile) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) {
    StoreMatrix4(tile.address + MatrixOffset<kDim>(part, (first + j) / 2, lane), columns[0][j],
                 columns[1][j], columns[0][j + 1], columns[1][j + 1]);
  }
}
template <int kDim>
__device__ __forceinline__ void WriteFragment(const RowFragment<kDim>& fragment, int lane,
                                              const SharedRows& tile) {
#pragma unroll
  for (int m = 0; m < kTileParts<kDim>; ++m) {
    const auto& rows = reinterpret_cast<const uint32_t(&)[2][kDim / 8]>(fragment.word[2 * m]);
    WriteColumns<kDim>(rows, m, 0, lane, tile);
  }
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROW_TILE_CUH_
