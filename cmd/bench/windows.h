#ifndef OKV_CMD_BENCH_WINDOWS_H_
#define OKV_CMD_BENCH_WINDOWS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/bench/bootstrap.h"
#include "cmd/bench/contender.h"
#include "cmd/engine/model.h"
#include "kernels/thread_pool.h"

namespace okv {

// A text in windows, each a sequence of its own, under one set of weights: what quality is measured
// on. Windows are the independent unit of every interval.
struct WindowsOptions {
  std::string model;
  std::string text;
  uint32_t skip_tokens = 0;  // Left out at the beginning: what a calibration has seen.
  uint32_t tokens = 32768;   // A multiple of window.
  uint32_t window = 2048;    // Tokens of one sequence; each starts an empty cache.
  uint32_t threads = 0;      // 0: one per core.
  uint64_t seed = 1;         // Of the bootstrap.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
  uint32_t windows_count() const { return tokens / window; }
};

// What WindowsOptions name, in memory.
struct LoadedWindows {
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<Model> model;
  std::vector<uint32_t> tokens;
};
// Errors name the file, or the flag when the text or the model's context is too short. REQUIRES:
// options.Validate() is OK.
absl::StatusOr<LoadedWindows> LoadWindows(const WindowsOptions& options);

// Means over the tokens of each window.
struct WindowScores {
  std::vector<double> nll;
  std::vector<double> kl;
  std::vector<double> agreement;
};

struct ScoreWindowsOptions {
  std::string command;  // Of okv-bench, for the progress on stderr.
  bool compare = true;  // As in ScoreOptions.
};
// By contender, the first being the baseline. Errors as ScoreTokens. Blocks until done.
absl::StatusOr<std::vector<WindowScores>> ScoreWindows(const WindowsOptions& options,
                                                       const LoadedWindows& loaded,
                                                       absl::Span<const Contender> contenders,
                                                       const ScoreWindowsOptions& score_options);

// kInvalidArgument naming --window: the last token of so long a window reads no demoted block in
// any of `variants`.
absl::Status CheckHistory(absl::Span<const Contender> variants, uint32_t window);

// The intervals of everything measured by windows. REQUIRES: not empty, and of one size.
Interval MeanInterval(absl::Span<const double> values, uint64_t seed);
Interval PairedInterval(absl::Span<const double> values, absl::Span<const double> baseline,
                        uint64_t seed);

}  // namespace okv

#endif  // OKV_CMD_BENCH_WINDOWS_H_
