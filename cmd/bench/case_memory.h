#ifndef OKV_CMD_BENCH_CASE_MEMORY_H_
#define OKV_CMD_BENCH_CASE_MEMORY_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cuda/device_buffer.h"

// Device memory and random inputs of the attention cases. A CUDA error ends the program: a case is
// a part of tests and benchmarks, which cannot go on.
namespace okv::cuda {

void Must(cudaError_t error, const char* what);

DeviceBuffer AllocateOrExit(size_t bytes);

template <class Element>
DeviceBuffer Upload(const std::vector<Element>& values) {
  DeviceBuffer buffer = AllocateOrExit(values.size() * sizeof(Element));
  Must(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(Element),
                  cudaMemcpyHostToDevice),
       "cudaMemcpy");
  return buffer;
}

template <class Element>
std::vector<Element> Download(const DeviceBuffer& buffer, size_t count) {
  std::vector<Element> values(count);
  Must(cudaMemcpy(values.data(), buffer.data(), count * sizeof(Element), cudaMemcpyDeviceToHost),
       "cudaMemcpy");
  return values;
}

// A random orthogonal matrix, [dim, dim] bf16: a product of Householder reflections, rounded.
std::vector<uint16_t> RandomRotation(uint32_t dim, std::mt19937_64* random);

// 0 .. count - 1 in random order.
std::vector<int32_t> ShuffledSlots(int32_t count, std::mt19937_64* random);

}  // namespace okv::cuda

#endif  // OKV_CMD_BENCH_CASE_MEMORY_H_
