#include "calib/fit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
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

Matrix Identity(uint32_t dim) {
  Matrix identity(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) identity[size_t{i} * dim + i] = 1.0;
  return identity;
}

// One rotation a covariance, appended to `bits`.
absl::Status AppendRotations(const std::vector<Matrix>& covariances, absl::string_view what,
                             uint32_t dim, std::vector<uint16_t>* bits) {
  for (const Matrix& covariance : covariances) {
    if (std::all_of(covariance.begin(), covariance.end(), [](double x) { return x == 0; })) {
      return absl::InvalidArgumentError(absl::StrCat("all ", what, " are zero"));
    }
    OKV_ASSIGN_OR_RETURN(const EigenSystem system, SymmetricEigen(covariance, dim));
    const std::vector<uint16_t> rotation =
        RoundToBf16(RotationFromEigenvectors(system.vectors, dim));
    bits->insert(bits->end(), rotation.begin(), rotation.end());
  }
  return absl::OkStatus();
}

absl::Status FitOscar(const LayerDump& layer, const FitOptions& options,
                      const std::vector<Matrix>& query_covariance, ThreadPool* pool,
                      LayerRotation* rotation) {
  const uint32_t dim = layer.head_dim;
  const std::vector<SequenceRange> ranges =
      SampleSequences(layer.sequence_lengths, options.value_sample);
  uint32_t rank = layer.tokens_count;
  if (options.value_objective == ValueObjective::kSoftmax) {
    rank = 0;
    for (const SequenceRange& range : ranges) rank += range.tokens_count;
  }
  if (rank < dim) {
    return absl::InvalidArgumentError(absl::StrCat("a head's covariance has rank ", rank,
                                                   " at most (", rank, " tokens), head_dim is ",
                                                   dim, ": dump more text"));
  }
  const bool shared = options.scope == RotationScope::kLayer;
  const std::vector<Matrix> c_q =
      shared ? std::vector<Matrix>{MeanMatrix(query_covariance)} : query_covariance;
  std::vector<Matrix> c_s = options.value_objective == ValueObjective::kSoftmax
                                ? SoftmaxValueCovariance(layer, ranges, pool)
                                : EnergyValueCovariance(layer, c_q, pool);
  if (shared) c_s = {MeanMatrix(c_s)};
  rotation->rotation_heads = static_cast<uint32_t>(c_q.size());
  OKV_RETURN_IF_ERROR(AppendRotations(c_q, "queries", dim, &rotation->r_k));
  return AppendRotations(c_s, "values", dim, &rotation->r_v);
}

absl::StatusOr<FittedLayer> FitUnnamed(const LayerDump& layer, const FitOptions& options,
                                       ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  OKV_RETURN_IF_ERROR(options.Validate(dim));
  FittedLayer fitted{.rotation = {.group_size = options.group_size,
                                  .rotation_heads = 1,
                                  .r_k = {},
                                  .r_v = {},
                                  .clip_rank_k = ClipRank(options.ClipRatioK(), dim),
                                  .clip_rank_v = ClipRank(options.ClipRatioV(), dim)},
                     .report = {}};
  LayerRotation& rotation = fitted.rotation;
  const std::vector<Matrix> query_covariance = QueryCovariance(layer, pool);
  if (options.method == Method::kOscar) {
    OKV_RETURN_IF_ERROR(FitOscar(layer, options, query_covariance, pool, &rotation));
  } else {
    rotation.r_k = RoundToBf16(options.method == Method::kHadamard ? Hadamard(dim) : Identity(dim));
    rotation.r_v = rotation.r_k;
  }
  fitted.report.layer_id = layer.layer_id;
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

absl::Status FitOptions::Validate(uint32_t head_dim) const {
  if (group_size < 32 || group_size > head_dim || !std::has_single_bit(group_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group_size is ", group_size, ", not a power of two from 32 to head_dim ", head_dim));
  }
  OKV_RETURN_IF_ERROR(CheckClip("clip_k", ClipRatioK(), head_dim));
  OKV_RETURN_IF_ERROR(CheckClip("clip_v", ClipRatioV(), head_dim));
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
