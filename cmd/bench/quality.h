#ifndef OKV_CMD_BENCH_QUALITY_H_
#define OKV_CMD_BENCH_QUALITY_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/bootstrap.h"
#include "cmd/bench/contender.h"
#include "cmd/bench/quality_controls.h"
#include "cmd/bench/recall.h"
#include "cmd/bench/windows.h"

namespace okv {

// What INT2 history costs in quality, measured against BF16 KV on one text under one set of
// weights: the windows of nll.h, with the distributions compared token by token, and verbatim
// recall (recall.h). A variant is a rotation set with a pair of windows: "oscar@64/256" keeps 64
// sink and 256 recent tokens in BF16.
struct QualityOptions {
  WindowsOptions text;
  // Name -> rotation set file, each set with its own group size.
  std::vector<std::pair<std::string, std::string>> rotations;
  std::vector<FormatOptions> windows;  // Every set runs with each.
  // Also runs variants that must fail and one that must pass (quality_controls.h), around the first
  // rotation set and the first windows: whether the figures can tell good from bad.
  bool controls = false;
  uint32_t recall_tokens = 2048;  // Of a passage; 0: no recall.
  uint32_t recall_passages = 4;   // From the beginning of the measured text.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

// Intervals are 95 % over windows, or over passages for recall (bootstrap.h).
struct RecallFigures {
  Interval accuracy;
  Interval accuracy_loss;  // BF16's minus this, paired.
  Interval agreement;
  Interval mean_run;
  uint32_t longest_run = 0;
};

struct VariantQuality {
  std::string name;
  std::string rotation_hash;
  uint32_t group_size = 0;
  BitsPerElement bits;  // `all` at the length of a window.
  Interval nll;         // Nats a token.
  Interval perplexity;  // exp of nll and of its ends.
  Interval gap;         // NLL minus BF16's, paired.
  Interval kl;          // KL(BF16 || this), nats a token.
  Interval agreement;   // Share of tokens with BF16's likeliest token.
  RecallFigures recall;
};

struct GapDifference {
  std::string a;
  std::string b;
  Interval difference;  // a's gap minus b's, paired.
};

struct QualityReport {
  std::string model;
  uint64_t seed = 0;
  uint32_t tokens = 0;  // Predicted ones.
  uint32_t windows = 0;
  uint32_t window = 0;
  RecallOptions recall;                    // passages 0: not measured.
  std::vector<VariantQuality> variants;    // BF16 first, controls last.
  std::vector<GapDifference> differences;  // Of every two variants, without the controls.
  std::vector<ControlVerdict> verdicts;

  // For people, with a verdict line for each control.
  std::string ToTable() const;
  // One object on one line.
  std::string ToJson() const;
};

// Errors name the file, the flag or the variant. A control that is not held is no error: the report
// says it. Progress goes to stderr. Blocks until done.
absl::StatusOr<QualityReport> RunQuality(const QualityOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_QUALITY_H_
