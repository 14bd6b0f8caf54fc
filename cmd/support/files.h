#ifndef OKV_CMD_SUPPORT_FILES_H_
#define OKV_CMD_SUPPORT_FILES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace okv {

// The whole file. kNotFound naming the path and the reason when it cannot be read.
absl::StatusOr<std::string> ReadFile(const std::string& path);

// Whoever waits for the file sees all of it or nothing. kFailedPrecondition naming the path.
absl::Status WriteFileAtomically(const std::string& path, const std::string& text);

}  // namespace okv

#endif  // OKV_CMD_SUPPORT_FILES_H_
