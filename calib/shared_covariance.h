#ifndef OKV_CALIB_SHARED_COVARIANCE_H_
#define OKV_CALIB_SHARED_COVARIANCE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/all_reduce.h"
#include "calib/covariance.h"
#include "kernels/thread_pool.h"

namespace okv {

// Where covariances are computed, one matrix per KV head each, as the functions of covariance.h
// give them. Thread-compatible.
class CovarianceDevice {
 public:
  virtual ~CovarianceDevice() = default;
  // Errors are the device's own: kResourceExhausted, kInternal. REQUIRES: a token at least.
  virtual absl::StatusOr<std::vector<Matrix>> Queries(const LayerDump& layer,
                                                      const SequenceRange& tokens) = 0;
  virtual absl::StatusOr<std::vector<Matrix>> Keys(const LayerDump& layer,
                                                   const SequenceRange& tokens) = 0;
  virtual absl::StatusOr<std::vector<Matrix>> SoftmaxValues(
      const LayerDump& layer, const std::vector<SequenceRange>& ranges) = 0;
};

class CpuCovariance : public CovarianceDevice {
 public:
  explicit CpuCovariance(ThreadPool* pool) : pool_(pool) {}
  absl::StatusOr<std::vector<Matrix>> Queries(const LayerDump& layer,
                                              const SequenceRange& tokens) override;
  absl::StatusOr<std::vector<Matrix>> Keys(const LayerDump& layer,
                                           const SequenceRange& tokens) override;
  absl::StatusOr<std::vector<Matrix>> SoftmaxValues(
      const LayerDump& layer, const std::vector<SequenceRange>& ranges) override;

 private:
  ThreadPool* const pool_;
};

// Which of `ranges` are rank `rank`'s: whole ones, adjacent, about as many tokens for each rank.
// All ranks together have each range once.
std::vector<SequenceRange> ShareOfRanges(const std::vector<SequenceRange>& ranges,
                                         const AllReduce& ranks);

// SampleSequences of sequences that `ranges` name.
std::vector<SequenceRange> SampleRanges(const std::vector<SequenceRange>& ranges,
                                        const ValueSample& sample);

// Covariances of a text of one layer, of which each rank reads its share of the sequences: every
// rank gets the same bits, those of one rank to about 1e-15. Errors of all methods: the device's
// and AllReduce::Sum's. Lives while the layer does. Thread-compatible.
class SharedCovariance {
 public:
  // The text is `ranges` of the layer, each where the one before it ends; a token at least. Its
  // rows are read where they lie.
  SharedCovariance(const LayerDump& layer, std::vector<SequenceRange> ranges,
                   CovarianceDevice* device, AllReduce* ranks);

  uint32_t tokens_count() const { return tokens_count_; }  // Of all ranks.
  // As the functions of covariance.h over the text.
  absl::StatusOr<std::vector<Matrix>> Queries();
  absl::StatusOr<std::vector<Matrix>> Keys();
  absl::StatusOr<std::vector<Matrix>> SoftmaxValues(const ValueSample& sample);
  absl::StatusOr<std::vector<Matrix>> EnergyValues(const std::vector<Matrix>& query_covariance,
                                                   ThreadPool* pool);

 private:
  // Of this rank's share and what it weighs, [kv_heads] both; the share may be empty.
  absl::Status Average(std::vector<double> weights, std::vector<Matrix>* means);

  const LayerDump& layer_;
  const std::vector<SequenceRange> ranges_;
  CovarianceDevice* const device_;
  AllReduce* const ranks_;
  uint32_t tokens_count_ = 0;
  SequenceRange share_;  // This rank's tokens of the text; may be none.
};

}  // namespace okv

#endif  // OKV_CALIB_SHARED_COVARIANCE_H_
