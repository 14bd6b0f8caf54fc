#ifndef OKV_PROTO_PAGE_LAYOUT_H_
#define OKV_PROTO_PAGE_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "proto/format.h"
#include "proto/ids.h"
#include "proto/int2_layout.h"

namespace okv {

// Where bytes are inside a block, for one format. A block is its pages, layer-major, contiguous; a
// page is one run per KV head; page_layout.md documents every byte. A plain value.
//
// int2 run, layout version 1 (d = head_dim, g = group_size, G = d / g groups, 64 tokens): K codes,
// V codes, parameter words, in the order of int2_layout.h.
// bf16 run: K rows [64][d] bf16, then V rows [64][d] bf16.
// K and V are rotated (R_K, R_V) in both codecs.
struct PageLayout {
  uint32_t layers_count = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t group_size = 0;

  // REQUIRES: format.Validate() is OK.
  static PageLayout Of(const Format& format) {
    return {.layers_count = format.layers_count(),
            .kv_heads = format.kv_heads,
            .head_dim = format.head_dim_k,
            .group_size = format.group_size};
  }

  uint32_t groups() const { return head_dim / group_size; }

  // Offsets inside an int2 run.
  size_t k_codes_offset() const { return int2::KeyCodesOffset(); }
  size_t v_codes_offset() const { return int2::ValueCodesOffset(head_dim); }
  size_t params_offset() const { return int2::ParamsOffset(head_dim); }
  // Offset of the V rows inside a bf16 run.
  size_t bf16_v_offset() const { return size_t{kBlockTokens} * head_dim * 2; }

  // Bytes of one KV head's share of a page: 2,560 at d 64, g 64; 4,608 at d 128, g 128.
  size_t run_bytes(Codec codec) const {
    return codec == Codec::kInt2 ? size_t{int2::RunBytes(head_dim, groups())}
                                 : size_t{kBlockTokens} * head_dim * 4;
  }
  size_t page_bytes(Codec codec) const { return run_bytes(codec) * kv_heads; }
  size_t block_bytes(Codec codec) const { return page_bytes(codec) * layers_count; }
  size_t run_offset(Codec codec, uint32_t layer, uint32_t head) const {
    return page_bytes(codec) * layer + run_bytes(codec) * head;
  }
  // One checksum per (layer, KV head) run.
  size_t runs_count() const { return size_t{layers_count} * kv_heads; }
  // Elements (K and V) of a block: what a BF16 cache would hold, for bits per element.
  size_t elements_count() const {
    return size_t{layers_count} * kv_heads * head_dim * kBlockTokens * 2;
  }
};

}  // namespace okv

#endif  // OKV_PROTO_PAGE_LAYOUT_H_
