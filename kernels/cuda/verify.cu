// Checksums of runs: every byte is read once, 4,608 B a run at d 128, g 128, and 4 B written.
//
// A warp takes runs one after the other. While the stripes of 1,024 bytes are added up, the next
// 1,024 are on their way; 48 and more warps an SM do the rest against the latency of the sums,
// which are reduced over the warp once a block.

#include "kernels/cuda/verify.h"
#include "kernels/cuda/verify_device.cuh"

namespace okv::cuda {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksPerSm = 4;

struct ChecksumParams {
  RunSet runs;
  uint64_t runs_count;
  uint32_t warp_runs;        // 1 to 32 runs of one warp
  uint32_t* checksums;       // out, or null
  const uint32_t* expected;  // or null
  RunFailures failures;      // with `expected`
};

__device__ __forceinline__ xxh3::Pair AddOverStripes(xxh3::Pair sums) {
#pragma unroll
  for (int mask = 4; mask < 32; mask *= 2) {
    const xxh3::Pair other = {__shfl_xor_sync(kAllLanes, sums.first, mask),
                              __shfl_xor_sync(kAllLanes, sums.second, mask)};
    sums = xxh3::AddPairs(sums, other);
  }
  return sums;
}

struct BlockData {
  ulonglong2 stripe[2];
};
// The lane's part of a block of the run, of which `bytes` are left.
__device__ __forceinline__ BlockData LoadBlock(const uint8_t* block, uint32_t bytes,
                                               uint32_t lane) {
  BlockData data = {};
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t offset = 512 * i + 16 * lane;
    if (offset < bytes) {
      data.stripe[i] = __ldcs(reinterpret_cast<const ulonglong2*>(block + offset));
    }
  }
  return data;
}

// The whole warp: XXH3-64 of a run.
__device__ uint64_t RunHash(const uint8_t* run, uint32_t bytes, uint64_t seed, uint32_t lane) {
  const xxh3::LaneSecrets secrets = xxh3::MakeLaneSecrets(seed, lane);
  const uint32_t m = lane % 4;
  xxh3::Pair accumulators = xxh3::InitialAccumulators(m);
  BlockData next = LoadBlock(run, bytes, lane);
  uint32_t left = bytes;
  while (left > xxh3::kBlockBytes) {
    const BlockData data = next;
    run += xxh3::kBlockBytes;
    left -= xxh3::kBlockBytes;
    next = LoadBlock(run, left, lane);
    xxh3::Pair sums = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      xxh3::Accumulate({data.stripe[i].x, data.stripe[i].y}, secrets.stripe[i], &sums);
    }
    accumulators = xxh3::AddPairs(accumulators, AddOverStripes(sums));
    accumulators = xxh3::Scramble(accumulators, secrets.scramble);
  }
  // The last block is not scrambled, and the input's last stripe has a secret of its own.
  xxh3::Pair sums = {0, 0};
  const uint32_t last_stripe = left / xxh3::kStripeBytes - 1;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t stripe = lane / 4 + 8 * i;
    if (stripe > last_stripe) continue;
    xxh3::Accumulate({next.stripe[i].x, next.stripe[i].y},
                     stripe == last_stripe ? secrets.last : secrets.stripe[i], &sums);
  }
  accumulators = xxh3::AddPairs(accumulators, AddOverStripes(sums));
  uint64_t parts = xxh3::FinalPart(accumulators, seed, m);
  parts += __shfl_xor_sync(kAllLanes, parts, 1);
  parts += __shfl_xor_sync(kAllLanes, parts, 2);
  return xxh3::Finish(parts, bytes);
}

// Address of run `index`, null when its block is left out, and its seed.
__device__ const uint8_t* FindRun(const RunSet& runs, uint64_t index, uint64_t* seed) {
  const uint32_t head = static_cast<uint32_t>(index % runs.kv_heads);
  const uint64_t page = index / runs.kv_heads;
  const uint32_t layer = static_cast<uint32_t>(page % runs.layers_count);
  const uint64_t block = page / runs.layers_count;
  *seed = xxh3::RunSeed(runs.keys + 4 * block, runs.codec, runs.first_layer + layer,
                        runs.first_head + head);
  const int64_t slot =
      runs.pages.table == nullptr ? static_cast<int64_t>(block) : runs.pages.table[block];
  if (slot < 0) return nullptr;
  return runs.pages.base + slot * runs.pages.block_stride + layer * runs.pages.layer_stride +
         head * runs.pages.head_stride;
}

// Lane i finds run i of the warp's runs and keeps its checksum.
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void ChecksumKernel(
    const __grid_constant__ ChecksumParams params) {
  static_assert(kThreads % 32 == 0, "whole warps");
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t warp = static_cast<uint64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const uint64_t first = warp * params.warp_runs;
  if (first >= params.runs_count) return;
  const uint32_t count = static_cast<uint32_t>(
      min(static_cast<uint64_t>(params.warp_runs), params.runs_count - first));
  uint64_t own_seed = 0;
  const uint8_t* own_run = nullptr;
  if (lane < count) own_run = FindRun(params.runs, first + lane, &own_seed);
  uint32_t own_checksum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t seed = __shfl_sync(kAllLanes, own_seed, i);
    const uint8_t* const run = reinterpret_cast<const uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(own_run), i));
    if (run == nullptr) continue;
    const uint64_t hash = RunHash(run, params.runs.run_bytes, seed, lane);
    if (lane == i) own_checksum = static_cast<uint32_t>(hash);
  }
  if (own_run == nullptr) return;
  const uint64_t index = first + lane;
  if (params.checksums != nullptr) params.checksums[index] = own_checksum;
  if (params.expected != nullptr && params.expected[index] != own_checksum) {
    atomicAdd(params.failures.count, 1u);
    atomicOr(params.failures.bits + index / 32, 1u << (index % 32));
  }
}

bool IsRunSet(const RunSet& runs) {
  const int64_t strides =
      runs.pages.block_stride | runs.pages.layer_stride | runs.pages.head_stride;
  return runs.layers_count >= 1 && runs.kv_heads >= 1 && runs.run_bytes >= 256 &&
         runs.run_bytes % xxh3::kStripeBytes == 0 && runs.keys != nullptr &&
         reinterpret_cast<uintptr_t>(runs.keys) % 8 == 0 && runs.pages.base != nullptr &&
         reinterpret_cast<uintptr_t>(runs.pages.base) % 16 == 0 && strides % 16 == 0;
}

cudaError_t Launch(ChecksumParams params, cudaStream_t stream) {
  const RunSet& runs = params.runs;
  params.runs_count = static_cast<uint64_t>(runs.blocks_count) * runs.layers_count * runs.kv_heads;
  if (params.runs_count == 0) return cudaSuccess;
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  // Enough warps for 6 blocks an SM first, then more runs a warp: their seeds are made side by
  // side.
  const uint64_t resident_warps = static_cast<uint64_t>(sms) * kBlocksPerSm * (kThreads / 32);
  const uint64_t warp_runs = (params.runs_count + resident_warps - 1) / resident_warps;
  params.warp_runs = static_cast<uint32_t>(warp_runs < 32 ? warp_runs : 32);
  const uint64_t block_runs = static_cast<uint64_t>(params.warp_runs) * (kThreads / 32);
  const uint64_t blocks = (params.runs_count + block_runs - 1) / block_runs;
  if (blocks > 0x7fffffffu) return cudaErrorInvalidValue;
  ChecksumKernel<<<static_cast<uint32_t>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t ChecksumRuns(const RunSet& runs, uint32_t* checksums, cudaStream_t stream) {
  if (!IsRunSet(runs) || checksums == nullptr) return cudaErrorInvalidValue;
  return Launch({.runs = runs,
                 .runs_count = 0,
                 .warp_runs = 0,
                 .checksums = checksums,
                 .expected = nullptr,
                 .failures = {}},
                stream);
}

cudaError_t VerifyRuns(const RunSet& runs, const uint32_t* expected, const RunFailures& failures,
                       cudaStream_t stream) {
  if (!IsRunSet(runs) || expected == nullptr || failures.count == nullptr ||
      failures.bits == nullptr) {
    return cudaErrorInvalidValue;
  }
  const uint64_t runs_count =
      static_cast<uint64_t>(runs.blocks_count) * runs.layers_count * runs.kv_heads;
  cudaError_t error = cudaMemsetAsync(failures.count, 0, sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(failures.bits, 0, (runs_count + 31) / 32 * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  return Launch({.runs = runs,
                 .runs_count = 0,
                 .warp_runs = 0,
                 .checksums = nullptr,
                 .expected = expected,
                 .failures = failures},
                stream);
}

}  // namespace okv::cuda
