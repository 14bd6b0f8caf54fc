#ifndef OKV_KERNELS_CUDA_ROW_ROTATE_CUH_
#define OKV_KERNELS_CUDA_ROW_ROTATE_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row_tile.cuh"

// The product of a tile with a rotation R or with R^T: fp32 sums in the order of channels by 16,
// rounded to bf16 once.
//
// On Hopper by wgmma, rows from registers and R from shared memory: the tensor cores then take 512
// clocks for 64 rows at d 128, which other warps fill with their arithmetic. (By mma.sync it was
// 3,500, most of it added to the arithmetic, and a load of R from shared memory for every two
// products. With the rows from shared memory too, fewer registers let 20 warps be resident instead
// of 16, but fences and barriers around them cost as much as that gained.) Elsewhere by mma.sync.
namespace okv::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OKV_ROW_WGMMA 1
#endif

// R in shared memory, in units of 16 bytes: what wgmma calls the swizzle of 128 bytes. 64 columns
// together, a row of them 128 bytes, its units exchanged by row. REQUIRES: 1,024-byte aligned.
template <int kDim>
inline constexpr uint32_t kRotationBytes = kDim* kDim * 2;
template <int kDim>
__device__ __forceinline__ constexpr uint32_t RotationOffset(int row, int unit) {
  return static_cast<uint32_t>((unit >> 3) * (kDim * 128) + row * 128 +
                               ((unit & 7) ^ (row & 7)) * 16);
}

// Queues the copy of a rotation by all threads of the block; each waits with CopyAsyncWait, then
// all with ShareRotation. REQUIRES: blockDim.x is a multiple of 128.
template <int kDim>
__device__ __forceinline__ void LoadRotation(const __nv_bfloat16* rotation, uint32_t shared) {
  constexpr int kUnits = kDim / 8;
  const int unit = threadIdx.x % kUnits;
  const int first = threadIdx.x / kUnits;
  const int step = blockDim.x / kUnits;
  const __nv_bfloat16* const from = rotation + unit * 8;
  if (step % 8 == 0) {  // Units of a thread's rows are exchanged alike.
    const uint32_t to = shared + RotationOffset<kDim>(first, unit);
#pragma unroll 4
    for (int row = 0; row < kDim - first; row += step) {
      CopyAsync16(to + row * 128, from + (first + row) * kDim);
    }
  } else {
    for (int row = first; row < kDim; row += step) {
      CopyAsync16(shared + RotationOffset<kDim>(row, unit), from + row * kDim);
    }
  }
}
__device__ __forceinline__ void ShareRotation() {
#ifdef OKV_ROW_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what cp.async wrote
#endif
  __syncthreads();
}

#ifdef OKV_ROW_WGMMA
#define OKV_F4(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])

// d = a b, or d += a b: a [64 x 16] bf16, each warp of four its 16 rows; b [16 x 8 n] of a
// descriptor, with its columns contiguous (kColumnsInRows) or its rows.
template <bool kColumnsInRows>
__device__ __forceinline__ void RowWgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                         int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
      "{%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"
      : OKV_F4(d[0]), OKV_F4(d[1]), OKV_F4(d[2]), OKV_F4(d[3]), OKV_F4(d[4]), OKV_F4(d[5]),
        OKV_F4(d[6]), OKV_F4(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kColumnsInRows ? 1 : 0));
}
template <bool kColumnsInRows>
__device__ __forceinline__ void RowWgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                         int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "{%64,%65,%66,%67}, %68, add, 1, 1, %70;\n}"
      : OKV_F4(d[0]), OKV_F4(d[1]), OKV_F4(d[2]), OKV_F4(d[3]), OKV_F4(d[4]), OKV_F4(d[5]),
        OKV_F4(d[6]), OKV_F4(d[7]), OKV_F4(d[8]), OKV_F4(d[9]), OKV_F4(d[10]), OKV_F4(d[11]),
        OKV_F4(d[12]), OKV_F4(d[13]), OKV_F4(d[14]), OKV_F4(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kColumnsInRows ? 1 : 0));
}
#undef OKV_F4

// R's rows [16 step, 16 step + 16), or R^T's, by columns from `column` on. Addresses are in units
// of 16 bytes and fit their field, so that a step is one addition.
template <int kDim, bool kTranspose>
__device__ __forceinline__ uint64_t RotationDescriptor(uint32_t rotation, int step, int column) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kBetween8Rows = uint64_t{1024 >> 4} << 32;
  // Of R the product takes 64 columns after 64; of R^T all of them are rows, one after another.
  constexpr uint64_t kBetween64Columns = uint64_t{kTranspose ? 1 : kDim * 128 >> 4} << 16;
  const int offset = kTranspose ? column * 128 + step / 4 * (kDim * 128) + step % 4 * 32
                                : column / 64 * (kDim * 128) + step * 2048;
  return (kSwizzle128 | kBetween8Rows | kBetween64Columns) + (rotation >> 4) + (offset >> 4);
}
#endif

// Columns of 8 that are multiplied together, each four registers of sums; steps of 16 channels
// whose rows are in registers together, each four.
template <int kDim>
inline constexpr int kRotateTiles = kDim == 64 ? 8 : 16;
template <int kDim>
inline constexpr int kRotateSteps = kDim == 128 ? 8 : 4;

// acc (+)= steps [first, first + kRotateSteps) of columns from `column` on, of a part's 16 rows of
// each of the group's four warps. a[i] is step first + i's rows.
template <int kDim, bool kTranspose, int kTiles>
__device__ __forceinline__ void MultiplySteps(uint32_t (&a)[kRotateSteps<kDim>][4], int first,
                                              uint32_t rotation, int column, int lane,
                                              float (&acc)[kTiles][4]) {
#ifdef OKV_ROW_WGMMA
  // The operands are made before the fence, not where the compiler would like them.
#pragma unroll
  for (int i = 0; i < kRotateSteps<kDim>; ++i) {
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
  }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kRotateSteps<kDim>; ++i) {
    RowWgmma<!kTranspose>(
        acc, a[i], RotationDescriptor<kDim, kTranspose>(rotation, first + i, column), first + i);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#else
#pragma unroll
  for (int i = 0; i < kRotateSteps<kDim>; ++i) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const int unit = column / 8 + n;
      uint32_t b[4];
      if (kTranspose) {
        // Rows of R are columns of R^T: a row of the stored matrix is a column of b already.
        LoadMatrix4(b, rotation + RotationOffset<kDim>(unit * 8 + (lane & 7) + ((lane >> 4) << 3),
                                                       2 * (first + i) + (lane >> 3 & 1)));
      } else {
        LoadMatrix4Transposed(
            b, rotation + RotationOffset<kDim>((first + i) * 16 + (lane & 15), unit + (lane >> 4)));
      }
      MmaBf16(acc[n], a[i], b[0], b[1]);
      MmaBf16(acc[n + 1], a[i], b[2], b[3]);
    }
  }
#endif
}

// bf16(x R), or bf16(x R^T), some columns after others; rows(part, step, a) gives 16 channels of
// the warp's 16 rows of a part, take(part, first, y) gets 8-column tiles from tile `first` on, of
// rows lane / 4 and 8 more. REQUIRES: all four warps of a group of 128 threads call it.
template <int kDim, bool kTranspose, int kTiles, typename Rows, typename Take>
__device__ __forceinline__ void Rotate(Rows rows, uint32_t rotation, int lane, Take take) {
  constexpr int kSteps = kRotateSteps<kDim>;
#pragma unroll
  for (int part = 0; part < kTileParts<kDim>; ++part) {
#pragma unroll
    for (int column = 0; column < kDim; column += 8 * kTiles) {
      float acc[kTiles][4] = {};
#pragma unroll
      for (int first = 0; first < kDim / 16; first += kSteps) {
        uint32_t a[kSteps][4];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) rows(part, first + i, a[i]);
        MultiplySteps<kDim, kTranspose, kTiles>(a, first, rotation, column, lane, acc);
      }
      uint32_t y[2][kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        y[0][j] = PackBf16(acc[j][0], acc[j][1]);
        y[1][j] = PackBf16(acc[j][2], acc[j][3]);
      }
      take(part, column / 8, y);
    }
  }
}
template <int kDim, bool kTranspose>
__device__ __forceinline__ void RotateTile(const SharedRows& tile, uint32_t rotation, int lane,
                                           RowFragment<kDim>* y) {
  const auto rows = [&](int part, int step, uint32_t(&a)[4]) {
    LoadMatrix4(a, tile.address + MatrixOffset<kDim>(part, step, lane));
  };
  const auto take = [&](int part, int first, const uint32_t(&columns)[2][kRotateTiles<kDim>]) {
#pragma unroll
    for (int j = 0; j < kRotateTiles<kDim>; ++j) {
      y->word[2 * part][first + j] = columns[0][j];
      y->word[2 * part + 1][first + j] = columns[1][j];
    }
  };
  Rotate<kDim, kTranspose, kRotateTiles<kDim>>(rows, rotation, lane, take);
}
// To a tile, kTiles 8-column tiles after others: the whole result is never in registers.
template <int kDim, bool kTranspose, int kTiles>
__device__ __forceinline__ void RotateFragment(const RowFragment<kDim>& x, uint32_t rotation,
                                               int lane, const SharedRows& tile) {
  const auto rows = [&](int part, int step, uint32_t(&a)[4]) {
    a[0] = x.word[2 * part][2 * step];
    a[1] = x.word[2 * part + 1][2 * step];
    a[2] = x.word[2 * part][2 * step + 1];
    a[3] = x.word[2 * part + 1][2 * step + 1];
  };
  const auto take = [&](int part, int first, const uint32_t(&columns)[2][kTiles]) {
    WriteColumns<kDim>(columns, part, first, lane, tile);
  };
  Rotate<kDim, kTranspose, kTiles>(rows, rotation, lane, take);
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROW_ROTATE_CUH_
