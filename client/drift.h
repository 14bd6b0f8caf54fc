#ifndef OKV_CLIENT_DRIFT_H_
#define OKV_CLIENT_DRIFT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "proto/mutex.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"

namespace okv {

struct DriftOptions {
  // Of so many consecutive rows of a layer one is measured, its K and its V; 0: none. A row is a
  // (token, KV head). 4,096 at 8 heads: a row in 512 tokens of a layer.
  uint32_t rows_per_sample = 4096;
};

// The sampled rows of one layer's keys, or values. Sums, so that a scraper can take rates of them
// and divide.
struct DriftTensor {
  uint64_t rows = 0;
  uint64_t elements = 0;
  // Beyond +-t, the row's clip threshold. t is a rank in the row itself, so that only elements
  // equal to t keep this from being (head_dim - 1 - rank) of each row: it says which clip is served
  // and that rows are not degenerate, and hardly moves with the data.
  uint64_t clipped_elements = 0;
  double squared_error = 0;  // Of |y^ - y|^2: y rotated, y^ what a reader of the page gets.
  double squared_norm = 0;   // Of |y|^2.

  // What calibration promised.
  double promised_clip_rate = 0;         // From the clip ranks, a mean over the heads.
  std::optional<double> promised_error;  // Squared error over squared norm, when the set says it.

  bool operator==(const DriftTensor&) const = default;
};

struct DriftLayer {
  uint32_t layer_id = 0;
  DriftTensor k;
  DriftTensor v;

  bool operator==(const DriftLayer&) const = default;
};

struct DriftStats {
  std::vector<DriftLayer> layers;  // In the order of the rotation set.
};

// How well a rotation set fits the rows that are demoted under it, measured on a sample: a set that
// was fitted to other data, or to other weights, quantizes worse than calibration promised.
// Shared by all sequences of one rotation set. Thread-safe.
class DriftMonitor {
 public:
  // `rotations` outlives it.
  DriftMonitor(const RotationSet* rotations, const DriftOptions& options);
  DriftMonitor(const DriftMonitor&) = delete;
  DriftMonitor& operator=(const DriftMonitor&) = delete;

  // One page that was just demoted.
  struct Page {
    uint32_t layer;  // 0-based position in layer_ids.
    uint32_t block;
    uint64_t salt;             // SequenceOptions::drift_salt
    const uint8_t* bf16_page;  // What QuantizeRun took,
    const uint8_t* int2_page;  // and what it made of that.
  };
  // Adds the page's sampled rows, if it has any. Which rows those are depends on layer id, token,
  // head and salt alone.
  void Measure(const Page& page) ABSL_LOCKS_EXCLUDED(mu_);

  // All rows measured so far.
  DriftStats Stats() const ABSL_LOCKS_EXCLUDED(mu_);

  const RotationSet* rotations() const { return rotations_; }

 private:
  // Of consecutive rows [n, n + rows_per_sample), n = stretch * rows_per_sample, the one to
  // measure.
  uint64_t SampledRow(uint64_t stretch, const Page& page) const;
  // Measures one row; `token` counts from the block's first.
  void AddSample(const Page& page, uint32_t token, uint32_t head, DriftTensor* k,
                 DriftTensor* v) const;

  // Constant after construction.
  const RotationSet* const rotations_;
  const PageLayout layout_;
  const DriftOptions options_;

  // Held for additions only, once in 8 pages of 8 heads at the default rate.
  mutable Mutex mu_;
  DriftStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CLIENT_DRIFT_H_
