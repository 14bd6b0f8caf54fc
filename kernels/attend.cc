// Attention of a tile of queries over one layer's visible blocks. A task is some rows of one KV
// head. Int2 blocks are expanded to bytes, 2 x 64 d of them, and multiplied as integers
// (attend_int2-inl.h); bf16 blocks are widened (K transposed, lanes = tokens for the scores; V
// token-major, lanes = channels for the output) into 2 x 64 x d fp32, 64 KiB at d 128. The rows
// pass over either in register blocks of 6, with 64 exponentials a row and block.
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
#include "kernels/attend_int2-inl.h"
#include "kernels/dequantize-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace okv::HWY_NAMESPACE {

#if OKV_TARGET_IS_SIMD
namespace {

// Buffers of a task.
struct Scratch {
  StateLayout layout;
  float* rotation;  // [dim, kRotationColumns]
  float* q;         // [rows, dim] queries; outputs at the end
  float* rotated;   // [rows, dim]
  float* states;    // [rows, layout.stride()] of all spans so far
  float* span;      // [rows, layout.stride()] of one span
  // A bf16 block, widened.
  float* kt;  // [dim, 64] K, transposed
  float* v;   // [64, dim]
  // An int2 block, in the same memory.
  Int2Block int2;
  FixedQueries queries;
  // Of one register block of rows.
  float* p;           // [kBlockRows, 64] scores, then probabilities
  uint8_t* weights;   // [kBlockRows, groups, 2, 64]
  float* units;       // [kBlockRows, groups]
  int32_t* products;  // [kBlockRows, max(groups * 64, dim)]
};

// Hands out parts of one allocation, each on a cache line.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}
  size_t floats_count() const { return at_; }
  float* Floats(size_t count) {
    float* const part = base_ == nullptr ? nullptr : base_ + at_;
    at_ += (count + 15) / 16 * 16;
    return part;
  }
  uint8_t* Bytes(size_t count) { return reinterpret_cast<uint8_t*>(Floats((count + 3) / 4)); }

 private:
  float* const base_;
  size_t at_ = 0;
};

Scratch CarveScratch(const StateLayout& layout, size_t rows, Carver* carver) {
  const size_t dim = layout.dim;
  const size_t groups = layout.groups;
  const size_t words = groups * kTokens;
  Scratch scratch{
      .layout = layout,
      .rotation = carver->Floats(dim * kRotationColumns),
      .q = carver->Floats(rows * dim),
      .rotated = carver->Floats(rows * dim),
      .states = carver->Floats(rows * layout.stride()),
      .span = carver->Floats(rows * layout.stride()),
      .kt = carver->Floats(dim * kTokens),
      .v = carver->Floats(kTokens * dim),
      .int2 = {.key_panel = nullptr,
               .value_panel = nullptr,
               .key_scales = carver->Floats(words),
               .key_offsets = carver->Floats(words),
               .value_scales = carver->Floats(words),
               .value_offsets = carver->Floats(words)},
      .queries = {.bytes = carver->Bytes(rows * 2 * dim),
                  .factors = carver->Floats(rows),
                  .sums = carver->Floats(rows * groups)},
      .p = carver->Floats(kBlockRows * kTokens),
      .weights = carver->Bytes(kBlockRows * groups * 2 * kTokens),
      .units = carver->Floats(kBlockRows * groups),
      .products = reinterpret_cast<int32_t*>(carver->Floats(kBlockRows * std::max(words, dim)))};
  scratch.int2.key_panel = reinterpret_cast<uint8_t*>(scratch.kt);
  scratch.int2.value_panel = reinterpret_cast<uint8_t*>(scratch.v);
  return scratch;
}

Scratch MakeScratch(const AttendParams& params, size_t rows) {
  const StateLayout layout{.dim = params.head_dim, .groups = params.head_dim / params.group_size};
  Carver measure(nullptr);
  CarveScratch(layout, rows, &measure);
  Carver carver(ThreadScratch(measure.floats_count()));
  return CarveScratch(layout, rows, &carver);
}

// Rows [begin, end) of a range over one block, their states from `states` on.
struct BlockRows {
  const AttendParams* params;
  const AttendRange* range;
  uint32_t block;
  uint32_t begin;
  uint32_t end;
  float* states;

  uint32_t Visible(uint32_t row) const {
    return VisibleTokens(*params, block, range->row_begin + row);
  }
};

HWY_INLINE void UpdateSoftmaxRows(const BlockRows& rows, float scale, const Scratch& scratch) {
  for (uint32_t row = rows.begin; row < rows.end; ++row) {
    UpdateSoftmax({.p = scratch.p + (row - rows.begin) * kTokens,
                   .visible = rows.Visible(row),
                   .scale = scale,
                   .layout = scratch.layout,
                   .state = rows.states + row * scratch.layout.stride()});
  }
}

// o += p V for the rows, whose p start at scratch.p. Rows that see different tokens (the last
// block) are not multiplied together: a p of 0 is no mask, 0 * Inf is NaN.
HWY_INLINE void AddBf16Values(const BlockRows& rows, const Scratch& scratch) {
  const size_t dim = scratch.layout.dim;
  for (uint32_t row = rows.begin; row < rows.end;) {
    const uint32_t visible = rows.Visible(row);
    uint32_t next = row + 1;
    while (next < rows.end && rows.Visible(next) == visible) ++next;
    MultiplyRows({.a = scratch.p + (row - rows.begin) * kTokens,
                  .a_stride = kTokens,
                  .b = scratch.v,
                  .b_stride = dim,
                  .c = rows.states + row * scratch.layout.stride(),
                  .c_stride = scratch.layout.stride(),
                  .rows_count = next - row,
                  .k_count = visible,
                  .n_count = dim,
                  .accumulate = true});
    row = next;
  }
}

HWY_INLINE void AttendBf16Rows(const BlockRows& rows, const Scratch& scratch) {
  const size_t dim = scratch.layout.dim;
  MultiplyRows({.a = scratch.rotated + rows.begin * dim,
                .a_stride = dim,
                .b = scratch.kt,
                .b_stride = kTokens,
                .c = scratch.p,
                .c_stride = kTokens,
                .rows_count = rows.end - rows.begin,
                .k_count = dim,
                .n_count = kTokens,
                .accumulate = false});
  UpdateSoftmaxRows(rows, rows.params->softmax_scale * kLog2E, scratch);
  AddBf16Values(rows, scratch);
}

HWY_INLINE void AttendInt2Rows(const BlockRows& rows, const Scratch& scratch) {
  const size_t dim = scratch.layout.dim;
  const size_t groups = scratch.layout.groups;
  const Int2Rows int2{.dim = dim,
                      .groups = groups,
                      .block = &scratch.int2,
                      .rows_count = rows.end - rows.begin,
                      .queries = {.bytes = scratch.queries.bytes + rows.begin * 2 * dim,
                                  .factors = scratch.queries.factors + rows.begin,
                                  .sums = scratch.queries.sums + rows.begin * groups},
                      .p = scratch.p,
                      .weights = scratch.weights,
                      .units = scratch.units,
                      .products = scratch.products};
  const size_t stride = scratch.layout.stride();
  float* const states = rows.states + rows.begin * stride;
  ScoreInt2(int2);
  UpdateSoftmaxRows(rows, 1.0f, scratch);
  for (uint32_t row = 0; row < int2.rows_count; ++row) {
    WeighInt2(int2, row, rows.Visible(rows.begin + row),
              states + row * stride + scratch.layout.offsets_offset());
  }
  AddInt2Values(int2, stride, states);
}

// Adds the KV head's run of `block` to the states of the range's rows.
void AttendBlockRows(const AttendParams& params, const AttendRange& range, uint32_t block,
                     const Scratch& scratch, float* states) {
  const AttendBlock& page = params.blocks[block];
  const PageLayout layout{.layers_count = 1,
                          .kv_heads = params.kv_heads,
                          .head_dim = params.head_dim,
                          .group_size = params.group_size};
  const uint8_t* const run = page.page + layout.run_offset(page.codec, 0, range.kv_head);
  if (page.codec == Codec::kInt2) {
    LoadInt2Block(run, params.head_dim, layout.groups(), scratch.int2);
  } else {
    LoadKeysTransposedBf16(layout, run, scratch.kt);
    LoadValuesBf16(layout, run, VisibleTokens(params, block, range.row_end - 1), scratch.v);
  }
  const uint32_t rows_count = range.row_end - range.row_begin;
  for (uint32_t begin = 0; begin < rows_count;) {
    // Blocks of about one size: 8 rows are 4 and 4, not 6 and 2.
    const uint32_t left = rows_count - begin;
    const uint32_t blocks_left = (left + kBlockRows - 1) / kBlockRows;
    const uint32_t end = begin + (left + blocks_left - 1) / blocks_left;
    const BlockRows rows{.params = &params,
                         .range = &range,
                         .block = block,
                         .begin = begin,
                         .end = end,
                         .states = states};
    if (page.codec == Codec::kInt2) {
      AttendInt2Rows(rows, scratch);
    } else {
      AttendBf16Rows(rows, scratch);
    }
    begin = end;
  }
}

// The states of the range's rows over one span.
void AttendSpan(const AttendParams& params, const AttendRange& range, uint32_t span,
                const Scratch& scratch, float* states) {
  for (uint32_t row = 0; row < range.row_end - range.row_begin; ++row) {
    ClearState(scratch.layout, states + row * scratch.layout.stride());
  }
  const uint32_t blocks_count = static_cast<uint32_t>(params.blocks.size());
  const uint32_t end = std::min(blocks_count, (span + 1) * kSpanBlocks);
  for (uint32_t block = span * kSpanBlocks; block < end; ++block) {
    AttendBlockRows(params, range, block, scratch, states);
  }
}

void CopyFloats(const float* from, size_t count, float* to) {
  for (size_t i = 0; i < count; i += kLanes) hn::StoreU(hn::LoadU(DF(), from + i), DF(), to + i);
}

size_t RotationOffset(const AttendParams& params, uint32_t kv_head) {
  return params.rotation_heads == 1 ? 0 : size_t{kv_head} * params.head_dim * params.head_dim;
}

// Rotates the range's queries and makes their fixed-point form.
void LoadQueries(const AttendParams& params, const AttendRange& range, const Scratch& scratch) {
  const size_t dim = params.head_dim;
  const uint32_t rows_count = range.row_end - range.row_begin;
  for (uint32_t row = 0; row < rows_count; ++row) {
    const float* const q = params.q + RowOffset(params, range.kv_head, range.row_begin + row);
    CopyFloats(q, dim, scratch.q + row * dim);
  }
  RotateF32({.x = scratch.q,
             .x_stride = dim,
             .r = params.r_k + RotationOffset(params, range.kv_head),
             .transpose = false,
             .dim = params.head_dim,
             .rows_count = rows_count,
             .y = scratch.rotated,
             .y_stride = dim,
             .columns = scratch.rotation});
  for (uint32_t row = 0; row < rows_count; ++row) {
    FixQuery(scratch.rotated + row * dim, row, dim, scratch.layout.groups,
             params.softmax_scale * kLog2E, scratch.queries);
  }
}

// The range's outputs from the states over all spans.
void StoreOutputs(const AttendParams& params, const AttendRange& range, const Scratch& scratch,
                  float* states) {
  const size_t dim = params.head_dim;
  const uint32_t rows_count = range.row_end - range.row_begin;
  const size_t stride = scratch.layout.stride();
  for (uint32_t row = 0; row < rows_count; ++row)
    FinishState(scratch.layout, states + row * stride);
  RotateF32({.x = states,
             .x_stride = stride,
             .r = params.r_v + RotationOffset(params, range.kv_head),
             .transpose = true,
             .dim = params.head_dim,
             .rows_count = rows_count,
             .y = scratch.q,
             .y_stride = dim,
             .columns = scratch.rotation});
  for (uint32_t row = 0; row < rows_count; ++row) {
    float* const out = params.out + RowOffset(params, range.kv_head, range.row_begin + row);
    CopyFloats(scratch.q + row * dim, dim, out);
  }
}

}  // namespace

void AttendTaskTarget(const AttendParams& params, const AttendTask& task) {
  const uint32_t rows_count = task.range.row_end - task.range.row_begin;
  const Scratch scratch = MakeScratch(params, rows_count);
  const size_t stride = scratch.layout.stride();
  LoadQueries(params, task.range, scratch);
  for (uint32_t span = task.span_begin; span < task.span_end; ++span) {
    if (task.states != nullptr) {
      AttendSpan(params, task.range, span, scratch, task.states + span * rows_count * stride);
    } else if (span == 0) {
      AttendSpan(params, task.range, span, scratch, scratch.states);
    } else {
      AttendSpan(params, task.range, span, scratch, scratch.span);
      for (uint32_t row = 0; row < rows_count; ++row) {
        FoldState(scratch.layout, scratch.span + row * stride, scratch.states + row * stride);
      }
    }
  }
  if (task.states == nullptr) StoreOutputs(params, task.range, scratch, scratch.states);
}

// Folds the spans' states that tasks left, and stores the outputs.
void FoldTaskTarget(const AttendParams& params, const AttendTask& task) {
  const uint32_t rows_count = task.range.row_end - task.range.row_begin;
  const Scratch scratch = MakeScratch(params, rows_count);
  const size_t stride = scratch.layout.stride();
  for (uint32_t span = 1; span < task.span_end; ++span) {
    for (uint32_t row = 0; row < rows_count; ++row) {
      FoldState(scratch.layout, task.states + (size_t{span} * rows_count + row) * stride,
                task.states + row * stride);
    }
  }
  StoreOutputs(params, task.range, scratch, task.states);
}

// Floats of a row's state.
size_t StateFloatsTarget(const AttendParams& params) {
  return StateLayout{.dim = params.head_dim, .groups = params.head_dim / params.group_size}
      .stride();
}

#else

// The scalar twin takes all spans of a row at once, so there are no states: 0 floats say so.
void AttendTaskTarget(const AttendParams& params, const AttendTask& task) {
  reference::AttendRows(params, task.range);
}
void FoldTaskTarget(const AttendParams&, const AttendTask&) {}
size_t StateFloatsTarget(const AttendParams&) { return 0; }

#endif  // OKV_TARGET_IS_SIMD

}  // namespace okv::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace okv {
namespace {

absl::Status FieldError(absl::string_view field, absl::string_view rule) {
  return absl::InvalidArgumentError(absl::StrCat("attend: ", field, " ", rule));
}

// A task expands every block for itself, 5 to 10 % of what 48 rows cost: fewer are not worth a
// thread. Fewer rows are split by spans instead.
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

HWY_EXPORT(AttendTaskTarget);
HWY_EXPORT(FoldTaskTarget);
HWY_EXPORT(StateFloatsTarget);

namespace {

// Few rows and a long history: tasks take `parts` ranges of spans of each KV head, then others fold
// the spans' states.
void AttendBySpans(const AttendParams& params, uint32_t rows, uint32_t parts, ThreadPool* pool) {
  const uint32_t spans = SpansCount(params);
  const size_t head_floats = HWY_DYNAMIC_DISPATCH(StateFloatsTarget)(params) * size_t{spans} * rows;
  float* const states = CallScratch(head_floats * params.kv_heads);
  const auto task_of = [&](uint32_t kv_head, uint32_t part, uint32_t parts_count) {
    return AttendTask{.range = {.kv_head = kv_head, .row_begin = 0, .row_end = rows},
                      .span_begin = spans * part / parts_count,
                      .span_end = spans * (part + 1) / parts_count,
                      .states = states + kv_head * head_floats};
  };
  pool->ParallelFor(size_t{params.kv_heads} * parts, [&](size_t i) {
    const AttendTask task =
        task_of(static_cast<uint32_t>(i / parts), static_cast<uint32_t>(i % parts), parts);
    HWY_DYNAMIC_DISPATCH(AttendTaskTarget)(params, task);
  });
  pool->ParallelFor(params.kv_heads, [&](size_t i) {
    HWY_DYNAMIC_DISPATCH(FoldTaskTarget)(params, task_of(static_cast<uint32_t>(i), 0, 1));
  });
}

}  // namespace

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
  const uint32_t spans = SpansCount(params);
  if (pool->threads_count() > 1 && rows < kTaskRowsMin && std::min(spans, splits_wanted) > 1 &&
      HWY_DYNAMIC_DISPATCH(StateFloatsTarget)(params) > 0) {
    AttendBySpans(params, rows, std::min(spans, splits_wanted), pool);
    return absl::OkStatus();
  }
  const uint32_t splits = std::clamp(rows / kTaskRowsMin, uint32_t{1}, splits_wanted);
  pool->ParallelFor(size_t{params.kv_heads} * splits, [&](size_t i) {
    const uint32_t split = static_cast<uint32_t>(i % splits);
    HWY_DYNAMIC_DISPATCH(AttendTaskTarget)
    (params, {.range = {.kv_head = static_cast<uint32_t>(i / splits),
                        .row_begin = rows * split / splits,
                        .row_end = rows * (split + 1) / splits},
              .span_begin = 0,
              .span_end = spans,
              .states = nullptr});
  });
  return absl::OkStatus();
}

}  // namespace okv
#endif  // HWY_ONCE
