#include "cmd/bench/bootstrap.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "proto/check.h"

namespace okv {

Interval BootstrapMean(absl::Span<const double> values, uint32_t resamples_count, uint64_t seed) {
  OKV_CHECK(!values.empty() && resamples_count > 0);
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
