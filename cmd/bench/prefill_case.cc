#include "cmd/bench/prefill_case.h"

#include <algorithm>
#include <cmath>

#include "cmd/bench/attend_case_kernels.h"
#include "cmd/bench/case_memory.h"
#include "cmd/bench/prefill_case_kernels.h"
#include "proto/bf16.h"
#include "proto/int2_layout.h"

namespace okv::cuda {
namespace {

constexpr int32_t kTokens = 64;
// Rows of q and out behind those of all requests, which nobody may write.
constexpr uint32_t kSpareRows = 3;

int32_t BlocksOf(int32_t length) { return (length + kTokens - 1) / kTokens; }

std::vector<int32_t> StartsOf(const std::vector<int32_t>& new_tokens) {
  std::vector<int32_t> starts = {0};
  for (const int32_t count : new_tokens) starts.push_back(starts.back() + count);
  return starts;
}

}  // namespace

struct PrefillCase::Buffers {
  uint64_t int2_run = 0;
  uint64_t bf16_run = 0;
  int64_t int2_table_stride = 0;
  int64_t bf16_table_stride = 0;
  std::vector<int32_t> starts;
  std::vector<int32_t> bf16_first;
  std::vector<int32_t> bf16_host_table;
  DeviceBuffer q, r_k, r_v, int2_pages, bf16_pages, int2_table, bf16_table, bf16_first_blocks;
  DeviceBuffer query_starts, lengths, sink_logits, out, lse, workspace;
};

PrefillCase::~PrefillCase() = default;

PrefillCase::PrefillCase(const PrefillCaseOptions& options)
    : options_(options), buffers_(std::make_unique<Buffers>()) {
  PrefillShape& shape = options_.shape;
  Buffers& b = *buffers_;
  std::mt19937_64 random(options_.seed);
  shape.batch = static_cast<uint32_t>(options_.lengths.size());
  b.starts = StartsOf(options_.new_tokens);
  shape.query_tokens_max = static_cast<uint32_t>(b.starts.back()) + kSpareRows;
  shape.history_blocks_max = history_blocks();
  b.int2_run = int2::RunBytes(shape.head_dim, shape.head_dim / shape.group_size);
  b.bf16_run = uint64_t{4} * kTokens * shape.head_dim;

  std::vector<uint16_t> r_k;
  std::vector<uint16_t> r_v;
  for (uint32_t head = 0; head < options_.rotation_heads; ++head) {
    const std::vector<uint16_t> k = RandomRotation(shape.head_dim, &random);
    const std::vector<uint16_t> v = RandomRotation(shape.head_dim, &random);
    r_k.insert(r_k.end(), k.begin(), k.end());
    r_v.insert(r_v.end(), v.begin(), v.end());
  }
  b.r_k = Upload(r_k);
  b.r_v = Upload(r_v);
  const size_t rows = size_t{shape.query_tokens_max} * shape.query_heads;
  const size_t spare = size_t{kSpareRows} * shape.query_heads * shape.head_dim * 2;
  b.q = AllocateOrExit(rows * shape.head_dim * 2);
  Must(FillNormal(b.q.as<__nv_bfloat16>(), rows * shape.head_dim, options_.query_sigma, random(),
                  nullptr),
       "FillNormal");
  Must(cudaMemset(b.q.data() + rows * shape.head_dim * 2 - spare, 0xff, spare), "cudaMemset");

  MakePages(&random);
  std::vector<float> sinks(shape.query_heads);
  std::normal_distribution<float> normal;
  for (float& sink : sinks) sink = 2.0f + 3.0f * normal(random);
  b.sink_logits = Upload(sinks);
  b.query_starts = Upload(b.starts);
  b.lengths = Upload(options_.lengths);
  b.out = AllocateOrExit(rows * shape.head_dim * 2);
  b.lse = AllocateOrExit(rows * sizeof(float));
  const size_t workspace_bytes = PrefillWorkspaceBytes(shape);
  if (workspace_bytes == 0) Must(cudaErrorInvalidValue, "PrefillWorkspaceBytes");
  b.workspace = AllocateOrExit(workspace_bytes);
  Must(cudaMemset(b.workspace.data(), 0xff, workspace_bytes), "cudaMemset");
  PoisonTails();
  Must(cudaDeviceSynchronize(), "PrefillCase");
}

uint32_t PrefillCase::history_blocks() const {
  const PrefillShape& shape = options_.shape;
  int64_t blocks = 0;
  for (size_t i = 0; i < options_.lengths.size(); ++i) {
    if (options_.new_tokens[i] == 0) continue;
    const int64_t first_token = options_.lengths[i] - options_.new_tokens[i];
    const int64_t last_block = (options_.lengths[i] - 1) / kTokens;
    int64_t first = shape.sink_blocks;
    if (shape.sliding_window > 0) {
      const int64_t seen = first_token / kTokens * kTokens - int64_t{shape.sliding_window} + 1;
      first = std::max(first, std::max<int64_t>(seen, 0) / kTokens);
    }
    blocks += std::max<int64_t>(0, last_block - int64_t{shape.recent_blocks} - first);
  }
  return static_cast<uint32_t>(blocks);
}

void PrefillCase::MakePages(std::mt19937_64* random) {
  const PrefillShape& shape = options_.shape;
  Buffers& b = *buffers_;
  const int32_t sinks = static_cast<int32_t>(shape.sink_blocks);
  const int32_t longest = *std::max_element(options_.lengths.begin(), options_.lengths.end());
  b.int2_table_stride = std::max(BlocksOf(longest), 1);
  int32_t bf16_blocks = 3;  // Of nobody, NaN
  int32_t int2_blocks = 3;
  for (uint32_t i = 0; i < shape.batch; ++i) {
    const int32_t first_block = (options_.lengths[i] - options_.new_tokens[i]) / kTokens;
    const int32_t first =
        options_.whole_bf16
            ? sinks
            : std::max(sinks, first_block - static_cast<int32_t>(shape.recent_blocks));
    b.bf16_first.push_back(first);
    const int32_t entries = sinks + std::max(0, BlocksOf(options_.lengths[i]) - first);
    b.bf16_table_stride = std::max<int64_t>(b.bf16_table_stride, entries);
    bf16_blocks += entries;
    int2_blocks += BlocksOf(options_.lengths[i]);
  }
  const std::vector<int32_t> int2_slots = ShuffledSlots(int2_blocks, random);
  const std::vector<int32_t> bf16_slots = ShuffledSlots(bf16_blocks, random);
  std::vector<int32_t> int2_table(shape.batch * b.int2_table_stride, -1);
  b.bf16_host_table.assign(shape.batch * b.bf16_table_stride, -1);
  size_t int2_next = 0;
  size_t bf16_next = 0;
  for (uint32_t i = 0; i < shape.batch; ++i) {
    const int32_t blocks = BlocksOf(options_.lengths[i]);
    for (int32_t j = 0; j < blocks - sinks; ++j) {
      int2_table[i * b.int2_table_stride + j] = int2_slots[int2_next++];
    }
    const int32_t entries = sinks + std::max(0, blocks - b.bf16_first[i]);
    for (int32_t j = 0; j < entries; ++j) {
      b.bf16_host_table[i * b.bf16_table_stride + j] = bf16_slots[bf16_next++];
    }
  }
  b.int2_table = Upload(int2_table);
  b.bf16_table = Upload(b.bf16_host_table);
  b.bf16_first_blocks = Upload(b.bf16_first);

  const size_t int2_block = b.int2_run * shape.kv_heads * options_.layers_count;
  const size_t bf16_block = b.bf16_run * shape.kv_heads * options_.layers_count;
  b.int2_pages = AllocateOrExit(int2_block * int2_blocks);
  b.bf16_pages = AllocateOrExit(bf16_block * bf16_blocks);
  Must(FillInt2({.runs = b.int2_pages.data(),
                 .runs_count = size_t{shape.kv_heads} * options_.layers_count * int2_blocks,
                 .head_dim = shape.head_dim,
                 .groups = shape.head_dim / shape.group_size,
                 .outliers = options_.outliers,
                 .seed = (*random)()},
                nullptr),
       "FillInt2");
  Must(FillNormal(b.bf16_pages.as<__nv_bfloat16>(), bf16_block * bf16_blocks / 2, 0.65f,
                  (*random)(), nullptr),
       "FillNormal");
  for (size_t i = int2_next; i < int2_slots.size(); ++i) {
    Must(cudaMemset(b.int2_pages.data() + int2_slots[i] * int2_block, 0xff, int2_block),
         "cudaMemset");
  }
  for (size_t i = bf16_next; i < bf16_slots.size(); ++i) {
    Must(cudaMemset(b.bf16_pages.data() + bf16_slots[i] * bf16_block, 0xff, bf16_block),
         "cudaMemset");
  }
}

// Makes the rows behind each sequence's end NaN, in all layers and heads.
void PrefillCase::PoisonTails() const {
  const PrefillShape& shape = options_.shape;
  const Buffers& b = *buffers_;
  const size_t row = size_t{shape.head_dim} * 2;
  for (uint32_t i = 0; i < shape.batch; ++i) {
    const int32_t inside = options_.lengths[i] % kTokens;
    if (inside == 0) continue;
    const int32_t block = options_.lengths[i] / kTokens;
    const int32_t sinks = static_cast<int32_t>(shape.sink_blocks);
    const int32_t entry = block < sinks ? block : sinks + block - b.bf16_first[i];
    const int64_t slot = b.bf16_host_table[i * b.bf16_table_stride + entry];
    const size_t runs = size_t{shape.kv_heads} * options_.layers_count;
    uint8_t* const page = b.bf16_pages.data() + slot * runs * b.bf16_run;
    for (const size_t half : {size_t{0}, kTokens * row}) {
      Must(cudaMemset2D(page + half + inside * row, b.bf16_run, 0xff, (kTokens - inside) * row,
                        runs),
           "cudaMemset2D");
    }
  }
}

void PrefillCase::SetTokens(const std::vector<int32_t>& new_tokens,
                            const std::vector<int32_t>& lengths) {
  options_.new_tokens = new_tokens;
  options_.lengths = lengths;
  buffers_->starts = StartsOf(new_tokens);
  Must(cudaMemcpy(buffers_->query_starts.data(), buffers_->starts.data(),
                  buffers_->starts.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
       "cudaMemcpy");
  Must(cudaMemcpy(buffers_->lengths.data(), lengths.data(), lengths.size() * sizeof(int32_t),
                  cudaMemcpyHostToDevice),
       "cudaMemcpy");
}

PrefillParams PrefillCase::Params(uint32_t layer) const {
  const Buffers& b = *buffers_;
  const PrefillShape& shape = options_.shape;
  const uint64_t heads = shape.kv_heads;
  PrefillParams params = {};
  params.plan = {.shape = shape,
                 .query_starts = b.query_starts.as<const int32_t>(),
                 .lengths = b.lengths.as<const int32_t>(),
                 .int2_table = b.int2_table.as<const int32_t>(),
                 .int2_table_stride = b.int2_table_stride,
                 .workspace = b.workspace.data()};
  params.q = b.q.as<const __nv_bfloat16>();
  params.r_k = b.r_k.as<const __nv_bfloat16>();
  params.r_v = b.r_v.as<const __nv_bfloat16>();
  params.rotation_heads = options_.rotation_heads;
  params.int2_pages = b.int2_pages.data() + b.int2_run * heads * layer;
  params.int2_block_stride = static_cast<int64_t>(b.int2_run * heads * options_.layers_count);
  params.bf16_pages = b.bf16_pages.data() + b.bf16_run * heads * layer;
  params.bf16_block_stride = static_cast<int64_t>(b.bf16_run * heads * options_.layers_count);
  params.bf16_table = b.bf16_table.as<const int32_t>();
  params.bf16_table_stride = b.bf16_table_stride;
  params.bf16_first_blocks =
      options_.whole_bf16 ? nullptr : b.bf16_first_blocks.as<const int32_t>();
  params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  params.logit_softcap = options_.logit_softcap;
  params.sink_logits = options_.sink_logits ? b.sink_logits.as<const float>() : nullptr;
  params.out = b.out.as<__nv_bfloat16>();
  params.lse = b.lse.as<float>();
  return params;
}

std::vector<uint16_t> PrefillCase::Output() const {
  return Download<uint16_t>(buffers_->out, buffers_->out.bytes() / 2);
}

// What the kernel gave and what it should have, for some rows of q and out.
struct PrefillCase::Sample {
  std::vector<int32_t> rows;
  std::vector<double> want;  // [rows, head_dim]
  std::vector<double> want_lse;
  std::vector<uint16_t> out;  // Of all rows
  std::vector<float> lse;
};

PrefillCase::Sample PrefillCase::RunBoth(uint32_t layer, bool exact) const {
  const PrefillShape& shape = options_.shape;
  const PrefillParams params = Params(layer);
  Must(cudaMemset(buffers_->out.data(), 0xff, buffers_->out.bytes()), "cudaMemset");
  Must(cudaMemset(buffers_->lse.data(), 0xff, buffers_->lse.bytes()), "cudaMemset");
  Must(PlanPrefill(params.plan, nullptr), "PlanPrefill");
  Must(Prefill(params, nullptr), "Prefill");
  Must(cudaDeviceSynchronize(), "Prefill");

  Sample sample;
  // An odd step: every head and row of a tile has its turn; and the last rows.
  const int64_t all = int64_t{buffers_->starts.back()} * shape.query_heads;
  const int64_t step = all / std::max<uint32_t>(options_.rows_checked, 1) | 1;
  for (int64_t row = 0; row < all; ++row) {
    if (row % step == 0 || row >= all - 64) sample.rows.push_back(static_cast<int32_t>(row));
  }
  const size_t rows = sample.rows.size();
  const DeviceBuffer rows_device = Upload(sample.rows);
  const int64_t longest = *std::max_element(options_.lengths.begin(), options_.lengths.end());
  const DeviceBuffer scores = AllocateOrExit(rows * longest * sizeof(double));
  const DeviceBuffer expected = AllocateOrExit(rows * shape.head_dim * sizeof(double));
  const DeviceBuffer expected_lse = AllocateOrExit(rows * sizeof(double));
  Must(ReferencePrefill({.prefill = params,
                         .exact = exact,
                         .rows_count = static_cast<uint32_t>(rows),
                         .rows = rows_device.as<const int32_t>(),
                         .scores = scores.as<double>(),
                         .scores_stride = longest,
                         .out = expected.as<double>(),
                         .lse = expected_lse.as<double>()},
                        nullptr),
       "ReferencePrefill");
  Must(cudaDeviceSynchronize(), "ReferencePrefill");
  sample.want = Download<double>(expected, rows * shape.head_dim);
  sample.want_lse = Download<double>(expected_lse, rows);
  sample.out = Output();
  sample.lse = Download<float>(buffers_->lse, buffers_->lse.bytes() / sizeof(float));
  return sample;
}

// The error of the sample's rows from row `begin` to `end`.
PrefillError PrefillCase::ErrorOf(const Sample& sample, int64_t begin, int64_t end) const {
  const size_t dim = options_.shape.head_dim;
  PrefillError error = {};
  double difference = 0.0;
  double rounding = 0.0;
  double norm = 0.0;
  int rows_count = 0;
  for (size_t i = 0; i < sample.rows.size(); ++i) {
    const int32_t row = sample.rows[i];
    if (row < begin || row >= end) continue;
    ++rows_count;
    for (size_t c = 0; c < dim; ++c) {
      const double expect = sample.want[i * dim + c];
      const double got = Bf16ToFloat(sample.out[row * dim + c]);
      const double rounded = Bf16ToFloat(FloatToBf16(static_cast<float>(expect)));
      difference += (got - expect) * (got - expect);
      rounding += (rounded - expect) * (rounded - expect);
      norm += expect * expect;
    }
    const double off = std::abs(sample.lse[row] - sample.want_lse[i]);
    error.lse = std::max(error.lse, std::isfinite(off) ? off : HUGE_VAL);
  }
  const double scale = norm > 0.0 ? norm : 1.0;
  error.relative = std::sqrt(difference / scale);
  double& beyond = rows_count < 64 ? error.few_rows : error.beyond_rounding;
  beyond = std::sqrt(std::max(0.0, difference - rounding) / scale);
  if (!std::isfinite(error.relative) || !std::isfinite(norm)) error.relative = beyond = HUGE_VAL;
  return error;
}

PrefillError PrefillCase::Check(uint32_t layer, bool exact) const {
  const Sample sample = RunBoth(layer, exact);
  const int64_t heads = options_.shape.query_heads;
  PrefillError worst = {};
  for (size_t request = 0; request < options_.lengths.size(); ++request) {
    const PrefillError error =
        ErrorOf(sample, buffers_->starts[request] * heads, buffers_->starts[request + 1] * heads);
    worst.relative = std::max(worst.relative, error.relative);
    worst.beyond_rounding = std::max(worst.beyond_rounding, error.beyond_rounding);
    worst.few_rows = std::max(worst.few_rows, error.few_rows);
    worst.lse = std::max(worst.lse, error.lse);
  }
  // Rows of nobody keep their poison.
  const size_t used = static_cast<size_t>(buffers_->starts.back()) * heads;
  for (size_t i = used * options_.shape.head_dim; i < sample.out.size(); ++i) {
    if (sample.out[i] != 0xffff) worst.relative = worst.beyond_rounding = HUGE_VAL;
  }
  return worst;
}

double PrefillCase::Operations() const {
  const PrefillShape& shape = options_.shape;
  double pairs = 0.0;
  for (size_t i = 0; i < options_.lengths.size(); ++i) {
    for (int64_t t = options_.lengths[i] - options_.new_tokens[i]; t < options_.lengths[i]; ++t) {
      const int64_t seen = t + 1;
      pairs += static_cast<double>(
          shape.sliding_window == 0 ? seen : std::min<int64_t>(seen, shape.sliding_window));
    }
  }
  return 4.0 * pairs * shape.query_heads * shape.head_dim;
}

}  // namespace okv::cuda
