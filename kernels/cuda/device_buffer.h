#ifndef OKV_KERNELS_CUDA_DEVICE_BUFFER_H_
#define OKV_KERNELS_CUDA_DEVICE_BUFFER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace okv::cuda {

// Memory of the device that was current at Allocate(), freed with the handle. Move-only;
// Thread-compatible. Neither filled nor copied to by itself: that needs a stream, the caller's.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    if (this != &other) {
      Free();
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { Free(); }

  // Replaces what the handle holds. cudaErrorMemoryAllocation when the device has no room: *this is
  // then empty. Waits for the device when it frees, so not for the data path.
  [[nodiscard]] cudaError_t Allocate(size_t bytes) {
    Free();
    if (bytes == 0) return cudaSuccess;
    const cudaError_t error = cudaMalloc(&data_, bytes);
    if (error != cudaSuccess) {
      data_ = nullptr;
      // Or a later cudaGetLastError() would report it again, in somebody else's name.
      static_cast<void>(cudaGetLastError());
      return error;
    }
    bytes_ = bytes;
    return cudaSuccess;
  }

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  // A failed free has no one to tell: the context is gone, and the memory with it.
  void Free() {
    if (data_ != nullptr) static_cast<void>(cudaFree(data_));
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_DEVICE_BUFFER_H_
