#ifndef OKV_TESTS_SUPPORT_TINY_MODEL_H_
#define OKV_TESTS_SUPPORT_TINY_MODEL_H_

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cmd/engine/gguf.h"
#include "cmd/engine/model.h"

namespace okv::testing_support {

// Spells a GGUF file piece by piece, right or wrong.
class GgufWriter {
 public:
  explicit GgufWriter(std::string magic = "GGUF", uint32_t version = 3);

  GgufWriter& Uint32(const std::string& key, uint32_t value);
  GgufWriter& Float32(const std::string& key, float value);
  GgufWriter& Bool(const std::string& key, bool value);
  GgufWriter& String(const std::string& key, const std::string& value);
  GgufWriter& Strings(const std::string& key, const std::vector<std::string>& values);
  GgufWriter& Int32s(const std::string& key, const std::vector<int32_t>& values);
  // A value of any type, already spelled.
  GgufWriter& Raw(const std::string& key, GgufType type, const std::string& bytes);
  GgufWriter& Tensor(const std::string& name, const std::vector<uint64_t>& dims, uint32_t type,
                     const std::string& data);

  std::string Finish() const;

 private:
  struct TensorEntry {
    std::string name;
    std::vector<uint64_t> dims;
    uint32_t type;
    std::string data;
  };
  std::string head_;
  uint64_t values_count_ = 0;
  std::string values_;
  std::vector<TensorEntry> tensors_;
};

template <typename T>
std::string BytesOf(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

// Writes `bytes` under a directory of this process, which goes with it; the path.
std::string WriteTempFile(const std::string& name, const std::string& bytes);

// A random Llama: 2 layers, 4 query and 2 KV heads of 64, hidden 256, feed-forward 96, 288 tokens
// (256 bytes, 30 merges, 2 control tokens); every tensor type is in use.
struct TinyModelOptions {
  uint64_t seed = 1;
  bool separate_output = false;
  std::string architecture = "llama";
  std::string without_tensor{};  // Left out.
  std::string extra_tensor{};    // Added, [16].
  std::string rope_scaling{};    // llama.rope.scaling.type, if not empty.
};

struct TinyModel {
  static constexpr uint32_t kLayers = 2, kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64;
  static constexpr uint32_t kHidden = 256, kFeedForward = 96, kVocab = 288, kContext = 2048;
  static constexpr double kTheta = 10000;
  static constexpr float kEpsilon = 1e-5f;

  std::string bytes;                                  // The GGUF file.
  std::map<std::string, std::vector<float>> tensors;  // By name, dequantized, as stored.

  // Logits behind each token, [tokens, vocab]: the whole sequence at once in double precision, RoPE
  // on interleaved pairs as the file stores them.
  std::vector<std::vector<double>> Logits(const std::vector<uint32_t>& tokens) const;
};

TinyModel MakeTinyModel(const TinyModelOptions& options);

// Attention over plain bf16 K and V in fp32, each row by itself.
class ExactCache final : public KvCache {
 public:
  ExactCache(uint32_t layers, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim);
  explicit ExactCache(const ModelConfig& config)
      : ExactCache(config.layers, config.query_heads, config.kv_heads, config.head_dim) {}

  absl::Status Append(const AppendRows& rows) override;
  uint32_t tokens_count() const override;

  // Every K and V bit, to compare caches.
  bool SameBits(const ExactCache& other) const { return k_ == other.k_ && v_ == other.v_; }

 private:
  const uint32_t query_heads_, kv_heads_, head_dim_;
  std::vector<std::vector<uint16_t>> k_;  // By layer: [tokens, kv_heads, head_dim]
  std::vector<std::vector<uint16_t>> v_;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_SUPPORT_TINY_MODEL_H_
