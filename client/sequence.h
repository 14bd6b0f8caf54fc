#ifndef OKV_CLIENT_SEQUENCE_H_
#define OKV_CLIENT_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/drift.h"
#include "kernels/attend.h"
#include "kernels/thread_pool.h"
#include "proto/format.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"

namespace okv {

// 16 Mi tokens: far beyond any model, and no index computed from it overflows.
inline constexpr uint32_t kSequenceTokensMax = uint32_t{1} << 24;

struct SequenceOptions {
  Format format;             // Geometry, windows, group size. Validated.
  uint32_t query_heads = 0;  // A multiple of format.kv_heads.
  float softmax_scale = 0;
  uint32_t tokens_max = 0;  // The longest sequence this cache may hold.
  // Samples what is demoted; null: nothing is. Outlives the sequence.
  DriftMonitor* drift = nullptr;
  // Sequences of different salts sample different rows; one salt always the same. With one for all,
  // short sequences would never show some of their heads.
  uint64_t drift_salt = 0;

  absl::Status Validate() const;
};

// Post-RoPE rows of consecutive tokens of one layer.
struct AppendRows {
  uint32_t layer;  // 0-based position in format.layer_ids.
  uint32_t tokens_count;
  const float* q;     // [tokens_count, query_heads, head_dim] fp32
  const uint16_t* k;  // [tokens_count, kv_heads, head_dim] bf16, in the model's own basis
  const uint16_t* v;  // [tokens_count, kv_heads, head_dim] bf16
  float* out;         // [tokens_count, query_heads, head_dim] fp32: attention's result
};

// The whole KV cache of one sequence in the memory of a decode worker: sink (bf16), history (int2
// pages), recent (bf16 ring), and the design's view over them: with S = sink_blocks, W =
// recent_blocks, a query in block b sees block j in bf16 if j < S or j >= b - W, otherwise in int2.
// Every layer moves on its own, so that an engine may run one layer over a long prefill chunk and
// then the next; a token is complete when the last layer has it. Thread-compatible. `rotations` and
// `pool` outlive it.
class Sequence {
 public:
  // kInvalidArgument for bad options, a drift monitor of other rotations among them;
  // kFailedPrecondition when `rotations` does not match the format.
  static absl::StatusOr<std::unique_ptr<Sequence>> Create(const SequenceOptions& options,
                                                          const RotationSet* rotations,
                                                          ThreadPool* pool);
  ~Sequence();

  // Appends the rows to rows.layer, demoting exactly when a token opens a new block, and attends
  // each row's queries over its view. Any split of the same tokens into calls gives the same bits.
  // kInvalidArgument: NaN or Inf in K or V (names layer, token, head); the sequence is then
  // unusable. kResourceExhausted: more than tokens_max tokens; nothing was appended.
  absl::Status Append(const AppendRows& rows);

  // Tokens that every layer has.
  uint32_t tokens_count() const;
  uint32_t full_blocks() const { return tokens_count() / kBlockTokens; }

  // Payload of a sealed int2 block: S <= index and every layer demoted it. [block_bytes(kInt2)].
  // kNotFound when it is not sealed yet. Valid until the Sequence goes.
  absl::StatusOr<absl::Span<const uint8_t>> Int2Block(BlockIndex index) const;

  // Copies a bf16 block out: a sink block, or one still in the ring (index >= newest - W).
  // `payload` is [block_bytes(kBf16)]. kNotFound when the block is incomplete or gone.
  absl::Status CopyBf16Block(BlockIndex index, absl::Span<uint8_t> payload) const;

  // Seals a full recent block into `payload` as int2 without demoting it: what a finished sequence
  // stores of its last blocks. Same bytes as a demotion would give. kNotFound as above.
  absl::Status SealBlock(BlockIndex index, absl::Span<uint8_t> payload) const;

  // Starts an empty sequence at resume point `boundary` (a block index): blocks 0..S-1 and
  // max(S, boundary - W)..boundary-1 arrive as bf16, S..boundary-W-1 as int2. The caller writes
  // each payload into the memory that these give, then calls FinishResume. REQUIRES: tokens_count()
  // == 0.
  absl::Status StartResume(BlockIndex boundary);
  // Where a fetched payload goes: [block_bytes(codec)]. kInvalidArgument for a block that this
  // boundary does not need.
  absl::StatusOr<absl::Span<uint8_t>> ResumeBuffer(BlockIndex index, Codec codec);
  // After every buffer was filled: the sequence holds boundary * 64 tokens.
  absl::Status FinishResume();

  const PageLayout& layout() const;

 private:
  struct State;
  explicit Sequence(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace okv

#endif  // OKV_CLIENT_SEQUENCE_H_
