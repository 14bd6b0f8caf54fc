#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/calib/run_calibrate.h"
#include "tests/calib/test_data.h"

namespace okv {
namespace {

using testing::HasSubstr;

class ReportProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    WriteDump(dump_, {0, 1}, {.sequence_lengths = std::vector<uint32_t>(4, 450)}, 1);
  }

  const TempDirectory directory_;
  const std::string dump_ = directory_.Path("dump");
  const std::string set_ = directory_.Path("mine.safetensors");
  const std::string html_ = directory_.Path("report.html");
  const std::string json_ = directory_.Path("report.json");
};

TEST_F(ReportProgramTest, WritesNumbersAndAPage) {
  const RunResult fit =
      RunCalibrate(absl::StrCat("fit --method hadamard --dump ", dump_, " --out ", set_));
  ASSERT_EQ(fit.exit_code, 0) << fit.output;
  const RunResult report =
      RunCalibrate(absl::StrCat("report --activations ", dump_, " --rotations ", set_,
                                ",again=", set_, " --json_out ", json_, " --html_out ", html_));
  ASSERT_EQ(report.exit_code, 0) << report.output;
  EXPECT_THAT(report.output, HasSubstr("layer 1 (2 of 2)"));
  EXPECT_THAT(report.output, HasSubstr("UHP recipe"));
  const auto json = nlohmann::json::parse(ReadFile(json_), nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["head_dim"], 64);
  EXPECT_EQ(json["summary"].size(), 14u);  // Six steps at 32 and 64, two sets.
  ASSERT_EQ(json["layers"].size(), 2u);
  const auto& variants = json["layers"][0]["variants"];
  ASSERT_EQ(variants.size(), 14u);
  EXPECT_EQ(variants[12]["name"], "mine");
  EXPECT_EQ(variants[13]["name"], "again");
  EXPECT_EQ(variants[12]["layer"], variants[13]["layer"]);
  for (const auto& variant : variants) {
    ASSERT_EQ(variant["heads"].size(), 2u);
    for (const char* name :
         {"max_abs", "group_range_mean", "importance_max_over_mean", "error_trace", "clip_rate"}) {
      EXPECT_TRUE(variant["heads"][1]["k"][name].is_number()) << name;
      EXPECT_TRUE(variant["heads"][1]["v"][name].is_number()) << name;
    }
    EXPECT_GT(variant["heads"][0]["attention_kl"].get<double>(), 0);
    EXPECT_GT(variant["heads"][0]["logit_error"].get<double>(), 0);
    EXPECT_GT(variant["heads"][0]["output_error"].get<double>(), 0);
  }
  EXPECT_EQ(json["layers"][0]["k_spectra"]["UHP"].size(), 64u);
  EXPECT_THAT(ReadFile(html_), HasSubstr("</html>"));
}

TEST_F(ReportProgramTest, NamesWhatIsWrong) {
  EXPECT_THAT(RunCalibrate("report").output, HasSubstr("--activations is missing"));
  const std::string report = absl::StrCat("report --activations ", dump_);
  RunResult result = RunCalibrate(report + " --rotations " + directory_.Path("absent"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("absent"));
  WriteFile(set_, "no safetensors");
  EXPECT_THAT(RunCalibrate(report + " --rotations " + set_).output, HasSubstr("mine.safetensors"));
  EXPECT_THAT(RunCalibrate(report + " --group_sizes 32,abc").output, HasSubstr("'abc'"));
  EXPECT_THAT(RunCalibrate(report + " --group_sizes 48").output, HasSubstr("group_size is 48"));
  EXPECT_THAT(RunCalibrate(report + " --html_out /no/such/folder/x").output,
              HasSubstr("/no/such/folder/x"));
}

}  // namespace
}  // namespace okv
