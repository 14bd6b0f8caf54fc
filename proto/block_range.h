#ifndef OKV_PROTO_BLOCK_RANGE_H_
#define OKV_PROTO_BLOCK_RANGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/object.h"
#include "proto/page_layout.h"

namespace okv {

// A part of a block: the runs of some layers and, in each of them, of some KV heads. What a
// tensor-parallel rank reads and writes. Its bytes on their own are layer-major like a block's: the
// first layer's runs in the order of their heads, then the next layer's. A plain value.
struct BlockRange {
  uint32_t layer_begin = 0;
  uint32_t layer_end = 0;
  uint32_t head_begin = 0;
  uint32_t head_end = 0;

  bool operator==(const BlockRange&) const = default;

  static BlockRange Whole(const PageLayout& layout) {
    return {.layer_begin = 0,
            .layer_end = layout.layers_count,
            .head_begin = 0,
            .head_end = layout.kv_heads};
  }

  uint32_t layers_count() const { return layer_end - layer_begin; }
  uint32_t heads_count() const { return head_end - head_begin; }
  size_t runs_count() const { return size_t{layers_count()} * heads_count(); }
  size_t bytes(const PageLayout& layout, Codec codec) const {
    return runs_count() * layout.run_bytes(codec);
  }
  // Where the range's run of (layer, head) is in its own bytes. REQUIRES: the range has it.
  size_t run_index(uint32_t layer, uint32_t head) const {
    return size_t{layer - layer_begin} * heads_count() + (head - head_begin);
  }
  bool Overlaps(const BlockRange& other) const {
    return layer_begin < other.layer_end && other.layer_begin < layer_end &&
           head_begin < other.head_end && other.head_begin < head_end;
  }
  // Of one value for each run of a block, those of the range, in its order.
  std::vector<uint32_t> Select(const std::vector<uint32_t>& of_block,
                               const PageLayout& layout) const {
    if (*this == Whole(layout)) return of_block;
    std::vector<uint32_t> selected;
    selected.reserve(runs_count());
    for (uint32_t layer = layer_begin; layer < layer_end; ++layer) {
      const auto page = of_block.begin() + size_t{layer} * layout.kv_heads;
      selected.insert(selected.end(), page + head_begin, page + head_end);
    }
    return selected;
  }
  std::string ToString() const;  // "layers [0, 36), heads [2, 4)".
};

// `asked` with what it leaves out filled in (begin and end 0: all of them). kInvalidArgument naming
// the field that is not within the format or leaves nothing.
absl::StatusOr<BlockRange> ResolveRange(const BlockRange& asked, const PageLayout& layout);

// Where the range is in a block: pieces in order, neighbours merged. One piece when the range has
// every head, or one layer; otherwise one a layer. REQUIRES: a resolved range.
struct BlockPiece {
  size_t offset;
  size_t bytes;

  bool operator==(const BlockPiece&) const = default;
};
std::vector<BlockPiece> RangePieces(const BlockRange& range, const PageLayout& layout, Codec codec);

// RunChecksum of every run of the range, in its order; `bytes` are the range's own. REQUIRES: a
// resolved range; bytes of its size.
std::vector<uint32_t> RangeChecksums(const ObjectId& id, const PageLayout& layout,
                                     const BlockRange& range, absl::Span<const uint8_t> bytes);

// kDataLoss when a header or a range's own bytes have another size, or another number of checksums,
// than `layout` gives them: what VerifyRange looks at first. REQUIRES: a resolved range.
absl::Status CheckRangeSizes(const ObjectHeader& header, const PageLayout& layout,
                             const BlockRange& range, size_t bytes_count);

// As VerifyObject, of a range's own bytes against the header of the whole object. kDataLoss naming
// the first bad (layer, head) run by the numbers it has in the block. REQUIRES: a resolved range.
absl::Status VerifyRange(const ObjectHeader& header, const PageLayout& layout,
                         const BlockRange& range, absl::Span<const uint8_t> bytes);

}  // namespace okv

#endif  // OKV_PROTO_BLOCK_RANGE_H_
