#ifndef OKV_CALIB_REPORT_H_
#define OKV_CALIB_REPORT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "calib/dump.h"
#include "calib/fit.h"
#include "calib/history.h"
#include "calib/report_attention.h"
#include "kernels/thread_pool.h"
#include "proto/rotation_set.h"

namespace okv {

// What rotations and clips do to activations that they were not fitted to: the steps from no
// rotation to U H P_br at several group sizes, and rotation sets as they would serve.

struct ReportOptions {
  std::vector<uint32_t> group_sizes = {};  // Empty: those of 32, 64 and 128 that head_dim holds.
  RotationScope scope = RotationScope::kLayer;  // What U has a basis for.
  uint32_t windows_max = 3;                     // Of 2,048 tokens, evenly spaced.
  uint32_t query_stride = 3;                    // Every which block of queries is compared.
  ValueSample value_sample = {};                // For C_S.

  // kInvalidArgument naming the option that does not suit a model of this head_dim.
  absl::Status Validate(uint32_t head_dim) const;
  std::vector<uint32_t> GroupSizes(uint32_t head_dim) const;
};

// One tensor of one head, or of all heads of a layer: then max_abs is the largest, importance_ratio
// is of the heads' mean matrix, and the rest are means.
struct TensorMeasures {
  double max_abs = 0;           // max |y|, y the rotated rows, before the clip.
  double group_range = 0;       // Mean of max - min of a group, before the clip.
  double importance_ratio = 0;  // Largest over mean of diag(R^T C R); C is C_Q, for values C_S.
  double error_trace = 0;       // tr(E): mean |x^ - x|^2 of a row.
  double clip_rate = 0;         // Share of the elements that the codec clamps.
};

struct HeadMeasures {
  TensorMeasures k;
  TensorMeasures v;
  SquaredError logit;  // Of a row of keys: tr(C_Q E_K), over tr(C_Q K^T K / N).
  AttentionErrors attention;
};

// One rotation at one group size.
struct VariantMeasures {
  std::string name;  // "none", "hadamard", "U", "UH", "UHP", "UHP recipe", or a set's.
  uint32_t group_size = 0;
  std::vector<HeadMeasures> heads;  // [kv_heads]
  HeadMeasures layer;
};

// diag(R^T C R), C the mean over heads, in descending order: [head_dim].
struct Spectrum {
  std::string name;
  std::vector<double> values;
};

// Elements of rotated keys, all heads together, in equal bins from -limit to limit.
struct KeyHistogram {
  std::string name;
  double limit = 0;
  std::vector<uint64_t> counts;
};

struct LayerMeasures {
  uint32_t layer_id = 0;
  uint64_t rows_count = 0;                // Of a head that went through the codec.
  std::vector<VariantMeasures> variants;  // By group size, then in the order of names above.
  std::vector<Spectrum> k_spectra;        // Of none, U, UHP, and of each set.
  std::vector<Spectrum> v_spectra;
  std::vector<KeyHistogram> k_histograms;  // The same, with hadamard.
};

// A rotation set under the name that it has in the report.
struct NamedSet {
  std::string name;
  RotationSet set;
};

struct CalibrationReport {
  DumpInfo info;  // Of the activations.
  uint32_t tokens_count = 0;
  HistoryShape shape;
  std::vector<SequenceRange> windows;  // What was measured.
  std::string fitted_on;               // What U was made of, for people.
  RotationScope scope = RotationScope::kLayer;
  std::vector<std::string> notes;  // What a reader must know: a set that was fitted on this text.
  std::vector<LayerMeasures> layers;

  // The means over layers, of max_abs the largest; squared errors are means of ratios, over 1.
  // `heads` is empty.
  std::vector<VariantMeasures> Summary() const;
};

// Measures `sets` and the steps on windows of `activations`. U is of `fit`, a dump of other text of
// the same model, and windows of all of `activations` are measured. If it is null, they are those
// that SplitWindows reports on, and U is of those that it fits on: a set that FitRotations made of
// the same dump saw none of what is measured either.
// `progress` is called after each layer. kFailedPrecondition naming it: a set, or `fit`, of another
// model, revision, geometry or other layers; no sequence long enough for history.
// kInvalidArgument: the options, two sets of one name, all queries or values zero, fewer tokens
// than head_dim to fit on, a row that the codec refuses. Otherwise as DumpReader::ReadLayer.
absl::StatusOr<CalibrationReport> MeasureReport(
    const DumpReader& activations, const DumpReader* fit, const std::vector<NamedSet>& sets,
    const ReportOptions& options, ThreadPool* pool,
    const std::function<void(const LayerMeasures&)>& progress);

}  // namespace okv

#endif  // OKV_CALIB_REPORT_H_
