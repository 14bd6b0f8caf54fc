#ifndef OKV_CMD_CALIBRATE_FIT_SUMMARY_H_
#define OKV_CMD_CALIBRATE_FIT_SUMMARY_H_

#include <string>

#include "calib/fit.h"
#include "nlohmann/json.hpp"

namespace okv {

// What a fit's own held-out text says about its choices.
//   reported_error_{k,v}_mean  error of attention outputs on the reporting windows
//   reports_apart              false: too little text, those are the judging windows
//   clips                      the fitted clip ranks against the published ratios 0.96 and 0.92,
//                              the same rotations, layer by layer on the reporting windows: ratios
//                              of errors, below 1 where the fitted ones are better
//   value_objectives           of --value_objective auto: how often each was taken, and the errors
//                              of energy over those of softmax before descents on the judging
//                              windows: geometric mean over rotations, 95 %
// A part that was not measured is left out.
nlohmann::ordered_json FitComparisons(const FitResult& result);

// The same in lines for people; empty where nothing was measured.
std::string FitComparisonLines(const nlohmann::ordered_json& comparisons);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_FIT_SUMMARY_H_
