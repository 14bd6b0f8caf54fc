#ifndef OKV_CMD_ENGINE_MODEL_H_
#define OKV_CMD_ENGINE_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/sequence.h"
#include "cmd/engine/row_ops.h"
#include "cmd/engine/tokenizer.h"
#include "cmd/engine/weights.h"
#include "kernels/thread_pool.h"

namespace okv {

// All that the engine remembers of a sequence, and its attention. A decorator sees the post-RoPE Q,
// K and V of every layer: what calibration dumps.
class KvCache {
 public:
  virtual ~KvCache() = default;

  // Appends the rows to rows.layer and writes attention's result to rows.out. Row-invariant: any
  // split of the same tokens into calls gives the same bits. An error ends the forward pass.
  virtual absl::Status Append(const AppendRows& rows) = 0;

  // Tokens that every layer has: the position of the next one.
  virtual uint32_t tokens_count() const = 0;
};

// What a GGUF file says about its model. A plain value.
struct ModelConfig {
  std::string name;              // general.name
  std::string weights_revision;  // SHA-256 of the file, hex
  uint32_t layers = 0;
  uint32_t hidden = 0;
  uint32_t feed_forward = 0;
  uint32_t query_heads = 0;  // A multiple of kv_heads.
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  double rope_theta = 0;
  std::string rope_scaling;  // "" = none, the only one implemented
  float rms_epsilon = 0;
  uint32_t vocab = 0;
  uint32_t context_tokens = 0;  // Positions that the model was trained for.
};

// The most tokens that go through the layers at once: memory for activations is bounded by it. It
// does not change a bit of any result.
inline constexpr uint32_t kPrefillChunkDefault = 512;

// A decoder of the Llama family on the CPU, in fp32: RMSNorm, rotary positions, grouped-query
// attention, SwiGLU. Every step computes a row from its own row alone and in one fixed order, so
// logits do not depend on how a sequence was cut into chunks or calls, nor on the number of
// threads. Thread-compatible: one call at a time. `pool` outlives it.
class Model {
 public:
  // kNotFound: no such file. kInvalidArgument: not GGUF, another architecture, a missing or foreign
  // tensor, a shape that does not fit. kUnimplemented: a RoPE scaling. kDataLoss: a truncated file.
  // Every message names the file and the thing. Blocks: reads the file and dequantizes the weights.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& path, ThreadPool* pool);

  const ModelConfig& config() const { return config_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }

  // Feeds `tokens`, the first at position cache->tokens_count(), and gives the logits behind the
  // last: [vocab]. kInvalidArgument: no tokens, a token outside the vocabulary, positions behind
  // context_tokens; the cache was not touched. Otherwise the cache's own errors; it may then hold
  // part of the tokens in some layers.
  absl::StatusOr<std::vector<float>> Forward(absl::Span<const uint32_t> tokens, KvCache* cache,
                                             uint32_t chunk_tokens = kPrefillChunkDefault);

  // Feeds `tokens` and gives -log p(next_tokens[i] | all up to tokens[i]) for every i, without
  // holding more than a few rows of logits. Errors as Forward; kInvalidArgument when sizes differ.
  absl::StatusOr<std::vector<float>> ForwardNll(absl::Span<const uint32_t> tokens,
                                                absl::Span<const uint32_t> next_tokens,
                                                KvCache* cache,
                                                uint32_t chunk_tokens = kPrefillChunkDefault);

  // Feeds `tokens` and hands the logits behind each to `visit`, in any order, from several threads.
  // Errors as Forward.
  using LogitsVisitor = std::function<void(size_t index, absl::Span<const float> logits)>;
  absl::Status ForwardAll(absl::Span<const uint32_t> tokens, KvCache* cache,
                          const LogitsVisitor& visit, uint32_t chunk_tokens = kPrefillChunkDefault);

 private:
  struct Workspace;

  Model(ModelConfig config, Tokenizer tokenizer, Weights weights, ThreadPool* pool);

  absl::Status CheckTokens(absl::Span<const uint32_t> tokens, uint32_t position,
                           uint32_t chunk_tokens) const;
  // Feeds all tokens; after each chunk calls `after` with the index of its first token and its rows
  // in the residual stream, [rows, hidden].
  using AfterChunk = std::function<void(size_t index, size_t rows, const float* residual)>;
  absl::Status Run(absl::Span<const uint32_t> tokens, KvCache* cache, uint32_t chunk_tokens,
                   const AfterChunk& after);
  void Embed(absl::Span<const uint32_t> tokens, Workspace* work);
  absl::Status Attention(uint32_t layer, uint32_t position, KvCache* cache, Workspace* work);
  void FeedForward(uint32_t layer, Workspace* work);
  // Logits of `rows` rows of the residual stream: [rows, vocab] to `logits`.
  void Logits(const float* residual, size_t rows, float* logits);
  void NormRows(const float* x, const std::vector<float>& weight, size_t rows, float* y);
  void ForEachRow(size_t rows, const std::function<void(size_t)>& task);

  const ModelConfig config_;
  const Tokenizer tokenizer_;
  const Weights weights_;
  const Rope rope_;
  ThreadPool* const pool_;
};

}  // namespace okv

#endif  // OKV_CMD_ENGINE_MODEL_H_
