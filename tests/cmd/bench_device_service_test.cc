#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "cmd/bench/device_service.h"
#include "cmd/bench/sample.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using ::testing::HasSubstr;
using testing_support::ReadFileOrEmpty;
using testing_support::RunProgram;
using testing_support::RunResult;
using testing_support::TempDir;

constexpr std::chrono::seconds kTimeout(110);

TEST(DeviceServiceBenchTest, EachBadFlagIsNamed) {
  const auto refused = [](const std::string& what, const auto& change) {
    ServiceOptions options;
    change(&options);
    for (const absl::Status& status :
         {options.Validate(), RunService(options, CreateHostModel).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    }
  };
  using Options = ServiceOptions;
  EXPECT_TRUE(ServiceOptions().Validate().ok());
  refused("--service_tokens 0", [](Options* o) { o->tokens = 0; });
  refused("--service_tokens 100", [](Options* o) { o->tokens = 100; });
  refused("--service_tokens 4194304", [](Options* o) { o->tokens = 4194304; });
  refused("--block_layers 0", [](Options* o) { o->shape.layers = 0; });
  refused("--head_dim 96", [](Options* o) { o->shape.head_dim = 96; });
  refused("--query_heads 0", [](Options* o) { o->query_heads = 0; });
  refused("--query_heads 12", [](Options* o) { o->query_heads = 12; });
  refused("--query_heads 136", [](Options* o) { o->query_heads = 136; });
  refused("--in_flight", [](Options* o) { o->in_flight.clear(); });
  refused("--streams is empty", [](Options* o) { o->streams.clear(); });
  refused("--streams 0", [](Options* o) { o->streams = {1, 0}; });
  refused("--streams 33", [](Options* o) { o->streams = {33}; });
  refused("--rounds 0", [](Options* o) { o->rounds = 0; });
  refused("--put_batches 0", [](Options* o) { o->put_batches = 0; });
}

TEST(DeviceServiceBenchTest, InHostMemoryEveryByteComesBackAndAttentionIsTheSame) {
  const TempDir directory;
  const RunResult result = RunProgram({"okv-bench",
                                       "service",
                                       "--memory",
                                       "host",
                                       "--service_tokens",
                                       "640",
                                       "--layers",
                                       "3",
                                       "--kv_heads",
                                       "2",
                                       "--query_heads",
                                       "8",
                                       "--rounds",
                                       "2",
                                       "--in_flight",
                                       "4,0",
                                       "--scratch_dir",
                                       directory.path(),
                                       "--log_dir",
                                       directory.Path("logs"),
                                       "--json"},
                                      kTimeout);
  ASSERT_EQ(result.code, 0) << result.output;
  const auto json = nlohmann::json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(json.is_object()) << result.output;
  EXPECT_EQ(json["blocks"], 10);
  EXPECT_EQ(json["block_bytes"], 3 * 2 * 4608);
  EXPECT_EQ(json["error"], "");
  EXPECT_EQ(json["compared"], true);
  EXPECT_EQ(json["different_bytes"], 0);
  EXPECT_EQ(json["attention_equal"], true);
  EXPECT_EQ(json["attention_repeats"], true);
  std::vector<std::string> steps;
  for (const auto& step : json["steps"]) {
    steps.push_back(step["name"]);
    EXPECT_GT(step["bytes"].get<uint64_t>(), 0u) << step;
    EXPECT_GT(step["first_seconds"].get<double>(), 0) << step;
    EXPECT_GT(step["seconds"].get<double>(), 0) << step;
  }
  EXPECT_THAT(steps, ::testing::ElementsAre("quantize", "put", "fetch, not verified", "verify",
                                            "fetch, verified", "attend"));
  ASSERT_EQ(json["fetches"].size(), 4u);
  for (const auto& one : json["fetches"]) {
    for (const char* way : {"unverified", "verified"}) {
      EXPECT_GT(one[way]["bytes_per_second"].get<double>(), 0) << one;
      EXPECT_LE(one[way]["request_us_p50"].get<double>(), one[way]["request_us_p99"].get<double>());
    }
  }
  EXPECT_THAT(ReadFileOrEmpty(directory.Path("logs/node.log")), HasSubstr("okv-node ready"));
  EXPECT_THAT(ReadFileOrEmpty(directory.Path("logs/node.metrics")), HasSubstr("okv_node_"));
}

TEST(DeviceServiceBenchTest, WhatWasMeasuredBeforeAFailureIsReported) {
  const TempDir directory;
  const RunResult result =
      RunProgram({"okv-bench", "service", "--memory", "host", "--service_tokens", "128", "--layers",
                  "1", "--rounds", "1", "--service_tls", "no_such_transport", "--scratch_dir",
                  directory.path(), "--log_dir", directory.Path("logs"), "--json"},
                 kTimeout);
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("FAILED: start: "));
  EXPECT_THAT(result.output, HasSubstr("\"name\":\"quantize\""));
  EXPECT_THAT(result.output, HasSubstr("\"error\":\"start: "));
  EXPECT_THAT(ReadFileOrEmpty(directory.Path("logs/node.log")), HasSubstr("no_such_transport"));
}

TEST(DeviceServiceBenchTest, TheScriptKeepsTablesAndJsonOfEveryPart) {
  const char* const source = std::getenv("OKV_SOURCE_DIR");
  const char* const bin = std::getenv("OKV_BIN_DIR");
  ASSERT_TRUE(source != nullptr && bin != nullptr);
  const TempDir directory;
  const std::string script = std::string(source) + "/tests/bench/gpu_service.sh";
  const RunResult result =
      RunProgram({"/bin/bash", script, std::string(bin) + "/..", "--memory", "host", "--tokens",
                  "128", "--layers", "2", "--sizes", "1", "--rounds", "1", "--only",
                  "service,sizes", "--json", directory.path()},
                 kTimeout);
  ASSERT_EQ(result.code, 0) << result.output;
  for (const char* name : {"service", "service_layers1"}) {
    const std::string text = ReadFileOrEmpty(directory.Path(std::string(name) + ".json"));
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << name << ": " << text;
    EXPECT_EQ(json["different_bytes"], 0) << name;
    EXPECT_THAT(ReadFileOrEmpty(directory.Path(std::string(name) + ".txt")),
                HasSubstr("bit for bit"));
  }
}

TEST(DeviceServiceBenchTest, RandomSlotsAreAPermutationOfTheirSeed) {
  const std::vector<uint32_t> slots = RandomSlots(100, 7);
  std::vector<uint32_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(sorted[i], i);
  EXPECT_NE(slots, sorted);
  EXPECT_EQ(slots, RandomSlots(100, 7));
  EXPECT_NE(slots, RandomSlots(100, 8));
}

}  // namespace
}  // namespace okv
