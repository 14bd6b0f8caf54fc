#include "tests/cmd/bench_tiny.h"

#include <bit>
#include <random>
#include <utility>

#include "cmd/support/kv.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "tests/support/tiny_model.h"

namespace okv::testing_support {

std::string WriteTinyModel() { return WriteTempFile("tiny.gguf", MakeTinyModel({}).bytes); }

std::unique_ptr<Model> LoadTiny(ThreadPool* pool) {
  absl::StatusOr<std::unique_ptr<Model>> model = Model::Load(WriteTinyModel(), pool);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

RotationSet TinyRotations(const ModelConfig& config, const std::string& method) {
  RotationSet set = IdentityRotations(config);
  const uint32_t dim = config.head_dim;
  const uint32_t layers = method == "none" ? 0 : method == "mixed" ? 1 : config.layers;
  for (size_t i = 0; i < size_t{layers} * dim * dim; ++i) {
    const bool is_negative = (std::popcount(i / dim % dim & i % dim) & 1) != 0;
    set.r_k[i] = FloatToBf16(is_negative ? -0.125f : 0.125f);  // 1 / sqrt(64)
    set.r_v[i] = set.r_k[i];
  }
  return set;
}

Contender TinyContender(const ModelConfig& config, const std::string& method,
                        const ContenderOptions& options) {
  absl::StatusOr<Contender> contender =
      MakeContender(config, TinyRotations(config, method), options);
  EXPECT_TRUE(contender.ok()) << contender.status();
  return *std::move(contender);
}

std::vector<uint32_t> RandomTokens(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens) token = static_cast<uint32_t>(random() % TinyModel::kVocab);
  return tokens;
}

std::string RandomText(size_t letters, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(letters, ' ');
  for (char& letter : text) letter = static_cast<char>('A' + random() % 58);
  return text;
}

}  // namespace okv::testing_support
