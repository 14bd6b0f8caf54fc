#ifndef OKV_CALIB_REPORT_ATTENTION_H_
#define OKV_CALIB_REPORT_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "calib/dump.h"
#include "calib/history.h"
#include "calib/row_codec.h"

namespace okv {

// The rows of HeadHistory::Rows after a way through the codec, in the model's basis.
struct RestoredHistory {
  std::vector<float> k;  // [rows, dim]
  std::vector<float> v;  // [rows, dim]
};

// What restored history does to the attention of one KV head's queries.
struct AttentionErrors {
  uint64_t queries_count = 0;
  double kl_sum = 0;         // Of KL(p || p^) in nats, p^ the softmax weights with restored keys.
  SquaredError output_by_k;  // Keys restored, values exact: as HeadHistory::Judge.
  SquaredError output_by_v;
  SquaredError output;  // Both restored, as serving has it.

  double kl() const {
    return queries_count > 0 ? kl_sum / static_cast<double>(queries_count) : 0.0;
  }
  void Add(const AttentionErrors& other);
};

// The windows' tokens alone, each a sequence that begins with its sink's rows as HeadHistory has
// it.
LayerDump ExtractWindows(const LayerDump& layer, const HistoryShape& shape,
                         const std::vector<SequenceRange>& windows);

// Which queries are compared: every stride-th block of each sequence, as HeadHistory judges.
struct ComparedQueries {
  HistoryShape shape;
  uint32_t stride = 3;
};

// One AttentionErrors for each of `restored`. The exact attention is computed once for all of them:
// memory is the scores of one block of queries, twice. REQUIRES: single-threaded BLAS
// (UseSingleThreadedBlas); `windows` is of ExtractWindows, and each of `restored` has one row for
// each of HeadHistory::Rows.
std::vector<AttentionErrors> CompareAttention(const LayerDump& windows, uint32_t kv_head,
                                              const ComparedQueries& queries,
                                              absl::Span<const RestoredHistory> restored);

}  // namespace okv

#endif  // OKV_CALIB_REPORT_ATTENTION_H_
