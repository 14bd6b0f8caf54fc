#include "cmd/bench/bootstrap.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "proto/check.h"

namespace okv {

namespace {

// The 97.5th percentile of Student's t with 1 to 6 degrees of freedom.
constexpr double kStudent[] = {12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469};
static_assert(std::size(kStudent) == kBootstrapValuesMin - 2);

Interval StudentMean(absl::Span<const double> values) {
  const double count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  if (values.size() == 1) {
    const double all = std::numeric_limits<double>::infinity();
    return {.mean = mean, .low = -all, .high = all};
  }
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double half = kStudent[values.size() - 2] * std::sqrt(squares / (count - 1) / count);
  return {.mean = mean, .low = mean - half, .high = mean + half};
}

}  // namespace

const char* IntervalMethod(size_t values_count) {
  if (values_count >= kBootstrapValuesMin) return "bootstrap";
  return values_count > 1 ? "student_t" : "none";
}

Interval BootstrapMean(absl::Span<const double> values, uint32_t resamples_count, uint64_t seed) {
  OKV_CHECK(!values.empty() && resamples_count > 0);
  if (values.size() < kBootstrapValuesMin) return StudentMean(values);
  const double count = static_cast<double>(values.size());
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<size_t> pick(0, values.size() - 1);
  std::vector<double> means(resamples_count);
  for (double& mean : means) {
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) sum += values[pick(random)];
    mean = sum / count;
  }
  std::sort(means.begin(), means.end());
  const auto percentile = [&means](double p) {
    return means[static_cast<size_t>(p * static_cast<double>(means.size() - 1) + 0.5)];
  };
  return {.mean = std::accumulate(values.begin(), values.end(), 0.0) / count,
          .low = percentile(0.025),
          .high = percentile(0.975)};
}

}  // namespace okv
