#ifndef OKV_CALIB_ALL_REDUCE_NCCL_H_
#define OKV_CALIB_ALL_REDUCE_NCCL_H_

#include <memory>

#include "absl/status/statusor.h"
#include "calib/all_reduce.h"

namespace okv {

// Sums by NCCL, each rank with a GPU of its own. `control` is another kind of the same ranks, which
// begins the communicator and is asked before every sum: a rank that has left shows there, where
// NCCL would wait for it for ever. All ranks call this at once. kUnavailable: another rank failed.
// kInternal naming the call.
absl::StatusOr<std::unique_ptr<AllReduce>> MakeNcclRank(std::unique_ptr<AllReduce> control,
                                                        int device);

}  // namespace okv

#endif  // OKV_CALIB_ALL_REDUCE_NCCL_H_
