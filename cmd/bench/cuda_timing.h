#ifndef OKV_CMD_BENCH_CUDA_TIMING_H_
#define OKV_CMD_BENCH_CUDA_TIMING_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/device_buffer.h"

namespace okv {

// OK, or the CUDA error in words behind `what`: kResourceExhausted when memory is what is missing,
// kUnavailable without a usable device or driver, otherwise kInternal.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

// For the calling thread, from now on. kUnavailable naming the number when there is no such GPU.
absl::Status TakeDevice(uint32_t device);

absl::StatusOr<cuda::DeviceBuffer> AllocateDevice(size_t bytes);

// Both wait for the copy. REQUIRES: the buffer holds `offset` bytes and the span's.
absl::Status CopyToDevice(absl::Span<const uint8_t> from, size_t offset,
                          const cuda::DeviceBuffer& to);
absl::Status CopyFromDevice(const cuda::DeviceBuffer& from, size_t offset, absl::Span<uint8_t> to);

template <typename T>
absl::StatusOr<cuda::DeviceBuffer> DeviceCopyOf(const std::vector<T>& values) {
  absl::StatusOr<cuda::DeviceBuffer> buffer = AllocateDevice(values.size() * sizeof(T));
  if (!buffer.ok()) return buffer;
  const absl::Status status =
      CopyToDevice(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()),
                                       values.size() * sizeof(T)),
                   /*offset=*/0, *buffer);
  if (!status.ok()) return status;
  return buffer;
}
template <typename T>
absl::StatusOr<std::vector<T>> HostCopyOf(const cuda::DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  const absl::Status status = CopyFromDevice(
      buffer, /*offset=*/0,
      absl::MakeSpan(reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T)));
  if (!status.ok()) return status;
  return values;
}

// Pseudo-random BF16 rows on the device: `bytes` / 2 numbers, about normal with deviation `scale`,
// the same for the same seed. Made of a pattern of 16 MiB from the host, repeated: good enough for
// times, not for statistics. Waits.
absl::StatusOr<cuda::DeviceBuffer> RandomBf16OnDevice(size_t bytes, float scale, uint64_t seed);

// Times what several contenders queue on one stream, as CUDA graphs replayed in alternating rounds:
// what the machine does besides hits all of them alike. Owns its stream. Thread-compatible.
class CudaTimer {
 public:
  static absl::StatusOr<std::unique_ptr<CudaTimer>> Create();
  ~CudaTimer();
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  // Captures what `queue` puts on the stream; returns the contender's index. One replay should take
  // a millisecond or more (many launches on distinct buffers), against the timer's resolution of
  // half a microsecond, and touch over 300 MB, so that no replay finds its data in the L2.
  absl::StatusOr<size_t> Add(absl::FunctionRef<cudaError_t(cudaStream_t)> queue);

  // Adds a device-to-device copy of `bytes`, whose rate is the limit that others are measured by:
  // 2 * bytes are read or written.
  absl::StatusOr<size_t> AddCopy(size_t bytes);

  // Replays every contender once, untimed, then once in each round. Waits. The result has each
  // contender's median time of one replay in microseconds.
  absl::StatusOr<std::vector<double>> MedianUs(uint32_t rounds);

  cudaStream_t stream() const { return stream_; }

 private:
  CudaTimer() = default;
  absl::Status Init();
  // A captured graph, or a copy: as a graph node it runs on a copy engine, at two thirds of the
  // rate that cudaMemcpyAsync() reaches.
  struct Contender {
    cudaGraphExec_t graph = nullptr;
    const void* from = nullptr;
    void* to = nullptr;
    size_t bytes = 0;
  };
  absl::StatusOr<double> ReplayUs(const Contender& contender);
  cudaError_t Queue(const Contender& contender);

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::vector<Contender> contenders_;
  std::vector<cuda::DeviceBuffer> copies_;
};

// One line of a kernel benchmark.
struct CudaBenchRow {
  std::string name;
  double us = 0;                 // Of one launch
  double bytes = 0;              // That one launch must read and write
  double copy_bytes_per_us = 0;  // Of the same run
  // A kernel of at most `us_limit` keeps its promise; 0: none was made.
  double us_limit = 0;
  double step_us = 0;  // Of all layers' launches in one graph; 0: not measured so

  double gb_per_s() const { return bytes / us * 1e-3; }
  double limit_share() const { return bytes / copy_bytes_per_us / us; }
};

struct CudaBenchReport {
  std::string device;
  std::string shape;  // "layers 36, kv_heads 8, ..."
  std::vector<CudaBenchRow> rows;

  std::string ToTable() const;
  std::string ToJson() const;
};

// "NVIDIA H200, driver 13.0", of the current device.
absl::StatusOr<std::string> CudaDeviceName();

}  // namespace okv

#endif  // OKV_CMD_BENCH_CUDA_TIMING_H_
