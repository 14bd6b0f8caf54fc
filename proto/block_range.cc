#include "proto/block_range.h"

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

struct Bounds {
  const char* name;  // "layer" or "head".
  uint32_t begin;
  uint32_t end;
  uint32_t count;  // What the format has.
};

// Fills in "all" and checks; the end.
absl::StatusOr<uint32_t> ResolveEnd(const Bounds& bounds) {
  if (bounds.begin == 0 && bounds.end == 0) return bounds.count;
  if (bounds.end > bounds.count) {
    return absl::InvalidArgumentError(absl::StrCat(bounds.name, "_end is ", bounds.end,
                                                   ", the format has ", bounds.count, " ",
                                                   bounds.name, "s"));
  }
  if (bounds.begin >= bounds.end) {
    return absl::InvalidArgumentError(absl::StrCat(bounds.name, "_begin is ", bounds.begin,
                                                   ", and must be below ", bounds.name, "_end, ",
                                                   bounds.end));
  }
  return bounds.end;
}

}  // namespace

std::string BlockRange::ToString() const {
  return absl::StrCat("layers [", layer_begin, ", ", layer_end, "), heads [", head_begin, ", ",
                      head_end, ")");
}

absl::StatusOr<BlockRange> ResolveRange(const BlockRange& asked, const PageLayout& layout) {
  BlockRange range = asked;
  OKV_ASSIGN_OR_RETURN(range.layer_end, ResolveEnd({.name = "layer",
                                                    .begin = asked.layer_begin,
                                                    .end = asked.layer_end,
                                                    .count = layout.layers_count}));
  OKV_ASSIGN_OR_RETURN(range.head_end, ResolveEnd({.name = "head",
                                                   .begin = asked.head_begin,
                                                   .end = asked.head_end,
                                                   .count = layout.kv_heads}));
  return range;
}

std::vector<BlockPiece> RangePieces(const BlockRange& range, const PageLayout& layout,
                                    Codec codec) {
  OKV_CHECK(range.layer_end <= layout.layers_count && range.head_end <= layout.kv_heads);
  const size_t layer_bytes = range.heads_count() * layout.run_bytes(codec);
  std::vector<BlockPiece> pieces;
  for (uint32_t layer = range.layer_begin; layer < range.layer_end; ++layer) {
    const size_t offset = layout.run_offset(codec, layer, range.head_begin);
    if (!pieces.empty() && pieces.back().offset + pieces.back().bytes == offset) {
      pieces.back().bytes += layer_bytes;
    } else {
      pieces.push_back({.offset = offset, .bytes = layer_bytes});
    }
  }
  return pieces;
}

std::vector<uint32_t> RangeChecksums(const ObjectId& id, const PageLayout& layout,
                                     const BlockRange& range, absl::Span<const uint8_t> bytes) {
  OKV_CHECK(bytes.size() == range.bytes(layout, id.codec));
  const size_t run_bytes = layout.run_bytes(id.codec);
  std::vector<uint32_t> checksums;
  checksums.reserve(range.runs_count());
  for (uint32_t layer = range.layer_begin; layer < range.layer_end; ++layer) {
    for (uint32_t head = range.head_begin; head < range.head_end; ++head) {
      checksums.push_back(RunChecksum(
          id, layer, head, bytes.subspan(range.run_index(layer, head) * run_bytes, run_bytes)));
    }
  }
  return checksums;
}

absl::Status CheckRangeSizes(const ObjectHeader& header, const PageLayout& layout,
                             const BlockRange& range, size_t bytes_count) {
  const Codec codec = header.id.codec;
  const auto bad = [&](const auto&... what) {
    return absl::DataLossError(absl::StrCat(header.id.Name(), ": ", what...));
  };
  if (header.payload_bytes != layout.block_bytes(codec)) {
    return bad("the header says ", header.payload_bytes, " payload bytes, the format ",
               layout.block_bytes(codec));
  }
  if (bytes_count != range.bytes(layout, codec)) {
    return bad(bytes_count, " payload bytes for ", range.ToString(), ", not ",
               range.bytes(layout, codec));
  }
  if (header.checksums.size() != layout.runs_count()) {
    return bad(header.checksums.size(), " checksums, not ", layout.runs_count());
  }
  return absl::OkStatus();
}

absl::Status VerifyRange(const ObjectHeader& header, const PageLayout& layout,
                         const BlockRange& range, absl::Span<const uint8_t> bytes) {
  OKV_RETURN_IF_ERROR(CheckRangeSizes(header, layout, range, bytes.size()));
  const Codec codec = header.id.codec;
  const size_t run_bytes = layout.run_bytes(codec);
  for (uint32_t layer = range.layer_begin; layer < range.layer_end; ++layer) {
    for (uint32_t head = range.head_begin; head < range.head_end; ++head) {
      const auto run = bytes.subspan(range.run_index(layer, head) * run_bytes, run_bytes);
      if (RunChecksum(header.id, layer, head, run) !=
          header.checksums[size_t{layer} * layout.kv_heads + head]) {
        return absl::DataLossError(
            absl::StrCat(header.id.Name(), ": wrong checksum in layer ", layer, ", head ", head));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace okv
