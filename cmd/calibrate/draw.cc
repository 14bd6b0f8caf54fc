#include "cmd/calibrate/draw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/dump.h"
#include "calib/published_moments.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Without files a row is the sum of two of these with random signs: as Gaussian as they are, of the
// same covariance, and 20 times cheaper than one drawn anew (6.6e9 numbers at the default size).
// With files each row is drawn anew: what is fitted to some rows must not know the others.
constexpr size_t kPoolRows = 1024;

using Rows = std::vector<float>;  // [rows, dim]

// Random orthonormal rows.
Rows Basis(uint32_t dim, std::mt19937_64* random) {
  std::normal_distribution<double> normal;
  std::vector<double> basis(size_t{dim} * dim);
  for (double& x : basis) x = normal(*random);
  for (uint32_t i = 0; i < dim; ++i) {
    double* const row = basis.data() + size_t{i} * dim;
    for (uint32_t j = 0; j < i; ++j) {
      const double* const other = basis.data() + size_t{j} * dim;
      const double along = std::inner_product(row, row + dim, other, 0.0);
      for (uint32_t c = 0; c < dim; ++c) row[c] -= along * other[c];
    }
    const double norm = std::sqrt(std::inner_product(row, row + dim, row, 0.0));
    for (uint32_t c = 0; c < dim; ++c) row[c] /= norm;
  }
  return {basis.begin(), basis.end()};
}

// [dim, dim] whose row i is basis row i times scale / sqrt(1 + i).
Rows FallingFactor(const Rows& basis, double scale, uint32_t dim) {
  Rows factor(basis.size());
  for (size_t i = 0; i < factor.size(); ++i) {
    factor[i] =
        static_cast<float>(scale / std::sqrt(1.0 + static_cast<double>(i / dim))) * basis[i];
  }
  return factor;
}

// Gaussian rows of second moment F^T F.
Rows DrawRows(const Rows& factor, uint32_t dim, size_t rows_count, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  Rows rows(rows_count * dim, 0.0f);
  for (size_t row = 0; row < rows_count; ++row) {
    for (uint32_t i = 0; i < dim; ++i) {
      const float part = normal(*random);
      for (uint32_t c = 0; c < dim; ++c) rows[row * dim + c] += part * factor[size_t{i} * dim + c];
    }
  }
  return rows;
}

// What rows of one layer are drawn by.
struct LayerMoments {
  Rows keys;    // [dim, dim], of queries too.
  Rows values;  // [dim, dim]
};

// One layer's source of rows.
class LayerSource {
 public:
  // `moments` null: moments of its own.
  LayerSource(const DrawOptions& options, uint32_t layer, const LayerMoments* moments)
      : options_(options),
        random_(options.seed * uint64_t{1'000'003} + layer),
        moments_(moments),
        k_mean_(size_t{options.kv_heads} * options.head_dim, 0.0f) {
    if (moments != nullptr) return;
    const uint32_t dim = options.head_dim;
    const Rows keys = FallingFactor(Basis(dim, &random_), 3, dim);
    const Rows values = FallingFactor(Basis(dim, &random_), 1, dim);
    q_pool_ = DrawRows(keys, dim, kPoolRows, &random_);
    k_pool_ = DrawRows(keys, dim, kPoolRows, &random_);
    v_pool_ = DrawRows(values, dim, kPoolRows, &random_);
    std::normal_distribution<float> normal(0, 2);
    for (float& x : k_mean_) x = normal(random_);
  }

  // The layer's rows of one sequence.
  void Draw(uint32_t tokens_count) {
    const size_t query_rows = size_t{tokens_count} * options_.query_heads;
    const size_t kv_rows = size_t{tokens_count} * options_.kv_heads;
    Rows k;
    Rows v;
    if (moments_ != nullptr) {
      q_ = DrawRows(moments_->keys, options_.head_dim, query_rows, &random_);
      k = DrawRows(moments_->keys, options_.head_dim, kv_rows, &random_);
      v = DrawRows(moments_->values, options_.head_dim, kv_rows, &random_);
    } else {
      q_ = Combined(q_pool_, query_rows);
      k = Combined(k_pool_, kv_rows);
      v = Combined(v_pool_, kv_rows);
    }
    k_.resize(k.size());
    v_.resize(v.size());
    for (size_t i = 0; i < k.size(); ++i) {
      k_[i] = FloatToBf16(k[i] + k_mean_[i % k_mean_.size()]);
      v_[i] = FloatToBf16(v[i]);
    }
  }

  // Gives back the memory of the rows.
  void Forget() {
    q_ = {};
    k_ = {};
    v_ = {};
  }

  DumpRows rows(uint32_t layer, uint32_t tokens_count) const {
    return {.layer = layer,
            .tokens_count = tokens_count,
            .q = q_.data(),
            .k = k_.data(),
            .v = v_.data()};
  }

 private:
  Rows Combined(const Rows& pool, size_t rows_count) {
    const uint32_t dim = options_.head_dim;
    Rows rows(rows_count * dim);
    const float half = std::sqrt(0.5f);
    for (size_t row = 0; row < rows_count; ++row) {
      const uint64_t bits = random_();
      const float* const one = pool.data() + bits % kPoolRows * dim;
      const float* const other = pool.data() + (bits >> 20) % kPoolRows * dim;
      const float sign_one = bits >> 63 ? half : -half;
      const float sign_other = bits >> 62 & 1 ? half : -half;
      for (uint32_t c = 0; c < dim; ++c) {
        rows[row * dim + c] = sign_one * one[c] + sign_other * other[c];
      }
    }
    return rows;
  }

  const DrawOptions& options_;
  std::mt19937_64 random_;
  const LayerMoments* const moments_;
  Rows q_pool_;
  Rows k_pool_;
  Rows v_pool_;
  Rows k_mean_;              // [kv_heads, dim]
  std::vector<float> q_;     // [tokens, query_heads, dim]
  std::vector<uint16_t> k_;  // [tokens, kv_heads, dim] bf16
  std::vector<uint16_t> v_;
};

// Puts what the files say into `options` and the dump's facts.
absl::StatusOr<std::vector<LayerMoments>> ReadMoments(DrawOptions* options, DumpInfo* info) {
  OKV_ASSIGN_OR_RETURN(const PublishedMoments k, LoadMoments(options->k_file));
  OKV_ASSIGN_OR_RETURN(const PublishedMoments v, LoadMoments(options->v_file));
  if (k.head_dim() != v.head_dim() || k.file.layer_ids != v.file.layer_ids) {
    return absl::InvalidArgumentError(
        absl::StrCat(options->k_file, " and ", options->v_file, " differ in head_dim or layers"));
  }
  options->head_dim = k.head_dim();
  const std::vector<uint32_t>& known = k.file.layer_ids;
  info->layer_ids = options->layer_ids.empty() ? known : options->layer_ids;
  info->text_source = absl::StrCat("rows by the second moments behind ", options->k_file, " and ",
                                   options->v_file, ", keys by the queries'");
  std::vector<LayerMoments> moments;
  for (const uint32_t id : info->layer_ids) {
    const auto found = std::find(known.begin(), known.end(), id);
    if (found == known.end()) {
      return absl::InvalidArgumentError(absl::StrCat(options->k_file, " has no layer ", id));
    }
    const Matrix& of_k = k.factors[found - known.begin()];
    const Matrix& of_v = v.factors[found - known.begin()];
    moments.push_back(
        {.keys = Rows(of_k.begin(), of_k.end()), .values = Rows(of_v.begin(), of_v.end())});
  }
  return moments;
}

}  // namespace

absl::Status DrawOptions::Validate() const {
  const auto missing = [](absl::string_view flag) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " is missing or 0"));
  };
  if (out.empty()) return missing("out");
  if (k_file.empty() != v_file.empty()) {
    return absl::InvalidArgumentError("--k_file and --v_file go together");
  }
  if (k_file.empty() && !layer_ids.empty()) {
    return absl::InvalidArgumentError("--layer_ids are those of --k_file, which is missing");
  }
  if (layers_count == 0) return missing("layers");
  if (tokens_count == 0) return missing("tokens");
  if (sequence_tokens == 0) return missing("sequence_tokens");
  return absl::OkStatus();
}

absl::Status DrawDump(DrawOptions options, ThreadPool* pool) {
  OKV_RETURN_IF_ERROR(options.Validate());
  DumpInfo info{.model = "drawn",
                .weights_revision = absl::StrCat("seed-", options.seed),
                .text_source = "random rows",
                .layer_ids = std::vector<uint32_t>(options.layers_count),
                .query_heads = options.query_heads,
                .kv_heads = options.kv_heads};
  std::iota(info.layer_ids.begin(), info.layer_ids.end(), 0u);
  std::vector<LayerMoments> moments;
  if (!options.k_file.empty()) {
    OKV_ASSIGN_OR_RETURN(moments, ReadMoments(&options, &info));
  }
  info.head_dim = options.head_dim;
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DumpWriter> writer,
                       DumpWriter::Create(options.out, info));
  std::vector<std::unique_ptr<LayerSource>> sources(info.layer_ids.size());
  pool->ParallelFor(sources.size(), [&](size_t layer) {
    sources[layer] = std::make_unique<LayerSource>(options, info.layer_ids[layer],
                                                   moments.empty() ? nullptr : &moments[layer]);
  });
  for (uint32_t first = 0; first < options.tokens_count; first += options.sequence_tokens) {
    const uint32_t count = std::min(options.sequence_tokens, options.tokens_count - first);
    // As many layers at once as there are threads: a sequence of one is 60 MiB.
    const size_t together = pool->threads_count();
    for (size_t layer = 0; layer < sources.size(); layer += together) {
      const size_t end = std::min(sources.size(), layer + together);
      pool->ParallelFor(end - layer, [&](size_t i) { sources[layer + i]->Draw(count); });
      for (size_t i = layer; i < end; ++i) {
        OKV_RETURN_IF_ERROR(writer->Append(sources[i]->rows(static_cast<uint32_t>(i), count)));
        sources[i]->Forget();
      }
    }
    OKV_RETURN_IF_ERROR(writer->EndSequence());
  }
  return writer->Finish();
}

}  // namespace okv
