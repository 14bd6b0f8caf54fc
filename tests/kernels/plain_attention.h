#ifndef OKV_TESTS_KERNELS_PLAIN_ATTENTION_H_
#define OKV_TESTS_KERNELS_PLAIN_ATTENTION_H_

#include <cstddef>
#include <cstdint>

namespace okv {

// What a decode worker without a quantized cache computes, to compare with: fp32 attention of one
// query token over a bf16 cache, with flash attention's online softmax over blocks of 64 tokens.
struct PlainAttentionParams {
  const float* q;     // [rows, dim], rows the query heads of one KV head
  const uint16_t* k;  // [tokens, dim] bf16
  const uint16_t* v;  // [tokens, dim]
  size_t tokens;      // A multiple of 64.
  uint32_t rows;      // 1, 3 or 4
  uint32_t dim;       // 64, 128 or 256
  float softmax_scale;
  float* out;  // [rows, dim]
};
// False for other rows, and where there are no vectors to compute it with.
bool AttendPlain(const PlainAttentionParams& params);

}  // namespace okv

#endif  // OKV_TESTS_KERNELS_PLAIN_ATTENTION_H_
