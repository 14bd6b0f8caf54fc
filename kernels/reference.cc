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

// REQUIRES: the code's bits are 0 still.
void StoreCode(const int2::CodePosition& at, uint8_t code, uint8_t* run) {
  run[at.byte] = static_cast<uint8_t>(run[at.byte] | code << at.shift);
}

int32_t CodeAt(const uint8_t* run, const int2::CodePosition& at) {
  return run[at.byte] >> at.shift & 3;
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
    for (uint32_t c = 0; c < params.dim; ++c) {
      StoreCode(int2::KeyCode(params.dim, t, c), codes[c], run);
    }
    for (uint32_t g = 0; g < groups; ++g) {
      StoreGroupParams(group_params[g], run + int2::KeyParams(params.dim, groups, t, g));
    }
  }
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    if (!QuantizeRow(params, params.v + t * params.row_stride, params.clip_rank_v, codes.data(),
                     group_params.data())) {
      *bad = {.token = t, .is_value = true};
      return BadRowError(*bad);
    }
    for (uint32_t c = 0; c < params.dim; ++c) {
      StoreCode(int2::ValueCode(params.dim, t, c), codes[c], run);
    }
    for (uint32_t g = 0; g < groups; ++g) {
      StoreGroupParams(group_params[g], run + int2::ValueParams(params.dim, groups, t, g));
    }
  }
  return absl::OkStatus();
}

void DequantizeRunF32(const DequantizeRunParams& params, float* k, float* v) {
  const uint32_t groups = params.dim / params.group_size;
  const uint8_t* const run = params.run;
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    for (uint32_t c = 0; c < params.dim; ++c) {
      const uint32_t g = c / params.group_size;
      const float k_code = static_cast<float>(CodeAt(run, int2::KeyCode(params.dim, t, c)));
      const float v_code = static_cast<float>(CodeAt(run, int2::ValueCode(params.dim, t, c)));
      const GroupParams k_params = LoadGroupParams(run + int2::KeyParams(params.dim, groups, t, g));
      const GroupParams v_params =
          LoadGroupParams(run + int2::ValueParams(params.dim, groups, t, g));
      k[t * params.dim + c] = Bf16ToFloat(k_params.offset) + Bf16ToFloat(k_params.scale) * k_code;
      v[t * params.dim + c] = Bf16ToFloat(v_params.offset) + Bf16ToFloat(v_params.scale) * v_code;
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

// A query in fixed point.
struct FixedQuery {
  std::vector<int32_t> q;   // [d]
  float factor = 0;         // What an integer product with codes is worth as a score.
  std::vector<float> sums;  // [groups] factor * the sum of a group's integers
};

struct RowState {
  std::vector<float> o;        // [d], not yet divided by the sum
  float sums[kSumLanes] = {};  // Of p.
  std::vector<float> offsets;  // [groups][kSumLanes] of p * offset, int2 values
  float max = -std::numeric_limits<float>::infinity();  // Of scores in units of log 2.
};

struct Row {
  std::vector<float> q;  // [d], rotated
  FixedQuery fixed;
  RowState total;  // Of the spans so far.
  RowState span;
};

RowState EmptyState(const AttendParams& params) {
  RowState state;
  state.o.resize(params.head_dim);
  state.offsets.resize(size_t{kSumLanes} * (params.head_dim / params.group_size));
  return state;
}

// One KV head's run: fp32 rows [64][d] of a bf16 block; codes [64][d] and words [groups][64] of an
// int2 one.
struct Run {
  Codec codec = Codec::kBf16;
  std::vector<float> k;
  std::vector<float> v;
  std::vector<int32_t> k_codes;
  std::vector<int32_t> v_codes;
  std::vector<GroupParams> k_params;
  std::vector<GroupParams> v_params;
};

Run LoadBf16Run(const PageLayout& layout, const uint8_t* bytes) {
  Run run;
  run.codec = Codec::kBf16;
  for (size_t i = 0; i < size_t{kBlockTokens} * layout.head_dim; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + i * 2, 2);
    run.k.push_back(Bf16ToFloat(bits));
    std::memcpy(&bits, bytes + layout.bf16_v_offset() + i * 2, 2);
    run.v.push_back(Bf16ToFloat(bits));
  }
  return run;
}

Run LoadInt2Run(const PageLayout& layout, const uint8_t* bytes) {
  const uint32_t dim = layout.head_dim;
  Run run;
  run.codec = Codec::kInt2;
  for (uint32_t t = 0; t < kBlockTokens; ++t) {
    for (uint32_t c = 0; c < dim; ++c) {
      run.k_codes.push_back(CodeAt(bytes, int2::KeyCode(dim, t, c)));
      run.v_codes.push_back(CodeAt(bytes, int2::ValueCode(dim, t, c)));
    }
  }
  for (uint32_t g = 0; g < layout.groups(); ++g) {
    for (uint32_t t = 0; t < kBlockTokens; ++t) {
      run.k_params.push_back(LoadGroupParams(bytes + int2::KeyParams(dim, layout.groups(), t, g)));
      run.v_params.push_back(
          LoadGroupParams(bytes + int2::ValueParams(dim, layout.groups(), t, g)));
    }
  }
  return run;
}

Run LoadRun(const AttendParams& params, const AttendBlock& block, uint32_t kv_head) {
  const PageLayout layout = RunLayout(params.head_dim, params.group_size);
  const uint8_t* const bytes = block.page + layout.run_bytes(block.codec) * kv_head;
  return block.codec == Codec::kInt2 ? LoadInt2Run(layout, bytes) : LoadBf16Run(layout, bytes);
}

// Fixed-point integers of `values`; all 0 when there are none (see FixedPoint).
FixedPoint ToFixed(const std::vector<float>& values, float fixed_max, std::vector<int32_t>* fixed) {
  uint32_t max_bits = 0;
  for (const float value : values) {
    max_bits = std::max(max_bits, std::bit_cast<uint32_t>(value) & 0x7fffffffu);
  }
  const FixedPoint point = FixedPointOf(max_bits, fixed_max);
  fixed->assign(values.size(), 0);
  if (point.inverse == 0.0f) return point;
  for (size_t i = 0; i < values.size(); ++i) {
    (*fixed)[i] = static_cast<int32_t>(std::nearbyintf(values[i] * point.inverse));
  }
  return point;
}

// `scale`: of scores, in units of log 2.
FixedQuery FixQuery(const std::vector<float>& q, uint32_t group_size, float scale) {
  FixedQuery fixed;
  fixed.factor = ToFixed(q, kQueryFixedMax, &fixed.q).unit * scale;
  for (size_t begin = 0; begin < q.size(); begin += group_size) {
    int32_t sum = 0;
    for (size_t c = begin; c < begin + group_size; ++c) sum += fixed.q[c];
    fixed.sums.push_back(static_cast<float>(sum) * fixed.factor);
  }
  return fixed;
}

float ScoreBf16(const Run& run, const std::vector<float>& q, uint32_t t, float scale) {
  float dot = 0.0f;
  for (size_t c = 0; c < q.size(); ++c) dot = std::fmaf(q[c], run.k[t * q.size() + c], dot);
  return dot * scale;
}

float ScoreInt2(const Run& run, const FixedQuery& query, uint32_t t) {
  const size_t dim = query.q.size();
  const size_t group_size = dim / query.sums.size();
  float score = 0.0f;
  for (size_t g = 0; g < query.sums.size(); ++g) {
    int32_t product = 0;
    for (size_t c = g * group_size; c < (g + 1) * group_size; ++c) {
      product += query.q[c] * run.k_codes[t * dim + c];
    }
    const GroupParams& params = run.k_params[g * kBlockTokens + t];
    score = std::fmaf(Bf16ToFloat(params.offset), query.sums[g], score);
    score = std::fmaf(Bf16ToFloat(params.scale), static_cast<float>(product) * query.factor, score);
  }
  return score;
}

void AddBf16Values(const Run& run, const float* p, uint32_t visible, RowState* state) {
  const size_t dim = state->o.size();
  for (uint32_t t = 0; t < visible; ++t) {
    for (size_t c = 0; c < dim; ++c) state->o[c] = std::fmaf(p[t], run.v[t * dim + c], state->o[c]);
  }
}

void AddInt2Values(const Run& run, const float* p, uint32_t visible, RowState* state) {
  const size_t dim = state->o.size();
  const size_t groups = state->offsets.size() / kSumLanes;
  const size_t group_size = dim / groups;
  for (size_t g = 0; g < groups; ++g) {
    float* const offsets = &state->offsets[g * kSumLanes];
    std::vector<float> weights(visible);
    for (uint32_t t = 0; t < visible; ++t) {
      const GroupParams& params = run.v_params[g * kBlockTokens + t];
      weights[t] = p[t] * Bf16ToFloat(params.scale);
      float* const offset = offsets + t % kSumLanes;
      *offset = std::fmaf(p[t], Bf16ToFloat(params.offset), *offset);
    }
    std::vector<int32_t> fixed;
    const FixedPoint point = ToFixed(weights, kWeightFixedMax, &fixed);
    for (uint32_t t = 0; t < visible; ++t) {
      const float error = std::fmaf(-point.unit, static_cast<float>(fixed[t]), weights[t]);
      float* const offset = offsets + t % kSumLanes;
      *offset = std::fmaf(kMiddleCode, error, *offset);
    }
    for (size_t c = g * group_size; c < (g + 1) * group_size; ++c) {
      int32_t product = 0;
      for (uint32_t t = 0; t < visible; ++t) product += fixed[t] * run.v_codes[t * dim + c];
      state->o[c] = std::fmaf(point.unit, static_cast<float>(product), state->o[c]);
    }
  }
}

void ScaleState(float factor, RowState* state) {
  for (float& o : state->o) o *= factor;
  for (float& sum : state->sums) sum *= factor;
  for (float& offset : state->offsets) offset *= factor;
}

// Folds the first `visible` tokens of a block into a row's span.
void AttendBlockRow(const Run& run, uint32_t visible, float scale_log2, Row* row) {
  RowState* const state = &row->span;
  float p[kBlockTokens] = {};
  float max = state->max;
  for (uint32_t t = 0; t < visible; ++t) {
    p[t] = run.codec == Codec::kInt2 ? ScoreInt2(run, row->fixed, t)
                                     : ScoreBf16(run, row->q, t, scale_log2);
    max = std::max(max, p[t]);
  }
  if (max > state->max) {
    ScaleState(Exp2Softmax(state->max - max), state);
    state->max = max;
  }
  for (uint32_t t = 0; t < visible; ++t) {
    p[t] = Exp2Softmax(p[t] - max);
    state->sums[t % kSumLanes] += p[t];
  }
  if (run.codec == Codec::kInt2) {
    AddInt2Values(run, p, visible, state);
  } else {
    AddBf16Values(run, p, visible, state);
  }
}

void FoldState(const RowState& span, RowState* total) {
  const float max = std::max(total->max, span.max);
  ScaleState(Exp2Softmax(total->max - max), total);
  const float factor = Exp2Softmax(span.max - max);
  const auto add = [factor](const auto& from, auto* to) {
    for (size_t i = 0; i < std::size(from); ++i) (*to)[i] = std::fmaf(from[i], factor, (*to)[i]);
  };
  add(span.o, &total->o);
  add(span.sums, &total->sums);
  add(span.offsets, &total->offsets);
  total->max = max;
}

float AddPartialSums(float* sums) {
  for (uint32_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (uint32_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// Adds the offsets, divides by the sum and rotates back to the model's basis.
void FinishRow(const uint16_t* r_v, RowState* state, float* out) {
  const size_t dim = state->o.size();
  const size_t groups = state->offsets.size() / kSumLanes;
  const float sum = AddPartialSums(state->sums);
  for (size_t g = 0; g < groups; ++g) {
    const float offset = AddPartialSums(&state->offsets[g * kSumLanes]);
    for (size_t c = g * dim / groups; c < (g + 1) * dim / groups; ++c) {
      state->o[c] = (state->o[c] + offset) / sum;
    }
  }
  RotateRowsF32({.x = state->o.data(),
                 .x_stride = dim,
                 .r = r_v,
                 .rows_count = 1,
                 .dim = static_cast<uint32_t>(dim),
                 .transpose = true},
                out, dim);
}

// A range's rows with their queries rotated, r_k the KV head's.
std::vector<Row> LoadRows(const AttendParams& params, const AttendRange& range,
                          const uint16_t* r_k) {
  const uint32_t dim = params.head_dim;
  std::vector<Row> rows(range.row_end - range.row_begin);
  for (uint32_t i = 0; i < rows.size(); ++i) {
    rows[i].q.resize(dim);
    RotateRowsF32({.x = params.q + RowOffset(params, range.kv_head, range.row_begin + i),
                   .x_stride = dim,
                   .r = r_k,
                   .rows_count = 1,
                   .dim = dim,
                   .transpose = false},
                  rows[i].q.data(), dim);
    rows[i].fixed = FixQuery(rows[i].q, params.group_size, params.softmax_scale * kLog2E);
  }
  return rows;
}

}  // namespace

void AttendRows(const AttendParams& params, const AttendRange& range) {
  const uint32_t dim = params.head_dim;
  const size_t rotation = params.rotation_heads == 1 ? 0 : size_t{range.kv_head} * dim * dim;
  std::vector<Row> rows = LoadRows(params, range, params.r_k + rotation);
  for (uint32_t b = 0; b < params.blocks.size(); ++b) {
    const Run run = LoadRun(params, params.blocks[b], range.kv_head);
    const bool span_ends = (b + 1) % kSpanBlocks == 0 || b + 1 == params.blocks.size();
    for (uint32_t i = 0; i < rows.size(); ++i) {
      if (b % kSpanBlocks == 0) rows[i].span = EmptyState(params);
      AttendBlockRow(run, VisibleTokens(params, b, range.row_begin + i),
                     params.softmax_scale * kLog2E, &rows[i]);
      if (!span_ends) continue;
      if (b < kSpanBlocks) {
        rows[i].total = rows[i].span;
      } else {
        FoldState(rows[i].span, &rows[i].total);
      }
    }
  }
  for (uint32_t i = 0; i < rows.size(); ++i) {
    float* const out = params.out + RowOffset(params, range.kv_head, range.row_begin + i);
    if (params.blocks.empty()) {
      std::fill(out, out + dim, 0.0f);
    } else {
      FinishRow(params.r_v + rotation, &rows[i].total, out);
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
