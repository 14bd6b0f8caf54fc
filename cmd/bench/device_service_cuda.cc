#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cmd/bench/attend_case_kernels.h"
#include "cmd/bench/cuda_timing.h"
#include "cmd/bench/device_service_model.h"
#include "cmd/bench/different_bytes.h"
#include "cmd/bench/ipc.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/verify.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kChunkBlocks = 128;  // 8,192 tokens: a prefill chunk, quantized at once.
constexpr size_t kCopyBytes = size_t{2} << 30;
constexpr int kNothing = 0xff;  // As a scale: NaN.
constexpr uint32_t kStreamsMax = 32;

double SecondsSince(absl::Time begin) { return absl::ToDoubleSeconds(absl::Now() - begin); }

template <class Word>
absl::Span<const uint8_t> BytesOf(const std::vector<Word>& words) {
  return {reinterpret_cast<const uint8_t*>(words.data()), words.size() * sizeof(Word)};
}

class CudaModel final : public ServiceModel {
 public:
  explicit CudaModel(const ServiceModelOptions& options)
      : options_(options),
        layout_({.layers_count = options.shape.layers,
                 .kv_heads = options.shape.kv_heads,
                 .head_dim = options.shape.head_dim,
                 .group_size = options.shape.group_size}),
        block_bytes_(layout_.block_bytes(Codec::kInt2)) {}
  ~CudaModel() override {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }

  absl::Status Init();

  std::string device() const override { return device_; }
  bool on_device() const override { return true; }
  absl::Span<uint8_t> sealed() override { return {sealed_.data(), sealed_.bytes()}; }
  absl::Span<uint8_t> fetched() override { return {fetched_.data(), fetched_.bytes()}; }

  absl::StatusOr<double> Quantize() override;
  absl::Status Forget() override;
  absl::Status ClearFetched() override { return Clear(fetched_); }
  absl::StatusOr<double> Verify(absl::Span<const ObjectHeader> headers,
                                absl::Span<const uint32_t> slots) override;
  absl::StatusOr<uint64_t> CountDifferentBytes(absl::Span<const uint32_t> slots) override;
  absl::StatusOr<AttendResult> Attend(Pool pool, absl::Span<const uint32_t> slots) override;
  uint64_t quantize_bytes() const override { return k_.bytes() + v_.bytes() + sealed_.bytes(); }
  uint64_t attend_bytes() const override { return fetched_.bytes() + bf16_.bytes(); }
  absl::StatusOr<ServiceModelTimes> Measure(uint32_t rounds) override;
  absl::Status StartPeer(const std::string& directory) override;
  absl::StatusOr<double> CopyFromPeer(absl::Span<const uint32_t> slots, uint32_t streams) override;

 private:
  absl::Status AllocateInputs();
  absl::Status AllocatePools();
  absl::StatusOr<cuda::DeviceBuffer> Normal(size_t elements, uint64_t seed);
  absl::Status Clear(const cuda::DeviceBuffer& pool);
  absl::Status Wait(absl::string_view what) {
    return CudaStatus(cudaStreamSynchronize(stream_), what);
  }
  // Both are there when the call returns: a copy from pageable memory may otherwise be on its way
  // still, and this model's stream does not wait for it.
  absl::Status Upload(absl::Span<const uint8_t> bytes, const cuda::DeviceBuffer& to);
  absl::Status UploadSlots(absl::Span<const uint32_t> slots, const cuda::DeviceBuffer& table);

  cudaError_t QueueQuantize(cudaStream_t stream) const;
  cudaError_t QueueVerify(cudaStream_t stream) const;
  cudaError_t QueueAttend(const cuda::DeviceBuffer& pool, cudaStream_t stream) const;
  cuda::DecodeShape AttendShape() const;
  cuda::DecodeParams AttendParams(const cuda::DeviceBuffer& pool, uint32_t layer) const;

  const ServiceModelOptions options_;
  const PageLayout layout_;
  const uint64_t block_bytes_;
  std::string device_;
  cudaStream_t stream_ = nullptr;

  cuda::DeviceBuffer k_;  // [layers, tokens, kv_heads, head_dim] bf16, in the model's own basis
  cuda::DeviceBuffer v_;
  cuda::DeviceBuffer r_k_;  // [layers, head_dim, head_dim] bf16
  cuda::DeviceBuffer r_v_;
  cuda::DeviceBuffer rank_k_;  // [layers, kv_heads] u32
  cuda::DeviceBuffer rank_v_;
  cuda::DeviceBuffer bad_row_;
  cuda::DeviceBuffer sealed_;
  cuda::DeviceBuffer fetched_;
  cuda::DeviceBuffer kept_;
  cuda::DeviceBuffer bf16_;        // [kServiceBf16Blocks] bf16 blocks
  cuda::DeviceBuffer bf16_table_;  // Their slots, the sink's first
  cuda::DeviceBuffer q_;           // [layers, query_heads, head_dim] bf16
  cuda::DeviceBuffer out_;         // The same
  cuda::DeviceBuffer length_;
  cuda::DeviceBuffer workspace_;
  cuda::DeviceBuffer attend_table_;  // [blocks] i32: slots of the last Attend()
  cuda::DeviceBuffer verify_table_;  // ... of the last Verify()
  cuda::DeviceBuffer compare_table_;
  cuda::DeviceBuffer keys_;
  cuda::DeviceBuffer checksums_;  // [blocks, layers, kv_heads] u32
  cuda::DeviceBuffer failed_count_;
  cuda::DeviceBuffer failed_bits_;
  cuda::DeviceBuffer different_;

  std::unique_ptr<BlockCopier> copier_;
  std::unique_ptr<IpcArena> peer_;
};

absl::Status CudaModel::Init() {
  OKV_RETURN_IF_ERROR(TakeDevice(options_.gpus.worker));
  OKV_ASSIGN_OR_RETURN(device_, CudaDeviceName());
  if (cuda::DecodeWorkspaceBytes(AttendShape()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no kernel for --query_heads ", options_.query_heads, " --kv_heads ", layout_.kv_heads,
        " --head_dim ", layout_.head_dim, " --group_size ", layout_.group_size));
  }
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream"));
  OKV_RETURN_IF_ERROR(AllocatePools());
  OKV_RETURN_IF_ERROR(AllocateInputs());
  return CudaStatus(cudaDeviceSynchronize(), "making the sequence");
}

absl::StatusOr<cuda::DeviceBuffer> CudaModel::Normal(size_t elements, uint64_t seed) {
  OKV_ASSIGN_OR_RETURN(cuda::DeviceBuffer buffer, AllocateDevice(elements * 2));
  OKV_RETURN_IF_ERROR(
      CudaStatus(cuda::FillNormal(buffer.as<__nv_bfloat16>(), elements, 1.0f, seed, stream_),
                 "queueing the making of rows"));
  OKV_RETURN_IF_ERROR(Wait("making rows"));
  return buffer;
}

absl::Status CudaModel::AllocateInputs() {
  const RotationSet& rotations = *options_.rotations;
  OKV_CHECK(rotations.rotation_heads == 1);
  const size_t elements = size_t{layout_.layers_count} * options_.blocks * kBlockTokens *
                          layout_.kv_heads * layout_.head_dim;
  const size_t query_elements =
      size_t{layout_.layers_count} * options_.query_heads * layout_.head_dim;
  OKV_ASSIGN_OR_RETURN(k_, Normal(elements, options_.seed));
  OKV_ASSIGN_OR_RETURN(v_, Normal(elements, options_.seed + 1));
  OKV_ASSIGN_OR_RETURN(q_, Normal(query_elements, options_.seed + 2));
  OKV_ASSIGN_OR_RETURN(
      bf16_, Normal(kServiceBf16Blocks * layout_.block_bytes(Codec::kBf16) / 2, options_.seed + 3));
  OKV_ASSIGN_OR_RETURN(r_k_, DeviceCopyOf(rotations.r_k));
  OKV_ASSIGN_OR_RETURN(r_v_, DeviceCopyOf(rotations.r_v));
  OKV_ASSIGN_OR_RETURN(rank_k_, DeviceCopyOf(rotations.clip_rank_k));
  OKV_ASSIGN_OR_RETURN(rank_v_, DeviceCopyOf(rotations.clip_rank_v));
  OKV_ASSIGN_OR_RETURN(bad_row_, DeviceCopyOf(std::vector<uint64_t>{cuda::kNoBadRow}));
  std::vector<int32_t> bf16_slots;
  for (uint32_t i = 0; i < kServiceBf16Blocks; ++i) bf16_slots.push_back(static_cast<int32_t>(i));
  OKV_ASSIGN_OR_RETURN(bf16_table_, DeviceCopyOf(bf16_slots));
  const auto length = static_cast<int32_t>((options_.blocks + kServiceBf16Blocks) * kBlockTokens);
  OKV_ASSIGN_OR_RETURN(length_, DeviceCopyOf(std::vector<int32_t>{length}));
  OKV_ASSIGN_OR_RETURN(out_, AllocateDevice(query_elements * 2));
  OKV_ASSIGN_OR_RETURN(workspace_, AllocateDevice(cuda::DecodeWorkspaceBytes(AttendShape())));
  return absl::OkStatus();
}

absl::Status CudaModel::AllocatePools() {
  const uint64_t bytes = options_.blocks * block_bytes_;
  const size_t runs = options_.blocks * layout_.runs_count();
  OKV_ASSIGN_OR_RETURN(sealed_, AllocateDevice(bytes));
  OKV_ASSIGN_OR_RETURN(fetched_, AllocateDevice(bytes));
  OKV_ASSIGN_OR_RETURN(kept_, AllocateDevice(bytes));
  for (const cuda::DeviceBuffer* pool : {&sealed_, &fetched_, &kept_}) {
    OKV_RETURN_IF_ERROR(Clear(*pool));
  }
  OKV_ASSIGN_OR_RETURN(attend_table_, AllocateDevice(options_.blocks * sizeof(int32_t)));
  OKV_ASSIGN_OR_RETURN(verify_table_, AllocateDevice(options_.blocks * sizeof(int32_t)));
  OKV_ASSIGN_OR_RETURN(compare_table_, AllocateDevice(options_.blocks * sizeof(int32_t)));
  OKV_ASSIGN_OR_RETURN(keys_, AllocateDevice(options_.blocks * sizeof(BlockKey)));
  OKV_ASSIGN_OR_RETURN(checksums_, AllocateDevice(runs * sizeof(uint32_t)));
  OKV_ASSIGN_OR_RETURN(failed_count_, AllocateDevice(sizeof(uint32_t)));
  OKV_ASSIGN_OR_RETURN(failed_bits_, AllocateDevice((runs + 31) / 32 * sizeof(uint32_t)));
  OKV_ASSIGN_OR_RETURN(different_, AllocateDevice(sizeof(uint64_t)));
  return absl::OkStatus();
}

absl::Status CudaModel::Clear(const cuda::DeviceBuffer& pool) {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemsetAsync(pool.data(), kNothing, pool.bytes(), stream_),
                                 "queueing the clearing of a pool"));
  return Wait("clearing a pool");
}

absl::Status CudaModel::Upload(absl::Span<const uint8_t> bytes, const cuda::DeviceBuffer& to) {
  OKV_CHECK(bytes.size() == to.bytes());
  OKV_RETURN_IF_ERROR(CopyToDevice(bytes, /*offset=*/0, to));
  return CudaStatus(cudaDeviceSynchronize(), "copying to the device");
}

absl::Status CudaModel::UploadSlots(absl::Span<const uint32_t> slots,
                                    const cuda::DeviceBuffer& table) {
  const std::vector<int32_t> words(slots.begin(), slots.end());
  return Upload(BytesOf(words), table);
}

cudaError_t CudaModel::QueueQuantize(cudaStream_t stream) const {
  const int64_t row = int64_t{layout_.kv_heads} * layout_.head_dim;
  const auto rows = [&](const cuda::DeviceBuffer& buffer, uint32_t first_block) {
    return cuda::ConstPagedRows{
        .base = buffer.as<const __nv_bfloat16>() + first_block * int64_t{kBlockTokens} * row,
        .layer_stride = row * kBlockTokens * options_.blocks,
        .page_stride = row,
        .token_stride = 0,
        .head_stride = layout_.head_dim,
        .page_tokens = 1};
  };
  for (uint32_t first = 0; first < options_.blocks; first += kChunkBlocks) {
    const cudaError_t error = cuda::QuantizePages(
        {.layers_count = layout_.layers_count,
         .kv_heads = layout_.kv_heads,
         .head_dim = layout_.head_dim,
         .group_size = layout_.group_size,
         .blocks_count = std::min(kChunkBlocks, options_.blocks - first),
         .tokens_count = nullptr,
         .k = rows(k_, first),
         .v = rows(v_, first),
         .tokens = {},
         .rotations = {.k = r_k_.as<const __nv_bfloat16>(),
                       .v = r_v_.as<const __nv_bfloat16>(),
                       .rotation_heads = 1,
                       .early = true},
         .clip_rank_k = rank_k_.as<const uint32_t>(),
         .clip_rank_v = rank_v_.as<const uint32_t>(),
         .pages = {.base = sealed_.data() + first * block_bytes_,
                   .block_stride = static_cast<int64_t>(block_bytes_),
                   .layer_stride = static_cast<int64_t>(layout_.page_bytes(Codec::kInt2)),
                   .head_stride = static_cast<int64_t>(layout_.run_bytes(Codec::kInt2)),
                   .table = nullptr},
         .bad_row = bad_row_.as<uint64_t>()},
        stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

absl::StatusOr<double> CudaModel::Quantize() {
  const absl::Time begin = absl::Now();
  OKV_RETURN_IF_ERROR(CudaStatus(QueueQuantize(stream_), "queueing quantization"));
  OKV_RETURN_IF_ERROR(Wait("quantizing"));
  const double seconds = SecondsSince(begin);
  OKV_ASSIGN_OR_RETURN(const std::vector<uint64_t> bad, HostCopyOf<uint64_t>(bad_row_));
  if (bad[0] == cuda::kNoBadRow) return seconds;
  const cuda::BadRow row = cuda::DecodeBadRow(bad[0]);
  return absl::InternalError(absl::StrCat("quantizing: layer ", row.layer, ", token ", row.token,
                                          ", head ", row.head, " of random rows is bad"));
}

absl::Status CudaModel::Forget() {
  OKV_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(kept_.data(), sealed_.data(), sealed_.bytes(),
                                                 cudaMemcpyDeviceToDevice, stream_),
                                 "queueing a copy of the sealed blocks"));
  OKV_RETURN_IF_ERROR(Wait("keeping the sealed blocks aside"));
  OKV_RETURN_IF_ERROR(Clear(sealed_));
  return Clear(fetched_);
}

cudaError_t CudaModel::QueueVerify(cudaStream_t stream) const {
  return cuda::VerifyRuns(
      {.blocks_count = options_.blocks,
       .layers_count = layout_.layers_count,
       .kv_heads = layout_.kv_heads,
       .first_layer = 0,
       .first_head = 0,
       .run_bytes = static_cast<uint32_t>(layout_.run_bytes(Codec::kInt2)),
       .codec = static_cast<uint8_t>(Codec::kInt2),
       .keys = keys_.as<const uint64_t>(),
       .pages = {.base = fetched_.data(),
                 .block_stride = static_cast<int64_t>(block_bytes_),
                 .layer_stride = static_cast<int64_t>(layout_.page_bytes(Codec::kInt2)),
                 .head_stride = static_cast<int64_t>(layout_.run_bytes(Codec::kInt2)),
                 .table = verify_table_.as<const int32_t>()}},
      checksums_.as<const uint32_t>(),
      {.count = failed_count_.as<uint32_t>(), .bits = failed_bits_.as<uint32_t>()}, stream);
}

absl::StatusOr<double> CudaModel::Verify(absl::Span<const ObjectHeader> headers,
                                         absl::Span<const uint32_t> slots) {
  OKV_CHECK(headers.size() == options_.blocks);
  std::vector<uint32_t> checksums;
  std::vector<uint8_t> keys(keys_.bytes());
  for (size_t i = 0; i < headers.size(); ++i) {
    if (headers[i].checksums.size() != layout_.runs_count()) {
      return absl::DataLossError(
          absl::StrCat("block ", i, " came with ", headers[i].checksums.size(), " checksums"));
    }
    checksums.insert(checksums.end(), headers[i].checksums.begin(), headers[i].checksums.end());
    static_assert(sizeof(headers[i].id.key.bytes) == sizeof(BlockKey));
    std::memcpy(keys.data() + i * sizeof(BlockKey), headers[i].id.key.bytes.data(),
                sizeof(BlockKey));
  }
  OKV_RETURN_IF_ERROR(UploadSlots(slots, verify_table_));
  OKV_RETURN_IF_ERROR(Upload(keys, keys_));
  OKV_RETURN_IF_ERROR(Upload(BytesOf(checksums), checksums_));
  const absl::Time begin = absl::Now();
  OKV_RETURN_IF_ERROR(CudaStatus(QueueVerify(stream_), "queueing verification"));
  OKV_RETURN_IF_ERROR(Wait("verifying"));
  const double seconds = SecondsSince(begin);
  OKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> failed, HostCopyOf<uint32_t>(failed_count_));
  if (failed[0] == 0) return seconds;
  return absl::DataLossError(
      absl::StrCat(failed[0], " of ", checksums.size(), " runs failed verification"));
}

absl::StatusOr<uint64_t> CudaModel::CountDifferentBytes(absl::Span<const uint32_t> slots) {
  OKV_RETURN_IF_ERROR(UploadSlots(slots, compare_table_));
  OKV_RETURN_IF_ERROR(
      CudaStatus(cuda::CountDifferentBytes({.blocks = kept_.data(),
                                            .pool = fetched_.data(),
                                            .slots = compare_table_.as<const int32_t>(),
                                            .blocks_count = options_.blocks,
                                            .block_bytes = block_bytes_,
                                            .count = different_.as<unsigned long long>()},
                                           stream_),
                 "queueing a comparison"));
  OKV_RETURN_IF_ERROR(Wait("comparing blocks"));
  OKV_ASSIGN_OR_RETURN(const std::vector<uint64_t> count, HostCopyOf<uint64_t>(different_));
  return count[0];
}

cuda::DecodeShape CudaModel::AttendShape() const {
  return {.batch = 1,
          .query_tokens = 1,
          .query_heads = options_.query_heads,
          .kv_heads = layout_.kv_heads,
          .head_dim = layout_.head_dim,
          .group_size = layout_.group_size,
          .sink_blocks = kServiceSinkBlocks,
          .recent_blocks = kServiceRecentBlocks,
          .ring_blocks = kServiceRecentBlocks + 1,
          .sliding_window = 0};
}

cuda::DecodeParams CudaModel::AttendParams(const cuda::DeviceBuffer& pool, uint32_t layer) const {
  const size_t row = size_t{options_.query_heads} * layout_.head_dim;
  const size_t matrix = size_t{layout_.head_dim} * layout_.head_dim;
  cuda::DecodeParams params = {};
  params.shape = AttendShape();
  params.q = q_.as<const __nv_bfloat16>() + layer * row;
  params.r_k = r_k_.as<const __nv_bfloat16>() + layer * matrix;
  params.r_v = r_v_.as<const __nv_bfloat16>() + layer * matrix;
  params.rotation_heads = 1;
  params.int2_pages = pool.data() + layout_.run_offset(Codec::kInt2, layer, 0);
  params.int2_block_stride = static_cast<int64_t>(block_bytes_);
  params.int2_table = attend_table_.as<const int32_t>();
  params.int2_table_stride = options_.blocks;
  params.bf16_pages = bf16_.data() + layout_.run_offset(Codec::kBf16, layer, 0);
  params.bf16_block_stride = static_cast<int64_t>(layout_.block_bytes(Codec::kBf16));
  params.bf16_table = bf16_table_.as<const int32_t>();
  params.bf16_table_stride = kServiceBf16Blocks;
  params.lengths = length_.as<const int32_t>();
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(layout_.head_dim));
  params.out = out_.as<__nv_bfloat16>() + layer * row;
  params.workspace = workspace_.data();
  // In front of the first layer is the plan, which is not complete before.
  params.early_history = layer > 0;
  return params;
}

cudaError_t CudaModel::QueueAttend(const cuda::DeviceBuffer& pool, cudaStream_t stream) const {
  const cudaError_t planned =
      cuda::PlanDecode(AttendShape(), length_.as<const int32_t>(), workspace_.data(), stream);
  if (planned != cudaSuccess) return planned;
  for (uint32_t layer = 0; layer < layout_.layers_count; ++layer) {
    const cudaError_t error = cuda::Attend(AttendParams(pool, layer), stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

absl::StatusOr<ServiceModel::AttendResult> CudaModel::Attend(Pool pool,
                                                             absl::Span<const uint32_t> slots) {
  OKV_RETURN_IF_ERROR(UploadSlots(slots, attend_table_));
  OKV_RETURN_IF_ERROR(Clear(out_));
  AttendResult result;
  const absl::Time begin = absl::Now();
  OKV_RETURN_IF_ERROR(CudaStatus(QueueAttend(pool == Pool::kSealed ? sealed_ : fetched_, stream_),
                                 "queueing attention"));
  OKV_RETURN_IF_ERROR(Wait("attending"));
  result.seconds = SecondsSince(begin);
  OKV_ASSIGN_OR_RETURN(result.output, HostCopyOf<uint8_t>(out_));
  for (size_t at = 0; at + 1 < result.output.size(); at += 2) {
    if ((result.output[at + 1] & 0x7f) == 0x7f && (result.output[at] & 0x80) != 0) {
      return absl::InternalError(absl::StrCat("attending: output ", at / 2, " is not a number"));
    }
  }
  return result;
}

absl::StatusOr<ServiceModelTimes> CudaModel::Measure(uint32_t rounds) {
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  OKV_RETURN_IF_ERROR(
      timer->Add([this](cudaStream_t stream) { return QueueQuantize(stream); }).status());
  OKV_RETURN_IF_ERROR(
      timer->Add([this](cudaStream_t stream) { return QueueVerify(stream); }).status());
  OKV_RETURN_IF_ERROR(
      timer->Add([this](cudaStream_t stream) { return QueueAttend(fetched_, stream); }).status());
  OKV_RETURN_IF_ERROR(timer->AddCopy(kCopyBytes).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(rounds));
  return ServiceModelTimes{.quantize_seconds = us[0] * 1e-6,
                           .verify_seconds = us[1] * 1e-6,
                           .attend_seconds = us[2] * 1e-6,
                           .copy_bytes_per_second = 2.0 * kCopyBytes / (us[3] * 1e-6)};
}

absl::Status CudaModel::StartPeer(const std::string& directory) {
  OKV_ASSIGN_OR_RETURN(copier_, BlockCopier::Create(kStreamsMax));
  OKV_ASSIGN_OR_RETURN(
      peer_, IpcArena::Start(directory, {.block_bytes = block_bytes_, .blocks = options_.blocks},
                             options_.gpus.node));
  return absl::OkStatus();
}

absl::StatusOr<double> CudaModel::CopyFromPeer(absl::Span<const uint32_t> slots, uint32_t streams) {
  if (peer_ == nullptr) return absl::FailedPreconditionError("no peer was started");
  return copier_->Run({.from = peer_->data(),
                       .to = fetched_.data(),
                       .slots = slots,
                       .block_bytes = block_bytes_,
                       .streams = streams});
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceModel>> CreateCudaModel(const ServiceModelOptions& options) {
  auto model = std::make_unique<CudaModel>(options);
  OKV_RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace okv
