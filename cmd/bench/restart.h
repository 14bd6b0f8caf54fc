#ifndef OKV_CMD_BENCH_RESTART_H_
#define OKV_CMD_BENCH_RESTART_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace okv {

// How long a restarted node takes until it knows again what its disk holds: small blocks, written
// through the disk tier, then found again with the page cache told to forget the index.
struct RestartOptions {
  std::string directory;  // A new directory is made in it, and removed.
  uint32_t objects = 1'000'000;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

struct RestartReport {
  uint32_t objects = 0;
  uint64_t object_bytes = 0;
  double fill_seconds = 0;
  double open_seconds = 0;    // Of all of the storage, the arena's 1 MiB included.
  double memory_bytes = 0;    // Resident, an object.
  double index_bytes = 0;     // On disk, an object.
  uint32_t objects_read = 0;  // Afterwards, as a check.

  std::string ToTable() const;
  std::string ToJson() const;
};

// kInternal when an object was not adopted; other errors are the disk's, or Validate's.
absl::StatusOr<RestartReport> RunRestart(const RestartOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_RESTART_H_
