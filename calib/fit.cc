#include "calib/fit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/choose.h"
#include "calib/covariance.h"
#include "calib/linalg.h"
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

// Without repeats: ratios fall together where head_dim is small.
std::vector<uint32_t> ClipRanks(const std::optional<double>& ratio, uint32_t head_dim) {
  if (ratio.has_value()) return {ClipRank(*ratio, head_dim)};
  std::vector<uint32_t> ranks;
  for (const double one : kClipRatios) {
    const uint32_t rank = ClipRank(one, head_dim);
    if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
  }
  return ranks;
}

Matrix Identity(uint32_t dim) {
  Matrix identity(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) identity[size_t{i} * dim + i] = 1.0;
  return identity;
}

// The held-out tokens over which whole attention is computed.
SequenceRange ClipRange(const TokenSplit& split, const FitOptions& options) {
  SequenceRange range = split.held_out_range;
  range.tokens_count = std::min(range.tokens_count, options.clip_tokens);
  return range;
}

// Fits one layer's rotations by kOscar. Lives for one call. Thread-compatible.
class OscarFit {
 public:
  OscarFit(const LayerDump& layer, const FitOptions& options,
           const std::vector<Matrix>& query_covariance, ThreadPool* pool)
      : layer_(layer),
        options_(options),
        query_covariance_(query_covariance),
        pool_(pool),
        shared_(options.scope == RotationScope::kLayer),
        split_(SplitTokens(layer.sequence_lengths, options.row_tokens)) {}

  // Errors as FitLayer.
  absl::Status Run(FittedLayer* fitted);

 private:
  // One covariance a rotation, from one a KV head.
  std::vector<Matrix> Scoped(const std::vector<Matrix>& per_head) const {
    return shared_ ? std::vector<Matrix>{MeanMatrix(per_head)} : per_head;
  }
  absl::StatusOr<std::vector<Matrix>> ValueCovariance(const std::vector<Matrix>& c_q) const;
  absl::StatusOr<std::vector<Matrix>> KeyBases(const Matrix& c_q, const Matrix& c_k) const;
  // The objectives that KeyBases lists bases for.
  std::vector<KeyObjective> KeyObjectives() const;
  // The heads that share rotation `index`, with their rows.
  std::vector<HeadRows> Heads(size_t index, KvTensor tensor) const;

  const LayerDump& layer_;
  const FitOptions& options_;
  const std::vector<Matrix>& query_covariance_;  // One per KV head.
  ThreadPool* const pool_;
  const bool shared_;
  const TokenSplit split_;
  std::vector<double> effective_tokens_;  // One per KV head; empty without a sign fit.
};

absl::StatusOr<EigenSystem> EigenOf(const Matrix& covariance, absl::string_view what,
                                    uint32_t dim) {
  if (std::all_of(covariance.begin(), covariance.end(), [](double x) { return x == 0; })) {
    return absl::InvalidArgumentError(absl::StrCat("all ", what, " are zero"));
  }
  return SymmetricEigen(covariance, dim);
}

absl::StatusOr<std::vector<Matrix>> OscarFit::ValueCovariance(
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

std::vector<KeyObjective> OscarFit::KeyObjectives() const {
  if (options_.key_objective != KeyObjective::kAuto) return {options_.key_objective};
  return {KeyObjective::kQqt, KeyObjective::kKkt, KeyObjective::kOffset};
}

absl::StatusOr<std::vector<Matrix>> OscarFit::KeyBases(const Matrix& c_q, const Matrix& c_k) const {
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

std::vector<HeadRows> OscarFit::Heads(size_t index, KvTensor tensor) const {
  const uint32_t first = shared_ ? 0 : static_cast<uint32_t>(index);
  const uint32_t end = shared_ ? layer_.kv_heads : first + 1;
  std::vector<HeadRows> heads;
  for (uint32_t head = first; head < end; ++head) {
    const RowObjective objective =
        tensor == KvTensor::kKeys
            ? RowObjective{.weight = query_covariance_[head], .mean_factor = 0}
            : RowObjective{.weight = Identity(layer_.head_dim),
                           .mean_factor = effective_tokens_.empty() ? 1 : effective_tokens_[head]};
    heads.push_back({.fit = GatherSample(layer_, tensor, head, split_.fit),
                     .held_out = GatherSample(layer_, tensor, head, split_.held_out),
                     .objective = objective});
  }
  return heads;
}

absl::Status OscarFit::Run(FittedLayer* fitted) {
  const uint32_t dim = layer_.head_dim;
  const std::vector<Matrix> c_q = Scoped(query_covariance_);
  OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> c_v, ValueCovariance(c_q));
  const bool keys_read = options_.key_objective != KeyObjective::kQqt;
  const std::vector<Matrix> c_k = keys_read ? Scoped(KeyCovariance(layer_, pool_)) : c_q;
  if (options_.fit_signs) {
    effective_tokens_ = EffectiveTokens(layer_, ClipRange(split_, options_), pool_);
  }
  // Task 2 i chooses R_K of rotation i, task 2 i + 1 its R_V.
  const size_t rotations_count = c_q.size();
  std::vector<absl::StatusOr<RotationChoice>> choices(2 * rotations_count, RotationChoice{});
  const auto choose = [&](size_t task) -> absl::StatusOr<RotationChoice> {
    const size_t index = task / 2;
    ChooseOptions options{.group_size = options_.group_size,
                          .clip_ranks = ClipRanks(options_.clip_k, dim),
                          .fit_signs = options_.fit_signs};
    if (task % 2 == 0) {
      OKV_ASSIGN_OR_RETURN(const std::vector<Matrix> bases, KeyBases(c_q[index], c_k[index]));
      return ChooseRotation(bases, Heads(index, KvTensor::kKeys), options);
    }
    options.clip_ranks = ClipRanks(options_.clip_v, dim);
    OKV_ASSIGN_OR_RETURN(const EigenSystem values, EigenOf(c_v[index], "values", dim));
    return ChooseRotation({values.vectors}, Heads(index, KvTensor::kValues), options);
  };
  pool_->ParallelFor(choices.size(), [&](size_t task) { choices[task] = choose(task); });

  LayerRotation& rotation = fitted->rotation;
  rotation.rotation_heads = static_cast<uint32_t>(rotations_count);
  for (size_t task = 0; task < choices.size(); ++task) {
    OKV_RETURN_IF_ERROR(choices[task].status());
    const RotationChoice& choice = *choices[task];
    std::vector<uint16_t>& bits = task % 2 == 0 ? rotation.r_k : rotation.r_v;
    bits.insert(bits.end(), choice.rotation.begin(), choice.rotation.end());
    fitted->report.signs_kept += choice.signs_kept ? 1 : 0;
    if (task % 2 == 0) fitted->report.key_objectives.push_back(KeyObjectives()[choice.basis]);
  }
  return absl::OkStatus();
}

// The rank of least error on held-out tokens, or the given one. Keys: the error of the logits,
// which is a sum over rows. The output's error, tried first, is the work of the few keys that the
// queries of one sequence look at: it took longer, chose ranks from 49 to 60 in neighboring layers,
// and gave no lower NLL (README.md).
absl::StatusOr<uint32_t> ChooseKeyClip(const LayerDump& layer, const LayerRotation& rotation,
                                       const std::vector<Matrix>& query_covariance,
                                       const FitOptions& options, ThreadPool* pool) {
  const std::vector<uint32_t> ranks = ClipRanks(options.clip_k, layer.head_dim);
  if (ranks.size() == 1) return ranks[0];
  const TokenSplit split = SplitTokens(layer.sequence_lengths, options.row_tokens);
  std::vector<absl::StatusOr<double>> parts(ranks.size() * layer.kv_heads, 0.0);
  pool->ParallelFor(parts.size(), [&](size_t task) {
    const uint32_t head = static_cast<uint32_t>(task % layer.kv_heads);
    const size_t matrix = rotation.rotation_heads == 1 ? 0 : head;
    parts[task] =
        RowError(GatherSample(layer, KvTensor::kKeys, head, split.held_out),
                 {.rotation = rotation.r_k.data() + matrix * layer.head_dim * layer.head_dim,
                  .group_size = rotation.group_size,
                  .clip_rank = ranks[task / layer.kv_heads]},
                 {.weight = query_covariance[head], .mean_factor = 0});
  });
  std::vector<double> errors(ranks.size(), 0.0);
  for (size_t task = 0; task < parts.size(); ++task) {
    OKV_RETURN_IF_ERROR(parts[task].status());
    errors[task / layer.kv_heads] += *parts[task];
  }
  return ranks[static_cast<size_t>(std::min_element(errors.begin(), errors.end()) -
                                   errors.begin())];
}

// Values: the error of the output, which is linear in theirs.
absl::StatusOr<uint32_t> ChooseValueClip(const LayerDump& layer, const LayerRotation& rotation,
                                         const FitOptions& options, ThreadPool* pool) {
  const std::vector<uint32_t> ranks = ClipRanks(options.clip_v, layer.head_dim);
  if (ranks.size() == 1) return ranks[0];
  const SequenceRange range =
      ClipRange(SplitTokens(layer.sequence_lengths, options.row_tokens), options);
  OKV_ASSIGN_OR_RETURN(const std::vector<double> errors,
                       ValueClipErrors(layer, rotation, range, ranks, pool));
  return ranks[static_cast<size_t>(std::min_element(errors.begin(), errors.end()) -
                                   errors.begin())];
}

absl::StatusOr<FittedLayer> FitUnnamed(const LayerDump& layer, const FitOptions& options,
                                       ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  OKV_RETURN_IF_ERROR(options.Validate(dim));
  FittedLayer fitted{.rotation = {.group_size = options.group_size,
                                  .rotation_heads = 1,
                                  .r_k = {},
                                  .r_v = {},
                                  .clip_rank_k = 0,
                                  .clip_rank_v = 0},
                     .report = {}};
  LayerRotation& rotation = fitted.rotation;
  const std::vector<Matrix> query_covariance = QueryCovariance(layer, pool);
  if (options.method == Method::kOscar) {
    OKV_RETURN_IF_ERROR(OscarFit(layer, options, query_covariance, pool).Run(&fitted));
  } else {
    rotation.r_k = RoundToBf16(options.method == Method::kHadamard ? Hadamard(dim) : Identity(dim));
    rotation.r_v = rotation.r_k;
  }
  OKV_ASSIGN_OR_RETURN(rotation.clip_rank_k,
                       ChooseKeyClip(layer, rotation, query_covariance, options, pool));
  OKV_ASSIGN_OR_RETURN(rotation.clip_rank_v, ChooseValueClip(layer, rotation, options, pool));
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
          .fit_signs = false,
          .clip_k = rotates ? 0.96 : 0.0,
          .clip_v = rotates ? 0.92 : 0.0};
}

absl::Status FitOptions::Validate(uint32_t head_dim) const {
  if (group_size < 32 || group_size > head_dim || !std::has_single_bit(group_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group_size is ", group_size, ", not a power of two from 32 to head_dim ", head_dim));
  }
  OKV_RETURN_IF_ERROR(CheckClip("clip_k", clip_k.value_or(0), head_dim));
  OKV_RETURN_IF_ERROR(CheckClip("clip_v", clip_v.value_or(0), head_dim));
  if (row_tokens == 0) return absl::InvalidArgumentError("row_tokens is 0");
  if (clip_tokens == 0) return absl::InvalidArgumentError("clip_tokens is 0");
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
    set.clip_rank_k.insert(set.clip_rank_k.end(), info.kv_heads, rotation.clip_rank_k);
    set.clip_rank_v.insert(set.clip_rank_v.end(), info.kv_heads, rotation.clip_rank_v);
    result.layers.push_back(fitted.report);
    if (progress) progress(fitted.report);
  }
  if (options.method == Method::kOscar && options.value_objective == ValueObjective::kSoftmax) {
    for (const SequenceRange& range :
         SampleSequences(dump.sequence_lengths(), options.value_sample)) {
      result.value_tokens += range.tokens_count;
    }
  }
  OKV_RETURN_IF_ERROR(set.Validate());
  return result;
}

}  // namespace okv
