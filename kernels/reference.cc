// The scalar twin of every CPU kernel, and the specification of their bits: the SIMD paths are
// tested against it for equality. Written to be read, not to be fast.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/attend.h"
#include "kernels/attend_rows.h"
#include "kernels/quantize.h"
#include "kernels/softmax_exp2.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/page_layout.h"

namespace okv::reference {
namespace {

constexpr uint16_t kAbsMask = 0x7fff;
constexpr uint16_t kSmallestNormal = 0x0080;
constexpr uint16_t kInfinity = 0x7f80;

// NaN has one spelling here: which payload an fma passes on depends on the order of its operands.
uint16_t ToBf16OneNan(float value) { return std::isnan(value) ? 0x7fc0 : FloatToBf16(value); }

PageLayout RunLayout(uint32_t dim, uint32_t group_size) {
  return {.layers_count = 1, .kv_heads = 1, .head_dim = dim, .group_size = group_size};
}

struct GroupParams {
  uint16_t scale;   // bf16
  uint16_t offset;  // bf16
};

GroupParams LoadGroupParams(const uint8_t* word) {
  return {.scale = static_cast<uint16_t>(word[0] | word[1] << 8),
          .offset = static_cast<uint16_t>(word[2] | word[3] << 8)};
}

void StoreGroupParams(const GroupParams& params, uint8_t* word) {
  word[0] = static_cast<uint8_t>(params.scale);
  word[1] = static_cast<uint8_t>(params.scale >> 8);
  word[2] = static_cast<uint8_t>(params.offset);
  word[3] = static_cast<uint8_t>(params.offset >> 8);
}

// Subnormal y and -0 become +0. False when the row holds NaN or Inf.
bool SanitizeRow(const uint16_t* row, uint32_t dim, uint16_t* y) {
  for (uint32_t c = 0; c < dim; ++c) {
    const uint16_t magnitude = row[c] & kAbsMask;
    if (magnitude >= kInfinity) return false;
    y[c] = magnitude < kSmallestNormal ? 0 : row[c];
  }
  return true;
}

// Clamps to +-t, t = the clip_rank-th smallest |y|. |bf16| order as their bits do. What t = 0
// clamps becomes +0 from either side: there is no -0 after this.
void ClipRow(uint32_t clip_rank, uint32_t dim, uint16_t* y) {
  if (clip_rank == 0) return;
  std::vector<uint16_t> magnitudes(dim);
  for (uint32_t c = 0; c < dim; ++c) magnitudes[c] = y[c] & kAbsMask;
  std::nth_element(magnitudes.begin(), magnitudes.begin() + clip_rank, magnitudes.end());
  const uint16_t threshold = magnitudes[clip_rank];
  for (uint32_t c = 0; c < dim; ++c) {
    const uint16_t clipped = std::min<uint16_t>(y[c] & kAbsMask, threshold);
    y[c] = clipped == 0 ? 0 : static_cast<uint16_t>(clipped | (y[c] & ~kAbsMask));
  }
}

// False when max - min or the scale is not finite.
bool QuantizeGroup(const uint16_t* y, uint32_t group_size, uint8_t* codes, GroupParams* params) {
  float lo = Bf16ToFloat(y[0]);
  float hi = lo;
  for (uint32_t c = 1; c < group_size; ++c) {
    lo = std::min(lo, Bf16ToFloat(y[c]));
    hi = std::max(hi, Bf16ToFloat(y[c]));
  }
  const float range = hi - lo;
  if (!std::isfinite(range)) return false;
  uint16_t scale_bits = FloatToBf16(range / 3.0f);
  if (scale_bits >= kInfinity) return false;
  if (scale_bits < kSmallestNormal) scale_bits = 0;
  *params = {.scale = scale_bits, .offset = FloatToBf16(lo)};
  if (scale_bits == 0) {
    std::fill(codes, codes + group_size, uint8_t{0});
    return true;
  }
  const float reciprocal = 1.0f / Bf16ToFloat(scale_bits);
  for (uint32_t c = 0; c < group_size; ++c) {
    const float level = std::nearbyintf((Bf16ToFloat(y[c]) - lo) * reciprocal);
    codes[c] = static_cast<uint8_t>(std::min(std::max(level, 0.0f), 3.0f));
  }
  return true;
}

// One row: codes [dim], one a byte, and params [dim / group_size]. False when it has no int2 form.
bool QuantizeRow(const QuantizeRunParams& params, const uint16_t* row, uint32_t clip_rank,
                 uint8_t* codes, GroupParams* group_params) {
  std::vector<uint16_t> y(params.dim);
  if (!SanitizeRow(row, params.dim, y.data())) return false;
  ClipRow(clip_rank, params.dim, y.data());
  for (uint32_t g = 0; g < params.dim / params.group_size; ++g) {
    const uint32_t c = g * params.group_size;
    if (!QuantizeGroup(&y[c], params.group_size, codes + c, &group_params[g])) return false;
  }
  return true;
}

absl::Status BadRowError(const BadRow& bad) {
  return absl::InvalidArgumentError(
      absl::StrCat(bad.is_value ? "value" : "key", " row of token ", bad.token,
                   " of the block holds NaN, Inf or a range that bf16 cannot hold"));
}

}  // namespace

void RotateRows(const RotateParams& params, uint16_t* y, size_t y_stride) {
  for (size_t i = 0; i < params.rows_count; ++i) {
    for (uint32_t n = 0; n < params.dim; ++n) {
      float sum = 0.0f;
      for (uint32_t k = 0; k < params.dim; ++k) {
        sum = std::fmaf(Bf16ToFloat(params.x[i * params.x_stride + k]),
                        Bf16ToFloat(params.r[size_t{k} * params.dim + n]), sum);
      }
      y[i * y_stride + n] = ToBf16OneNan(sum);
    }
  }
}

void RotateRowsF32(const RotateQueriesParams& params, float* y, size_t y_stride) {
  const size_t k_stride = params.transpose ? 1 : params.dim;
  const size_t n_stride = params.transpose ? params.dim : 1;
  for (size_t i = 0; i < params.rows_count; ++i) {
    for (uint32_t n = 0; n < params.dim; ++n) {
      float sum = 0.0f;
      for (uint32_t k = 0; k < params.dim; ++k) {
        sum = std::fmaf(params.x[i * params.x_stride + k],
                        Bf16ToFloat(params.r[k * k_stride + n * n_stride]), sum);
      }
      y[i * y_stride + n] = sum;
    }
  }
}

// Of several bad rows it names the first K row, or the first V row when every K row is good.
absl::Status QuantizeRun(const QuantizeRunParams& params, uint8_t* run, BadRow* bad) {
  OKV_CHECK(params.clip_rank_k < params.dim && params.clip_rank_v < params.dim);
  const PageLayout layout = RunLayout(params.dim, params.group_size);
  const uint32_t groups = layout.groups();
  std::vector<uint8_t> codes(params.dim);
  std::vector<GroupParams> group_params(groups);
  std::memset(run, 0, layout.run_bytes(Codec::kInt2));
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    if (!QuantizeRow(params, params.k + t * params.row_stride, params.clip_rank_k, codes.data(),
                     group_params.data())) {
      *bad = {.token = t, .is_value = false};
      return BadRowError(*bad);
    }
    for (uint32_t c = 0; c < params.dim; ++c) run[c * 16 + t % 16] |= codes[c] << (2 * (t / 16));
    for (uint32_t g = 0; g < groups; ++g) {
      StoreGroupParams(group_params[g], run + layout.k_params_offset() + (g * 64 + t) * 4);
    }
  }
  const uint32_t quarter = params.dim / 4;
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    if (!QuantizeRow(params, params.v + t * params.row_stride, params.clip_rank_v, codes.data(),
                     group_params.data())) {
      *bad = {.token = t, .is_value = true};
      return BadRowError(*bad);
    }
    uint8_t* const v_codes = run + layout.v_codes_offset() + size_t{t} * quarter;
    for (uint32_t c = 0; c < params.dim; ++c)
      v_codes[c % quarter] |= codes[c] << (2 * (c / quarter));
    for (uint32_t g = 0; g < groups; ++g) {
      StoreGroupParams(group_params[g], run + layout.v_params_offset() + (t * groups + g) * 4);
    }
  }
  return absl::OkStatus();
}

void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v) {
  const PageLayout layout = RunLayout(params.dim, params.group_size);
  const uint32_t groups = layout.groups();
  const uint32_t quarter = params.dim / 4;
  const uint8_t* const run = params.run;
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    for (uint32_t c = 0; c < params.dim; ++c) {
      const uint32_t g = c / params.group_size;
      const uint32_t k_code = run[c * 16 + t % 16] >> (2 * (t / 16)) & 3;
      const uint32_t v_code =
          run[layout.v_codes_offset() + t * quarter + c % quarter] >> (2 * (c / quarter)) & 3;
      const GroupParams k_params =
          LoadGroupParams(run + layout.k_params_offset() + (g * 64 + t) * 4);
      const GroupParams v_params =
          LoadGroupParams(run + layout.v_params_offset() + (t * groups + g) * 4);
      k[t * params.dim + c] =
          Bf16ToFloat(k_params.offset) + Bf16ToFloat(k_params.scale) * static_cast<float>(k_code);
      v[t * params.dim + c] =
          Bf16ToFloat(v_params.offset) + Bf16ToFloat(v_params.scale) * static_cast<float>(v_code);
    }
  }
}

void DequantizeRun(const DequantizeRunParams& params, uint16_t* k, uint16_t* v) {
  const size_t elements = size_t{kBlockTokens} * params.dim;
  std::vector<float> k_f32(elements);
  std::vector<float> v_f32(elements);
  reference::DequantizeRunF32(params, k_f32.data(), v_f32.data());
  for (size_t i = 0; i < elements; ++i) {
    k[i] = FloatToBf16(k_f32[i]);
    v[i] = FloatToBf16(v_f32[i]);
  }
}

namespace {

struct RowState {
  std::vector<float> q;  // [d], rotated
  std::vector<float> o;  // [d], not yet divided by the sum
  float sums[kSumLanes] = {};
  float max = -std::numeric_limits<float>::infinity();  // Of scores in units of log 2.
};

// One KV head's run as fp32 rows [64][d].
void LoadRun(const AttendParams& params, const AttendBlock& block, uint32_t kv_head, float* k,
             float* v) {
  const PageLayout layout = RunLayout(params.head_dim, params.group_size);
  const uint8_t* const run = block.page + layout.run_bytes(block.codec) * kv_head;
  if (block.codec == Codec::kInt2) {
    DequantizeRunF32({.run = run, .dim = params.head_dim, .group_size = params.group_size}, k, v);
    return;
  }
  for (size_t i = 0; i < size_t{kBlockTokens} * params.head_dim; ++i) {
    uint16_t bits;
    std::memcpy(&bits, run + i * 2, 2);
    k[i] = Bf16ToFloat(bits);
    std::memcpy(&bits, run + layout.bf16_v_offset() + i * 2, 2);
    v[i] = Bf16ToFloat(bits);
  }
}

// Folds the first `visible` tokens of a block into a row.
void AttendBlockRow(const float* k, const float* v, uint32_t visible, float scale_log2,
                    RowState* row) {
  const size_t dim = row->q.size();
  float p[kBlockTokens] = {};
  float max = row->max;
  for (uint32_t t = 0; t < visible; ++t) {
    float dot = 0.0f;
    for (size_t c = 0; c < dim; ++c) dot = std::fmaf(row->q[c], k[t * dim + c], dot);
    p[t] = dot * scale_log2;
    max = std::max(max, p[t]);
  }
  if (max > row->max) {
    const float factor = Exp2Softmax(row->max - max);
    for (float& o : row->o) o *= factor;
    for (float& sum : row->sums) sum *= factor;
    row->max = max;
  }
  for (uint32_t t = 0; t < visible; ++t) {
    p[t] = Exp2Softmax(p[t] - max);
    row->sums[t % kSumLanes] += p[t];
    for (size_t c = 0; c < dim; ++c) row->o[c] = std::fmaf(p[t], v[t * dim + c], row->o[c]);
  }
}

// Divides by the sum and rotates back to the model's basis.
void FinishRow(const uint16_t* r_v, RowState* row, float* out) {
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (uint32_t j = 0; j < width; ++j) row->sums[j] += row->sums[j + width];
  }
  for (float& o : row->o) o /= row->sums[0];
  const size_t dim = row->o.size();
  RotateRowsF32({.x = row->o.data(),
                 .x_stride = dim,
                 .r = r_v,
                 .rows_count = 1,
                 .dim = static_cast<uint32_t>(dim),
                 .transpose = true},
                out, dim);
}

}  // namespace

void AttendRows(const AttendParams& params, const AttendRange& range) {
  const uint32_t dim = params.head_dim;
  const size_t rotation = params.rotation_heads == 1 ? 0 : size_t{range.kv_head} * dim * dim;
  std::vector<RowState> rows(range.row_end - range.row_begin);
  for (uint32_t i = 0; i < rows.size(); ++i) {
    rows[i].q.resize(dim);
    rows[i].o.resize(dim);
    RotateRowsF32({.x = params.q + RowOffset(params, range.kv_head, range.row_begin + i),
                   .x_stride = dim,
                   .r = params.r_k + rotation,
                   .rows_count = 1,
                   .dim = dim,
                   .transpose = false},
                  rows[i].q.data(), dim);
  }
  std::vector<float> k(size_t{kBlockTokens} * dim);
  std::vector<float> v(size_t{kBlockTokens} * dim);
  const float scale_log2 = params.softmax_scale * kLog2E;
  for (uint32_t b = 0; b < params.blocks.size(); ++b) {
    LoadRun(params, params.blocks[b], range.kv_head, k.data(), v.data());
    for (uint32_t i = 0; i < rows.size(); ++i) {
      AttendBlockRow(k.data(), v.data(), VisibleTokens(params, b, range.row_begin + i), scale_log2,
                     &rows[i]);
    }
  }
  for (uint32_t i = 0; i < rows.size(); ++i) {
    float* const out = params.out + RowOffset(params, range.kv_head, range.row_begin + i);
    if (params.blocks.empty()) {
      std::fill(out, out + dim, 0.0f);
    } else {
      FinishRow(params.r_v + rotation, &rows[i], out);
    }
  }
}

absl::Status Attend(const AttendParams& params) {
  if (absl::Status status = ValidateAttend(params); !status.ok()) return status;
  const uint32_t rows = params.queries_count * (params.query_heads / params.kv_heads);
  for (uint32_t head = 0; head < params.kv_heads; ++head) {
    AttendRows(params, {.kv_head = head, .row_begin = 0, .row_end = rows});
  }
  return absl::OkStatus();
}

}  // namespace okv::reference
