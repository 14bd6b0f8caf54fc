#ifndef OKV_CMD_BENCH_LOAD_ONLY_H_
#define OKV_CMD_BENCH_LOAD_ONLY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

// What decode attention would take if it did nothing but load: the same bytes through the same kind
// of ring (bulk copies into rings of a warp's own, one thread block a multiprocessor), without
// arithmetic, merge or output.
namespace okv::cuda {

// One bulk copy: `bytes` (a multiple of 16, at most kLoadBytesMax) from 16 * `offset_16` of one of
// two bases.
struct LoadItem {
  uint32_t offset_16;
  uint16_t bytes;
  uint16_t base;  // 0 or 1
};
inline constexpr uint32_t kLoadBytesMax = 4608;

struct LoadOnlyParams {
  const LoadItem* items;  // [items_count], on the device
  uint32_t items_count;
  const uint8_t* bases[2];
  bool early;  // Starts while the kernel in front ends
};

// Queues the kernel and returns without waiting. cudaErrorNotSupported before sm_90.
[[nodiscard]] cudaError_t LoadOnly(const LoadOnlyParams& params, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_LOAD_ONLY_H_
