#include "tests/calib/run_calibrate.h"

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace okv {

std::string RunResult::last_line() const {
  const std::vector<std::string> lines = absl::StrSplit(output, '\n', absl::SkipEmpty());
  return lines.empty() ? "" : lines.back();
}

RunResult RunCalibrate(const std::string& arguments) {
  const char* bin = std::getenv("OKV_BIN_DIR");
  EXPECT_NE(bin, nullptr) << "run by ctest, which sets OKV_BIN_DIR";
  const std::string command = absl::StrCat(bin, "/okv-calibrate ", arguments, " 2>&1");
  std::FILE* pipe = popen(command.c_str(), "r");
  RunResult result{.exit_code = -1, .output = ""};
  if (pipe == nullptr) return result;
  char buffer[4096];
  while (const size_t bytes = fread(buffer, 1, sizeof(buffer), pipe)) {
    result.output.append(buffer, bytes);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

}  // namespace okv
