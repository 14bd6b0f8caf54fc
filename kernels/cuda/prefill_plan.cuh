#ifndef OKV_KERNELS_CUDA_PREFILL_PLAN_CUH_
#define OKV_KERNELS_CUDA_PREFILL_PLAN_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/prefill.h"

// How the work of a chunk is cut. A unit is 64 queries: one query head, one block of a sequence. A
// granule is one block of a sequence, or two where the heads of a KV head are odd in number, so
// that its units pair up; an item is two units, the work of one thread block: both read the same
// keys. Where there are too few items for the machine (a short chunk behind a long history), the
// pages of a granule are cut into pieces, with thread blocks of their own; the last one to end
// merges them.
namespace okv::cuda {

inline constexpr int kPrefillBlockTokens = 64;
// Pieces of items are at most so many more than items: three rounds of an H200's multiprocessors.
inline constexpr int kPrefillPiecesMax = 396;
// What a piece costs besides its pages, in pages: rotations and merge.
inline constexpr int kPrefillPieceCost = 4;

// The new tokens of a request: positions [begin, end) of its sequence, `begin` at row `row` of q.
struct PrefillSpanOfTokens {
  int begin;
  int end;
  int row;

  __host__ __device__ bool empty() const { return begin >= end; }
  __host__ __device__ int first_block() const { return begin / kPrefillBlockTokens; }
  __host__ __device__ int last_block() const { return (end - 1) / kPrefillBlockTokens; }
};

struct alignas(16) PrefillGranule {
  int request;
  int block;  // The first one
  PrefillSpanOfTokens tokens;
  // The workspace block that block 0 would have; kPrefillNoRoom when the history found no room.
  int history_base;
  int page_begin, page_end;
  // Of a piece: the place of its granule's first partial result, its number, how many there are. 1
  // piece: nothing is merged.
  int partial;
  int piece, pieces_count;
};
inline constexpr int kPrefillNoRoom = -0x7fffffff;

struct PrefillRequest {
  int history_first;   // The first block that some query sees in INT2
  int history_offset;  // The workspace block that has it; -1: there is no room
  int granules_end;    // Granules of this request and those before it
  int history_end;     // History blocks of this request and those before it
};

// The workspace: where the plan's parts are. Written by PlanPrefill(), read by Prefill().
struct PrefillPlan {
  int* granules_count;       // Pieces count as granules.
  PrefillRequest* requests;  // [batch]
  PrefillGranule* unsorted;  // [granules_max]
  PrefillGranule* granules;  // [granules_max], the longest first
  uint32_t* taken;           // Items, behind the first one of each thread block
  uint32_t* ended;           // Thread blocks without further items
  uint32_t* merged;        // [partials_max, kv_heads, items per granule, 2 units] pieces that ended
  float4* partials;        // The same, then [head_dim / 8 + 1][128]: sums of a unit's threads
  int32_t* history_slots;  // [history_blocks_max]; -1: not used
  uint8_t* history;        // [history_blocks_max] bf16 blocks of one layer
  uint32_t granules_max;
  uint32_t partials_max;
  int64_t history_block_stride;  // Bytes
};

__host__ __device__ inline uint32_t PrefillGroup(const PrefillShape& shape) {
  return shape.query_heads / shape.kv_heads;
}
// Blocks of a granule.
__host__ __device__ inline uint32_t PrefillSpan(const PrefillShape& shape) {
  return PrefillGroup(shape) % 2 == 0 ? 1 : 2;
}
__host__ __device__ inline uint32_t PrefillItemsPerGranule(const PrefillShape& shape) {
  return PrefillGroup(shape) * PrefillSpan(shape) / 2;
}

// Items of all heads of a granule.
__host__ __device__ inline uint32_t PrefillItemsOfHeads(const PrefillShape& shape) {
  return PrefillItemsPerGranule(shape) * shape.kv_heads;
}
// Pieces of granules are at most so many more than granules, and granules fewer than this are cut.
__host__ __device__ inline uint32_t PrefillCutGranules(const PrefillShape& shape) {
  return (kPrefillPiecesMax + PrefillItemsOfHeads(shape) - 1) / PrefillItemsOfHeads(shape);
}

bool IsPrefillShape(const PrefillShape& shape);
// With `workspace` null the pointers are offsets, the last one behind the end.
PrefillPlan PrefillPlanAt(const PrefillShape& shape, void* workspace);

__device__ inline PrefillSpanOfTokens PrefillTokensOf(const PrefillPlanParams& params,
                                                      int request) {
  const int row = params.query_starts[request];
  const int count = params.query_starts[request + 1] - row;
  const int length = params.lengths[request];
  if (count <= 0 || count > length) return {.begin = 0, .end = 0, .row = row};
  return {.begin = length - count, .end = length, .row = row};
}

// The first block that a query of `block` sees.
__host__ __device__ inline int PrefillFirstBlock(const PrefillShape& shape, int block) {
  if (shape.sliding_window == 0) return 0;
  const int64_t token =
      int64_t{block} * kPrefillBlockTokens - static_cast<int64_t>(shape.sliding_window) + 1;
  return token <= 0 ? 0 : static_cast<int>(token / kPrefillBlockTokens);
}

// The pages that the queries of blocks [first_unit_block, last_unit_block] see, in the order of
// their blocks: BF16 sink, INT2, BF16. A block may be there in both codecs.
struct PrefillPages {
  int sink_begin, sink_count;
  int int2_begin, int2_count;
  int bf16_begin, bf16_count;

  __host__ __device__ int count() const { return sink_count + int2_count + bf16_count; }
};
struct PrefillPage {
  int block;
  bool is_int2;
};

__host__ __device__ inline PrefillPages PrefillPagesOf(const PrefillShape& shape,
                                                       int first_unit_block, int last_unit_block) {
  const auto larger = [](int a, int b) { return a > b ? a : b; };
  const auto smaller = [](int a, int b) { return a < b ? a : b; };
  const int first = PrefillFirstBlock(shape, first_unit_block);
  const int sinks = static_cast<int>(shape.sink_blocks);
  const int recent = static_cast<int>(shape.recent_blocks);
  PrefillPages pages;
  pages.sink_begin = first;
  pages.sink_count = larger(0, smaller(sinks, last_unit_block + 1) - first);
  pages.int2_begin = larger(sinks, first);
  pages.int2_count = larger(0, last_unit_block - recent - pages.int2_begin);
  pages.bf16_begin = larger(pages.int2_begin, first_unit_block - recent);
  pages.bf16_count = larger(0, last_unit_block + 1 - pages.bf16_begin);
  return pages;
}
__host__ __device__ inline PrefillPage PrefillPageAt(const PrefillPages& pages, int index) {
  if (index < pages.sink_count) return {.block = pages.sink_begin + index, .is_int2 = false};
  index -= pages.sink_count;
  if (index < pages.int2_count) return {.block = pages.int2_begin + index, .is_int2 = true};
  return {.block = pages.bf16_begin + index - pages.int2_count, .is_int2 = false};
}
// Whether queries of `unit_block` see this page.
__host__ __device__ inline bool PrefillSees(const PrefillShape& shape, int unit_block,
                                            const PrefillPage& page) {
  const bool bf16 = page.block < static_cast<int>(shape.sink_blocks) ||
                    page.block >= unit_block - static_cast<int>(shape.recent_blocks);
  return page.block <= unit_block && bf16 != page.is_int2;
}

// An item, as every thread of its thread block works it out.
struct PrefillItem {
  PrefillGranule granule;
  int kv_head;
  int pair;      // Of its granule's and KV head's items
  int block[2];  // Of the two units
  int head[2];   // Query heads
  bool used[2];  // False: a repetition of the other one, whose output nobody needs
  PrefillPages pages;
  int page_begin;
  int pages_count;
  bool no_room;  // For its history: it has no pages, and NaN as output.
};

// Page `index` of the item's own.
__device__ inline PrefillPage PrefillPageOf(const PrefillItem& item, int index) {
  return PrefillPageAt(item.pages, item.page_begin + index);
}
// How many of the item's first pages every row of both units sees completely.
__device__ inline int PrefillClearPages(const PrefillShape& shape, const PrefillItem& item) {
  int clear = 0;
  if (item.block[0] == item.block[1]) {
    clear = item.pages.count() - 1;
  } else if (item.pages.int2_count > 0) {
    clear = item.pages.sink_count + item.pages.int2_count - 1;
  }
  return shape.sliding_window != 0 ? 0 : clear - item.page_begin;
}

// Item `index` of a chunk, the longest first: those of one granule, and so of about the same pages,
// follow each other. False when none of its queries exists. REQUIRES: index is below the granules'
// number times PrefillItemsOfHeads().
__device__ inline bool PrefillItemOf(const PrefillShape& shape, const PrefillPlan& plan,
                                     uint32_t index, PrefillItem* item) {
  const uint32_t group = PrefillGroup(shape);
  const uint32_t per_head = PrefillItemsPerGranule(shape);
  const uint32_t of_heads = PrefillItemsOfHeads(shape);
  item->granule = plan.granules[index / of_heads];
  const PrefillGranule& granule = item->granule;
  item->kv_head = static_cast<int>(index % of_heads / per_head);
  item->pair = static_cast<int>(index % per_head);
  for (uint32_t w = 0; w < 2; ++w) {
    const uint32_t unit = 2 * static_cast<uint32_t>(item->pair) + w;
    item->block[w] = granule.block + static_cast<int>(unit / group);
    item->head[w] = item->kv_head * static_cast<int>(group) + static_cast<int>(unit % group);
    item->used[w] = item->block[w] <= granule.tokens.last_block();
  }
  if (!item->used[0]) return false;
  if (!item->used[1]) {
    item->block[1] = item->block[0];
    item->head[1] = item->head[0];
  }
  item->pages = PrefillPagesOf(shape, item->block[0], item->block[1]);
  // The first block of two may have fewer pages than both.
  const int count = item->pages.count();
  item->page_begin = granule.page_begin < count ? granule.page_begin : count;
  item->pages_count = (granule.page_end < count ? granule.page_end : count) - item->page_begin;
  item->no_room = item->pages.int2_count > 0 && granule.history_base == kPrefillNoRoom;
  if (item->no_room) item->pages_count = 0;
  return true;
}

// The 64 queries of an item's unit: those that somebody asked for, and where they are in q and out,
// in rows of head_dim.
struct PrefillUnitRows {
  int begin, end;
  int64_t first;  // Where row 0 is, or would be
  int64_t stride;

  __device__ bool Has(int row) const { return row >= begin && row < end; }
  __device__ int64_t Row(int row) const { return first + row * stride; }
  __device__ int64_t RowOrNone(int row) const { return Has(row) ? Row(row) : -1; }
};
__device__ inline PrefillUnitRows PrefillUnitRowsOf(const PrefillShape& shape,
                                                    const PrefillItem& item, int unit) {
  const PrefillSpanOfTokens& tokens = item.granule.tokens;
  const int position = (unit == 0 ? item.block[0] : item.block[1]) * kPrefillBlockTokens;
  const int head = unit == 0 ? item.head[0] : item.head[1];
  const bool used = unit == 0 ? item.used[0] : item.used[1];
  return {.begin = tokens.begin - position,
          .end = used ? tokens.end - position : tokens.begin - position,
          .first = int64_t{tokens.row + position - tokens.begin} * shape.query_heads + head,
          .stride = shape.query_heads};
}

// The block of the request that bf16_table has behind the sink's.
__device__ inline int PrefillFirstBf16Block(const PrefillParams& params, int request) {
  return params.bf16_first_blocks == nullptr ? static_cast<int>(params.plan.shape.sink_blocks)
                                             : params.bf16_first_blocks[request];
}
// The workspace block or the slot of the bf16 pool that has a page.
__device__ inline int PrefillSlotOf(const PrefillParams& params, const PrefillGranule& granule,
                                    int first_bf16_block, const PrefillPage& page) {
  if (page.is_int2) return granule.history_base + page.block;
  const int sinks = static_cast<int>(params.plan.shape.sink_blocks);
  const int entry = page.block < sinks ? page.block : sinks + page.block - first_bf16_block;
  return params.bf16_table[granule.request * params.bf16_table_stride + entry];
}

// What the attention kernels are launched with.
struct PrefillLaunch {
  PrefillParams params;
  PrefillPlan plan;
};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_PREFILL_PLAN_CUH_
