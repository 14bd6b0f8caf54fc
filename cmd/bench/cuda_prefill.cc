#include "cmd/bench/cuda_prefill.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/cuda_timing.h"
#include "cmd/bench/prefill_case.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

struct ShapeTokens {
  std::vector<int32_t> new_tokens;
  std::vector<int32_t> lengths;
};

absl::StatusOr<ShapeTokens> TokensOf(absl::string_view shape) {
  const std::vector<absl::string_view> parts = absl::StrSplit(shape, 'x');
  uint32_t requests = 0;
  int32_t count = 0;
  int32_t history = 0;
  bool right = parts.size() == 2 && absl::SimpleAtoi(parts[0], &requests);
  if (right) {
    const std::vector<absl::string_view> tokens = absl::StrSplit(parts[1], '+');
    right = tokens.size() <= 2 && absl::SimpleAtoi(tokens[0], &count) &&
            (tokens.size() == 1 || absl::SimpleAtoi(tokens[1], &history));
  }
  if (!right || requests == 0 || requests > 8192 || count < 1 || history < 0 ||
      int64_t{count} + history > 1 << 24 || int64_t{count} * requests > 1 << 24) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shapes: '", shape, "' is not REQUESTSxNEW or REQUESTSxNEW+HISTORY"));
  }
  return ShapeTokens{.new_tokens = std::vector<int32_t>(requests, count),
                     .lengths = std::vector<int32_t>(requests, count + history)};
}

cuda::PrefillShape ShapeOf(const CudaPrefillOptions& options) {
  return {.batch = 1,
          .query_tokens_max = 1,
          .query_heads = options.query_heads,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .group_size = options.group_size,
          .sink_blocks = 1,
          .recent_blocks = 4,
          .sliding_window = 0,
          .history_blocks_max = 0};
}

absl::StatusOr<CudaPrefillRow> TimeShape(const CudaPrefillOptions& options,
                                         absl::string_view shape) {
  OKV_ASSIGN_OR_RETURN(const ShapeTokens tokens, TokensOf(shape));
  const cuda::PrefillCase prefill({.shape = ShapeOf(options),
                                   .new_tokens = tokens.new_tokens,
                                   .lengths = tokens.lengths,
                                   .layers_count = options.layers,
                                   .rotation_heads = options.rotation_heads,
                                   .query_sigma = options.query_sigma,
                                   .rows_checked = 500,
                                   .seed = options.seed});
  const cuda::PrefillError error = prefill.Check(0);  // Leaves the plan behind.
  // Probabilities are rounded to bf16 before they meet the values: 1.7e-3.
  if (!(error.beyond_rounding < 2.5e-3)) {
    return absl::InternalError(absl::StrCat(shape, ": the output is wrong, relative error ",
                                            error.relative, ", ", error.beyond_rounding,
                                            " beyond the rounding to bf16"));
  }
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  const auto queue = [&](cudaStream_t stream) {
    for (uint32_t layer = 0; layer < options.layers; ++layer) {
      const cudaError_t status = Prefill(prefill.Params(layer), stream);
      if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
  };
  OKV_RETURN_IF_ERROR(timer->Add(queue).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(options.rounds));
  return CudaPrefillRow{.shape = std::string(shape),
                        .us = us[0] / options.layers,
                        .operations = prefill.Operations()};
}

}  // namespace

absl::Status CudaPrefillOptions::Validate() const {
  if (layers == 0) return absl::InvalidArgumentError("--layers is 0");
  if (rounds == 0) return absl::InvalidArgumentError("--rounds is 0");
  if (rotation_heads != 1 && rotation_heads != kv_heads) {
    return absl::InvalidArgumentError("--rotation_heads is neither 1 nor --kv_heads");
  }
  if (cuda::PrefillWorkspaceBytes(ShapeOf(*this)) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("no kernel for --query_heads ", query_heads,
                                                   " --kv_heads ", kv_heads, " --head_dim ",
                                                   head_dim, " --group_size ", group_size));
  }
  return absl::OkStatus();
}

std::string CudaPrefillReport::ToTable() const {
  std::string table =
      absl::StrFormat("%s; %s\n%-24s %10s %10s\n", device, model, "", "us/layer", "TFLOP/s");
  for (const CudaPrefillRow& row : rows) {
    absl::StrAppendFormat(&table, "%-24s %10.1f %10.1f\n", row.shape, row.us, row.tflop_per_s());
  }
  return table;
}

std::string CudaPrefillReport::ToJson() const {
  nlohmann::json lines = nlohmann::json::array();
  for (const CudaPrefillRow& row : rows) {
    lines.push_back({{"shape", row.shape},
                     {"us", row.us},
                     {"operations", row.operations},
                     {"tflop_per_s", row.tflop_per_s()}});
  }
  return nlohmann::json({{"device", device}, {"model", model}, {"rows", lines}}).dump();
}

absl::StatusOr<CudaPrefillReport> RunCudaPrefill(const CudaPrefillOptions& options) {
  CudaPrefillReport report;
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(options.Validate());
  report.model = absl::StrCat(options.query_heads, "/", options.kv_heads, " heads, d ",
                              options.head_dim, ", g ", options.group_size, ", ", options.layers,
                              " layers, query sigma ", options.query_sigma);
  for (const absl::string_view shape : absl::StrSplit(options.shapes, ',', absl::SkipEmpty())) {
    OKV_ASSIGN_OR_RETURN(CudaPrefillRow row, TimeShape(options, shape));
    report.rows.push_back(std::move(row));
  }
  if (report.rows.empty()) return absl::InvalidArgumentError("--shapes is empty");
  return report;
}

}  // namespace okv
