#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cmd/bench/cuda_codec.h"
#include "kernels/cuda/dequantize.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Pages of the cache that rows are written to.
constexpr uint32_t kPageTokens = 16;

struct Target {
  const char* name;
  bool model_basis;
  bool heads_first;  // HND, otherwise NHD
  bool all_layers;   // In one launch, otherwise one of a layer each
  bool early;        // DequantizePagesParams::early_inputs
};
// In pages of 16 tokens.
constexpr Target kTargets[] = {{"rotated basis, NHD, a layer", false, false, false, false},
                               {"rotated basis, HND, a layer", false, true, false, false},
                               {"model's basis, NHD, a layer", true, false, false, false},
                               {"rotated basis, NHD, a layer, early", false, false, false, true},
                               {"rotated basis, HND, a layer, early", false, true, false, true},
                               {"model's basis, NHD, a layer, early", true, false, false, true},
                               {"rotated basis, NHD, all layers", false, false, true, false},
                               {"rotated basis, HND, all layers", false, true, true, false},
                               {"model's basis, NHD, all layers", true, false, true, false}};

// Where the rows go: a pool of pages a layer, in any order.
struct Cache {
  cuda::DeviceBuffer k;  // As large as the chunk's rows
  cuda::DeviceBuffer v;
  cuda::DeviceBuffer table;
  std::vector<int32_t> pages;
};

cudaError_t QueueDequantize(const CodecData& data, const Cache& cache, const Target& target,
                            uint32_t layer, uint32_t layers, cudaStream_t stream) {
  const CudaCodecOptions& options = data.options;
  const PageLayout layout = options.layout();
  const int64_t d = options.head_dim;
  const int64_t row = d * options.kv_heads;
  cuda::PagedRows k = {.base = cache.k.as<__nv_bfloat16>() + layer * row * options.chunk_tokens,
                       .layer_stride = row * options.chunk_tokens,
                       .page_stride = row * kPageTokens,
                       .token_stride = target.heads_first ? d : row,
                       .head_stride = target.heads_first ? d * kPageTokens : d,
                       .page_tokens = kPageTokens};
  cuda::PagedRows v = k;
  v.base = cache.v.as<__nv_bfloat16>() + layer * row * options.chunk_tokens;
  return cuda::DequantizePages(
      {.layers_count = layers,
       .kv_heads = options.kv_heads,
       .head_dim = options.head_dim,
       .group_size = options.group_size,
       .blocks_count = options.blocks(),
       .pages = {.base = data.pages.data() + layout.run_offset(Codec::kInt2, layer, 0),
                 .block_stride = static_cast<int64_t>(layout.block_bytes(Codec::kInt2)),
                 .layer_stride = static_cast<int64_t>(layout.page_bytes(Codec::kInt2)),
                 .head_stride = static_cast<int64_t>(layout.run_bytes(Codec::kInt2)),
                 .table = nullptr},
       .rotations = target.model_basis ? data.RotationsOf(layer) : cuda::Rotations{},
       .k = k,
       .v = v,
       .tokens = {.slots = nullptr, .pages = cache.table.as<int32_t>()},
       .early_inputs = target.early},
      stream);
}

// What keys of one head must be: the twin's, times R^T when asked for.
absl::StatusOr<std::vector<double>> ExpectedKeys(const CodecData& data, const Target& target,
                                                 uint32_t layer, uint32_t block, uint32_t head) {
  const CudaCodecOptions& options = data.options;
  const PageLayout layout = options.layout();
  const uint32_t d = options.head_dim;
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  OKV_RETURN_IF_ERROR(CopyFromDevice(
      data.pages,
      block * layout.block_bytes(Codec::kInt2) + layout.run_offset(Codec::kInt2, layer, head),
      absl::MakeSpan(run)));
  std::vector<uint16_t> k(64 * size_t{d}), v(64 * size_t{d});
  reference::DequantizeRun({.run = run.data(), .dim = d, .group_size = options.group_size},
                           k.data(), v.data());
  std::vector<double> rows(k.size());
  for (size_t i = 0; i < k.size(); ++i) rows[i] = Bf16ToFloat(k[i]);
  if (!target.model_basis) return rows;
  std::vector<uint16_t> r(size_t{d} * d);
  const uint32_t r_head = options.rotation_heads == 1 ? 0 : head;
  OKV_RETURN_IF_ERROR(
      CopyFromDevice(data.r_k, (size_t{layer} * options.rotation_heads + r_head) * d * d * 2,
                     absl::MakeSpan(reinterpret_cast<uint8_t*>(r.data()), r.size() * 2)));
  std::vector<double> out(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t c = 0; c < d; ++c) out[i] += rows[i / d * d + c] * Bf16ToFloat(r[i % d * d + c]);
  }
  return out;
}

// Keys of the last block of the last layer and head.
absl::Status CheckSample(const CodecData& data, const Cache& cache, const Target& target) {
  const CudaCodecOptions& options = data.options;
  const uint32_t layer = options.layers - 1;
  const uint32_t block = options.blocks() - 1;
  const uint32_t head = options.kv_heads - 1;
  const size_t d = options.head_dim;
  const uint32_t first = target.all_layers ? 0 : layer;
  OKV_RETURN_IF_ERROR(CudaStatus(
      QueueDequantize(data, cache, target, first, options.layers - first, nullptr), target.name));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), target.name));
  OKV_ASSIGN_OR_RETURN(const std::vector<double> expected,
                       ExpectedKeys(data, target, layer, block, head));
  double error = 0;
  double norm = 0;
  std::vector<uint16_t> row(d);
  for (uint32_t t = 0; t < 64; ++t) {
    const uint32_t token = block * 64 + t;
    const size_t page = static_cast<size_t>(cache.pages[token / kPageTokens]);
    const size_t in_page = token % kPageTokens;
    const size_t row_at =
        page * kPageTokens * options.kv_heads +
        (target.heads_first ? head * kPageTokens + in_page : in_page * options.kv_heads + head);
    const size_t at = (size_t{layer} * options.chunk_tokens * options.kv_heads + row_at) * d * 2;
    OKV_RETURN_IF_ERROR(
        CopyFromDevice(cache.k, at, absl::MakeSpan(reinterpret_cast<uint8_t*>(row.data()), d * 2)));
    for (size_t c = 0; c < d; ++c) {
      const double difference = Bf16ToFloat(row[c]) - expected[t * d + c];
      error += difference * difference;
      norm += expected[t * d + c] * expected[t * d + c];
    }
  }
  // Rows of the rotated basis are equal bit for bit; NaN is an error too.
  const double relative = std::sqrt(error / norm);
  if (relative <= (target.model_basis ? 4e-3 : 0.0)) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(target.name, ": the rows are wrong, relative error ", relative));
}

absl::StatusOr<Cache> MakeCache(const CodecData& data) {
  Cache cache;
  OKV_ASSIGN_OR_RETURN(cache.k, AllocateDevice(data.k.bytes()));
  OKV_ASSIGN_OR_RETURN(cache.v, AllocateDevice(data.v.bytes()));
  cache.pages.resize(data.options.chunk_tokens / kPageTokens);
  std::iota(cache.pages.begin(), cache.pages.end(), 0);
  std::mt19937_64 random(data.options.seed);
  std::shuffle(cache.pages.begin(), cache.pages.end(), random);
  OKV_ASSIGN_OR_RETURN(cache.table, DeviceCopyOf(cache.pages));
  return cache;
}

}  // namespace

absl::StatusOr<CudaBenchReport> RunCudaDequantize(const CudaCodecOptions& options) {
  CudaBenchReport report;
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(options.Validate());
  report.shape = options.ShapeText();
  OKV_ASSIGN_OR_RETURN(const CodecData data, CodecData::Make(options));
  OKV_ASSIGN_OR_RETURN(const Cache cache, MakeCache(data));
  OKV_RETURN_IF_ERROR(
      CudaStatus(QueueQuantize(data, 0, options.layers, true, false, nullptr), "quantize"));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  for (const Target& target : kTargets) {
    OKV_RETURN_IF_ERROR(CheckSample(data, cache, target));
    const auto queue = [&](cudaStream_t stream) {
      const uint32_t layers = target.all_layers ? options.layers : 1;
      for (uint32_t layer = 0; layer < options.layers; layer += layers) {
        const cudaError_t error = QueueDequantize(data, cache, target, layer, layers, stream);
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    };
    OKV_RETURN_IF_ERROR(timer->Add(queue).status());
  }
  OKV_RETURN_IF_ERROR(timer->AddCopy(kCopyBytes).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(options.rounds));
  const double all_bytes =
      static_cast<double>(data.k.bytes() + data.v.bytes() + data.pages.bytes());
  const double copy_rate = 2.0 * kCopyBytes / us.back();
  for (size_t i = 0; i < std::size(kTargets); ++i) {
    const uint32_t launches = kTargets[i].all_layers ? 1 : options.layers;
    const double bytes = all_bytes / launches;
    report.rows.push_back({.name = kTargets[i].name,
                           .us = us[i] / launches,
                           .bytes = bytes,
                           .copy_bytes_per_us = copy_rate});
    report.rows.back().us_limit = bytes / copy_rate / 0.8;
  }
  return report;
}

}  // namespace okv
