#include "calib/report.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "calib/covariance.h"
#include "calib/linalg.h"
#include "calib/measure.h"
#include "kernels/quantize.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kHistogramBins = 96;
constexpr uint32_t kAllWindows = std::numeric_limits<uint32_t>::max();
constexpr uint32_t kAllTokens = kAllWindows;

// A rotation at a group size, with its clips.
struct Candidate {
  std::string name;
  LayerRotation rotation;
  bool has_spectrum = false;  // Once a rotation, whatever its group sizes.
  bool has_histogram = false;
};

// What one candidate does to one head, before heads are pooled.
struct HeadResult {
  HeadMeasures measures;
  std::vector<double> k_importance;  // diag(R^T C_Q R)
  std::vector<double> v_importance;
  std::vector<uint64_t> k_counts;  // Of the histogram, if it has one.
};

// Orthonormal bases of one layer, one matrix or one per KV head.
struct Bases {
  std::vector<Matrix> k;
  std::vector<Matrix> v;
};

std::vector<uint16_t> Bits(const std::vector<Matrix>& matrices) {
  std::vector<uint16_t> bits;
  for (const Matrix& matrix : matrices) {
    const std::vector<uint16_t> one = RoundToBf16(matrix);
    bits.insert(bits.end(), one.begin(), one.end());
  }
  return bits;
}

// U H P_br without P_br. RotationFromEigenvectors puts column BitReverse(j) of U H at j.
Matrix WithoutReversal(const Matrix& rotation, uint32_t dim) {
  Matrix plain(rotation.size());
  for (uint32_t row = 0; row < dim; ++row) {
    for (uint32_t j = 0; j < dim; ++j) {
      plain[size_t{row} * dim + j] = rotation[size_t{row} * dim + BitReverse(j, dim)];
    }
  }
  return plain;
}

Matrix IdentityMatrix(uint32_t dim) {
  Matrix identity(size_t{dim} * dim, 0.0);
  for (uint32_t i = 0; i < dim; ++i) identity[size_t{i} * dim + i] = 1.0;
  return identity;
}

// diag(R^T C R).
std::vector<double> Importance(const uint16_t* rotation, const Matrix& c, uint32_t dim) {
  std::vector<double> columns(size_t{dim} * dim);  // R^T: row j is column j of R.
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      columns[size_t{j} * dim + i] = Bf16ToFloat(rotation[size_t{i} * dim + j]);
    }
  }
  return QuadraticForms(columns.data(), dim, c, dim);
}

double MaxOverMean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  if (sum <= 0) return 0;
  return *std::max_element(values.begin(), values.end()) * static_cast<double>(values.size()) / sum;
}

// How many of a row's elements are greater than the clip_rank-th smallest magnitude.
size_t CountClipped(const uint16_t* y, uint32_t dim, uint32_t clip_rank) {
  if (clip_rank == 0) return 0;
  std::vector<uint16_t> magnitudes(y, y + dim);
  for (uint16_t& bits : magnitudes) bits &= 0x7fff;  // Ordered as |y| is.
  const auto threshold = magnitudes.begin() + clip_rank;
  std::nth_element(magnitudes.begin(), threshold, magnitudes.end());
  return static_cast<size_t>(
      std::count_if(threshold, magnitudes.end(), [t = *threshold](uint16_t m) { return m > t; }));
}

// Adds rotated rows to a histogram; what is beyond the limit falls into the end bins.
void AddToHistogram(const std::vector<uint16_t>& rows, double limit,
                    std::vector<uint64_t>* counts) {
  counts->resize(kHistogramBins, 0);
  if (limit <= 0) return;
  const double bins = static_cast<double>(kHistogramBins);
  for (const uint16_t bits : rows) {
    const double at = (Bf16ToFloat(bits) / limit + 1) / 2 * bins;
    ++(*counts)[static_cast<size_t>(std::clamp(at, 0.0, bins - 1))];
  }
}

// Ranges and clips of rotated rows.
void MeasureRotated(const std::vector<uint16_t>& y, uint32_t dim, const RowCodec& codec,
                    TensorMeasures* measures) {
  const size_t rows_count = y.size() / dim;
  size_t clipped = 0;
  double ranges = 0;
  for (size_t row = 0; row < rows_count; ++row) {
    const uint16_t* const values = y.data() + row * dim;
    clipped += CountClipped(values, dim, codec.clip_rank);
    for (uint32_t first = 0; first < dim; first += codec.group_size) {
      float low = Bf16ToFloat(values[first]);
      float high = low;
      for (uint32_t c = first; c < first + codec.group_size; ++c) {
        const float value = Bf16ToFloat(values[c]);
        low = std::min(low, value);
        high = std::max(high, value);
      }
      ranges += double{high} - low;
      measures->max_abs = std::max({measures->max_abs, double{high}, -double{low}});
    }
  }
  const double elements = static_cast<double>(rows_count * dim);
  measures->group_range = ranges * codec.group_size / elements;
  measures->clip_rate = static_cast<double>(clipped) / elements;
}

// Of one window, as many as HeadHistory::Rows has.
size_t HistoryRows(const SequenceRange& window, const HistoryShape& shape) {
  return (window.tokens_count - 1) / kBlockTokens * kBlockTokens - shape.recent_tokens -
         shape.sink_tokens;
}

// One layer of the report. Lives for one call. Thread-compatible.
class LayerMeasurement {
 public:
  LayerMeasurement(const LayerDump& layer, const CalibrationReport& report,
                   const ReportOptions& options, ThreadPool* pool)
      : windows_(ExtractWindows(layer, report.shape, report.windows)),
        report_(report),
        options_(options),
        dim_(layer.head_dim),
        pool_(pool) {}

  // U is of `fit`. Errors as MeasureReport, without the layer's name.
  absl::Status Run(const LayerDump& fit, const std::vector<NamedSet>& sets, size_t position,
                   LayerMeasures* measures);

 private:
  absl::StatusOr<Bases> FitBases(const LayerDump& fit) const;
  void AddSteps(const Bases& u);
  void AddSets(const std::vector<NamedSet>& sets, size_t position);
  void AddCandidate(absl::string_view name, uint32_t group_size, const Bases& rotation,
                    const FitOptions& clips);
  // The covariances and the largest key.
  void ReadMeasured();
  // Everything about one head: one result for each candidate.
  absl::Status MeasureHead(size_t head, std::vector<HeadResult>* results) const;
  // Of one tensor; `restored` gets its rows.
  absl::Status MeasureTensor(size_t head, KvTensor tensor, const RowSample& sample,
                             const Candidate& candidate, HeadResult* result,
                             std::vector<float>* restored) const;
  absl::Status BadRowStatus(const absl::Status& status, size_t head, KvTensor tensor,
                            size_t row) const;
  VariantMeasures Pool(const Candidate& candidate, std::vector<HeadResult> results) const;
  void AddCurves(const Candidate& candidate, const std::vector<HeadResult>& results,
                 LayerMeasures* measures) const;

  const LayerDump windows_;  // What is measured.
  const CalibrationReport& report_;
  const ReportOptions& options_;
  const uint32_t dim_;
  ThreadPool* const pool_;
  std::vector<Candidate> candidates_;
  std::vector<Matrix> c_q_;  // Of windows_, one per KV head.
  std::vector<Matrix> c_s_;
  double k_limit_ = 0;  // Largest |k|.
};

absl::StatusOr<Bases> LayerMeasurement::FitBases(const LayerDump& fit) const {
  const std::vector<SequenceRange> ranges =
      SampleSequences(fit.sequence_lengths, options_.value_sample);
  uint32_t tokens_count = 0;
  for (const SequenceRange& range : ranges) tokens_count += range.tokens_count;
  if (tokens_count < dim_) {
    return absl::InvalidArgumentError(absl::StrCat("there are ", tokens_count,
                                                   " tokens to fit U on, fewer than head_dim ",
                                                   dim_, ": dump more text"));
  }
  std::vector<Matrix> c_q = QueryCovariance(fit, pool_);
  std::vector<Matrix> c_s = SoftmaxValueCovariance(fit, ranges, pool_);
  Bases bases;
  for (const auto& [covariances, to] : {std::pair(&c_q, &bases.k), std::pair(&c_s, &bases.v)}) {
    if (options_.scope == RotationScope::kLayer) *covariances = {MeanMatrix(*covariances)};
    for (const Matrix& one : *covariances) {
      if (std::all_of(one.begin(), one.end(), [](double x) { return x == 0; })) {
        return absl::InvalidArgumentError(
            absl::StrCat("all ", to == &bases.k ? "queries" : "values", " are zero"));
      }
      OKV_ASSIGN_OR_RETURN(EigenSystem eigen, SymmetricEigen(one, dim_));
      to->push_back(std::move(eigen.vectors));
    }
  }
  return bases;
}

void LayerMeasurement::AddCandidate(absl::string_view name, uint32_t group_size,
                                    const Bases& rotation, const FitOptions& clips) {
  const auto ranks = [&](const std::optional<double>& ratio) {
    return std::vector<uint32_t>(windows_.kv_heads,
                                 static_cast<uint32_t>(std::floor(ratio.value_or(0) * dim_)));
  };
  candidates_.push_back({.name = std::string(name),
                         .rotation = {.group_size = group_size,
                                      .rotation_heads = static_cast<uint32_t>(rotation.k.size()),
                                      .r_k = Bits(rotation.k),
                                      .r_v = Bits(rotation.v),
                                      .clip_rank_k = ranks(clips.clip_k),
                                      .clip_rank_v = ranks(clips.clip_v)}});
}

void LayerMeasurement::AddSteps(const Bases& u) {
  const auto one = [](const Matrix& matrix) { return Bases{.k = {matrix}, .v = {matrix}}; };
  Bases uhp = u;
  Bases uh = u;
  for (const auto& [from, to, plain] :
       {std::tuple(&u.k, &uhp.k, &uh.k), std::tuple(&u.v, &uhp.v, &uh.v)}) {
    for (size_t i = 0; i < from->size(); ++i) {
      (*to)[i] = RotationFromEigenvectors((*from)[i], dim_);
      (*plain)[i] = WithoutReversal((*to)[i], dim_);
    }
  }
  const FitOptions no_clips = FitOptions::Published(Method::kNone);
  bool first = true;
  for (const uint32_t group_size : options_.GroupSizes(dim_)) {
    const size_t begin = candidates_.size();
    AddCandidate("none", group_size, one(IdentityMatrix(dim_)), no_clips);
    AddCandidate("hadamard", group_size, one(Hadamard(dim_)), no_clips);
    AddCandidate("U", group_size, u, no_clips);
    AddCandidate("UH", group_size, uh, no_clips);
    AddCandidate("UHP", group_size, uhp, no_clips);
    AddCandidate("UHP recipe", group_size, uhp, FitOptions::Published(Method::kOscar));
    if (!std::exchange(first, false)) continue;
    for (const size_t i : {0, 1, 4}) candidates_[begin + i].has_histogram = true;
    for (const size_t i : {0, 2, 4}) candidates_[begin + i].has_spectrum = true;
  }
}

void LayerMeasurement::AddSets(const std::vector<NamedSet>& sets, size_t position) {
  const size_t matrix = size_t{dim_} * dim_;
  const auto heads = [&](const std::vector<uint32_t>& ranks) {
    const auto begin = ranks.begin() + static_cast<ptrdiff_t>(position * windows_.kv_heads);
    return std::vector<uint32_t>(begin, begin + windows_.kv_heads);
  };
  for (const NamedSet& named : sets) {
    const RotationSet& set = named.set;
    const uint32_t index = static_cast<uint32_t>(position);
    const uint16_t* const r_k = set.RotationK(index, 0);
    const uint16_t* const r_v = set.RotationV(index, 0);
    candidates_.push_back(
        {.name = named.name,
         .rotation = {.group_size = set.group_size,
                      .rotation_heads = set.rotation_heads,
                      .r_k = std::vector<uint16_t>(r_k, r_k + set.rotation_heads * matrix),
                      .r_v = std::vector<uint16_t>(r_v, r_v + set.rotation_heads * matrix),
                      .clip_rank_k = heads(set.clip_rank_k),
                      .clip_rank_v = heads(set.clip_rank_v)},
         .has_spectrum = true,
         .has_histogram = true});
  }
  std::map<uint32_t, std::vector<Candidate>> by_group_size;
  for (Candidate& one : candidates_) {
    by_group_size[one.rotation.group_size].push_back(std::move(one));
  }
  candidates_.clear();
  for (auto& [group_size, candidates] : by_group_size) {
    std::move(candidates.begin(), candidates.end(), std::back_inserter(candidates_));
  }
}

void LayerMeasurement::ReadMeasured() {
  c_q_ = QueryCovariance(windows_, pool_);
  c_s_ = SoftmaxValueCovariance(
      windows_, SampleSequences(windows_.sequence_lengths, options_.value_sample), pool_);
  for (const float value : windows_.k) k_limit_ = std::max(k_limit_, std::fabs(double{value}));
}

absl::Status LayerMeasurement::BadRowStatus(const absl::Status& status, size_t head,
                                            KvTensor tensor, size_t row) const {
  size_t left = row;
  for (const SequenceRange& window : report_.windows) {
    const size_t rows = HistoryRows(window, report_.shape);
    if (left < rows) {
      return absl::Status(
          status.code(), absl::StrCat(tensor == KvTensor::kKeys ? "K" : "V", " of token ",
                                      window.first_token + report_.shape.sink_tokens + left,
                                      ", head ", head, " cannot be quantized: ", status.message()));
    }
    left -= rows;
  }
  OKV_CHECK(false && "a row behind the windows");
  return status;
}

absl::Status LayerMeasurement::MeasureTensor(size_t head, KvTensor tensor, const RowSample& sample,
                                             const Candidate& candidate, HeadResult* result,
                                             std::vector<float>* restored) const {
  const bool keys = tensor == KvTensor::kKeys;
  const LayerRotation& rotation = candidate.rotation;
  const size_t matrix = rotation.rotation_heads == 1 ? 0 : head * dim_ * dim_;
  const RowCodec codec{.rotation = (keys ? rotation.r_k : rotation.r_v).data() + matrix,
                       .group_size = rotation.group_size,
                       .clip_rank = (keys ? rotation.clip_rank_k : rotation.clip_rank_v)[head]};
  TensorMeasures& measures = keys ? result->measures.k : result->measures.v;
  const size_t rows_count = sample.rows.size() / dim_;
  std::vector<uint16_t> y(sample.rows.size());
  RotateRows({.x = sample.rows.data(),
              .x_stride = dim_,
              .r = codec.rotation,
              .rows_count = rows_count,
              .dim = dim_},
             y.data(), dim_);
  MeasureRotated(y, dim_, codec, &measures);
  if (keys && candidate.has_histogram) AddToHistogram(y, k_limit_, &result->k_counts);
  std::vector<double>& importance = keys ? result->k_importance : result->v_importance;
  importance = Importance(codec.rotation, (keys ? c_q_ : c_s_)[head], dim_);
  measures.importance_ratio = MaxOverMean(importance);

  size_t bad_row = 0;
  absl::StatusOr<std::vector<float>> back = RestoredRows(sample, codec, &bad_row);
  if (!back.ok()) return BadRowStatus(back.status(), head, tensor, bad_row);
  *restored = *std::move(back);
  std::vector<double> errors(restored->size());
  double squares = 0;
  for (size_t i = 0; i < errors.size(); ++i) {
    errors[i] = double{(*restored)[i]} - Bf16ToFloat(sample.rows[i]);
    squares += errors[i] * errors[i];
  }
  measures.error_trace = squares / static_cast<double>(rows_count);
  if (!keys) return absl::OkStatus();
  for (const double one : QuadraticForms(errors.data(), rows_count, c_q_[head], dim_)) {
    result->measures.logit.error += one / static_cast<double>(rows_count);
  }
  return absl::OkStatus();
}

absl::Status LayerMeasurement::MeasureHead(size_t head, std::vector<HeadResult>* results) const {
  std::vector<SequenceRange> whole;
  uint32_t first_token = 0;
  for (const uint32_t tokens_count : windows_.sequence_lengths) {
    whole.push_back({.first_token = first_token, .tokens_count = tokens_count});
    first_token += tokens_count;
  }
  const HeadHistory history(windows_, static_cast<uint32_t>(head), report_.shape, whole,
                            /*judge_stride=*/0);
  const RowSample keys = history.Rows(KvTensor::kKeys);
  const RowSample values = history.Rows(KvTensor::kValues);
  const size_t rows_count = keys.rows.size() / dim_;
  std::vector<double> exact(keys.rows.size());
  std::transform(keys.rows.begin(), keys.rows.end(), exact.begin(), Bf16ToFloat);
  double signal = 0;
  for (const double one : QuadraticForms(exact.data(), rows_count, c_q_[head], dim_)) signal += one;

  results->resize(candidates_.size());
  std::vector<RestoredHistory> restored(candidates_.size());
  for (size_t i = 0; i < candidates_.size(); ++i) {
    HeadResult& result = (*results)[i];
    OKV_RETURN_IF_ERROR(
        MeasureTensor(head, KvTensor::kKeys, keys, candidates_[i], &result, &restored[i].k));
    OKV_RETURN_IF_ERROR(
        MeasureTensor(head, KvTensor::kValues, values, candidates_[i], &result, &restored[i].v));
    result.measures.logit.signal = signal / static_cast<double>(rows_count);
  }
  const std::vector<AttentionErrors> attention =
      CompareAttention(windows_, static_cast<uint32_t>(head),
                       {.shape = report_.shape, .stride = options_.query_stride}, restored);
  for (size_t i = 0; i < attention.size(); ++i) (*results)[i].measures.attention = attention[i];
  return absl::OkStatus();
}

// Sums of heads become their mean, but for what TensorMeasures says.
void AddHead(const TensorMeasures& head, double share, TensorMeasures* sum) {
  sum->max_abs = std::max(sum->max_abs, head.max_abs);
  sum->group_range += share * head.group_range;
  sum->error_trace += share * head.error_trace;
  sum->clip_rate += share * head.clip_rate;
}

std::vector<double> MeanImportance(const std::vector<HeadResult>& results, KvTensor tensor) {
  std::vector<double> mean;
  for (const HeadResult& result : results) {
    const std::vector<double>& one =
        tensor == KvTensor::kKeys ? result.k_importance : result.v_importance;
    mean.resize(one.size(), 0.0);
    for (size_t i = 0; i < one.size(); ++i) mean[i] += one[i] / static_cast<double>(results.size());
  }
  return mean;
}

VariantMeasures LayerMeasurement::Pool(const Candidate& candidate,
                                       std::vector<HeadResult> results) const {
  VariantMeasures variant{.name = candidate.name,
                          .group_size = candidate.rotation.group_size,
                          .heads = {},
                          .layer = {}};
  const double share = 1.0 / static_cast<double>(results.size());
  for (const HeadResult& result : results) {
    const HeadMeasures& head = result.measures;
    AddHead(head.k, share, &variant.layer.k);
    AddHead(head.v, share, &variant.layer.v);
    variant.layer.logit.Add({share * head.logit.error, share * head.logit.signal});
    variant.layer.attention.Add(head.attention);
    variant.heads.push_back(head);
  }
  variant.layer.k.importance_ratio = MaxOverMean(MeanImportance(results, KvTensor::kKeys));
  variant.layer.v.importance_ratio = MaxOverMean(MeanImportance(results, KvTensor::kValues));
  return variant;
}

void LayerMeasurement::AddCurves(const Candidate& candidate, const std::vector<HeadResult>& results,
                                 LayerMeasures* measures) const {
  if (candidate.has_spectrum) {
    for (const KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
      Spectrum spectrum{.name = candidate.name, .values = MeanImportance(results, tensor)};
      std::sort(spectrum.values.begin(), spectrum.values.end(), std::greater<>());
      (tensor == KvTensor::kKeys ? measures->k_spectra : measures->v_spectra)
          .push_back(std::move(spectrum));
    }
  }
  if (!candidate.has_histogram) return;
  KeyHistogram histogram{.name = candidate.name, .limit = k_limit_, .counts = {}};
  histogram.counts.resize(kHistogramBins, 0);
  for (const HeadResult& result : results) {
    for (size_t i = 0; i < kHistogramBins; ++i) histogram.counts[i] += result.k_counts[i];
  }
  measures->k_histograms.push_back(std::move(histogram));
}

absl::Status LayerMeasurement::Run(const LayerDump& fit, const std::vector<NamedSet>& sets,
                                   size_t position, LayerMeasures* measures) {
  OKV_ASSIGN_OR_RETURN(const Bases bases, FitBases(fit));
  AddSteps(bases);
  AddSets(sets, position);
  ReadMeasured();
  std::vector<std::vector<HeadResult>> results(windows_.kv_heads);  // By head, candidate.
  std::vector<absl::Status> statuses(windows_.kv_heads);
  pool_->ParallelFor(windows_.kv_heads,
                     [&](size_t head) { statuses[head] = MeasureHead(head, &results[head]); });
  for (const absl::Status& status : statuses) OKV_RETURN_IF_ERROR(status);
  measures->layer_id = windows_.layer_id;
  for (const SequenceRange& window : report_.windows) {
    measures->rows_count += HistoryRows(window, report_.shape);
  }
  for (size_t i = 0; i < candidates_.size(); ++i) {
    std::vector<HeadResult> heads;
    for (std::vector<HeadResult>& head : results) heads.push_back(std::move(head[i]));
    AddCurves(candidates_[i], heads, measures);
    measures->variants.push_back(Pool(candidates_[i], std::move(heads)));
  }
  return absl::OkStatus();
}

// kFailedPrecondition naming the first thing in which a set or a dump is of another model.
absl::Status CheckSameModel(const std::string& what, const DumpInfo& its, const DumpInfo& dump) {
  const auto differs = [&](absl::string_view field, const std::string& one,
                           const std::string& other) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " has ", field, " ", one, ", the activations have ", other));
  };
  if (its.model != dump.model) return differs("model", its.model, dump.model);
  if (its.weights_revision != dump.weights_revision) {
    return differs("weights_revision", its.weights_revision, dump.weights_revision);
  }
  if (its.kv_heads != dump.kv_heads) {
    return differs("kv_heads", absl::StrCat(its.kv_heads), absl::StrCat(dump.kv_heads));
  }
  if (its.head_dim != dump.head_dim) {
    return differs("head_dim", absl::StrCat(its.head_dim), absl::StrCat(dump.head_dim));
  }
  if (its.query_heads != dump.query_heads) {
    return differs("query_heads", absl::StrCat(its.query_heads), absl::StrCat(dump.query_heads));
  }
  if (its.layer_ids == dump.layer_ids) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " has other layers than the activations"));
}

absl::Status CheckSets(const std::vector<NamedSet>& sets, const DumpInfo& info) {
  std::set<std::string> names = {"none", "hadamard", "U", "UH", "UHP", "UHP recipe"};
  for (const NamedSet& named : sets) {
    const RotationSet& set = named.set;
    if (!names.insert(named.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("two rotations are called ", named.name));
    }
    OKV_RETURN_IF_ERROR(CheckSameModel(absl::StrCat("rotation set ", named.name),
                                       {.model = set.model,
                                        .weights_revision = set.weights_revision,
                                        .text_source = {},
                                        .layer_ids = set.layer_ids,
                                        .query_heads = info.query_heads,
                                        .kv_heads = set.kv_heads,
                                        .head_dim = set.head_dim},
                                       info));
  }
  return absl::OkStatus();
}

// Whether a set says that it was fitted on `dump`, by text, tokens and sequences.
bool IsFittedOn(const RotationSet& set, const DumpReader& dump) {
  const std::pair<const char*, std::string> facts[] = {
      {"tokens", absl::StrCat(dump.tokens_count())},
      {"sequences", absl::StrCat(dump.sequence_lengths().size())}};
  return std::all_of(std::begin(facts), std::end(facts), [&](const auto& fact) {
    const auto found = set.provenance.find(fact.first);
    return found != set.provenance.end() && found->second == fact.second;
  });
}

// What was fitted on the very text that is measured is not held out, but for what FitRotations made
// of this dump when the measured windows are those that it keeps apart.
std::vector<std::string> Notes(const DumpReader& activations, const DumpReader* fit,
                               const std::vector<NamedSet>& sets) {
  std::vector<std::string> notes;
  const std::string& text = activations.info().text_source;
  if (fit != nullptr && fit->info().text_source == text) {
    notes.push_back(absl::StrCat("U was fitted on the text that is measured: ", text));
  }
  for (const NamedSet& named : sets) {
    const auto source = named.set.provenance.find("text_source");
    if (source == named.set.provenance.end() || source->second != text) continue;
    if (fit == nullptr && IsFittedOn(named.set, activations)) continue;
    notes.push_back(
        absl::StrCat("The set ", named.name, " was fitted on the text that is measured: ", text));
  }
  return notes;
}

// Chooses what is measured. Gives the number of tokens, the first ones, that U may be fitted on
// when there is no dump for that.
absl::StatusOr<uint32_t> ChooseWindows(const DumpReader& activations, bool has_fit,
                                       const ReportOptions& options, CalibrationReport* report) {
  const HistoryWindows windows =
      SplitWindows(activations.sequence_lengths(), kAllWindows, kAllWindows);
  if (windows.judge.empty()) {
    return absl::FailedPreconditionError(
        "no sequence of the activations is long enough for history");
  }
  report->shape = windows.shape;
  std::vector<SequenceRange> all = windows.report;
  if (!has_fit && !windows.reports_apart) {
    report->notes.push_back(
        "There are fewer than three windows of text: what is measured was fitted on, or chosen by");
  }
  if (has_fit && windows.fit_tokens < activations.tokens_count()) {
    all = windows.fit;
    all.insert(all.end(), windows.judge.begin(), windows.judge.end());
    if (windows.reports_apart) {
      all.insert(all.end(), windows.report.begin(), windows.report.end());
    }
  }
  const size_t count = std::min<size_t>(all.size(), options.windows_max);
  for (size_t i = 0; i < count; ++i) report->windows.push_back(all[i * all.size() / count]);
  return windows.fit_tokens;
}

}  // namespace

absl::Status ReportOptions::Validate(uint32_t head_dim) const {
  if (windows_max == 0) return absl::InvalidArgumentError("windows_max is 0");
  if (query_stride == 0) return absl::InvalidArgumentError("query_stride is 0");
  if (value_sample.sequence_tokens_max == 0) {
    return absl::InvalidArgumentError("value_sequence_tokens_max is 0");
  }
  for (const uint32_t one : group_sizes) {
    if (one >= 32 && one <= head_dim && std::has_single_bit(one)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("group_size is ", one, ", not a power of two from 32 to head_dim ", head_dim));
  }
  return absl::OkStatus();
}

std::vector<uint32_t> ReportOptions::GroupSizes(uint32_t head_dim) const {
  if (!group_sizes.empty()) return group_sizes;
  std::vector<uint32_t> sizes;
  for (const uint32_t one : {32u, 64u, 128u}) {
    if (one <= head_dim) sizes.push_back(one);
  }
  return sizes;
}

std::vector<VariantMeasures> CalibrationReport::Summary() const {
  std::vector<VariantMeasures> summary;
  const double share = 1.0 / static_cast<double>(layers.size());
  for (const LayerMeasures& layer : layers) {
    summary.resize(layer.variants.size());
    for (size_t i = 0; i < summary.size(); ++i) {
      const HeadMeasures& one = layer.variants[i].layer;
      HeadMeasures& sum = summary[i].layer;
      summary[i].name = layer.variants[i].name;
      summary[i].group_size = layer.variants[i].group_size;
      AddHead(one.k, share, &sum.k);
      AddHead(one.v, share, &sum.v);
      sum.k.importance_ratio += share * one.k.importance_ratio;
      sum.v.importance_ratio += share * one.v.importance_ratio;
      sum.logit.Add({share * one.logit.ratio(), share});
      sum.attention.queries_count = 1;
      sum.attention.kl_sum += share * one.attention.kl();
      sum.attention.output_by_k.Add({share * one.attention.output_by_k.ratio(), share});
      sum.attention.output_by_v.Add({share * one.attention.output_by_v.ratio(), share});
      sum.attention.output.Add({share * one.attention.output.ratio(), share});
    }
  }
  return summary;
}

absl::StatusOr<CalibrationReport> MeasureReport(
    const DumpReader& activations, const DumpReader* fit, const std::vector<NamedSet>& sets,
    const ReportOptions& options, ThreadPool* pool,
    const std::function<void(const LayerMeasures&)>& progress) {
  UseSingleThreadedBlas();
  const DumpInfo& info = activations.info();
  OKV_RETURN_IF_ERROR(options.Validate(info.head_dim));
  OKV_RETURN_IF_ERROR(CheckSets(sets, info));
  if (fit != nullptr) OKV_RETURN_IF_ERROR(CheckSameModel("the dump to fit on", fit->info(), info));
  CalibrationReport report{.info = info,
                           .tokens_count = activations.tokens_count(),
                           .shape = {},
                           .windows = {},
                           .fitted_on = {},
                           .scope = options.scope,
                           .notes = Notes(activations, fit, sets),
                           .layers = {}};
  OKV_ASSIGN_OR_RETURN(const uint32_t fit_tokens,
                       ChooseWindows(activations, fit != nullptr, options, &report));
  report.fitted_on = fit != nullptr
                         ? fit->info().text_source
                         : absl::StrCat("the first ", fit_tokens, " tokens of the same text");
  for (uint32_t position = 0; position < info.layer_ids.size(); ++position) {
    OKV_ASSIGN_OR_RETURN(const LayerDump layer, activations.ReadLayer(position));
    LayerDump fitted;
    if (fit != nullptr) {
      OKV_ASSIGN_OR_RETURN(fitted, fit->ReadLayer(position));
    } else {
      fitted = ExtractRanges(
          layer, SampleSequences(layer.sequence_lengths,
                                 {.tokens_max = fit_tokens, .sequence_tokens_max = kAllTokens}));
    }
    LayerMeasures measures;
    const absl::Status status =
        LayerMeasurement(layer, report, options, pool).Run(fitted, sets, position, &measures);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("layer ", layer.layer_id, ": ", status.message()));
    }
    report.layers.push_back(std::move(measures));
    if (progress) progress(report.layers.back());
  }
  return report;
}

}  // namespace okv
