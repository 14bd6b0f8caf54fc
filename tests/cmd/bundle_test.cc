// deploy/bundle.sh: what it copies runs without what it was copied from.

#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv {
namespace {

TEST(BundleTest, TheProgramAndEveryLibraryOfABundleLoad) {
  const testing_support::TempDir directory;
  const std::string bundle = directory.Path("bundle");
  const auto packed = testing_support::RunProgram(
      {"/bin/bash", absl::StrCat(std::getenv("OKV_SOURCE_DIR"), "/deploy/bundle.sh"), bundle,
       absl::StrCat(std::getenv("OKV_BIN_DIR"), "/okv-bench")});
  ASSERT_EQ(packed.code, 0) << packed.output;
  // A library that strip damaged fails here: its segments do not fit its file.
  const auto loaded = testing_support::RunProgram(
      {"/bin/bash", "-c",
       absl::StrCat("cd ", bundle,
                    " && export LD_LIBRARY_PATH=$PWD/lib && found=0 && "
                    "for file in bin/okv-bench lib/*.so* lib/ucx/*.so*; do "
                    "[ -e \"$file\" ] || continue; found=$((found + 1)); "
                    "ldd \"$file\" >out 2>&1 || { echo \"$file: $(cat out)\"; exit 1; }; done; "
                    "echo \"$found files\"; bin/okv-bench --version")});
  EXPECT_EQ(loaded.code, 0) << loaded.output;
}

}  // namespace
}  // namespace okv
