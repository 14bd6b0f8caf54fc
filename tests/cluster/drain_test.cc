// A node leaves for good: what only it holds goes to others, every program real.

#include <signal.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/local_cluster.h"

namespace okv::testing_support {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr std::chrono::seconds kLong(100);

void ExpectSameBits(const Json& a, const Json& b) {
  for (const char* field : {"tokens", "logits_sha256", "objects_sha256"}) {
    EXPECT_EQ(a[field], b[field]) << field;
  }
}

class DrainTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cluster_.StartControl();
    if (HasFatalFailure()) return;
    cluster_.Publish();
    cluster_.StartNode(0);
    stored_ = cluster_.ClusterWorker(970, "first ending", {"--store"})["stored_objects"];
    ASSERT_GT(stored_, 0);
    WaitUntil("the index has everything", [&] { return cluster_.Status()["objects"] == stored_; });
  }
  std::string NodeId(int number) { return cluster_.ReadyFile(number)["node_id"]; }
  std::vector<std::string> DrainCommand(int number, const std::string& limit) {
    return {"okvctl", "--control",   cluster_.control_address(), "--json", "drain", "--drain_limit",
            limit,    NodeId(number)};
  }
  // okvctl's exit code must be `code`.
  Json Drain(int number, const std::string& limit, int code) {
    const RunResult result = RunProgram(DrainCommand(number, limit), kLong);
    EXPECT_EQ(result.code, code) << result.output << cluster_.node(number).output();
    output_ = result.output;
    return ReportOf(result.output);
  }
  // The JSON line of what it wrote.
  static Json ReportOf(const std::string& output) {
    const size_t at = output.find("{\"node_id\"");
    if (at == std::string::npos) return Json::object();
    return Json::parse(output.substr(at, output.find('\n', at) - at), nullptr, false);
  }
  void WaitUntil(const std::string& what, const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + kLong;
    while (!done()) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "waited in vain: " << what;
      std::this_thread::yield();
    }
  }
  void StopNode(int number) {
    cluster_.node(number).Signal(SIGTERM);
    EXPECT_EQ(cluster_.node(number).Wait(kLong), 0) << cluster_.node(number).output();
  }
  bool IsAlive(int number) {
    const Json status = cluster_.Status();
    const std::string node_id = NodeId(number);
    for (const Json& node : status["nodes"]) {
      if (node["node_id"] == node_id) return node["alive"];
    }
    return false;
  }
  void StopForGood(int number) {
    StopNode(number);
    WaitUntil("the node is given up", [&] { return !IsAlive(number); });
  }
  void ExpectWholeHit() {
    const Json hit = cluster_.ClusterWorker(970, "the second one");
    EXPECT_EQ(hit["hit_tokens"], 960) << hit;
    ExpectSameBits(hit, cluster_.LoneWorker(970, "the second one"));
  }

  LocalCluster cluster_;
  uint64_t stored_ = 0;
  std::string output_;
};

TEST_F(DrainTest, WhatOnlyTheNodeHadIsOnOthersAndReadsWithTheSameBits) {
  cluster_.StartNode(1);
  cluster_.StartNode(2);
  const Json report = Drain(0, "100s", 0);
  EXPECT_EQ(report["done"], true) << output_;
  EXPECT_EQ(report["objects_moved"], stored_);
  EXPECT_EQ(report["objects_left"], 0);
  EXPECT_EQ(cluster_.Metric(0, "okv_node_draining"), 1);
  EXPECT_EQ(cluster_.Metric(0, "okv_node_drain_left_objects"), 0);
  ExpectWholeHit();  // From either.
  StopForGood(0);
  ExpectWholeHit();
  EXPECT_EQ(cluster_.Status()["objects"], stored_);
}

TEST_F(DrainTest, NothingIsPlacedOnADrainedNodeAndAfterwardsItIsAgain) {
  cluster_.StartNode(1);
  Drain(0, "100s", 0);
  const double held = cluster_.Metric(0, "okv_node_stored_bytes");
  cluster_.ClusterWorker(700, "another prompt is not needed: another tenant's is",
                         {"--store", "--tenant", "other"});
  EXPECT_EQ(cluster_.Metric(0, "okv_node_stored_bytes"), held);
  // A control plane that was restarted remembers it.
  cluster_.control().Signal(SIGTERM);
  EXPECT_EQ(cluster_.control().Wait(kLong), 0);
  cluster_.StartControl();
  WaitUntil("both nodes are back", [&] { return IsAlive(0) && IsAlive(1); });
  const Json status = cluster_.Status();
  for (const Json& node : status["nodes"]) {
    EXPECT_EQ(node["draining"], node["node_id"] == NodeId(0));
  }
  StopForGood(1);
  const RunResult refused = cluster_.Worker(
      500, "no place", {"--control", cluster_.control_address(), "--store", "--tenant", "third"});
  EXPECT_EQ(refused.code, 1) << refused.output;
  EXPECT_THAT(refused.output, HasSubstr("no node has"));
  EXPECT_EQ(cluster_.Metric(0, "okv_node_stored_bytes"), held);
  const RunResult undrained =
      RunProgram({"okvctl", "--control", cluster_.control_address(), "undrain", NodeId(0)});
  EXPECT_EQ(undrained.code, 0) << undrained.output;
  WaitUntil("it takes puts", [&] { return cluster_.Metric(0, "okv_node_draining") == 0; });
  cluster_.ClusterWorker(500, "a place", {"--store", "--tenant", "fourth"});
  EXPECT_GT(cluster_.Metric(0, "okv_node_stored_bytes"), held);
}

TEST_F(DrainTest, WithoutRoomElsewhereTheLimitEndsItAndSaysWhatIsLeft) {
  for (const char* tenant : {"second", "third", "fourth"}) {
    stored_ += cluster_.ClusterWorker(970, "x", {"--store", "--tenant", tenant})["stored_objects"]
                   .get<uint64_t>();
  }
  // No peer at all.
  Json report = Drain(0, "1s", 1);
  EXPECT_EQ(report["done"], false) << output_;
  EXPECT_EQ(report["objects_left"], stored_);
  EXPECT_THAT(output_, HasSubstr("could not be moved"));
  EXPECT_THAT(output_, HasSubstr("no node has"));
  ExpectWholeHit();  // It serves on.
  // A peer with room for a few.
  cluster_.StartNode(1, {"--dram_bytes", "1048576", "--disk_bytes", "1"});
  report = Drain(0, "3s", 1);
  EXPECT_GT(report["objects_moved"], 0) << output_;
  EXPECT_GT(report["objects_left"], 0);
  EXPECT_LT(report["objects_left"], stored_);
  ExpectWholeHit();
  // And one with room for all.
  cluster_.StartNode(2);
  EXPECT_EQ(Drain(0, "100s", 0)["objects_left"], 0);
  StopForGood(0);
  ExpectWholeHit();
}

TEST_F(DrainTest, APeerThatDiesWhileItTakesObjectsCostsNothing) {
  cluster_.StartNode(1);
  cluster_.StartNode(2);
  const auto drain = Process::Start(DrainCommand(0, "100s"));
  int victim = 0;  // A chain goes to one node as long as that has room.
  WaitUntil("something was moved", [&] {
    for (const int peer : {1, 2}) {
      if (cluster_.Metric(peer, "okv_node_stored_bytes") > 0) victim = peer;
    }
    return victim > 0 || !drain->running();
  });
  ASSERT_TRUE(drain->running()) << drain->output();
  cluster_.node(victim).Signal(SIGKILL);
  EXPECT_EQ(drain->Wait(kLong), 0) << drain->output() << cluster_.node(0).output();
  const Json report = ReportOf(drain->output());
  EXPECT_EQ(report["objects_left"], 0) << drain->output();
  // What the dead peer had and had not answered yet is not counted.
  EXPECT_GE(report["objects_moved"], stored_);
  StopForGood(0);
  EXPECT_EQ(cluster_.Status()["objects"], stored_);
  ExpectWholeHit();
}

TEST_F(DrainTest, ADrainedNodeThatIsStoppedInTheMiddleSpillsAndGoesOnWhenItIsBack) {
  const auto drain = Process::Start(DrainCommand(0, "100s"));  // There is no peer yet.
  WaitUntil("it drains", [&] { return cluster_.Metric(0, "okv_node_draining") == 1; });
  StopNode(0);
  cluster_.ForgetNode(0);
  cluster_.StartNode(0);
  cluster_.StartNode(1);
  drain->Wait(kLong);  // It saw the node dead, or waited.
  EXPECT_EQ(Drain(0, "100s", 0)["objects_left"], 0) << output_;
  StopForGood(0);
  ExpectWholeHit();
}

TEST_F(DrainTest, ANodeThatHasNotRegisteredYetAfterARestartOfTheControlPlaneIsWaitedFor) {
  const auto drain = Process::Start(DrainCommand(0, "100s"));  // There is no peer yet.
  WaitUntil("it drains", [&] { return cluster_.Metric(0, "okv_node_draining") == 1; });
  cluster_.node(0).Signal(SIGSTOP);
  cluster_.control().Signal(SIGTERM);
  EXPECT_EQ(cluster_.control().Wait(kLong), 0);
  cluster_.StartControl();
  // Longer than okvctl leaves between two looks.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (std::chrono::steady_clock::now() < end) EXPECT_FALSE(IsAlive(0));
  cluster_.node(0).Signal(SIGCONT);
  cluster_.StartNode(1);
  EXPECT_EQ(drain->Wait(kLong), 0) << drain->output();
}

TEST_F(DrainTest, ANodeThatIsNotKnownIsNamed) {
  const RunResult result =
      RunProgram({"okvctl", "--control", cluster_.control_address(), "drain", "nobody"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.output, HasSubstr("nobody"));
}

}  // namespace
}  // namespace okv::testing_support
