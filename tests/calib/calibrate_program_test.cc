#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "proto/rotation_set.h"
#include "tests/calib/run_calibrate.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::HasSubstr;

class CalibrateProgramTest : public testing::Test {
 protected:
  void SetUp() override { WriteDump(dump_, {0, 1}, {}, 1); }

  const TempDirectory directory_;
  const std::string dump_ = directory_.Path("dump");
  const std::string out_ = directory_.Path("rotations.safetensors");
  const std::string fit_ = absl::StrCat("fit --refine_steps 5 --dump ", dump_, " --out ", out_);
};

TEST_F(CalibrateProgramTest, FitWritesASetThatInspectAndTheLibraryRead) {
  const RunResult fit = RunCalibrate(fit_ + " --json");
  ASSERT_EQ(fit.exit_code, 0) << fit.output;
  const auto json = nlohmann::json::parse(fit.last_line(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << fit.output;
  EXPECT_EQ(json["method"], "oscar");
  EXPECT_EQ(json["layers"], 2);
  EXPECT_EQ(json["tokens"], 160);
  EXPECT_GT(json["logit_error_mean"].get<double>(), 0);
  EXPECT_GT(json["output_error_mean"].get<double>(), 0);
  EXPECT_LT(json["orthogonality_error_max"].get<double>(), 1.0 / 256);
  EXPECT_THAT(fit.output, HasSubstr("layer 1 (2 of 2)"));

  const auto set = RotationSet::Parse(ReadFile(out_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->hash().Hex(), json["hash"].get<std::string>());
  EXPECT_EQ(set->provenance.at("tokens"), "160");
  EXPECT_EQ(set->provenance.at("value_objective"), "softmax");

  const RunResult inspect = RunCalibrate("inspect --json " + out_);
  ASSERT_EQ(inspect.exit_code, 0) << inspect.output;
  const auto seen = nlohmann::json::parse(inspect.last_line(), nullptr, false);
  ASSERT_TRUE(seen.is_object()) << inspect.output;
  EXPECT_EQ(seen["hash"], json["hash"]);
  EXPECT_EQ(seen["model"], "synthetic");
  EXPECT_EQ(seen["provenance"]["clip_k"], "auto");
  EXPECT_EQ(seen["provenance"]["key_objectives_used"], json["key_objectives_used"]);
}

TEST_F(CalibrateProgramTest, ThePublishedRecipeIsAFlagAndItsPartsCanBeChanged) {
  const RunResult plain = RunCalibrate(fit_ + " --recipe published --json");
  ASSERT_EQ(plain.exit_code, 0) << plain.output;
  const auto json = nlohmann::json::parse(plain.last_line(), nullptr, false);
  EXPECT_EQ(json["key_objectives_used"], "qqt 2");
  EXPECT_EQ(json["refined"], 0);
  auto set = RotationSet::Parse(ReadFile(out_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->clip_rank_k, testing::Each(61u));
  EXPECT_THAT(set->clip_rank_v, testing::Each(58u));

  const RunResult changed =
      RunCalibrate(fit_ + " --recipe published --key_objective kkt --clip_k 0.5 --clip_v auto");
  ASSERT_EQ(changed.exit_code, 0) << changed.output;
  set = RotationSet::Parse(ReadFile(out_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->clip_rank_k, testing::Each(32u));
  EXPECT_EQ(set->provenance.at("key_objectives_used"), "kkt 2");
  EXPECT_EQ(set->provenance.at("clip_v"), "auto");
  EXPECT_EQ(set->provenance.at("refine_steps"), "0");
}

// Three windows: one to fit on, one to choose by, one to report on.
TEST_F(CalibrateProgramTest, HeldOutTextComparesClipsAndValueObjectives) {
  const std::string dump = directory_.Path("windows");
  WriteDump(dump, {0, 1}, {.sequence_lengths = {450, 450, 450}}, 1);
  const RunResult fit = RunCalibrate("fit --refine_steps 0 --value_objective auto --json --dump " +
                                     dump + " --out " + out_);
  ASSERT_EQ(fit.exit_code, 0) << fit.output;
  const auto json = nlohmann::json::parse(fit.last_line(), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << fit.output;
  EXPECT_EQ(json["reports_apart"], true);
  EXPECT_GT(json["reported_error_k_mean"].get<double>(), 0);
  EXPECT_NE(json["reported_error_v_mean"], json["judged_error_v_mean"]);
  EXPECT_EQ(json["value_objectives"]["softmax"].get<int>() +
                json["value_objectives"]["energy"].get<int>(),
            4);
  const auto& ratio = json["value_objectives"]["energy_over_softmax"];
  EXPECT_LT(ratio["low"].get<double>(), ratio["mean"].get<double>());
  EXPECT_LT(ratio["mean"].get<double>(), ratio["high"].get<double>());
  for (const char* tensor : {"k", "v"}) {
    const auto& clips = json["clips"][tensor];
    EXPECT_GT(clips["mean"].get<double>(), 0);
    EXPECT_GE(clips["worst"].get<double>(), clips["mean"].get<double>());
    EXPECT_LE(clips["layers_above_1.01"].get<int>(), 2);
  }
  EXPECT_THAT(fit.output, HasSubstr("value objectives: softmax taken "));
  EXPECT_THAT(fit.output, HasSubstr("clips of k over the published ratio's, errors: mean "));
  const auto set = RotationSet::Parse(ReadFile(out_));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->provenance.at("value_objective"), "auto");

  // The published ratios against themselves.
  const RunResult same =
      RunCalibrate("fit --recipe published --json --dump " + dump + " --out " + out_);
  ASSERT_EQ(same.exit_code, 0) << same.output;
  const auto equal = nlohmann::json::parse(same.last_line(), nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(equal["clips"]["k"]["worst"], 1.0);
  EXPECT_EQ(equal["clips"]["v"]["mean"], 1.0);
  EXPECT_FALSE(equal.contains("value_objectives"));
}

TEST_F(CalibrateProgramTest, TwoFitsWriteEqualFiles) {
  ASSERT_EQ(RunCalibrate(fit_ + " --scope kv_head --threads 1").exit_code, 0);
  const std::string first = ReadFile(out_);
  ASSERT_EQ(RunCalibrate(fit_ + " --scope kv_head --threads 3").exit_code, 0);
  EXPECT_EQ(first, ReadFile(out_));
}

TEST_F(CalibrateProgramTest, ErrorsExitWithOneAndNameTheThing) {
  struct Case {
    std::string arguments;
    const char* message;
  };
  const std::string out = " --out " + out_;
  for (const Case& one : {
           Case{"", "say: okv-calibrate"},
           Case{"frobnicate", "say: okv-calibrate"},
           Case{"fit" + out, "--dump is missing"},
           Case{"fit --dump " + dump_, "--out is missing"},
           Case{"fit --dump " + directory_.Path("absent") + out, "absent"},
           Case{fit_ + " --method quarot", "'quarot'"},
           Case{fit_ + " --scope model", "'model'"},
           Case{fit_ + " --value_objective mse", "'mse'"},
           Case{fit_ + " --group_size 48", "group_size is 48"},
           Case{fit_ + " --clip_k 1.5", "clip_k is 1.5"},
           Case{fit_ + " --clip_k -1", "clip_k is -1"},
           Case{fit_ + " --clip_v most", "--clip_v 'most'"},
           Case{fit_ + " --key_objective kv", "'kv'"},
           Case{fit_ + " --recipe best", "--recipe 'best'"},
           Case{fit_ + " --key_objective vvt", "'vvt'"},
           Case{fit_ + " --fit_windows 0", "fit_windows is 0"},
           Case{fit_ + " --no_such_flag 1", "no_such_flag"},
           Case{"fit --dump " + dump_ + " --out " + directory_.Path("absent/set"), "absent/set"},
           Case{"fit --dump " + dump_ + " --out " + directory_.path(), directory_.path().c_str()},
           Case{"inspect " + directory_.Path("absent"), "absent"},
           Case{"inspect " + dump_ + "/layer_0.safetensors", "layer_0.safetensors"},
       }) {
    const RunResult result = RunCalibrate(one.arguments);
    EXPECT_EQ(result.exit_code, 1) << one.arguments;
    EXPECT_THAT(result.output, HasSubstr(one.message)) << one.arguments;
  }
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(CalibrateProgramTest, AFailedFitLeavesTheOldFileAndNoOther) {
  WriteFile(out_, "old");
  const std::string layer = dump_ + "/layer_1.safetensors";
  std::string bytes = ReadFile(layer);
  bytes.replace(bytes.size() - 1000, 2, "\xff\x7f");  // A bf16 NaN among the values.
  WriteFile(layer, bytes);
  const RunResult result = RunCalibrate(fit_);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("NaN or Inf in v of layer 1, token 15"));
  EXPECT_EQ(ReadFile(out_), "old");
  EXPECT_FALSE(std::filesystem::exists(out_ + ".tmp"));
}

TEST_F(CalibrateProgramTest, ACutSetIsDataLossToInspect) {
  ASSERT_EQ(RunCalibrate(fit_).exit_code, 0);
  const std::string bytes = ReadFile(out_);
  WriteFile(out_, bytes.substr(0, bytes.size() - 10));
  const RunResult result = RunCalibrate("inspect " + out_);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("DATA_LOSS"));
}

}  // namespace
}  // namespace okv
