#include "cmd/bench/case_memory.h"

#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "proto/bf16.h"

namespace okv::cuda {

void Must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

DeviceBuffer AllocateOrExit(size_t bytes) {
  DeviceBuffer buffer;
  Must(buffer.Allocate(std::max<size_t>(bytes, 16)), "cudaMalloc");
  return buffer;
}

std::vector<uint16_t> RandomRotation(uint32_t dim, std::mt19937_64* random) {
  std::vector<double> matrix(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) matrix[size_t{i} * dim + i] = 1.0;
  std::normal_distribution<double> normal;
  std::vector<double> v(dim);
  for (int reflection = 0; reflection < 12; ++reflection) {
    double norm = 0.0;
    for (double& x : v) {
      x = normal(*random);
      norm += x * x;
    }
    for (uint32_t row = 0; row < dim; ++row) {
      double* line = &matrix[size_t{row} * dim];
      double dot = 0.0;
      for (uint32_t c = 0; c < dim; ++c) dot += line[c] * v[c];
      for (uint32_t c = 0; c < dim; ++c) line[c] -= 2.0 * dot / norm * v[c];
    }
  }
  std::vector<uint16_t> result(matrix.size());
  for (size_t i = 0; i < matrix.size(); ++i) result[i] = FloatToBf16(static_cast<float>(matrix[i]));
  return result;
}

std::vector<int32_t> ShuffledSlots(int32_t count, std::mt19937_64* random) {
  std::vector<int32_t> slots(count);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), *random);
  return slots;
}

}  // namespace okv::cuda
