#ifndef OKV_KERNELS_CUDA_PTX_CUH_
#define OKV_KERNELS_CUDA_PTX_CUH_

#include <cuda_bf16.h>

#include <cstdint>

// Single instructions that CUDA C++ has no function for.
namespace okv::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Copies into shared memory

__device__ __forceinline__ void CopyAsync16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}
__device__ __forceinline__ void CopyAsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void CopyAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void CopyAsyncWaitAll() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void PrefetchToL2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

#if __CUDA_ARCH__ >= 900
// Many bytes at once, a multiple of 16 from a multiple of 16 on.
__device__ __forceinline__ void PrefetchBulkToL2(const void* pointer, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pointer), "r"(bytes) : "memory");
}
#endif

// ---- Barriers in shared memory. A barrier's phases alternate in parity, from 0; waiting for
// parity 1 of a fresh one returns at once.
__device__ __forceinline__ void BarrierInit(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\n"
      "bra WAIT_%=;\n"
      "DONE_%=:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT_%=:\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\n"
      "bra WAIT_%=;\n"
      "DONE_%=:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BulkCopy(uint32_t destination, const void* source, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// Ordinary writes of shared memory before, bulk copies over it after.
__device__ __forceinline__ void FenceBeforeBulkCopy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#else
// Arrives when this thread's CopyAsync16() so far have arrived.
__device__ __forceinline__ void BarrierArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

// Waits for the kernel before on the stream, where the launch let this one start earlier.
__device__ __forceinline__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Matrices. Fragments as in the PTX manual: lane = 4 row + column pair.

// d = a b + c: a [16 x 32] u8, b [32 x 8] s8.
__device__ __forceinline__ void MmaU8S8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                        const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void MmaU8S8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                        int c) {
  const int all[4] = {c, c, c, c};
  MmaU8S8(d, a, b, all);
}
// The same with b u8.
__device__ __forceinline__ void MmaU8U8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void MmaU8U8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, int c) {
  const int all[4] = {c, c, c, c};
  MmaU8U8(d, a, b0, b1, all);
}
// d += a b: a [16 x 16] bf16, b [16 x 8] bf16, d fp32.
__device__ __forceinline__ void MmaBf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Transposes an 8 x 8 matrix of 16-bit elements that the warp holds, a row a quad of lanes.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t x) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}
// Four 8 x 8 matrices of 16-bit elements; lanes 8 i .. 8 i + 7 give the rows of matrix i.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// ---- Scalars

__device__ __forceinline__ float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float LowBf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float HighBf16(uint32_t word) {
  return __uint_as_float(word & 0xffff0000u);
}
// Low half: bf16(low), high half: bf16(high).
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
// Adds with release and acquire on the device's scope: what the block wrote before is seen by who
// adds after.
__device__ __forceinline__ uint32_t AtomicAddAcquireRelease(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PTX_CUH_
