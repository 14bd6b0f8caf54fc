#ifndef OKV_KERNELS_CUDA_ATTEND_TUNING_H_
#define OKV_KERNELS_CUDA_ATTEND_TUNING_H_

#include <cstdint>

namespace okv::cuda {

// How an instantiation of the decode kernel is cut; measured variants are in
// kernels/cuda/README.md.
struct DecodeTuning {
  uint32_t page_blocks;  // Blocks of an INT2 unit: 1, 2 or 4
  uint32_t warps;        // of a thread block; there is one block a multiprocessor
};

// Of head_dim, groups of a row, query rows of a pair. Two blocks a unit halve what a unit costs
// beside its bytes, where two units a warp still fit into shared memory.
constexpr DecodeTuning TuningOf(uint32_t head_dim, uint32_t groups, uint32_t rows) {
  if (head_dim == 64) return {.page_blocks = 2, .warps = 8};
  if (head_dim == 128 && groups <= 2 && rows <= 8) {
    return {.page_blocks = 2, .warps = 8};
  }
  return {.page_blocks = 1, .warps = 8};
}

// Whether attend_wide.cuh is for such a pair, on sm_90a; and how that is cut: `warps` are
// warpgroups there.
constexpr bool HasWideKernel(uint32_t head_dim, uint32_t groups, uint32_t rows) {
  return head_dim == 128 && groups == 1 && rows == 16;
}
inline constexpr DecodeTuning kWideTuning = {.page_blocks = 4, .warps = 3};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ATTEND_TUNING_H_
