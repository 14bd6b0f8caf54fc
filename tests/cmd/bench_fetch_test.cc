#include <nlohmann/json.hpp>
#include <string>

#include "absl/time/clock.h"
#include "cmd/bench/child.h"
#include "cmd/bench/fetch.h"
#include "cmd/bench/perftest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::RunProgram;
using testing_support::RunResult;
using testing_support::TempDir;

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& what) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

TEST(FetchBenchTest, EachBadFlagIsNamed) {
  const auto refused = [](const std::string& what, const auto& change) {
    FetchOptions options;
    change(&options);
    ExpectStatus(options.Validate(), absl::StatusCode::kInvalidArgument, what);
    ExpectStatus(RunFetch(options).status(), absl::StatusCode::kInvalidArgument, what);
  };
  using Options = FetchOptions;
  EXPECT_TRUE(FetchOptions().Validate().ok());
  refused("--transports", [](Options* o) { o->transports.clear(); });
  refused("--transports", [](Options* o) { o->transports = {"tcp", ""}; });
  refused("--in_flight", [](Options* o) { o->in_flight.clear(); });
  refused("--block_layers is empty", [](Options* o) { o->layers.clear(); });
  refused("--block_layers 0", [](Options* o) { o->layers = {36, 0}; });
  refused("--block_layers 513", [](Options* o) { o->layers = {513}; });
  refused("--head_dim 96", [](Options* o) { o->head_dim = 96; });
  refused("--group_size 256", [](Options* o) { o->group_size = 256; });
  refused("--group_size 48", [](Options* o) { o->group_size = 48; });
  refused("--kv_heads 0", [](Options* o) { o->kv_heads = 0; });
  refused("--run_bytes 0", [](Options* o) { o->run_bytes = 0; });
  refused("--run_bytes 1000 are less than a block of 1327104",
          [](Options* o) { o->run_bytes = 1000; });
  refused("--rounds 0", [](Options* o) { o->rounds = 0; });
}

TEST(FetchBenchTest, CountsAreNumbersBetweenCommas) {
  const auto counts = ParseCounts("--in_flight", "1,64,0");
  ASSERT_TRUE(counts.ok()) << counts.status();
  EXPECT_THAT(*counts, ::testing::ElementsAre(1, 64, 0));
  for (const char* text : {"", "1,", "x", "1;2", "-1"}) {
    ExpectStatus(ParseCounts("--in_flight", text).status(), absl::StatusCode::kInvalidArgument,
                 "--in_flight");
  }
}

TEST(FetchBenchTest, AFewObjectsComeBackVerifiedBesideTheBaseline) {
  const TempDir directory;
  const RunResult result =
      RunProgram({"okv-bench", "fetch", "--transports", "tcp,self;all", "--block_layers", "2",
                  "--kv_heads", "2", "--in_flight", "1,0", "--run_bytes", "200000", "--rounds", "1",
                  "--scratch_dir", directory.path(), "--json"},
                 std::chrono::seconds(110));
  ASSERT_EQ(result.code, 0) << result.output;
  const auto json = nlohmann::json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << result.output;
  ASSERT_EQ(json["baselines"].size(), 2u) << result.output;
  ASSERT_EQ(json["cases"].size(), 4u) << result.output;
  for (const auto& baseline : json["baselines"]) {
    for (const char* name :
         {"ucp_get_bytes_per_second", "ucp_am_bw_bytes_per_second",
          "service_terms_ucp_am_bw_bytes_per_second", "cached_ucp_am_bw_bytes_per_second"}) {
      EXPECT_GT(baseline[name].get<double>(), 0) << name;
    }
  }
  for (const auto& one : json["cases"]) {
    EXPECT_EQ(one["block_bytes"], 2 * 2 * 4608);
    EXPECT_EQ(one["objects"], 10);
    for (const char* way : {"unverified", "verified"}) {
      EXPECT_GT(one[way]["bytes_per_second"].get<double>(), 0);
      EXPECT_GT(one[way]["of_baseline"].get<double>(), 0);
      EXPECT_LE(one[way]["request_us_p50"].get<double>(), one[way]["request_us_p99"].get<double>());
    }
  }
  EXPECT_EQ(json["cases"][0]["request_objects"], 1);
  EXPECT_EQ(json["cases"][1]["request_objects"], 10);
}

TEST(FetchBenchTest, ABaselineThatCannotRunIsNamedWithItsOutput) {
  const TempDir directory;
  ExpectStatus(RunPerftest({.program = "no-such-perftest",
                            .test = "ucp_get",
                            .tls = "tcp,self",
                            .message_bytes = 8,
                            .messages = 1,
                            .output_path = directory.Path("output")})
                   .status(),
               absl::StatusCode::kUnavailable, "cannot run no-such-perftest");
  ExpectStatus(RunPerftest({.program = "ucx_perftest",
                            .test = "no_such_test",
                            .tls = "tcp,self",
                            .message_bytes = 8,
                            .messages = 1,
                            .output_path = directory.Path("output2")})
                   .status(),
               absl::StatusCode::kUnavailable, "Invalid option argument for -t");
}

TEST(ChildProcessTest, ItsEndIsReportedOnce) {
  const TempDir directory;
  const auto child = ChildProcess::Start({.argv = {"sh", "-c", "echo $WORD; exit 3"},
                                          .environment = {{"WORD", "spoken"}},
                                          .output_path = directory.Path("output")});
  ASSERT_TRUE(child.ok()) << child.status();
  const absl::StatusOr<int> code = (*child)->Wait(absl::Now() + absl::Seconds(60));
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 3);
  EXPECT_EQ((*child)->output(), "spoken\n");
  EXPECT_FALSE((*child)->running());
  ExpectStatus((*child)->Usage().status(), absl::StatusCode::kUnavailable, "sh is gone: spoken");
  ExpectStatus((*child)->WaitForFile(directory.Path("none"), absl::InfiniteFuture()),
               absl::StatusCode::kUnavailable, "sh ended with code 3: spoken");
}

TEST(ChildProcessTest, OneThatStillRunsIsReportedAndKilled) {
  const TempDir directory;
  // It says that it is there, not half way into its exec, and stops itself.
  const auto child = ChildProcess::Start({.argv = {"sh", "-c", "echo up; kill -STOP $$"},
                                          .environment = {},
                                          .output_path = directory.Path("output")});
  ASSERT_TRUE(child.ok()) << child.status();
  const absl::Status up =
      (*child)->WaitForFile(directory.Path("output"), absl::Now() + absl::Seconds(60));
  ASSERT_TRUE(up.ok()) << up;
  ExpectStatus((*child)->Wait(absl::Now()).status(), absl::StatusCode::kDeadlineExceeded, "sh");
  ExpectStatus((*child)->WaitForFile(directory.Path("none"), absl::Now()),
               absl::StatusCode::kDeadlineExceeded, "sh is not ready in time: up");
  const absl::StatusOr<ChildUsage> usage = (*child)->Usage();
  ASSERT_TRUE(usage.ok()) << usage.status();
  EXPECT_GT(usage->rss_bytes, 0u);
  (*child)->Kill();
  const absl::StatusOr<int> code = (*child)->Wait(absl::Now());
  ASSERT_TRUE(code.ok()) << code.status();
  EXPECT_EQ(*code, 128 + 9);
}

}  // namespace
}  // namespace okv
