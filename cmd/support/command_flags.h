#ifndef OKV_CMD_SUPPORT_COMMAND_FLAGS_H_
#define OKV_CMD_SUPPORT_COMMAND_FLAGS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace okv {

// For programs whose first word is a command. A flag whose help begins with commands and a colon
// ("fit, import: the set to write"; more of them behind a semicolon) is read by these alone, any
// other flag by every command.

// The commands that `help` names; empty: all.
std::vector<absl::string_view> CommandsOfHelp(absl::string_view help,
                                              absl::Span<const absl::string_view> commands);

// kInvalidArgument, naming the flag and the commands that it is for, when `arguments` (argv as it
// was before ParseCommandLine) sets a flag that `command` does not read: it would change nothing.
absl::Status CheckFlagsOf(absl::string_view command, absl::Span<const absl::string_view> commands,
                          absl::Span<const char* const> arguments);

}  // namespace okv

#endif  // OKV_CMD_SUPPORT_COMMAND_FLAGS_H_
