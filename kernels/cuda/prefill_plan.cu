// The cut of a chunk into granules, and which int2 slot goes to which workspace block: four small
// kernels, once a chunk for all layers. Sums over requests by one thread block; one thread a
// granule or history block; pieces of granules by one thread block; the order.

#include "kernels/cuda/prefill_plan.cuh"

namespace okv::cuda {
namespace {

constexpr int kSumThreads = 1024;
constexpr int kThreads = 256;

int64_t AlignUp(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// Sums up to and including this thread's of two numbers at once.
__device__ int2 InclusiveSum(int2 value, int2* shared) {
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int distance = 1; distance < kSumThreads; distance *= 2) {
    int2 other = {0, 0};
    if (static_cast<int>(threadIdx.x) >= distance) other = shared[threadIdx.x - distance];
    __syncthreads();
    value.x += other.x;
    value.y += other.y;
    shared[threadIdx.x] = value;
    __syncthreads();
  }
  return value;
}

__global__ __launch_bounds__(kSumThreads) void SumRequestsKernel(
    const __grid_constant__ PrefillPlanParams params, const __grid_constant__ PrefillPlan plan) {
  __shared__ int2 sums[kSumThreads];
  const PrefillShape& shape = params.shape;
  const int sinks = static_cast<int>(shape.sink_blocks);
  const int span = static_cast<int>(PrefillSpan(shape));
  int2 before = {0, 0};  // Of earlier rounds: granules, history blocks
  for (uint32_t first = 0; first < shape.batch; first += kSumThreads) {
    const uint32_t request = first + threadIdx.x;
    int2 count = {0, 0};
    int history_first = sinks;
    if (request < shape.batch) {
      const PrefillSpanOfTokens tokens = PrefillTokensOf(params, static_cast<int>(request));
      if (!tokens.empty()) {
        count.x = (tokens.last_block() - tokens.first_block() + span) / span;
        history_first = max(sinks, PrefillFirstBlock(shape, tokens.first_block()));
        count.y =
            max(0, tokens.last_block() - static_cast<int>(shape.recent_blocks) - history_first);
      }
    }
    const int2 sum = InclusiveSum(count, sums);
    const int history_end = before.y + sum.y;
    if (request < shape.batch) {
      const bool fits = count.y == 0 || history_end <= static_cast<int>(shape.history_blocks_max);
      plan.requests[request] = {.history_first = history_first,
                                .history_offset = fits ? history_end - count.y : -1,
                                .granules_end = before.x + sum.x,
                                .history_end = history_end};
    }
    before.x += sums[kSumThreads - 1].x;
    before.y += sums[kSumThreads - 1].y;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *plan.granules_count = min(before.x, static_cast<int>(plan.granules_max));
    *plan.taken = 0;
    *plan.ended = 0;
  }
}

// The first request for which end(request) > index; batch when there is none.
template <class End>
__device__ int FindRequest(int batch, int index, End end) {
  int low = 0;
  int high = batch;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (end(middle) > index) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

__global__ void FillKernel(const __grid_constant__ PrefillPlanParams params,
                           const __grid_constant__ PrefillPlan plan) {
  const PrefillShape& shape = params.shape;
  const int batch = static_cast<int>(shape.batch);
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (index < *plan.granules_count) {
    const int request =
        FindRequest(batch, index, [&](int i) { return plan.requests[i].granules_end; });
    const int before = request == 0 ? 0 : plan.requests[request - 1].granules_end;
    const int span = static_cast<int>(PrefillSpan(shape));
    const PrefillSpanOfTokens tokens = PrefillTokensOf(params, request);
    const int block = tokens.first_block() + (index - before) * span;
    const int last = min(block + span - 1, tokens.last_block());
    const PrefillRequest& planned = plan.requests[request];
    plan.unsorted[index] = {.request = request,
                            .block = block,
                            .tokens = tokens,
                            .history_base = planned.history_offset < 0
                                                ? kPrefillNoRoom
                                                : planned.history_offset - planned.history_first,
                            .page_begin = 0,
                            .page_end = PrefillPagesOf(shape, block, last).count(),
                            .partial = 0,
                            .piece = 0,
                            .pieces_count = 1};
  }
  if (index < static_cast<int>(plan.partials_max * PrefillItemsOfHeads(shape) * 2)) {
    plan.merged[index] = 0;
  }
  if (index < static_cast<int>(shape.history_blocks_max)) {
    int slot = -1;
    const int request =
        FindRequest(batch, index, [&](int i) { return plan.requests[i].history_end; });
    if (request < batch && plan.requests[request].history_offset >= 0) {
      const PrefillRequest& planned = plan.requests[request];
      const int entry = planned.history_first + index - planned.history_offset -
                        static_cast<int>(shape.sink_blocks);
      slot = params.int2_table[request * params.int2_table_stride + entry];
    }
    plan.history_slots[index] = slot;
  }
}

__device__ int PiecesOf(int pages, int length) { return (pages + length - 1) / length; }

// The time of pieces of `length` pages at most, in pages, where multiprocessors take the longest
// first: the last ones to end are half a piece apart. Huge when there are too many.
__device__ float TimeOfPieces(const int* pages, int count, int items, int sms, int length,
                              int pieces_max) {
  int pages_sum = 0;
  int pieces = 0;
  int longest = 0;
  for (int i = 0; i < count; ++i) {
    pages_sum += pages[i];
    pieces += PiecesOf(pages[i], length);
    longest = max(longest, pages[i]);
  }
  if (pieces > pieces_max) return 3e38f;
  const float piece = static_cast<float>(min(length, longest) + kPrefillPieceCost);
  if (pieces * items <= sms) return piece;
  return static_cast<float>(items) * (pages_sum + kPrefillPieceCost * pieces) / sms + piece / 2;
}

// Cuts granules into pieces where there are few: of the length, among 1,024, that ends first.
__global__ __launch_bounds__(kSumThreads) void CutKernel(
    const __grid_constant__ PrefillPlanParams params, const __grid_constant__ PrefillPlan plan,
    int sms) {
  static_assert(kPrefillPiecesMax <= kSumThreads, "one thread a granule");
  __shared__ int2 sums[kSumThreads];
  __shared__ int pages[kSumThreads];
  __shared__ unsigned long long best;  // Time, length
  const int count = *plan.granules_count;
  const int items = static_cast<int>(PrefillItemsOfHeads(params.shape));
  const int cut = static_cast<int>(PrefillCutGranules(params.shape));
  if (count == 0 || count >= cut || count * items >= 2 * sms) return;
  const int index = static_cast<int>(threadIdx.x);
  PrefillGranule granule = {};
  if (index < count) granule = plan.unsorted[index];
  pages[index] = granule.page_end;
  if (index == 0) best = ~0ull;
  __syncthreads();
  int longest = 0;
  for (int i = 0; i < count; ++i) longest = max(longest, pages[i]);
  // Even lengths: pages are read in pairs. The last one cuts nothing.
  const int step = 2 * (longest / (2 * (kSumThreads - 8)) + 1);
  const int length = 8 + index * step;
  const float time = TimeOfPieces(pages, count, items, sms, length, count + cut);
  atomicMin(&best, static_cast<unsigned long long>(__float_as_uint(time)) << 32 |
                       static_cast<uint32_t>(length));
  __syncthreads();
  int each = 2;  // Pages of a piece, of this granule's pieces all the same
  if (index < count) {
    const int wanted = PiecesOf(granule.page_end, static_cast<int>(best & 0xffffffffu));
    each = (PiecesOf(granule.page_end, wanted) + 1) / 2 * 2;
  }
  const int pieces = PiecesOf(granule.page_end, each);
  const int2 sum = InclusiveSum({pieces, pieces > 1 ? pieces : 0}, sums);
  for (int i = 0; i < pieces; ++i) {
    PrefillGranule piece = granule;
    piece.page_begin = i * each;
    piece.page_end = min(granule.page_end, (i + 1) * each);
    piece.partial = pieces > 1 ? sum.y - pieces : 0;
    piece.piece = i;
    piece.pieces_count = pieces;
    plan.unsorted[sum.x - pieces + i] = piece;
  }
  if (index == 0) *plan.granules_count = sums[kSumThreads - 1].x;
}

// A granule's place is the number of those that go before it.
__global__ void SortKernel(const __grid_constant__ PrefillPlan plan) {
  __shared__ int pages[kThreads];
  const int count = *plan.granules_count;
  const int index = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (static_cast<int>(blockIdx.x * kThreads) >= count) return;
  const auto length = [&](int i) {
    return plan.unsorted[i].page_end - plan.unsorted[i].page_begin;
  };
  const int own = index < count ? length(index) : 0;
  int place = 0;
  for (int first = 0; first < count; first += kThreads) {
    __syncthreads();
    const int other = first + static_cast<int>(threadIdx.x);
    pages[threadIdx.x] = other < count ? length(other) : 0;
    __syncthreads();
    const int these = min(kThreads, count - first);
    for (int i = 0; i < these; ++i) {
      place += pages[i] > own || (pages[i] == own && first + i < index) ? 1 : 0;
    }
  }
  if (index < count) plan.granules[place] = plan.unsorted[index];
}

}  // namespace

bool IsPrefillShape(const PrefillShape& shape) {
  const uint32_t dim = shape.head_dim;
  const uint32_t group_size = shape.group_size;
  return shape.batch >= 1 && shape.batch <= 8192 && shape.query_tokens_max >= 1 &&
         shape.query_tokens_max <= 1u << 24 && shape.kv_heads >= 1 && shape.kv_heads <= 256 &&
         shape.query_heads >= shape.kv_heads && shape.query_heads % shape.kv_heads == 0 &&
         shape.query_heads / shape.kv_heads <= 16 && (dim == 64 || dim == 128 || dim == 256) &&
         group_size >= 32 && group_size <= dim && (group_size & (group_size - 1)) == 0 &&
         shape.sink_blocks <= 1u << 20 && shape.recent_blocks <= 1u << 20 &&
         shape.sliding_window <= 1u << 30 && shape.history_blocks_max <= 1u << 24;
}

PrefillPlan PrefillPlanAt(const PrefillShape& shape, void* workspace) {
  // n new tokens lie in at most (n + 62) / 64 + 1 blocks.
  const uint32_t span = PrefillSpan(shape);
  const int64_t items = PrefillItemsOfHeads(shape);
  const int64_t cut = PrefillCutGranules(shape);
  const int64_t whole =
      shape.query_tokens_max / (kPrefillBlockTokens * span) + int64_t{2} * shape.batch;
  const int64_t granules = whole + cut;
  const int64_t partials = (whole < cut ? whole : cut) + cut;
  auto at = reinterpret_cast<uintptr_t>(workspace);
  const auto take = [&at](int64_t bytes) {
    void* const part = reinterpret_cast<void*>(at);
    at += static_cast<uintptr_t>(AlignUp(bytes));
    return part;
  };
  PrefillPlan plan = {};
  plan.granules_max = static_cast<uint32_t>(granules);
  plan.granules_count = static_cast<int*>(take(sizeof(int)));
  plan.taken = static_cast<uint32_t*>(take(sizeof(uint32_t)));
  plan.ended = static_cast<uint32_t*>(take(sizeof(uint32_t)));
  plan.requests = static_cast<PrefillRequest*>(take(shape.batch * sizeof(PrefillRequest)));
  plan.unsorted = static_cast<PrefillGranule*>(take(granules * sizeof(PrefillGranule)));
  plan.granules = static_cast<PrefillGranule*>(take(granules * sizeof(PrefillGranule)));
  plan.partials_max = static_cast<uint32_t>(partials);
  plan.merged = static_cast<uint32_t*>(take(partials * items * 2 * sizeof(uint32_t)));
  plan.partials = static_cast<float4*>(
      take(partials * items * 2 * (shape.head_dim / 8 + 1) * 128 * sizeof(float4)));
  plan.history_slots = static_cast<int32_t*>(take(shape.history_blocks_max * sizeof(int32_t)));
  plan.history_block_stride = int64_t{shape.kv_heads} * 4 * kPrefillBlockTokens * shape.head_dim;
  plan.history = static_cast<uint8_t*>(take(plan.history_block_stride * shape.history_blocks_max));
  return plan;
}

size_t PrefillWorkspaceBytes(const PrefillShape& shape) {
  if (!IsPrefillShape(shape)) return 0;
  const PrefillPlan plan = PrefillPlanAt(shape, nullptr);
  return reinterpret_cast<uintptr_t>(plan.history) +
         static_cast<size_t>(plan.history_block_stride) * shape.history_blocks_max;
}

cudaError_t PlanPrefill(const PrefillPlanParams& params, cudaStream_t stream) {
  if (!IsPrefillShape(params.shape) || params.query_starts == nullptr ||
      params.lengths == nullptr || params.workspace == nullptr ||
      reinterpret_cast<uintptr_t>(params.workspace) % 16 != 0 ||
      (params.shape.history_blocks_max > 0 && params.int2_table == nullptr)) {
    return cudaErrorInvalidValue;
  }
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const PrefillPlan plan = PrefillPlanAt(params.shape, params.workspace);
  SumRequestsKernel<<<1, kSumThreads, 0, stream>>>(params, plan);
  uint32_t most = plan.partials_max * PrefillItemsOfHeads(params.shape) * 2;
  if (most < plan.granules_max) most = plan.granules_max;
  if (most < params.shape.history_blocks_max) most = params.shape.history_blocks_max;
  FillKernel<<<(most + kThreads - 1) / kThreads, kThreads, 0, stream>>>(params, plan);
  CutKernel<<<1, kSumThreads, 0, stream>>>(params, plan, sms);
  SortKernel<<<(plan.granules_max + kThreads - 1) / kThreads, kThreads, 0, stream>>>(plan);
  return cudaGetLastError();
}

}  // namespace okv::cuda
