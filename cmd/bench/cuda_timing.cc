#include "cmd/bench/cuda_timing.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(text);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
      return absl::UnavailableError(text);
    default:
      return absl::InternalError(text);
  }
}

absl::Status TakeDevice(uint32_t device) {
  const cudaError_t error = cudaSetDevice(static_cast<int>(device));
  if (error == cudaErrorInvalidDevice) {
    return absl::UnavailableError(absl::StrCat("there is no GPU ", device));
  }
  return CudaStatus(error, absl::StrCat("taking GPU ", device));
}

absl::StatusOr<cuda::DeviceBuffer> AllocateDevice(size_t bytes) {
  cuda::DeviceBuffer buffer;
  OKV_RETURN_IF_ERROR(
      CudaStatus(buffer.Allocate(bytes), absl::StrCat("allocating ", bytes, " bytes")));
  return buffer;
}

absl::Status CopyToDevice(absl::Span<const uint8_t> from, size_t offset,
                          const cuda::DeviceBuffer& to) {
  OKV_CHECK(offset <= to.bytes() && from.size() <= to.bytes() - offset);
  return CudaStatus(
      cudaMemcpy(to.data() + offset, from.data(), from.size(), cudaMemcpyHostToDevice),
      "copying to the device");
}

absl::Status CopyFromDevice(const cuda::DeviceBuffer& from, size_t offset, absl::Span<uint8_t> to) {
  OKV_CHECK(offset <= from.bytes() && to.size() <= from.bytes() - offset);
  return CudaStatus(cudaMemcpy(to.data(), from.data() + offset, to.size(), cudaMemcpyDeviceToHost),
                    "copying from the device");
}

absl::StatusOr<cuda::DeviceBuffer> RandomBf16OnDevice(size_t bytes, float scale, uint64_t seed) {
  constexpr size_t kPatternBytes = size_t{16} << 20;
  OKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer buffer, AllocateDevice(bytes));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> pattern(std::min(bytes, kPatternBytes) / 2);
  for (uint16_t& value : pattern) value = FloatToBf16(normal(random));
  const auto* const pattern_bytes = reinterpret_cast<const uint8_t*>(pattern.data());
  for (size_t at = 0; at < bytes; at += kPatternBytes) {
    OKV_RETURN_IF_ERROR(CopyToDevice(
        absl::MakeConstSpan(pattern_bytes, std::min(bytes - at, pattern.size() * 2)), at, buffer));
  }
  return buffer;
}

absl::StatusOr<std::unique_ptr<CudaTimer>> CudaTimer::Create() {
  std::unique_ptr<CudaTimer> timer(new CudaTimer());
  OKV_RETURN_IF_ERROR(timer->Init());
  return timer;
}

absl::Status CudaTimer::Init() {
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&begin_), "creating an event"));
  return CudaStatus(cudaEventCreate(&end_), "creating an event");
}

CudaTimer::~CudaTimer() {
  if (stream_ != nullptr) static_cast<void>(cudaStreamSynchronize(stream_));
  for (const Contender& contender : contenders_) {
    if (contender.graph != nullptr) static_cast<void>(cudaGraphExecDestroy(contender.graph));
  }
  if (begin_ != nullptr) static_cast<void>(cudaEventDestroy(begin_));
  if (end_ != nullptr) static_cast<void>(cudaEventDestroy(end_));
  if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
}

absl::StatusOr<size_t> CudaTimer::Add(absl::FunctionRef<cudaError_t(cudaStream_t)> queue) {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
                                 "beginning a capture"));
  const cudaError_t queued = queue(stream_);
  cudaGraph_t graph = nullptr;
  // Ends the capture even when queueing failed: the stream is of no use before.
  const cudaError_t captured = cudaStreamEndCapture(stream_, &graph);
  cudaGraphExec_t executable = nullptr;
  cudaError_t instantiated = cudaSuccess;
  if (queued == cudaSuccess && captured == cudaSuccess) {
    instantiated = cudaGraphInstantiate(&executable, graph, /*flags=*/0);
  }
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  OKV_RETURN_IF_ERROR(CudaStatus(queued, "queueing what is to be timed"));
  OKV_RETURN_IF_ERROR(CudaStatus(captured, "capturing what is to be timed"));
  OKV_RETURN_IF_ERROR(CudaStatus(instantiated, "instantiating the captured graph"));
  contenders_.push_back({.graph = executable});
  return contenders_.size() - 1;
}

absl::StatusOr<size_t> CudaTimer::AddCopy(size_t bytes) {
  OKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer from, AllocateDevice(bytes));
  OKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer to, AllocateDevice(bytes));
  // Pages that were never written may be read faster than memory allows.
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemset(from.data(), 0x5a, bytes), "filling a buffer"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemset(to.data(), 0, bytes), "filling a buffer"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "filling a buffer"));
  contenders_.push_back({.from = from.data(), .to = to.data(), .bytes = bytes});
  copies_.push_back(std::move(from));
  copies_.push_back(std::move(to));
  return contenders_.size() - 1;
}

cudaError_t CudaTimer::Queue(const Contender& contender) {
  if (contender.graph != nullptr) return cudaGraphLaunch(contender.graph, stream_);
  return cudaMemcpyAsync(contender.to, contender.from, contender.bytes, cudaMemcpyDeviceToDevice,
                         stream_);
}

absl::StatusOr<double> CudaTimer::ReplayUs(const Contender& contender) {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin_, stream_), "recording an event"));
  OKV_RETURN_IF_ERROR(CudaStatus(Queue(contender), "launching what is to be timed"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end_, stream_), "recording an event"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end_), "running what is to be timed"));
  float milliseconds = 0;
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&milliseconds, begin_, end_), "reading an event's time"));
  return milliseconds * 1e3;
}

absl::StatusOr<std::vector<double>> CudaTimer::MedianUs(uint32_t rounds) {
  OKV_CHECK(rounds > 0);
  std::vector<std::vector<double>> times(contenders_.size());
  for (uint32_t round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < contenders_.size(); ++i) {
      OKV_ASSIGN_OR_RETURN(const double us, ReplayUs(contenders_[i]));
      if (round > 0) times[i].push_back(us);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& list : times) {
    std::sort(list.begin(), list.end());
    medians.push_back((list[(list.size() - 1) / 2] + list[list.size() / 2]) / 2);
  }
  return medians;
}

std::string CudaBenchReport::ToTable() const {
  std::string table = absl::StrFormat("%s; %s\n%-36s %10s %12s %9s %9s %9s\n", device, shape, "",
                                      "us", "bytes", "GB/s", "of copy", "promised");
  for (const CudaBenchRow& row : rows) {
    absl::StrAppendFormat(&table, "%-36s %10.2f %12.0f %9.0f %8.1f%%", row.name, row.us, row.bytes,
                          row.gb_per_s(), row.limit_share() * 100);
    if (row.us_limit > 0) {
      absl::StrAppendFormat(&table, " %6.2f us%s", row.us_limit,
                            row.us <= row.us_limit ? "" : ", missed");
    }
    table += "\n";
  }
  return table;
}

std::string CudaBenchReport::ToJson() const {
  nlohmann::json lines = nlohmann::json::array();
  for (const CudaBenchRow& row : rows) {
    lines.push_back({{"name", row.name},
                     {"us", row.us},
                     {"bytes", row.bytes},
                     {"gb_per_s", row.gb_per_s()},
                     {"copy_gb_per_s", row.copy_bytes_per_us * 1e-3},
                     {"limit_share", row.limit_share()}});
    lines.back()["copy_us"] = row.bytes / row.copy_bytes_per_us;  // The limit, at the copy rate
    if (row.us_limit > 0) lines.back()["us_limit"] = row.us_limit;
    if (row.step_us > 0) lines.back()["step_us"] = row.step_us;
  }
  return nlohmann::json({{"device", device}, {"shape", shape}, {"rows", lines}}).dump();
}

absl::StatusOr<std::string> CudaDeviceName() {
  int device = 0;
  int driver = 0;
  cudaDeviceProp properties;
  OKV_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&device), "asking for the device"));
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties, device), "asking for the device"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&driver), "asking for the driver"));
  return absl::StrFormat("%s, CUDA driver %d.%d", properties.name, driver / 1000,
                         driver % 1000 / 10);
}

}  // namespace okv
