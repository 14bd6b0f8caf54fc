#include "cmd/support/command_flags.h"

#include <vector>

#include "absl/flags/flag.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(int, of_one, 0, "fit: a number; 0 = none");
ABSL_FLAG(int, of_two, 0, "fit, import: a number: more; draw: another");
ABSL_FLAG(bool, of_all, false, "a switch; fitted: yes or no");

namespace okv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::string_view kCommands[] = {"fit", "import", "draw"};

absl::Status Check(absl::string_view command, std::vector<const char*> flags) {
  flags.insert(flags.begin(), {"program", "command"});
  return CheckFlagsOf(command, kCommands, flags);
}

TEST(CommandFlagsTest, AHelpBeginsWithItsCommands) {
  EXPECT_THAT(CommandsOfHelp("fit: a number", kCommands), ElementsAre("fit"));
  EXPECT_THAT(CommandsOfHelp("fit, import: a number; draw: another", kCommands),
              ElementsAre("fit", "import", "draw"));
  EXPECT_THAT(CommandsOfHelp("fit, or so: a number", kCommands), IsEmpty());
  EXPECT_THAT(CommandsOfHelp("a number", kCommands), IsEmpty());
}

TEST(CommandFlagsTest, WhatACommandReadsIsTaken) {
  EXPECT_TRUE(Check("fit", {"--of_one=3", "--of_two", "4", "--of_all"}).ok());
  EXPECT_TRUE(Check("draw", {"-of_two=4", "--noof_all"}).ok());
  EXPECT_TRUE(Check("import", {"--", "--of_one=3"}).ok());
}

TEST(CommandFlagsTest, WhatItWouldNotReadIsRefusedByName) {
  for (const char* word : {"--of_one=3", "-of_one", "--of_one"}) {
    const absl::Status status = Check("import", {word, "3"});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_THAT(status.message(), HasSubstr("--of_one is for fit, not for import"));
  }
}

}  // namespace
}  // namespace okv
