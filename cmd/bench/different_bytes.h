#ifndef OKV_CMD_BENCH_DIFFERENT_BYTES_H_
#define OKV_CMD_BENCH_DIFFERENT_BYTES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace okv::cuda {

// Two pools of blocks in device memory: block i of the first against slot slots[i] of the second.
struct DifferentBytesParams {
  const uint8_t* blocks;
  const uint8_t* pool;
  const int32_t* slots;  // [blocks_count]
  uint32_t blocks_count;
  uint64_t block_bytes;  // A multiple of 16, as both pools' addresses are
  unsigned long long* count;
};

// Sets *count to the number of bytes that differ. Queues a fill and a kernel on `stream` and
// returns without waiting.
[[nodiscard]] cudaError_t CountDifferentBytes(const DifferentBytesParams& params,
                                              cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_DIFFERENT_BYTES_H_
