#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cmd/engine/model.h"
#include "cmd/engine/sampler.h"
#include "tests/cmd/engine_test_targets.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::ExactCache;
using testing_support::MakeTinyModel;
using testing_support::TinyModel;
using testing_support::TinyModelOptions;
using testing_support::WriteTempFile;

std::unique_ptr<Model> LoadTiny(const TinyModelOptions& options, ThreadPool* pool) {
  auto model = Model::Load(WriteTempFile("tiny.gguf", MakeTinyModel(options).bytes), pool);
  EXPECT_TRUE(model.ok()) << model.status();
  return std::move(*model);
}

std::vector<uint32_t> RandomTokens(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> tokens(count);
  for (uint32_t& token : tokens) token = random() % TinyModel::kVocab;
  return tokens;
}

// Logits behind every token, [tokens, vocab].
std::vector<float> AllLogits(Model* model, absl::Span<const uint32_t> tokens, KvCache* cache,
                             uint32_t chunk_tokens) {
  const size_t vocab = model->config().vocab;
  std::vector<float> logits(tokens.size() * vocab);
  const absl::Status status = model->ForwardAll(
      tokens, cache,
      [&](size_t index, absl::Span<const float> row) {
        std::memcpy(logits.data() + index * vocab, row.data(), vocab * sizeof(float));
      },
      chunk_tokens);
  EXPECT_TRUE(status.ok()) << status;
  return logits;
}

bool SameBits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() &&
         std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0;
}

TEST(ModelTest, ConfigIsWhatTheFileSays) {
  ThreadPool pool(1);
  const auto model = LoadTiny({}, &pool);
  const ModelConfig& config = model->config();
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.layers, 2u);
  EXPECT_EQ(config.query_heads, 4u);
  EXPECT_EQ(config.kv_heads, 2u);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.vocab, 288u);
  EXPECT_EQ(config.context_tokens, 2048u);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.rope_scaling, "");
  EXPECT_EQ(config.weights_revision.size(), 64u);
  EXPECT_NE(config.weights_revision, LoadTiny({.seed = 2}, &pool)->config().weights_revision);
}

TEST(ModelTest, LogitsAgreeWithAPlainDoublePrecisionLlama) {
  ThreadPool pool(2);
  for (const bool separate_output : {false, true}) {
    const TinyModelOptions options = {.seed = 4, .separate_output = separate_output};
    const std::vector<uint32_t> tokens = RandomTokens(40, 5);
    const auto expected = MakeTinyModel(options).Logits(tokens);
    const auto model = LoadTiny(options, &pool);
    ExactCache cache(model->config());
    const std::vector<float> logits = AllLogits(model.get(), tokens, &cache, 16);
    double largest = 0, square_error = 0, square = 0;
    for (size_t t = 0; t < tokens.size(); ++t) {
      for (size_t n = 0; n < TinyModel::kVocab; ++n) {
        const double error = logits[t * TinyModel::kVocab + n] - expected[t][n];
        largest = std::max(largest, std::abs(error));
        square_error += error * error;
        square += expected[t][n] * expected[t][n];
      }
    }
    // A K or V that lies between two bf16 values may round either way, 2^-9 apart: rare.
    EXPECT_LT(std::sqrt(square_error / square), 1e-3) << "largest error " << largest;
  }
}

TEST(ModelTest, ChunksAndThreadsDoNotChangeABit) {
  ThreadPool one(1), two(2);
  const auto model_of_one = LoadTiny({}, &one);
  const auto model_of_two = LoadTiny({}, &two);
#if defined(__SANITIZE_THREAD__)
  constexpr size_t kTokens = 80;  // Ten times slower there, and no less threaded.
#else
  constexpr size_t kTokens = 600;
#endif
  const std::vector<uint32_t> tokens = RandomTokens(kTokens, 6);
  ExactCache first_cache(model_of_one->config());
  const std::vector<float> first = AllLogits(model_of_one.get(), tokens, &first_cache, 512);
  for (Model* model : {model_of_one.get(), model_of_two.get()}) {
    for (const uint32_t chunk_tokens : {1u, 7u, 64u, 512u, 4096u}) {
      ExactCache cache(model->config());
      EXPECT_TRUE(SameBits(AllLogits(model, tokens, &cache, chunk_tokens), first)) << chunk_tokens;
      EXPECT_TRUE(cache.SameBits(first_cache)) << chunk_tokens;
    }
  }
}

TEST(ModelTest, InstructionSetsDoNotChangeABit) {
  ThreadPool pool(1);
  const auto model = LoadTiny({}, &pool);
  const std::vector<uint32_t> tokens = RandomTokens(33, 7);
  ExactCache first_cache(model->config());
  const std::vector<float> first = AllLogits(model.get(), tokens, &first_cache, 512);
  testing_support::OnEveryTarget([&] {
    ExactCache cache(model->config());
    EXPECT_TRUE(SameBits(AllLogits(model.get(), tokens, &cache, 5), first));
  });
}

TEST(ModelTest, ForwardContinuesWhereTheCacheEnds) {
  ThreadPool pool(2);
  const auto model = LoadTiny({}, &pool);
  const std::vector<uint32_t> tokens = RandomTokens(100, 8);
  ExactCache whole(model->config()), pieces(model->config());
  const auto expected = model->Forward(tokens, &whole);
  ASSERT_TRUE(expected.ok()) << expected.status();
  absl::StatusOr<std::vector<float>> logits;
  size_t fed = 0;
  for (const size_t count : {size_t{37}, size_t{1}, size_t{1}, size_t{61}}) {
    EXPECT_EQ(pieces.tokens_count(), fed);
    logits = model->Forward(absl::MakeConstSpan(tokens).subspan(fed, count), &pieces);
    ASSERT_TRUE(logits.ok()) << logits.status();
    fed += count;
  }
  ASSERT_EQ(fed, tokens.size());
  EXPECT_TRUE(SameBits(*logits, *expected));
  EXPECT_TRUE(pieces.SameBits(whole));
}

TEST(ModelTest, NllIsThatOfTheLogits) {
  ThreadPool pool(2);
  const auto model = LoadTiny({}, &pool);
  const std::vector<uint32_t> tokens = RandomTokens(81, 9);
  const auto fed = absl::MakeConstSpan(tokens).first(80);
  const auto next = absl::MakeConstSpan(tokens).subspan(1);
  ExactCache cache(model->config()), again(model->config());
  const std::vector<float> logits = AllLogits(model.get(), fed, &cache, 512);
  const auto nll = model->ForwardNll(fed, next, &again, 9);
  ASSERT_TRUE(nll.ok()) << nll.status();
  for (size_t t = 0; t < fed.size(); ++t) {
    double sum = 0;
    const float* row = logits.data() + t * TinyModel::kVocab;
    for (size_t n = 0; n < TinyModel::kVocab; ++n) sum += std::exp(double{row[n]});
    EXPECT_NEAR((*nll)[t], std::log(sum) - row[next[t]], 1e-4);
  }
}

TEST(ModelTest, RefusesCallsThatCannotBe) {
  ThreadPool pool(1);
  const auto model = LoadTiny({}, &pool);
  ExactCache cache(model->config());
  const auto message = [&](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(cache.tokens_count(), 0u);
    return std::string(status.message());
  };
  EXPECT_THAT(message(model->Forward({}, &cache).status()), HasSubstr("no tokens"));
  EXPECT_THAT(message(model->Forward({1, 2, 288}, &cache).status()), HasSubstr("token 2 is 288"));
  EXPECT_THAT(message(model->Forward(std::vector<uint32_t>(2049), &cache).status()),
              HasSubstr("2049 tokens"));
  EXPECT_THAT(message(model->Forward({1}, &cache, 0).status()), HasSubstr("chunk"));
  EXPECT_THAT(message(model->ForwardNll({1, 2}, {1}, &cache).status()), HasSubstr("next tokens"));
  EXPECT_THAT(message(model->ForwardNll({1}, {288}, &cache).status()), HasSubstr("next token 288"));
}

// Fails at a layer.
class FailingCache final : public KvCache {
 public:
  absl::Status Append(const AppendRows& rows) override {
    if (rows.layer == 1) return absl::ResourceExhaustedError("the cache is full");
    return absl::OkStatus();
  }
  uint32_t tokens_count() const override { return 0; }
};

TEST(ModelTest, TheCachesErrorEndsTheForwardPass) {
  ThreadPool pool(1);
  const auto model = LoadTiny({}, &pool);
  FailingCache cache;
  EXPECT_EQ(model->Forward({1, 2}, &cache).status(),
            absl::ResourceExhaustedError("the cache is full"));
}

TEST(ModelLoadTest, NamesWhatIsWrongWithTheFile) {
  ThreadPool pool(1);
  const auto error = [&](const TinyModelOptions& options, absl::StatusCode code) {
    const absl::Status status =
        Model::Load(WriteTempFile("bad_model.gguf", MakeTinyModel(options).bytes), &pool).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bad_model.gguf"));
    return std::string(status.message());
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(error({.architecture = "gpt2"}, kInvalid), HasSubstr("architecture 'gpt2'"));
  for (const char* tensor : {"token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight",
                             "blk.0.ffn_gate.weight", "blk.1.ffn_norm.weight"}) {
    EXPECT_THAT(error({.without_tensor = tensor}, kInvalid), HasSubstr(tensor));
  }
  EXPECT_THAT(error({.extra_tensor = "blk.0.attn_q.bias"}, kInvalid),
              HasSubstr("blk.0.attn_q.bias"));
  EXPECT_THAT(error({.rope_scaling = "yarn"}, absl::StatusCode::kUnimplemented), HasSubstr("yarn"));
  EXPECT_EQ(Model::Load("/nonexistent.gguf", &pool).status().code(), absl::StatusCode::kNotFound);
}

TEST(ModelLoadTest, ATruncatedFileIsDataLossAtAnyLength) {
  ThreadPool pool(1);
  const std::string bytes = MakeTinyModel({}).bytes;
  for (const double share : {0.001, 0.01, 0.1, 0.5, 0.9, 0.999}) {
    const size_t size = static_cast<size_t>(share * static_cast<double>(bytes.size()));
    const absl::Status status =
        Model::Load(WriteTempFile("cut.gguf", bytes.substr(0, size)), &pool).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << share << ": " << status;
  }
}

// The reference model, which deploy/fetch_model.sh fetches.
class ReferenceModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "minutes under ThreadSanitizer; the tiny model's tests run the same threads";
#endif
    const char* root = std::getenv("OKV_SOURCE_DIR");
    const std::string path =
        absl::StrCat(root != nullptr ? root : ".", "/build/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is not there: deploy/fetch_model.sh fetches it";
    }
    auto model = Model::Load(path, &pool_);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = std::move(*model);
  }

  ThreadPool pool_{2};
  std::unique_ptr<Model> model_;
};

TEST_F(ReferenceModelTest, AnswersInEnglish) {
  EXPECT_EQ(model_->config().weights_revision,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53");
  const Tokenizer& tokenizer = model_->tokenizer();
  ExactCache cache(model_->config());
  std::vector<uint32_t> feed = tokenizer.Encode("The capital of France is");
  std::vector<uint32_t> answer;
  for (int i = 0; i < 2; ++i) {
    const auto logits = model_->Forward(feed, &cache);
    ASSERT_TRUE(logits.ok()) << logits.status();
    answer.push_back(GreedyToken(*logits));
    feed = {answer.back()};
  }
  EXPECT_EQ(tokenizer.Decode(answer), " Paris.");
}

// llama.cpp, which rounds activations to 8 bits, gives 27.24.
TEST_F(ReferenceModelTest, PerplexityOfPlainEnglishIsThatOfTheModel) {
  const std::vector<uint32_t> tokens = model_->tokenizer().Encode(
      "Rivers begin in high places. Rain and melting snow run down the slopes of hills and "
      "mountains, first as small streams, and the streams join until there is a river. Where "
      "the land is steep the water is fast, and it carries stones and sand along with it. Where "
      "the land is flat the river slows down, bends from side to side, and drops what it "
      "carried. Over many thousands of years this makes wide plains with good soil, which is "
      "one reason why people have always built their towns beside rivers. The water was also a "
      "road: before there were trains, the easiest way to move heavy goods was to put them on a "
      "boat.");
  ExactCache cache(model_->config());
  const auto fed = absl::MakeConstSpan(tokens).first(tokens.size() - 1);
  const auto nll = model_->ForwardNll(fed, absl::MakeConstSpan(tokens).subspan(1), &cache);
  ASSERT_TRUE(nll.ok()) << nll.status();
  double sum = 0;
  for (const float value : *nll) sum += value;
  EXPECT_NEAR(std::exp(sum / static_cast<double>(nll->size())), 27.57, 0.1);
}

}  // namespace
}  // namespace okv
