#include "tests/calib/test_data.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/bf16.h"
#include "proto/check.h"

namespace okv {
namespace {

float ToBf16(double value) { return Bf16ToFloat(FloatToBf16(static_cast<float>(value))); }

// `count` random directions of `dim` channels, of length 1 on average.
std::vector<double> Directions(uint32_t count, uint32_t dim, std::mt19937* random) {
  std::normal_distribution<double> normal(0, 1 / std::sqrt(static_cast<double>(dim)));
  std::vector<double> directions(size_t{count} * dim);
  for (double& x : directions) x = normal(*random);
  return directions;
}

// Noise of deviation `noise` a channel, plus each direction times a normal of deviation `spike`.
void FillSpiked(const std::vector<double>& directions, double spike, double noise, uint32_t dim,
                std::mt19937* random, float* row) {
  std::normal_distribution<double> normal;
  std::vector<double> sum(dim);
  for (double& x : sum) x = noise * normal(*random);
  for (size_t i = 0; i < directions.size() / dim; ++i) {
    const double factor = spike * normal(*random);
    for (uint32_t c = 0; c < dim; ++c) sum[c] += factor * directions[i * dim + c];
  }
  std::transform(sum.begin(), sum.end(), row, ToBf16);
}

std::string FloatBytes(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

std::vector<uint16_t> Bits(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  std::transform(values.begin(), values.end(), bits.begin(), FloatToBf16);
  return bits;
}

}  // namespace

TempDirectory::TempDirectory() {
  std::string pattern = absl::StrCat(testing::TempDir(), "/okv_calib_XXXXXX");
  OKV_CHECK(mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

std::string TempDirectory::Path(absl::string_view name) const {
  return absl::StrCat(path_, "/", name);
}

std::string ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  OKV_CHECK(stream.good());
  return std::string(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
}

void WriteFile(const std::string& path, absl::string_view bytes) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  OKV_CHECK(stream.good());
}

std::vector<std::string> ListDirectory(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

LayerDump SyntheticLayer(const SyntheticShape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  LayerDump layer{.layer_id = shape.layer_id,
                  .tokens_count = std::accumulate(shape.sequence_lengths.begin(),
                                                  shape.sequence_lengths.end(), 0u),
                  .query_heads = shape.query_heads,
                  .kv_heads = shape.kv_heads,
                  .head_dim = shape.head_dim,
                  .sequence_lengths = shape.sequence_lengths,
                  .q = {},
                  .k = {},
                  .v = {}};
  const uint32_t dim = shape.head_dim;
  const std::vector<double> query_directions = Directions(3, dim, &random);
  const std::vector<double> value_directions = Directions(3, dim, &random);
  layer.q.resize(size_t{layer.tokens_count} * layer.query_heads * dim);
  layer.k.resize(size_t{layer.tokens_count} * layer.kv_heads * dim);
  layer.v.resize(layer.k.size());
  for (size_t row = 0; row < layer.q.size(); row += dim) {
    FillSpiked(query_directions, 12, 0.5, dim, &random, &layer.q[row]);
  }
  for (size_t row = 0; row < layer.k.size(); row += dim) {
    FillSpiked(query_directions, 4, 0.5, dim, &random, &layer.k[row]);
    for (const uint32_t c : {5u, 22u, 47u}) layer.k[row + c] = ToBf16(layer.k[row + c] + 8.0);
    FillSpiked(value_directions, 10, 0.5, dim, &random, &layer.v[row]);
  }
  return layer;
}

RowSample GaussianRows(uint32_t dim, uint32_t rows_count, float mean, uint32_t channels,
                       uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  RowSample sample{.dim = dim, .rows = {}};
  for (uint32_t i = 0; i < rows_count * dim; ++i) {
    sample.rows.push_back(FloatToBf16(normal(random) + (i % dim < channels ? mean : 0.0f)));
  }
  return sample;
}

RowSample SpikedRows(uint32_t dim, uint32_t rows_count, uint32_t directions, uint32_t seed) {
  std::normal_distribution<float> normal;
  std::mt19937 shape(1 + seed / 50);
  std::vector<std::vector<float>> spikes(directions, std::vector<float>(dim));
  for (std::vector<float>& spike : spikes) {
    for (float& x : spike) x = normal(shape) * 6 / std::sqrt(static_cast<float>(dim));
  }
  std::mt19937 random(seed);
  RowSample sample{.dim = dim, .rows = {}};
  for (uint32_t row = 0; row < rows_count; ++row) {
    std::vector<float> parts(directions);
    // One sided: a mean along each direction, as keys have it.
    for (float& part : parts) part = 2 + normal(random);
    for (uint32_t c = 0; c < dim; ++c) {
      float x = normal(random) * 0.5f;
      for (uint32_t i = 0; i < directions; ++i) x += parts[i] * spikes[i][c];
      sample.rows.push_back(FloatToBf16(x));
    }
  }
  return sample;
}

FitOptions Quick(FitOptions options) {
  options.refine_steps = 5;
  return options;
}

double OrthogonalityErrorOf(const Matrix& rotation, uint32_t dim) {
  double worst = 0;
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      double sum = i == j ? -1.0 : 0.0;
      for (size_t c = 0; c < dim; ++c) sum += rotation[i * dim + c] * rotation[j * dim + c];
      worst = std::max(worst, std::abs(sum));
    }
  }
  return worst;
}

std::map<std::string, std::string> LayerMetadata(uint32_t layer_id, absl::string_view layer_ids) {
  return {{"model", "synthetic"},
          {"weights_revision", "r1"},
          {"text_source", "random numbers"},
          {"layer", absl::StrCat(layer_id)},
          {"layer_ids", std::string(layer_ids)}};
}

std::vector<RawTensor> RawTensors(const LayerDump& layer) {
  const std::vector<int64_t> lengths(layer.sequence_lengths.begin(), layer.sequence_lengths.end());
  return {
      {"q", "F32", {layer.tokens_count, layer.query_heads, layer.head_dim}, FloatBytes(layer.q)},
      {"k", "F32", {layer.tokens_count, layer.kv_heads, layer.head_dim}, FloatBytes(layer.k)},
      {"v", "F32", {layer.tokens_count, layer.kv_heads, layer.head_dim}, FloatBytes(layer.v)},
      {"seq_lens",
       "I64",
       {lengths.size()},
       std::string(reinterpret_cast<const char*>(lengths.data()), lengths.size() * 8)}};
}

std::string RawSafetensors(const std::map<std::string, std::string>& metadata,
                           const std::vector<RawTensor>& tensors) {
  nlohmann::json header;
  header["__metadata__"] = metadata;
  std::string data;
  for (const RawTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + text + data;
}

void WriteDump(const std::string& directory, const std::vector<uint32_t>& layer_ids,
               const SyntheticShape& shape, uint32_t seed) {
  auto writer = DumpWriter::Create(directory, {.model = "synthetic",
                                               .weights_revision = "r1",
                                               .text_source = "random numbers",
                                               .layer_ids = layer_ids,
                                               .query_heads = shape.query_heads,
                                               .kv_heads = shape.kv_heads,
                                               .head_dim = shape.head_dim});
  ASSERT_TRUE(writer.ok()) << writer.status();
  std::vector<LayerDump> layers;
  for (uint32_t i = 0; i < layer_ids.size(); ++i) layers.push_back(SyntheticLayer(shape, seed + i));
  uint32_t first = 0;
  for (const uint32_t length : shape.sequence_lengths) {
    for (uint32_t i = 0; i < layers.size(); ++i) {
      const std::vector<uint16_t> k = Bits(layers[i].k);
      const std::vector<uint16_t> v = Bits(layers[i].v);
      const size_t kv_offset = size_t{first} * shape.kv_heads * shape.head_dim;
      ASSERT_TRUE((*writer)
                      ->Append({.layer = i,
                                .tokens_count = length,
                                .q = layers[i].q.data() +
                                     size_t{first} * shape.query_heads * shape.head_dim,
                                .k = k.data() + kv_offset,
                                .v = v.data() + kv_offset})
                      .ok());
    }
    ASSERT_TRUE((*writer)->EndSequence().ok());
    first += length;
  }
  const absl::Status finished = (*writer)->Finish();
  ASSERT_TRUE(finished.ok()) << finished;
}

}  // namespace okv
