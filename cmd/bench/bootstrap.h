#ifndef OKV_CMD_BENCH_BOOTSTRAP_H_
#define OKV_CMD_BENCH_BOOTSTRAP_H_

#include <cstdint>

#include "absl/types/span.h"

namespace okv {

struct Interval {
  double mean = 0;
  double low = 0;   // 2.5th percentile.
  double high = 0;  // 97.5th percentile.
};

// 95 % percentile bootstrap of the mean of `values` (Efron 1979), resampled whole: one value per
// independent unit (a window of text), since tokens of one window depend on each other.
// REQUIRES: values not empty.
Interval BootstrapMean(absl::Span<const double> values, uint32_t resamples_count, uint64_t seed);

}  // namespace okv

#endif  // OKV_CMD_BENCH_BOOTSTRAP_H_
