#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cmd/bench/nll.h"
#include "cmd/bench/quality.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cmd/bench_tiny.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::LoadTiny;
using testing_support::RandomText;
using testing_support::RunProgram;
using testing_support::TempDir;
using testing_support::TinyContender;
using testing_support::TinyRotations;
using testing_support::WriteFile;

void ExpectInvalid(const absl::Status& status, const std::string& what) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

// The tiny model, its rotation sets and a text, in files.
class QualityTest : public ::testing::Test {
 protected:
  QualityTest() {
    ThreadPool pool(1);
    config_ = LoadTiny(&pool)->config();
    WriteFile(text_, RandomText(4000, 8));
    for (const char* method : {"none", "hadamard", "mixed"}) {
      WriteFile(directory_.Path(method), TinyRotations(config_, method).Serialize());
    }
  }

  QualityOptions Options() const {
    return {.text = {.model = model_, .text = text_, .tokens = 1536, .window = 512, .threads = 2},
            .rotations = {{"mixed", directory_.Path("mixed")}},
            .windows = {{64, 64}},
            .recall_tokens = 0};
  }

  QualityReport Run(const QualityOptions& options) const {
    absl::StatusOr<QualityReport> report = RunQuality(options);
    EXPECT_TRUE(report.ok()) << report.status();
    return *std::move(report);
  }

  const TempDir directory_;
  const std::string model_ = testing_support::WriteTinyModel();
  const std::string text_ = directory_.Path("text");
  ModelConfig config_;
};

TEST_F(QualityTest, EachBadFlagIsNamed) {
  const auto refused = [&](const std::string& what, const auto& change) {
    QualityOptions options = Options();
    change(&options);
    ExpectInvalid(options.Validate(), what);
    ExpectInvalid(RunQuality(options).status(), what);
  };
  using Options = QualityOptions;
  refused("--model", [](Options* o) { o->text.model = ""; });
  refused("--text", [](Options* o) { o->text.text = ""; });
  refused("--threads 9999", [](Options* o) { o->text.threads = 9999; });
  refused("--tokens 1000", [](Options* o) { o->text.tokens = 1000; });
  refused("--tokens 0", [](Options* o) { o->text.tokens = 0; });
  refused("--tokens 512 are one window", [](Options* o) { o->text.tokens = 512; });
  refused("--rotations", [](Options* o) { o->rotations.clear(); });
  refused("--windows", [](Options* o) { o->windows.clear(); });
  refused("--recall_passages 1", [](Options* o) {
    o->recall_tokens = 512;
    o->recall_passages = 1;
  });
  refused("--recall_tokens 512 x --recall_passages 4", [](Options* o) { o->recall_tokens = 512; });
  refused("--recall_tokens 64", [](Options* o) { o->recall_tokens = 64; });
}

TEST_F(QualityTest, WhatTheModelTextOrFormatCannotDoIsNamed) {
  const auto refused = [&](const std::string& what, const auto& change) {
    QualityOptions options = Options();
    change(&options);
    ExpectInvalid(RunQuality(options).status(), what);
  };
  using Options = QualityOptions;
  refused("'mixed@0/0': format field 'sink_tokens' is 0", [](Options* o) {
    o->windows = {{0, 0}};
  });
  refused("'mixed@64/100': format field 'recent_tokens'", [](Options* o) {
    o->windows = {{64, 64}, {64, 100}};
  });
  refused("--window 4096", [](Options* o) {
    o->text.window = 4096;
    o->text.tokens = 8192;
  });
  refused("tokens; 9536 are needed", [](Options* o) { o->text.skip_tokens = 8000; });
  refused("--recall_tokens 1100", [](Options* o) {
    o->text.tokens = 2560;
    o->recall_tokens = 1100;
    o->recall_passages = 2;
  });
  refused("recent window of 'mixed@64/512'", [](Options* o) {
    o->windows = {{64, 64}, {64, 512}};
    o->recall_tokens = 512;
    o->recall_passages = 2;
  });
  refused("--controls", [&](Options* o) {
    o->controls = true;
    o->rotations = {{"hadamard", directory_.Path("hadamard")}};
  });
  refused("rotation set", [&](Options* o) { o->rotations = {{"text", text_}}; });
}

TEST_F(QualityTest, ASetForAnotherModelOrNoFileIsNamed) {
  QualityOptions options = Options();
  RotationSet other = TinyRotations(config_, "none");
  other.weights_revision = "another";
  WriteFile(directory_.Path("other"), other.Serialize());
  options.rotations = {{"other", directory_.Path("other")}};
  absl::Status status = RunQuality(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'other@64/64'"));
  options.rotations = {{"away", directory_.Path("away")}};
  status = RunQuality(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr(directory_.Path("away")));
}

TEST(ParseFlagsTest, PiecesComeInTheirOrderAndBadOnesAreNamed) {
  const auto rotations = ParseRotationsFlag("b=x,a=y=z");
  ASSERT_TRUE(rotations.ok()) << rotations.status();
  const std::vector<std::pair<std::string, std::string>> expected = {{"b", "x"}, {"a", "y=z"}};
  EXPECT_EQ(*rotations, expected);
  for (const char* bad : {"a", "=x", "a="}) {
    ExpectInvalid(ParseRotationsFlag(bad).status(), bad);
  }
  ExpectInvalid(ParseRotationsFlag("a=x,a=y").status(), "'a' stands for two files");

  const auto windows = ParseWindowsFlag("64/256,128/0");
  ASSERT_TRUE(windows.ok()) << windows.status();
  ASSERT_EQ(windows->size(), 2u);
  EXPECT_EQ((*windows)[1].sink_tokens, 128u);
  EXPECT_EQ((*windows)[1].recent_tokens, 0u);
  for (const char* bad : {"64", "64/", "/64", "64/256/1", "a/64", "-64/64", "64/99999999999"}) {
    ExpectInvalid(ParseWindowsFlag(bad).status(), bad);
  }
  ExpectInvalid(ParseWindowsFlag("64/64,64/64").status(), "64/64 stands there twice");
}

TEST_F(QualityTest, Bf16AgainstItselfHasNoGapAndOtherFiguresAreThoseOfNll) {
  QualityOptions options = Options();
  options.rotations.push_back({"none", directory_.Path("none")});
  options.windows.push_back({64, kBf16RecentTokens});
  const QualityReport report = Run(options);
  ASSERT_EQ(report.variants.size(), 5u);
  for (const size_t i : {0, 4}) {
    const VariantQuality& same = report.variants[i];
    EXPECT_EQ(same.gap.low, 0) << same.name;
    EXPECT_EQ(same.gap.high, 0);
    EXPECT_EQ(same.kl.high, 0);
    EXPECT_EQ(same.agreement.low, 1);
    EXPECT_EQ(same.bits.all, 16);
  }
  const VariantQuality& int2 = report.variants[1];
  EXPECT_EQ(int2.name, "mixed@64/64");
  EXPECT_GT(int2.kl.low, 0);
  EXPECT_LE(int2.kl.low, int2.kl.mean);
  EXPECT_GE(int2.kl.high, int2.kl.mean);
  EXPECT_LT(int2.agreement.mean, 1);
  EXPECT_DOUBLE_EQ(int2.perplexity.mean, std::exp(int2.nll.mean));

  const auto nll = RunNll({.windows = options.text,
                           .rotations = options.rotations,
                           .sink_tokens = 64,
                           .recent_tokens = 64});
  ASSERT_TRUE(nll.ok()) << nll.status();
  EXPECT_EQ(report.variants[0].nll.mean, nll->nll.at("bf16"));
  EXPECT_EQ(int2.nll.mean, nll->nll.at("mixed"));
  EXPECT_EQ(int2.gap.low, nll->gap.at("mixed").low);
  EXPECT_EQ(report.variants[3].gap.high, nll->gap.at("none").high);
  EXPECT_EQ(report.tokens, nll->tokens);
  // 511 tokens: seven blocks and a last one, of which one is sink and one recent.
  EXPECT_EQ(nll->history_tokens, 5u * 64);
  EXPECT_EQ(int2.bits.history_tokens, 5u * 64);
  EXPECT_EQ(report.variants[4].bits.history_tokens, 0u);
  const auto all_bf16 = RunNll({.windows = options.text,
                                .rotations = options.rotations,
                                .sink_tokens = 64,
                                .recent_tokens = 448});
  ExpectInvalid(all_bf16.status(), "--window 512: no token would be read from INT2");
  options.windows = {{64, 448}};
  ExpectInvalid(RunQuality(options).status(), "--window 512: no token would be read from INT2");
  // All pairs of the four variants; none of another sign than its gaps.
  ASSERT_EQ(report.differences.size(), 6u);
  EXPECT_EQ(report.differences[0].a, "mixed@64/1048576");
  EXPECT_EQ(report.differences[0].b, "mixed@64/64");
  EXPECT_NEAR(report.differences[0].difference.mean,
              report.variants[2].gap.mean - report.variants[1].gap.mean, 1e-12);
}

TEST_F(QualityTest, ControlsWithLessOfAWindowAreWorseAndEightBitsAreBetter) {
  QualityOptions options = Options();
  options.controls = true;
  options.recall_tokens = 400;
  options.recall_passages = 2;
  const QualityReport report = Run(options);
  ASSERT_EQ(report.variants.size(), 5u);
  ASSERT_EQ(report.verdicts.size(), 3u);
  EXPECT_TRUE(report.differences.empty());
  const VariantQuality& reference = report.variants[1];
  const VariantQuality& none = report.variants[2];
  const VariantQuality& shifted = report.variants[3];
  const VariantQuality& int8 = report.variants[4];
  EXPECT_GT(none.kl.mean, reference.kl.mean);
  EXPECT_NE(shifted.rotation_hash, reference.rotation_hash);
  EXPECT_NE(shifted.kl.mean, reference.kl.mean);
  EXPECT_LT(int8.kl.mean, reference.kl.mean / 10);
  EXPECT_EQ(int8.bits.history, 8.5);
  EXPECT_EQ(report.verdicts[2].name, "control-int8");
  EXPECT_TRUE(report.verdicts[2].held);
  EXPECT_LT(report.verdicts[2].kl_ratio, 0.1);
  EXPECT_EQ(report.verdicts[2].gap.mean, int8.gap.mean);
  EXPECT_EQ(report.variants[0].recall.agreement.low, 1);
  EXPECT_LT(reference.recall.agreement.mean, 1);
  EXPECT_THAT(report.ToTable(), HasSubstr("control-int8     must pass       held"));
  EXPECT_THAT(report.ToTable(), HasSubstr("2 passages of 400 tokens"));

  const std::string line = report.ToJson();
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["variants"]["mixed@64/64"]["kl"]["mean"], reference.kl.mean);
  EXPECT_EQ(json["variants"]["mixed@64/64"]["bits_history"], 2.5);
  EXPECT_EQ(json["variants"]["bf16"]["recall"]["accuracy_loss"]["mean"], 0);
  EXPECT_EQ(json["controls"][2]["held"], true);
  EXPECT_EQ(json["recall"]["cue_tokens"], 64);
}

TEST_F(QualityTest, TheProgramEndsWithOneJsonLineAndExitsWithAnErrorOnlyForOne) {
  const std::vector<std::string> command = {
      "okv-bench", "quality",     "--model",
      model_,      "--text",      text_,
      "--tokens",  "512",         "--window",
      "256",       "--json",      "--recall_tokens",
      "0",         "--controls",  "--threads",
      "2",         "--rotations", "mixed=" + directory_.Path("mixed"),
      "--windows"};
  std::vector<std::string> good = command;
  good.push_back("64/64");
  const auto result = RunProgram(good);
  EXPECT_EQ(result.code, 0) << result.output;
  const auto json = nlohmann::json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(json.is_discarded()) << result.last_line;
  EXPECT_EQ(json["variants"].size(), 5u);
  EXPECT_EQ(json["controls"].size(), 3u);
  std::vector<std::string> bad = command;
  bad.push_back("64/64,0/0");
  const auto refused = RunProgram(bad);
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.output, HasSubstr("'mixed@0/0': format field 'sink_tokens'"));
}

TEST_F(QualityTest, BitsAreThoseOfTheBlocksAtTheEndOfASequence) {
  const Contender contender = TinyContender(config_, "none", {.name = "a", .windows = {64, 256}});
  // 16 blocks: the first, the last and the four before it in BF16.
  const BitsPerElement bits = CountBits(contender, 1024);
  EXPECT_DOUBLE_EQ(bits.history, 2.5);
  EXPECT_DOUBLE_EQ(bits.all, (6 * 16 + 10 * 2.5) / 16);
  // The 1,025th token demotes a block and is itself in BF16.
  EXPECT_DOUBLE_EQ(CountBits(contender, 1025).all, ((5 * 64 + 1) * 16 + 11 * 64 * 2.5) / 1025);
  EXPECT_DOUBLE_EQ(CountBits(contender, 6 * 64).history, 16);
  EXPECT_DOUBLE_EQ(CountBits(contender, 6 * 64 + 1).history, 2.5);
  EXPECT_DOUBLE_EQ(CountBits(MakeBf16Contender(config_), 100000).all, 16);
}

TEST_F(QualityTest, ShiftedLayersAreTheNextOnesAndBackAgain) {
  RotationSet set = TinyRotations(config_, "mixed");
  set.clip_rank_k = {1, 2, 3, 4};
  const RotationSet shifted = ShiftLayers(set);
  EXPECT_TRUE(shifted.Validate().ok());
  EXPECT_NE(shifted.hash(), set.hash());
  EXPECT_EQ(shifted.RotationK(0, 0)[1], set.RotationK(1, 0)[1]);
  EXPECT_EQ(shifted.RotationV(1, 0)[1], set.RotationV(0, 0)[1]);
  EXPECT_EQ(shifted.clip_rank_k, (std::vector<uint32_t>{3, 4, 1, 2}));
  EXPECT_EQ(ShiftLayers(shifted), set);
}

TEST(JudgeControlTest, FiguresOnTheWrongSideAreNotHeld) {
  const WindowScores baseline = {.nll = {2, 3}, .kl = {0, 0}, .agreement = {1, 1}};
  const WindowScores reference = {.nll = {2.1, 3.1}, .kl = {0.1, 0.1}, .agreement = {}};
  const auto held = [&](Control::Must must, double gap, double kl) {
    const WindowScores control = {.nll = {2 + gap, 3 + gap}, .kl = {kl, kl}, .agreement = {}};
    return JudgeControl({.must = must, .contender = {}},
                        {.control = &control, .reference = &reference, .baseline = &baseline}, 1)
        .held;
  };
  EXPECT_TRUE(held(Control::Must::kFailBadly, 1.0, 1.1));
  EXPECT_FALSE(held(Control::Must::kFailBadly, 1.0, 0.9));
  EXPECT_FALSE(held(Control::Must::kFailBadly, 0.05, 1.1));
  EXPECT_TRUE(held(Control::Must::kFail, 0.2, 0.21));
  EXPECT_FALSE(held(Control::Must::kFail, 0.2, 0.19));
  EXPECT_FALSE(held(Control::Must::kFail, 0.1, 0.21));
  EXPECT_TRUE(held(Control::Must::kPass, 0.004, 0.009));
  EXPECT_FALSE(held(Control::Must::kPass, 0.006, 0.009));
  EXPECT_FALSE(held(Control::Must::kPass, -0.006, 0.009));
  EXPECT_FALSE(held(Control::Must::kPass, 0.004, 0.011));
}

}  // namespace
}  // namespace okv
