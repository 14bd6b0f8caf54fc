#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/metrics_server.h"
#include "cmd/worker/metrics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/quantize.h"
#include "prometheus/text_serializer.h"
#include "proto/bf16.h"
#include "proto/page_layout.h"
#include "proto/sha256.h"
#include "tests/support/fixtures.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace okv {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing_support::HttpGet;
using testing_support::Process;
using testing_support::RunProgram;
using testing_support::RunResult;

// The value of a series in the text format; -1 when it is not there.
double Value(const std::string& text, const std::string& series) {
  const size_t at = text.find("\n" + series + " ");
  if (at == std::string::npos) return -1;
  const size_t begin = at + 1 + series.size() + 1;
  double value = -1;
  EXPECT_TRUE(absl::SimpleAtod(text.substr(begin, text.find('\n', begin) - begin), &value));
  return value;
}

TEST(DriftMetricsTest, TheTextHasEverySumByLayerAndTensor) {
  RotationSet rotations = testing_support::SmallRotations("none", /*clip_rank=*/60);
  rotations.layer_ids = {4, 9};
  rotations.promised_error_k = {0.25f, 0.125f};
  DriftMonitor drift(&rotations, {.rows_per_sample = 1});
  const PageLayout layout{.layers_count = 2, .kv_heads = 2, .head_dim = 64, .group_size = 64};
  std::vector<uint16_t> rows(layout.page_bytes(Codec::kBf16) / 2);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = FloatToBf16(static_cast<float>(i % 61));
  std::vector<uint8_t> page(layout.page_bytes(Codec::kInt2));
  const size_t head_rows = layout.run_bytes(Codec::kBf16) / 2;
  for (uint32_t head = 0; head < 2; ++head) {
    BadRow bad;
    ASSERT_TRUE(QuantizeRun({.k = &rows[head * head_rows],
                             .v = &rows[head * head_rows + head_rows / 2],
                             .row_stride = 64,
                             .dim = 64,
                             .group_size = 64,
                             .clip_rank_k = 60,
                             .clip_rank_v = 60},
                            page.data() + layout.run_bytes(Codec::kInt2) * head, &bad)
                    .ok());
  }
  drift.Measure({.layer = 1,
                 .block = 1,
                 .salt = 0,
                 .bf16_page = reinterpret_cast<const uint8_t*>(rows.data()),
                 .int2_page = page.data()});

  const DriftMetrics metrics(&drift, rotations.hash());
  const auto server = MetricsServer::Start("127.0.0.1:0", [&] { return metrics.Text(); });
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string text = HttpGet((*server)->address(), "/metrics");
  const auto labels = [&](const char* layer, const char* tensor) {
    return absl::StrCat("{rotation=\"", rotations.hash().Short(), "\",layer=\"", layer,
                        "\",tensor=\"", tensor, "\"}");
  };
  EXPECT_THAT(text, HasSubstr("# TYPE okv_worker_drift_squared_error_total counter\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE okv_worker_drift_promised_error_ratio gauge\n"));
  const DriftLayer layer = drift.Stats().layers[1];
  ASSERT_GT(layer.k.squared_error, 0);
  for (const bool is_value : {false, true}) {
    const DriftTensor& sums = is_value ? layer.v : layer.k;
    const std::string at = labels("9", is_value ? "v" : "k");
    EXPECT_EQ(Value(text, "okv_worker_drift_sampled_rows_total" + at), 128);
    EXPECT_EQ(Value(text, "okv_worker_drift_sampled_elements_total" + at), 128 * 64);
    EXPECT_EQ(Value(text, "okv_worker_drift_clipped_elements_total" + at), sums.clipped_elements);
    EXPECT_DOUBLE_EQ(Value(text, "okv_worker_drift_squared_error_total" + at), sums.squared_error);
    EXPECT_DOUBLE_EQ(Value(text, "okv_worker_drift_squared_norm_total" + at), sums.squared_norm);
    EXPECT_EQ(Value(text, "okv_worker_drift_promised_clip_ratio" + at), 3 / 64.0);
  }
  // A layer without rows is there with 0, a promise that was not made is not.
  EXPECT_EQ(Value(text, "okv_worker_drift_sampled_rows_total" + labels("4", "v")), 0);
  EXPECT_EQ(Value(text, "okv_worker_drift_promised_error_ratio" + labels("4", "k")), 0.25);
  EXPECT_EQ(Value(text, "okv_worker_drift_promised_error_ratio" + labels("9", "k")), 0.125);
  EXPECT_THAT(text, Not(HasSubstr(absl::StrCat("promised_error_ratio", labels("9", "v")))));
}

TEST(ClusterMetricsTest, TheTextHasEveryCountAndZerosWithoutACluster) {
  const ClusterStats stats = {.fetched = 11,
                              .fetched_bytes = 22,
                              .fetch_failed = 33,
                              .failovers_unavailable = 44,
                              .failovers_stalled = 55,
                              .failovers_damaged = 66,
                              .failovers_missing = 77,
                              .complaints = 88};
  const std::string text =
      prometheus::TextSerializer().Serialize(ClusterMetrics::FamiliesOf(stats));
  const std::string none = ClusterMetrics().Text();
  const std::pair<const char*, double> expected[] = {
      {"okv_worker_fetched_objects_total{result=\"ok\"}", 11},
      {"okv_worker_fetched_bytes_total", 22},
      {"okv_worker_fetched_objects_total{result=\"failed\"}", 33},
      {"okv_worker_failovers_total{reason=\"unavailable\"}", 44},
      {"okv_worker_failovers_total{reason=\"stalled\"}", 55},
      {"okv_worker_failovers_total{reason=\"damaged\"}", 66},
      {"okv_worker_failovers_total{reason=\"missing\"}", 77},
      {"okv_worker_complaints_total", 88},
  };
  for (const auto& [series, value] : expected) {
    EXPECT_EQ(Value(text, series), value) << series;
    EXPECT_EQ(Value(none, series), 0) << series;
  }
  EXPECT_THAT(text, HasSubstr("# TYPE okv_worker_failovers_total counter\n"));
}

// okv-worker on a tiny random model with a rotation set that promises something.
class WorkerMetricsTest : public ::testing::Test {
 protected:
  WorkerMetricsTest() {
    const std::string bytes = testing_support::MakeTinyModel({}).bytes;
    testing_support::WriteFile(directory_.Path("tiny.gguf"), bytes);
    RotationSet rotations = testing_support::SmallRotations("hadamard", /*clip_rank=*/56);
    rotations.model = "tiny";
    const auto digest = Sha256(bytes);
    rotations.weights_revision = absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
    rotations.promised_error_v = {0.5f, 0.75f};
    rotation_ = rotations.hash().Short();
    testing_support::WriteFile(directory_.Path("rotation"), rotations.Serialize());
  }

  std::vector<std::string> Command(const std::vector<std::string>& flags) const {
    std::vector<std::string> argv = {"okv-worker",
                                     "run",
                                     "--model",
                                     directory_.Path("tiny.gguf"),
                                     "--rotation",
                                     directory_.Path("rotation"),
                                     "--prompt_file",
                                     directory_.Path("prompt"),
                                     "--prompt_tokens",
                                     "800",
                                     "--max_new_tokens",
                                     "300",
                                     "--threads",
                                     "1",
                                     "--json"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    return argv;
  }

  std::string Series(const std::string& name, int layer, const std::string& tensor) const {
    return absl::StrCat("okv_worker_drift_", name, "{rotation=\"", rotation_, "\",layer=\"", layer,
                        "\",tensor=\"", tensor, "\"}");
  }

  const testing_support::TempDir directory_;
  std::string rotation_;
};

std::string Text() {
  std::mt19937 random(5);  // Any text that does not repeat.
  std::string text;
  for (int i = 0; i < 6000; ++i) text += static_cast<char>('a' + random() % 26);
  return text;
}

// The prompt comes through a pipe: until it is written, the worker waits.
TEST_F(WorkerMetricsTest, ARunShowsItsDriftFromBeforeThePromptOn) {
  const std::string pipe = directory_.Path("prompt");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const auto worker = Process::Start(Command(
      {"--metrics", "127.0.0.1:0", "--drift_rows_per_sample", "2", "--max_new_tokens", "1200"}));
  int fd;
  while ((fd = open(pipe.c_str(), O_WRONLY | O_NONBLOCK)) < 0 && worker->running()) {
    std::this_thread::yield();
  }
  ASSERT_GE(fd, 0) << worker->output();
  const std::string line = worker->output();
  ASSERT_THAT(line, HasSubstr("okv-worker metrics on 127.0.0.1:"));
  const size_t at = line.find("127.0.0.1:");
  const std::string address = line.substr(at, line.find('\n', at) - at);
  const std::string before = HttpGet(address, "/metrics");
  EXPECT_EQ(Value(before, "okv_worker_fetched_bytes_total"), 0);
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(Value(before, Series("sampled_rows_total", layer, "k")), 0);
    EXPECT_EQ(Value(before, Series("promised_error_ratio", layer, "v")), layer == 0 ? 0.5 : 0.75);
    EXPECT_EQ(Value(before, Series("promised_error_ratio", layer, "k")), -1);
  }

  const std::string text = Text();
  ASSERT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  close(fd);
  // What the last look before its end found; many tokens are generated after the prompt's blocks
  // were demoted.
  std::string last;
  while (worker->running()) {
    std::string now = HttpGet(address, "/metrics");
    if (!now.empty()) last = std::move(now);
  }
  ASSERT_EQ(worker->Wait(std::chrono::seconds(1)), 0) << worker->output();
  // 800 tokens are blocks 0 to 12; the prompt alone has blocks 1 to 7 demoted, of 128 rows each.
  EXPECT_GE(Value(last, Series("sampled_rows_total", 1, "k")), 7 * 64);
  EXPECT_GT(Value(last, Series("squared_error_total", 1, "v")), 0);

  const auto json = nlohmann::json::parse(worker->last_line(), nullptr, false);
  ASSERT_TRUE(json.is_object()) << worker->output();
  ASSERT_EQ(json["drift"].size(), 4u);
  const auto& drift = json["drift"][3];
  EXPECT_EQ(drift["layer"], 1);
  EXPECT_EQ(drift["tensor"], "v");
  EXPECT_EQ(drift["promised_error"], 0.75);
  EXPECT_FALSE(json["drift"][2].contains("promised_error"));
  // The last token that was generated is not appended.
  const size_t tokens = 800 + json["tokens"].size() - 1;
  EXPECT_EQ(drift["sampled_rows"], ((tokens - 1) / 64 - 5) * 64);
}

TEST_F(WorkerMetricsTest, NothingIsMeasuredAtARateOfZeroAndNoBitDependsOnTheRate) {
  testing_support::WriteFile(directory_.Path("prompt"), Text());
  std::vector<nlohmann::json> reports;
  for (const char* rate : {"0", "1", "4096"}) {
    const RunResult run = RunProgram(Command({"--drift_rows_per_sample", rate}));
    ASSERT_EQ(run.code, 0) << run.output;
    EXPECT_THAT(run.output, Not(HasSubstr("metrics on")));
    reports.push_back(nlohmann::json::parse(run.last_line));
  }
  EXPECT_TRUE(reports[0]["drift"].empty());
  EXPECT_EQ(reports[1]["drift"].size(), 4u);
  for (const auto& report : reports) {
    EXPECT_EQ(report["logits_sha256"], reports[0]["logits_sha256"]);
    EXPECT_EQ(report["objects_sha256"], reports[0]["objects_sha256"]);
  }
}

TEST_F(WorkerMetricsTest, AnAddressThatIsInUseOrOfOtherMachinesIsRefusedByName) {
  const auto busy = MetricsServer::Start("127.0.0.1:0", [] { return ""; });
  ASSERT_TRUE(busy.ok()) << busy.status();
  const RunResult in_use = RunProgram(Command({"--metrics", (*busy)->address()}));
  EXPECT_EQ(in_use.code, 1);
  EXPECT_THAT(in_use.output, HasSubstr((*busy)->address()));
  const RunResult open_to_all = RunProgram(Command({"--metrics", "0.0.0.0:0"}));
  EXPECT_EQ(open_to_all.code, 1);
  EXPECT_THAT(open_to_all.output, AllOf(HasSubstr("metrics"), HasSubstr("0.0.0.0:0")));
}

}  // namespace
}  // namespace okv
