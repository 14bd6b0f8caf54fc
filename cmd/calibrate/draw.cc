#include "cmd/calibrate/draw.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "calib/dump.h"
#include "proto/bf16.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// A row is the sum of two of these with random signs: as Gaussian as they are, of the same
// covariance, and 20 times cheaper than one drawn anew (6.6e9 numbers at the default size).
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

// Gaussian rows of variance scale^2 / (1 + i) along basis row i.
Rows DrawPool(const Rows& basis, double scale, uint32_t dim, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  Rows pool(kPoolRows * dim, 0.0f);
  for (size_t row = 0; row < kPoolRows; ++row) {
    for (uint32_t i = 0; i < dim; ++i) {
      const float part = static_cast<float>(scale) / std::sqrt(1.0f + i) * normal(*random);
      for (uint32_t c = 0; c < dim; ++c) pool[row * dim + c] += part * basis[size_t{i} * dim + c];
    }
  }
  return pool;
}

// One layer's source of rows.
class LayerSource {
 public:
  LayerSource(const DrawOptions& options, uint32_t layer)
      : options_(options), random_(options.seed * uint64_t{1'000'003} + layer) {
    const uint32_t dim = options.head_dim;
    const Rows shared = Basis(dim, &random_);
    q_pool_ = DrawPool(shared, 3, dim, &random_);
    k_pool_ = DrawPool(shared, 3, dim, &random_);
    v_pool_ = DrawPool(Basis(dim, &random_), 1, dim, &random_);
    std::normal_distribution<float> normal(0, 2);
    k_mean_.resize(size_t{options.kv_heads} * dim);
    for (float& x : k_mean_) x = normal(random_);
  }

  // The layer's rows of one sequence.
  void Draw(uint32_t tokens_count) {
    const size_t kv_rows = size_t{tokens_count} * options_.kv_heads;
    q_.resize(size_t{tokens_count} * options_.query_heads * options_.head_dim);
    for (size_t row = 0; row * options_.head_dim < q_.size(); ++row) {
      Combine(q_pool_, [&](uint32_t c, float x) { q_[row * options_.head_dim + c] = x; });
    }
    k_.resize(kv_rows * options_.head_dim);
    v_.resize(k_.size());
    for (size_t row = 0; row < kv_rows; ++row) {
      const size_t at = row * options_.head_dim;
      const float* const mean = k_mean_.data() + row % options_.kv_heads * options_.head_dim;
      Combine(k_pool_, [&](uint32_t c, float x) { k_[at + c] = FloatToBf16(x + mean[c]); });
      Combine(v_pool_, [&](uint32_t c, float x) { v_[at + c] = FloatToBf16(x); });
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
  template <typename Store>
  void Combine(const Rows& pool, const Store& store) {
    const uint64_t bits = random_();
    const float* const one = pool.data() + bits % kPoolRows * options_.head_dim;
    const float* const other = pool.data() + (bits >> 20) % kPoolRows * options_.head_dim;
    const float half = std::sqrt(0.5f);
    const float sign_one = bits >> 63 ? half : -half;
    const float sign_other = bits >> 62 & 1 ? half : -half;
    for (uint32_t c = 0; c < options_.head_dim; ++c) {
      store(c, sign_one * one[c] + sign_other * other[c]);
    }
  }

  const DrawOptions& options_;
  std::mt19937_64 random_;
  Rows q_pool_;
  Rows k_pool_;
  Rows v_pool_;
  Rows k_mean_;              // [kv_heads, dim]
  std::vector<float> q_;     // [tokens, query_heads, dim]
  std::vector<uint16_t> k_;  // [tokens, kv_heads, dim] bf16
  std::vector<uint16_t> v_;
};

}  // namespace

absl::Status DrawOptions::Validate() const {
  const auto missing = [](absl::string_view flag) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, " is missing or 0"));
  };
  if (out.empty()) return missing("out");
  if (layers_count == 0) return missing("layers");
  if (tokens_count == 0) return missing("tokens");
  if (sequence_tokens == 0) return missing("sequence_tokens");
  return absl::OkStatus();
}

absl::Status DrawDump(const DrawOptions& options, ThreadPool* pool) {
  OKV_RETURN_IF_ERROR(options.Validate());
  DumpInfo info{.model = "drawn",
                .weights_revision = absl::StrCat("seed-", options.seed),
                .text_source = "random rows",
                .layer_ids = std::vector<uint32_t>(options.layers_count),
                .query_heads = options.query_heads,
                .kv_heads = options.kv_heads,
                .head_dim = options.head_dim};
  std::iota(info.layer_ids.begin(), info.layer_ids.end(), 0u);
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DumpWriter> writer,
                       DumpWriter::Create(options.out, info));
  std::vector<std::unique_ptr<LayerSource>> sources(options.layers_count);
  pool->ParallelFor(sources.size(), [&](size_t layer) {
    sources[layer] = std::make_unique<LayerSource>(options, static_cast<uint32_t>(layer));
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
