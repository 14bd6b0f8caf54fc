// The fault tests' own rounds: what they must notice, they notice.

#include "tests/cluster/fault_round.h"

#include <signal.h>

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace okv::faults {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FaultRoundTest : public ::testing::Test {
 protected:
  void EndsWith(int signal) {
    round_.SignalNode(0, signal);
    while (round_.NodeRuns(0)) std::this_thread::yield();
  }

  Tally tally_;
  Round round_{/*seed=*/1, RoundOptions(), &tally_};
};

TEST_F(FaultRoundTest, ANodeThatEndsOnItsOwnFailsTheRoundWithItsCode) {
  round_.StartControl();
  round_.StartNode(0);
  round_.CheckNodesRun();
  EXPECT_THAT(round_.failures(), IsEmpty());
  EndsWith(SIGQUIT);
  round_.Finish();
  EXPECT_THAT(round_.failures(), ElementsAre("node-0 ended on its own with 131"));
  EXPECT_EQ(tally_.failed_checks, 1u);
}

TEST_F(FaultRoundTest, ANodeThatEndedBeforeItWasKilledOrStoppedIsNoticedToo) {
  round_.StartControl();
  round_.StartNode(0);
  EndsWith(SIGQUIT);
  round_.KillNode(0);
  EXPECT_THAT(round_.failures(), ElementsAre("node-0 ended on its own with 131"));
  round_.StartNode(0);
  EndsWith(SIGABRT);
  round_.StopNode(0);
  EXPECT_THAT(round_.failures(),
              ElementsAre("node-0 ended on its own with 131", "node-0 ended on its own with 134"));
}

TEST_F(FaultRoundTest, ANodeThatIsKilledOrStoppedIsMissedByNobody) {
  round_.StartControl();
  round_.StartNode(0);
  round_.KillNode(0);
  round_.StartNode(0);
  round_.StopNode(0);
  round_.Finish();
  EXPECT_THAT(round_.failures(), IsEmpty());
}

}  // namespace
}  // namespace okv::faults
