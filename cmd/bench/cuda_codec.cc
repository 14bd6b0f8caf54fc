#include "cmd/bench/cuda_codec.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/quantize.h"
#include "proto/status_macros.h"

namespace okv {

absl::Status CudaCodecOptions::Validate() const {
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return absl::InvalidArgumentError(
        absl::StrCat("--head_dim ", head_dim, " is not 64, 128 or 256"));
  }
  if (group_size < 32 || group_size > head_dim || (group_size & (group_size - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--group_size ", group_size, " is not a power of two from 32 to --head_dim"));
  }
  if (kv_heads == 0 || kv_heads > 256) return absl::InvalidArgumentError("--kv_heads: 1 to 256");
  if (layers == 0 || layers > 512) return absl::InvalidArgumentError("--layers: 1 to 512");
  if (rounds == 0) return absl::InvalidArgumentError("--rounds is 0");
  if (rotation_heads != 1 && rotation_heads != kv_heads) {
    return absl::InvalidArgumentError("--rotation_heads is neither 1 nor --kv_heads");
  }
  if (chunk_tokens == 0 || chunk_tokens % 64 != 0 || chunk_tokens > 1u << 20) {
    return absl::InvalidArgumentError(
        absl::StrCat("--chunk_tokens ", chunk_tokens, " is not a multiple of 64 up to ", 1u << 20));
  }
  return absl::OkStatus();
}

std::string CudaCodecOptions::ShapeText() const {
  return absl::StrCat(layers, " layers, ", kv_heads, " KV heads, d ", head_dim, ", g ", group_size,
                      ", chunks of ", chunk_tokens, " tokens");
}

absl::StatusOr<CodecData> CodecData::Make(const CudaCodecOptions& options) {
  CodecData data;
  data.options = options;
  const size_t rows_bytes =
      size_t{2} * options.layers * options.chunk_tokens * options.kv_heads * options.head_dim;
  const size_t rotation_bytes =
      size_t{2} * options.layers * options.rotation_heads * options.head_dim * options.head_dim;
  // Entries of this deviation make rows of R of length 1, near enough for the arithmetic.
  const float r_scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim));
  OKV_ASSIGN_OR_RETURN(data.k, RandomBf16OnDevice(rows_bytes, 1.0f, options.seed));
  OKV_ASSIGN_OR_RETURN(data.v, RandomBf16OnDevice(rows_bytes, 1.0f, options.seed + 1));
  OKV_ASSIGN_OR_RETURN(data.r_k, RandomBf16OnDevice(rotation_bytes, r_scale, options.seed + 2));
  OKV_ASSIGN_OR_RETURN(data.r_v, RandomBf16OnDevice(rotation_bytes, r_scale, options.seed + 3));
  const size_t runs = options.layout().runs_count();
  const uint32_t d = options.head_dim;
  OKV_ASSIGN_OR_RETURN(data.rank_k, DeviceCopyOf(std::vector<uint32_t>(runs, d - 1 - 5 * d / 128)));
  OKV_ASSIGN_OR_RETURN(data.rank_v,
                       DeviceCopyOf(std::vector<uint32_t>(runs, d - 1 - 10 * d / 128)));
  OKV_ASSIGN_OR_RETURN(
      data.pages, AllocateDevice(options.layout().block_bytes(Codec::kInt2) * options.blocks()));
  OKV_ASSIGN_OR_RETURN(data.bad_row, DeviceCopyOf(std::vector<uint64_t>{cuda::kNoBadRow}));
  return data;
}

cuda::PagedRows CodecData::MutableRows(const cuda::DeviceBuffer& buffer) const {
  const int64_t row = int64_t{options.kv_heads} * options.head_dim;
  return {.base = buffer.as<__nv_bfloat16>(),
          .layer_stride = row * options.chunk_tokens,
          .page_stride = row,
          .token_stride = 0,
          .head_stride = options.head_dim,
          .page_tokens = 1};
}

cuda::ConstPagedRows CodecData::Rows(const cuda::DeviceBuffer& buffer) const {
  const cuda::PagedRows rows = MutableRows(buffer);
  return {.base = rows.base,
          .layer_stride = rows.layer_stride,
          .page_stride = rows.page_stride,
          .token_stride = rows.token_stride,
          .head_stride = rows.head_stride,
          .page_tokens = rows.page_tokens};
}

cuda::Rotations CodecData::RotationsOf(uint32_t layer) const {
  const size_t offset =
      size_t{layer} * options.rotation_heads * options.head_dim * options.head_dim;
  return {.k = r_k.as<__nv_bfloat16>() + offset,
          .v = r_v.as<__nv_bfloat16>() + offset,
          .rotation_heads = options.rotation_heads,
          .early = true};
}

cudaError_t QueueQuantize(const CodecData& data, uint32_t layer, uint32_t layers, bool rotate,
                          bool early, cudaStream_t stream) {
  const CudaCodecOptions& options = data.options;
  const PageLayout layout = options.layout();
  cuda::ConstPagedRows k = data.Rows(data.k);
  cuda::ConstPagedRows v = data.Rows(data.v);
  k.base += layer * k.layer_stride;
  v.base += layer * v.layer_stride;
  return cuda::QuantizePages(
      {.layers_count = layers,
       .kv_heads = options.kv_heads,
       .head_dim = options.head_dim,
       .group_size = options.group_size,
       .blocks_count = options.blocks(),
       .tokens_count = nullptr,
       .k = k,
       .v = v,
       .tokens = {},
       .rotations = rotate ? data.RotationsOf(layer) : cuda::Rotations{},
       .clip_rank_k = data.rank_k.as<uint32_t>() + size_t{layer} * options.kv_heads,
       .clip_rank_v = data.rank_v.as<uint32_t>() + size_t{layer} * options.kv_heads,
       .pages = {.base = data.pages.data() + layout.run_offset(Codec::kInt2, layer, 0),
                 .block_stride = static_cast<int64_t>(layout.block_bytes(Codec::kInt2)),
                 .layer_stride = static_cast<int64_t>(layout.page_bytes(Codec::kInt2)),
                 .head_stride = static_cast<int64_t>(layout.run_bytes(Codec::kInt2)),
                 .table = nullptr},
       .bad_row = data.bad_row.as<uint64_t>(),
       .early_inputs = early},
      stream);
}

}  // namespace okv
