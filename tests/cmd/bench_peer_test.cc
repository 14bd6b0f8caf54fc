#include <string>

#include "cmd/bench/mooncake.h"
#include "cmd/bench/peer.h"
#include "cmd/bench/sample.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::TempDir;

// The comparison itself needs Mooncake and is not a test.

TEST(PeerBenchTest, EachBadFlagIsNamed) {
  const TempDir directory;
  testing_support::WriteFile(directory.Path("script.py"), "\n");
  PeerOptions good;
  good.python = "/usr/bin/python3";
  good.script = directory.Path("script.py");
  EXPECT_TRUE(good.Validate().ok()) << good.Validate();
  const auto refused = [&good](const std::string& what, const auto& change) {
    PeerOptions options = good;
    change(&options);
    for (const absl::Status& status : {options.Validate(), RunPeer(options).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    }
  };
  using Options = PeerOptions;
  refused("--mooncake_python", [](Options* o) { o->python = ""; });
  refused("--mooncake_script '/no/such", [](Options* o) { o->script = "/no/such"; });
  refused("--peer_tokens 0", [](Options* o) { o->tokens = 0; });
  refused("--peer_tokens 100", [](Options* o) { o->tokens = 100; });
  refused("--peer_tokens 2097152", [](Options* o) { o->tokens = 2097152; });
  refused("--request_blocks", [](Options* o) { o->request_blocks = 0; });
  refused("--rounds 0", [](Options* o) { o->rounds = 0; });
  refused("--head_dim 80", [](Options* o) { o->head_dim = 80; });
}

TEST(PeerBenchTest, AnEnvironmentWithoutMooncakeIsNamedWithWhatItSaid) {
  const TempDir directory;
  const absl::Status status = Mooncake::Start({.python = directory.Path("bin/python"),
                                               .script = "script.py",
                                               .directory = directory.path(),
                                               .blocks = 1,
                                               .block_bytes = 64,
                                               .request_blocks = 1})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("bin/mooncake_master"));
}

TEST(SampleTest, AQuantileIsOneOfTheValues) {
  EXPECT_EQ(Quantile({}, 0.5), 0);
  EXPECT_EQ(Quantile({3}, 0.99), 3);
  EXPECT_EQ(Quantile({5, 1, 3}, 0.5), 3);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 0.5), 3);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 1), 4);
  EXPECT_EQ(Quantile({4, 1, 3, 2}, 0), 1);
}

}  // namespace
}  // namespace okv
