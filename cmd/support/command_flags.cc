#include "cmd/support/command_flags.h"

#include <string>

#include "absl/algorithm/container.h"
#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace okv {
namespace {

// The flag that a word of the command line sets; null when it is none.
const absl::CommandLineFlag* FlagOf(absl::string_view word) {
  if (!absl::ConsumePrefix(&word, "-")) return nullptr;
  absl::ConsumePrefix(&word, "-");
  word = word.substr(0, word.find('='));
  if (const auto* flag = absl::FindCommandLineFlag(word); flag != nullptr) return flag;
  return absl::ConsumePrefix(&word, "no") ? absl::FindCommandLineFlag(word) : nullptr;
}

}  // namespace

std::vector<absl::string_view> CommandsOfHelp(absl::string_view help,
                                              absl::Span<const absl::string_view> commands) {
  std::vector<absl::string_view> named;
  for (const absl::string_view part : absl::StrSplit(help, "; ")) {
    const size_t colon = part.find(':');
    if (colon == absl::string_view::npos) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(part.substr(0, colon), ", ");
    const bool are_commands = absl::c_all_of(
        words, [&](absl::string_view word) { return absl::c_linear_search(commands, word); });
    if (are_commands) named.insert(named.end(), words.begin(), words.end());
  }
  return named;
}

absl::Status CheckFlagsOf(absl::string_view command, absl::Span<const absl::string_view> commands,
                          absl::Span<const char* const> arguments) {
  for (const absl::string_view word : arguments) {
    if (word == "--") break;
    const absl::CommandLineFlag* const flag = FlagOf(word);
    if (flag == nullptr) continue;
    const std::string help = flag->Help();
    const std::vector<absl::string_view> of = CommandsOfHelp(help, commands);
    if (of.empty() || absl::c_linear_search(of, command)) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", flag->Name(), " is for ",
                                                   absl::StrJoin(of, ", "), ", not for ", command));
  }
  return absl::OkStatus();
}

}  // namespace okv
