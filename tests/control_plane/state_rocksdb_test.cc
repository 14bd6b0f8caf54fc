#include "control_plane/state_rocksdb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "tests/control_plane/harness.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;
using testing_support::IsStatus;
using testing_support::MemoryState;
using testing_support::TempDir;
using testing_support::WriteFile;

// Every State does this.
void ExpectIsAState(State* state) {
  EXPECT_EQ(state->Get("a").status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(state->Put("b/2", "two").ok());
  ASSERT_TRUE(state->Put("b/1", "one").ok());
  ASSERT_TRUE(state->Put("c", std::string("\0binary\xff", 8)).ok());
  ASSERT_TRUE(state->Put("b/2", "second").ok());
  EXPECT_EQ(*state->Get("c"), std::string("\0binary\xff", 8));
  const auto list = state->List("b/");
  ASSERT_TRUE(list.ok());
  EXPECT_THAT(*list, ElementsAre(Pair("b/1", "one"), Pair("b/2", "second")));
  EXPECT_THAT(*state->List("x"), IsEmpty());
  EXPECT_EQ(state->List("")->size(), 3u);
}

TEST(StateTest, InMemoryAndOnDiskDoTheSame) {
  MemoryState memory;
  ExpectIsAState(&memory);
  const TempDir directory;
  const auto disk = OpenRocksdbState(directory.Path("new/data"));
  ASSERT_TRUE(disk.ok()) << disk.status();
  ExpectIsAState(disk->get());
}

TEST(RocksdbStateTest, WhatWasPutIsThereAfterAReopen) {
  const TempDir directory;
  const std::string large(3 << 20, 'r');
  {
    const auto state = OpenRocksdbState(directory.path());
    ASSERT_TRUE(state.ok()) << state.status();
    ASSERT_TRUE((*state)->Put("large", large).ok());
  }
  const auto state = OpenRocksdbState(directory.path());
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(*(*state)->Get("large"), large);
}

// Its next line after one that a full disk did not take would end the process.
TEST(RocksdbStateTest, KeepsNoLogOfRocksdbs) {
  const TempDir directory;
  const auto state = OpenRocksdbState(directory.path());
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_TRUE((*state)->Put("a", "b").ok());
  EXPECT_TRUE(std::filesystem::exists(directory.Path("CURRENT")));
  EXPECT_FALSE(std::filesystem::exists(directory.Path("LOG")));
}

TEST(RocksdbStateTest, DirectoryOfAnotherOwnerIsNamed) {
  const TempDir directory;
  const auto first = OpenRocksdbState(directory.path());
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(OpenRocksdbState(directory.path()).status(),
              IsStatus(StatusCode::kUnavailable, directory.path()));
  EXPECT_THAT(OpenRocksdbState(directory.path()).status(),
              IsStatus(StatusCode::kUnavailable, "another process"));
}

TEST(RocksdbStateTest, PathThatCannotBeADirectoryIsNamed) {
  const TempDir directory;
  WriteFile(directory.Path("file"), "in the way");
  EXPECT_THAT(OpenRocksdbState(directory.Path("file")).status(),
              IsStatus(StatusCode::kUnavailable, directory.Path("file")));
  EXPECT_THAT(OpenRocksdbState(directory.Path("file/below")).status(),
              IsStatus(StatusCode::kUnavailable, directory.Path("file/below")));
}

}  // namespace
}  // namespace okv
