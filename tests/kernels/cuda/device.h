#ifndef OKV_TESTS_KERNELS_CUDA_DEVICE_H_
#define OKV_TESTS_KERNELS_CUDA_DEVICE_H_

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/rows.h"
#include "tests/kernels/cuda/gpu.h"

namespace okv::cuda_test {

#define ASSERT_CUDA_OK(expr) \
  do { \
    const cudaError_t cuda_error = (expr); \
    ASSERT_EQ(cuda_error, cudaSuccess) << cudaGetErrorString(cuda_error); \
  } while (false)
#define EXPECT_CUDA_OK(expr) \
  do { \
    const cudaError_t cuda_error = (expr); \
    EXPECT_EQ(cuda_error, cudaSuccess) << cudaGetErrorString(cuda_error); \
  } while (false)

// A test that needs a GPU: skipped, with the reason, where there is none. Gives it a stream.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    OKV_SKIP_WITHOUT_GPU();
    ASSERT_CUDA_OK(cudaStreamCreate(&stream_));
  }
  void TearDown() override {
    if (stream_ == nullptr) return;
    EXPECT_CUDA_OK(cudaStreamSynchronize(stream_));
    EXPECT_CUDA_OK(cudaStreamDestroy(stream_));
  }
  void Wait() { ASSERT_CUDA_OK(cudaStreamSynchronize(stream_)); }

  cudaStream_t stream_ = nullptr;
};

// A vector's copy on the device, and back.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    EXPECT_CUDA_OK(buffer_.Allocate(count_ * sizeof(T)));
    if (count_ == 0) return;
    EXPECT_CUDA_OK(
        cudaMemcpy(buffer_.data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* get() const { return buffer_.template as<T>(); }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    EXPECT_CUDA_OK(
        cudaMemcpy(values.data(), buffer_.data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  cuda::DeviceBuffer buffer_;
  size_t count_;
};

inline const __nv_bfloat16* AsBf16(const OnDevice<uint16_t>& values) {
  return reinterpret_cast<const __nv_bfloat16*>(values.get());
}
inline __nv_bfloat16* AsMutableBf16(const OnDevice<uint16_t>& values) {
  return reinterpret_cast<__nv_bfloat16*>(values.get());
}

// [layers, tokens, heads, dim], contiguous.
template <typename Element>
cuda::PagedRowsOf<Element> PlainRows(Element* base, int64_t tokens, int64_t heads, int64_t dim) {
  return {.base = base,
          .layer_stride = tokens * heads * dim,
          .page_stride = heads * dim,
          .token_stride = 0,
          .head_stride = dim,
          .page_tokens = 1};
}

inline float RelativeError(double error_squared, double norm_squared) {
  return static_cast<float>(__builtin_sqrt(error_squared / norm_squared));
}

}  // namespace okv::cuda_test

#endif  // OKV_TESTS_KERNELS_CUDA_DEVICE_H_
