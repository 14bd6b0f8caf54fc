// okv-node as a program: what it says when it cannot start, and a life from ready to SIGTERM, with
// UCX, a control plane's half on a real port, and a worker.

#include <csignal>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cache_node/objects.h"
#include "tests/cache_node/scripted_control.h"
#include "tests/cache_node/test_worker.h"
#include "tests/cache_node/tickets.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::Process;
using testing_support::RunProgram;
using testing_support::RunResult;
using testing_support::ScriptedControl;
using testing_support::ScriptedHello;
using testing_support::ScriptedOffer;
using testing_support::TempDir;
using testing_support::TestFormat;
using testing_support::TestObject;
using testing_support::TestWorker;
using Seen = ScriptedControl::Seen;

// Flags of a small node.
std::vector<std::string> Argv(const std::string& control, const std::string& data_dir,
                              const std::vector<std::string>& more = {}) {
  std::vector<std::string> argv = {"okv-node", "--control",         control,   "--data_dir",
                                   data_dir,   "--dram_bytes",      "4194304", "--disk_bytes",
                                   "67108864", "--control_timeout", "5s"};
  argv.insert(argv.end(), more.begin(), more.end());
  return argv;
}

// Exit code 1, and a last line that says what is wrong.
void ExpectRefused(const std::vector<std::string>& argv, const std::string& words) {
  const RunResult result = RunProgram(argv);
  EXPECT_EQ(result.code, 1) << result.output;
  EXPECT_TRUE(absl::StrContains(result.last_line, words)) << result.output;
}

TEST(NodeProgramTest, WhatIsWrongWithTheCommandLineIsSaid) {
  const TempDir directory;
  ExpectRefused({"okv-node", "--bogus"}, "bogus");
  ExpectRefused({"okv-node", "stray"}, "stray");
  ExpectRefused({"okv-node", "--data_dir", directory.path()}, "--control is missing");
  ExpectRefused({"okv-node", "--control", "127.0.0.1:1"}, "--data_dir is missing");
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--dram_bytes", "1"}), "dram_bytes");
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--disk_bytes", "0"}), "disk_bytes");
}

TEST(NodeProgramTest, AnHbmTierThatCannotBeIsRefusedNamingItsFlag) {
  const TempDir directory;
  // Without CUDA in the build, without a GPU in the machine, and without that many: all the same.
  ExpectRefused(
      Argv("127.0.0.1:1", directory.path(), {"--hbm_bytes", "1073741824", "--hbm_device", "99"}),
      "--hbm_bytes 1073741824: cuda:99 cannot be used");
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--require_gpudirect"}), "--hbm_bytes");
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--require_rdma"}), "require_rdma");
}

TEST(NodeProgramTest, WithoutCertificatesItBindsToLoopbackOnly) {
  const TempDir directory;
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--listen", "0.0.0.0:0"}), "--listen");
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--metrics", "[::]:0"}), "--metrics");
}

TEST(NodeProgramTest, AnAbsentControlPlaneIsNamed) {
  const TempDir directory;
  ExpectRefused(Argv("127.0.0.1:1", directory.path(), {"--control_timeout", "200ms"}),
                "no control plane at 127.0.0.1:1");
}

TEST(NodeProgramTest, ADirectoryThatCannotBeUsedIsNamed) {
  ExpectRefused(Argv("127.0.0.1:1", "/dev/null/data"), "/dev/null/data");
}

class RunningNode {
 public:
  RunningNode(const std::string& control, const std::string& data_dir,
              const std::vector<std::string>& more = {}) {
    std::vector<std::string> argv =
        Argv(control, data_dir, {"--ready_file", directory_.Path("ready")});
    argv.insert(argv.end(), more.begin(), more.end());
    process_ = Process::Start(argv);
    EXPECT_TRUE(testing_support::WaitForFile(directory_.Path("ready"), process_.get()))
        << process_->output();
    const auto ready = nlohmann::json::parse(
        testing_support::ReadFileOrEmpty(directory_.Path("ready")), nullptr, false);
    if (ready.is_discarded()) return;
    node_id = ready["node_id"];
    data_address = ready["data_address"];
    metrics_address = ready["metrics_address"];
  }
  Process* process() { return process_.get(); }
  double Metric(const std::string& series) const {
    const std::string text = testing_support::HttpGet(metrics_address, "/metrics");
    const size_t at = text.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
  }

  std::string node_id;
  std::string data_address;
  std::string metrics_address;

 private:
  const TempDir directory_;
  std::unique_ptr<Process> process_;
};

TEST(NodeProgramTest, WhatWasPutBeforeSigtermIsServedAfterTheRestart) {
  ScriptedControl control;
  const TempDir data;
  UcxTransportOptions ucx;
  absl::StatusOr<std::unique_ptr<Transport>> transport = CreateUcxTransport(ucx);
  ASSERT_TRUE(transport.ok()) << transport.status();
  std::vector<TestObject> objects;
  for (uint32_t number = 0; number < 30; ++number) {
    objects.push_back(MakeObject({.number = number, .codec = kCodecs[number % 2]}));
  }
  std::string node_id;
  {
    RunningNode node(control.address(), data.path());
    node_id = node.node_id;
    EXPECT_TRUE(absl::StrContains(node.process()->output(), "okv-node ready "));
    TestWorker worker(transport->get(), node.data_address);
    ASSERT_EQ(worker.Hello(ScriptedHello()).code(), 0);
    for (const TestObject& object : objects) {
      const absl::Status status = worker.Put(ScriptedOffer(node.node_id, object), object.payload);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(node.Metric("okv_node_stored_bytes{codec=\"int2\"}"), 15 * 10'240);
    EXPECT_EQ(node.Metric("okv_node_put_total{code=\"OK\"}"), 30);
    EXPECT_EQ(node.Metric("okv_node_sessions"), 1);
    EXPECT_TRUE(
        control.WaitFor("the commits", [](const Seen& seen) { return seen.held.size() == 30; }));
    node.process()->Signal(SIGTERM);
    EXPECT_EQ(node.process()->Wait(std::chrono::seconds(20)), 0) << node.process()->output();
  }
  control.ForgetNode();
  RunningNode node(control.address(), data.path());
  EXPECT_EQ(node.node_id, node_id);
  EXPECT_TRUE(
      control.WaitFor("the inventory", [](const Seen& seen) { return seen.held.size() == 30; }));
  TestWorker worker(transport->get(), node.data_address);
  ASSERT_EQ(worker.Hello(ScriptedHello()).code(), 0);
  v1::FetchRequest request;
  request.set_request_id(1);
  request.set_format_id(std::string(TestFormat().id().view()));
  for (const TestObject& object : objects) {
    v1::FetchObject* wanted = request.add_objects();
    wanted->set_key(std::string(object.id().key.view()));
    wanted->set_codec(static_cast<v1::CodecId>(object.id().codec));
    wanted->set_index(object.header().index.value());
  }
  const auto delivered = worker.Fetch(request);
  for (size_t i = 0; i < objects.size(); ++i) {
    ASSERT_TRUE(delivered[i].status.ok()) << delivered[i].status;
    EXPECT_EQ(delivered[i].payload, objects[i].payload);
  }
}

TEST(NodeProgramTest, PortsAndDirectoriesInUseAreNamed) {
  ScriptedControl control;
  const TempDir data;
  const TempDir other;
  RunningNode node(control.address(), data.path());
  ExpectRefused(Argv(control.address(), data.path()), "in use by another node");
  ExpectRefused(Argv(control.address(), other.path(), {"--listen", node.data_address}),
                node.data_address);
  ExpectRefused(Argv(control.address(), other.path(), {"--metrics", node.metrics_address}),
                node.metrics_address);
  ExpectRefused(Argv(control.address(), other.path(), {"--ready_file", "/dev/null/ready"}),
                "/dev/null/ready");
}

}  // namespace
}  // namespace okv
