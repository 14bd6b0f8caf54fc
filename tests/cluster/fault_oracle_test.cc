// The fault tests' own judge: what it must notice, it notices.

#include "tests/cluster/fault_oracle.h"

#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv::faults {
namespace {

using testing_support::TempDir;
using testing_support::WriteFile;

constexpr int kOk = static_cast<int>(absl::StatusCode::kOk);
constexpr int kNotFound = static_cast<int>(absl::StatusCode::kNotFound);
constexpr int kDataLoss = static_cast<int>(absl::StatusCode::kDataLoss);
constexpr BlockName kBlock = {.chain = 3, .index = 1};
constexpr BlockName kTried = {.chain = 3, .index = 2};

class FaultOracleTest : public ::testing::Test {
 protected:
  // kBlock was acknowledged to writer 7 at 100 ns; kTried was not.
  void SetUp() override {
    WriteFile(directory_.Path("journal"),
              "T 100 0 3 1 7\nA 100 150 3 1 7\nT 200 0 3 2 7\nA 200 250 3");
    oracle_.ReadJournal(directory_.Path("journal"));
    oracle_.SetHome(3, "node-0");
  }
  std::string Strictly(const BlockName& block, int code, uint64_t nonce = 7,
                       uint64_t wrong_bytes = 0) {
    return oracle_.Judge({.block = block, .code = code, .nonce = nonce, .wrong_bytes = wrong_bytes},
                         Oracle::Mode::kStrict);
  }

  TempDir directory_;
  Tally tally_;
  Oracle oracle_{&tally_};
};

TEST_F(FaultOracleTest, AHitIsCountedAsVerified) {
  EXPECT_EQ(Strictly(kBlock, kOk), "");
  EXPECT_EQ(tally_.reads, 1u);
  EXPECT_EQ(tally_.verified_hits, 1u);
}

TEST_F(FaultOracleTest, AMissOfAnAcknowledgedBlockIsUnexpected) {
  EXPECT_NE(Strictly(kBlock, kNotFound), "");
  EXPECT_EQ(tally_.unexpected_misses, 1u);
  EXPECT_EQ(tally_.verified_hits, 0u);
}

TEST_F(FaultOracleTest, AMissOfABlockThatWasOnlyTriedIsNone) {
  EXPECT_EQ(Strictly(kTried, kNotFound), "");
  EXPECT_EQ(tally_.unexpected_misses, 0u);
}

TEST_F(FaultOracleTest, AMissThatWasAskedForBeforeTheAcknowledgementIsNone) {
  EXPECT_EQ(
      oracle_.Judge({.block = kBlock, .sent_nanos = 149, .code = kNotFound}, Oracle::Mode::kStrict),
      "");
  EXPECT_EQ(tally_.unexpected_misses, 0u);
}

TEST_F(FaultOracleTest, WrongBytesAndUnknownWritersAreWrong) {
  EXPECT_NE(Strictly(kBlock, kOk, 7, 5), "");
  EXPECT_EQ(tally_.wrong_bytes, 5u);
  EXPECT_NE(Strictly(kBlock, kOk, 8), "");
  EXPECT_EQ(tally_.wrong_bytes, 6u);
  EXPECT_EQ(tally_.verified_hits, 0u);
}

TEST_F(FaultOracleTest, DamageThatNobodyDidIsAFailure) {
  EXPECT_NE(Strictly(kTried, kDataLoss), "");
  EXPECT_EQ(tally_.failed_checks, 1u);
}

TEST_F(FaultOracleTest, DamageThatIsDeliveredIsAFailure) {
  oracle_.Damaged(kBlock);
  EXPECT_EQ(Strictly(kBlock, kDataLoss), "");
  EXPECT_NE(Strictly(kBlock, kOk), "");
  EXPECT_EQ(tally_.failed_checks, 1u);
}

TEST_F(FaultOracleTest, AKillExcusesWhatOnlyTheNodesMemoryHeld) {
  oracle_.NodeKilled("node-1", 300);
  EXPECT_TRUE(oracle_.Required(kBlock));
  oracle_.NodeKilled("node-0", 50);  // Before the block was written.
  oracle_.SetHome(3, "node-0");
  EXPECT_FALSE(oracle_.Required(kBlock));  // It may have gone to the other one, which died since.
}

TEST_F(FaultOracleTest, WhatWasOnDiskSurvivesAKill) {
  oracle_.AllSpilled();
  oracle_.NodeKilled("node-0", 300);
  EXPECT_NE(Strictly(kBlock, kNotFound), "");
  EXPECT_EQ(tally_.lost_objects, 1u);
}

TEST(FaultPatternTest, EveryChangedByteIsSeenAndPagesOfTwoWritersDoNotMix) {
  const PageLayout layout = PageLayout::Of(FaultFormat());
  BlockKeys keys("default");
  const ObjectId id = keys.Id(kBlock);
  std::vector<uint8_t> payload(layout.block_bytes(id.codec));
  FillPattern(id, layout, 7, absl::MakeSpan(payload));
  EXPECT_EQ(CheckPattern(id, layout, payload).nonce, 7u);
  EXPECT_EQ(CheckPattern(id, layout, payload).wrong_bytes, 0u);
  EXPECT_GT(CheckPattern(keys.Id(kTried), layout, payload).wrong_bytes, payload.size() / 2);
  payload[payload.size() - 1] ^= 1;
  payload[layout.page_bytes(id.codec) + 9] ^= 0x80;
  EXPECT_EQ(CheckPattern(id, layout, payload).wrong_bytes, 2u);
  std::vector<uint8_t> other(payload.size());
  FillPattern(id, layout, 8, absl::MakeSpan(other));
  const size_t half = payload.size() / 2;
  std::copy(other.begin(), other.begin() + static_cast<ptrdiff_t>(half), payload.begin());
  EXPECT_GT(CheckPattern(id, layout, payload).wrong_bytes, half / 2);
}

TEST(MarksNotSeenTest, AMarkThatNoRoundSawIsNamedOnceThereWereEnoughRounds) {
  Tally::Scenario counts;
  counts.rounds = kRoundsToJudge - 1;
  counts.seen = {{"met", 3}, {"never_met", 0}};
  const std::vector<std::string> marks = {"met", "never_met", "never_asked"};
  EXPECT_TRUE(MarksNotSeen(counts, marks).empty());
  counts.rounds = kRoundsToJudge;
  EXPECT_EQ(MarksNotSeen(counts, marks), (std::vector<std::string>{"never_met", "never_asked"}));
}

}  // namespace
}  // namespace okv::faults
