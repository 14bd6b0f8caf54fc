// The split of a decode step into equal pieces, one a thread block, computed on the device once a
// step so that a captured graph follows the lengths.
//
// Every unit costs the same; a piece of a pair costs piece_cost units more (queries, merge). The
// smallest capacity with which greedy filling needs no more blocks than there are is found by
// trying 1,024 capacities at once; a trial is O(blocks + requests), because the pairs of one
// request are alike.

#include "kernels/cuda/attend_plan.cuh"
#include "kernels/cuda/attend_tuning.h"
#include "kernels/cuda/ptx.cuh"

namespace okv::cuda {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kBlocksMax = 1024;  // Thread blocks, more than any device has multiprocessors
// What a pair, or a part of one, costs a block beside its units, in units (measured: README.md):
// its queries' rotation, merge, the output's rotation; and a part waits for the memory twice, which
// in the midst of a stream answers after some 5 us. Between long pieces the rings go on loading.
// With more pairs than blocks every block has whole pairs and a part at either end: those cost
// less.
constexpr int kWholeCost = 20;
constexpr int kCutCost = 36;
constexpr int kLongCost = 8;
constexpr int kLongCutCost = 24;
// Of the wide kernel, whose warpgroups wait less for what a piece begins with.
constexpr int kWideLongCost = 9;
constexpr int kWideLongCutCost = 6;
constexpr int kLongPieceUnits = 128;
// Pairs are cut at multiples of 1, 2, 4 or 8 units.
constexpr int kAligns = 4;
constexpr int kAlignMax = 1 << (kAligns - 1);
constexpr int kCapacityTolerance = 64;  // One part of so many
constexpr int kWideCapacityTolerance = 1000;
// What a thread block loses that starts when the kernel in front has ended.
constexpr int kLateStartUnits = 8;

struct PlanParams {
  DecodeShape shape;
  DecodeGeometry geometry;
  DecodeWorkspace workspace;
  const int32_t* lengths;
};

struct Cut {
  int32_t pair;
  int32_t unit;
};

__device__ int DivideUp(int a, int b) { return (a + b - 1) / b; }

__device__ RequestPlan PlanRequest(const DecodeShape& shape, const DecodeGeometry& geometry,
                                   int length) {
  constexpr int kTokens = kBlockTokens;
  const int unit_tokens = 8 * geometry.page_blocks;
  const int sinks = shape.sink_blocks;
  RequestPlan plan = {};
  plan.length = length;
  if (length <= 0) return plan;
  const int first_position = max(0, length - static_cast<int>(shape.query_tokens));
  const int first_block = first_position / kTokens;
  const int last_block = (length - 1) / kTokens;
  const int window = shape.sliding_window;
  const int visible = window == 0 ? 0 : max(0, first_position - window + 1);
  const int sink_end = min(sinks * kTokens, length);
  plan.sink_first_unit = visible / unit_tokens;
  plan.sink_units = max(0, DivideUp(sink_end, unit_tokens) - plan.sink_first_unit);
  const int recent_first_block = max(sinks, first_block - static_cast<int>(shape.recent_blocks));
  plan.recent_first_token = max(recent_first_block * kTokens, visible / unit_tokens * unit_tokens);
  plan.recent_units = max(0, DivideUp(length - plan.recent_first_token, unit_tokens));
  plan.int2_first_block = max(sinks, visible / kTokens);
  plan.int2_blocks =
      max(0, last_block - static_cast<int>(shape.recent_blocks) - plan.int2_first_block);
  plan.units = plan.sink_units + plan.recent_units +
               DivideUp(plan.int2_blocks, static_cast<int>(geometry.page_blocks));
  return plan;
}

// All in units.
struct FillRule {
  int capacity;      // of a block
  int align;         // A pair is cut at multiples of it
  int whole_cost;    // of a pair in one block
  int cut_cost;      // of a part of a pair
  int blocks_count;  // To be filled
};

// Fills blocks greedily. False when that takes more than the device has. With `cuts`, writes where
// each block's piece begins; the entries behind the last one used are the end.
__device__ bool Fill(const PlanParams& params, const int32_t* units, const FillRule& rule,
                     Cut* cuts) {
  const int blocks_count = rule.blocks_count;
  const int pairs_per_request = params.geometry.pairs_per_request;
  int block = 0;
  int room = rule.capacity;
  int pair = 0;
  if (cuts != nullptr) cuts[0] = {0, 0};
  for (uint32_t request = 0; request < params.shape.batch; ++request) {
    const int pair_units = units[request];
    const int whole_cost = pair_units + rule.whole_cost;
    int pairs_left = pairs_per_request;
    while (pairs_left > 0) {
      if (whole_cost <= room) {
        const int whole = min(pairs_left, room / whole_cost);
        room -= whole * whole_cost;
        pairs_left -= whole;
        pair += whole;
        continue;
      }
      int left = pair_units;
      do {
        if (room < rule.cut_cost + min(rule.align, left)) {
          if (++block == blocks_count) return false;
          room = rule.capacity;
          if (cuts != nullptr) cuts[block] = {pair, pair_units - left};
        }
        int take = room - rule.cut_cost;
        take = take >= left ? left : take - take % rule.align;
        room -= rule.cut_cost + take;
        left -= take;
      } while (left > 0);
      --pairs_left;
      ++pair;
    }
  }
  if (cuts != nullptr) {
    const int device_blocks = params.geometry.blocks_count;
    for (++block; block <= device_blocks; ++block) cuts[block] = {pair, 0};
  }
  return true;
}

// The blocks that share `pair`, of which block `inside` has a part.
__device__ void SharedBy(const Cut* cuts, int blocks_count, int inside, int pair, int32_t* begin,
                         int32_t* end) {
  int first = inside;
  while (first > 0 && cuts[first].pair == pair && cuts[first].unit > 0) --first;
  int last = inside + 1;
  while (last < blocks_count && cuts[last].pair == pair && cuts[last].unit > 0) ++last;
  *begin = first;
  *end = last;
}

// BF16 units among the first `units` of a pair.
__device__ int Bf16UnitsBefore(const RequestPlan& plan, int units) {
  const int64_t bf16 = plan.sink_units + plan.recent_units;
  return static_cast<int>(bf16 * units / max(1, plan.units));
}

__device__ BlockPlan MakeBlockPlan(const PlanParams& params, const int32_t* units, const Cut* cuts,
                                   int block) {
  const int blocks_count = params.geometry.blocks_count;
  const Cut begin = cuts[block];
  const Cut end = cuts[block + 1];
  BlockPlan plan = {};
  plan.first_pair = begin.pair;
  plan.first_unit = begin.unit;
  plan.last_pair = end.unit > 0 ? end.pair : end.pair - 1;
  if (plan.first_pair > plan.last_pair) return plan;
  const int per_request = params.geometry.pairs_per_request;
  const int row_groups = params.geometry.row_groups;
  plan.last_unit_end = end.unit > 0 ? end.unit : units[plan.last_pair / per_request];
  plan.first_request = plan.first_pair / per_request;
  const int inside = plan.first_pair % per_request;
  plan.first_kv_head = inside / row_groups;
  plan.first_row = inside % row_groups * static_cast<int>(params.geometry.group_rows);
  plan.first_plan = PlanRequest(params.shape, params.geometry, params.lengths[plan.first_request]);
  plan.first_bf16 = Bf16UnitsBefore(plan.first_plan, plan.first_unit);
  const int last_request = plan.last_pair / per_request;
  plan.last_bf16_end = Bf16UnitsBefore(
      PlanRequest(params.shape, params.geometry, params.lengths[last_request]), plan.last_unit_end);
  SharedBy(cuts, blocks_count, block, plan.first_pair, &plan.first_pair_begin,
           &plan.first_pair_end);
  int32_t ignored;
  SharedBy(cuts, blocks_count, block, plan.last_pair, &ignored, &plan.last_pair_end);
  return plan;
}

__global__ void __launch_bounds__(kPlanThreads) PlanKernel(const PlanParams params) {
  __shared__ int32_t units[kBatchMax];
  __shared__ Cut cuts[kBlocksMax + 1];
  __shared__ int32_t total;
  __shared__ int32_t best[kAligns];
  const int thread = threadIdx.x;
  const int batch = params.shape.batch;
  const int pairs_per_request = params.geometry.pairs_per_request;
  const int blocks_count = params.geometry.blocks_count;
  if (thread == 0) {
    total = 0;
  }
  if (thread < kAligns) best[thread] = INT32_MAX;
  WaitForKernelBefore();
  __syncthreads();
  int sum = 0;
  for (int i = thread; i < batch; i += kPlanThreads) {
    const RequestPlan plan = PlanRequest(params.shape, params.geometry, params.lengths[i]);
    params.workspace.requests[i] = plan;
    units[i] = plan.units;
    sum += plan.units;
  }
  for (int i = thread; i < batch * pairs_per_request; i += kPlanThreads) {
    params.workspace.arrivals[i] = 0;
  }
  atomicAdd(&total, sum);
  __syncthreads();

  const int64_t pairs = static_cast<int64_t>(batch) * pairs_per_request;
  const int64_t all_units = static_cast<int64_t>(total) * pairs_per_request;
  const bool long_pieces = min(all_units / pairs, all_units / blocks_count) >= kLongPieceUnits;
  const bool wide = params.geometry.wide;
  const bool many_pairs = pairs > blocks_count && params.geometry.group_rows == 4;
  const int long_cost = wide ? kWideLongCost : kLongCost;
  const int long_cut_cost = wide ? kWideLongCutCost : many_pairs ? kLongCost : kLongCutCost;
  const int whole_cost = long_pieces ? long_cost : kWholeCost;
  const int cut_cost = long_pieces ? long_cut_cost : kCutCost;
  const int tolerance = wide ? kWideCapacityTolerance : kCapacityTolerance;
  // Few pairs end all at once, each with a merge in one of its blocks, and there the next kernel's
  // blocks start late. As many blocks are left without work if that costs less.
  const bool spares = pairs < blocks_count &&
                      pairs * all_units < int64_t{kLateStartUnits} * blocks_count * blocks_count;
  const int filled = spares ? blocks_count - static_cast<int>(pairs) : blocks_count;
  const int64_t pieces_cost = cut_cost * (pairs + blocks_count);
  const int low = static_cast<int>(all_units / filled) + whole_cost;
  // Of the alignments, the coarsest whose smallest capacity is nearly the best one: the warps of a
  // block then have equal shares, and pairs more often end where a block ends.
  const int align_index = thread % kAligns;
  const int high =
      static_cast<int>((all_units + pieces_cost) / filled) + cut_cost + 2 * kAlignMax + 1;
  constexpr int kSteps = kPlanThreads / kAligns - 1;
  const int capacity =
      low + static_cast<int>(static_cast<int64_t>(high - low) * (thread / kAligns) / kSteps);
  if (Fill(params, units, {capacity, 1 << align_index, whole_cost, cut_cost, filled}, nullptr)) {
    atomicMin(&best[align_index], capacity);
  }
  __syncthreads();
  if (thread == 0) {
    int least = best[0];
    for (int i = 1; i < kAligns; ++i) least = min(least, best[i]);
    int chosen = kAligns - 1;
    while (best[chosen] > least + least / tolerance) --chosen;
    Fill(params, units, {best[chosen], 1 << chosen, whole_cost, cut_cost, filled}, cuts);
  }
  __syncthreads();
  for (int i = thread; i < blocks_count; i += kPlanThreads) {
    params.workspace.blocks[i] = MakeBlockPlan(params, units, cuts, i);
  }
}

uint32_t DivideUpHost(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

bool Supported(const DecodeShape& shape) {
  if (shape.head_dim != 64 && shape.head_dim != 128 && shape.head_dim != 256) return false;
  if (shape.group_size < 32 || shape.group_size > shape.head_dim) return false;
  if ((shape.group_size & (shape.group_size - 1)) != 0) return false;
  if (shape.batch == 0 || shape.batch > kBatchMax || shape.kv_heads == 0) return false;
  if (shape.kv_heads > 4096 || shape.query_heads % shape.kv_heads != 0) return false;
  const uint32_t group = shape.query_heads / shape.kv_heads;
  if (group == 0 || group > kQueryGroupMax) return false;
  if (shape.query_tokens == 0 || shape.query_tokens > kQueryTokensMax) return false;
  const uint32_t spare = shape.query_tokens > 1 ? 2 : 1;
  return shape.sink_blocks <= 1024 && shape.recent_blocks <= 1024 &&
         shape.ring_blocks >= shape.recent_blocks + spare;
}

}  // namespace

bool MakeDecodeGeometry(const DecodeShape& shape, DecodeGeometry* geometry) {
  if (!Supported(shape)) return false;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = -1;
    return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : -1;
  };
  const int multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  const int shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (multiprocessors <= 0 || multiprocessors > kBlocksMax || shared_bytes <= 0) return false;
  const uint32_t rows = shape.query_tokens * (shape.query_heads / shape.kv_heads);
  geometry->rows = rows;
  geometry->group_rows = rows <= 4 ? 4 : rows <= 8 || shape.head_dim == 256 ? 8 : 16;
  const uint32_t groups = shape.head_dim / shape.group_size;
  geometry->wide = attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
                   attribute(cudaDevAttrComputeCapabilityMinor) == 0 &&
                   HasWideKernel(shape.head_dim, groups, geometry->group_rows);
  const DecodeTuning tuning =
      geometry->wide ? kWideTuning : TuningOf(shape.head_dim, groups, geometry->group_rows);
  geometry->row_groups = DivideUpHost(rows, geometry->group_rows);
  geometry->pairs_per_request = shape.kv_heads * geometry->row_groups;
  geometry->page_blocks = tuning.page_blocks;
  geometry->blocks_count = static_cast<uint32_t>(multiprocessors);
  geometry->warps = tuning.warps;
  geometry->shared_bytes = static_cast<uint32_t>(shared_bytes);
  return true;
}

DecodeWorkspace LayOutWorkspace(const DecodeShape& shape, const DecodeGeometry& geometry,
                                void* base) {
  DecodeWorkspace workspace = {};
  const size_t blocks = geometry.blocks_count;
  const size_t pairs = size_t{shape.batch} * geometry.pairs_per_request;
  const size_t rows = geometry.group_rows;
  size_t offset = 0;
  const auto take = [&](size_t bytes) {
    uint8_t* part = static_cast<uint8_t*>(base) + offset;
    offset += (bytes + 255) / 256 * 256;
    return static_cast<void*>(part);
  };
  workspace.blocks = static_cast<BlockPlan*>(take(blocks * sizeof(BlockPlan)));
  workspace.requests = static_cast<RequestPlan*>(take(shape.batch * sizeof(RequestPlan)));
  workspace.arrivals = static_cast<uint32_t*>(take(pairs * sizeof(uint32_t)));
  workspace.partial_outputs =
      static_cast<float*>(take(2 * blocks * shape.head_dim * rows * sizeof(float)));
  workspace.partial_sums = static_cast<float*>(take(2 * blocks * 2 * rows * sizeof(float)));
  workspace.bytes = offset;
  return workspace;
}

size_t DecodeWorkspaceBytes(const DecodeShape& shape) {
  DecodeGeometry geometry;
  if (!MakeDecodeGeometry(shape, &geometry)) return 0;
  return LayOutWorkspace(shape, geometry, nullptr).bytes;
}

cudaError_t PlanDecode(const DecodeShape& shape, const int32_t* lengths, void* workspace,
                       cudaStream_t stream) {
  PlanParams params = {};
  params.shape = shape;
  params.lengths = lengths;
  if (!MakeDecodeGeometry(shape, &params.geometry)) return cudaErrorInvalidValue;
  params.workspace = LayOutWorkspace(shape, params.geometry, workspace);
  PlanKernel<<<1, kPlanThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace okv::cuda
