#ifndef OKV_CMD_BENCH_CUDA_CODEC_H_
#define OKV_CMD_BENCH_CUDA_CODEC_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/cuda_timing.h"
#include "kernels/cuda/rows.h"
#include "proto/page_layout.h"

namespace okv {

// Times of what makes, reads and checks pages on the GPU, beside the copy rate of the same run.
// Each layer has data of its own; every measurement goes through more than the L2 holds.
struct CudaCodecOptions {
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;
  uint32_t rotation_heads = 1;
  uint32_t layers = 36;
  uint32_t chunk_tokens = 8192;  // Of one launch, a multiple of 64
  uint32_t rounds = 9;
  uint64_t seed = 1;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;

  PageLayout layout() const {
    return {.layers_count = layers,
            .kv_heads = kv_heads,
            .head_dim = head_dim,
            .group_size = group_size};
  }
  uint32_t blocks() const { return chunk_tokens / 64; }
  // "36 layers, 8 KV heads, d 128, g 128, chunks of 8192 tokens".
  std::string ShapeText() const;
};

// Rotate, clip, quantize and pack a prefill chunk and demoted blocks. Each first compares a sample
// with the scalar twin: kInternal when it is wrong. kUnavailable without a GPU. Blocks until done.
absl::StatusOr<CudaBenchReport> RunCudaQuantize(const CudaCodecOptions& options);
// Pages to rows of an engine's cache, in both bases.
absl::StatusOr<CudaBenchReport> RunCudaDequantize(const CudaCodecOptions& options);
// Checksums of int2 and bf16 runs.
absl::StatusOr<CudaBenchReport> RunCudaVerify(const CudaCodecOptions& options);

// What the three share: chunks of all layers on the device.
struct CodecData {
  // Random rows [layers, chunk_tokens, kv_heads, head_dim], random rotations, the published clip
  // ranks (0.96 of K and 0.92 of V), and room for pages.
  static absl::StatusOr<CodecData> Make(const CudaCodecOptions& options);

  cuda::ConstPagedRows Rows(const cuda::DeviceBuffer& buffer) const;
  cuda::PagedRows MutableRows(const cuda::DeviceBuffer& buffer) const;
  // From `layer` on: kernels count layers from there.
  cuda::Rotations RotationsOf(uint32_t layer) const;

  CudaCodecOptions options;
  cuda::DeviceBuffer k;
  cuda::DeviceBuffer v;
  cuda::DeviceBuffer r_k;
  cuda::DeviceBuffer r_v;
  cuda::DeviceBuffer rank_k;  // u32 [layers, kv_heads]
  cuda::DeviceBuffer rank_v;
  cuda::DeviceBuffer pages;  // [blocks][layers][kv_heads] runs
  cuda::DeviceBuffer bad_row;
};

// Quantizes `layers` layers of the chunk, from `layer` on, into the pages. early: the kernel in
// front does not write what it reads.
cudaError_t QueueQuantize(const CodecData& data, uint32_t layer, uint32_t layers, bool rotate,
                          bool early, cudaStream_t stream);

// Copied at once to measure the copy rate.
inline constexpr size_t kCopyBytes = size_t{2} << 30;

}  // namespace okv

#endif  // OKV_CMD_BENCH_CUDA_CODEC_H_
