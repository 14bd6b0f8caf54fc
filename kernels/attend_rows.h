#ifndef OKV_KERNELS_ATTEND_ROWS_H_
#define OKV_KERNELS_ATTEND_ROWS_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "kernels/attend.h"

namespace okv {

// What attend.cc, attend_int2-inl.h and their scalar twin share. Inside the kernels folder only.

// The sum of probabilities of a row is kept in 16 partial sums, token t in sum t % 16, each in
// order of position; a fixed tree adds them at the end (j += j + 8, 4, 2, 1). That is the same on
// 4, 8 and 16 lanes, and costs no reduction across lanes per block.
inline constexpr uint32_t kSumLanes = 16;

// A row's history is summed in spans of 16 blocks, 1,024 tokens, each from nothing, and the spans
// are folded together in order of position, however many threads computed them. Long histories also
// round less that way than in one chain.
inline constexpr uint32_t kSpanBlocks = 16;
inline uint32_t SpansCount(const AttendParams& params) {
  return static_cast<uint32_t>((params.blocks.size() + kSpanBlocks - 1) / kSpanBlocks);
}

// Over int2 blocks, queries and probabilities are 16-bit fixed point, high byte * 256 + low byte,
// as instructions for bytes take them. A query's bytes are signed: 127 * 256 + 127 is the largest
// pair that -1 times gives too. Probabilities times scales are not negative: unsigned bytes.
inline constexpr float kQueryFixedMax = 32639.0f;
inline constexpr float kWeightFixedMax = 65535.0f;
// Below this largest magnitude all values are 0: 1 / x would overflow near 2^-112.
inline constexpr float kFixedTiny = 0x1p-100f;
// A weight's rounding error times the middle of the codes 0..3 goes to the offsets, in fp32: what
// is left is the error times (code - 1.5), which is smaller, and not the same in every channel.
inline constexpr float kMiddleCode = 1.5f;

// value ~ unit * round_half_even(value * inverse).
struct FixedPoint {
  float inverse;
  float unit;  // NaN when a value is NaN or Inf: it makes the sums NaN, whatever the integers are.
};
// For values whose largest magnitude has these bits (as integers magnitudes order as they do as
// numbers, and NaN is above Inf), to become at most `fixed_max`.
inline FixedPoint FixedPointOf(uint32_t max_bits, float fixed_max) {
  const float max = std::bit_cast<float>(max_bits);
  if (max_bits >= 0x7f800000u) return {0.0f, std::numeric_limits<float>::quiet_NaN()};
  if (max < kFixedTiny) return {0.0f, 0.0f};
  return {fixed_max / max, max * (1.0f / fixed_max)};
}

// Query heads per KV head.
inline constexpr uint32_t kQueryGroupMax = 16;

// Rows of one KV head: row r is query r / g, query head kv_head * g + r % g, with g = query heads
// per KV head. Any split of the rows gives the same bits.
struct AttendRange {
  uint32_t kv_head;
  uint32_t row_begin;
  uint32_t row_end;
};

// What one thread computes: rows over the spans [span_begin, span_end).
struct AttendTask {
  AttendRange range;
  uint32_t span_begin;
  uint32_t span_end;
  // Null: the spans are all, and the task finishes its rows. Otherwise where to leave the states of
  // the KV head's rows, [spans][rows], which are folded when all tasks are done.
  float* states;
};

// The checks of Attend(): kInvalidArgument naming the field.
absl::Status ValidateAttend(const AttendParams& params);

// Tokens of `block` that row `row` sees.
inline uint32_t VisibleTokens(const AttendParams& params, uint32_t block, uint32_t row) {
  const uint32_t group = params.query_heads / params.kv_heads;
  return block + 1 < params.blocks.size() ? 64 : params.last_block_tokens + row / group;
}

// Where row `row` of `kv_head` starts in q and in out, in elements.
inline size_t RowOffset(const AttendParams& params, uint32_t kv_head, uint32_t row) {
  const uint32_t group = params.query_heads / params.kv_heads;
  const size_t head = size_t{kv_head} * group + row % group;
  return (size_t{row / group} * params.query_heads + head) * params.head_dim;
}

namespace reference {
// Computes the rows of `range`. REQUIRES: ValidateAttend(params) is OK.
void AttendRows(const AttendParams& params, const AttendRange& range);
}  // namespace reference

}  // namespace okv

#endif  // OKV_KERNELS_ATTEND_ROWS_H_
