#include "cmd/engine/weights.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kGroup = 32;  // Weights of one scale in Q4_1 and Q8_0.

// IEEE half precision, subnormals and infinities too.
float HalfToFloat(const uint8_t* raw) {
  uint16_t bits;
  std::memcpy(&bits, raw, sizeof(bits));
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// One tensor that becomes some rows of a matrix.
struct Part {
  std::string name;
  uint32_t rows;
  uint32_t rope_head_dim = 0;  // Of Q and K: un-interleave the rows of each head.
};

// Where row `row` of the half-split basis lies in an interleaved tensor.
uint64_t InterleavedRow(uint64_t row, uint32_t head_dim) {
  const uint64_t head = row / head_dim * head_dim;
  const uint64_t in_head = row % head_dim;
  const uint64_t half = head_dim / 2;
  return head + (in_head % half) * 2 + in_head / half;
}

class Loader {
 public:
  Loader(const GgufFile& file, ThreadPool* pool) : file_(file), pool_(pool) {}

  absl::StatusOr<std::vector<float>> Vector(const std::string& name, uint32_t size) {
    OKV_ASSIGN_OR_RETURN(const GgufTensor* tensor, Take(name, 1, size));
    std::vector<float> values(size);
    DequantizeRow(*tensor, 0, absl::MakeSpan(values));
    return values;
  }

  // Stacks `parts`, each [rows, columns].
  absl::StatusOr<PackedMatrix> Matrix(const std::vector<Part>& parts, uint32_t columns) {
    struct Source {
      const GgufTensor* tensor;
      uint32_t row;
    };
    std::vector<Source> sources;  // Of every row of the matrix.
    for (const Part& part : parts) {
      OKV_ASSIGN_OR_RETURN(const GgufTensor* tensor, Take(part.name, part.rows, columns));
      for (uint32_t row = 0; row < part.rows; ++row) {
        const uint64_t from =
            part.rope_head_dim > 0 ? InterleavedRow(row, part.rope_head_dim) : row;
        sources.push_back({tensor, static_cast<uint32_t>(from)});
      }
    }
    PackedMatrix matrix(sources.size(), columns);
    pool_->ParallelFor(matrix.panels_count(), [&](size_t panel) {
      std::vector<float> row(columns);
      const size_t end = std::min(sources.size(), (panel + 1) * kPanelOutputs);
      for (size_t output = panel * kPanelOutputs; output < end; ++output) {
        DequantizeRow(*sources[output].tensor, sources[output].row, absl::MakeSpan(row));
        matrix.SetRow(output, row);
      }
    });
    return matrix;
  }

  // Call when all is loaded.
  absl::Status RejectUnusedTensors() const {
    for (const GgufTensor& tensor : file_.tensors()) {
      if (!used_.contains(tensor.name)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", file_.path(), "': tensor '", tensor.name, "' is none of a plain Llama's"));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<const GgufTensor*> Take(const std::string& name, uint32_t rows, uint32_t columns) {
    OKV_ASSIGN_OR_RETURN(const GgufTensor* tensor, file_.Tensor(name));
    if (tensor->rows != rows || tensor->columns != columns) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", file_.path(), "': tensor '", name, "' is [", tensor->rows, ", ",
                       tensor->columns, "], the model's shape needs [", rows, ", ", columns, "]"));
    }
    used_.insert(name);
    return tensor;
  }

  const GgufFile& file_;
  ThreadPool* const pool_;
  absl::flat_hash_set<std::string> used_;
};

absl::StatusOr<LayerWeights> LoadLayer(const WeightShapes& shapes, uint32_t layer, Loader* loader) {
  const std::string prefix = absl::StrCat("blk.", layer, ".");
  const auto name = [&](const char* tensor) { return absl::StrCat(prefix, tensor, ".weight"); };
  const uint32_t q_rows = shapes.query_heads * shapes.head_dim;
  const uint32_t kv_rows = shapes.kv_heads * shapes.head_dim;
  LayerWeights weights;
  OKV_ASSIGN_OR_RETURN(weights.attention_norm, loader->Vector(name("attn_norm"), shapes.hidden));
  OKV_ASSIGN_OR_RETURN(weights.qkv, loader->Matrix({{name("attn_q"), q_rows, shapes.head_dim},
                                                    {name("attn_k"), kv_rows, shapes.head_dim},
                                                    {name("attn_v"), kv_rows}},
                                                   shapes.hidden));
  OKV_ASSIGN_OR_RETURN(weights.attention_out,
                       loader->Matrix({{name("attn_output"), shapes.hidden}}, q_rows));
  OKV_ASSIGN_OR_RETURN(weights.feed_forward_norm, loader->Vector(name("ffn_norm"), shapes.hidden));
  OKV_ASSIGN_OR_RETURN(weights.gate_up, loader->Matrix({{name("ffn_gate"), shapes.feed_forward},
                                                        {name("ffn_up"), shapes.feed_forward}},
                                                       shapes.hidden));
  OKV_ASSIGN_OR_RETURN(weights.down,
                       loader->Matrix({{name("ffn_down"), shapes.hidden}}, shapes.feed_forward));
  return weights;
}

}  // namespace

void DequantizeRow(const GgufTensor& tensor, uint64_t row, absl::Span<float> out) {
  OKV_CHECK(row < tensor.rows && out.size() == tensor.columns);
  const uint64_t row_bytes = tensor.data.size() / tensor.rows;
  const auto* raw = reinterpret_cast<const uint8_t*>(tensor.data.data()) + row * row_bytes;
  switch (tensor.type) {
    case TensorType::kF32:
      std::memcpy(out.data(), raw, row_bytes);
      return;
    case TensorType::kF16:
      for (float& value : out) {
        value = HalfToFloat(raw);
        raw += 2;
      }
      return;
    case TensorType::kQ4_1:  // scale, minimum, 16 bytes: low nibbles are weights 0..15, high 16..31
      for (size_t start = 0; start < out.size(); start += kGroup, raw += 20) {
        const float scale = HalfToFloat(raw);
        const float minimum = HalfToFloat(raw + 2);
        for (size_t i = 0; i < kGroup / 2; ++i) {
          const uint8_t pair = raw[4 + i];
          out[start + i] = static_cast<float>(pair & 15) * scale + minimum;
          out[start + kGroup / 2 + i] = static_cast<float>(pair >> 4) * scale + minimum;
        }
      }
      return;
    case TensorType::kQ8_0:  // scale, 32 int8
      for (size_t start = 0; start < out.size(); start += kGroup, raw += 34) {
        const float scale = HalfToFloat(raw);
        for (size_t i = 0; i < kGroup; ++i) {
          out[start + i] = static_cast<float>(static_cast<int8_t>(raw[2 + i])) * scale;
        }
      }
      return;
  }
  OKV_CHECK(false);  // GgufFile::Open lets no other type through.
}

absl::StatusOr<Weights> Weights::Load(const GgufFile& file, const WeightShapes& shapes,
                                      ThreadPool* pool) {
  Loader loader(file, pool);
  Weights weights;
  OKV_ASSIGN_OR_RETURN(weights.embedding,
                       loader.Matrix({{"token_embd.weight", shapes.vocab}}, shapes.hidden));
  for (uint32_t layer = 0; layer < shapes.layers; ++layer) {
    OKV_ASSIGN_OR_RETURN(LayerWeights loaded, LoadLayer(shapes, layer, &loader));
    weights.layers.push_back(std::move(loaded));
  }
  OKV_ASSIGN_OR_RETURN(weights.output_norm, loader.Vector("output_norm.weight", shapes.hidden));
  if (file.Tensor("output.weight").ok()) {
    OKV_ASSIGN_OR_RETURN(weights.separate_output,
                         loader.Matrix({{"output.weight", shapes.vocab}}, shapes.hidden));
  }
  OKV_RETURN_IF_ERROR(loader.RejectUnusedTensors());
  return weights;
}

}  // namespace okv
