#include "cmd/engine/model.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cmd/engine/gguf.h"
#include "cmd/engine/matmul.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Rows of logits held at once by ForwardNll and ForwardAll: 32 x 49152 x 4 B = 6.3 MB.
constexpr size_t kLogitRows = 32;
// Rows that a thread takes at a time between matrix products.
constexpr size_t kTaskRows = 16;

// Reads the `llama.` metadata of one file; the first error stays.
class ConfigReader {
 public:
  explicit ConfigReader(const GgufFile& file) : file_(file) {}

  uint32_t Uint(const char* key, uint32_t max) {
    const absl::StatusOr<uint64_t> value = file_.Uint(key);
    if (!value.ok()) return Fail(value.status());
    if (*value < 1 || *value > max) {
      return Fail(Bad(absl::StrCat(key, " is ", *value, ", not 1 to ", max)));
    }
    return static_cast<uint32_t>(*value);
  }

  uint32_t UintOr(const char* key, uint32_t max, uint32_t otherwise) {
    return file_.Has(key) ? Uint(key, max) : otherwise;
  }

  double Positive(const char* key) {
    const absl::StatusOr<double> value = file_.Float(key);
    if (!value.ok()) return Fail(value.status());
    if (!(*value > 0) || *value > 1e12) return Fail(Bad(absl::StrCat(key, " is ", *value)));
    return *value;
  }

  void Require(bool condition, const std::string& what) {
    if (!condition) Fail(Bad(what));
  }

  const absl::Status& status() const { return status_; }

 private:
  absl::Status Bad(const std::string& what) const {
    return absl::InvalidArgumentError(absl::StrCat("'", file_.path(), "': ", what));
  }
  uint32_t Fail(const absl::Status& status) {
    status_.Update(status);
    return 0;
  }

  const GgufFile& file_;
  absl::Status status_;
};

absl::Status CheckRopeScaling(const GgufFile& file) {
  if (!file.Has("llama.rope.scaling.type")) return absl::OkStatus();
  OKV_ASSIGN_OR_RETURN(const std::string type, file.String("llama.rope.scaling.type"));
  if (type == "none") return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("'", file.path(), "': RoPE scaling '", type, "' is not implemented"));
}

absl::StatusOr<ModelConfig> ReadConfig(const GgufFile& file, uint32_t vocab) {
  OKV_ASSIGN_OR_RETURN(const std::string architecture, file.String("general.architecture"));
  if (architecture != "llama") {
    return absl::InvalidArgumentError(absl::StrCat("'", file.path(), "': architecture '",
                                                   architecture, "', only llama is implemented"));
  }
  ModelConfig config;
  OKV_ASSIGN_OR_RETURN(config.name, file.String("general.name"));
  OKV_RETURN_IF_ERROR(CheckRopeScaling(file));
  ConfigReader reader(file);
  config.layers = reader.Uint("llama.block_count", 1024);
  config.hidden = reader.Uint("llama.embedding_length", 1 << 16);
  config.feed_forward = reader.Uint("llama.feed_forward_length", 1 << 18);
  config.query_heads = reader.Uint("llama.attention.head_count", 1024);
  config.kv_heads = reader.UintOr("llama.attention.head_count_kv", 1024, config.query_heads);
  config.context_tokens = reader.Uint("llama.context_length", 1 << 22);
  config.rms_epsilon =
      static_cast<float>(reader.Positive("llama.attention.layer_norm_rms_epsilon"));
  // What Llama files leave out when it is the first models' value.
  config.rope_theta =
      file.Has("llama.rope.freq_base") ? reader.Positive("llama.rope.freq_base") : 10000.0;
  OKV_RETURN_IF_ERROR(reader.status());
  config.head_dim =
      reader.UintOr("llama.attention.key_length", 1024, config.hidden / config.query_heads);
  reader.Require(config.query_heads % config.kv_heads == 0, "KV heads do not divide query heads");
  reader.Require(config.head_dim % 32 == 0 && config.head_dim > 0,
                 "head dimension is no multiple of 32");
  reader.Require(config.hidden % 16 == 0 && config.feed_forward % 16 == 0 && vocab % 16 == 0,
                 "embedding, feed-forward or vocabulary size is no multiple of 16");
  reader.Require(
      reader.UintOr("llama.rope.dimension_count", 1024, config.head_dim) == config.head_dim,
      "RoPE turns only part of a head");
  reader.Require(
      reader.UintOr("llama.attention.value_length", 1024, config.head_dim) == config.head_dim,
      "key and value heads differ in size");
  OKV_RETURN_IF_ERROR(reader.status());
  config.vocab = vocab;
  const std::array<uint8_t, 32> digest = Sha256(file.bytes());
  config.weights_revision = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  return config;
}

}  // namespace

// Activations of one chunk. Owned by one Run.
struct Model::Workspace {
  Workspace(const ModelConfig& config, size_t rows_max)
      : residual(rows_max * config.hidden),
        normed(rows_max * config.hidden),
        qkv(rows_max * (config.query_heads + 2 * config.kv_heads) * config.head_dim),
        q(rows_max * config.query_heads * config.head_dim),
        k(rows_max * config.kv_heads * config.head_dim),
        v(rows_max * config.kv_heads * config.head_dim),
        attended(rows_max * config.query_heads * config.head_dim),
        gate_up(rows_max * 2 * config.feed_forward),
        gated(rows_max * config.feed_forward),
        delta(rows_max * config.hidden) {}

  size_t rows = 0;              // Of this chunk.
  std::vector<float> residual;  // [rows, hidden]
  std::vector<float> normed;    // [rows, hidden]
  std::vector<float> qkv;       // [rows, query_heads + 2 kv_heads, head_dim]
  std::vector<float> q;         // [rows, query_heads, head_dim], post-RoPE
  std::vector<uint16_t> k;      // [rows, kv_heads, head_dim] bf16, post-RoPE
  std::vector<uint16_t> v;      // [rows, kv_heads, head_dim] bf16
  std::vector<float> attended;  // [rows, query_heads, head_dim]
  std::vector<float> gate_up;   // [rows, 2 feed_forward]
  std::vector<float> gated;     // [rows, feed_forward]
  std::vector<float> delta;     // [rows, hidden], what a block adds to the residual stream
};

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& path, ThreadPool* pool) {
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Open(path));
  OKV_ASSIGN_OR_RETURN(const std::vector<absl::string_view>* tokens,
                       file->Strings("tokenizer.ggml.tokens"));
  OKV_ASSIGN_OR_RETURN(ModelConfig config,
                       ReadConfig(*file, static_cast<uint32_t>(tokens->size())));
  OKV_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Load(*file));
  OKV_ASSIGN_OR_RETURN(Weights weights, Weights::Load(*file,
                                                      {.layers = config.layers,
                                                       .hidden = config.hidden,
                                                       .feed_forward = config.feed_forward,
                                                       .query_heads = config.query_heads,
                                                       .kv_heads = config.kv_heads,
                                                       .head_dim = config.head_dim,
                                                       .vocab = config.vocab},
                                                      pool));
  return std::unique_ptr<Model>(
      new Model(std::move(config), std::move(tokenizer), std::move(weights), pool));
}

Model::Model(ModelConfig config, Tokenizer tokenizer, Weights weights, ThreadPool* pool)
    : config_(std::move(config)),
      tokenizer_(std::move(tokenizer)),
      weights_(std::move(weights)),
      rope_(config_.head_dim, config_.rope_theta, config_.context_tokens),
      pool_(pool) {}

absl::StatusOr<std::vector<float>> Model::Forward(absl::Span<const uint32_t> tokens, KvCache* cache,
                                                  uint32_t chunk_tokens) {
  std::vector<float> logits(config_.vocab);
  OKV_RETURN_IF_ERROR(
      Run(tokens, cache, chunk_tokens, [&](size_t index, size_t rows, const float* residual) {
        if (index + rows < tokens.size()) return;
        Logits(residual + (rows - 1) * config_.hidden, 1, logits.data());
      }));
  return logits;
}

absl::StatusOr<std::vector<float>> Model::ForwardNll(absl::Span<const uint32_t> tokens,
                                                     absl::Span<const uint32_t> next_tokens,
                                                     KvCache* cache, uint32_t chunk_tokens) {
  if (next_tokens.size() != tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(tokens.size(), " tokens with ", next_tokens.size(), " next tokens"));
  }
  for (const uint32_t token : next_tokens) {
    if (token >= config_.vocab) {
      return absl::InvalidArgumentError(absl::StrCat("next token ", token, " of ", config_.vocab));
    }
  }
  std::vector<float> nll(tokens.size());
  OKV_RETURN_IF_ERROR(ForwardAll(
      tokens, cache,
      [&](size_t index, absl::Span<const float> logits) {
        nll[index] = NegativeLogLikelihood(logits, next_tokens[index]);
      },
      chunk_tokens));
  return nll;
}

absl::Status Model::ForwardAll(absl::Span<const uint32_t> tokens, KvCache* cache,
                               const LogitsVisitor& visit, uint32_t chunk_tokens) {
  std::vector<float> logits(std::min(tokens.size(), kLogitRows) * config_.vocab);
  return Run(tokens, cache, chunk_tokens, [&](size_t index, size_t rows, const float* residual) {
    for (size_t first = 0; first < rows; first += kLogitRows) {
      const size_t block_rows = std::min(kLogitRows, rows - first);
      Logits(residual + first * config_.hidden, block_rows, logits.data());
      pool_->ParallelFor(block_rows, [&](size_t row) {
        visit(index + first + row,
              absl::MakeConstSpan(logits.data() + row * config_.vocab, config_.vocab));
      });
    }
  });
}

absl::Status Model::CheckTokens(absl::Span<const uint32_t> tokens, uint32_t position,
                                uint32_t chunk_tokens) const {
  if (tokens.empty()) return absl::InvalidArgumentError("no tokens to feed");
  if (chunk_tokens == 0) return absl::InvalidArgumentError("a prefill chunk of 0 tokens");
  if (position > config_.context_tokens || tokens.size() > config_.context_tokens - position) {
    return absl::InvalidArgumentError(absl::StrCat(tokens.size(), " tokens from position ",
                                                   position, " on: model '", config_.name, "' has ",
                                                   config_.context_tokens));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= config_.vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", i, " is ", tokens[i], ", the vocabulary has ", config_.vocab));
    }
  }
  return absl::OkStatus();
}

absl::Status Model::Run(absl::Span<const uint32_t> tokens, KvCache* cache, uint32_t chunk_tokens,
                        const AfterChunk& after) {
  const uint32_t start = cache->tokens_count();
  OKV_RETURN_IF_ERROR(CheckTokens(tokens, start, chunk_tokens));
  Workspace work(config_, std::min<size_t>(tokens.size(), chunk_tokens));
  for (size_t index = 0; index < tokens.size(); index += work.rows) {
    Embed(tokens.subspan(index, chunk_tokens), &work);
    const uint32_t position = start + static_cast<uint32_t>(index);
    OKV_CHECK(cache->tokens_count() == position);
    for (uint32_t layer = 0; layer < config_.layers; ++layer) {
      OKV_RETURN_IF_ERROR(Attention(layer, position, cache, &work));
      FeedForward(layer, &work);
    }
    after(index, work.rows, work.residual.data());
  }
  return absl::OkStatus();
}

void Model::Embed(absl::Span<const uint32_t> tokens, Workspace* work) {
  work->rows = tokens.size();
  for (size_t row = 0; row < tokens.size(); ++row) {
    weights_.embedding.CopyRow(
        tokens[row], absl::MakeSpan(work->residual.data() + row * config_.hidden, config_.hidden));
  }
}

absl::Status Model::Attention(uint32_t layer, uint32_t position, KvCache* cache, Workspace* work) {
  const LayerWeights& weights = weights_.layers[layer];
  const size_t head_dim = config_.head_dim;
  const size_t q_size = config_.query_heads * head_dim;
  const size_t kv_size = config_.kv_heads * head_dim;
  const size_t qkv_size = q_size + 2 * kv_size;
  NormRows(work->residual.data(), weights.attention_norm, work->rows, work->normed.data());
  MatMul({.x = work->normed.data(),
          .x_stride = config_.hidden,
          .rows_count = work->rows,
          .w = &weights.qkv,
          .y = work->qkv.data(),
          .y_stride = qkv_size},
         pool_);
  ForEachRow(work->rows, [&](size_t row) {
    float* qkv = work->qkv.data() + row * qkv_size;
    for (size_t offset = 0; offset < q_size + kv_size; offset += head_dim) {
      rope_.Apply(position + static_cast<uint32_t>(row), qkv + offset);
    }
    std::memcpy(work->q.data() + row * q_size, qkv, q_size * sizeof(float));
    for (size_t i = 0; i < kv_size; ++i) {
      work->k[row * kv_size + i] = FloatToBf16(qkv[q_size + i]);
      work->v[row * kv_size + i] = FloatToBf16(qkv[q_size + kv_size + i]);
    }
  });
  OKV_RETURN_IF_ERROR(cache->Append({.layer = layer,
                                     .tokens_count = static_cast<uint32_t>(work->rows),
                                     .q = work->q.data(),
                                     .k = work->k.data(),
                                     .v = work->v.data(),
                                     .out = work->attended.data()}));
  MatMul({.x = work->attended.data(),
          .x_stride = q_size,
          .rows_count = work->rows,
          .w = &weights.attention_out,
          .y = work->delta.data(),
          .y_stride = config_.hidden},
         pool_);
  for (size_t i = 0; i < work->rows * config_.hidden; ++i) work->residual[i] += work->delta[i];
  return absl::OkStatus();
}

void Model::FeedForward(uint32_t layer, Workspace* work) {
  const LayerWeights& weights = weights_.layers[layer];
  const size_t feed_forward = config_.feed_forward;
  NormRows(work->residual.data(), weights.feed_forward_norm, work->rows, work->normed.data());
  MatMul({.x = work->normed.data(),
          .x_stride = config_.hidden,
          .rows_count = work->rows,
          .w = &weights.gate_up,
          .y = work->gate_up.data(),
          .y_stride = 2 * feed_forward},
         pool_);
  ForEachRow(work->rows, [&](size_t row) {
    const float* gate = work->gate_up.data() + row * 2 * feed_forward;
    SwiGlu(absl::MakeConstSpan(gate, feed_forward),
           absl::MakeConstSpan(gate + feed_forward, feed_forward),
           absl::MakeSpan(work->gated.data() + row * feed_forward, feed_forward));
  });
  MatMul({.x = work->gated.data(),
          .x_stride = feed_forward,
          .rows_count = work->rows,
          .w = &weights.down,
          .y = work->delta.data(),
          .y_stride = config_.hidden},
         pool_);
  for (size_t i = 0; i < work->rows * config_.hidden; ++i) work->residual[i] += work->delta[i];
}

void Model::Logits(const float* residual, size_t rows, float* logits) {
  std::vector<float> normed(rows * config_.hidden);
  NormRows(residual, weights_.output_norm, rows, normed.data());
  MatMul({.x = normed.data(),
          .x_stride = config_.hidden,
          .rows_count = rows,
          .w = &weights_.output(),
          .y = logits,
          .y_stride = config_.vocab},
         pool_);
}

void Model::NormRows(const float* x, const std::vector<float>& weight, size_t rows, float* y) {
  const size_t size = config_.hidden;
  ForEachRow(rows, [&](size_t row) {
    RmsNorm(absl::MakeConstSpan(x + row * size, size), weight, config_.rms_epsilon,
            absl::MakeSpan(y + row * size, size));
  });
}

void Model::ForEachRow(size_t rows, const std::function<void(size_t)>& task) {
  pool_->ParallelFor((rows + kTaskRows - 1) / kTaskRows, [&](size_t block) {
    const size_t end = std::min(rows, (block + 1) * kTaskRows);
    for (size_t row = block * kTaskRows; row < end; ++row) task(row);
  });
}

}  // namespace okv
