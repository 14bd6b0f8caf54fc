#ifndef OKV_CMD_BENCH_DEVICE_SERVICE_MODEL_H_
#define OKV_CMD_BENCH_DEVICE_SERVICE_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/bench/local_service.h"
#include "proto/object.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"

namespace okv {

// A sequence of random K and V: one sink block, `blocks` int2 blocks of history (blocks 1 to
// `blocks`, what the service carries), and five bf16 blocks behind them, the last one full. Its
// last token's query sees every block in the codec named here (sink 64, recent 256).
struct ServiceModelOptions {
  BlockShape shape;
  uint32_t query_heads = 32;
  uint32_t blocks = 0;
  const RotationSet* rotations = nullptr;  // Outlives the model.
  GpuPair gpus;                            // Of a model in GPU memory: its own, and its peer's.
  uint64_t seed = 1;
};

// Medians of a pass over all blocks, taken in turn in every round.
struct ServiceModelTimes {
  double quantize_seconds = 0;
  double verify_seconds = 0;
  double attend_seconds = 0;         // Of all layers: one decode step.
  double copy_bytes_per_second = 0;  // Read and written, of one large copy.
};

// What a worker has beside the service: memory for blocks, and kernels on it. Two pools of blocks:
// `sealed`, where quantization leaves block i in slot i, and `fetched`, where a fetch brings it to
// any slot. Everything waits until it is done. Thread-compatible.
class ServiceModel {
 public:
  virtual ~ServiceModel() = default;

  // "NVIDIA H200, CUDA driver 13.0".
  virtual std::string device() const = 0;
  // Whether the pools are in a GPU's memory; else in host memory.
  virtual bool on_device() const = 0;
  virtual absl::Span<uint8_t> sealed() = 0;   // [blocks] blocks
  virtual absl::Span<uint8_t> fetched() = 0;  // [blocks] blocks

  // Makes the sealed blocks of the sequence's K and V. The seconds that it took.
  virtual absl::StatusOr<double> Quantize() = 0;
  // Keeps the sealed blocks aside, where no service sees them; the pool then holds nothing.
  virtual absl::Status Forget() = 0;
  // The fetched pool holds nothing: bytes that no block has.
  virtual absl::Status ClearFetched() = 0;
  // Compares every run in the fetched pool, block i in slot slots[i], with the checksums of
  // headers[i]. The seconds that it took; kDataLoss with the number of bad runs.
  virtual absl::StatusOr<double> Verify(absl::Span<const ObjectHeader> headers,
                                        absl::Span<const uint32_t> slots) = 0;
  // Bytes of the fetched blocks that are not those kept aside, 0 when all of them came back.
  virtual absl::StatusOr<uint64_t> CountDifferentBytes(absl::Span<const uint32_t> slots) = 0;

  // What one decode step reads.
  enum class Pool { kSealed, kFetched };
  struct AttendResult {
    double seconds = 0;
    std::vector<uint8_t> output;  // [layers, query_heads, head_dim], as the kernel writes it
  };
  // Attention of the last token's queries, every layer, block i in slot slots[i] of the pool.
  virtual absl::StatusOr<AttendResult> Attend(Pool pool, absl::Span<const uint32_t> slots) = 0;
  // Bytes that quantization of every block reads and writes, and that one step of attention reads.
  virtual uint64_t quantize_bytes() const = 0;
  virtual uint64_t attend_bytes() const = 0;

  // Quantization into the sealed pool, verification of the fetched pool as in the last Verify(),
  // attention over it as in the last Attend(), and a copy: `rounds` rounds behind an untimed one.
  virtual absl::StatusOr<ServiceModelTimes> Measure(uint32_t rounds) = 0;

  // Another process with as much memory of the same kind, on the peer's GPU, to copy from without a
  // service. Its files go to `directory`. kUnimplemented when there is no such copy.
  virtual absl::Status StartPeer(const std::string& directory) = 0;
  // Copies every block of that process to its slot of the fetched pool, on `streams` streams. The
  // seconds that it took.
  virtual absl::StatusOr<double> CopyFromPeer(absl::Span<const uint32_t> slots,
                                              uint32_t streams) = 0;
};

using ServiceModelFactory =
    std::function<absl::StatusOr<std::unique_ptr<ServiceModel>>(const ServiceModelOptions&)>;

// In host memory, with the CPU's kernels on every core.
absl::StatusOr<std::unique_ptr<ServiceModel>> CreateHostModel(const ServiceModelOptions& options);
// On its GPU. kUnavailable without it; kInvalidArgument for a shape that no kernel has. In builds
// with CUDA.
absl::StatusOr<std::unique_ptr<ServiceModel>> CreateCudaModel(const ServiceModelOptions& options);

// The parts of the sequence beside the history.
inline constexpr uint32_t kServiceSinkBlocks = 1;
inline constexpr uint32_t kServiceRecentBlocks = 4;
inline constexpr uint32_t kServiceBf16Blocks = kServiceSinkBlocks + kServiceRecentBlocks + 1;

}  // namespace okv

#endif  // OKV_CMD_BENCH_DEVICE_SERVICE_MODEL_H_
