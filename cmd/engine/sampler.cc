#include "cmd/engine/sampler.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cmd/engine/row_ops.h"
#include "proto/check.h"

namespace okv {

absl::Status SamplerOptions::Validate() const {
  if (!(temperature >= 0) || temperature > 100) {
    return absl::InvalidArgumentError("temperature must be between 0 and 100");
  }
  if (!(top_p > 0) || top_p > 1) {
    return absl::InvalidArgumentError("top_p must be more than 0 and at most 1");
  }
  return absl::OkStatus();
}

Sampler::Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {
  OKV_CHECK(options.Validate().ok());
}

uint32_t Sampler::Sample(absl::Span<const float> logits) {
  OKV_CHECK(!logits.empty());
  if (options_.temperature == 0) return GreedyToken(logits);
  std::vector<uint32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto likelier = [&](uint32_t left, uint32_t right) {
    return logits[left] != logits[right] ? logits[left] > logits[right] : left < right;
  };
  size_t kept = order.size();
  if (options_.top_k > 0 && options_.top_k < kept) {
    kept = options_.top_k;
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                      likelier);
  } else {
    std::sort(order.begin(), order.end(), likelier);
  }
  std::vector<double> cumulative(kept);
  double total = 0;
  for (size_t i = 0; i < kept; ++i) {
    total += Exp((logits[order[i]] - logits[order[0]]) / options_.temperature);
    cumulative[i] = total;
  }
  // The fewest tokens that have top_p of what top_k left.
  const double wanted = total * options_.top_p;
  for (size_t i = 0; i < kept && options_.top_p < 1; ++i) {
    if (cumulative[i] >= wanted) {
      kept = i + 1;
      break;
    }
  }
  // 53 random bits: uniform in [0, 1).
  const double point = static_cast<double>(random_() >> 11) * 0x1p-53 * cumulative[kept - 1];
  const auto end = cumulative.begin() + static_cast<std::ptrdiff_t>(kept);
  const auto chosen = std::upper_bound(cumulative.begin(), end, point);
  const size_t index = std::min<size_t>(static_cast<size_t>(chosen - cumulative.begin()), kept - 1);
  return order[index];
}

uint32_t GreedyToken(absl::Span<const float> logits) {
  OKV_CHECK(!logits.empty());
  return static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace okv
