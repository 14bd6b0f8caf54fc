#ifndef OKV_CMD_BENCH_BOOTSTRAP_H_
#define OKV_CMD_BENCH_BOOTSTRAP_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace okv {

// 95 %.
struct Interval {
  double mean = 0;
  double low = 0;
  double high = 0;
};

// Fewer values than this have Student's interval: of so few a bootstrap knows too few means, and
// its interval is too narrow (of 4 values it covers the true mean 80 times in a hundred).
inline constexpr size_t kBootstrapValuesMin = 8;

// Interval of the mean of `values`, one per independent unit (a window of text), since tokens of
// one window depend on each other: the percentile bootstrap (Efron 1979), resampled whole, 2.5th
// to 97.5th; below kBootstrapValuesMin Student's t, and of one value all numbers. REQUIRES: values
// not empty.
Interval BootstrapMean(absl::Span<const double> values, uint32_t resamples_count, uint64_t seed);

// "bootstrap", "student_t" or "none": what BootstrapMean's interval of so many values is.
const char* IntervalMethod(size_t values_count);

}  // namespace okv

#endif  // OKV_CMD_BENCH_BOOTSTRAP_H_
