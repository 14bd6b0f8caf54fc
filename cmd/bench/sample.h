#ifndef OKV_CMD_BENCH_SAMPLE_H_
#define OKV_CMD_BENCH_SAMPLE_H_

#include <algorithm>
#include <cstddef>
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

}  // namespace okv

#endif  // OKV_CMD_BENCH_SAMPLE_H_
