#ifndef OKV_KERNELS_CUDA_VERIFY_H_
#define OKV_KERNELS_CUDA_VERIFY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/rows.h"

// Checksums of runs (proto/page_layout.md, "Checksums") where the runs are: on the GPU.
namespace okv::cuda {

// The runs of blocks of one codec: run (b, l, h) is block b's of layer first_layer + l and KV head
// first_head + h, numbered (b * layers_count + l) * kv_heads + h here.
struct RunSet {
  uint32_t blocks_count;
  uint32_t layers_count;
  uint32_t kv_heads;
  uint32_t first_layer;
  uint32_t first_head;
  uint32_t run_bytes;    // A multiple of 64, at least 256
  uint8_t codec;         // As in proto/ids.h
  const uint64_t* keys;  // [blocks_count, 4]: the 32 bytes of each block's key
  ConstPages pages;
};

// Where VerifyRuns puts what it finds.
struct RunFailures {
  uint32_t* count;
  uint32_t* bits;  // [runs / 32 rounded up]: bit r % 32 of word r / 32 is run r's
};

// checksums[r] = the checksum of run r, what okv::RunChecksum gives. Those of blocks with a
// negative slot are left as they are. Queues one kernel on `stream` and returns without waiting.
// cudaErrorInvalidValue for an unsupported size or a misaligned pointer or stride.
[[nodiscard]] cudaError_t ChecksumRuns(const RunSet& runs, uint32_t* checksums,
                                       cudaStream_t stream);

// Compares with expected[r]: sets *count and all of the bits, on the device. Blocks with a negative
// slot count as good. Queues two fills and one kernel on `stream` and returns without waiting.
// Errors as above.
[[nodiscard]] cudaError_t VerifyRuns(const RunSet& runs, const uint32_t* expected,
                                     const RunFailures& failures, cudaStream_t stream);

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_VERIFY_H_
