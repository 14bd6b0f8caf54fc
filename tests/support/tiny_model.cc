#include "tests/support/tiny_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "proto/bf16.h"

namespace okv::testing_support {
namespace {

constexpr uint64_t kAlignment = 32;

std::string Sized(const std::string& text) {
  return BytesOf(static_cast<uint64_t>(text.size())) + text;
}

void Pad(std::string* bytes) {
  bytes->resize((bytes->size() + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace

GgufWriter::GgufWriter(std::string magic, uint32_t version)
    : head_(std::move(magic) + BytesOf(version)) {}

GgufWriter& GgufWriter::Raw(const std::string& key, GgufType type, const std::string& bytes) {
  ++values_count_;
  values_ += Sized(key) + BytesOf(static_cast<uint32_t>(type)) + bytes;
  return *this;
}
GgufWriter& GgufWriter::Uint32(const std::string& key, uint32_t value) {
  return Raw(key, GgufType::kUint32, BytesOf(value));
}
GgufWriter& GgufWriter::Float32(const std::string& key, float value) {
  return Raw(key, GgufType::kFloat32, BytesOf(value));
}
GgufWriter& GgufWriter::Bool(const std::string& key, bool value) {
  return Raw(key, GgufType::kBool, BytesOf(static_cast<uint8_t>(value)));
}
GgufWriter& GgufWriter::String(const std::string& key, const std::string& value) {
  return Raw(key, GgufType::kString, Sized(value));
}
GgufWriter& GgufWriter::Strings(const std::string& key, const std::vector<std::string>& values) {
  std::string bytes = BytesOf(static_cast<uint32_t>(GgufType::kString)) +
                      BytesOf(static_cast<uint64_t>(values.size()));
  for (const std::string& value : values) bytes += Sized(value);
  return Raw(key, GgufType::kArray, bytes);
}
GgufWriter& GgufWriter::Int32s(const std::string& key, const std::vector<int32_t>& values) {
  std::string bytes = BytesOf(static_cast<uint32_t>(GgufType::kInt32)) +
                      BytesOf(static_cast<uint64_t>(values.size()));
  for (const int32_t value : values) bytes += BytesOf(value);
  return Raw(key, GgufType::kArray, bytes);
}
GgufWriter& GgufWriter::Tensor(const std::string& name, const std::vector<uint64_t>& dims,
                               uint32_t type, const std::string& data) {
  tensors_.push_back({name, dims, type, data});
  return *this;
}

std::string GgufWriter::Finish() const {
  std::string bytes =
      head_ + BytesOf(static_cast<uint64_t>(tensors_.size())) + BytesOf(values_count_) + values_;
  std::string data;
  for (const TensorEntry& tensor : tensors_) {
    bytes += Sized(tensor.name) + BytesOf(static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) bytes += BytesOf(dim);
    bytes += BytesOf(tensor.type) + BytesOf(static_cast<uint64_t>(data.size()));
    data += tensor.data;
    Pad(&data);
  }
  Pad(&bytes);
  return bytes + data;
}

namespace {

// A directory of this process, removed when it ends.
struct TempDirectory {
  TempDirectory() { std::filesystem::create_directories(path); }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  const std::filesystem::path path =
      std::filesystem::path(::testing::TempDir()) / absl::StrCat("okv_engine_test_", getpid());
};

}  // namespace

std::string WriteTempFile(const std::string& name, const std::string& bytes) {
  static const TempDirectory directory;
  const std::string path = directory.path / name;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  EXPECT_TRUE(file) << path;
  return path;
}

namespace {

// Draws tensors and keeps what they mean.
class TensorMaker {
 public:
  TensorMaker(const TinyModelOptions& options, TinyModel* model, GgufWriter* writer)
      : options_(options), model_(model), writer_(writer), random_(options.seed) {}

  void Add(const std::string& name, uint64_t rows, uint64_t columns, TensorType type) {
    std::string data;
    std::vector<float> values;
    for (uint64_t i = 0; i < rows * columns;) i += AddUnit(type, &data, &values);
    if (name == options_.without_tensor) return;
    std::vector<uint64_t> dims = {columns};
    if (rows > 1) dims.push_back(rows);
    writer_->Tensor(name, dims, static_cast<uint32_t>(type), data);
    model_->tensors[name] = std::move(values);
  }

 private:
  // A half of magnitude 2^exponent to 2^(exponent + 1): its bits and its value.
  std::pair<uint16_t, float> Half(int exponent, bool negative) {
    const uint32_t fraction = random_() & 0x3ffu;
    const float value = std::ldexp(1.0f + static_cast<float>(fraction) / 1024, exponent);
    const uint32_t bits =
        (negative ? 0x8000u : 0u) | static_cast<uint32_t>(exponent + 15) << 10 | fraction;
    return {static_cast<uint16_t>(bits), negative ? -value : value};
  }

  uint64_t AddUnit(TensorType type, std::string* data, std::vector<float>* values) {
    if (type == TensorType::kF32) {
      const float value = 0.5f + static_cast<float>(random_() % 1024) / 1024;
      *data += BytesOf(value);
      values->push_back(value);
      return 1;
    }
    if (type == TensorType::kF16) {
      const auto [bits, value] = Half(-5, (random_() & 1) != 0);
      *data += BytesOf(bits);
      values->push_back(value);
      return 1;
    }
    const auto [scale_bits, scale] = Half(type == TensorType::kQ4_1 ? -7 : -11, false);
    *data += BytesOf(scale_bits);
    if (type == TensorType::kQ8_0) {
      for (int i = 0; i < 32; ++i) {
        const int8_t code = static_cast<int8_t>(random_() % 255 - 127);
        *data += BytesOf(code);
        values->push_back(scale * code);
      }
      return 32;
    }
    const auto [minimum_bits, minimum] = Half(-4, true);
    *data += BytesOf(minimum_bits);
    float group[32];
    for (int i = 0; i < 16; ++i) {
      const uint8_t pair = static_cast<uint8_t>(random_());
      *data += BytesOf(pair);
      group[i] = scale * (pair & 15) + minimum;
      group[16 + i] = scale * (pair >> 4) + minimum;
    }
    values->insert(values->end(), group, group + 32);
    return 32;
  }

  const TinyModelOptions& options_;
  TinyModel* const model_;
  GgufWriter* const writer_;
  std::mt19937_64 random_;
};

// 256 bytes by their printable names, 30 merges that build "the" and friends, 2 control tokens.
void AddTokenizer(GgufWriter* writer) {
  std::vector<std::string> tokens = {"<|end|>", "<|start|>"};
  std::vector<int32_t> types = {3, 3};
  uint32_t next = 256;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte != 0xad);
    const uint32_t point = printable ? byte : next++;
    tokens.push_back(point < 0x80 ? std::string(1, static_cast<char>(point))
                                  : std::string{static_cast<char>(0xc0 | point >> 6),
                                                static_cast<char>(0x80 | (point & 0x3f))});
  }
  const std::string space = "\xc4\xa0";  // U+0120
  std::vector<std::string> merges = {"t h", "th e", space + " the", "i n", "a n", "an d"};
  for (char letter = 'a'; merges.size() < 30; ++letter) {
    merges.push_back(space + " " + letter);
  }
  for (const std::string& merge : merges) {
    const size_t gap = merge.find(' ');
    tokens.push_back(merge.substr(0, gap) + merge.substr(gap + 1));
  }
  types.resize(tokens.size(), 1);
  writer->String("tokenizer.ggml.model", "gpt2")
      .String("tokenizer.ggml.pre", "smollm")
      .Strings("tokenizer.ggml.tokens", tokens)
      .Int32s("tokenizer.ggml.token_type", types)
      .Strings("tokenizer.ggml.merges", merges)
      .Uint32("tokenizer.ggml.bos_token_id", 1)
      .Uint32("tokenizer.ggml.eos_token_id", 0);
}

}  // namespace

TinyModel MakeTinyModel(const TinyModelOptions& options) {
  using M = TinyModel;
  TinyModel model;
  GgufWriter writer;
  writer.String("general.architecture", options.architecture)
      .String("general.name", "tiny")
      .Uint32("llama.block_count", M::kLayers)
      .Uint32("llama.context_length", M::kContext)
      .Uint32("llama.embedding_length", M::kHidden)
      .Uint32("llama.feed_forward_length", M::kFeedForward)
      .Uint32("llama.attention.head_count", M::kQueryHeads)
      .Uint32("llama.attention.head_count_kv", M::kKvHeads)
      .Float32("llama.rope.freq_base", static_cast<float>(M::kTheta))
      .Float32("llama.attention.layer_norm_rms_epsilon", M::kEpsilon)
      .Uint32("llama.rope.dimension_count", M::kHeadDim);
  if (!options.rope_scaling.empty()) {
    writer.String("llama.rope.scaling.type", options.rope_scaling);
  }
  AddTokenizer(&writer);
  TensorMaker maker(options, &model, &writer);
  maker.Add("token_embd.weight", M::kVocab, M::kHidden, TensorType::kQ8_0);
  for (uint32_t layer = 0; layer < M::kLayers; ++layer) {
    const std::string prefix = absl::StrCat("blk.", layer, ".");
    const uint32_t q_size = M::kQueryHeads * M::kHeadDim, kv_size = M::kKvHeads * M::kHeadDim;
    maker.Add(prefix + "attn_norm.weight", 1, M::kHidden, TensorType::kF32);
    maker.Add(prefix + "attn_q.weight", q_size, M::kHidden, TensorType::kQ4_1);
    maker.Add(prefix + "attn_k.weight", kv_size, M::kHidden, TensorType::kF16);
    maker.Add(prefix + "attn_v.weight", kv_size, M::kHidden, TensorType::kQ8_0);
    maker.Add(prefix + "attn_output.weight", M::kHidden, q_size, TensorType::kQ4_1);
    maker.Add(prefix + "ffn_norm.weight", 1, M::kHidden, TensorType::kF32);
    maker.Add(prefix + "ffn_gate.weight", M::kFeedForward, M::kHidden, TensorType::kQ4_1);
    maker.Add(prefix + "ffn_up.weight", M::kFeedForward, M::kHidden, TensorType::kF16);
    maker.Add(prefix + "ffn_down.weight", M::kHidden, M::kFeedForward, TensorType::kQ4_1);
  }
  maker.Add("output_norm.weight", 1, M::kHidden, TensorType::kF32);
  if (options.separate_output) {
    maker.Add("output.weight", M::kVocab, M::kHidden, TensorType::kQ4_1);
  }
  if (!options.extra_tensor.empty()) maker.Add(options.extra_tensor, 1, 16, TensorType::kF32);
  model.bytes = writer.Finish();
  return model;
}

namespace {

using Row = std::vector<double>;

Row Norm(const Row& x, const std::vector<float>& weight) {
  double square_sum = 0;
  for (const double value : x) square_sum += value * value;
  const double scale =
      1 / std::sqrt(square_sum / static_cast<double>(x.size()) + TinyModel::kEpsilon);
  Row y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
  return y;
}

Row Product(const std::vector<float>& w, const Row& x) {
  Row y(w.size() / x.size());
  for (size_t n = 0; n < y.size(); ++n) {
    for (size_t k = 0; k < x.size(); ++k) y[n] += double{w[n * x.size() + k]} * x[k];
  }
  return y;
}

// Turns interleaved pairs of every head.
void TurnInterleaved(size_t position, Row* x) {
  constexpr uint32_t kDim = TinyModel::kHeadDim;
  for (size_t head = 0; head < x->size(); head += kDim) {
    for (uint32_t i = 0; i < kDim / 2; ++i) {
      const double angle =
          static_cast<double>(position) * std::pow(TinyModel::kTheta, -2.0 * i / kDim);
      double& even = (*x)[head + 2 * i];
      double& odd = (*x)[head + 2 * i + 1];
      const double turned = even * std::cos(angle) - odd * std::sin(angle);
      odd = odd * std::cos(angle) + even * std::sin(angle);
      even = turned;
    }
  }
}

void RoundToBf16(Row* x) {
  for (double& value : *x) value = Bf16ToFloat(FloatToBf16(static_cast<float>(value)));
}

Row Attend(const Row& q, const std::vector<Row>& k, const std::vector<Row>& v) {
  constexpr uint32_t kDim = TinyModel::kHeadDim;
  constexpr uint32_t kGroup = TinyModel::kQueryHeads / TinyModel::kKvHeads;
  Row out(q.size());
  for (uint32_t head = 0; head < TinyModel::kQueryHeads; ++head) {
    const size_t kv = head / kGroup * kDim;
    double total = 0;
    for (size_t t = 0; t < k.size(); ++t) {
      double score = 0;
      for (uint32_t i = 0; i < kDim; ++i) score += q[head * kDim + i] * k[t][kv + i];
      const double weight = std::exp(score / std::sqrt(double{kDim}));
      total += weight;
      for (uint32_t i = 0; i < kDim; ++i) out[head * kDim + i] += weight * v[t][kv + i];
    }
    for (uint32_t i = 0; i < kDim; ++i) out[head * kDim + i] /= total;
  }
  return out;
}

}  // namespace

std::vector<std::vector<double>> TinyModel::Logits(const std::vector<uint32_t>& tokens) const {
  const auto tensor = [&](const std::string& name) -> const std::vector<float>& {
    return tensors.at(name + ".weight");
  };
  std::vector<Row> residual;
  for (const uint32_t token : tokens) {
    const auto row = tensor("token_embd").begin() + token * kHidden;
    residual.emplace_back(row, row + kHidden);
  }
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = absl::StrCat("blk.", layer, ".");
    std::vector<Row> keys, values;
    for (size_t t = 0; t < tokens.size(); ++t) {
      const Row normed = Norm(residual[t], tensor(prefix + "attn_norm"));
      Row q = Product(tensor(prefix + "attn_q"), normed);
      keys.push_back(Product(tensor(prefix + "attn_k"), normed));
      values.push_back(Product(tensor(prefix + "attn_v"), normed));
      TurnInterleaved(t, &q);
      TurnInterleaved(t, &keys.back());
      RoundToBf16(&keys.back());
      RoundToBf16(&values.back());
      const Row delta = Product(tensor(prefix + "attn_output"), Attend(q, keys, values));
      for (uint32_t i = 0; i < kHidden; ++i) residual[t][i] += delta[i];
    }
    for (Row& row : residual) {
      const Row normed = Norm(row, tensor(prefix + "ffn_norm"));
      const Row up = Product(tensor(prefix + "ffn_up"), normed);
      Row gated = Product(tensor(prefix + "ffn_gate"), normed);
      for (uint32_t i = 0; i < kFeedForward; ++i) gated[i] *= up[i] / (1 + std::exp(-gated[i]));
      const Row delta = Product(tensor(prefix + "ffn_down"), gated);
      for (uint32_t i = 0; i < kHidden; ++i) row[i] += delta[i];
    }
  }
  const bool tied = !tensors.contains("output.weight");
  std::vector<Row> logits;
  for (const Row& row : residual) {
    logits.push_back(
        Product(tensor(tied ? "token_embd" : "output"), Norm(row, tensor("output_norm"))));
  }
  return logits;
}

ExactCache::ExactCache(uint32_t layers, uint32_t query_heads, uint32_t kv_heads, uint32_t head_dim)
    : query_heads_(query_heads), kv_heads_(kv_heads), head_dim_(head_dim), k_(layers), v_(layers) {}

uint32_t ExactCache::tokens_count() const {
  size_t values = k_[0].size();
  for (const std::vector<uint16_t>& layer : k_) values = std::min(values, layer.size());
  return static_cast<uint32_t>(values / (kv_heads_ * head_dim_));
}

absl::Status ExactCache::Append(const AppendRows& rows) {
  std::vector<uint16_t>& k = k_[rows.layer];
  std::vector<uint16_t>& v = v_[rows.layer];
  const size_t row_size = size_t{kv_heads_} * head_dim_;
  const size_t before = k.size() / row_size;
  k.insert(k.end(), rows.k, rows.k + rows.tokens_count * row_size);
  v.insert(v.end(), rows.v, rows.v + rows.tokens_count * row_size);
  for (size_t row = 0; row < size_t{rows.tokens_count} * query_heads_; ++row) {
    const size_t visible = before + row / query_heads_ + 1;
    const size_t kv_head = row % query_heads_ / (query_heads_ / kv_heads_) * head_dim_;
    const float* q = rows.q + row * head_dim_;
    float* out = rows.out + row * head_dim_;
    std::vector<float> scores(visible);
    for (size_t t = 0; t < visible; ++t) {
      for (size_t i = 0; i < head_dim_; ++i) {
        scores[t] += q[i] * Bf16ToFloat(k[t * row_size + kv_head + i]);
      }
      scores[t] /= std::sqrt(static_cast<float>(head_dim_));
    }
    const float max = *std::max_element(scores.begin(), scores.end());
    float total = 0;
    std::fill(out, out + head_dim_, 0.0f);
    for (size_t t = 0; t < visible; ++t) {
      const float weight = std::exp(scores[t] - max);
      total += weight;
      for (size_t i = 0; i < head_dim_; ++i) {
        out[i] += weight * Bf16ToFloat(v[t * row_size + kv_head + i]);
      }
    }
    for (size_t i = 0; i < head_dim_; ++i) out[i] /= total;
  }
  return absl::OkStatus();
}

}  // namespace okv::testing_support
