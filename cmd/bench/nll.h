#ifndef OKV_CMD_BENCH_NLL_H_
#define OKV_CMD_BENCH_NLL_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/bootstrap.h"
#include "cmd/bench/windows.h"

namespace okv {

// What INT2 history costs in quality: the negative log likelihood (nats per token) of one text
// under one set of weights with BF16 KV and with INT2 history under each rotation set, window by
// window. quality.h measures more and takes longer.
struct NllOptions {
  WindowsOptions windows;
  // Name -> rotation set file.
  std::vector<std::pair<std::string, std::string>> rotations;
  uint32_t sink_tokens = 64;
  uint32_t recent_tokens = 256;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

struct NllReport {
  uint32_t tokens = 0;  // Predicted ones.
  uint32_t windows = 0;
  uint32_t history_tokens = 0;          // That a window's last token reads from INT2.
  std::map<std::string, double> nll;    // Name, and "bf16" -> mean NLL.
  std::map<std::string, Interval> gap;  // Name -> NLL minus BF16's, paired, 95 % over windows.
  // "a-b" -> paired difference of two names, in the order of their mean gaps.
  std::map<std::string, Interval> difference;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Errors name the file. kInvalidArgument naming --window: no token would be read from INT2, so that
// there would be nothing to compare. Progress goes to stderr. Blocks until done.
absl::StatusOr<NllReport> RunNll(const NllOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_NLL_H_
