#include "tests/cluster/local_cluster.h"

#include <random>
#include <sstream>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"
#include "proto/check.h"
#include "proto/sha256.h"
#include "tests/support/fixtures.h"
#include "tests/support/tiny_model.h"

namespace okv::testing_support {

using Json = nlohmann::json;

LocalCluster::LocalCluster() {
  const std::string bytes = MakeTinyModel({}).bytes;
  WriteFile(model(), bytes);
  RotationSet rotations = SmallRotations("hadamard", /*clip_rank=*/56);
  rotations.model = "tiny";
  const auto digest = Sha256(bytes);
  rotations.weights_revision = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  WriteFile(rotation(), rotations.Serialize());
  std::mt19937 random(5);  // The text may be any; one that does not repeat.
  std::string text_bytes;
  for (int i = 0; i < 12000; ++i) text_bytes += static_cast<char>('a' + random() % 26);
  WriteFile(text(), text_bytes);
}

void LocalCluster::StartControl() {
  const std::string port_file = Path("control.port");
  const bool again = !control_address_.empty();
  std::remove(port_file.c_str());
  control_ = Process::Start({"okv-control", "--listen", again ? control_address_ : "127.0.0.1:0",
                             "--data_dir", Path("control"), "--port_file", port_file,
                             "--heartbeat_interval_ms", "200", "--node_timeout_ms", "1500"});
  const bool up = WaitForFile(port_file, control_.get());
  ASSERT_TRUE(up) << control_->output();
  const std::string port = ReadFileOrEmpty(port_file);
  control_address_ = "127.0.0.1:" + port.substr(0, port.find('\n'));
}

void LocalCluster::StartNode(int number, const std::vector<std::string>& flags) {
  const std::string name = "node" + std::to_string(number);
  std::remove(Path(name + ".json").c_str());
  std::vector<std::string> argv = {"okv-node", "--control",    control_address_,    "--data_dir",
                                   Path(name), "--dram_bytes", "16777216",          "--disk_bytes",
                                   "67108864", "--ready_file", Path(name + ".json")};
  argv.insert(argv.end(), flags.begin(), flags.end());
  if (nodes_.size() <= static_cast<size_t>(number)) nodes_.resize(number + 1);
  nodes_[number] = Process::Start(argv);
  const bool up = WaitForFile(Path(name + ".json"), nodes_[number].get());
  ASSERT_TRUE(up) << nodes_[number]->output();
}

void LocalCluster::Publish() {
  const RunResult result =
      RunProgram({"okvctl", "--control", control_address_, "publish", rotation()});
  ASSERT_EQ(result.code, 0) << result.output;
}

RunResult LocalCluster::Worker(int prompt_tokens, const std::string& ending,
                               const std::vector<std::string>& flags) {
  std::vector<std::string> argv = {"okv-worker",
                                   "run",
                                   "--model",
                                   model(),
                                   "--rotation",
                                   rotation(),
                                   "--prompt_file",
                                   text(),
                                   "--prompt_tokens",
                                   std::to_string(prompt_tokens),
                                   "--ending",
                                   ending,
                                   "--max_new_tokens",
                                   "8",
                                   "--threads",
                                   "2",
                                   "--json"};
  argv.insert(argv.end(), flags.begin(), flags.end());
  return RunProgram(argv, std::chrono::seconds(100));
}

Json LocalCluster::ClusterWorker(int prompt_tokens, const std::string& ending,
                                 const std::vector<std::string>& flags) {
  std::vector<std::string> all = {"--control", control_address_};
  all.insert(all.end(), flags.begin(), flags.end());
  return LoneWorker(prompt_tokens, ending, all);
}

Json LocalCluster::LoneWorker(int prompt_tokens, const std::string& ending,
                              const std::vector<std::string>& flags) {
  const RunResult result = Worker(prompt_tokens, ending, flags);
  EXPECT_EQ(result.code, 0) << result.output;
  Json json = Json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object()) << result.output;
  return json.is_object() ? json : Json::object();
}

Json LocalCluster::ReadyFile(int number) const {
  return Json::parse(ReadFileOrEmpty(Path("node" + std::to_string(number) + ".json")));
}

double LocalCluster::Metric(int number, const std::string& name) const {
  std::istringstream lines(HttpGet(ReadyFile(number)["metrics_address"], "/metrics"));
  double sum = 0;
  for (std::string line; std::getline(lines, line);) {
    const char next = line.size() > name.size() ? line[name.size()] : '\0';
    if (line.compare(0, name.size(), name) != 0 || (next != '{' && next != ' ')) continue;
    sum += std::stod(line.substr(line.rfind(' ')));
  }
  return sum;
}

Json LocalCluster::Status() {
  const RunResult result =
      RunProgram({"okvctl", "--control", control_address_, "--json", "status"});
  EXPECT_EQ(result.code, 0) << result.output;
  Json json = Json::parse(result.last_line, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : Json::object();
}

}  // namespace okv::testing_support
