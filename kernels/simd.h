#ifndef OKV_KERNELS_SIMD_H_
#define OKV_KERNELS_SIMD_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace okv {

// The instruction set that the CPU kernels run on here, for logs: "AVX3_DL", "AVX2", "NEON",
// "SCALAR" (then the scalar twins run: correct, 50 to 100 times slower).
absl::string_view SimdTargetName();

// For tests: every target that is compiled in and that this CPU has, best first, SCALAR last.
std::vector<int64_t> SimdTargetsForTest();
// For tests: from here on kernels run on `target` only; 0 goes back to the best one.
void SetSimdTargetForTest(int64_t target);

// Scratch of the calling thread, 64-byte aligned, at least `floats_count` long, contents
// unspecified. It belongs to the innermost kernel: a kernel that holds it calls no other that asks
// for it.
float* ThreadScratch(size_t floats_count);
// The same, but another area: what the tasks of one call share belongs to the thread that made it.
float* CallScratch(size_t floats_count);

}  // namespace okv

#endif  // OKV_KERNELS_SIMD_H_
