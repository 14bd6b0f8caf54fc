#include "cmd/bench/fake_quantized_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

absl::Status FakeQuantizeGroup(uint32_t bits, absl::Span<uint16_t> group) {
  float lo = Bf16ToFloat(group[0]);
  float hi = lo;
  for (const uint16_t y : group) {
    const float value = Bf16ToFloat(y);
    if (!std::isfinite(value)) return absl::InvalidArgumentError("NaN or Inf in a row");
    lo = std::min(lo, value);
    hi = std::max(hi, value);
  }
  const float steps = static_cast<float>((1u << bits) - 1);
  const float scale = Bf16ToFloat(FloatToBf16((hi - lo) / steps));
  if (!std::isfinite(scale)) return absl::InvalidArgumentError("a row's range is not finite");
  const float reciprocal = scale < std::numeric_limits<float>::min() ? 0.0f : 1.0f / scale;
  for (uint16_t& y : group) {
    const float level = std::nearbyintf((Bf16ToFloat(y) - lo) * reciprocal);
    y = FloatToBf16(lo + scale * std::min(std::max(level, 0.0f), steps));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FakeQuantizeRow(uint32_t group_size, uint32_t bits, absl::Span<uint16_t> row) {
  OKV_CHECK(group_size > 0 && row.size() % group_size == 0 && bits >= 1 && bits <= 16);
  for (size_t first = 0; first < row.size(); first += group_size) {
    OKV_RETURN_IF_ERROR(FakeQuantizeGroup(bits, row.subspan(first, group_size)));
  }
  return absl::OkStatus();
}

FakeQuantizedCache::FakeQuantizedCache(const ModelConfig& config, const Format& format,
                                       const RotationSet* rotations, uint32_t bits,
                                       ThreadPool* pool)
    : query_heads_(config.query_heads),
      format_(format),
      layout_(PageLayout::Of(format)),
      rotations_(rotations),
      bits_(bits),
      pool_(pool),
      layers_(format.layers_count()) {
  OKV_CHECK(format.Validate().ok() && rotations->CheckMatches(format).ok());
}

uint32_t FakeQuantizedCache::tokens_count() const {
  const auto least = std::min_element(
      layers_.begin(), layers_.end(),
      [](const Layer& a, const Layer& b) { return a.tokens_count < b.tokens_count; });
  return least->tokens_count;
}

absl::Status FakeQuantizedCache::Append(const AppendRows& rows) {
  for (uint32_t first = 0; first < rows.tokens_count;) {
    const uint32_t slot = layers_[rows.layer].tokens_count % kBlockTokens;
    const uint32_t count = std::min(kBlockTokens - slot, rows.tokens_count - first);
    OKV_RETURN_IF_ERROR(AppendTile(rows, first, count));
    first += count;
  }
  return absl::OkStatus();
}

absl::Status FakeQuantizedCache::AppendTile(const AppendRows& rows, uint32_t first,
                                            uint32_t count) {
  Layer& layer = layers_[rows.layer];
  const uint32_t block = layer.tokens_count / kBlockTokens;
  if (layer.tokens_count % kBlockTokens == 0) {
    layer.pages.emplace_back(layout_.page_bytes(Codec::kBf16) / sizeof(uint16_t));
    if (block >= format_.sink_blocks() + format_.recent_blocks() + 1) {
      OKV_RETURN_IF_ERROR(DemotePage(&layer.pages[block - format_.recent_blocks() - 1]));
    }
  }
  StoreRows(rows, first, count);
  OKV_RETURN_IF_ERROR(AttendRows(rows, first, count));
  layer.tokens_count += count;
  return absl::OkStatus();
}

absl::Status FakeQuantizedCache::DemotePage(std::vector<uint16_t>* page) const {
  // K and V rows of all heads follow each other: rows of head_dim elements throughout.
  return FakeQuantizeRow(layout_.group_size, bits_, absl::MakeSpan(*page));
}

void FakeQuantizedCache::StoreRows(const AppendRows& rows, uint32_t first, uint32_t count) {
  Layer& layer = layers_[rows.layer];
  uint16_t* page = layer.pages.back().data();
  const size_t row_stride = size_t{layout_.kv_heads} * layout_.head_dim;
  const size_t run_size = layout_.run_bytes(Codec::kBf16) / sizeof(uint16_t);
  const size_t slot_offset = size_t{layer.tokens_count % kBlockTokens} * layout_.head_dim;
  for (uint32_t head = 0; head < layout_.kv_heads; ++head) {
    const size_t x_offset = first * row_stride + size_t{head} * layout_.head_dim;
    uint16_t* y = page + run_size * head + slot_offset;
    RotateRows({.x = rows.k + x_offset,
                .x_stride = row_stride,
                .r = rotations_->RotationK(rows.layer, head),
                .rows_count = count,
                .dim = layout_.head_dim},
               y, layout_.head_dim);
    RotateRows({.x = rows.v + x_offset,
                .x_stride = row_stride,
                .r = rotations_->RotationV(rows.layer, head),
                .rows_count = count,
                .dim = layout_.head_dim},
               y + layout_.bf16_v_offset() / sizeof(uint16_t), layout_.head_dim);
  }
}

absl::Status FakeQuantizedCache::AttendRows(const AppendRows& rows, uint32_t first,
                                            uint32_t count) {
  const Layer& layer = layers_[rows.layer];
  std::vector<AttendBlock> view;
  for (const std::vector<uint16_t>& page : layer.pages) {
    view.push_back({.codec = Codec::kBf16, .page = reinterpret_cast<const uint8_t*>(page.data())});
  }
  const size_t row = size_t{query_heads_} * layout_.head_dim;
  return Attend({.query_heads = query_heads_,
                 .kv_heads = layout_.kv_heads,
                 .head_dim = layout_.head_dim,
                 .group_size = layout_.group_size,
                 .softmax_scale = 1.0f / std::sqrt(static_cast<float>(layout_.head_dim)),
                 .q = rows.q + first * row,
                 .r_k = rotations_->RotationK(rows.layer, 0),
                 .r_v = rotations_->RotationV(rows.layer, 0),
                 .rotation_heads = rotations_->rotation_heads,
                 .queries_count = count,
                 .blocks = view,
                 .last_block_tokens = layer.tokens_count % kBlockTokens + 1,
                 .out = rows.out + first * row},
                pool_);
}

}  // namespace okv
