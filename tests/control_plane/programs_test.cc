// okv-control and okvctl as programs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/support/fixtures.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing::HasSubstr;
using testing_support::HttpGet;
using testing_support::Process;
using testing_support::ReadFileOrEmpty;
using testing_support::RunProgram;
using testing_support::RunResult;
using testing_support::SmallRotations;
using testing_support::TempDir;
using testing_support::WaitForFile;
using testing_support::WriteFile;

class ProgramsTest : public testing::Test {
 protected:
  // Starts okv-control and waits until it serves.
  void Start(const std::vector<std::string>& more = {}) {
    const std::string port_file = directory_.Path(absl::StrCat("port", ++starts_));
    std::vector<std::string> argv = {"okv-control", "--data_dir", directory_.Path("data"),
                                     "--port_file", port_file};
    argv.insert(argv.end(), more.begin(), more.end());
    control_ = Process::Start(argv);
    ASSERT_TRUE(WaitForFile(port_file, control_.get())) << control_->output();
    std::string port = ReadFileOrEmpty(port_file);
    port.erase(port.find('\n'));
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  RunResult Okvctl(std::vector<std::string> words) {
    words.insert(words.begin(), {"okvctl", "--control", address_});
    return RunProgram(words);
  }

  const TempDir directory_;
  std::unique_ptr<Process> control_;
  std::string address_;
  int starts_ = 0;
};

// Exit code 1, and a last line that says what is wrong.
void ExpectRefused(const std::vector<std::string>& argv, const std::string& words) {
  const RunResult result = RunProgram(argv);
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr(words));
}

TEST_F(ProgramsTest, SaysWhenItIsReadyAndStopsOnBothSignals) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Start();
    EXPECT_THAT(control_->output(), HasSubstr(absl::StrCat("okv-control ready on ", address_)));
    control_->Signal(signal);
    EXPECT_EQ(control_->Wait(std::chrono::seconds(20)), 0) << control_->output();
  }
}

TEST_F(ProgramsTest, WhatIsWrongWithTheCommandLineIsSaid) {
  ExpectRefused({"okv-control", "--bogus"}, "bogus");
  ExpectRefused({"okv-control", "stray"}, "stray");
  ExpectRefused({"okv-control"}, "data_dir is missing");
  const std::string data = directory_.Path("data");
  ExpectRefused({"okv-control", "--data_dir", data, "--node_timeout_ms", "5"}, "node_timeout_ms");
  ExpectRefused({"okv-control", "--data_dir", data, "--listen", "0.0.0.0:0"}, "listen");
  ExpectRefused({"okv-control", "--data_dir", data, "--listen", "nonsense"}, "nonsense");
  ExpectRefused({"okv-control", "--data_dir", "/dev/null/data"}, "/dev/null/data");
}

TEST_F(ProgramsTest, TakenPortAndTakenDirectoryAreNamed) {
  Start();
  ExpectRefused({"okv-control", "--data_dir", directory_.Path("data")}, directory_.Path("data"));
  ExpectRefused({"okv-control", "--data_dir", directory_.Path("other"), "--listen", address_},
                address_);
}

TEST_F(ProgramsTest, PublishedSetSurvivesAKillAndComesBackByteForByte) {
  Start();
  RotationSet set = SmallRotations("hadamard", 2);
  set.promised_error_v = {0.25f, 0.5f};
  const std::string file = set.Serialize();
  const std::string hash = set.hash().Hex();
  WriteFile(directory_.Path("set.safetensors"), file);
  RunResult result = Okvctl({"publish", directory_.Path("set.safetensors")});
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr(hash));
  control_->Signal(SIGKILL);
  EXPECT_EQ(control_->Wait(std::chrono::seconds(20)), 128 + SIGKILL);

  Start();
  result = Okvctl({"rotations"});
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr(hash));
  result = Okvctl({"get", hash, directory_.Path("got.safetensors")});
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(ReadFileOrEmpty(directory_.Path("got.safetensors")), file);
  result = Okvctl({"get", std::string(64, '0'), directory_.Path("none")});
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr(std::string(64, '0')));
}

TEST_F(ProgramsTest, OkvctlRefusesWhatItCannotUse) {
  Start();
  WriteFile(directory_.Path("garbage"), "garbage");
  EXPECT_EQ(Okvctl({"publish", directory_.Path("garbage")}).code, 1);
  EXPECT_THAT(Okvctl({"publish", directory_.Path("absent")}).output, HasSubstr("absent"));
  EXPECT_EQ(Okvctl({"get", "abc", directory_.Path("x")}).code, 1);
  EXPECT_EQ(Okvctl({"dance"}).code, 2);
  EXPECT_EQ(RunProgram({"okvctl", "status"}).code, 2);
  const RunResult absent =
      RunProgram({"okvctl", "--control", "127.0.0.1:1", "--timeout_s", "0.3", "status"});
  EXPECT_EQ(absent.code, 1);
  EXPECT_THAT(absent.output, HasSubstr("127.0.0.1:1"));
}

TEST_F(ProgramsTest, StatusAndMetricsShowTheCluster) {
  Start({"--metrics", "127.0.0.1:0"});
  const RunResult result = Okvctl({"--json", "status"});
  ASSERT_EQ(result.code, 0) << result.output;
  const auto json = nlohmann::json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << result.output;
  EXPECT_EQ(json["objects"], 0);
  EXPECT_TRUE(json["nodes"].empty());

  const std::string output = control_->output();
  const std::string label = "metrics on ";
  ASSERT_THAT(output, HasSubstr(label));
  const size_t at = output.find(label) + label.size();
  const std::string metrics = HttpGet(output.substr(at, output.find('\n', at) - at), "/metrics");
  for (const char* name : {"okv_control_nodes{state=\"alive\"} 0", "okv_control_objects 0",
                           "okv_control_reservations 0", "okv_control_lookup_seconds_count 0"}) {
    EXPECT_THAT(metrics, HasSubstr(name));
  }
}

}  // namespace
}  // namespace okv
