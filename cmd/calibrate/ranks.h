#ifndef OKV_CMD_CALIBRATE_RANKS_H_
#define OKV_CMD_CALIBRATE_RANKS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "calib/dump.h"
#include "calib/fit.h"
#include "nlohmann/json.hpp"

namespace okv {

// Over how many ranks a fit goes, and where they are.
struct RankOptions {
  uint32_t ranks_count = 0;      // 0: one; with nccl one a GPU.
  std::optional<uint32_t> rank;  // Set: this process is one rank. Unset: all are threads of it.
  std::string rendezvous;        // HOST:PORT where rank 0 listens, if ranks are processes.
  bool nccl = false;             // Covariances on GPUs, one a rank, summed by NCCL.
  uint32_t threads = 1;          // Of this process; its ranks divide them.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
  bool writes_result() const { return rank.value_or(0) == 0; }
};

// FitRotations over the ranks; every rank gets the result. Each rank holds a layer in memory.
// `progress` is rank 0's. `facts` gets what there is to say of ranks and GPUs. Errors as
// FitRotations; kDeadlineExceeded: ranks that do not come; kUnavailable: a rank of another process
// has left; kFailedPrecondition: nccl in a build without it; kNotFound: fewer GPUs than ranks.
absl::StatusOr<FitResult> FitOverRanks(const DumpReader& dump, const FitOptions& options,
                                       const RankOptions& ranks,
                                       const std::function<void(const LayerReport&)>& progress,
                                       nlohmann::ordered_json* facts);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_RANKS_H_
