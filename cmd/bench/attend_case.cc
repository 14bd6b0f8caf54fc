#include "cmd/bench/attend_case.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "cmd/bench/attend_case_kernels.h"
#include "cmd/bench/case_memory.h"
#include "cmd/bench/drawn_rows.h"
#include "proto/bf16.h"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

constexpr uint32_t kTokens = 64;

uint32_t BlocksOf(int32_t length) {
  return (static_cast<uint32_t>(length) + kTokens - 1) / kTokens;
}

}  // namespace

struct AttendCase::Buffers {
  uint64_t int2_run = 0;
  uint64_t bf16_run = 0;
  int64_t int2_table_stride = 0;
  int64_t bf16_table_stride = 0;
  DeviceBuffer q, r_k, r_v, int2_pages, bf16_pages, int2_table, bf16_table, lengths, sink_logits;
  DeviceBuffer out, lse, workspace;
  std::vector<int32_t> int2_slots;  // What the two tables hold
  std::vector<int32_t> bf16_slots;
};

AttendCase::~AttendCase() = default;

AttendCase::AttendCase(const AttendCaseOptions& options)
    : options_(options), buffers_(std::make_unique<Buffers>()) {
  DecodeShape& shape = options_.shape;
  shape.batch = static_cast<uint32_t>(options_.lengths.size());
  Buffers& b = *buffers_;
  std::mt19937_64 random(options_.seed);
  const size_t rows = size_t{shape.batch} * shape.query_tokens * shape.query_heads;
  b.int2_run = int2::RunBytes(shape.head_dim, shape.head_dim / shape.group_size);
  b.bf16_run = size_t{4} * kTokens * shape.head_dim;

  MakeQueries(&random);
  MakePages(&random);
  std::vector<float> sinks(shape.query_heads);
  std::normal_distribution<float> normal;
  for (float& sink : sinks) sink = 2.0f + 3.0f * normal(random);
  b.sink_logits = Upload(sinks);
  b.out = AllocateOrExit(rows * shape.head_dim * 2);
  b.lse = AllocateOrExit(rows * sizeof(float));
  const size_t workspace_bytes = DecodeWorkspaceBytes(shape);
  if (workspace_bytes == 0) Must(cudaErrorInvalidValue, "DecodeWorkspaceBytes");
  b.workspace = AllocateOrExit(workspace_bytes);
  Must(cudaMemset(b.workspace.data(), 0xff, workspace_bytes), "cudaMemset");
  for (uint32_t layer = 0; layer < options_.layers_count; ++layer) {
    Must(PoisonTails(Params(layer), nullptr), "PoisonTails");
  }
  Must(cudaDeviceSynchronize(), "AttendCase");
}

void AttendCase::MakeQueries(std::mt19937_64* random) {
  const DecodeShape& shape = options_.shape;
  Buffers& b = *buffers_;
  std::vector<uint16_t> r_k;
  std::vector<uint16_t> r_v;
  for (uint32_t head = 0; head < options_.rotation_heads; ++head) {
    const RowDraws* const draws = options_.draws;
    const std::vector<uint16_t> k = draws ? draws->r_k : RandomRotation(shape.head_dim, random);
    const std::vector<uint16_t> v = draws ? draws->r_v : RandomRotation(shape.head_dim, random);
    r_k.insert(r_k.end(), k.begin(), k.end());
    r_v.insert(r_v.end(), v.begin(), v.end());
  }
  b.r_k = Upload(r_k);
  b.r_v = Upload(r_v);
  const size_t rows = size_t{shape.batch} * shape.query_tokens * shape.query_heads;
  b.q = AllocateOrExit(rows * shape.head_dim * 2);
  if (options_.draws != nullptr) {
    DrawnRows(*options_.draws, Layout(), (*random)())
        .FillQueries(b.q.as<__nv_bfloat16>(), rows, options_.query_sigma);
    return;
  }
  Must(FillNormal(b.q.as<__nv_bfloat16>(), rows * shape.head_dim, options_.query_sigma, (*random)(),
                  nullptr),
       "FillNormal");
}

PageLayout AttendCase::Layout() const {
  return {.layers_count = options_.layers_count,
          .kv_heads = options_.shape.kv_heads,
          .head_dim = options_.shape.head_dim,
          .group_size = options_.shape.group_size};
}

void AttendCase::MakePages(std::mt19937_64* random) {
  const DecodeShape& shape = options_.shape;
  Buffers& b = *buffers_;
  // Tables: random slots; three blocks of the pool belong to nobody and hold NaN.
  const int32_t longest = *std::max_element(options_.lengths.begin(), options_.lengths.end());
  b.int2_table_stride = std::max<int64_t>(BlocksOf(longest), 1);
  b.bf16_table_stride = shape.sink_blocks + shape.ring_blocks;
  uint32_t int2_blocks = 3;
  for (const int32_t length : options_.lengths) int2_blocks += BlocksOf(length);
  const uint32_t bf16_blocks = static_cast<uint32_t>(shape.batch * b.bf16_table_stride) + 3;
  const std::vector<int32_t> int2_slots = ShuffledSlots(static_cast<int32_t>(int2_blocks), random);
  std::vector<int32_t> int2_table(shape.batch * b.int2_table_stride, -1);
  size_t next = 0;
  for (uint32_t i = 0; i < shape.batch; ++i) {
    for (uint32_t j = 0; j < BlocksOf(options_.lengths[i]); ++j) {
      int2_table[i * b.int2_table_stride + j] = int2_slots[next++];
    }
  }
  std::vector<int32_t> bf16_table = ShuffledSlots(static_cast<int32_t>(bf16_blocks), random);
  b.int2_table = Upload(int2_table);
  b.bf16_table = Upload(bf16_table);
  b.lengths = Upload(options_.lengths);

  const size_t int2_block = b.int2_run * shape.kv_heads * options_.layers_count;
  const size_t bf16_block = b.bf16_run * shape.kv_heads * options_.layers_count;
  b.int2_pages = AllocateOrExit(int2_block * int2_blocks);
  b.bf16_pages = AllocateOrExit(bf16_block * bf16_blocks);
  FillPages(int2_blocks, bf16_blocks, random);
  for (size_t i = next; i < int2_slots.size(); ++i) {
    Must(cudaMemset(b.int2_pages.data() + int2_slots[i] * int2_block, 0xff, int2_block),
         "cudaMemset");
  }
  b.int2_slots = std::move(int2_table);
  b.bf16_slots = std::move(bf16_table);
}

void AttendCase::FillPages(uint32_t int2_blocks, uint32_t bf16_blocks, std::mt19937_64* random) {
  const DecodeShape& shape = options_.shape;
  const Buffers& b = *buffers_;
  if (options_.draws != nullptr) {
    DrawnRows rows(*options_.draws, Layout(), (*random)());
    rows.FillInt2(b.int2_pages.data(), int2_blocks);
    rows.FillBf16(b.bf16_pages.data(), bf16_blocks);
    return;
  }
  Must(FillInt2({.runs = b.int2_pages.data(),
                 .runs_count = size_t{int2_blocks} * shape.kv_heads * options_.layers_count,
                 .head_dim = shape.head_dim,
                 .groups = shape.head_dim / shape.group_size,
                 .outliers = options_.outliers,
                 .seed = (*random)()},
                nullptr),
       "FillInt2");
  Must(FillNormal(b.bf16_pages.as<__nv_bfloat16>(), b.bf16_pages.bytes() / 2, 0.65f, (*random)(),
                  nullptr),
       "FillNormal");
}

void AttendCase::SetLengths(const std::vector<int32_t>& lengths) {
  options_.lengths = lengths;
  Must(cudaMemcpy(buffers_->lengths.data(), lengths.data(), lengths.size() * sizeof(int32_t),
                  cudaMemcpyHostToDevice),
       "cudaMemcpy");
}

DecodeParams AttendCase::Params(uint32_t layer) const {
  const Buffers& b = *buffers_;
  const DecodeShape& shape = options_.shape;
  DecodeParams params = {};
  params.shape = shape;
  params.q = b.q.as<const __nv_bfloat16>();
  params.r_k = b.r_k.as<const __nv_bfloat16>();
  params.r_v = b.r_v.as<const __nv_bfloat16>();
  params.rotation_heads = options_.rotation_heads;
  params.int2_pages = b.int2_pages.data() + b.int2_run * shape.kv_heads * layer;
  params.int2_block_stride =
      static_cast<int64_t>(b.int2_run * shape.kv_heads * options_.layers_count);
  params.int2_table = b.int2_table.as<const int32_t>();
  params.int2_table_stride = b.int2_table_stride;
  params.bf16_pages = b.bf16_pages.data() + b.bf16_run * shape.kv_heads * layer;
  params.bf16_block_stride =
      static_cast<int64_t>(b.bf16_run * shape.kv_heads * options_.layers_count);
  params.bf16_table = b.bf16_table.as<const int32_t>();
  params.bf16_table_stride = b.bf16_table_stride;
  params.lengths = b.lengths.as<const int32_t>();
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  params.logit_softcap = options_.logit_softcap;
  params.sink_logits = options_.sink_logits ? b.sink_logits.as<const float>() : nullptr;
  params.out = b.out.as<__nv_bfloat16>();
  params.lse = b.lse.as<float>();
  params.workspace = b.workspace.data();
  params.early_history = options_.early_history;
  return params;
}

void AttendCase::Plan(cudaStream_t stream) const {
  const DecodeParams params = Params(0);
  Must(PlanDecode(params.shape, params.lengths, params.workspace, stream), "PlanDecode");
}

std::vector<uint16_t> AttendCase::Output() const {
  std::vector<uint16_t> out(buffers_->out.bytes() / 2);
  Must(cudaMemcpy(out.data(), buffers_->out.data(), buffers_->out.bytes(), cudaMemcpyDeviceToHost),
       "cudaMemcpy");
  return out;
}

AttendError AttendCase::Check(uint32_t layer) const {
  const DecodeShape& shape = options_.shape;
  const DecodeParams params = Params(layer);
  const size_t rows_per_request = size_t{shape.query_tokens} * shape.query_heads;
  const size_t rows = rows_per_request * shape.batch;
  const size_t elements = rows * shape.head_dim;
  Must(cudaMemset(buffers_->out.data(), 0xff, elements * 2), "cudaMemset");
  Must(cudaMemset(buffers_->lse.data(), 0xff, rows * 4), "cudaMemset");
  Plan(nullptr);
  Must(Attend(params, nullptr), "Attend");
  Must(cudaDeviceSynchronize(), "Attend");

  const int32_t longest = *std::max_element(options_.lengths.begin(), options_.lengths.end());
  const int64_t scores_stride = std::max<int64_t>(longest, 1);
  const DeviceBuffer scores = AllocateOrExit(rows * scores_stride * sizeof(double));
  const DeviceBuffer expected = AllocateOrExit(elements * sizeof(double));
  const DeviceBuffer expected_lse = AllocateOrExit(rows * sizeof(double));
  const ReferenceParams reference = {.decode = params,
                                     .scores = scores.as<double>(),
                                     .scores_stride = scores_stride,
                                     .out = expected.as<double>(),
                                     .lse = expected_lse.as<double>()};
  Must(ReferenceAttend(reference, nullptr), "ReferenceAttend");
  Must(cudaDeviceSynchronize(), "ReferenceAttend");
  const std::vector<uint16_t> out = Output();
  std::vector<double> want(elements);
  std::vector<double> want_lse(rows);
  std::vector<float> lse(rows);
  Must(cudaMemcpy(want.data(), expected.data(), elements * 8, cudaMemcpyDeviceToHost), "copy");
  Must(cudaMemcpy(want_lse.data(), expected_lse.data(), rows * 8, cudaMemcpyDeviceToHost), "copy");
  Must(cudaMemcpy(lse.data(), buffers_->lse.data(), rows * 4, cudaMemcpyDeviceToHost), "copy");

  AttendError error = {};
  for (uint32_t request = 0; request < shape.batch; ++request) {
    double difference = 0.0;
    double rounding = 0.0;
    double norm = 0.0;
    bool nan = false;
    const size_t per_request = rows_per_request * shape.head_dim;
    for (size_t i = request * per_request; i < (request + 1) * per_request; ++i) {
      const double got = Bf16ToFloat(out[i]);
      const double rounded = Bf16ToFloat(FloatToBf16(static_cast<float>(want[i])));
      nan |= !std::isfinite(got) || !std::isfinite(want[i]);
      difference += (got - want[i]) * (got - want[i]);
      rounding += (rounded - want[i]) * (rounded - want[i]);
      norm += want[i] * want[i];
    }
    for (size_t i = request * rows_per_request; i < (request + 1) * rows_per_request; ++i) {
      if (std::isinf(want_lse[i]) && want_lse[i] == lse[i]) continue;
      const double off = std::abs(lse[i] - want_lse[i]);
      error.lse = std::max(error.lse, std::isfinite(off) ? off : HUGE_VAL);
    }
    const double scale = norm > 0.0 ? norm : 1.0;
    const double beyond = std::sqrt(std::max(0.0, difference - rounding) / scale);
    error.relative = std::max(error.relative, nan ? HUGE_VAL : std::sqrt(difference / scale));
    error.beyond_rounding = std::max(error.beyond_rounding, nan ? HUGE_VAL : beyond);
  }
  return error;
}

AttendCase::View AttendCase::ViewOf(int32_t length) const {
  const DecodeShape& shape = options_.shape;
  const int64_t sinks = shape.sink_blocks;
  const int64_t recent = shape.recent_blocks;
  const int64_t last = (length - int64_t{1}) / kTokens;
  const int64_t first = std::max(int64_t{0}, length - int64_t{shape.query_tokens}) / kTokens;
  return {.length = length,
          .sink_tokens = std::min<int64_t>(length, sinks * kTokens),
          .history_blocks = std::max(int64_t{0}, last - recent - sinks),
          .recent_begin = std::max(sinks, first - recent) * kTokens};
}

uint64_t AttendCase::BytesRead() const {
  const DecodeShape& shape = options_.shape;
  uint64_t bytes = 0;
  for (const int32_t length : options_.lengths) {
    if (length <= 0) continue;
    const View view = ViewOf(length);
    const int64_t window = view.sink_tokens + std::max(int64_t{0}, length - view.recent_begin);
    bytes += shape.kv_heads * (static_cast<uint64_t>(view.history_blocks) * buffers_->int2_run +
                               static_cast<uint64_t>(window) * 4 * shape.head_dim);
  }
  return bytes;
}

std::vector<LoadItem> AttendCase::LoadItems() const {
  const DecodeShape& shape = options_.shape;
  const Buffers& b = *buffers_;
  const DecodeParams params = Params(0);
  std::vector<LoadItem> items;
  const auto add = [&](uint16_t base, uint64_t offset, uint64_t bytes) {
    const uint64_t pieces = (bytes + kLoadBytesMax - 1) / kLoadBytesMax;
    for (uint64_t i = 0; i < pieces; ++i) {
      const uint64_t begin = bytes / 16 * i / pieces;
      const uint64_t end = bytes / 16 * (i + 1) / pieces;
      items.push_back({.offset_16 = static_cast<uint32_t>(offset / 16 + begin),
                       .bytes = static_cast<uint16_t>((end - begin) * 16),
                       .base = base});
    }
  };
  const int64_t row = int64_t{2} * shape.head_dim;
  for (uint32_t request = 0; request < shape.batch; ++request) {
    if (options_.lengths[request] <= 0) continue;
    const View view = ViewOf(options_.lengths[request]);
    const int32_t* const int2 = &b.int2_slots[request * b.int2_table_stride];
    const int32_t* const bf16 = &b.bf16_slots[request * b.bf16_table_stride];
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      for (int64_t token = 0; token < view.length; token += kTokens) {
        if (token >= view.sink_tokens && token < view.recent_begin) continue;
        const int64_t block = token / kTokens;
        const int64_t sinks = shape.sink_blocks;
        const int64_t ring = sinks + (block - sinks) % shape.ring_blocks;
        const int64_t slot = bf16[block < sinks ? block : ring];
        const uint64_t run = slot * params.bf16_block_stride + head * b.bf16_run;
        const int64_t bytes = std::min<int64_t>(kTokens, view.length - token) * row;
        add(1, run, bytes);
        add(1, run + kTokens * row, bytes);
      }
      for (int64_t i = 0; i < view.history_blocks; ++i) {
        add(0, int2[i] * params.int2_block_stride + head * b.int2_run, b.int2_run);
      }
    }
  }
  return items;
}

LoadOnlyParams AttendCase::LoadParams(const DeviceBuffer& items, uint32_t layer) const {
  const DecodeParams params = Params(layer);
  return {.items = items.as<const LoadItem>(),
          .items_count = static_cast<uint32_t>(items.bytes() / sizeof(LoadItem)),
          .bases = {params.int2_pages, params.bf16_pages},
          .early = false};
}

}  // namespace okv::cuda
