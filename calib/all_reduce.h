#ifndef OKV_CALIB_ALL_REDUCE_H_
#define OKV_CALIB_ALL_REDUCE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace okv {

// What several ranks of one calibration share: sums. Each rank has one of its own and calls the
// same methods in the same order. Thread-compatible.
class AllReduce {
 public:
  virtual ~AllReduce() = default;  // Leaves: sums that others wait for fail.

  virtual uint32_t rank() const = 0;  // Below ranks_count().
  virtual uint32_t ranks_count() const = 0;

  // Puts the sum over all ranks into `values` of each: the same bits on every rank, and exact where
  // at most one rank has a number other than 0. Waits for all ranks. kUnavailable: one of them has
  // left, none of which says why; what a caller reports is the others' error. kInvalidArgument:
  // ranks with values of different counts. After an error the object is good for nothing but
  // destruction, and `values` are unspecified.
  virtual absl::Status Sum(absl::Span<double> values) = 0;
};

// One rank: a sum is what it was.
class OneRank : public AllReduce {
 public:
  uint32_t rank() const override { return 0; }
  uint32_t ranks_count() const override { return 1; }
  absl::Status Sum(absl::Span<double>) override { return absl::OkStatus(); }
};

// `ranks_count` ranks of this process, each to be used by a thread of its own; sums are in the
// order of ranks, whatever the threads do. REQUIRES: ranks_count >= 1.
std::vector<std::unique_ptr<AllReduce>> MakeThreadRanks(uint32_t ranks_count);

}  // namespace okv

#endif  // OKV_CALIB_ALL_REDUCE_H_
