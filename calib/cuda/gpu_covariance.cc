#include "calib/cuda/gpu_covariance.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/cuda/covariance_kernels.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// X^T X of a head is one small matrix and a long sum: the sum is split over as many products as
// keep the GPU's 132 SMs busy, 32 heads x 8 splits.
constexpr size_t kSplitTokens = 512;
constexpr size_t kSplits = 8;
constexpr size_t kChunkTokens = kSplits * kSplitTokens;
constexpr size_t kScoresBytesMax = size_t{1} << 30;

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const auto code = error == cudaErrorMemoryAllocation ? absl::StatusCode::kResourceExhausted
                                                       : absl::StatusCode::kInternal;
  return absl::Status(code, absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

absl::Status BlasStatus(cublasStatus_t error, absl::string_view what) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const auto code = error == CUBLAS_STATUS_ALLOC_FAILED ? absl::StatusCode::kResourceExhausted
                                                        : absl::StatusCode::kInternal;
  return absl::Status(code, absl::StrCat(what, ": ", cublasGetStatusString(error)));
}

// Device memory that grows. Freed with the object.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  // Content is lost when it grows.
  absl::Status Reserve(size_t count) {
    if (count <= count_) return absl::OkStatus();
    cudaFree(data_);
    data_ = nullptr;
    count_ = 0;
    OKV_RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMalloc"));
    count_ = count;
    return absl::OkStatus();
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

// Some heads of a tensor, as cuBLAS sees them: rows of `stride` numbers.
template <typename T>
struct HeadRows {
  T* data;
  size_t stride;
};

}  // namespace

class GpuCovariance::State {
 public:
  explicit State(int device) : device_(device) {}
  ~State();
  absl::Status Init();

  // The mean over `tokens` of x^T x for each head of [layer's tokens, heads, dim] on the host.
  absl::StatusOr<std::vector<Matrix>> RowMeans(const std::vector<float>& tensor,
                                               const SequenceRange& tokens, uint32_t heads,
                                               uint32_t dim);
  absl::StatusOr<std::vector<Matrix>> OutputMeans(const LayerDump& layer,
                                                  const std::vector<SequenceRange>& ranges);
  absl::StatusOr<GpuWork> MeasureLimit();
  const GpuWork& work() const { return work_; }

 private:
  absl::Status BeginSums(uint32_t heads, uint32_t dim);
  // Adds x^T x of rows on the device, [tokens_count, heads, dim] in rows of heads * dim; at most
  // kChunkTokens.
  absl::Status AddRows(const float* rows, size_t tokens_count);
  // One matrix per head, divided by `rows_count`.
  absl::StatusOr<std::vector<Matrix>> EndSums(double rows_count);
  // The attention outputs of one sequence in outputs_, [tokens_count, query_heads, dim].
  absl::Status Attend(const LayerDump& layer, const SequenceRange& range);
  absl::Status Products(const LayerDump& layer, uint32_t tokens_count, uint32_t first_head,
                        uint32_t heads_count);
  absl::Status CopyRange(const std::vector<float>& tensor, size_t width, const SequenceRange& range,
                         DeviceArray<float>* to);
  // Stops the clock that was started before a product.
  absl::Status AddTime(double flop);

  const int device_;
  cudaStream_t stream_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  GpuWork work_;

  uint32_t heads_ = 0;  // Of the sums at hand.
  uint32_t dim_ = 0;
  DeviceArray<float> rows_;            // [kChunkTokens, heads * dim]
  DeviceArray<double> wide_;           // The same.
  DeviceArray<double> sums_;           // [kSplits, heads, dim, dim]
  DeviceArray<double> total_;          // [heads, dim, dim]
  DeviceArray<double*> row_pointers_;  // [kSplits, heads], into wide_
  DeviceArray<double*> sum_pointers_;  // [kSplits, heads], into sums_

  DeviceArray<float> q_;  // Of one sequence.
  DeviceArray<float> k_;
  DeviceArray<float> v_;
  DeviceArray<float> scores_;   // [heads_count, tokens, tokens]
  DeviceArray<float> outputs_;  // [tokens, query_heads, dim]
};

GpuCovariance::State::~State() {
  cudaSetDevice(device_);
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
  if (blas_ != nullptr) cublasDestroy(blas_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status GpuCovariance::State::Init() {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreate(&stream_), "cudaStreamCreate"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&begin_), "cudaEventCreate"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&end_), "cudaEventCreate"));
  OKV_RETURN_IF_ERROR(BlasStatus(cublasCreate(&blas_), "cublasCreate"));
  OKV_RETURN_IF_ERROR(BlasStatus(cublasSetStream(blas_, stream_), "cublasSetStream"));
  // fp32 products stay fp32: TF32's 10 bits are too few for logits of 100.
  return BlasStatus(cublasSetMathMode(blas_, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
}

absl::Status GpuCovariance::State::AddTime(double flop) {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end_, stream_), "cudaEventRecord"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end_), "a matrix product"));
  float milliseconds = 0;
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime"));
  work_.flop += flop;
  work_.seconds += milliseconds / 1e3;
  return absl::OkStatus();
}

absl::Status GpuCovariance::State::BeginSums(uint32_t heads, uint32_t dim) {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  heads_ = heads;
  dim_ = dim;
  const size_t width = size_t{heads} * dim;
  const size_t matrices = size_t{heads} * dim * dim;
  OKV_RETURN_IF_ERROR(rows_.Reserve(kChunkTokens * width));
  OKV_RETURN_IF_ERROR(wide_.Reserve(kChunkTokens * width));
  OKV_RETURN_IF_ERROR(sums_.Reserve(kSplits * matrices));
  OKV_RETURN_IF_ERROR(total_.Reserve(matrices));
  OKV_RETURN_IF_ERROR(row_pointers_.Reserve(kSplits * heads));
  OKV_RETURN_IF_ERROR(sum_pointers_.Reserve(kSplits * heads));
  std::vector<double*> rows;
  std::vector<double*> sums;
  for (size_t split = 0; split < kSplits; ++split) {
    for (size_t head = 0; head < heads; ++head) {
      rows.push_back(wide_.data() + split * kSplitTokens * width + head * dim);
      sums.push_back(sums_.data() + split * matrices + head * dim * dim);
    }
  }
  for (const auto& [from, to] :
       {std::pair(&rows, &row_pointers_), std::pair(&sums, &sum_pointers_)}) {
    OKV_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpyAsync(to->data(), from->data(), from->size() * sizeof(double*),
                                   cudaMemcpyHostToDevice, stream_),
                   "copying addresses"));
  }
  OKV_RETURN_IF_ERROR(CudaStatus(
      cudaMemsetAsync(sums_.data(), 0, kSplits * matrices * sizeof(double), stream_), "clearing"));
  // `rows` and `sums` must outlive their copies.
  return CudaStatus(cudaStreamSynchronize(stream_), "copying addresses");
}

absl::Status GpuCovariance::State::AddRows(const float* rows, size_t tokens_count) {
  OKV_CHECK(tokens_count <= kChunkTokens);
  const size_t width = size_t{heads_} * dim_;
  const size_t splits = (tokens_count + kSplitTokens - 1) / kSplitTokens;
  OKV_RETURN_IF_ERROR(CudaStatus(
      cuda::Widen({.narrow = rows, .wide = wide_.data(), .count = tokens_count * width}, stream_),
      "widening"));
  // Rows of zeros up to whole splits add nothing.
  OKV_RETURN_IF_ERROR(CudaStatus(
      cudaMemsetAsync(wide_.data() + tokens_count * width, 0,
                      (splits * kSplitTokens - tokens_count) * width * sizeof(double), stream_),
      "clearing"));
  const double one = 1;
  const int dim = static_cast<int>(dim_);
  OKV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin_, stream_), "cudaEventRecord"));
  // Column-major, rows are columns: X X^T.
  OKV_RETURN_IF_ERROR(BlasStatus(
      cublasDgemmBatched(blas_, CUBLAS_OP_N, CUBLAS_OP_T, dim, dim, static_cast<int>(kSplitTokens),
                         &one, row_pointers_.data(), static_cast<int>(width), row_pointers_.data(),
                         static_cast<int>(width), &one, sum_pointers_.data(), dim,
                         static_cast<int>(splits * heads_)),
      "cublasDgemmBatched"));
  return AddTime(2.0 * static_cast<double>(splits * kSplitTokens) * static_cast<double>(width) *
                 dim_);
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::State::EndSums(double rows_count) {
  const size_t matrix = size_t{dim_} * dim_;
  OKV_RETURN_IF_ERROR(CudaStatus(cuda::AddSplits({.parts = sums_.data(),
                                                  .out = total_.data(),
                                                  .splits_count = kSplits,
                                                  .count = heads_ * matrix},
                                                 stream_),
                                 "adding"));
  std::vector<double> totals(heads_ * matrix);
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(totals.data(), total_.data(), totals.size() * sizeof(double),
                                 cudaMemcpyDeviceToHost, stream_),
                 "copying sums"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "adding"));
  std::vector<Matrix> means;
  for (uint32_t head = 0; head < heads_; ++head) {
    means.emplace_back(totals.begin() + static_cast<ptrdiff_t>(head * matrix),
                       totals.begin() + static_cast<ptrdiff_t>((head + 1) * matrix));
    Symmetrize(dim_, &means.back());
    Scale(1.0 / rows_count, &means.back());
  }
  return means;
}

absl::Status GpuCovariance::State::CopyRange(const std::vector<float>& tensor, size_t width,
                                             const SequenceRange& range, DeviceArray<float>* to) {
  OKV_RETURN_IF_ERROR(to->Reserve(range.tokens_count * width));
  return CudaStatus(
      cudaMemcpyAsync(to->data(), tensor.data() + range.first_token * width,
                      range.tokens_count * width * sizeof(float), cudaMemcpyHostToDevice, stream_),
      "copying rows");
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::State::RowMeans(const std::vector<float>& tensor,
                                                                   const SequenceRange& tokens,
                                                                   uint32_t heads, uint32_t dim) {
  OKV_RETURN_IF_ERROR(BeginSums(heads, dim));
  for (uint32_t done = 0; done < tokens.tokens_count; done += kChunkTokens) {
    const SequenceRange chunk = {
        .first_token = tokens.first_token + done,
        .tokens_count = std::min(tokens.tokens_count - done, static_cast<uint32_t>(kChunkTokens))};
    OKV_RETURN_IF_ERROR(CopyRange(tensor, size_t{heads} * dim, chunk, &rows_));
    OKV_RETURN_IF_ERROR(AddRows(rows_.data(), chunk.tokens_count));
  }
  return EndSums(tokens.tokens_count);
}

absl::Status GpuCovariance::State::Products(const LayerDump& layer, uint32_t tokens_count,
                                            uint32_t first_head, uint32_t heads_count) {
  const float one = 1;
  const float zero = 0;
  const int tokens = static_cast<int>(tokens_count);
  const int dim = static_cast<int>(layer.head_dim);
  const size_t scores = size_t{tokens_count} * tokens_count;
  const uint32_t group = layer.query_heads / layer.kv_heads;
  const HeadRows<float> q{q_.data(), size_t{layer.query_heads} * layer.head_dim};
  const size_t kv_stride = size_t{layer.kv_heads} * layer.head_dim;
  for (uint32_t i = 0; i < heads_count; ++i) {
    const size_t head = first_head + i;
    OKV_RETURN_IF_ERROR(BlasStatus(
        cublasSgemm(blas_, CUBLAS_OP_T, CUBLAS_OP_N, tokens, tokens, dim, &one,
                    k_.data() + head / group * layer.head_dim, static_cast<int>(kv_stride),
                    q.data + head * layer.head_dim, static_cast<int>(q.stride), &zero,
                    scores_.data() + i * scores, tokens),
        "cublasSgemm"));
  }
  OKV_RETURN_IF_ERROR(CudaStatus(
      cuda::CausalSoftmax({.scores = scores_.data(),
                           .heads_count = heads_count,
                           .tokens_count = tokens_count,
                           .scale = 1.0f / std::sqrt(static_cast<float>(layer.head_dim))},
                          stream_),
      "the softmax"));
  for (uint32_t i = 0; i < heads_count; ++i) {
    const size_t head = first_head + i;
    OKV_RETURN_IF_ERROR(BlasStatus(
        cublasSgemm(blas_, CUBLAS_OP_N, CUBLAS_OP_N, dim, tokens, tokens, &one,
                    v_.data() + head / group * layer.head_dim, static_cast<int>(kv_stride),
                    scores_.data() + i * scores, tokens, &zero,
                    outputs_.data() + head * layer.head_dim, static_cast<int>(q.stride)),
        "cublasSgemm"));
  }
  return absl::OkStatus();
}

absl::Status GpuCovariance::State::Attend(const LayerDump& layer, const SequenceRange& range) {
  const size_t q_width = size_t{layer.query_heads} * layer.head_dim;
  const size_t kv_width = size_t{layer.kv_heads} * layer.head_dim;
  OKV_RETURN_IF_ERROR(CopyRange(layer.q, q_width, range, &q_));
  OKV_RETURN_IF_ERROR(CopyRange(layer.k, kv_width, range, &k_));
  OKV_RETURN_IF_ERROR(CopyRange(layer.v, kv_width, range, &v_));
  OKV_RETURN_IF_ERROR(outputs_.Reserve(range.tokens_count * q_width));
  const size_t head_scores = size_t{range.tokens_count} * range.tokens_count;
  const size_t together =
      std::clamp<size_t>(kScoresBytesMax / sizeof(float) / head_scores, 1, layer.query_heads);
  OKV_RETURN_IF_ERROR(scores_.Reserve(together * head_scores));
  for (uint32_t head = 0; head < layer.query_heads; head += static_cast<uint32_t>(together)) {
    const uint32_t count = std::min(layer.query_heads - head, static_cast<uint32_t>(together));
    OKV_RETURN_IF_ERROR(Products(layer, range.tokens_count, head, count));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::State::OutputMeans(
    const LayerDump& layer, const std::vector<SequenceRange>& ranges) {
  OKV_RETURN_IF_ERROR(BeginSums(layer.query_heads, layer.head_dim));
  const size_t width = size_t{layer.query_heads} * layer.head_dim;
  double tokens_count = 0;
  for (const SequenceRange& range : ranges) {
    OKV_RETURN_IF_ERROR(Attend(layer, range));
    for (uint32_t first = 0; first < range.tokens_count; first += kChunkTokens) {
      OKV_RETURN_IF_ERROR(AddRows(outputs_.data() + first * width,
                                  std::min<size_t>(range.tokens_count - first, kChunkTokens)));
    }
    tokens_count += range.tokens_count;
  }
  return EndSums(tokens_count);
}

absl::StatusOr<GpuWork> GpuCovariance::State::MeasureLimit() {
  constexpr int kSize = 4096;
  constexpr int kRounds = 5;
  OKV_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
  DeviceArray<double> matrices[3];
  for (DeviceArray<double>& one : matrices) {
    OKV_RETURN_IF_ERROR(one.Reserve(size_t{kSize} * kSize));
    OKV_RETURN_IF_ERROR(CudaStatus(
        cudaMemsetAsync(one.data(), 0x3f, size_t{kSize} * kSize * sizeof(double), stream_),
        "filling"));
  }
  const GpuWork before = work_;
  const double one = 1;
  const double zero = 0;
  GpuWork best;
  for (int round = 0; round < kRounds; ++round) {
    work_ = {};
    OKV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin_, stream_), "cudaEventRecord"));
    OKV_RETURN_IF_ERROR(BlasStatus(
        cublasDgemm(blas_, CUBLAS_OP_N, CUBLAS_OP_T, kSize, kSize, kSize, &one, matrices[0].data(),
                    kSize, matrices[1].data(), kSize, &zero, matrices[2].data(), kSize),
        "cublasDgemm"));
    OKV_RETURN_IF_ERROR(AddTime(2.0 * kSize * kSize * kSize));
    if (work_.flop_per_s() > best.flop_per_s()) best = work_;
  }
  work_ = before;
  return best;
}

GpuCovariance::GpuCovariance(std::unique_ptr<State> state) : state_(std::move(state)) {}
GpuCovariance::~GpuCovariance() = default;

absl::StatusOr<int> GpuCovariance::DevicesCount() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    return absl::NotFoundError(absl::StrCat("no GPU: ", cudaGetErrorString(error)));
  }
  return count;
}

absl::StatusOr<std::unique_ptr<GpuCovariance>> GpuCovariance::Create(int device) {
  OKV_ASSIGN_OR_RETURN(const int count, DevicesCount());
  if (device < 0 || device >= count) {
    return absl::NotFoundError(absl::StrCat("there is no GPU ", device, ", there are ", count));
  }
  auto state = std::make_unique<State>(device);
  OKV_RETURN_IF_ERROR(state->Init());
  return std::unique_ptr<GpuCovariance>(new GpuCovariance(std::move(state)));
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::Queries(const LayerDump& layer,
                                                           const SequenceRange& tokens) {
  OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> per_query_head,
                       state_->RowMeans(layer.q, tokens, layer.query_heads, layer.head_dim));
  return PoolQueryHeads(per_query_head, layer.kv_heads);
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::Keys(const LayerDump& layer,
                                                        const SequenceRange& tokens) {
  return state_->RowMeans(layer.k, tokens, layer.kv_heads, layer.head_dim);
}

absl::StatusOr<std::vector<Matrix>> GpuCovariance::SoftmaxValues(
    const LayerDump& layer, const std::vector<SequenceRange>& ranges) {
  OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> per_query_head,
                       state_->OutputMeans(layer, ranges));
  return PoolQueryHeads(per_query_head, layer.kv_heads);
}

GpuWork GpuCovariance::work() const { return state_->work(); }

absl::StatusOr<GpuWork> GpuCovariance::MeasureLimit() { return state_->MeasureLimit(); }

}  // namespace okv
