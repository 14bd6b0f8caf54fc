#ifndef OKV_KERNELS_CUDA_ATTEND_WIDE_PTX_CUH_
#define OKV_KERNELS_CUDA_ATTEND_WIDE_PTX_CUH_

#include <cstdint>

#include "kernels/cuda/prefill_wgmma_ptx.cuh"

// Integer matrix instructions of a warpgroup (128 threads) on sm_90a: D [64 x 32] += A B, A in
// registers, B in shared memory. Warp w has rows 16 w .. 16 w + 15 of A and D, in the fragments of
// mma.sync. B is cut into core matrices: 8 columns, 16 bytes of each, in 128 bytes.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OKV_HAS_WGMMA 1
#else
#define OKV_HAS_WGMMA 0
#endif

namespace okv::cuda {

#if OKV_HAS_WGMMA
// Describes B from `address` on: core matrices of 8 more columns are 128 bytes further, those of 16
// more bytes of a column step_bytes further.
__device__ __forceinline__ uint64_t CoreMatrices(uint32_t address, uint32_t step_bytes) {
  const uint32_t low = (address & 0x3ffff) >> 4 | step_bytes >> 4 << 16;
  return static_cast<uint64_t>(128 >> 4) << 32 | low;
}
// The same, `bytes` further: one addition.
__device__ __forceinline__ uint64_t Further(uint64_t matrices, uint32_t bytes) {
  return matrices + (bytes >> 4);
}
// Keeps the compiler from moving reads or writes of registers over this place.
template <class Word, int kCount>
__device__ __forceinline__ void PinWords(Word (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// d = a b + (adds ? d : 0): a [64 x 32] u8, b [32 x 32] s8 or u8. Takes 16.6 clocks of a
// multiprocessor, of which 12 are lost for other instructions.
#define OKV_WGMMA(name, b_type) \
  __device__ __forceinline__ void name(int(&d)[16], const uint32_t(&a)[4], uint64_t b, \
                                       bool adds) { \
    asm volatile( \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8." b_type \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p;" \
        "\n}" \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), \
          "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), \
          "+r"(d[14]), "+r"(d[15]) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds))); \
  }
OKV_WGMMA(WgmmaU8S8, "s8")
OKV_WGMMA(WgmmaU8U8, "u8")
#undef OKV_WGMMA

// Stores four 8 x 8 matrices of 16-bit elements transposed; lanes 8 i .. 8 i + 7 give the rows of
// matrix i in memory.
__device__ __forceinline__ void StoreMatrix4Transposed(uint32_t address, const uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}
// If `arrives`: BarrierExpect() of kBytes and BulkCopy() of them; of 0 and no copy if not `copies`.
// With predicates: in branches of one lane the kernel takes 1 % longer.
template <int kBytes>
__device__ __forceinline__ void BulkCopyIf(bool arrives, bool copies, uint32_t destination,
                                           const void* source, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred arrives, copies;\n.reg .b32 bytes;\n"
      "setp.ne.s32 arrives, %3, 0;\n"
      "setp.ne.and.s32 copies, %4, 0, arrives;\n"
      "selp.b32 bytes, %5, 0, copies;\n"
      "@arrives mbarrier.arrive.expect_tx.shared::cta.b64 _, [%2], bytes;\n"
      "@copies cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %5, "
      "[%2];\n}" ::"r"(destination),
      "l"(source), "r"(barrier), "r"(static_cast<int>(arrives)), "r"(static_cast<int>(copies)),
      "n"(kBytes)
      : "memory");
}
// Waits for the four warps of a warpgroup. Barrier 0 is __syncthreads().
__device__ __forceinline__ void WarpgroupSync(int group) { NamedWait(group + 1, 128); }
#endif  // OKV_HAS_WGMMA

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_WIDE_PTX_CUH_
