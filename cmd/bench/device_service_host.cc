#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cmd/bench/device_service_model.h"
#include "cmd/bench/sample.h"
#include "kernels/attend.h"
#include "kernels/quantize.h"
#include "kernels/thread_pool.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kPatternElements = size_t{4} << 20;
constexpr size_t kCopyBytes = size_t{256} << 20;
constexpr uint8_t kNothing = 0xff;  // As a scale: NaN.

double SecondsSince(absl::Time begin) { return absl::ToDoubleSeconds(absl::Now() - begin); }

// The first error of several threads. Thread-safe.
class FirstError {
 public:
  void Update(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    status_.Update(status);
  }
  absl::Status status() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    return status_;
  }

 private:
  Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

class HostModel final : public ServiceModel {
 public:
  explicit HostModel(const ServiceModelOptions& options)
      : options_(options),
        layout_({.layers_count = options.shape.layers,
                 .kv_heads = options.shape.kv_heads,
                 .head_dim = options.shape.head_dim,
                 .group_size = options.shape.group_size}),
        block_bytes_(layout_.block_bytes(Codec::kInt2)),
        pool_(std::max(1u, std::thread::hardware_concurrency())) {}

  absl::Status Init();

  std::string device() const override {
    return absl::StrCat("host memory, ", pool_.threads_count(), " threads");
  }
  bool on_device() const override { return false; }
  absl::Span<uint8_t> sealed() override { return sealed_->span(); }
  absl::Span<uint8_t> fetched() override { return fetched_->span(); }

  absl::StatusOr<double> Quantize() override;
  absl::Status Forget() override;
  absl::Status ClearFetched() override;
  absl::StatusOr<double> Verify(absl::Span<const ObjectHeader> headers,
                                absl::Span<const uint32_t> slots) override;
  absl::StatusOr<uint64_t> CountDifferentBytes(absl::Span<const uint32_t> slots) override;
  absl::StatusOr<AttendResult> Attend(Pool pool, absl::Span<const uint32_t> slots) override;
  uint64_t quantize_bytes() const override {
    return options_.blocks * (layout_.block_bytes(Codec::kBf16) + block_bytes_);
  }
  uint64_t attend_bytes() const override {
    return options_.blocks * block_bytes_ +
           kServiceBf16Blocks * uint64_t{layout_.block_bytes(Codec::kBf16)};
  }
  absl::StatusOr<ServiceModelTimes> Measure(uint32_t rounds) override;
  absl::Status StartPeer(const std::string& /*directory*/) override {
    return absl::UnimplementedError("copies between two processes are the GPU's");
  }
  absl::StatusOr<double> CopyFromPeer(absl::Span<const uint32_t> /*slots*/,
                                      uint32_t /*streams*/) override {
    return absl::FailedPreconditionError("no peer was started");
  }

 private:
  // 64 rows of the model's K or V, [64][head_dim]: the same for the same arguments.
  const uint16_t* Rows(uint32_t block, uint32_t layer, uint32_t head, bool is_value) const;
  absl::Status QuantizeBlock(uint32_t block);

  const ServiceModelOptions options_;
  const PageLayout layout_;
  const uint64_t block_bytes_;
  ThreadPool pool_;
  std::vector<uint16_t> pattern_;  // Normal bf16 values.
  std::unique_ptr<PayloadMemory> sealed_;
  std::unique_ptr<PayloadMemory> fetched_;
  std::vector<uint8_t> kept_;
  std::vector<uint8_t> bf16_;   // [kServiceBf16Blocks] bf16 blocks
  std::vector<float> queries_;  // [layers, query_heads, head_dim]
  std::vector<ObjectHeader> verified_headers_;
  std::vector<uint32_t> verified_slots_;
  std::vector<uint32_t> attended_slots_;
};

absl::Status HostModel::Init() {
  const uint64_t bytes = options_.blocks * block_bytes_;
  OKV_ASSIGN_OR_RETURN(sealed_, PayloadMemory::Create(bytes));
  OKV_ASSIGN_OR_RETURN(fetched_, PayloadMemory::Create(bytes));
  std::mt19937_64 random(options_.seed);
  std::normal_distribution<float> normal;
  pattern_.resize(kPatternElements);
  for (uint16_t& value : pattern_) value = FloatToBf16(normal(random));
  queries_.resize(size_t{options_.shape.layers} * options_.query_heads * options_.shape.head_dim);
  for (float& value : queries_) value = normal(random);
  bf16_.resize(kServiceBf16Blocks * layout_.block_bytes(Codec::kBf16));
  for (size_t at = 0; at < bf16_.size(); at += sizeof(uint16_t)) {
    const uint16_t value = FloatToBf16(normal(random));
    std::memcpy(bf16_.data() + at, &value, sizeof(value));
  }
  return absl::OkStatus();
}

const uint16_t* HostModel::Rows(uint32_t block, uint32_t layer, uint32_t head,
                                bool is_value) const {
  const size_t count = size_t{kBlockTokens} * layout_.head_dim;
  const size_t number =
      2 * (block * layout_.runs_count() + size_t{layer} * layout_.kv_heads + head) + is_value;
  return pattern_.data() + number * 1000003 % (kPatternElements - count);
}

absl::Status HostModel::QuantizeBlock(uint32_t block) {
  const uint32_t dim = layout_.head_dim;
  std::vector<uint16_t> k(size_t{kBlockTokens} * dim);
  std::vector<uint16_t> v(k.size());
  const RotationSet& rotations = *options_.rotations;
  for (uint32_t layer = 0; layer < layout_.layers_count; ++layer) {
    for (uint32_t head = 0; head < layout_.kv_heads; ++head) {
      RotateParams rotate = {.x = Rows(block, layer, head, false),
                             .x_stride = dim,
                             .r = rotations.RotationK(layer, head),
                             .rows_count = kBlockTokens,
                             .dim = dim};
      RotateRows(rotate, k.data(), dim);
      rotate.x = Rows(block, layer, head, true);
      rotate.r = rotations.RotationV(layer, head);
      RotateRows(rotate, v.data(), dim);
      const size_t clip = size_t{layer} * layout_.kv_heads + head;
      BadRow bad;
      OKV_RETURN_IF_ERROR(QuantizeRun(
          {.k = k.data(),
           .v = v.data(),
           .row_stride = dim,
           .dim = dim,
           .group_size = layout_.group_size,
           .clip_rank_k = rotations.clip_rank_k[clip],
           .clip_rank_v = rotations.clip_rank_v[clip]},
          sealed().data() + block * block_bytes_ + layout_.run_offset(Codec::kInt2, layer, head),
          &bad));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> HostModel::Quantize() {
  const absl::Time begin = absl::Now();
  FirstError error;
  pool_.ParallelFor(options_.blocks, [this, &error](size_t block) {
    error.Update(QuantizeBlock(static_cast<uint32_t>(block)));
  });
  OKV_RETURN_IF_ERROR(error.status());
  return SecondsSince(begin);
}

absl::Status HostModel::Forget() {
  kept_.assign(sealed().begin(), sealed().end());
  std::memset(sealed().data(), kNothing, sealed().size());
  return ClearFetched();
}

absl::Status HostModel::ClearFetched() {
  std::memset(fetched().data(), kNothing, fetched().size());
  return absl::OkStatus();
}

absl::StatusOr<double> HostModel::Verify(absl::Span<const ObjectHeader> headers,
                                         absl::Span<const uint32_t> slots) {
  OKV_CHECK(headers.size() == options_.blocks && slots.size() == options_.blocks);
  verified_headers_.assign(headers.begin(), headers.end());
  verified_slots_.assign(slots.begin(), slots.end());
  const absl::Time begin = absl::Now();
  FirstError error;
  pool_.ParallelFor(options_.blocks, [this, &error](size_t block) {
    error.Update(
        VerifyObject(verified_headers_[block], layout_,
                     fetched().subspan(verified_slots_[block] * block_bytes_, block_bytes_)));
  });
  OKV_RETURN_IF_ERROR(error.status());
  return SecondsSince(begin);
}

absl::StatusOr<uint64_t> HostModel::CountDifferentBytes(absl::Span<const uint32_t> slots) {
  uint64_t different = 0;
  for (uint32_t block = 0; block < options_.blocks; ++block) {
    const uint8_t* const here = fetched().data() + slots[block] * block_bytes_;
    const uint8_t* const wanted = kept_.data() + block * block_bytes_;
    for (uint64_t i = 0; i < block_bytes_; ++i) different += here[i] != wanted[i];
  }
  return different;
}

absl::StatusOr<ServiceModel::AttendResult> HostModel::Attend(Pool pool,
                                                             absl::Span<const uint32_t> slots) {
  const uint8_t* const blocks = pool == Pool::kSealed ? sealed().data() : fetched().data();
  attended_slots_.assign(slots.begin(), slots.end());
  const size_t row = size_t{options_.query_heads} * layout_.head_dim;
  std::vector<float> out(row * layout_.layers_count);
  const absl::Time begin = absl::Now();
  std::vector<AttendBlock> view;
  for (uint32_t layer = 0; layer < layout_.layers_count; ++layer) {
    const auto bf16_page = [&](size_t block) {
      return AttendBlock{Codec::kBf16, bf16_.data() + block * layout_.block_bytes(Codec::kBf16) +
                                           layout_.run_offset(Codec::kBf16, layer, 0)};
    };
    view.clear();
    view.push_back(bf16_page(0));
    for (const uint32_t slot : attended_slots_) {
      view.push_back({Codec::kInt2,
                      blocks + slot * block_bytes_ + layout_.run_offset(Codec::kInt2, layer, 0)});
    }
    for (size_t block = 1; block < kServiceBf16Blocks; ++block) view.push_back(bf16_page(block));
    OKV_RETURN_IF_ERROR(
        okv::Attend({.query_heads = options_.query_heads,
                     .kv_heads = layout_.kv_heads,
                     .head_dim = layout_.head_dim,
                     .group_size = layout_.group_size,
                     .softmax_scale = 1.0f / std::sqrt(static_cast<float>(layout_.head_dim)),
                     .q = queries_.data() + layer * row,
                     .r_k = options_.rotations->RotationK(layer, 0),
                     .r_v = options_.rotations->RotationV(layer, 0),
                     .rotation_heads = options_.rotations->rotation_heads,
                     .queries_count = 1,
                     .blocks = view,
                     .last_block_tokens = kBlockTokens,
                     .out = out.data() + layer * row},
                    &pool_));
  }
  AttendResult result = {.seconds = SecondsSince(begin), .output = {}};
  const auto* const bytes = reinterpret_cast<const uint8_t*>(out.data());
  result.output.assign(bytes, bytes + out.size() * sizeof(float));
  return result;
}

absl::StatusOr<ServiceModelTimes> HostModel::Measure(uint32_t rounds) {
  const std::vector<ObjectHeader> headers = verified_headers_;
  const std::vector<uint32_t> verified_slots = verified_slots_;
  const std::vector<uint32_t> attended_slots = attended_slots_;
  std::vector<uint8_t> from(std::min<size_t>(kCopyBytes, attend_bytes()), 1);
  std::vector<uint8_t> to(from.size());
  std::vector<double> quantize;
  std::vector<double> verify;
  std::vector<double> attend;
  std::vector<double> copy;
  for (uint32_t round = 0; round <= rounds; ++round) {
    OKV_ASSIGN_OR_RETURN(const double quantize_seconds, Quantize());
    OKV_ASSIGN_OR_RETURN(const double verify_seconds, Verify(headers, verified_slots));
    OKV_ASSIGN_OR_RETURN(const AttendResult attended, Attend(Pool::kFetched, attended_slots));
    const absl::Time begin = absl::Now();
    std::memcpy(to.data(), from.data(), from.size());
    from[0] += to[0];  // The copy is of use.
    const double copy_seconds = SecondsSince(begin);
    if (round == 0) continue;
    quantize.push_back(quantize_seconds);
    verify.push_back(verify_seconds);
    attend.push_back(attended.seconds);
    copy.push_back(copy_seconds);
  }
  return ServiceModelTimes{
      .quantize_seconds = Quantile(quantize, 0.5),
      .verify_seconds = Quantile(verify, 0.5),
      .attend_seconds = Quantile(attend, 0.5),
      .copy_bytes_per_second = 2 * static_cast<double>(from.size()) / Quantile(copy, 0.5)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceModel>> CreateHostModel(const ServiceModelOptions& options) {
  auto model = std::make_unique<HostModel>(options);
  OKV_RETURN_IF_ERROR(model->Init());
  return model;
}

}  // namespace okv
