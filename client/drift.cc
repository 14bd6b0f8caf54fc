#include "client/drift.h"

#include <xxhash.h>

#include <algorithm>
#include <array>

#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/int2_layout.h"

namespace okv {
namespace {

constexpr uint32_t kDimMax = 256;

// |y| as its bits, which order as |y| does; a subnormal is 0, as for the codec.
uint16_t MagnitudeBits(uint16_t y) {
  const uint16_t magnitude = y & 0x7fff;
  return magnitude < 0x0080 ? 0 : magnitude;
}

// How many elements the codec clamps.
uint32_t CountClipped(const uint16_t* y, uint32_t dim, uint32_t clip_rank) {
  if (clip_rank == 0) return 0;
  std::array<uint16_t, kDimMax> magnitudes;
  std::transform(y, y + dim, magnitudes.begin(), MagnitudeBits);
  const auto threshold = magnitudes.begin() + clip_rank;
  const auto end = magnitudes.begin() + dim;
  // What is greater than the rank's element stands behind it.
  std::nth_element(magnitudes.begin(), threshold, end);
  return static_cast<uint32_t>(
      std::count_if(threshold, end, [t = *threshold](uint16_t m) { return m > t; }));
}

// One row of an int2 run, as DequantizeRunF32 gives it. That one reads all 64 tokens: with it a
// demotion of 8 heads of 128 took 2 % longer at the default rate, with this 0.3 %.
void RestoreRow(const PageLayout& layout, const uint8_t* run, uint32_t token, bool is_value,
                float* x) {
  const uint32_t dim = layout.head_dim;
  for (uint32_t g = 0; g < layout.groups(); ++g) {
    const uint8_t* const word = run + (is_value ? int2::ValueParams(dim, layout.groups(), token, g)
                                                : int2::KeyParams(dim, layout.groups(), token, g));
    const float scale = Bf16ToFloat(static_cast<uint16_t>(word[0] | word[1] << 8));
    const float offset = Bf16ToFloat(static_cast<uint16_t>(word[2] | word[3] << 8));
    for (uint32_t c = g * layout.group_size; c < (g + 1) * layout.group_size; ++c) {
      const int2::CodePosition at =
          is_value ? int2::ValueCode(dim, token, c) : int2::KeyCode(dim, token, c);
      x[c] = offset + scale * static_cast<float>(run[at.byte] >> at.shift & 3);
    }
  }
}

// y: [dim] bf16, rotated; restored: [dim], of the page.
void AddRow(const uint16_t* y, const float* restored, uint32_t dim, uint32_t clip_rank,
            DriftTensor* sums) {
  ++sums->rows;
  sums->elements += dim;
  sums->clipped_elements += CountClipped(y, dim, clip_rank);
  for (uint32_t c = 0; c < dim; ++c) {
    const double exact = Bf16ToFloat(y[c]);
    const double error = restored[c] - exact;
    sums->squared_error += error * error;
    sums->squared_norm += exact * exact;
  }
}

void AddSums(const DriftTensor& from, DriftTensor* to) {
  to->rows += from.rows;
  to->elements += from.elements;
  to->clipped_elements += from.clipped_elements;
  to->squared_error += from.squared_error;
  to->squared_norm += from.squared_norm;
}

double PromisedClipRate(const RotationSet& set, const std::vector<uint32_t>& ranks, size_t layer) {
  uint64_t clipped = 0;
  for (size_t i = layer * set.kv_heads; i < (layer + 1) * set.kv_heads; ++i) {
    if (ranks[i] != 0) clipped += set.head_dim - 1 - ranks[i];
  }
  return static_cast<double>(clipped) / (uint64_t{set.kv_heads} * set.head_dim);
}

DriftStats EmptyStats(const RotationSet& set) {
  DriftStats stats;
  for (size_t i = 0; i < set.layer_ids.size(); ++i) {
    DriftLayer layer{.layer_id = set.layer_ids[i], .k = {}, .v = {}};
    layer.k.promised_clip_rate = PromisedClipRate(set, set.clip_rank_k, i);
    layer.v.promised_clip_rate = PromisedClipRate(set, set.clip_rank_v, i);
    if (!set.promised_error_k.empty()) layer.k.promised_error = set.promised_error_k[i];
    if (!set.promised_error_v.empty()) layer.v.promised_error = set.promised_error_v[i];
    stats.layers.push_back(layer);
  }
  return stats;
}

}  // namespace

DriftMonitor::DriftMonitor(const RotationSet* rotations, const DriftOptions& options)
    : rotations_(rotations),
      layout_({.layers_count = static_cast<uint32_t>(rotations->layer_ids.size()),
               .kv_heads = rotations->kv_heads,
               .head_dim = rotations->head_dim,
               .group_size = rotations->group_size}),
      options_(options),
      stats_(EmptyStats(*rotations)) {}

uint64_t DriftMonitor::SampledRow(uint64_t stretch, const Page& page) const {
  const std::array<uint64_t, 2> position = {rotations_->layer_ids[page.layer], stretch};
  const uint64_t hash = XXH3_64bits_withSeed(position.data(), sizeof(position), page.salt);
  return stretch * options_.rows_per_sample + hash % options_.rows_per_sample;
}

void DriftMonitor::AddSample(const Page& page, uint32_t token, uint32_t head, DriftTensor* k,
                             DriftTensor* v) const {
  const uint8_t* const run = page.int2_page + layout_.run_bytes(Codec::kInt2) * head;
  const uint8_t* const rotated = page.bf16_page + layout_.run_bytes(Codec::kBf16) * head;
  const size_t clip = size_t{page.layer} * layout_.kv_heads + head;
  std::array<float, kDimMax> restored;
  for (const bool is_value : {false, true}) {
    RestoreRow(layout_, run, token, is_value, restored.data());
    const auto* y =
        reinterpret_cast<const uint16_t*>(rotated + (is_value ? layout_.bf16_v_offset() : 0)) +
        size_t{token} * layout_.head_dim;
    AddRow(y, restored.data(), layout_.head_dim,
           (is_value ? rotations_->clip_rank_v : rotations_->clip_rank_k)[clip], is_value ? v : k);
  }
}

// One row of each stretch, instead of each row with the same chance: no layer is left out of a
// sequence by bad luck, and a page costs a hash or two instead of one for each of its rows.
void DriftMonitor::Measure(const Page& page) {
  OKV_CHECK(page.layer < layout_.layers_count);
  if (options_.rows_per_sample == 0) return;
  const uint64_t heads = layout_.kv_heads;
  const uint64_t first = uint64_t{page.block} * kBlockTokens * heads;
  const uint64_t end = first + kBlockTokens * heads;
  DriftTensor k;
  DriftTensor v;
  for (uint64_t stretch = first / options_.rows_per_sample;
       stretch * options_.rows_per_sample < end; ++stretch) {
    const uint64_t row = SampledRow(stretch, page);
    if (row < first || row >= end) continue;
    AddSample(page, static_cast<uint32_t>((row - first) / heads),
              static_cast<uint32_t>(row % heads), &k, &v);
  }
  if (k.rows == 0) return;
  MutexLock lock(&mu_);
  AddSums(k, &stats_.layers[page.layer].k);
  AddSums(v, &stats_.layers[page.layer].v);
}

DriftStats DriftMonitor::Stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

}  // namespace okv
