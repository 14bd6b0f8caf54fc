#ifndef OKV_CMD_BENCH_SAMPLE_H_
#define OKV_CMD_BENCH_SAMPLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace okv {

// The value with `share` of the others below it (nearest rank; the median of an even count is its
// upper one); 0 for none.
inline double Quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(rank, values.size() - 1)];
}

// 0 to count - 1 in random order, the same for the same seed: a pool of blocks that is in use gives
// its slots out in no order.
inline std::vector<uint32_t> RandomSlots(uint32_t count, uint64_t seed) {
  std::vector<uint32_t> slots(count);
  std::iota(slots.begin(), slots.end(), 0u);
  std::mt19937_64 random(seed);
  std::shuffle(slots.begin(), slots.end(), random);
  return slots;
}

}  // namespace okv

#endif  // OKV_CMD_BENCH_SAMPLE_H_
