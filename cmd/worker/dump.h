#ifndef OKV_CMD_WORKER_DUMP_H_
#define OKV_CMD_WORKER_DUMP_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace okv {

// Runs text through the model with a BF16 cache and dumps post-RoPE Q and K and raw V of every
// layer for okv-calibrate (calib/dump.h).
struct DumpOptions {
  std::string model;
  std::string text;          // Text file.
  uint32_t skip_tokens = 0;  // Left out at the beginning of the text.
  uint32_t tokens = 16384;   // A multiple of window.
  uint32_t window = 2048;    // Tokens of one sequence; they lie evenly over the rest of the text.
  uint32_t threads = 0;      // 0: one per core.
  std::string out;           // Directory, created.

  absl::Status Validate() const;
};

// Progress goes to stderr. Errors name the file. Blocks until done.
absl::Status RunDump(const DumpOptions& options);

}  // namespace okv

#endif  // OKV_CMD_WORKER_DUMP_H_
