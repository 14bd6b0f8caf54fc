#ifndef OKV_TESTS_CALIB_RUN_CALIBRATE_H_
#define OKV_TESTS_CALIB_RUN_CALIBRATE_H_

#include <string>

namespace okv {

struct RunResult {
  int exit_code;
  std::string output;  // stdout and stderr together.
  std::string last_line() const;
};

// Runs okv-calibrate with these arguments, as a shell reads them.
RunResult RunCalibrate(const std::string& arguments);

}  // namespace okv

#endif  // OKV_TESTS_CALIB_RUN_CALIBRATE_H_
