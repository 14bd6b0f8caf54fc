#ifndef OKV_TESTS_CACHE_NODE_RANGES_H_
#define OKV_TESTS_CACHE_NODE_RANGES_H_

#include <cstdint>
#include <vector>

#include "proto/block_range.h"
#include "tests/cache_node/objects.h"

// What the tests of tensor-parallel ranks share.
namespace okv::testing_support {

// 3 layers of `kv_heads` heads: an int2 run has 2,560 bytes, a bf16 run 16,384.
inline Format FormatOf(uint32_t kv_heads) {
  Format format = TestFormat();
  format.layer_ids = {0, 1, 2};
  format.kv_heads = kv_heads;
  return format;
}

inline std::vector<uint8_t> Slice(const TestObject& object, const BlockRange& range) {
  std::vector<uint8_t> bytes;
  for (const BlockPiece& piece : RangePieces(range, object.object->layout, object.id().codec)) {
    const auto begin = object.payload.begin() + static_cast<ptrdiff_t>(piece.offset);
    bytes.insert(bytes.end(), begin, begin + static_cast<ptrdiff_t>(piece.bytes));
  }
  return bytes;
}

// Heads of rank `rank` of `ranks_count`.
inline BlockRange RankRange(const PageLayout& layout, uint32_t rank, uint32_t ranks_count) {
  BlockRange range = BlockRange::Whole(layout);
  range.head_begin = layout.kv_heads / ranks_count * rank;
  range.head_end = layout.kv_heads / ranks_count * (rank + 1);
  return range;
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_RANGES_H_
