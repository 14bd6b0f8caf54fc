#ifndef OKV_CMD_ENGINE_WEIGHTS_H_
#define OKV_CMD_ENGINE_WEIGHTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/engine/gguf.h"
#include "cmd/engine/matmul.h"
#include "kernels/thread_pool.h"

namespace okv {

// What `ModelConfig` and the tensors must agree on. A plain value.
struct WeightShapes {
  uint32_t layers;
  uint32_t hidden;  // Width of the residual stream.
  uint32_t feed_forward;
  uint32_t query_heads;
  uint32_t kv_heads;
  uint32_t head_dim;
  uint32_t vocab;
};

struct LayerWeights {
  std::vector<float> attention_norm;     // [hidden]
  PackedMatrix qkv;                      // [(query_heads + 2 kv_heads) * head_dim, hidden]
  PackedMatrix attention_out;            // [hidden, query_heads * head_dim]
  std::vector<float> feed_forward_norm;  // [hidden]
  PackedMatrix gate_up;                  // [2 feed_forward, hidden]
  PackedMatrix down;                     // [hidden, feed_forward]
};

// A Llama's weights in fp32, dequantized once. Rows of the Q and K projections are in the
// half-split RoPE basis (pairs i, i + head_dim / 2), which is the one that calibration and other
// engines use; GGUF files interleave them (pairs 2 i, 2 i + 1). A plain value, immutable after
// Load.
struct Weights {
  PackedMatrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> output_norm;  // [hidden]
  PackedMatrix separate_output;    // [vocab, hidden]; empty when the embedding is the head too

  const PackedMatrix& output() const {
    return separate_output.outputs() > 0 ? separate_output : embedding;
  }

  // kInvalidArgument naming the tensor: missing, of another shape, or one that this model family
  // does not have (its effect would silently be left out).
  static absl::StatusOr<Weights> Load(const GgufFile& file, const WeightShapes& shapes,
                                      ThreadPool* pool);
};

// Row `row` of `tensor` in fp32: [tensor.columns].
void DequantizeRow(const GgufTensor& tensor, uint64_t row, absl::Span<float> out);

}  // namespace okv

#endif  // OKV_CMD_ENGINE_WEIGHTS_H_
