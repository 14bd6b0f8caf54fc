#include "calib/fit.h"

#include <algorithm>
#include <array>
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
constexpr absl::string_view kValueObjectives[] = {"softmax", "energy", "auto"};
constexpr absl::string_view kKeyObjectives[] = {"auto", "qqt", "kkt", "offset"};

// What an unset clip ratio is chosen from. Four levels between the ends of a Gaussian's range err
// least with ends near 1.5 deviations, ratio near 0.84; a rotation that puts a common part of all
// rows into a group's offset leaves one end to clip, which is best near 0.90.
constexpr double kClipRatios[] = {0,    0.98, 0.96, 0.94, 0.92, 0.90, 0.88,
                                  0.86, 0.84, 0.82, 0.80, 0.78, 0.76};

constexpr double kPublishedClipK = 0.96;
constexpr double kPublishedClipV = 0.92;

// Of blocks of queries.
constexpr uint32_t kWeightsStride = 2;
constexpr uint32_t kJudgeStride = 4;

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

// The sequences as if the dump ended behind its first `tokens_count` tokens.
std::vector<SequenceRange> FirstRanges(const std::vector<uint32_t>& sequence_lengths,
                                       uint32_t tokens_count) {
  std::vector<SequenceRange> ranges;
  uint32_t first = 0;
  for (const uint32_t length : sequence_lengths) {
    const uint32_t count = std::min(length, tokens_count - std::min(tokens_count, first));
    if (count > 0) ranges.push_back({.first_token = first, .tokens_count = count});
    first += length;
  }
  return ranges;
}

// Tokens that the softmax objective reads.
uint32_t SoftmaxTokens(const std::vector<uint32_t>& sequence_lengths, const FitOptions& options) {
  const uint32_t fit_tokens =
      SplitWindows(sequence_lengths, options.fit_windows, options.judge_windows).fit_tokens;
  std::vector<uint32_t> lengths;
  for (const SequenceRange& range : FirstRanges(sequence_lengths, fit_tokens)) {
    lengths.push_back(range.tokens_count);
  }
  uint32_t tokens = 0;
  for (const SequenceRange& range : SampleSequences(lengths, options.value_sample)) {
    tokens += range.tokens_count;
  }
  return tokens;
}

// Gives every rank what each has found: a rotation that is not a rank's own is empty.
absl::Status Exchange(uint32_t head_dim, AllReduce* ranks, std::vector<FoundRotation>* found) {
  if (ranks->ranks_count() == 1) return absl::OkStatus();
  constexpr size_t kFields = 5 + 2 * kStartsMax;
  const size_t matrix = size_t{head_dim} * head_dim;
  const size_t stride = kFields + matrix;
  // A sum of one number and zeros is that number.
  std::vector<double> numbers(found->size() * stride, 0.0);
  for (size_t i = 0; i < found->size(); ++i) {
    const FoundRotation& one = (*found)[i];
    if (one.rotation.empty()) continue;
    double* const at = numbers.data() + i * stride;
    at[0] = static_cast<double>(one.start);
    at[1] = one.refined ? 1 : 0;
    at[2] = one.clip_rank;
    at[3] = one.error.error;
    at[4] = one.error.signal;
    for (size_t start = 0; start < kStartsMax; ++start) {
      at[5 + 2 * start] = one.start_errors[start].error;
      at[6 + 2 * start] = one.start_errors[start].signal;
    }
    std::copy(one.rotation.begin(), one.rotation.end(), at + kFields);
  }
  OKV_RETURN_IF_ERROR(ranks->Sum(absl::MakeSpan(numbers)));
  for (size_t i = 0; i < found->size(); ++i) {
    const double* const at = numbers.data() + i * stride;
    FoundRotation& one = (*found)[i];
    one.start = static_cast<size_t>(at[0]);
    one.refined = at[1] != 0;
    one.clip_rank = static_cast<uint32_t>(at[2]);
    one.error = {.error = at[3], .signal = at[4]};
    for (size_t start = 0; start < kStartsMax; ++start) {
      one.start_errors[start] = {.error = at[5 + 2 * start], .signal = at[6 + 2 * start]};
    }
    one.rotation.resize(matrix);
    std::transform(at + kFields, at + stride, one.rotation.begin(),
                   [](double bits) { return static_cast<uint16_t>(bits); });
  }
  return absl::OkStatus();
}

// Fits one layer's rotations and clip ranks. Lives for one call. Thread-compatible.
class LayerFit {
 public:
  // `machine` has ranks and a device.
  LayerFit(const LayerDump& layer, const FitOptions& options, const FitMachine& machine)
      : layer_(layer),
        options_(options),
        machine_(machine),
        pool_(machine.pool),
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
  // `objective` is not kAuto.
  absl::StatusOr<std::vector<Matrix>> ValueCovariance(ValueObjective objective,
                                                      const std::vector<SequenceRange>& ranges,
                                                      const std::vector<Matrix>& c_q,
                                                      SharedCovariance* text) const;
  // Those that AllStarts lists rotations of values for.
  std::vector<ValueObjective> ValueObjectives() const;
  absl::StatusOr<std::vector<Matrix>> KeyBases(const Matrix& c_q, const Matrix& c_k) const;
  // `c_v` is by objective.
  absl::StatusOr<std::vector<Matrix>> ValueBases(const std::vector<std::vector<Matrix>>& c_v,
                                                 size_t unit) const;
  // The objectives that KeyBases lists bases for.
  std::vector<KeyObjective> KeyObjectives() const;
  // One for each unit: a KV head, or all of them.
  absl::StatusOr<std::vector<Starts>> AllStarts() const;
  // Whether anything is left open that text must decide.
  bool Searches() const;
  // Whether this rank searches for the task's rotation.
  bool IsMine(size_t task) const;
  // Whether this rank reports on the KV head; unless all heads share a rotation, it searches for
  // the head's too.
  bool IsMyHead(size_t head) const;
  void ReadHistories();
  // Task 2 i is unit i's K, task 2 i + 1 its V.
  absl::StatusOr<FoundRotation> Find(const std::vector<Starts>& starts, size_t task) const;
  void Report(const std::vector<FoundRotation>& found, FittedLayer* fitted) const;
  // What the reporting windows say of one tensor of one head, which this rank reports on.
  struct HeadErrors {
    SquaredError promised;
    SquaredError reported;
    SquaredError published_clip;
  };
  absl::StatusOr<HeadErrors> ReportHead(const LayerRotation& rotation, KvTensor tensor,
                                        size_t head) const;
  // Gives every rank the heads' errors that each has found.
  absl::Status ExchangeErrors(std::vector<HeadErrors>* errors) const;
  // Fills what the reporting windows say.
  absl::Status ReportErrors(FittedLayer* fitted) const;
  absl::Status Measure(FittedLayer* fitted) const;

  const LayerDump& layer_;
  const FitOptions& options_;
  const FitMachine& machine_;
  ThreadPool* const pool_;
  const bool shared_;
  const HistoryWindows windows_;
  std::vector<std::unique_ptr<HeadHistory>> fit_;     // One per KV head.
  std::vector<std::unique_ptr<HeadHistory>> judge_;   // The same.
  std::vector<std::unique_ptr<HeadHistory>> report_;  // The same; null for others' heads.
  std::vector<HeadWeights> weights_;                  // Of fit_.
};

absl::StatusOr<std::vector<Matrix>> LayerFit::ValueCovariance(
    ValueObjective objective, const std::vector<SequenceRange>& ranges,
    const std::vector<Matrix>& c_q, SharedCovariance* text) const {
  const bool softmax = objective == ValueObjective::kSoftmax;
  uint32_t rank = text->tokens_count();
  if (softmax) {
    rank = 0;
    for (const SequenceRange& range : SampleRanges(ranges, options_.value_sample)) {
      rank += range.tokens_count;
    }
  }
  if (rank < layer_.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("a head's covariance has rank ", rank,
                                                   " at most (", rank, " tokens), head_dim is ",
                                                   layer_.head_dim, ": dump more text"));
  }
  std::vector<Matrix> covariance;
  if (softmax) {
    OKV_ASSIGN_OR_RETURN(covariance, text->SoftmaxValues(options_.value_sample));
  } else {
    OKV_ASSIGN_OR_RETURN(covariance, text->EnergyValues(c_q, pool_));
  }
  return Scoped(covariance);
}

std::vector<ValueObjective> LayerFit::ValueObjectives() const {
  if (options_.value_objective != ValueObjective::kAuto) return {options_.value_objective};
  return {ValueObjective::kSoftmax, ValueObjective::kEnergy};
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

absl::StatusOr<std::vector<Matrix>> LayerFit::ValueBases(
    const std::vector<std::vector<Matrix>>& c_v, size_t unit) const {
  std::vector<Matrix> bases;
  for (const std::vector<Matrix>& one : c_v) {
    OKV_ASSIGN_OR_RETURN(EigenSystem values, EigenOf(one[unit], "values", layer_.head_dim));
    bases.push_back(std::move(values.vectors));
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
  const std::vector<SequenceRange> ranges =
      FirstRanges(layer_.sequence_lengths, windows_.fit_tokens);
  SharedCovariance text(layer_, ranges, machine_.device, machine_.ranks);
  OKV_ASSIGN_OR_RETURN(std::vector<Matrix> per_head, text.Queries());
  const std::vector<Matrix> c_q = Scoped(per_head);
  std::vector<std::vector<Matrix>> c_v;  // By objective.
  for (const ValueObjective objective : ValueObjectives()) {
    OKV_ASSIGN_OR_RETURN(per_head, ValueCovariance(objective, ranges, c_q, &text));
    c_v.push_back(std::move(per_head));
  }
  std::vector<Matrix> c_k = c_q;
  if (options_.key_objective != KeyObjective::kQqt) {
    OKV_ASSIGN_OR_RETURN(per_head, text.Keys());
    c_k = Scoped(per_head);
  }
  // Task 2 i is unit i's K, task 2 i + 1 its V.
  std::vector<absl::StatusOr<std::vector<Matrix>>> tasks(2 * units_count, std::vector<Matrix>{});
  pool_->ParallelFor(tasks.size(), [&](size_t task) {
    const size_t unit = task / 2;
    tasks[task] = task % 2 == 0 ? KeyBases(c_q[unit], c_k[unit]) : ValueBases(c_v, unit);
    if (!tasks[task].ok()) return;
    for (Matrix& basis : *tasks[task]) basis = RotationFromEigenvectors(basis, dim);
  });
  std::vector<Starts> starts(units_count);
  for (size_t task = 0; task < tasks.size(); ++task) {
    OKV_RETURN_IF_ERROR(tasks[task].status());
    Starts& unit = starts[task / 2];
    (task % 2 == 0 ? unit.keys : unit.values) = *std::move(tasks[task]);
  }
  return starts;
}

bool LayerFit::Searches() const {
  const bool oscar = options_.method == Method::kOscar;
  return !options_.clip_k.has_value() || !options_.clip_v.has_value() ||
         (oscar && (options_.refine_steps > 0 || KeyObjectives().size() > 1 ||
                    ValueObjectives().size() > 1));
}

bool LayerFit::IsMine(size_t task) const {
  // K and V of a unit share its histories.
  return IsMyHead(shared_ ? task : task / 2);
}

bool LayerFit::IsMyHead(size_t head) const {
  return head % machine_.ranks->ranks_count() == machine_.ranks->rank();
}

void LayerFit::ReadHistories() {
  fit_.resize(layer_.kv_heads);
  judge_.resize(layer_.kv_heads);
  report_.resize(layer_.kv_heads);
  weights_.resize(layer_.kv_heads);
  pool_->ParallelFor(layer_.kv_heads, [&](size_t head) {
    const uint32_t index = static_cast<uint32_t>(head);
    if (IsMyHead(head)) {
      report_[head] = std::make_unique<HeadHistory>(layer_, index, windows_.shape, windows_.report,
                                                    kJudgeStride);
    }
    if (!Searches() || (!shared_ && !IsMyHead(head))) return;
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
  const FitOptions published = FitOptions::Published(options_.method);
  const uint32_t published_rank =
      ClipRank(*(keys ? published.clip_k : published.clip_v), layer_.head_dim);
  if (!windows_.judge.empty()) {
    if (!ratio.has_value()) options.settled_rank = published_rank;
    return SearchRotation(rotations, tensor, heads, options);
  }
  options.clip_ranks = {ratio.has_value() ? ClipRank(*ratio, layer_.head_dim) : published_rank};
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
    if (!oscar) continue;
    if (keys) {
      report.key_objectives.push_back(KeyObjectives()[one.start]);
      continue;
    }
    report.value_objectives.push_back(ValueObjectives()[one.start]);
    if (ValueObjectives().size() == 1) continue;
    report.softmax_v.push_back(one.start_errors[0]);
    report.energy_v.push_back(one.start_errors[1]);
  }
}

absl::StatusOr<LayerFit::HeadErrors> LayerFit::ReportHead(const LayerRotation& rotation,
                                                          KvTensor tensor, size_t head) const {
  const bool keys = tensor == KvTensor::kKeys;
  const size_t matrix = size_t{layer_.head_dim} * layer_.head_dim;
  const size_t offset = rotation.rotation_heads == 1 ? 0 : head * matrix;
  RowCodec codec = {.rotation = (keys ? rotation.r_k : rotation.r_v).data() + offset,
                    .group_size = options_.group_size,
                    .clip_rank = (keys ? rotation.clip_rank_k : rotation.clip_rank_v)[head]};
  HeadErrors errors;
  OKV_ASSIGN_OR_RETURN(errors.promised, report_[head]->CodecError(tensor, codec));
  OKV_ASSIGN_OR_RETURN(errors.reported, report_[head]->Judge(tensor, codec));
  errors.published_clip = errors.reported;
  const uint32_t published = ClipRank(keys ? kPublishedClipK : kPublishedClipV, layer_.head_dim);
  if (codec.clip_rank == published) return errors;
  codec.clip_rank = published;
  OKV_ASSIGN_OR_RETURN(errors.published_clip, report_[head]->Judge(tensor, codec));
  return errors;
}

absl::Status LayerFit::ExchangeErrors(std::vector<HeadErrors>* errors) const {
  if (machine_.ranks->ranks_count() == 1) return absl::OkStatus();
  const auto fields = [](HeadErrors* one) {
    return std::array{&one->promised.error,       &one->promised.signal,
                      &one->reported.error,       &one->reported.signal,
                      &one->published_clip.error, &one->published_clip.signal};
  };
  // A sum of one number and zeros is that number.
  std::vector<double> numbers;
  for (HeadErrors& one : *errors) {
    for (const double* field : fields(&one)) numbers.push_back(*field);
  }
  OKV_RETURN_IF_ERROR(machine_.ranks->Sum(absl::MakeSpan(numbers)));
  auto number = numbers.begin();
  for (HeadErrors& one : *errors) {
    for (double* field : fields(&one)) *field = *number++;
  }
  return absl::OkStatus();
}

absl::Status LayerFit::ReportErrors(FittedLayer* fitted) const {
  if (windows_.report.empty()) return absl::OkStatus();
  LayerReport& report = fitted->report;
  report.reports_apart = windows_.reports_apart;
  // Task 2 h is head h's K, task 2 h + 1 its V.
  std::vector<absl::StatusOr<HeadErrors>> tasks(2 * size_t{layer_.kv_heads}, HeadErrors{});
  pool_->ParallelFor(tasks.size(), [&](size_t task) {
    const KvTensor tensor = task % 2 == 0 ? KvTensor::kKeys : KvTensor::kValues;
    if (IsMyHead(task / 2)) tasks[task] = ReportHead(fitted->rotation, tensor, task / 2);
  });
  std::vector<HeadErrors> errors;
  for (const absl::StatusOr<HeadErrors>& task : tasks) {
    OKV_RETURN_IF_ERROR(task.status());
    errors.push_back(*task);
  }
  OKV_RETURN_IF_ERROR(ExchangeErrors(&errors));
  for (size_t task = 0; task < errors.size(); ++task) {
    const bool keys = task % 2 == 0;
    (keys ? report.promised_k : report.promised_v).Add(errors[task].promised);
    (keys ? report.reported_k : report.reported_v).Add(errors[task].reported);
    (keys ? report.published_clip_k : report.published_clip_v).Add(errors[task].published_clip);
  }
  return absl::OkStatus();
}

absl::Status LayerFit::Measure(FittedLayer* fitted) const {
  if (options_.measure_tokens == 0) return absl::OkStatus();
  std::vector<SequenceRange> ranges;
  uint32_t left = options_.measure_tokens;
  for (const SequenceRange& window : windows_.report) {
    const uint32_t count = std::min(left, window.tokens_count);
    if (count > 0) ranges.push_back({.first_token = window.first_token, .tokens_count = count});
    left -= count;
  }
  if (ranges.empty()) {
    ranges =
        SampleSequences(layer_.sequence_lengths, {.tokens_max = left, .sequence_tokens_max = left});
  }
  const std::vector<Matrix> c_q = QueryCovariance(ExtractRanges(layer_, ranges), pool_);
  OKV_ASSIGN_OR_RETURN(fitted->report.int2,
                       MeasureInt2(layer_, fitted->rotation, c_q, ranges, pool_));
  return absl::OkStatus();
}

absl::Status LayerFit::Run(FittedLayer* fitted) {
  OKV_ASSIGN_OR_RETURN(const std::vector<Starts> starts, AllStarts());
  ReadHistories();
  std::vector<absl::StatusOr<FoundRotation>> tasks(2 * starts.size(), FoundRotation{});
  pool_->ParallelFor(tasks.size(), [&](size_t task) {
    if (IsMine(task)) tasks[task] = Find(starts, task);
  });
  std::vector<FoundRotation> found;
  for (absl::StatusOr<FoundRotation>& task : tasks) {
    OKV_RETURN_IF_ERROR(task.status());
    found.push_back(*std::move(task));
  }
  OKV_RETURN_IF_ERROR(Exchange(layer_.head_dim, machine_.ranks, &found));
  Report(found, fitted);
  OKV_RETURN_IF_ERROR(ReportErrors(fitted));
  return Measure(fitted);
}

absl::StatusOr<FittedLayer> FitUnnamed(const LayerDump& layer, const FitOptions& options,
                                       const FitMachine& machine) {
  const uint32_t dim = layer.head_dim;
  OKV_RETURN_IF_ERROR(options.Validate(dim));
  FittedLayer fitted{.rotation = {.group_size = options.group_size,
                                  .rotation_heads = 1,
                                  .r_k = {},
                                  .r_v = {},
                                  .clip_rank_k = {},
                                  .clip_rank_v = {}},
                     .report = {}};
  OKV_RETURN_IF_ERROR(LayerFit(layer, options, machine).Run(&fitted));
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
          .clip_k = rotates ? kPublishedClipK : 0.0,
          .clip_v = rotates ? kPublishedClipV : 0.0,
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
                                     const FitMachine& machine) {
  UseSingleThreadedBlas();
  OneRank alone;
  CpuCovariance cpu(machine.pool);
  FitMachine whole = machine;
  if (whole.ranks == nullptr) whole.ranks = &alone;
  if (whole.device == nullptr) whole.device = &cpu;
  absl::StatusOr<FittedLayer> fitted = FitUnnamed(layer, options, whole);
  if (fitted.ok()) return fitted;
  return absl::Status(fitted.status().code(),
                      absl::StrCat("layer ", layer.layer_id, ": ", fitted.status().message()));
}

absl::StatusOr<FitResult> FitRotations(const DumpReader& dump, const FitOptions& options,
                                       const FitMachine& machine,
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
  LayerDump layer;
  for (uint32_t position = 0; position < info.layer_ids.size(); ++position) {
    OKV_RETURN_IF_ERROR(dump.ReadLayer(position, machine.pool, &layer));
    OKV_ASSIGN_OR_RETURN(const FittedLayer fitted, FitLayer(layer, options, machine));
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
  if (options.method == Method::kOscar && options.value_objective != ValueObjective::kEnergy) {
    result.value_tokens = SoftmaxTokens(dump.sequence_lengths(), options);
  }
  if (set.promised_error_k.size() < info.layer_ids.size()) {  // A layer of zeros promises nothing.
    set.promised_error_k.clear();
    set.promised_error_v.clear();
  }
  OKV_RETURN_IF_ERROR(set.Validate());
  return result;
}

}  // namespace okv
