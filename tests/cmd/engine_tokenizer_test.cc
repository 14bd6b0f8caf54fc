#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cmd/engine/tokenizer.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing_support::GgufWriter;
using testing_support::MakeTinyModel;
using testing_support::WriteTempFile;

TEST(PreTokenizeTest, CutsWordsContractionsDigitsAndSigns) {
  EXPECT_THAT(PreTokenize("Hello world"), ElementsAre("Hello", " world"));
  EXPECT_THAT(PreTokenize("I'll don't, 'tis"),
              ElementsAre("I", "'ll", " don", "'t", ",", " '", "tis"));
  EXPECT_THAT(PreTokenize("in 2024: v1.5"),
              ElementsAre("in", " ", "2", "0", "2", "4", ":", " v", "1", ".", "5"));
  EXPECT_THAT(PreTokenize("(a+b) ==> c!"), ElementsAre("(", "a", "+", "b", ")", " ==>", " c", "!"));
}

TEST(PreTokenizeTest, TheLastSpaceOfARunGoesToTheWordBehindIt) {
  EXPECT_THAT(PreTokenize("a   b"), ElementsAre("a", "  ", " b"));
  EXPECT_THAT(PreTokenize("a\n\nb"), ElementsAre("a", "\n", "\n", "b"));
  EXPECT_THAT(PreTokenize("a \n"), ElementsAre("a", " \n"));
  EXPECT_THAT(PreTokenize("a  1"), ElementsAre("a", "  ", "1"));
  EXPECT_THAT(PreTokenize(""), ElementsAre());
  EXPECT_THAT(PreTokenize(" "), ElementsAre(" "));
  EXPECT_THAT(PreTokenize("\xc2\xa0\xc2\xa0x"), ElementsAre("\xc2\xa0", "\xc2\xa0", "x"));
}

TEST(PreTokenizeTest, LettersAndNumbersOfEveryScript) {
  EXPECT_THAT(PreTokenize("größe 中文"), ElementsAre("größe", " 中文"));
  EXPECT_THAT(PreTokenize("x²Ⅷ٣"), ElementsAre("x", "²", "Ⅷ", "٣"));
  EXPECT_THAT(PreTokenize("“hi”"), ElementsAre("“", "hi", "”"));
}

class TinyTokenizerTest : public ::testing::Test {
 protected:
  TinyTokenizerTest() {
    const auto file = GgufFile::Open(WriteTempFile("tokenizer.gguf", MakeTinyModel({}).bytes));
    EXPECT_TRUE(file.ok()) << file.status();
    auto loaded = Tokenizer::Load(**file);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    tokenizer_.emplace_back(std::move(*loaded));
  }
  const Tokenizer& tokenizer() const { return tokenizer_[0]; }
  std::vector<std::string> Pieces(absl::string_view text) const {
    std::vector<std::string> pieces;
    for (const uint32_t token : tokenizer().Encode(text)) {
      pieces.push_back(tokenizer().Decode({token}));
    }
    return pieces;
  }

 private:
  std::vector<Tokenizer> tokenizer_;
};

TEST_F(TinyTokenizerTest, MergesByRankFromTheLeft) {
  EXPECT_THAT(Pieces("the and the"), ElementsAre("the", " ", "and", " the"));  // Not " a", "nd".
  EXPECT_THAT(Pieces("thin"), ElementsAre("th", "in"));
  EXPECT_THAT(Pieces("ananand"), ElementsAre("an", "an", "and"));
}

TEST_F(TinyTokenizerTest, ControlTokensAreParsedOrKeptAsText) {
  const std::string text = "a<|end|>b<|en";
  EXPECT_THAT(Pieces(text), ElementsAre("a", "<|end|>", "b", "<", "|", "e", "n"));
  const std::vector<uint32_t> as_text = tokenizer().Encode(text, SpecialTokens::kAsText);
  EXPECT_EQ(as_text.size(), text.size());
  EXPECT_EQ(tokenizer().Decode(as_text), text);
  EXPECT_EQ(tokenizer().eos_token(), 0u);
  EXPECT_EQ(tokenizer().bos_token(), 1u);
  EXPECT_FALSE(tokenizer().adds_bos());
}

TEST_F(TinyTokenizerTest, AnyBytesComeBack) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::string text(random() % 200, '\0');
    for (char& byte : text) {
      byte = random() % 3 == 0 ? static_cast<char>(random()) : "the and 1\n"[random() % 10];
    }
    EXPECT_EQ(tokenizer().Decode(tokenizer().Encode(text, SpecialTokens::kAsText)), text);
  }
}

TEST_F(TinyTokenizerTest, ALongRunTakesNoQuadraticTime) {
  // One piece of 2^19 merges: n^2 steps would not end within the test's time.
  std::string text;
  while (text.size() < (1 << 20)) text += "an";
  EXPECT_EQ(tokenizer().Encode(text).size(), text.size() / 2);
}

TEST(TokenizerTest, RefusesWhatItCannotFollowAndNamesIt) {
  const auto error = [](const GgufWriter& writer) {
    const auto file = GgufFile::Open(WriteTempFile("bad_tokenizer.gguf", writer.Finish()));
    EXPECT_TRUE(file.ok()) << file.status();
    const absl::Status status = Tokenizer::Load(**file).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const auto writer = [](const std::string& pre, const std::vector<std::string>& tokens,
                         const std::vector<int32_t>& types,
                         const std::vector<std::string>& merges) {
    GgufWriter result;
    result.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", pre);
    result.Strings("tokenizer.ggml.tokens", tokens).Int32s("tokenizer.ggml.token_type", types);
    return result.Strings("tokenizer.ggml.merges", merges);
  };
  EXPECT_THAT(error(GgufWriter()), HasSubstr("tokenizer.ggml.model"));
  EXPECT_THAT(error(writer("llama-bpe", {}, {}, {})), HasSubstr("llama-bpe"));
  EXPECT_THAT(error(writer("smollm", {"a"}, {1, 1}, {})), HasSubstr("1 tokens, but 2"));
  EXPECT_THAT(error(writer("smollm", {"\xe4\xb8\xad"}, {1}, {})), HasSubstr("token 0"));
  EXPECT_THAT(error(writer("smollm", {"a", "b"}, {1, 1}, {"a b"})), HasSubstr("merge 0"));
  EXPECT_THAT(error(writer("smollm", {"a", "b"}, {1, 1}, {})), HasSubstr("no token spells byte 0"));
}

// Token ids that llama.cpp gives for the same file.
TEST(TokenizerTest, GivesTheReferenceModelsTokens) {
  const char* root = std::getenv("OKV_SOURCE_DIR");
  const std::string path =
      absl::StrCat(root != nullptr ? root : ".", "/build/models/SmolLM2-135M-Instruct.Q4_1.gguf");
  if (!std::filesystem::exists(path)) {
    GTEST_SKIP() << path << " is not there: deploy/fetch_model.sh fetches it";
  }
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tokenizer = Tokenizer::Load(**file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(tokenizer->Encode("The quick brown fox can't jump 1234 times."),
              ElementsAre(504, 2365, 6354, 16438, 416, 982, 7379, 216, 33, 34, 35, 36, 1711, 30));
  EXPECT_THAT(tokenizer->Encode("  Two  spaces\n\n\nand\ttabs "),
              ElementsAre(216, 5713, 216, 5600, 1116, 198, 397, 197, 100, 7366, 216));
  EXPECT_THAT(tokenizer->Encode("größe 中文 👍🏽 x²"),
              ElementsAre(9861, 7466, 34878, 85, 216, 28589, 29184, 15107, 235, 231, 10813, 233,
                          138, 1792, 19133));
  EXPECT_THAT(tokenizer->Encode("<|im_start|>user\nHi<|im_end|>"),
              ElementsAre(1, 4093, 198, 26843, 2));
  EXPECT_EQ(tokenizer->eos_token(), 2u);
  EXPECT_EQ(tokenizer->vocab_size(), 49152u);
  // Byte 0xc0 never occurs in UTF-8 and has no token: the unknown one.
  EXPECT_THAT(tokenizer->Encode("\xc0"), ElementsAre(0));
}

}  // namespace
}  // namespace okv
