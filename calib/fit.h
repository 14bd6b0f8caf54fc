#ifndef OKV_CALIB_FIT_H_
#define OKV_CALIB_FIT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "calib/all_reduce.h"
#include "calib/dump.h"
#include "calib/history.h"
#include "calib/measure.h"
#include "calib/shared_covariance.h"
#include "kernels/thread_pool.h"
#include "proto/rotation_set.h"

namespace okv {

enum class Method {
  kOscar,     // U * H * P_br from the dump's covariances, refined.
  kHadamard,  // H alone: needs no data, the base line.
  kNone,      // The identity.
};
enum class RotationScope { kLayer, kKvHead };
// Which basis U turns the keys.
enum class KeyObjective {
  kAuto,    // Of those below, what errs least on the judging text; for each rotation.
  kQqt,     // Eigenvectors of C_Q: the published one.
  kKkt,     // Eigenvectors of the keys' own K^T K.
  kOffset,  // K^T K's first head_dim / group_size, then C_Q's in what is left.
};
enum class ValueObjective {
  kSoftmax,  // C_S, as the attention weighs values.
  kEnergy,   // The key-energy weights, without softmax: cheaper.
  kAuto,     // Of both, what errs least on the judging text; for each rotation.
};

// "oscar", "hadamard", "none". kInvalidArgument listing them.
absl::StatusOr<Method> ParseMethod(absl::string_view name);
absl::string_view MethodName(Method method);
// "layer", "kv_head".
absl::StatusOr<RotationScope> ParseScope(absl::string_view name);
absl::string_view ScopeName(RotationScope scope);
// "softmax", "energy", "auto".
absl::StatusOr<ValueObjective> ParseValueObjective(absl::string_view name);
absl::string_view ValueObjectiveName(ValueObjective objective);
// "auto", "qqt", "kkt", "offset".
absl::StatusOr<KeyObjective> ParseKeyObjective(absl::string_view name);
absl::string_view KeyObjectiveName(KeyObjective objective);

struct FitOptions {
  Method method = Method::kOscar;
  // What has a rotation of its own (kOscar) and clip ranks of its own (all methods).
  RotationScope scope = RotationScope::kKvHead;
  ValueObjective value_objective = ValueObjective::kSoftmax;
  KeyObjective key_objective = KeyObjective::kAuto;
  uint32_t group_size = 64;  // 32 to head_dim, a power of two.
  // Clip ratios in [0, 1): the rank is floor(ratio * head_dim), 0 = off. Unset: what errs least in
  // the outputs over judging windows, all methods alike.
  std::optional<double> clip_k = std::nullopt;
  std::optional<double> clip_v = std::nullopt;
  uint32_t refine_steps = 400;  // Of each descent from U * H * P_br, kOscar only; 0: none.
  uint32_t fit_windows = 16;    // HistoryWindows: windows whose rows are fitted on,
  uint32_t judge_windows = 6;   // and others that decide.
  ValueSample value_sample = {};
  uint32_t measure_tokens = 1024;  // Of a layer, for Int2Errors; 0: not measured.

  // The published recipe: one rotation a layer, C_Q's eigenvectors as they are, K 0.96 and V 0.92
  // for the methods that rotate; clipping off for kNone, whose outlier channels it would cut off.
  static FitOptions Published(Method method);

  // kInvalidArgument naming the option that does not suit a model of this head_dim.
  absl::Status Validate(uint32_t head_dim) const;
};

// What came out for one layer.
struct LayerReport {
  uint32_t layer_id = 0;
  double orthogonality_error = 0;  // max |R R^T - I| over the bf16 R_K and R_V.
  std::vector<KeyObjective>
      key_objectives;  // As used or begun from, one per rotation; kOscar only.
  // As used or begun from, one per rotation; kOscar only.
  std::vector<ValueObjective> value_objectives;
  // ValueObjective::kAuto: the judged errors of both, before descents, one per rotation.
  std::vector<SquaredError> softmax_v;
  std::vector<SquaredError> energy_v;
  uint32_t refined = 0;               // Rotations that a descent made better, K and V.
  std::vector<uint32_t> clip_rank_k;  // [kv_heads]
  std::vector<uint32_t> clip_rank_v;  // [kv_heads]
  // Of the outputs over the judging windows, from INT2 history in one tensor: the least of what was
  // tried there. 0 over 0 when nothing was left open to be judged.
  SquaredError judged_k;
  SquaredError judged_v;
  // The same of the reporting windows, which nothing of the layer was fitted on or chosen by, and
  // what the codec does to their history in the rotated basis, all heads together: what a rotation
  // set promises. 0 over 0 where there is none.
  SquaredError reported_k;
  SquaredError reported_v;
  SquaredError promised_k;
  SquaredError promised_v;
  // As reported_k and reported_v, with the published clip ratios in place of the fitted ranks.
  SquaredError published_clip_k;
  SquaredError published_clip_v;
  bool reports_apart = false;  // False: too little text; the judging windows report.
  Int2Errors int2;
};

// What a fit runs on. Borrowed.
struct FitMachine {
  FitMachine(ThreadPool* threads) : pool(threads) {}  // NOLINT: a pool is all that most need.
  ThreadPool* pool;
  // Those who share the work: null for this process alone. Each rank fits the same dump with the
  // same options. The covariances are of shares of the text, added up; the searches and the
  // reporting windows' errors are shared out.
  AllReduce* ranks = nullptr;
  CovarianceDevice* device = nullptr;  // Null: the pool's CPU.
};

struct FittedLayer {
  LayerRotation rotation;
  LayerReport report;
};

// Fits one layer. Where no sequence is long enough for history, the first key objective and the
// published clip ratios stand for what would be judged. kInvalidArgument naming the layer: the
// options, a row that the codec refuses, or, for kOscar, fewer tokens than head_dim, so that the
// covariances would not have full rank, or all queries or values zero.
absl::StatusOr<FittedLayer> FitLayer(const LayerDump& layer, const FitOptions& options,
                                     const FitMachine& machine);

struct FitResult {
  RotationSet rotations;  // Validated.
  std::vector<LayerReport> layers;
  uint32_t value_tokens = 0;  // Tokens a layer that the softmax objective read; 0 if it did not.
};

// Fits every layer of the dump, one in memory at a time; `progress` is called after each. The same
// dump and options give the same bits on one machine, whatever the number of threads. Errors as
// FitLayer and DumpReader::ReadLayer.
absl::StatusOr<FitResult> FitRotations(const DumpReader& dump, const FitOptions& options,
                                       const FitMachine& machine,
                                       const std::function<void(const LayerReport&)>& progress);

}  // namespace okv

#endif  // OKV_CALIB_FIT_H_
