#ifndef OKV_KERNELS_CUDA_ROWS_H_
#define OKV_KERNELS_CUDA_ROWS_H_

#include <cuda_bf16.h>

#include <cstdint>

// How the quantize, rotate and dequantize kernels find rows and pages. Plain values; every pointer
// is to device memory, every stride 64 bits wide.
namespace okv::cuda {

// bf16 rows of head_dim contiguous elements in a cache of pages. The row of (layer l, slot s, KV
// head h) starts at
//   base + l * layer_stride + s / page_tokens * page_stride + s % page_tokens * token_stride
//        + h * head_stride
// in elements. Everything but page_tokens (a power of two) is a multiple of 8 elements, base of 16
// bytes. With P page tokens, H heads and d channels:
//   [tokens, H, d] (a projection's output)   page_tokens 1, page_stride the tokens' stride
//   NHD [pages, P, H, d]                     token_stride H d, head_stride d, page_stride P H d
//   HND [pages, H, P, d]                     token_stride d, head_stride P d, page_stride P H d
//   K and V packed, [pages, 2, ...]          page_stride 2 P H d, V's base P H d elements later
//   a pool of bf16 blocks (page_layout.md)   P 64, token_stride d, head_stride 128 d,
//                                            layer_stride H 128 d, V's base 64 d elements later
template <typename Element>
struct PagedRowsOf {
  Element* base;
  int64_t layer_stride;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  uint32_t page_tokens;
};
using PagedRows = PagedRowsOf<__nv_bfloat16>;
using ConstPagedRows = PagedRowsOf<const __nv_bfloat16>;

// The slot of token i of a launch: slots[i] when there are slots; else pages[i / page_tokens] *
// page_tokens + i % page_tokens when there are pages; else i. A token with a negative entry is left
// out. At most one of the two is not null.
struct TokenMap {
  const int32_t* slots;
  const int32_t* pages;
};

// Pages in a pool of blocks, int2 or bf16. The run of (block b of a launch, layer l, KV head h)
// starts at
//   base + slot * block_stride + l * layer_stride + h * head_stride
// in bytes, with slot = table[b], or b without a table. A block with a negative slot is left out.
// REQUIRES: base and strides are multiples of 16.
template <typename Byte>
struct PagesOf {
  Byte* base;
  int64_t block_stride;
  int64_t layer_stride;
  int64_t head_stride;
  const int32_t* table;
};
using Pages = PagesOf<uint8_t>;
using ConstPages = PagesOf<const uint8_t>;

// Rotations of a launch, row-major: k and v are [layers, rotation_heads, head_dim, head_dim] bf16,
// rotation_heads 1 or kv_heads. Both null: no rotation. early: they were complete before the kernel
// in front on the stream began, and may be loaded before it has ended (REQUIRES: of that kernel,
// what QuantizePagesParams::early_inputs does).
struct Rotations {
  const __nv_bfloat16* k;
  const __nv_bfloat16* v;
  uint32_t rotation_heads;
  bool early = false;
};

}  // namespace okv::cuda

#endif  // OKV_KERNELS_CUDA_ROWS_H_
