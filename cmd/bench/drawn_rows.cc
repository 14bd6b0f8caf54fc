#include "cmd/bench/drawn_rows.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cmd/bench/attend_case_kernels.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/rotate.h"
#include "proto/check.h"

namespace okv::cuda {
namespace {

void Must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

DeviceBuffer Allocate(size_t bytes) {
  DeviceBuffer buffer;
  Must(buffer.Allocate(bytes), "cudaMalloc");
  return buffer;
}

template <class Element>
DeviceBuffer Upload(const std::vector<Element>& values) {
  DeviceBuffer buffer = Allocate(values.size() * sizeof(Element));
  Must(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice),
       "cudaMemcpy");
  return buffer;
}

Rotations RotationsOf(const DeviceBuffer& k, const DeviceBuffer& v) {
  return {.k = k.as<const __nv_bfloat16>(), .v = v.as<const __nv_bfloat16>(), .rotation_heads = 1};
}

ConstPagedRows ConstRows(const PagedRows& rows) {
  return {.base = rows.base,
          .layer_stride = rows.layer_stride,
          .page_stride = rows.page_stride,
          .token_stride = rows.token_stride,
          .head_stride = rows.head_stride,
          .page_tokens = rows.page_tokens};
}

// [tokens, heads, head_dim].
PagedRows Contiguous(__nv_bfloat16* base, uint32_t heads, uint32_t head_dim) {
  return {.base = base,
          .layer_stride = 0,
          .page_stride = int64_t{heads} * head_dim,
          .token_stride = 0,
          .head_stride = head_dim,
          .page_tokens = 1};
}

}  // namespace

DrawnRows::DrawnRows(const RowDraws& draws, const PageLayout& layout, uint64_t seed)
    : layout_(layout),
      seed_(seed),
      mix_k_(Upload(draws.mix_k)),
      mix_v_(Upload(draws.mix_v)),
      r_k_(Upload(draws.r_k)),
      r_v_(Upload(draws.r_v)) {
  const uint32_t d = layout.head_dim;
  OKV_CHECK(draws.head_dim == d);
  rank_k_ = Upload(std::vector<uint32_t>(layout.kv_heads, 96 * d / 100));
  rank_v_ = Upload(std::vector<uint32_t>(layout.kv_heads, 92 * d / 100));
  bad_row_ = Upload(std::vector<uint64_t>{kNoBadRow});
  const size_t bytes = kBlocksMax * 64 * layout.kv_heads * d * 2;
  k_ = Allocate(bytes);
  v_ = Allocate(bytes);
  Must(cudaMemset(v_.data(), 0, bytes), "cudaMemset");  // FillQueries() reads what nobody wrote
}

ConstPagedRows DrawnRows::Rows(const DeviceBuffer& buffer) const {
  return ConstRows(Contiguous(buffer.as<__nv_bfloat16>(), layout_.kv_heads, layout_.head_dim));
}

void DrawnRows::FillQueries(__nv_bfloat16* rows, size_t rows_count, float sigma) {
  const uint32_t d = layout_.head_dim;
  const size_t rows_max = k_.bytes() / 2 / d;
  for (size_t begin = 0; begin < rows_count; begin += rows_max) {
    const size_t count = std::min(rows_count - begin, rows_max);
    Must(FillNormal(k_.as<__nv_bfloat16>(), count * d, sigma, seed_++, nullptr), "FillNormal");
    const PagedRows in = Contiguous(k_.as<__nv_bfloat16>(), 1, d);
    // The kernel takes rows of V too; nobody reads these.
    const PagedRows unused = Contiguous(v_.as<__nv_bfloat16>(), 1, d);
    Must(RotateRows({.layers_count = 1,
                     .kv_heads = 1,
                     .head_dim = d,
                     .tokens_count = static_cast<uint32_t>(count),
                     .tokens_count_device = nullptr,
                     .k = ConstRows(in),
                     .v = ConstRows(unused),
                     .tokens = {},
                     .rotations = RotationsOf(mix_k_, mix_v_),
                     .to_model_basis = false,
                     .k_out = Contiguous(rows + begin * d, 1, d),
                     .v_out = unused,
                     .tokens_out = {}},
                    nullptr),
         "RotateRows");
  }
}

void DrawnRows::Draw(size_t blocks_count) {
  const size_t elements = blocks_count * 64 * layout_.kv_heads * layout_.head_dim;
  Must(FillNormal(k_.as<__nv_bfloat16>(), elements, 1.0f, seed_++, nullptr), "FillNormal");
  Must(FillNormal(v_.as<__nv_bfloat16>(), elements, 1.0f, seed_++, nullptr), "FillNormal");
  Must(RotateRows({.layers_count = 1,
                   .kv_heads = layout_.kv_heads,
                   .head_dim = layout_.head_dim,
                   .tokens_count = static_cast<uint32_t>(blocks_count * 64),
                   .tokens_count_device = nullptr,
                   .k = Rows(k_),
                   .v = Rows(v_),
                   .tokens = {},
                   .rotations = RotationsOf(mix_k_, mix_v_),
                   .to_model_basis = false,
                   .k_out = Contiguous(k_.as<__nv_bfloat16>(), layout_.kv_heads, layout_.head_dim),
                   .v_out = Contiguous(v_.as<__nv_bfloat16>(), layout_.kv_heads, layout_.head_dim),
                   .tokens_out = {}},
                  nullptr),
       "RotateRows");
}

void DrawnRows::FillInt2(uint8_t* blocks, size_t blocks_count) {
  const size_t block_bytes = layout_.block_bytes(Codec::kInt2);
  for (uint32_t layer = 0; layer < layout_.layers_count; ++layer) {
    for (size_t begin = 0; begin < blocks_count; begin += kBlocksMax) {
      const size_t count = std::min(blocks_count - begin, kBlocksMax);
      Draw(count);
      uint8_t* const base =
          blocks + begin * block_bytes + layout_.run_offset(Codec::kInt2, layer, 0);
      Must(QuantizePages(
               {.layers_count = 1,
                .kv_heads = layout_.kv_heads,
                .head_dim = layout_.head_dim,
                .group_size = layout_.group_size,
                .blocks_count = static_cast<uint32_t>(count),
                .tokens_count = nullptr,
                .k = Rows(k_),
                .v = Rows(v_),
                .tokens = {},
                .rotations = RotationsOf(r_k_, r_v_),
                .clip_rank_k = rank_k_.as<uint32_t>(),
                .clip_rank_v = rank_v_.as<uint32_t>(),
                .pages = {.base = base,
                          .block_stride = static_cast<int64_t>(block_bytes),
                          .layer_stride = 0,
                          .head_stride = static_cast<int64_t>(layout_.run_bytes(Codec::kInt2)),
                          .table = nullptr},
                .bad_row = bad_row_.as<uint64_t>()},
               nullptr),
           "QuantizePages");
    }
  }
  uint64_t bad_row = 0;
  Must(cudaMemcpy(&bad_row, bad_row_.data(), sizeof(bad_row), cudaMemcpyDeviceToHost),
       "QuantizePages");
  OKV_CHECK(bad_row == kNoBadRow);
}

void DrawnRows::FillBf16(uint8_t* blocks, size_t blocks_count) {
  const size_t block_bytes = layout_.block_bytes(Codec::kBf16);
  const auto elements = [](size_t bytes) { return static_cast<int64_t>(bytes / 2); };
  for (uint32_t layer = 0; layer < layout_.layers_count; ++layer) {
    for (size_t begin = 0; begin < blocks_count; begin += kBlocksMax) {
      const size_t count = std::min(blocks_count - begin, kBlocksMax);
      Draw(count);
      uint8_t* const base =
          blocks + begin * block_bytes + layout_.run_offset(Codec::kBf16, layer, 0);
      const PagedRows k = {.base = reinterpret_cast<__nv_bfloat16*>(base),
                           .layer_stride = 0,
                           .page_stride = elements(block_bytes),
                           .token_stride = layout_.head_dim,
                           .head_stride = elements(layout_.run_bytes(Codec::kBf16)),
                           .page_tokens = 64};
      PagedRows v = k;
      v.base += elements(layout_.bf16_v_offset());
      Must(RotateRows({.layers_count = 1,
                       .kv_heads = layout_.kv_heads,
                       .head_dim = layout_.head_dim,
                       .tokens_count = static_cast<uint32_t>(count * 64),
                       .tokens_count_device = nullptr,
                       .k = Rows(k_),
                       .v = Rows(v_),
                       .tokens = {},
                       .rotations = RotationsOf(r_k_, r_v_),
                       .to_model_basis = false,
                       .k_out = k,
                       .v_out = v,
                       .tokens_out = {}},
                      nullptr),
           "RotateRows");
    }
  }
}

}  // namespace okv::cuda
