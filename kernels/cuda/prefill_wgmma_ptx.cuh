#ifndef OKV_KERNELS_CUDA_PREFILL_WGMMA_PTX_CUH_
#define OKV_KERNELS_CUDA_PREFILL_WGMMA_PTX_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

// Instructions of sm_90a that prefill attention needs: matrix products of a warpgroup, tensor
// copies, register counts. What calls them compiles for sm_90a only.
namespace okv::cuda {

// ---- Tiles in shared memory: rows of 128 bytes, 64 channels, whose 16-byte units are exchanged
// within every 8 rows (unit u of row r is at u ^ r % 8), 1,024-byte aligned. Tensor copies write
// them so, and products read them.
inline constexpr uint32_t kSwizzledRowBytes = 128;
inline constexpr uint32_t kSwizzledPageBytes = 64 * kSwizzledRowBytes;

__device__ __forceinline__ uint32_t SwizzledOffset(int row, int unit) {
  return static_cast<uint32_t>(row * 128 + ((unit ^ (row & 7)) << 4));
}
// An operand at `address`; 64 channels further it continues kStride bytes later. With channels as
// the summed dimension the stride is not used: the address moves on by 32 bytes a step. The lower
// word alone depends on the address, so that moving on is one addition.
struct SwizzledOperand {
  uint32_t low;

  __device__ __forceinline__ static SwizzledOperand At(uint32_t address) {
    return {(address & 0x3ffff) >> 4};
  }
  template <uint32_t kStride>
  __device__ __forceinline__ uint64_t Descriptor(uint32_t offset) const {
    constexpr uint32_t kEightRows = 1024 >> 4;
    constexpr uint32_t kSwizzle128 = 1u << 30;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"(low + (offset >> 4) + (kStride >> 4 << 16)), "n"(kEightRows | kSwizzle128));
    return descriptor;
  }
};

// ---- Order. Registers of a product are the product's from Begin to Wait.
__device__ __forceinline__ void WgmmaBegin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of sums over the wait before it, or writes over the product
// behind it.
template <int kTiles>
__device__ __forceinline__ void PinSums(float (&d)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
  }
}

// The same number, of which the compiler knows nothing: what is made from it is made again where it
// is needed, instead of being kept in registers, which then are not enough.
__device__ __forceinline__ uint32_t Again(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// A number that is the same in all lanes, and now known to be: descriptors made from it are made in
// uniform registers. It, too, is made again.
__device__ __forceinline__ uint32_t Uniform(uint32_t number) {
  return __shfl_sync(0xffffffffu, number, 0);
}

template <int kCount>
__device__ __forceinline__ void MoreRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void FewerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Named barriers: `threads` of them wait or arrive.
__device__ __forceinline__ void NamedWait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Tensor copies to shared memory; `barrier` counts their bytes.
__device__ __forceinline__ void TensorCopy2(uint32_t destination, const CUtensorMap* map, int x,
                                            int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void TensorCopy3(uint32_t destination, const CUtensorMap* map, int x,
                                            int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void TensorCopy4(uint32_t destination, const CUtensorMap* map, int x,
                                            int y, int z, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Products: 64 rows by kColumns, 16 summed; d = a b, plus d where `add` is not 0. Lane l of
// warp w of the warpgroup holds rows 16 w + l / 4 and 8 more of d and of a in registers, in the
// order of mma.sync.
// The first 32 operands, as a vector.
#define OKV_REGISTERS32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31}, "
// The first 64 operands, as a vector.
#define OKV_REGISTERS64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63}, "
// The first 128 operands, as a vector.
#define OKV_REGISTERS128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, " \
  "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127}, "
#define OKV_OUT1(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define OKV_OUT8(d, j) \
  OKV_OUT1(d, j), OKV_OUT1(d, j + 1), OKV_OUT1(d, j + 2), OKV_OUT1(d, j + 3), OKV_OUT1(d, j + 4), \
      OKV_OUT1(d, j + 5), OKV_OUT1(d, j + 6), OKV_OUT1(d, j + 7)

// Shared: a and b in shared memory, rows of both the channels that are summed. RegistersByColumns:
// the same with a in registers. RegistersByRows: b's rows are what is summed.
template <int kColumns>
struct Wgmma;
template <>
struct Wgmma<64> {
  static __device__ __forceinline__ void Shared(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " OKV_REGISTERS32
        "%32, %33, p, 1, 1, 0, 0;\n}"
        : OKV_OUT8(d, 0)
        : "l"(a), "l"(b), "r"(add));
  }
  static __device__ __forceinline__ void RegistersByColumns(float (&d)[8][4],
                                                            const uint32_t (&a)[4], uint64_t b,
                                                            int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " OKV_REGISTERS32
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : OKV_OUT8(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
  static __device__ __forceinline__ void RegistersByRows(float (&d)[8][4], const uint32_t (&a)[4],
                                                         uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " OKV_REGISTERS32
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : OKV_OUT8(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};
template <>
struct Wgmma<128> {
  static __device__ __forceinline__ void Shared(float (&d)[16][4], uint64_t a, uint64_t b,
                                                int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " OKV_REGISTERS64
        "%64, %65, p, 1, 1, 0, 0;\n}"
        : OKV_OUT8(d, 0), OKV_OUT8(d, 8)
        : "l"(a), "l"(b), "r"(add));
  }
  static __device__ __forceinline__ void RegistersByColumns(float (&d)[16][4],
                                                            const uint32_t (&a)[4], uint64_t b,
                                                            int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " OKV_REGISTERS64
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : OKV_OUT8(d, 0), OKV_OUT8(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
  static __device__ __forceinline__ void RegistersByRows(float (&d)[16][4], const uint32_t (&a)[4],
                                                         uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " OKV_REGISTERS64
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : OKV_OUT8(d, 0), OKV_OUT8(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};
template <>
struct Wgmma<256> {
  static __device__ __forceinline__ void RegistersByRows(float (&d)[32][4], const uint32_t (&a)[4],
                                                         uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " OKV_REGISTERS128
        "{%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}"
        : OKV_OUT8(d, 0), OKV_OUT8(d, 8), OKV_OUT8(d, 16), OKV_OUT8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
};

#undef OKV_REGISTERS32
#undef OKV_REGISTERS64
#undef OKV_REGISTERS128
#undef OKV_OUT1
#undef OKV_OUT8

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_WGMMA_PTX_CUH_
