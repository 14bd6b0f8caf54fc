#ifndef OKV_CMD_BENCH_FAKE_QUANTIZED_CACHE_H_
#define OKV_CMD_BENCH_FAKE_QUANTIZED_CACHE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cmd/engine/model.h"
#include "kernels/attend.h"
#include "kernels/thread_pool.h"
#include "proto/format.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"

namespace okv {

// What a codec of `bits` bits would make of rotated rows, for measurements alone: each group of
// group_size elements of `row` becomes offset + s * code, rounded to bf16, by the int2 codec's rule
// with 2^bits - 1 steps instead of 3. kInvalidArgument: NaN or Inf, or a range that has none.
// REQUIRES: row.size() is a multiple of group_size; 1 <= bits <= 16.
absl::Status FakeQuantizeRow(uint32_t group_size, uint32_t bits, absl::Span<uint16_t> row);

// A KV cache with the windows, rotations, moments of demotion and attention kernel of a Sequence,
// but for two things: history is FakeQuantizeRow's bf16 values instead of int2 pages, and nothing
// is clipped (clipping pays only where codes are few). It stores as much as BF16 and saves nothing.
// Thread-compatible. `rotations` and `pool` outlive it.
class FakeQuantizedCache final : public KvCache {
 public:
  // REQUIRES: format.Validate() and rotations->CheckMatches(format) are OK; 1 <= bits <= 16.
  FakeQuantizedCache(const ModelConfig& config, const Format& format, const RotationSet* rotations,
                     uint32_t bits, ThreadPool* pool);

  // kInvalidArgument for NaN or Inf in a row to be demoted; the cache is then unusable.
  absl::Status Append(const AppendRows& rows) override;
  uint32_t tokens_count() const override;

 private:
  struct Layer {
    uint32_t tokens_count = 0;
    std::vector<std::vector<uint16_t>> pages = {};  // By block: bf16 pages of page_layout.h.
  };

  absl::Status AppendTile(const AppendRows& rows, uint32_t first, uint32_t count);
  absl::Status DemotePage(std::vector<uint16_t>* page) const;
  void StoreRows(const AppendRows& rows, uint32_t first, uint32_t count);
  absl::Status AttendRows(const AppendRows& rows, uint32_t first, uint32_t count);

  const uint32_t query_heads_;
  const Format format_;
  const PageLayout layout_;
  const RotationSet* const rotations_;
  const uint32_t bits_;
  ThreadPool* const pool_;
  std::vector<Layer> layers_;
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_FAKE_QUANTIZED_CACHE_H_
