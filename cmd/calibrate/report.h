#ifndef OKV_CMD_CALIBRATE_REPORT_H_
#define OKV_CMD_CALIBRATE_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "calib/dump.h"
#include "calib/report.h"
#include "kernels/thread_pool.h"
#include "nlohmann/json.hpp"

namespace okv {

struct ReportPaths {
  std::string activations;             // A dump of text that the rotations were not fitted to.
  std::string fit_dump;                // What U is made of; empty: other windows of activations.
  std::vector<std::string> rotations;  // Set files, each PATH or NAME=PATH; the name of a PATH is
                                       // its file's without the suffix.
  std::string json_out;                // Empty: not written.
  std::string html_out;
};

// Measures, writes what is asked for, prints progress to stderr. Gives the report without its
// layers. Errors as MeasureReport, DumpReader::Open and RotationSet::Parse, naming the file;
// kInvalidArgument: no activations; otherwise the errno's status.
absl::StatusOr<nlohmann::ordered_json> WriteReport(const ReportPaths& paths, const DumpNames& names,
                                                   const ReportOptions& options, ThreadPool* pool);

// The summary as lines for people: of each group size the steps' factors.
std::string SummaryText(const nlohmann::ordered_json& report);

}  // namespace okv

#endif  // OKV_CMD_CALIBRATE_REPORT_H_
