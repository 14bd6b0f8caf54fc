#include "calib/all_reduce_nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::Status NcclStatus(ncclResult_t error, absl::string_view what) {
  if (error == ncclSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", ncclGetErrorString(error)));
}

class NcclRank : public AllReduce {
 public:
  NcclRank(std::unique_ptr<AllReduce> control, int device)
      : control_(std::move(control)), device_(device) {}
  ~NcclRank() override;
  absl::Status Init();

  uint32_t rank() const override { return control_->rank(); }
  uint32_t ranks_count() const override { return control_->ranks_count(); }
  absl::Status Sum(absl::Span<double> values) override;

 private:
  absl::Status Reserve(size_t count);

  std::unique_ptr<AllReduce> control_;  // Until the rank leaves.
  const int device_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  double* buffer_ = nullptr;  // [buffer_count_], on the device
  size_t buffer_count_ = 0;
  bool broken_ = false;
};

NcclRank::~NcclRank() {
  // First: who waits for this rank in a sum hears that it has left, and leaves too. A
  // communicator's end is a call of all ranks of a host, says NCCL, and may wait for theirs.
  control_.reset();
  cudaSetDevice(device_);
  // After a failed sum they may not come any more.
  if (comm_ != nullptr) broken_ ? ncclCommAbort(comm_) : ncclCommDestroy(comm_);
  cudaFree(buffer_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status NcclRank::Init() {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreate(&stream_), "cudaStreamCreate"));
  ncclUniqueId id;
  std::vector<double> bytes(sizeof(id), 0.0);  // Zeros on the others: the sum is rank 0's.
  if (rank() == 0) {
    OKV_RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id), "ncclGetUniqueId"));
    for (size_t i = 0; i < sizeof(id); ++i) {
      bytes[i] = reinterpret_cast<const unsigned char*>(&id)[i];
    }
  }
  OKV_RETURN_IF_ERROR(control_->Sum(absl::MakeSpan(bytes)));
  for (size_t i = 0; i < sizeof(id); ++i) {
    reinterpret_cast<unsigned char*>(&id)[i] = static_cast<unsigned char>(bytes[i]);
  }
  return NcclStatus(
      ncclCommInitRank(&comm_, static_cast<int>(ranks_count()), id, static_cast<int>(rank())),
      "ncclCommInitRank");
}

absl::Status NcclRank::Reserve(size_t count) {
  if (count <= buffer_count_) return absl::OkStatus();
  cudaFree(buffer_);
  buffer_ = nullptr;
  buffer_count_ = 0;
  OKV_RETURN_IF_ERROR(CudaStatus(
      cudaMalloc(reinterpret_cast<void**>(&buffer_), count * sizeof(double)), "cudaMalloc"));
  buffer_count_ = count;
  return absl::OkStatus();
}

absl::Status NcclRank::Sum(absl::Span<double> values) {
  broken_ = true;  // Until this sum is made.
  OKV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  // Before the ranks meet: behind that the other's kernel may already wait for this rank's, and
  // between GPUs of one process that reach each other's memory, as NCCL lets them, cudaFree and
  // cudaMalloc may wait for the kernels of both.
  OKV_RETURN_IF_ERROR(Reserve(values.size()));
  // The largest count, by way of as many places as there are ranks: equal on all, or refused.
  std::vector<double> counts(ranks_count(), 0.0);
  counts[rank()] = static_cast<double>(values.size());
  OKV_RETURN_IF_ERROR(control_->Sum(absl::MakeSpan(counts)));
  for (const double count : counts) {
    if (count != counts[0]) {
      return absl::InvalidArgumentError("the ranks sum different counts of numbers");
    }
  }
  const size_t bytes = values.size() * sizeof(double);
  OKV_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(buffer_, values.data(), bytes, cudaMemcpyHostToDevice, stream_), "copying"));
  OKV_RETURN_IF_ERROR(NcclStatus(
      ncclAllReduce(buffer_, buffer_, values.size(), ncclFloat64, ncclSum, comm_, stream_),
      "ncclAllReduce"));
  OKV_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(values.data(), buffer_, bytes, cudaMemcpyDeviceToHost, stream_), "copying"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "ncclAllReduce"));
  broken_ = false;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<AllReduce>> MakeNcclRank(std::unique_ptr<AllReduce> control,
                                                        int device) {
  auto rank = std::make_unique<NcclRank>(std::move(control), device);
  OKV_RETURN_IF_ERROR(rank->Init());
  return rank;
}

}  // namespace okv
