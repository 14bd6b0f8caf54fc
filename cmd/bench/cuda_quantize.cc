#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cmd/bench/cuda_codec.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/rotate.h"
#include "kernels/quantize.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Demoted at once: one block of each of so many requests.
constexpr uint32_t kDemotedBlocks = 32;

// What is quantized a layer a launch.
struct ByLayer {
  bool rotate;
  bool early;  // QuantizePagesParams::early_inputs
};
constexpr ByLayer kByLayer[] = {{true, false}, {true, true}, {false, false}, {false, true}};

cudaError_t QueueRotate(const CodecData& data, const cuda::DeviceBuffer& k_out,
                        const cuda::DeviceBuffer& v_out, uint32_t layer, uint32_t layers,
                        cudaStream_t stream) {
  cuda::RotateRowsParams params = {.layers_count = layers,
                                   .kv_heads = data.options.kv_heads,
                                   .head_dim = data.options.head_dim,
                                   .tokens_count = data.options.chunk_tokens,
                                   .tokens_count_device = nullptr,
                                   .k = data.Rows(data.k),
                                   .v = data.Rows(data.v),
                                   .tokens = {},
                                   .rotations = data.RotationsOf(layer),
                                   .to_model_basis = false,
                                   .k_out = data.MutableRows(k_out),
                                   .v_out = data.MutableRows(v_out),
                                   .tokens_out = {}};
  const int64_t offset = layer * params.k.layer_stride;
  params.k.base += offset;
  params.v.base += offset;
  params.k_out.base += offset;
  params.v_out.base += offset;
  return cuda::RotateRows(params, stream);
}

// A pool of bf16 blocks, all layers, whose rows are rotated already: one block a request.
cudaError_t QueueDemote(const CodecData& data, const cuda::DeviceBuffer& pool,
                        const cuda::DeviceBuffer& pages, cudaStream_t stream) {
  const CudaCodecOptions& options = data.options;
  const PageLayout layout = options.layout();
  const auto elements = [](size_t bytes) { return static_cast<int64_t>(bytes / 2); };
  const cuda::ConstPagedRows k = {.base = pool.as<__nv_bfloat16>(),
                                  .layer_stride = elements(layout.page_bytes(Codec::kBf16)),
                                  .page_stride = elements(layout.block_bytes(Codec::kBf16)),
                                  .token_stride = options.head_dim,
                                  .head_stride = elements(layout.run_bytes(Codec::kBf16)),
                                  .page_tokens = 64};
  cuda::ConstPagedRows v = k;
  v.base += elements(layout.bf16_v_offset());
  return cuda::QuantizePages(
      {.layers_count = options.layers,
       .kv_heads = options.kv_heads,
       .head_dim = options.head_dim,
       .group_size = options.group_size,
       .blocks_count = kDemotedBlocks,
       .tokens_count = nullptr,
       .k = k,
       .v = v,
       .tokens = {},
       .rotations = {},
       .clip_rank_k = data.rank_k.as<uint32_t>(),
       .clip_rank_v = data.rank_v.as<uint32_t>(),
       .pages = {.base = pages.data(),
                 .block_stride = static_cast<int64_t>(layout.block_bytes(Codec::kInt2)),
                 .layer_stride = static_cast<int64_t>(layout.page_bytes(Codec::kInt2)),
                 .head_stride = static_cast<int64_t>(layout.run_bytes(Codec::kInt2)),
                 .table = nullptr},
       .bad_row = data.bad_row.as<uint64_t>()},
      stream);
}

// The first and the last block's runs of the last layer against the twin, from rotated rows of the
// GPU.
absl::Status CheckSample(const CodecData& data, const cuda::DeviceBuffer& k_out,
                         const cuda::DeviceBuffer& v_out, bool early) {
  const CudaCodecOptions& options = data.options;
  const PageLayout layout = options.layout();
  const uint32_t layer = options.layers - 1;
  OKV_RETURN_IF_ERROR(
      CudaStatus(cudaMemset(data.pages.data(), 0, data.pages.bytes()), "clearing the pages"));
  OKV_RETURN_IF_ERROR(
      CudaStatus(QueueQuantize(data, 0, options.layers, true, early, nullptr), "quantize"));
  OKV_RETURN_IF_ERROR(CudaStatus(QueueRotate(data, k_out, v_out, layer, 1, nullptr), "rotate"));
  OKV_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "the first launches"));
  const size_t row = size_t{options.kv_heads} * options.head_dim;
  std::vector<uint16_t> k(64 * row);
  std::vector<uint16_t> v(64 * row);
  std::vector<uint8_t> page(layout.page_bytes(Codec::kInt2));
  std::vector<uint8_t> run(layout.run_bytes(Codec::kInt2));
  for (const uint32_t block : {0u, options.blocks() - 1}) {
    const size_t at = (size_t{layer} * options.chunk_tokens + block * 64) * row * 2;
    const auto bytes = [](std::vector<uint16_t>* rows) {
      return absl::MakeSpan(reinterpret_cast<uint8_t*>(rows->data()), rows->size() * 2);
    };
    OKV_RETURN_IF_ERROR(CopyFromDevice(k_out, at, bytes(&k)));
    OKV_RETURN_IF_ERROR(CopyFromDevice(v_out, at, bytes(&v)));
    OKV_RETURN_IF_ERROR(CopyFromDevice(
        data.pages,
        block * layout.block_bytes(Codec::kInt2) + layout.run_offset(Codec::kInt2, layer, 0),
        absl::MakeSpan(page)));
    for (uint32_t head = 0; head < options.kv_heads; ++head) {
      const uint32_t d = options.head_dim;
      BadRow bad;
      OKV_RETURN_IF_ERROR(reference::QuantizeRun({.k = &k[size_t{head} * d],
                                                  .v = &v[size_t{head} * d],
                                                  .row_stride = row,
                                                  .dim = d,
                                                  .group_size = options.group_size,
                                                  .clip_rank_k = d - 1 - 5 * d / 128,
                                                  .clip_rank_v = d - 1 - 10 * d / 128},
                                                 run.data(), &bad));
      if (std::memcmp(run.data(), &page[head * run.size()], run.size()) != 0) {
        return absl::InternalError(absl::StrCat("quantize: the run of block ", block, ", layer ",
                                                layer, ", head ", head, " is wrong"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CudaBenchReport> RunCudaQuantize(const CudaCodecOptions& options) {
  CudaBenchReport report;
  OKV_ASSIGN_OR_RETURN(report.device, CudaDeviceName());
  OKV_RETURN_IF_ERROR(options.Validate());
  report.shape = options.ShapeText();
  OKV_ASSIGN_OR_RETURN(const CodecData data, CodecData::Make(options));
  OKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer k_out, AllocateDevice(data.k.bytes()));
  OKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer v_out, AllocateDevice(data.v.bytes()));
  for (const bool early : {false, true}) {
    OKV_RETURN_IF_ERROR(CheckSample(data, k_out, v_out, early));
  }
  const PageLayout layout = options.layout();
  OKV_ASSIGN_OR_RETURN(
      const cuda::DeviceBuffer pool,
      RandomBf16OnDevice(layout.block_bytes(Codec::kBf16) * kDemotedBlocks, 1.0f, options.seed));
  OKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer demoted,
                       AllocateDevice(layout.block_bytes(Codec::kInt2) * kDemotedBlocks));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<CudaTimer> timer, CudaTimer::Create());
  const auto by_layer = [&](auto queue) {
    return timer
        ->Add([&](cudaStream_t stream) {
          for (uint32_t layer = 0; layer < options.layers; ++layer) {
            if (const cudaError_t error = queue(layer, stream); error != cudaSuccess) return error;
          }
          return cudaSuccess;
        })
        .status();
  };
  for (const auto& [rotate, early] : kByLayer) {
    OKV_RETURN_IF_ERROR(by_layer(
        [&](uint32_t l, cudaStream_t s) { return QueueQuantize(data, l, 1, rotate, early, s); }));
  }
  OKV_RETURN_IF_ERROR(by_layer(
      [&](uint32_t l, cudaStream_t s) { return QueueRotate(data, k_out, v_out, l, 1, s); }));
  OKV_RETURN_IF_ERROR(timer
                          ->Add([&](cudaStream_t stream) {
                            return QueueQuantize(data, 0, options.layers, true, false, stream);
                          })
                          .status());
  OKV_RETURN_IF_ERROR(
      timer->Add([&](cudaStream_t stream) { return QueueDemote(data, pool, demoted, stream); })
          .status());
  OKV_RETURN_IF_ERROR(timer->AddCopy(kCopyBytes).status());
  OKV_ASSIGN_OR_RETURN(const std::vector<double> us, timer->MedianUs(options.rounds));

  const double copy_rate = 2.0 * kCopyBytes / us.back();
  const double rows = static_cast<double>(data.k.bytes() + data.v.bytes()) / options.layers;
  const double pages = static_cast<double>(data.pages.bytes()) / options.layers;
  const double layers = options.layers;
  const auto add = [&](std::string name, double time, double bytes, bool is_promised) {
    report.rows.push_back(
        {.name = std::move(name), .us = time, .bytes = bytes, .copy_bytes_per_us = copy_rate});
    if (is_promised) report.rows.back().us_limit = 2 * bytes / copy_rate;
  };
  size_t i = 0;
  for (const auto& [rotate, early] : kByLayer) {
    add(absl::StrCat(rotate ? "rotate and quantize" : "quantize rotated rows", ", a layer",
                     early ? ", early" : ""),
        us[i++] / layers, rows + pages, true);
  }
  add("rotate, a layer", us[i++] / layers, 2 * rows, false);
  add("rotate and quantize, all layers", us[i++], (rows + pages) * layers, true);
  add(absl::StrCat("demote ", kDemotedBlocks, " blocks, all layers"), us[i++],
      static_cast<double>(pool.bytes() + demoted.bytes()), true);
  return report;
}

}  // namespace okv
