// Attention of a tile of queries over one layer's visible blocks. A task is some rows of one KV
// head; it widens each block once (K transposed, lanes = tokens for the scores; V token-major,
// lanes = channels for the output) into 2 x 64 x d fp32 of scratch, 32 KiB at d 64, and passes its
// rows over that in register blocks of 6. Per row and block 4 * 64 * d FLOP, and 64 exponentials.
#include "kernels/attend.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/attend_rows.h"
#include "kernels/simd.h"
#include "kernels/simd_targets.h"
#include "kernels/softmax_exp2.h"
#include "proto/page_layout.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attend.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dequantize-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

constexpr size_t kTokens = kBlockTokens;
constexpr size_t kSumVectors = kSumLanes / kLanes;

// The task's scratch, all fp32.
struct Scratch {
  float* rotation;  // [dim, dim]
  float* kt;        // [dim, 64] a block's K, transposed
  float* v;         // [64, dim] a block's V
  float* q;         // [rows, dim] rotated queries
  float* o;         // [rows, dim] sums of p v
  float* sums;      // [rows, kSumLanes] partial sums of p
  float* maxima;    // [rows]
  float* p;         // [kBlockRows, 64] scores, then probabilities, of one register block
};

Scratch MakeScratch(size_t rows, size_t dim) {
  const size_t rows_aligned = (rows + 15) / 16 * 16;
  float* next = ThreadScratch(dim * dim + 2 * kTokens * dim + 2 * rows * dim + rows * kSumLanes +
                              rows_aligned + kBlockRows * kTokens);
  const auto take = [&next](size_t floats_count) {
    float* const part = next;
    next += floats_count;
    return part;
  };
  return {.rotation = take(dim * dim),
          .kt = take(dim * kTokens),
          .v = take(kTokens * dim),
          .q = take(rows * dim),
          .o = take(rows * dim),
          .sums = take(rows * kSumLanes),
          .maxima = take(rows_aligned),
          .p = take(kBlockRows * kTokens)};
}

// Exp2Softmax in every lane.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const DI32 di;
  const auto tiny = hn::Lt(x, hn::Set(d, kExp2Min));  // Not NaN, which reaches the result by f.
  const VF n = hn::Round(hn::Max(x, hn::Set(d, kExp2Min)));
  const VF f = hn::Sub(x, n);
  VF q = hn::Set(d, kExp2C6);
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C5));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C4));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C3));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C2));
  q = hn::MulAdd(q, f, hn::Set(d, kExp2C1));
  const auto power = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  const VF result = hn::Mul(hn::MulAdd(q, f, hn::Set(d, 1.0f)), hn::BitCast(d, power));
  return hn::IfThenZeroElse(tiny, result);
}

HWY_INLINE void Scale(float factor, size_t count, float* values) {
  const DF d;
  const VF factors = hn::Set(d, factor);
  for (size_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, values + i), factors), d, values + i);
  }
}

struct SoftmaxRow {
  float* p;  // [64] in: dot products, out: probabilities, 0 from `visible` on
  uint32_t visible;
  float scale_log2;
  size_t dim;
  float* max;
  float* sums;  // [kSumLanes]
  float* o;     // [dim]
};

// The online softmax of one row and block. Whatever the tokens behind `visible` gave, NaN included,
// is replaced before it is compared or added.
HWY_INLINE void UpdateSoftmax(const SoftmaxRow& row) {
  const DF d;
  const VF none = hn::Set(d, -std::numeric_limits<float>::infinity());
  const VF scale = hn::Set(d, row.scale_log2);
  VF scores[kTokens / kLanes];
  VF block_max = none;
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    scores[i] = hn::Mul(hn::LoadU(d, row.p + i * kLanes), scale);
    if (row.visible < kTokens) {
      const VF token = hn::Iota(d, static_cast<float>(i * kLanes));
      const auto seen = hn::Lt(token, hn::Set(d, static_cast<float>(row.visible)));
      scores[i] = hn::IfThenElse(seen, scores[i], none);
    }
    block_max = hn::Max(block_max, scores[i]);
  }
  // Most blocks raise no maximum: the reduction across lanes is only for those that do.
  if (!hn::AllFalse(d, hn::Gt(block_max, hn::Set(d, *row.max)))) {
    const float max = hn::GetLane(hn::MaxOfLanes(d, block_max));
    const float factor = hn::GetLane(Exp2(hn::Set(d, *row.max - max)));
    Scale(factor, row.dim, row.o);
    Scale(factor, kSumLanes, row.sums);
    *row.max = max;
  }
  const VF max = hn::Set(d, *row.max);
#pragma GCC unroll 16
  for (size_t i = 0; i < kTokens / kLanes; ++i) {
    scores[i] = Exp2(hn::Sub(scores[i], max));
    hn::StoreU(scores[i], d, row.p + i * kLanes);
  }
#pragma GCC unroll 4
  for (size_t part = 0; part < kSumVectors; ++part) {
    VF sum = hn::LoadU(d, row.sums + part * kLanes);
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; ++i) sum = hn::Add(sum, scores[i * kSumVectors + part]);
    hn::StoreU(sum, d, row.sums + part * kLanes);
  }
}

// Widens what `block` holds for the KV head; V only as far as any row of the range sees.
void LoadBlock(const AttendParams& params, const AttendRange& range, uint32_t index,
               const Scratch& scratch) {
  const AttendBlock& block = params.blocks[index];
  const PageLayout layout{.layers_count = 1,
                          .kv_heads = params.kv_heads,
                          .head_dim = params.head_dim,
                          .group_size = params.group_size};
  const uint8_t* const run = block.page + layout.run_offset(block.codec, 0, range.kv_head);
  const size_t tokens_count = VisibleTokens(params, index, range.row_end - 1);
  if (block.codec == Codec::kInt2) {
    LoadKeysTransposedInt2(layout, run, scratch.kt);
    LoadValuesInt2(layout, run, tokens_count, scratch.v);
  } else {
    LoadKeysTransposedBf16(layout, run, scratch.kt);
    LoadValuesBf16(layout, run, tokens_count, scratch.v);
  }
}

// o += p V for rows [begin, end) of the task, whose p start at scratch.p. Rows that see different
// tokens (the last block) are not multiplied together: a p of 0 is no mask, 0 * Inf is NaN.
HWY_INLINE void AddValues(const AttendParams& params, const AttendRange& range, uint32_t block,
                          uint32_t begin, uint32_t end, const Scratch& scratch) {
  const size_t dim = params.head_dim;
  for (uint32_t row = begin; row < end;) {
    const uint32_t visible = VisibleTokens(params, block, range.row_begin + row);
    uint32_t next = row + 1;
    while (next < end && VisibleTokens(params, block, range.row_begin + next) == visible) ++next;
    MultiplyRows({.a = scratch.p + (row - begin) * kTokens,
                  .a_stride = kTokens,
                  .b = scratch.v,
                  .b_stride = dim,
                  .c = scratch.o + row * dim,
                  .c_stride = dim,
                  .rows_count = next - row,
                  .k_count = visible,
                  .n_count = dim,
                  .accumulate = true});
    row = next;
  }
}

void AttendBlockRows(const AttendParams& params, const AttendRange& range, uint32_t block,
                     const Scratch& scratch) {
  const size_t dim = params.head_dim;
  const uint32_t rows_count = range.row_end - range.row_begin;
  const float scale_log2 = params.softmax_scale * kLog2E;
  LoadBlock(params, range, block, scratch);
  for (uint32_t begin = 0; begin < rows_count; begin += kBlockRows) {
    const uint32_t end = std::min<uint32_t>(begin + kBlockRows, rows_count);
    MultiplyRows({.a = scratch.q + begin * dim,
                  .a_stride = dim,
                  .b = scratch.kt,
                  .b_stride = kTokens,
                  .c = scratch.p,
                  .c_stride = kTokens,
                  .rows_count = end - begin,
                  .k_count = dim,
                  .n_count = kTokens,
                  .accumulate = false});
    for (uint32_t row = begin; row < end; ++row) {
      UpdateSoftmax({.p = scratch.p + (row - begin) * kTokens,
                     .visible = VisibleTokens(params, block, range.row_begin + row),
                     .scale_log2 = scale_log2,
                     .dim = dim,
                     .max = scratch.maxima + row,
                     .sums = scratch.sums + row * kSumLanes,
                     .o = scratch.o + row * dim});
    }
    AddValues(params, range, block, begin, end, scratch);
  }
}

// to = from R (or R^T) for all rows of the task.
void Rotate(const uint16_t* r, bool transpose, size_t rows_count, uint32_t dim, const float* from,
            float* to, float* rotation) {
  LoadRotation({.r = r, .dim = dim, .transpose = transpose}, rotation);
  MultiplyRows({.a = from,
                .a_stride = dim,
                .b = rotation,
                .b_stride = dim,
                .c = to,
                .c_stride = dim,
                .rows_count = rows_count,
                .k_count = dim,
                .n_count = dim,
                .accumulate = false});
}

void CopyFloats(const float* from, size_t count, float* to) {
  for (size_t i = 0; i < count; i += kLanes) hn::StoreU(hn::LoadU(DF(), from + i), DF(), to + i);
}
void FillFloats(float value, size_t count, float* to) {
  for (size_t i = 0; i < count; i += kLanes) hn::StoreU(hn::Set(DF(), value), DF(), to + i);
}

// Divides each row of o by its sum of p.
void Normalize(size_t rows_count, size_t dim, const Scratch& scratch) {
  const DF d;
  for (size_t row = 0; row < rows_count; ++row) {
    float* const sums = scratch.sums + row * kSumLanes;
    for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
      for (size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
    }
    float* const o = scratch.o + row * dim;
    const VF sum = hn::Set(d, sums[0]);
    for (size_t c = 0; c < dim; c += kLanes)
      hn::StoreU(hn::Div(hn::LoadU(d, o + c), sum), d, o + c);
  }
}

}  // namespace

void AttendRowsTarget(const AttendParams& params, const AttendRange& range) {
  const size_t dim = params.head_dim;
  const size_t rows_count = range.row_end - range.row_begin;
  const size_t r_offset = params.rotation_heads == 1 ? 0 : range.kv_head * dim * dim;
  const Scratch scratch = MakeScratch(rows_count, dim);
  // o is the staging area of the queries first, q that of the outputs at the end.
  for (uint32_t row = 0; row < rows_count; ++row) {
    const float* const q = params.q + RowOffset(params, range.kv_head, range.row_begin + row);
    CopyFloats(q, dim, scratch.o + row * dim);
  }
  Rotate(params.r_k + r_offset, false, rows_count, params.head_dim, scratch.o, scratch.q,
         scratch.rotation);
  FillFloats(0.0f, rows_count * dim, scratch.o);
  FillFloats(0.0f, rows_count * kSumLanes, scratch.sums);
  FillFloats(-std::numeric_limits<float>::infinity(), rows_count, scratch.maxima);
  for (uint32_t block = 0; block < params.blocks.size(); ++block) {
    AttendBlockRows(params, range, block, scratch);
  }
  Normalize(rows_count, dim, scratch);
  Rotate(params.r_v + r_offset, true, rows_count, params.head_dim, scratch.o, scratch.q,
         scratch.rotation);
  for (uint32_t row = 0; row < rows_count; ++row) {
    float* const out = params.out + RowOffset(params, range.kv_head, range.row_begin + row);
    CopyFloats(scratch.q + row * dim, dim, out);
  }
}

#else

void AttendRowsTarget(const AttendParams& params, const AttendRange& range) {
  reference::AttendRows(params, range);
}

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {
namespace {

absl::Status FieldError(absl::string_view field, absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat("attend: ", field, " ", rule));
}

// A task widens every block for itself, 5 to 10 % of what 48 rows cost: fewer are not worth a
// thread.
constexpr uint32_t kTaskRowsMin = 48;

}  // namespace

absl::Status ValidateAttend(const AttendParams& params) {
  const uint32_t dim = params.head_dim;
  const uint32_t group = params.group_size;
  if (params.kv_heads < 1 || params.kv_heads > kKvHeadsMax) {
    return FieldError("kv_heads", "is not in 1..256");
  }
  if (params.query_heads < params.kv_heads || params.query_heads % params.kv_heads != 0 ||
      params.query_heads / params.kv_heads > kQueryGroupMax) {
    return FieldError("query_heads", "is not 1 to 16 times kv_heads");
  }
  if (dim != 64 && dim != 128 && dim != 256) return FieldError("head_dim", "is not 64, 128 or 256");
  if (group < 32 || group > dim || (group & (group - 1)) != 0) {
    return FieldError("group_size", "is not a power of two in 32..head_dim");
  }
  if (!std::isfinite(params.softmax_scale) || params.softmax_scale <= 0) {
    return FieldError("softmax_scale", "is not a positive number");
  }
  if (params.rotation_heads != 1 && params.rotation_heads != params.kv_heads) {
    return FieldError("rotation_heads", "is neither 1 nor kv_heads");
  }
  if (params.queries_count < 1 || params.queries_count > kBlockTokens) {
    return FieldError("queries_count", "is not in 1..64");
  }
  if (params.q == nullptr) return FieldError("q", "is null");
  if (params.r_k == nullptr) return FieldError("r_k", "is null");
  if (params.r_v == nullptr) return FieldError("r_v", "is null");
  if (params.out == nullptr) return FieldError("out", "is null");
  if (params.blocks.empty()) return absl::OkStatus();
  if (params.last_block_tokens < 1 || params.last_block_tokens > kBlockTokens ||
      params.last_block_tokens + params.queries_count - 1 > kBlockTokens) {
    return FieldError("last_block_tokens", "is 0 or leaves the last block before the last query");
  }
  for (const AttendBlock& block : params.blocks) {
    if (!IsCodec(static_cast<uint32_t>(block.codec)))
      return FieldError("blocks", "have an unknown codec");
    if (block.page == nullptr) return FieldError("blocks", "have a null page");
  }
  return absl::OkStatus();
}

HWY_EXPORT(AttendRowsTarget);

absl::Status Attend(const AttendParams& params, ThreadPool* pool) {
  if (absl::Status status = ValidateAttend(params); !status.ok()) return status;
  const uint32_t rows = params.queries_count * (params.query_heads / params.kv_heads);
  if (params.blocks.empty()) {
    std::fill_n(params.out, size_t{params.queries_count} * params.query_heads * params.head_dim,
                0.0f);
    return absl::OkStatus();
  }
  // Twice as many tasks as threads, so that no thread waits long for the last one.
  const uint32_t tasks_wanted = 2 * static_cast<uint32_t>(pool->threads_count());
  const uint32_t splits_wanted = (tasks_wanted + params.kv_heads - 1) / params.kv_heads;
  const uint32_t splits = std::clamp(rows / kTaskRowsMin, uint32_t{1}, splits_wanted);
  pool->ParallelFor(size_t{params.kv_heads} * splits, [&params, rows, splits](size_t task) {
    const uint32_t split = static_cast<uint32_t>(task % splits);
    HWY_DYNAMIC_DISPATCH(AttendRowsTarget)
    (params, {.kv_head = static_cast<uint32_t>(task / splits),
              .row_begin = rows * split / splits,
              .row_end = rows * (split + 1) / splits});
  });
  return absl::OkStatus();
}

}  // namespace okv
#endif  // HWY_ONCE
