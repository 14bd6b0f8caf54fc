#include "calib/shared_covariance.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

uint32_t TokensOf(const std::vector<SequenceRange>& ranges) {
  uint32_t tokens_count = 0;
  for (const SequenceRange& range : ranges) tokens_count += range.tokens_count;
  return tokens_count;
}

}  // namespace

absl::StatusOr<std::vector<Matrix>> CpuCovariance::Queries(const LayerDump& layer,
                                                           const SequenceRange& tokens) {
  return QueryCovariance(layer, tokens, pool_);
}
absl::StatusOr<std::vector<Matrix>> CpuCovariance::Keys(const LayerDump& layer,
                                                        const SequenceRange& tokens) {
  return KeyCovariance(layer, tokens, pool_);
}
absl::StatusOr<std::vector<Matrix>> CpuCovariance::SoftmaxValues(
    const LayerDump& layer, const std::vector<SequenceRange>& ranges) {
  return SoftmaxValueCovariance(layer, ranges, pool_);
}

std::vector<SequenceRange> ShareOfRanges(const std::vector<SequenceRange>& ranges,
                                         const AllReduce& ranks) {
  const uint64_t all = TokensOf(ranges);
  std::vector<SequenceRange> share;
  uint64_t first = 0;
  for (const SequenceRange& range : ranges) {
    // The rank whose part of the text the range's middle lies in.
    const uint64_t middle = 2 * first + range.tokens_count;
    if (middle * ranks.ranks_count() / (2 * all) == ranks.rank()) share.push_back(range);
    first += range.tokens_count;
  }
  return share;
}

std::vector<SequenceRange> SampleRanges(const std::vector<SequenceRange>& ranges,
                                        const ValueSample& sample) {
  std::vector<SequenceRange> sampled;
  uint32_t left = sample.tokens_max;
  for (const SequenceRange& range : ranges) {
    const uint32_t count = std::min({range.tokens_count, sample.sequence_tokens_max, left});
    if (count > 0) sampled.push_back({.first_token = range.first_token, .tokens_count = count});
    left -= count;
  }
  return sampled;
}

SharedCovariance::SharedCovariance(const LayerDump& layer, std::vector<SequenceRange> ranges,
                                   CovarianceDevice* device, AllReduce* ranks)
    : layer_(layer),
      ranges_(std::move(ranges)),
      device_(device),
      ranks_(ranks),
      tokens_count_(TokensOf(ranges_)) {
  OKV_CHECK(tokens_count_ > 0);
  for (size_t i = 1; i < ranges_.size(); ++i) {
    OKV_CHECK(ranges_[i].first_token == ranges_[i - 1].first_token + ranges_[i - 1].tokens_count);
  }
  const std::vector<SequenceRange> share = ShareOfRanges(ranges_, *ranks_);
  share_ = {.first_token = share.empty() ? 0 : share[0].first_token,
            .tokens_count = TokensOf(share)};
}

absl::Status SharedCovariance::Average(std::vector<double> weights, std::vector<Matrix>* means) {
  if (ranks_->ranks_count() == 1) return absl::OkStatus();
  const size_t heads = layer_.kv_heads;
  const size_t numbers = size_t{layer_.head_dim} * layer_.head_dim;
  // One message: the sums, then the weights.
  std::vector<double> sums(heads * (numbers + 1), 0.0);
  for (size_t head = 0; head < means->size(); ++head) {
    for (size_t i = 0; i < numbers; ++i) {
      sums[head * numbers + i] = (*means)[head][i] * weights[head];
    }
    sums[heads * numbers + head] = weights[head];
  }
  OKV_RETURN_IF_ERROR(ranks_->Sum(absl::MakeSpan(sums)));
  means->assign(heads, Matrix(numbers));
  for (size_t head = 0; head < heads; ++head) {
    const double weight = sums[heads * numbers + head];
    for (size_t i = 0; i < numbers; ++i) {
      (*means)[head][i] = weight > 0 ? sums[head * numbers + i] / weight : 0.0;
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Matrix>> SharedCovariance::Queries() {
  std::vector<Matrix> means;
  if (share_.tokens_count > 0) {
    OKV_ASSIGN_OR_RETURN(means, device_->Queries(layer_, share_));
  }
  OKV_RETURN_IF_ERROR(Average(std::vector<double>(layer_.kv_heads, share_.tokens_count), &means));
  return means;
}

absl::StatusOr<std::vector<Matrix>> SharedCovariance::Keys() {
  std::vector<Matrix> means;
  if (share_.tokens_count > 0) {
    OKV_ASSIGN_OR_RETURN(means, device_->Keys(layer_, share_));
  }
  OKV_RETURN_IF_ERROR(Average(std::vector<double>(layer_.kv_heads, share_.tokens_count), &means));
  return means;
}

absl::StatusOr<std::vector<Matrix>> SharedCovariance::SoftmaxValues(const ValueSample& sample) {
  // The sample is shared by itself: it may end before the text of most ranks begins.
  const std::vector<SequenceRange> share = ShareOfRanges(SampleRanges(ranges_, sample), *ranks_);
  std::vector<Matrix> means;
  if (!share.empty()) {
    OKV_ASSIGN_OR_RETURN(means, device_->SoftmaxValues(layer_, share));
  }
  OKV_RETURN_IF_ERROR(Average(std::vector<double>(layer_.kv_heads, TokensOf(share)), &means));
  return means;
}

absl::StatusOr<std::vector<Matrix>> SharedCovariance::EnergyValues(
    const std::vector<Matrix>& query_covariance, ThreadPool* pool) {
  if (ranks_->ranks_count() == 1) {
    return EnergyValueCovariance(layer_, share_, query_covariance, pool);
  }
  std::vector<Matrix> means;
  std::vector<double> weights(layer_.kv_heads, 0.0);
  if (share_.tokens_count > 0) {
    means = EnergyValueCovariance(layer_, share_, query_covariance, pool);
    // EnergyValueCovariance is a mean by weights k C_Q k^T, whose sum is N tr(C_Q K^T K / N).
    const std::vector<Matrix> keys = KeyCovariance(layer_, share_, pool);
    for (size_t head = 0; head < weights.size(); ++head) {
      const Matrix& c_q = query_covariance[query_covariance.size() == 1 ? 0 : head];
      double trace = 0;  // Of a product of symmetric matrices.
      for (size_t i = 0; i < c_q.size(); ++i) trace += c_q[i] * keys[head][i];
      weights[head] = std::max(trace, 0.0) * share_.tokens_count;
    }
  }
  OKV_RETURN_IF_ERROR(Average(std::move(weights), &means));
  return means;
}

}  // namespace okv
