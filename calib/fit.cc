#include "calib/fit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/covariance.h"
#include "calib/linalg.h"
#include "calib/search.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// The name's place in `names`, as the enum counts.
template <typename Enum, size_t kCount>
absl::StatusOr<Enum> ParseName(absl::string_view what, const absl::string_view (&names)[kCount],
                               absl::string_view name) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<Enum>(i);
  }
  std::string known;
  for (const absl::string_view one : names) absl::StrAppend(&known, known.empty() ? "" : ", ", one);
  return absl::InvalidArgumentError(
      absl::StrCat(what, " '", name, "' is not known; there are: ", known));
}

constexpr absl::string_view kMethods[] = {"oscar", "hadamard", "none"};
constexpr absl::string_view kScopes[] = {"layer", "kv_head"};
constexpr absl::string_view kValueObjectives[] = {"softmax", "energy"};
constexpr absl::string_view kKeyObjectives[] = {"auto", "qqt", "kkt", "offset"};

// What an unset clip ratio is chosen from. Four levels between the ends of a Gaussian's range err
// least with ends near 1.5 deviations, ratio near 0.84; a rotation that puts a common part of all
// rows into a group's offset leaves one end to clip, which is best near 0.90.
constexpr double kClipRatios[] = {0,    0.98, 0.96, 0.94, 0.92, 0.90, 0.88,
                                  0.86, 0.84, 0.82, 0.80, 0.78, 0.76};

// Of blocks of queries.
constexpr uint32_t kWeightsStride = 2;
constexpr uint32_t kJudgeStride = 3;

uint32_t ClipRank(double ratio, uint32_t head_dim) {
  return static_cast<uint32_t>(std::floor(ratio * head_dim));
}

absl::Status CheckClip(absl::string_view name, double ratio, uint32_t head_dim) {
  if (!(ratio >= 0 && ratio < 1)) {  // Written so that a NaN fails too.
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", ratio, ", not in [0, 1)"));
  }
  if (ratio > 0 && ClipRank(ratio, head_dim) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " ", ratio, " of ", head_dim, " channels is rank 0, which means off: say 0 instead"));
  }
  return absl::OkStatus();
}

// Without repeats: ratios fall together where head_dim is small. Ascending.
std::vector<uint32_t> ClipRanks(const std::optional<double>& ratio, uint32_t head_dim) {
  if (ratio.has_value()) return {ClipRank(*ratio, head_dim)};
  std::vector<uint32_t> ranks;
  for (const double one : kClipRatios) ranks.push_back(ClipRank(one, head_dim));
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

Matrix Identity(uint32_t dim) {
  Matrix identity(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) identity[size_t{i} * dim + i] = 1.0;
  return identity;
}

absl::StatusOr<EigenSystem> EigenOf(const Matrix& covariance, absl::string_view what,
                                    uint32_t dim) {
  if (std::all_of(covariance.begin(), covariance.end(), [](double x) { return x == 0; })) {
    return absl::InvalidArgumentError(absl::StrCat("all ", what, " are zero"));
  }
  return SymmetricEigen(covariance, dim);
}

// Fits one layer's rotations and clip ranks. Lives for one call. Thread-compatible.
class LayerFit {
 public:
  LayerFit(const LayerDump& layer, const FitOptions& options,
           const std::vector<Matrix>& query_covariance, ThreadPool* pool)
      : layer_(layer),
        options_(options),
        query_covariance_(query_covariance),
        pool_(pool),
        shared_(options.scope == RotationScope::kLayer),
        windows_(SplitWindows(layer.sequence_lengths, options.fit_windows, options.judge_windows)) {
  }

  // Errors as FitLayer.
  absl::Status Run(FittedLayer* fitted);

 private:
  // A rotation's starts, before anything is judged.
  struct Starts {
    std::vector<Matrix> keys;
    std::vector<Matrix> values;
  };

  // One covariance a rotation, from one a KV head.
  std::vector<Matrix> Scoped(const std::vector<Matrix>& per_head) const {
    return shared_ ? std::vector<Matrix>{MeanMatrix(per_head)} : per_head;
  }
  absl::StatusOr<std::vector<Matrix>> ValueCovariance(const std::vector<Matrix>& c_q) const;
  absl::StatusOr<std::vector<Matrix>> KeyBases(const Matrix& c_q, const Matrix& c_k) const;
  // The objectives that KeyBases lists bases for.
  std::vector<KeyObjective> KeyObjectives() const;
  // One for each unit: a KV head, or all of them.
  absl::StatusOr<std::vector<Starts>> AllStarts() const;
  void ReadHistories();
  // Task 2 i is unit i's K, task 2 i + 1 its V.
  absl::StatusOr<FoundRotation> Find(const std::vector<Starts>& starts, size_t task) const;
  void Report(const std::vector<FoundRotation>& found, FittedLayer* fitted) const;
  // Fills the report's promises.
  absl::Status Promise(FittedLayer* fitted) const;

  const LayerDump& layer_;
  const FitOptions& options_;
  const std::vector<Matrix>& query_covariance_;  // One per KV head.
  ThreadPool* const pool_;
  const bool shared_;
  const HistoryWindows windows_;
  std::vector<std::unique_ptr<HeadHistory>> fit_;    // One per KV head.
  std::vector<std::unique_ptr<HeadHistory>> judge_;  // The same.
  std::vector<HeadWeights> weights_;                 // Of fit_.
};

absl::StatusOr<std::vector<Matrix>> LayerFit::ValueCovariance(
    const std::vector<Matrix>& c_q) const {
  const std::vector<SequenceRange> ranges =
      SampleSequences(layer_.sequence_lengths, options_.value_sample);
  const bool softmax = options_.value_objective == ValueObjective::kSoftmax;
  uint32_t rank = layer_.tokens_count;
  if (softmax) {
    rank = 0;
    for (const SequenceRange& range : ranges) rank += range.tokens_count;
  }
  if (rank < layer_.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("a head's covariance has rank ", rank,
                                                   " at most (", rank, " tokens), head_dim is ",
                                                   layer_.head_dim, ": dump more text"));
  }
  return Scoped(softmax ? SoftmaxValueCovariance(layer_, ranges, pool_)
                        : EnergyValueCovariance(layer_, c_q, pool_));
}

std::vector<KeyObjective> LayerFit::KeyObjectives() const {
  if (options_.key_objective != KeyObjective::kAuto) return {options_.key_objective};
  return {KeyObjective::kQqt, KeyObjective::kKkt, KeyObjective::kOffset};
}

absl::StatusOr<std::vector<Matrix>> LayerFit::KeyBases(const Matrix& c_q, const Matrix& c_k) const {
  const uint32_t dim = layer_.head_dim;
  OKV_ASSIGN_OR_RETURN(const EigenSystem queries, EigenOf(c_q, "queries", dim));
  std::vector<Matrix> bases;
  for (const KeyObjective objective : KeyObjectives()) {
    if (objective == KeyObjective::kQqt) {
      bases.push_back(queries.vectors);
      continue;
    }
    OKV_ASSIGN_OR_RETURN(const EigenSystem keys, EigenOf(c_k, "keys", dim));
    if (objective == KeyObjective::kKkt) {
      bases.push_back(keys.vectors);
      continue;
    }
    OKV_ASSIGN_OR_RETURN(Matrix basis,
                         BasisWithLeading(keys.vectors, dim / options_.group_size, c_q, dim));
    bases.push_back(std::move(basis));
  }
  return bases;
}

absl::StatusOr<std::vector<LayerFit::Starts>> LayerFit::AllStarts() const {
  const uint32_t dim = layer_.head_dim;
  const size_t units_count = shared_ ? 1 : layer_.kv_heads;
  if (options_.method != Method::kOscar) {
    const Matrix one = options_.method == Method::kHadamard ? Hadamard(dim) : Identity(dim);
    return std::vector<Starts>(units_count, Starts{.keys = {one}, .values = {one}});
  }
  const std::vector<Matrix> c_q = Scoped(query_covariance_);
  OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> c_v, ValueCovariance(c_q));
  const bool keys_read = options_.key_objective != KeyObjective::kQqt;
  const std::vector<Matrix> c_k = keys_read ? Scoped(KeyCovariance(layer_, pool_)) : c_q;
  std::vector<Starts> all(units_count);
  for (size_t unit = 0; unit < units_count; ++unit) {
    OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> bases, KeyBases(c_q[unit], c_k[unit]));
    for (const Matrix& basis : bases) {
      all[unit].keys.push_back(RotationFromEigenvectors(basis, dim));
    }
    OKV_ASSIGN_OR_RETURN(const EigenSystem values, EigenOf(c_v[unit], "values", dim));
    all[unit].values.push_back(RotationFromEigenvectors(values.vectors, dim));
  }
  return all;
}

void LayerFit::ReadHistories() {
  fit_.resize(layer_.kv_heads);
  judge_.resize(layer_.kv_heads);
  weights_.resize(layer_.kv_heads);
  pool_->ParallelFor(layer_.kv_heads, [&](size_t head) {
    const uint32_t index = static_cast<uint32_t>(head);
    fit_[head] = std::make_unique<HeadHistory>(layer_, index, windows_.shape, windows_.fit, 0);
    weights_[head] = fit_[head]->Weights(kWeightsStride);
    judge_[head] =
        std::make_unique<HeadHistory>(layer_, index, windows_.shape, windows_.judge, kJudgeStride);
  });
}

absl::StatusOr<FoundRotation> LayerFit::Find(const std::vector<Starts>& starts, size_t task) const {
  const size_t unit = task / 2;
  const bool keys = task % 2 == 0;
  const std::optional<double>& ratio = keys ? options_.clip_k : options_.clip_v;
  const std::vector<Matrix>& rotations = keys ? starts[unit].keys : starts[unit].values;
  SearchOptions options{
      .group_size = options_.group_size,
      .clip_ranks = ClipRanks(ratio, layer_.head_dim),
      .refine_steps = options_.method == Method::kOscar ? options_.refine_steps : 0};
  std::vector<HeadData> heads;
  for (size_t head = shared_ ? 0 : unit; head < (shared_ ? layer_.kv_heads : unit + 1); ++head) {
    heads.push_back(
        {.fit = fit_[head].get(), .weights = &weights_[head], .judge = judge_[head].get()});
  }
  const KvTensor tensor = keys ? KvTensor::kKeys : KvTensor::kValues;
  if (!windows_.judge.empty()) return SearchRotation(rotations, tensor, heads, options);
  const FitOptions published = FitOptions::Published(options_.method);
  options.clip_ranks = {
      ClipRank(ratio.value_or(*(keys ? published.clip_k : published.clip_v)), layer_.head_dim)};
  options.refine_steps = 0;
  return SearchRotation({rotations[0]}, tensor, heads, options);
}

void LayerFit::Report(const std::vector<FoundRotation>& found, FittedLayer* fitted) const {
  LayerRotation& rotation = fitted->rotation;
  LayerReport& report = fitted->report;
  const bool oscar = options_.method == Method::kOscar;
  rotation.rotation_heads = oscar && !shared_ ? layer_.kv_heads : 1;
  for (size_t task = 0; task < found.size(); ++task) {
    const FoundRotation& one = found[task];
    const bool keys = task % 2 == 0;
    std::vector<uint16_t>& bits = keys ? rotation.r_k : rotation.r_v;
    if (bits.size() < rotation.rotation_heads * one.rotation.size()) {
      bits.insert(bits.end(), one.rotation.begin(), one.rotation.end());
    }
    std::vector<uint32_t>& ranks = keys ? rotation.clip_rank_k : rotation.clip_rank_v;
    ranks.insert(ranks.end(), shared_ ? layer_.kv_heads : 1, one.clip_rank);
    SquaredError& judged = keys ? report.judged_k : report.judged_v;
    judged.Add(one.error);
    report.refined += one.refined ? 1 : 0;
    if (oscar && keys) report.key_objectives.push_back(KeyObjectives()[one.start]);
  }
}

absl::Status LayerFit::Promise(FittedLayer* fitted) const {
  if (windows_.judge.empty()) return absl::OkStatus();
  const LayerRotation& rotation = fitted->rotation;
  const size_t matrix = size_t{layer_.head_dim} * layer_.head_dim;
  for (size_t head = 0; head < layer_.kv_heads; ++head) {
    const size_t offset = rotation.rotation_heads == 1 ? 0 : head * matrix;
    for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
      const bool keys = tensor == KvTensor::kKeys;
      OKV_ASSIGN_OR_RETURN(
          const SquaredError one,
          judge_[head]->CodecError(
              tensor, {.rotation = (keys ? rotation.r_k : rotation.r_v).data() + offset,
                       .group_size = options_.group_size,
                       .clip_rank = (keys ? rotation.clip_rank_k : rotation.clip_rank_v)[head]}));
      (keys ? fitted->report.promised_k : fitted->report.promised_v).Add(one);
    }
  }
  return absl::OkStatus();
}

absl::Status LayerFit::Run(FittedLayer* fitted) {
  OKV_ASSIGN_OR_RETURN(const std::vector<Starts> starts, AllStarts());
  ReadHistories();
  std::vector<absl::StatusOr<FoundRotation>> tasks(2 * starts.size(), FoundRotation{});
  pool_->ParallelFor(tasks.size(), [&](size_t task) { tasks[task] = Find(starts, task); });
  std::vector<FoundRotation> found;
  for (absl::StatusOr<FoundRotation>& task : tasks) {
    OKV_RETURN_IF_ERROR(task.status());
    found.push_back(*std::move(task));
  }
  Report(found, fitted);
  return Promise(fitted);
}

absl::StatusOr<FittedLayer> FitUnnamed(const LayerDump& layer, const FitOptions& options,
                                       ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  OKV_RETURN_IF_ERROR(options.Validate(dim));
  FittedLayer fitted{.rotation = {.group_size = options.group_size,
                                  .rotation_heads = 1,
                                  .r_k = {},
                                  .r_v = {},
                                  .clip_rank_k = {},
                                  .clip_rank_v = {}},
                     .report = {}};
  const std::vector<Matrix> query_covariance = QueryCovariance(layer, pool);
  OKV_RETURN_IF_ERROR(LayerFit(layer, options, query_covariance, pool).Run(&fitted));
  const LayerRotation& rotation = fitted.rotation;
  fitted.report.layer_id = layer.layer_id;
  fitted.report.clip_rank_k = rotation.clip_rank_k;
  fitted.report.clip_rank_v = rotation.clip_rank_v;
  for (uint32_t head = 0; head < rotation.rotation_heads; ++head) {
    for (const std::vector<uint16_t>* bits : {&rotation.r_k, &rotation.r_v}) {
      fitted.report.orthogonality_error =
          std::max(fitted.report.orthogonality_error,
                   OrthogonalityError(bits->data() + size_t{head} * dim * dim, dim));
    }
  }
  if (options.measure_tokens > 0) {
    const std::vector<SequenceRange> measured = SampleSequences(
        layer.sequence_lengths,
        {.tokens_max = options.measure_tokens, .sequence_tokens_max = options.measure_tokens});
    OKV_ASSIGN_OR_RETURN(fitted.report.int2,
                         MeasureInt2(layer, rotation, query_covariance, measured, pool));
  }
  return fitted;
}

}  // namespace

absl::StatusOr<Method> ParseMethod(absl::string_view name) {
  return ParseName<Method>("method", kMethods, name);
}
absl::string_view MethodName(Method method) { return kMethods[static_cast<size_t>(method)]; }
absl::StatusOr<RotationScope> ParseScope(absl::string_view name) {
  return ParseName<RotationScope>("scope", kScopes, name);
}
absl::string_view ScopeName(RotationScope scope) { return kScopes[static_cast<size_t>(scope)]; }
absl::StatusOr<ValueObjective> ParseValueObjective(absl::string_view name) {
  return ParseName<ValueObjective>("value objective", kValueObjectives, name);
}
absl::string_view ValueObjectiveName(ValueObjective objective) {
  return kValueObjectives[static_cast<size_t>(objective)];
}
absl::StatusOr<KeyObjective> ParseKeyObjective(absl::string_view name) {
  return ParseName<KeyObjective>("key objective", kKeyObjectives, name);
}
absl::string_view KeyObjectiveName(KeyObjective objective) {
  return kKeyObjectives[static_cast<size_t>(objective)];
}

FitOptions FitOptions::Published(Method method) {
  const bool rotates = method != Method::kNone;
  return {.method = method,
          .scope = RotationScope::kLayer,
          .key_objective = KeyObjective::kQqt,
          .clip_k = rotates ? 0.96 : 0.0,
          .clip_v = rotates ? 0.92 : 0.0,
          .refine_steps = 0};
}

absl::Status FitOptions::Validate(uint32_t head_dim) const {
  if (group_size < 32 || group_size > head_dim || !std::has_single_bit(group_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group_size is ", group_size, ", not a power of two from 32 to head_dim ", head_dim));
  }
  OKV_RETURN_IF_ERROR(CheckClip("clip_k", clip_k.value_or(0), head_dim));
  OKV_RETURN_IF_ERROR(CheckClip("clip_v", clip_v.value_or(0), head_dim));
  if (fit_windows == 0) return absl::InvalidArgumentError("fit_windows is 0");
  if (judge_windows == 0) return absl::InvalidArgumentError("judge_windows is 0");
  if (value_sample.sequence_tokens_max == 0) {
    return absl::InvalidArgumentError("value_sequence_tokens_max is 0");
  }
  return absl::OkStatus();
}

absl::StatusOr<FittedLayer> FitLayer(const LayerDump& layer, const FitOptions& options,
                                     ThreadPool* pool) {
  UseSingleThreadedBlas();
  absl::StatusOr<FittedLayer> fitted = FitUnnamed(layer, options, pool);
  if (fitted.ok()) return fitted;
  return absl::Status(fitted.status().code(),
                      absl::StrCat("layer ", layer.layer_id, ": ", fitted.status().message()));
}

absl::StatusOr<FitResult> FitRotations(const DumpReader& dump, const FitOptions& options,
                                       ThreadPool* pool,
                                       const std::function<void(const LayerReport&)>& progress) {
  const DumpInfo& info = dump.info();
  OKV_RETURN_IF_ERROR(options.Validate(info.head_dim));
  FitResult result;
  RotationSet& set = result.rotations;
  set.model = info.model;
  set.weights_revision = info.weights_revision;
  set.layer_ids = info.layer_ids;
  set.kv_heads = info.kv_heads;
  set.head_dim = info.head_dim;
  set.group_size = options.group_size;
  set.method = std::string(MethodName(options.method));
  for (uint32_t position = 0; position < info.layer_ids.size(); ++position) {
    OKV_ASSIGN_OR_RETURN(const LayerDump layer, dump.ReadLayer(position));
    OKV_ASSIGN_OR_RETURN(const FittedLayer fitted, FitLayer(layer, options, pool));
    const LayerRotation& rotation = fitted.rotation;
    set.rotation_heads = rotation.rotation_heads;
    set.r_k.insert(set.r_k.end(), rotation.r_k.begin(), rotation.r_k.end());
    set.r_v.insert(set.r_v.end(), rotation.r_v.begin(), rotation.r_v.end());
    set.clip_rank_k.insert(set.clip_rank_k.end(), rotation.clip_rank_k.begin(),
                           rotation.clip_rank_k.end());
    set.clip_rank_v.insert(set.clip_rank_v.end(), rotation.clip_rank_v.begin(),
                           rotation.clip_rank_v.end());
    if (fitted.report.promised_k.signal > 0 && fitted.report.promised_v.signal > 0) {
      set.promised_error_k.push_back(static_cast<float>(fitted.report.promised_k.ratio()));
      set.promised_error_v.push_back(static_cast<float>(fitted.report.promised_v.ratio()));
    }
    result.layers.push_back(fitted.report);
    if (progress) progress(fitted.report);
  }
  if (options.method == Method::kOscar && options.value_objective == ValueObjective::kSoftmax) {
    for (const SequenceRange& range :
         SampleSequences(dump.sequence_lengths(), options.value_sample)) {
      result.value_tokens += range.tokens_count;
    }
  }
  if (set.promised_error_k.size() < info.layer_ids.size()) {  // A layer of zeros promises nothing.
    set.promised_error_k.clear();
    set.promised_error_v.clear();
  }
  OKV_RETURN_IF_ERROR(set.Validate());
  return result;
}

}  // namespace okv
