#ifndef OKV_CMD_BENCH_TIERS_H_
#define OKV_CMD_BENCH_TIERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/stored_blocks.h"

namespace okv {

// Spill and promote between DRAM and disk, checksums verified, beside direct I/O of pieces of the
// same size in the same directory. Both in turn, round by round.
struct TiersOptions {
  std::string directory;  // A new directory is made in it, and removed.
  BlocksShape shape;
  uint64_t bytes = 0;    // Of payload, a round.
  uint32_t threads = 2;  // That promote; a node has two.
  uint32_t rounds = 5;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

struct TiersReport {
  struct Round {
    double spill = 0;  // Bytes per second, like the others.
    double write = 0;  // Direct I/O, one thread, one fdatasync at the end.
    double promote = 0;
    double read = 0;  // Direct I/O, as many threads as promote.
  };
  uint64_t object_bytes = 0;
  uint64_t objects = 0;
  uint32_t threads = 0;
  bool direct_io = false;
  std::vector<Round> rounds;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Errors are the disk's, or Validate's.
absl::StatusOr<TiersReport> RunTiers(const TiersOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_TIERS_H_
