#include "cmd/bench/cuda_attend.h"

#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/attend_case.h"
#include "cmd/bench/load_only.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kCopyBytes = size_t{4} << 30;

absl::StatusOr<std::vector<int32_t>> LengthsOf(absl::string_view shape, uint64_t seed) {
  const bool ragged = absl::StrContains(shape, 'r');
  const std::vector<absl::string_view> parts = absl::StrSplit(shape, ragged ? 'r' : 'x');
  uint32_t batch = 0;
  int32_t context = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &batch) ||
      !absl::SimpleAtoi(parts[1], &context) || batch == 0 || batch > 8192 || context < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shapes: '", shape, "' is not BATCHxCONTEXT or BATCHrCONTEXT_MAX"));
  }
  std::mt19937_64 random(seed);
  std::vector<int32_t> lengths(batch, context);
  if (ragged) {
    for (int32_t& length : lengths) length = 1 + static_cast<int32_t>(random() % context);
  }
  return lengths;
}

cuda::DecodeShape ShapeOf(const CudaAttendOptions& options, size_t batch) {
  return {.batch = static_cast<uint32_t>(batch),
          .query_tokens = options.query_tokens,
          .query_heads = options.query_heads,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .group_size = options.group_size,
          .sink_blocks = 1,
          .recent_blocks = 4,
          .ring_blocks = options.query_tokens > 1 ? 6u : 5u,
          .sliding_window = 0};
}

absl::Status CheckCase(const cuda::AttendCase& attend, absl::string_view shape) {
  const cuda::AttendError error = attend.Check(0);
  if (error.beyond_rounding < 1e-3) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(shape, ": the output is wrong, relative error ",
                                          error.relative, ", ", error.beyond_rounding,
                                          " beyond the rounding to bf16"));
}

// What is timed of a shape: attention and, where the device can, loading alone; each started after
// the kernel in front, and loading while that one ends.
struct Contender {
  const char* name;
  bool load_only;
  bool early;
};
constexpr Contender kContenders[] = {{"", false, false},
                                     {", early history", false, true},
                                     {", load only", true, false},
                                     {", load only, early", true, true}};

cudaError_t QueueLayers(const Contender& contender, const cuda::AttendCase& attend,
                        const cuda::DeviceBuffer& items, uint32_t layers, cudaStream_t stream) {
  for (uint32_t layer = 0; layer < layers; ++layer) {
    cudaError_t error = cudaSuccess;
    if (contender.load_only) {
      cuda::LoadOnlyParams params = attend.LoadParams(items, layer);
      params.early = contender.early;
      error = LoadOnly(params, stream);
    } else {
      cuda::DecodeParams params = attend.Params(layer);
      params.early_history = contender.early;
      error = Attend(params, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

absl::Status TimeShape(const CudaAttendOptions& options, absl::string_view shape,
                       std::vector<CudaBenchRow>* rows) {
  OKV_ASSIGN_OR_RETURN(const std::vector<int32_t> lengths, LengthsOf(shape, options.seed));
  const cuda::AttendCase attend({.shape = ShapeOf(options, lengths.size()),
                                 .lengths = lengths,
                                 .layers_count = options.layers,
                                 .rotation_heads = options.rotation_heads,
                                 .query_sigma = options.query_sigma,
                                 .draws = options.draws ? &*options.draws : nullptr,
                                 .seed = options.seed});
  OKV_RETURN_IF_ERROR(CheckCase(attend, shape));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  attend.Plan(timer->stream());
  const std::vector<cuda::LoadItem> items = attend.LoadItems();
  uint64_t bytes = 0;
  for (const cuda::LoadItem& item : items) bytes += item.bytes;
  OKV_CHECK(bytes == attend.BytesRead());
  OKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer items_on_device, DeviceCopyOf(items));
  std::vector<const Contender*> timed;
  for (const Contender& contender : kContenders) {
    const auto queue = [&](cudaStream_t stream) {
      return QueueLayers(contender, attend, items_on_device, options.layers, stream);
    };
    const absl::Status added = timer->Add(queue).status();
    if (!added.ok() && contender.load_only) continue;  // Before sm_90
    OKV_RETURN_IF_ERROR(added);
    timed.push_back(&contender);
  }
  OKV_RETURN_IF_ERROR(timer->AddCopy(kCopyBytes).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(options.rounds));
  for (size_t i = 0; i < timed.size(); ++i) {
    rows->push_back({.name = absl::StrCat(shape, timed[i]->name),
                     .us = us[i] / options.layers,
                     .bytes = static_cast<double>(bytes),
                     .copy_bytes_per_us = 2.0 * kCopyBytes / us.back(),
                     .step_us = us[i]});
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CudaAttendOptions::Validate() const {
  if (layers == 0) return absl::InvalidArgumentError("--layers is 0");
  if (rounds == 0) return absl::InvalidArgumentError("--rounds is 0");
  if (shapes.empty()) return absl::InvalidArgumentError("--shapes is empty");
  if (draws && draws->head_dim != head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("--head_dim ", head_dim, ", and rows of ",
                                                   draws->head_dim, " in --covariances"));
  }
  const cuda::DecodeShape shape = ShapeOf(*this, 1);
  if (cuda::DecodeWorkspaceBytes(shape) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no kernel for --query_heads ", query_heads, " --kv_heads ", kv_heads, " --head_dim ",
        head_dim, " --group_size ", group_size, " --query_tokens ", query_tokens));
  }
  return absl::OkStatus();
}

absl::StatusOr<CudaBenchReport> RunCudaAttend(const CudaAttendOptions& options) {
  CudaBenchReport report;
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(options.Validate());
  report.shape =
      absl::StrCat(options.query_heads, "/", options.kv_heads, " heads, d ", options.head_dim,
                   ", g ", options.group_size, ", ", options.query_tokens, " query token(s), ",
                   options.layers, " layers, query sigma ", options.query_sigma,
                   options.draws ? ", rows of " : "", options.draws_name);
  for (const absl::string_view shape : absl::StrSplit(options.shapes, ',', absl::SkipEmpty())) {
    OKV_RETURN_IF_ERROR(TimeShape(options, shape, &report.rows));
  }
  return report;
}

}  // namespace okv
