// What compute-sanitizer's racecheck makes of warpgroups that meet at named barriers different
// numbers of times. Every number that a warpgroup reads of another one has the block's barrier
// between the two; yet some runs report `mine`, written in front of a __syncthreads and read behind
// it. Where all groups meet equally often, as in attend_wide.cuh, none do.
//
//   compute-sanitizer --tool racecheck okv_named_barriers [even]

#include <cuda_runtime_api.h>

#include <cstdio>

namespace {

constexpr int kThreads = 384;

__device__ void WarpgroupSync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

__global__ void MeetKernel(int* out, bool even) {
  __shared__ int mine[kThreads];
  __shared__ int group_numbers[kThreads];
  const int thread = threadIdx.x;
  const int group = thread / 128;
  int sum = 0;
  for (int piece = 0; piece < 3; ++piece) {
    mine[thread] = thread + sum;
    __syncthreads();
    for (int i = 0; i < 4 + 2 * group; ++i) {
      group_numbers[thread] = sum + i;
      WarpgroupSync(group);
      sum += group_numbers[128 * group + (thread + 1) % 128];
      WarpgroupSync(group);
    }
    for (int i = 2 * group; even && i < 4; ++i) {
      WarpgroupSync(group);
      WarpgroupSync(group);
    }
    __syncthreads();
    sum += mine[kThreads - 1 - thread];
    __syncthreads();
  }
  out[thread] = sum;
}

}  // namespace

int main(int argc, char** /*argv*/) {
  int* out = nullptr;
  cudaError_t error = cudaMalloc(&out, kThreads * sizeof(int));
  if (error == cudaSuccess) {
    MeetKernel<<<1, kThreads>>>(out, argc > 1);
    error = cudaDeviceSynchronize();
  }
  std::printf("%s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
