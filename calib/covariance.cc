#include "calib/covariance.h"

#include <algorithm>
#include <cmath>

#include "calib/attention.h"
#include "proto/check.h"

namespace okv {
namespace {

constexpr uint32_t kRowsPerStep = 256;  // 256 rows x 128 channels x 8 B = 256 KiB: stays in L2.

// Head h of one [tokens_count, heads, dim] tensor's rows [first, first + rows_count), as float64.
void GatherRows(const float* tensor, uint32_t heads, uint32_t head, uint32_t dim, uint32_t first,
                uint32_t rows_count, double* rows) {
  for (uint32_t t = 0; t < rows_count; ++t) {
    const float* row = tensor + ((size_t{first} + t) * heads + head) * dim;
    std::copy(row, row + dim, rows + size_t{t} * dim);
  }
}

void Finish(double rows_count, uint32_t dim, Matrix* sum) {
  Symmetrize(dim, sum);
  Scale(1.0 / rows_count, sum);
}

// A tensor of a layer, [layer's tokens, heads, dim].
struct LayerTensor {
  const std::vector<float>& rows;
  uint32_t heads;
  uint32_t dim;
};

// Mean over `tokens` of x^T x for each head of `tensor`.
std::vector<Matrix> RowCovariance(const LayerTensor& tensor, const SequenceRange& tokens,
                                  ThreadPool* pool) {
  const uint32_t dim = tensor.dim;
  const uint32_t heads = tensor.heads;
  std::vector<Matrix> sums(heads, Matrix(size_t{dim} * dim, 0.0));
  pool->ParallelFor(heads, [&](size_t head) {
    std::vector<double> rows(size_t{kRowsPerStep} * dim);
    for (uint32_t done = 0; done < tokens.tokens_count; done += kRowsPerStep) {
      const uint32_t count = std::min(kRowsPerStep, tokens.tokens_count - done);
      GatherRows(tensor.rows.data(), heads, static_cast<uint32_t>(head), dim,
                 tokens.first_token + done, count, rows.data());
      AddOuterProducts(rows.data(), count, dim, &sums[head]);
    }
    Finish(tokens.tokens_count, dim, &sums[head]);
  });
  return sums;
}

}  // namespace

Matrix MeanMatrix(const std::vector<Matrix>& matrices) {
  OKV_CHECK(!matrices.empty());
  Matrix mean(matrices[0].size(), 0.0);
  for (const Matrix& matrix : matrices) {
    OKV_CHECK(matrix.size() == mean.size());
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += matrix[i];
  }
  Scale(1.0 / static_cast<double>(matrices.size()), &mean);
  return mean;
}

std::vector<Matrix> PoolQueryHeads(const std::vector<Matrix>& per_query_head, uint32_t kv_heads) {
  const size_t group = per_query_head.size() / kv_heads;
  std::vector<Matrix> pooled;
  for (uint32_t head = 0; head < kv_heads; ++head) {
    const auto begin = per_query_head.begin() + static_cast<ptrdiff_t>(head * group);
    pooled.push_back(MeanMatrix({begin, begin + static_cast<ptrdiff_t>(group)}));
  }
  return pooled;
}

SequenceRange AllTokens(const LayerDump& layer) {
  return {.first_token = 0, .tokens_count = layer.tokens_count};
}

std::vector<Matrix> QueryCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                    ThreadPool* pool) {
  const LayerTensor queries{.rows = layer.q, .heads = layer.query_heads, .dim = layer.head_dim};
  return PoolQueryHeads(RowCovariance(queries, tokens, pool), layer.kv_heads);
}
std::vector<Matrix> QueryCovariance(const LayerDump& layer, ThreadPool* pool) {
  return QueryCovariance(layer, AllTokens(layer), pool);
}

std::vector<Matrix> KeyCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                  ThreadPool* pool) {
  return RowCovariance({.rows = layer.k, .heads = layer.kv_heads, .dim = layer.head_dim}, tokens,
                       pool);
}
std::vector<Matrix> KeyCovariance(const LayerDump& layer, ThreadPool* pool) {
  return KeyCovariance(layer, AllTokens(layer), pool);
}

std::vector<SequenceRange> SampleSequences(const std::vector<uint32_t>& sequence_lengths,
                                           const ValueSample& sample) {
  std::vector<SequenceRange> ranges;
  uint32_t first = 0;
  uint32_t left = sample.tokens_max;
  for (const uint32_t length : sequence_lengths) {
    const uint32_t count = std::min({length, sample.sequence_tokens_max, left});
    if (count > 0) ranges.push_back({.first_token = first, .tokens_count = count});
    first += length;
    left -= count;
  }
  return ranges;
}

LayerDump ExtractRanges(const LayerDump& layer, const std::vector<SequenceRange>& ranges) {
  LayerDump part{.layer_id = layer.layer_id,
                 .tokens_count = 0,
                 .query_heads = layer.query_heads,
                 .kv_heads = layer.kv_heads,
                 .head_dim = layer.head_dim,
                 .sequence_lengths = {},
                 .q = {},
                 .k = {},
                 .v = {}};
  for (const SequenceRange& range : ranges) {
    const auto append = [&](const std::vector<float>& from, uint32_t heads,
                            std::vector<float>* to) {
      const size_t width = size_t{heads} * layer.head_dim;
      const float* first = from.data() + range.first_token * width;
      to->insert(to->end(), first, first + range.tokens_count * width);
    };
    append(layer.q, layer.query_heads, &part.q);
    append(layer.k, layer.kv_heads, &part.k);
    append(layer.v, layer.kv_heads, &part.v);
    part.sequence_lengths.push_back(range.tokens_count);
    part.tokens_count += range.tokens_count;
  }
  return part;
}

std::vector<Matrix> SoftmaxValueCovariance(const LayerDump& layer,
                                           const std::vector<SequenceRange>& ranges,
                                           ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  const uint32_t group = layer.query_heads / layer.kv_heads;
  double tokens_count = 0;
  for (const SequenceRange& range : ranges) tokens_count += range.tokens_count;
  OKV_CHECK(tokens_count > 0);

  std::vector<Matrix> sums(layer.query_heads, Matrix(size_t{dim} * dim, 0.0));
  pool->ParallelFor(layer.query_heads, [&](size_t head) {
    TiledAttention attention;
    std::vector<double> rows(size_t{TiledAttention::kTileRows} * dim);
    for (const SequenceRange& range : ranges) {
      const AttentionHead problem =
          layer.Head(range.first_token, range.tokens_count, static_cast<uint32_t>(head), group);
      attention.Run(problem, [&](uint32_t, uint32_t rows_count, const float* outputs) {
        std::copy(outputs, outputs + size_t{rows_count} * dim, rows.data());
        AddOuterProducts(rows.data(), rows_count, dim, &sums[head]);
      });
    }
    Finish(tokens_count, dim, &sums[head]);
  });
  return PoolQueryHeads(sums, layer.kv_heads);
}

std::vector<Matrix> EnergyValueCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                          const std::vector<Matrix>& query_covariance,
                                          ThreadPool* pool) {
  const uint32_t dim = layer.head_dim;
  OKV_CHECK(query_covariance.size() == 1 || query_covariance.size() == layer.kv_heads);
  std::vector<Matrix> sums(layer.kv_heads, Matrix(size_t{dim} * dim, 0.0));
  pool->ParallelFor(layer.kv_heads, [&](size_t head) {
    const Matrix& c_q = query_covariance[query_covariance.size() == 1 ? 0 : head];
    const uint32_t kv_head = static_cast<uint32_t>(head);
    std::vector<double> rows(size_t{kRowsPerStep} * dim);
    double weights_sum = 0;
    for (uint32_t done = 0; done < tokens.tokens_count; done += kRowsPerStep) {
      const uint32_t first = tokens.first_token + done;
      const uint32_t count = std::min(kRowsPerStep, tokens.tokens_count - done);
      GatherRows(layer.k.data(), layer.kv_heads, kv_head, dim, first, count, rows.data());
      const std::vector<double> weights = QuadraticForms(rows.data(), count, c_q, dim);
      GatherRows(layer.v.data(), layer.kv_heads, kv_head, dim, first, count, rows.data());
      for (uint32_t t = 0; t < count; ++t) {
        weights_sum += weights[t];
        const double root = std::sqrt(std::max(0.0, weights[t]));  // Rounding may give -1e-20.
        for (uint32_t c = 0; c < dim; ++c) rows[size_t{t} * dim + c] *= root;
      }
      AddOuterProducts(rows.data(), count, dim, &sums[head]);
    }
    // Weights of mean 1 (w / (sum w / n)) and a mean over n tokens: n cancels, sum w is left.
    Finish(weights_sum > 0 ? weights_sum : 1.0, dim, &sums[head]);
  });
  return sums;
}
std::vector<Matrix> EnergyValueCovariance(const LayerDump& layer,
                                          const std::vector<Matrix>& query_covariance,
                                          ThreadPool* pool) {
  return EnergyValueCovariance(layer, AllTokens(layer), query_covariance, pool);
}

}  // namespace okv
