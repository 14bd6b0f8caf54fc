#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/device_memory.h"
#include "kernels/cuda/copy_spans.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/verify.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Each launch needs its keys, places and checksums copied there and its answer back: one area for
// each direction, so that it is one copy each.
constexpr size_t kAreaBytesMin = size_t{1} << 16;

// A stream with its areas, for one call at a time. Thread-compatible.
struct Lane {
  ~Lane() {
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
    if (host != nullptr) static_cast<void>(cudaFreeHost(host));
  }

  cudaStream_t stream = nullptr;
  cuda::DeviceBuffer device;
  uint8_t* host = nullptr;  // Page-locked, as large as `device`.
};

// What one launch checks: blocks of one shape.
struct Batch {
  std::vector<size_t> members;  // Indexes into the call's blocks.
};
using Shape =
    std::tuple<uint8_t, size_t, size_t, uint32_t, uint32_t, uint32_t, uint32_t, uintptr_t>;

// Blocks are 16 bytes apart or more, and a launch numbers them by 31 bits: 16 GiB each.
constexpr int kWindowBits = 34;

Shape ShapeOf(const DeviceRuns& block) {
  return {static_cast<uint8_t>(block.id.codec),
          block.layout.run_bytes(block.id.codec),
          block.layer_stride_bytes,
          block.range.layer_begin,
          block.range.layer_end,
          block.range.head_begin,
          block.range.head_end,
          reinterpret_cast<uintptr_t>(block.first_run) >> kWindowBits};
}

// The launch's areas: 8-byte keys first, so that all are aligned.
struct Areas {
  size_t runs_count;  // Of the launch.
  size_t table_at;
  size_t expected_at;
  size_t out_at;  // Checksums, or the failures' count and bits.
  size_t out_bytes;
  size_t bytes;

  Areas(size_t blocks_count, size_t runs_of_block, bool verify)
      : runs_count(blocks_count * runs_of_block),
        table_at(blocks_count * sizeof(BlockKey)),
        expected_at(table_at + blocks_count * sizeof(int32_t)),
        out_at(expected_at + (verify ? runs_count * sizeof(uint32_t) : 0)),
        out_bytes((verify ? 1 + (runs_count + 31) / 32 : runs_count) * sizeof(uint32_t)),
        bytes(out_at + out_bytes) {}
};

// Calls that may stand in the middle of an engine's: while it lives, the device is the calling
// thread's, and what the thread does is no part of a graph that another thread captures (global
// capture forbids everybody cudaMalloc and cudaEventQuery). Both are as before afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    static_cast<void>(cudaGetDevice(&before_));
    error_ = cudaSetDevice(device);
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_mode_));
  }
  ~OnDevice() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_mode_));
    static_cast<void>(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  cudaError_t error_ = cudaSuccess;
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

class CudaDevice final : public DeviceMemory {
 public:
  CudaDevice(int device, std::string name, bool flush_writes)
      : device_(device), name_(std::move(name)), flush_writes_(flush_writes) {}
  ~CudaDevice() override {
    const OnDevice current(device_);
    lanes_.clear();
  }

  std::string name() const override { return name_; }
  absl::Status MakeCurrent() override;
  absl::StatusOr<uint8_t*> Allocate(uint64_t bytes) override;
  void Free(uint8_t* memory) override;
  absl::StatusOr<MemoryKind> KindOf(const void* address) const override;
  absl::Status LockHostMemory(absl::Span<uint8_t> memory) override;
  void UnlockHostMemory(absl::Span<uint8_t> memory) override;
  absl::Status Copy(absl::Span<const MemoryCopy> copies) override;
  absl::Status CopyWithin(absl::Span<const MemoryCopy> copies) override;
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Checksum(
      absl::Span<const DeviceRuns> blocks) override;
  std::vector<absl::Status> Verify(absl::Span<const DeviceRuns> blocks,
                                   absl::Span<const absl::Span<const uint32_t>> expected) override;

 private:
  absl::Status Check(absl::string_view what, cudaError_t error) const;
  // Runs `queue` on a stream and waits for what it queued.
  absl::Status OnLane(const std::function<absl::Status(cudaStream_t)>& queue);
  absl::StatusOr<std::unique_ptr<Lane>> TakeLane() ABSL_LOCKS_EXCLUDED(mu_);
  void GiveLane(std::unique_ptr<Lane> lane) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Reserve(Lane* lane, size_t bytes);
  absl::Status FlushWrites();
  // Runs `launch` once for each shape among the blocks.
  absl::Status ForEachBatch(absl::Span<const DeviceRuns> blocks,
                            const std::function<absl::Status(Lane*, const Batch&)>& launch);
  // Fills keys and table of the launch, and says where its pages are.
  cuda::RunSet Describe(absl::Span<const DeviceRuns> blocks, const Batch& batch, const Areas& areas,
                        Lane* lane) const;
  absl::Status VerifyBatch(absl::Span<const DeviceRuns> blocks,
                           absl::Span<const absl::Span<const uint32_t>> expected, Lane* lane,
                           const Batch& batch, std::vector<absl::Status>* statuses);
  absl::Status ChecksumBatch(absl::Span<const DeviceRuns> blocks, Lane* lane, const Batch& batch,
                             std::vector<std::vector<uint32_t>>* checksums);

  const int device_;
  const std::string name_;
  const bool flush_writes_;  // The device does not order a NIC's writes before its kernels.

  Mutex mu_;
  std::vector<std::unique_ptr<Lane>> lanes_ ABSL_GUARDED_BY(mu_);  // Not in use.
};

absl::Status CudaDevice::Check(absl::string_view what, cudaError_t error) const {
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());  // Or a later call would report it again.
  return absl::UnavailableError(absl::StrCat(name_, ": ", what, ": ", cudaGetErrorString(error)));
}

absl::Status CudaDevice::MakeCurrent() {
  OKV_RETURN_IF_ERROR(Check("cannot be used", cudaSetDevice(device_)));
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // See OnDevice.
  return Check("cannot be used", cudaThreadExchangeStreamCaptureMode(&mode));
}

absl::StatusOr<uint8_t*> CudaDevice::Allocate(uint64_t bytes) {
  const OnDevice current(device_);
  OKV_RETURN_IF_ERROR(Check("cannot be used", current.error()));
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaSuccess) return static_cast<uint8_t*>(memory);
  if (error != cudaErrorMemoryAllocation) return Check("cudaMalloc", error);
  static_cast<void>(cudaGetLastError());
  size_t free_bytes = 0;
  size_t all_bytes = 0;
  static_cast<void>(cudaMemGetInfo(&free_bytes, &all_bytes));
  return absl::ResourceExhaustedError(absl::StrCat(
      name_, " has not ", bytes, " bytes: ", free_bytes, " of ", all_bytes, " are free"));
}

void CudaDevice::Free(uint8_t* memory) {
  const OnDevice current(device_);
  // A failed free has no one to tell: the context is gone, and the memory with it.
  static_cast<void>(cudaFree(memory));
}

absl::StatusOr<MemoryKind> CudaDevice::KindOf(const void* address) const {
  const OnDevice current(device_);
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return MemoryKind::kHost;  // CUDA does not know it.
  }
  if (attributes.type != cudaMemoryTypeDevice) return MemoryKind::kHost;
  if (attributes.device == device_) return MemoryKind::kDevice;
  return absl::InvalidArgumentError(
      absl::StrCat("it is in the memory of cuda:", attributes.device, ", not of ", name_));
}

absl::Status CudaDevice::LockHostMemory(absl::Span<uint8_t> memory) {
  const OnDevice current(device_);
  OKV_RETURN_IF_ERROR(Check("cannot be used", current.error()));
  return Check("cudaHostRegister",
               cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable));
}

void CudaDevice::UnlockHostMemory(absl::Span<uint8_t> memory) {
  const OnDevice current(device_);
  static_cast<void>(cudaHostUnregister(memory.data()));
}

absl::StatusOr<std::unique_ptr<Lane>> CudaDevice::TakeLane() {
  {
    MutexLock lock(&mu_);
    if (!lanes_.empty()) {
      std::unique_ptr<Lane> lane = std::move(lanes_.back());
      lanes_.pop_back();
      return lane;
    }
  }
  auto lane = std::make_unique<Lane>();
  // Not ordered behind the legacy stream, where an engine may have long kernels.
  OKV_RETURN_IF_ERROR(
      Check("cudaStreamCreate", cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking)));
  OKV_RETURN_IF_ERROR(Reserve(lane.get(), kAreaBytesMin));
  return lane;
}

void CudaDevice::GiveLane(std::unique_ptr<Lane> lane) {
  MutexLock lock(&mu_);
  lanes_.push_back(std::move(lane));
}

absl::Status CudaDevice::Reserve(Lane* lane, size_t bytes) {
  // Without the host's area an earlier call failed in between.
  if (lane->device.bytes() >= bytes && lane->host != nullptr) return absl::OkStatus();
  size_t room = kAreaBytesMin;
  while (room < bytes) room *= 2;
  if (lane->host != nullptr) static_cast<void>(cudaFreeHost(std::exchange(lane->host, nullptr)));
  OKV_RETURN_IF_ERROR(Check("cudaMalloc", lane->device.Allocate(room)));
  void* host = nullptr;
  OKV_RETURN_IF_ERROR(Check("cudaMallocHost", cudaMallocHost(&host, room)));
  lane->host = static_cast<uint8_t*>(host);
  return absl::OkStatus();
}

absl::Status CudaDevice::FlushWrites() {
  if (!flush_writes_) return absl::OkStatus();
  return Check("cudaDeviceFlushGPUDirectRDMAWrites",
               cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                  cudaFlushGPUDirectRDMAWritesToOwner));
}

absl::Status CudaDevice::OnLane(const std::function<absl::Status(cudaStream_t)>& queue) {
  const OnDevice current(device_);
  OKV_RETURN_IF_ERROR(Check("cannot be used", current.error()));
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, TakeLane());
  absl::Status status = queue(lane->stream);
  // Also after an error: those before it may still run.
  status.Update(Check("copies", cudaStreamSynchronize(lane->stream)));
  GiveLane(std::move(lane));
  return status;
}

absl::Status CudaDevice::Copy(absl::Span<const MemoryCopy> copies) {
  return OnLane([&](cudaStream_t stream) -> absl::Status {
    for (const MemoryCopy& copy : copies) {
      OKV_RETURN_IF_ERROR(Check(
          "a copy", cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDefault, stream)));
    }
    return absl::OkStatus();
  });
}

absl::Status CudaDevice::CopyWithin(absl::Span<const MemoryCopy> copies) {
  return OnLane([&](cudaStream_t stream) -> absl::Status {
    OKV_RETURN_IF_ERROR(FlushWrites());
    std::vector<cuda::CopySpan> spans;
    for (size_t i = 0; i < copies.size(); ++i) {
      spans.push_back({.to = copies[i].to, .from = copies[i].from, .bytes = copies[i].bytes});
      if (spans.size() < cuda::kCopySpansMax && i + 1 < copies.size()) continue;
      OKV_RETURN_IF_ERROR(Check(
          "copies", cuda::CopySpans(spans.data(), static_cast<uint32_t>(spans.size()), stream)));
      spans.clear();
    }
    return absl::OkStatus();
  });
}

cuda::RunSet CudaDevice::Describe(absl::Span<const DeviceRuns> blocks, const Batch& batch,
                                  const Areas& areas, Lane* lane) const {
  const DeviceRuns& one = blocks[batch.members[0]];
  const uint8_t* base = one.first_run;
  for (const size_t i : batch.members) base = std::min(base, blocks[i].first_run);
  uint64_t offsets = 0;  // Their bits together: the lowest one divides them all.
  for (const size_t i : batch.members) offsets |= static_cast<uint64_t>(blocks[i].first_run - base);
  const uint64_t stride = offsets == 0 ? 16 : offsets & (~offsets + 1);
  auto* table = reinterpret_cast<int32_t*>(lane->host + areas.table_at);
  for (size_t b = 0; b < batch.members.size(); ++b) {
    const DeviceRuns& block = blocks[batch.members[b]];
    const uint64_t slot = static_cast<uint64_t>(block.first_run - base) / stride;
    OKV_CHECK(stride % 16 == 0 && slot < (uint64_t{1} << 31));
    std::memcpy(lane->host + b * sizeof(BlockKey), block.id.key.view().data(), sizeof(BlockKey));
    table[b] = static_cast<int32_t>(slot);
  }
  return {
      .blocks_count = static_cast<uint32_t>(batch.members.size()),
      .layers_count = one.range.layers_count(),
      .kv_heads = one.range.heads_count(),
      .first_layer = one.range.layer_begin,
      .first_head = one.range.head_begin,
      .run_bytes = static_cast<uint32_t>(one.layout.run_bytes(one.id.codec)),
      .codec = static_cast<uint8_t>(one.id.codec),
      .keys = lane->device.as<uint64_t>(),
      .pages = {.base = base,
                .block_stride = static_cast<int64_t>(stride),
                .layer_stride = static_cast<int64_t>(one.layer_stride_bytes),
                .head_stride = static_cast<int64_t>(one.layout.run_bytes(one.id.codec)),
                .table = reinterpret_cast<const int32_t*>(lane->device.data() + areas.table_at)}};
}

absl::Status CudaDevice::ForEachBatch(
    absl::Span<const DeviceRuns> blocks,
    const std::function<absl::Status(Lane*, const Batch&)>& launch) {
  const OnDevice current(device_);
  OKV_RETURN_IF_ERROR(Check("cannot be used", current.error()));
  std::map<Shape, Batch> batches;
  for (size_t i = 0; i < blocks.size(); ++i) batches[ShapeOf(blocks[i])].members.push_back(i);
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, TakeLane());
  absl::Status status = FlushWrites();
  for (const auto& [shape, batch] : batches) {
    if (status.ok()) status = launch(lane.get(), batch);
  }
  // What was queued before an error still uses the lane.
  if (!status.ok()) static_cast<void>(cudaStreamSynchronize(lane->stream));
  GiveLane(std::move(lane));
  return status;
}

absl::Status CudaDevice::VerifyBatch(absl::Span<const DeviceRuns> blocks,
                                     absl::Span<const absl::Span<const uint32_t>> expected,
                                     Lane* lane, const Batch& batch,
                                     std::vector<absl::Status>* statuses) {
  const BlockRange& range = blocks[batch.members[0]].range;
  const size_t runs_of_block = range.runs_count();
  const Areas areas(batch.members.size(), runs_of_block, /*verify=*/true);
  OKV_RETURN_IF_ERROR(Reserve(lane, areas.bytes));
  const cuda::RunSet runs = Describe(blocks, batch, areas, lane);
  for (size_t b = 0; b < batch.members.size(); ++b) {
    const absl::Span<const uint32_t> one = expected[batch.members[b]];
    OKV_CHECK(one.size() == runs_of_block);
    std::memcpy(lane->host + areas.expected_at + b * runs_of_block * sizeof(uint32_t), one.data(),
                runs_of_block * sizeof(uint32_t));
  }
  auto* out = reinterpret_cast<uint32_t*>(lane->device.data() + areas.out_at);
  OKV_RETURN_IF_ERROR(Check("a copy", cudaMemcpyAsync(lane->device.data(), lane->host, areas.out_at,
                                                      cudaMemcpyHostToDevice, lane->stream)));
  OKV_RETURN_IF_ERROR(Check(
      "verification",
      cuda::VerifyRuns(runs,
                       reinterpret_cast<const uint32_t*>(lane->device.data() + areas.expected_at),
                       {.count = out, .bits = out + 1}, lane->stream)));
  OKV_RETURN_IF_ERROR(
      Check("a copy", cudaMemcpyAsync(lane->host + areas.out_at, out, areas.out_bytes,
                                      cudaMemcpyDeviceToHost, lane->stream)));
  OKV_RETURN_IF_ERROR(Check("verification", cudaStreamSynchronize(lane->stream)));
  const auto* found = reinterpret_cast<const uint32_t*>(lane->host + areas.out_at);
  for (const size_t i : batch.members) (*statuses)[i] = absl::OkStatus();
  if (found[0] == 0) return absl::OkStatus();
  for (size_t run = areas.runs_count; run-- > 0;) {  // The first bad run of a block stays.
    if ((found[1 + run / 32] >> (run % 32) & 1) == 0) continue;
    const size_t i = batch.members[run / runs_of_block];
    const size_t in_block = run % runs_of_block;
    (*statuses)[i] = absl::DataLossError(
        absl::StrCat(blocks[i].id.Name(), ": wrong checksum in layer ",
                     range.layer_begin + in_block / range.heads_count(), ", head ",
                     range.head_begin + in_block % range.heads_count()));
  }
  return absl::OkStatus();
}

absl::Status CudaDevice::ChecksumBatch(absl::Span<const DeviceRuns> blocks, Lane* lane,
                                       const Batch& batch,
                                       std::vector<std::vector<uint32_t>>* checksums) {
  const size_t runs_of_block = blocks[batch.members[0]].range.runs_count();
  const Areas areas(batch.members.size(), runs_of_block, /*verify=*/false);
  OKV_RETURN_IF_ERROR(Reserve(lane, areas.bytes));
  const cuda::RunSet runs = Describe(blocks, batch, areas, lane);
  auto* out = reinterpret_cast<uint32_t*>(lane->device.data() + areas.out_at);
  OKV_RETURN_IF_ERROR(Check("a copy", cudaMemcpyAsync(lane->device.data(), lane->host, areas.out_at,
                                                      cudaMemcpyHostToDevice, lane->stream)));
  OKV_RETURN_IF_ERROR(Check("checksums", cuda::ChecksumRuns(runs, out, lane->stream)));
  OKV_RETURN_IF_ERROR(
      Check("a copy", cudaMemcpyAsync(lane->host + areas.out_at, out, areas.out_bytes,
                                      cudaMemcpyDeviceToHost, lane->stream)));
  OKV_RETURN_IF_ERROR(Check("checksums", cudaStreamSynchronize(lane->stream)));
  const auto* found = reinterpret_cast<const uint32_t*>(lane->host + areas.out_at);
  for (size_t b = 0; b < batch.members.size(); ++b) {
    (*checksums)[batch.members[b]].assign(found + b * runs_of_block,
                                          found + (b + 1) * runs_of_block);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::vector<uint32_t>>> CudaDevice::Checksum(
    absl::Span<const DeviceRuns> blocks) {
  std::vector<std::vector<uint32_t>> checksums(blocks.size());
  OKV_RETURN_IF_ERROR(ForEachBatch(blocks, [&](Lane* lane, const Batch& batch) {
    return ChecksumBatch(blocks, lane, batch, &checksums);
  }));
  return checksums;
}

std::vector<absl::Status> CudaDevice::Verify(
    absl::Span<const DeviceRuns> blocks, absl::Span<const absl::Span<const uint32_t>> expected) {
  OKV_CHECK(blocks.size() == expected.size());
  std::vector<absl::Status> statuses(blocks.size(), absl::UnavailableError("not verified"));
  const absl::Status status = ForEachBatch(blocks, [&](Lane* lane, const Batch& batch) {
    return VerifyBatch(blocks, expected, lane, batch, &statuses);
  });
  if (status.ok()) return statuses;
  for (absl::Status& one : statuses) {
    if (absl::IsUnavailable(one)) one = status;  // Not looked at.
  }
  return statuses;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaDevice(int device) {
  const auto missing = [device](absl::string_view why) {
    return absl::NotFoundError(absl::StrCat("cuda:", device, " cannot be used: ", why));
  };
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return missing(cudaGetErrorString(error));
  }
  if (device < 0 || device >= count) {
    return missing(absl::StrCat("this machine has ", count, " CUDA devices"));
  }
  cudaDeviceProp properties = {};
  error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  // A device that no NIC writes into needs no flush, and does not have it.
  int is_written = 0;
  int ordering = 0;
  int flushes = 0;
  for (const auto& [value, attribute] :
       {std::pair(&is_written, cudaDevAttrGPUDirectRDMASupported),
        std::pair(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering),
        std::pair(&flushes, cudaDevAttrGPUDirectRDMAFlushWritesOptions)}) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  }
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return missing(cudaGetErrorString(error));
  }
  return std::make_unique<CudaDevice>(
      device, absl::StrCat("cuda:", device, " (", properties.name, ")"),
      is_written != 0 && ordering < cudaGPUDirectRDMAWritesOrderingOwner &&
          (flushes & cudaFlushGPUDirectRDMAWritesOptionHost) != 0);
}

}  // namespace okv
