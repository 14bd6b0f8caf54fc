#ifndef OKV_CMD_SUPPORT_SERVICE_H_
#define OKV_CMD_SUPPORT_SERVICE_H_

// What the service programs (okv-control, okv-node) share: flags, stop signals, exit codes.

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace okv {

// Returns the signal, SIGTERM or SIGINT, that asks the program to stop; waits until there is one.
using StopWaiter = std::function<int()>;

// The main function of service program `name`: parses the flags, blocks the stop signals before the
// first thread starts (so that every thread inherits it), ignores SIGPIPE, and runs `service`.
// Returns the exit code: 0, or 1 after one line on stderr that names what is wrong, an argument
// that is no flag included.
int RunService(absl::string_view name, int argc, char** argv,
               const std::function<absl::Status(const StopWaiter& wait_for_stop)>& service);

}  // namespace okv

#endif  // OKV_CMD_SUPPORT_SERVICE_H_
