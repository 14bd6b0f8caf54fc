#ifndef OKV_CALIB_COVARIANCE_H_
#define OKV_CALIB_COVARIANCE_H_

#include <cstdint>
#include <vector>

#include "calib/dump.h"
#include "calib/linalg.h"
#include "kernels/thread_pool.h"

namespace okv {

// The matrices whose eigenvectors turn K and V, one per KV head: neither centered nor ridged,
// accumulated in float64. Sums run in a fixed order, so no result depends on the number of threads.

// Consecutive tokens of a layer: a sequence, a piece of one, or several that follow each other.
struct SequenceRange {
  uint32_t first_token;
  uint32_t tokens_count;
  bool operator==(const SequenceRange&) const = default;
};
SequenceRange AllTokens(const LayerDump& layer);

// C_Q of KV head h = mean over tokens and over the query heads that read h of q^T q: the logits'
// error for a key error e is e C_Q e^T on average. [kv_heads][dim * dim] The second reads all
// tokens, here and below.
std::vector<Matrix> QueryCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                    ThreadPool* pool);
std::vector<Matrix> QueryCovariance(const LayerDump& layer, ThreadPool* pool);

// Mean over tokens of k^T k, one per KV head. Not centered: its first eigenvector is mostly the
// direction of the keys' mean.
std::vector<Matrix> KeyCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                  ThreadPool* pool);
std::vector<Matrix> KeyCovariance(const LayerDump& layer, ThreadPool* pool);

// Which tokens the softmax covariance reads. Its cost grows with the square of a sequence's length.
struct ValueSample {
  uint32_t tokens_max = 8192;  // Of a layer.
  uint32_t sequence_tokens_max =
      2048;  // Of a sequence: its first ones, which attend to nothing else.
};

// Sequences in order, each cut to its first sequence_tokens_max tokens, until tokens_max are taken
// (the last is cut to what is left).
std::vector<SequenceRange> SampleSequences(const std::vector<uint32_t>& sequence_lengths,
                                           const ValueSample& sample);

// The ranges' tokens alone: as many sequences as ranges.
LayerDump ExtractRanges(const LayerDump& layer, const std::vector<SequenceRange>& ranges);

// C_S of KV head h = mean over tokens and query heads of o^T o, where o = S V is the attention's
// output: (1/N) V^T S^T S V without the matrix S. Sequences do not see each other.
std::vector<Matrix> SoftmaxValueCovariance(const LayerDump& layer,
                                           const std::vector<SequenceRange>& ranges,
                                           ThreadPool* pool);

// The cheap stand-in: mean of w_t v_t^T v_t with w_t = k_t C_Q k_t^T, normalized to mean 1 in each
// KV head; no softmax and no mask. `query_covariance` has one matrix, or one per KV head.
std::vector<Matrix> EnergyValueCovariance(const LayerDump& layer, const SequenceRange& tokens,
                                          const std::vector<Matrix>& query_covariance,
                                          ThreadPool* pool);
std::vector<Matrix> EnergyValueCovariance(const LayerDump& layer,
                                          const std::vector<Matrix>& query_covariance,
                                          ThreadPool* pool);

// The mean of the matrices: all heads count alike.
Matrix MeanMatrix(const std::vector<Matrix>& matrices);

// One matrix per query head becomes one per KV head: the mean over the heads that read it.
std::vector<Matrix> PoolQueryHeads(const std::vector<Matrix>& per_query_head, uint32_t kv_heads);

}  // namespace okv

#endif  // OKV_CALIB_COVARIANCE_H_
