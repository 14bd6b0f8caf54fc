#ifndef OKV_KERNELS_ATTEND_ROWS_H_
#define OKV_KERNELS_ATTEND_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/attend.h"

namespace okv {

// What attend.cc and its scalar twin share. Inside the kernels folder only.

// The sum of probabilities of a row is kept in 16 partial sums, token t in sum t % 16, each in
// order of position; a fixed tree adds them at the end (j += j + 8, 4, 2, 1). That is the same on
// 4, 8 and 16 lanes, and costs no reduction across lanes per block.
inline constexpr uint32_t kSumLanes = 16;

// Query heads per KV head.
inline constexpr uint32_t kQueryGroupMax = 16;

// Rows of one KV head: row r is query r / g, query head kv_head * g + r % g, with g = query heads
// per KV head. Any split of the rows gives the same bits.
struct AttendRange {
  uint32_t kv_head;
  uint32_t row_begin;
  uint32_t row_end;
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
