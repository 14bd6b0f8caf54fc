#ifndef OKV_CMD_BENCH_ROW_DRAWS_H_
#define OKV_CMD_BENCH_ROW_DRAWS_H_

#include <cstdint>
#include <vector>

namespace okv {

// How to draw rows as a model has them, and the rotations that were fitted to them: a row is z M
// for a standard normal z, so that its second moment is M^T M. bf16 bits, [head_dim, head_dim]
// row-major. A plain value.
struct RowDraws {
  uint32_t head_dim = 0;
  std::vector<uint16_t> mix_k;  // Of queries and keys
  std::vector<uint16_t> mix_v;
  std::vector<uint16_t> r_k;
  std::vector<uint16_t> r_v;
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_ROW_DRAWS_H_
