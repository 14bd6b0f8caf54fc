#ifndef OKV_CALIB_HISTORY_H_
#define OKV_CALIB_HISTORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/covariance.h"
#include "calib/dump.h"
#include "calib/row_codec.h"

namespace okv {

// The attention of one KV head's queries over [sink | INT2 history | recent], as serving has it:
// what its rows weigh, and what the codec does to its outputs.

// Which blocks a query in block b sees in BF16: j < sink / 64, or j >= b - recent / 64.
struct HistoryShape {
  uint32_t sink_tokens = 64;
  uint32_t recent_tokens = 256;
};

// Windows are pieces of the sequences, each looked at as if it were one. Where a window begins
// inside a sequence, the sequence's own first rows stand for the window's first sink_tokens: what
// lies between is left out, but every query has the sink that its sequence has.
//
// Windows of at most 2,048 tokens, long enough that a query sees INT2 history, in the dump's order:
// the first are fitted on, the next judge (what is chosen among the fitted), the last report (what
// the chosen one does). Text of one kind is not read for another.
struct HistoryWindows {
  HistoryShape shape;
  std::vector<SequenceRange> fit;
  std::vector<SequenceRange> judge;   // A quarter of all, one at least.
  std::vector<SequenceRange> report;  // An eighth, one at least.
  bool reports_apart = false;         // False: too few windows, `report` is `judge`.
  // All tokens in front of the first window that judges or reports. All tokens of the layer where
  // no window is left for fitting: then everything reads the same text.
  uint32_t fit_tokens = 0;
};
// Where no sequence is long enough for the recipe's windows, they are 0 and 0; where none has two
// blocks, the lists are empty. At most fit_max and judge_max windows, evenly spaced.
HistoryWindows SplitWindows(const std::vector<uint32_t>& sequence_lengths, uint32_t fit_max,
                            uint32_t judge_max);

// What each row of a tensor weighs in the outputs' error, to first order in the rows' errors e:
//   sum_t weights[t] |e_t - m|^2 + mean_factor |m|^2, m = sum_t masses[t] e_t.
// For values, with p the softmax weights of queries n: weights ~ sum_n p_nt^2, masses ~ sum_n p_nt,
// and what all rows share arrives undiminished. For keys a row is felt by how far its value is from
// the output: p_nt |v_t - o_n| |q_n| in place of p_nt; an error m of all history moves the outputs
// only as far as history and the BF16 rows differ.
struct RowWeights {
  std::vector<float> weights;  // One per row, sum 1.
  std::vector<float> masses;   // The same.
  double mean_factor = 1;
  // The squares' metrics, [dim, dim] of trace dim; empty: the identity. For keys the covariances of
  // the queries, each by what it feels: `metric` of single rows' errors, `mean_metric` of m.
  std::vector<float> metric = {};
  std::vector<float> mean_metric = {};
};

struct HeadWeights {
  RowWeights keys;
  RowWeights values;
  const RowWeights& tensor(KvTensor one) const { return one == KvTensor::kKeys ? keys : values; }
};

// One KV head over some windows. Thread-compatible; const calls may run at once.
class HeadHistory {
 public:
  // Copies the head's queries, keys and values; every judge_stride-th block of queries is judged,
  // 0: none. REQUIRES: windows are of the layer.
  HeadHistory(const LayerDump& layer, uint32_t kv_head, const HistoryShape& shape,
              const std::vector<SequenceRange>& windows, uint32_t judge_stride);

  // The rows that are history for some query: of each window, all behind the sink but the last.
  RowSample Rows(KvTensor tensor) const;
  // One weight for each of Rows(tensor), by the queries of every stride-th block. All equal where
  // no query looks at any of them.
  HeadWeights Weights(uint32_t stride) const;
  // RotatedError of Rows(tensor). kInvalidArgument naming token and head: a row that the codec
  // refuses.
  absl::StatusOr<SquaredError> CodecError(KvTensor tensor, const RowCodec& codec) const;
  // The outputs when history's rows of `tensor` went through the codec and the other tensor is
  // exact. kInvalidArgument naming token and head: a row that the codec refuses.
  absl::StatusOr<SquaredError> Judge(KvTensor tensor, const RowCodec& codec) const;
  // The same of each window; together they are Judge().
  absl::StatusOr<std::vector<SquaredError>> JudgeWindows(KvTensor tensor,
                                                         const RowCodec& codec) const;

 private:
  // A block of queries of one window.
  struct Block {
    uint32_t first_token;
    uint32_t history_end;        // History is [sink, history_end).
    uint32_t tokens_count;       // Keys it can see.
    uint32_t rows_count;         // Queries, of all query heads.
    std::vector<float> outputs;  // [rows_count, dim], exact; only of those that are judged.
  };
  struct Window {
    uint32_t first_token;  // Of the layer.
    uint32_t tokens_count;
    std::vector<float> q;  // [tokens_count * group, dim]
    std::vector<float> k;  // [tokens_count, dim]
    std::vector<float> v;  // [tokens_count, dim]
    std::vector<Block> judged;
    const std::vector<float>& tensor(KvTensor one) const { return one == KvTensor::kKeys ? k : v; }
  };
  // Sums of RowWeights over queries, before they are made shares.
  struct Influence {
    std::vector<double> weights;
    std::vector<double> masses;
    double shared = 0;
    std::vector<double> metric;       // [dim, dim]; keys only.
    std::vector<double> mean_metric;  // The same.
    RowWeights Shares() const;
  };
  // One query and what it sees of its window's history.
  struct SeenHistory {
    const float* q;
    const float* o;         // The attention's output.
    const float* p;         // Softmax weights of history, [count]
    const float* values;    // History's, [count, dim]
    const float* products;  // Of o with history's values, [count]
    const double* squares;  // The values' own, [count]
    size_t count;
    size_t first_row;  // Where the window's rows begin in the sums.
  };
  void AddQuery(const SeenHistory& seen, Influence* keys, Influence* values) const;
  std::vector<Block> Blocks(const Window& window, uint32_t stride) const;
  uint32_t HistoryEnd(const Window& window) const;
  RowSample WindowRows(const Window& window, KvTensor tensor) const;
  // Names the token and head of a row that the codec refused.
  absl::Status BadRowStatus(const absl::Status& status, const Window& window, KvTensor tensor,
                            size_t row) const;
  // Softmax weights and outputs of a block with `k_history` and `v_history` in place of history.
  void Attend(const Window& window, const Block& block, const float* k_history,
              const float* v_history, std::vector<float>* weights,
              std::vector<float>* outputs) const;

  const HistoryShape shape_;
  const uint32_t kv_head_;
  const uint32_t dim_;
  const uint32_t group_;  // Query heads.
  std::vector<Window> windows_;
};

}  // namespace okv

#endif  // OKV_CALIB_HISTORY_H_
