// The main job, whole: worker A stores, worker B resumes, every program real.

#include <signal.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/local_cluster.h"

namespace okv::testing_support {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

// What must not depend on where the prefix came from.
void ExpectSameBits(const Json& a, const Json& b) {
  for (const char* field : {"tokens", "logits_sha256", "objects_sha256"}) {
    EXPECT_EQ(a[field], b[field]) << field;
  }
}

class ResumeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cluster_.StartControl();
    if (HasFatalFailure()) return;
    cluster_.Publish();
    cluster_.StartNode(0);
    cluster_.StartNode(1);
  }
  LocalCluster cluster_;
};

TEST_F(ResumeTest, AnotherProcessContinuesAPrefixWithTheBitsOfALoneRun) {
  const Json a = cluster_.ClusterWorker(970, "first ending", {"--store"});
  EXPECT_EQ(a["hit_tokens"], 0);
  const Json b = cluster_.ClusterWorker(970, "the second one");
  EXPECT_EQ(b["hit_tokens"], 960);
  // Sink and tail of 4 in bf16, 10 blocks between in int2.
  EXPECT_EQ(b["fetched_objects"], 15);
  ExpectSameBits(b, cluster_.LoneWorker(970, "the second one"));
}

TEST_F(ResumeTest, PrefillInAnyPiecesGivesTheSameBits) {
  cluster_.ClusterWorker(970, "first ending", {"--store"});
  const Json lone = cluster_.LoneWorker(970, "other");
  for (const char* chunk : {"1", "100", "512"}) {
    ExpectSameBits(lone, cluster_.LoneWorker(970, "other", {"--prefill_chunk", chunk}));
    const Json hit = cluster_.ClusterWorker(970, "other", {"--prefill_chunk", chunk});
    EXPECT_EQ(hit["hit_tokens"], 960);
    ExpectSameBits(lone, hit);
  }
}

TEST_F(ResumeTest, AHitOnGeneratedBlocksGivesTheBitsOfALoneRun) {
  const Json a = cluster_.ClusterWorker(
      400, "",
      {"--store_finished", "--max_new_tokens", "200", "--temperature", "1", "--seed", "3"});
  ASSERT_GE(a["tokens"].size(), 150u);  // No early end of sequence.
  std::string generated;
  for (const Json& token : a["tokens"]) generated += token.dump() + ",";
  const Json b = cluster_.ClusterWorker(400, "", {"--ending_tokens", generated + "7,8,9"});
  EXPECT_GT(b["hit_tokens"], 512);  // Blocks 7 on hold generated tokens.
  ExpectSameBits(b, cluster_.LoneWorker(400, "", {"--ending_tokens", generated + "7,8,9"}));
}

TEST_F(ResumeTest, MetricsOfTheNodesAreWhatTheWriterStored) {
  const Json a = cluster_.ClusterWorker(970, "first ending", {"--store"});
  double stored = 0, logical = 0;
  for (const int node : {0, 1}) {
    stored += cluster_.Metric(node, "okv_node_stored_bytes");
    logical += cluster_.Metric(node, "okv_node_logical_bytes");
  }
  EXPECT_EQ(stored, a["stored_bytes"]);
  EXPECT_EQ(logical, a["bf16_bytes"]);
  EXPECT_EQ(a["history_bytes"].get<double>() * 16 / a["history_bf16_bytes"].get<double>(), 2.5);
}

TEST_F(ResumeTest, StoringTwiceFindsEverythingInPlace) {
  const Json a = cluster_.ClusterWorker(970, "x", {"--store"});
  const Json b = cluster_.ClusterWorker(970, "x", {"--store"});
  EXPECT_EQ(a["stored_objects"], b["stored_objects"]);
  EXPECT_EQ(cluster_.Status()["objects"], a["stored_objects"]);
}

TEST_F(ResumeTest, AnotherTenantSeesNothing) {
  cluster_.ClusterWorker(970, "x", {"--store"});
  EXPECT_EQ(cluster_.ClusterWorker(970, "x", {"--tenant", "other"})["hit_tokens"], 0);
}

TEST_F(ResumeTest, OtherWindowsAreAnotherFormatAndSeeNothing) {
  cluster_.ClusterWorker(970, "x", {"--store"});
  EXPECT_EQ(cluster_.ClusterWorker(970, "x", {"--recent_tokens", "128"})["hit_tokens"], 0);
}

TEST_F(ResumeTest, AKilledNodeIsAMissAndTheAnswerStaysRight) {
  cluster_.ClusterWorker(970, "x", {"--store"});
  const Json lone = cluster_.LoneWorker(970, "y");
  cluster_.node(0).Signal(SIGKILL);
  cluster_.node(1).Signal(SIGKILL);
  // At once: the control plane still believes in the nodes.
  const Json miss = cluster_.ClusterWorker(970, "y", {"--deadline_s", "5"});
  EXPECT_EQ(miss["hit_tokens"], 0);
  EXPECT_NE(miss["miss_reason"], "");
  EXPECT_LT(miss["lookup_fetch_s"], 6.0);
  ExpectSameBits(lone, miss);
}

TEST_F(ResumeTest, AStoppedNodeCostsTheDeadlineAndNoMore) {
  cluster_.ClusterWorker(970, "x", {"--store"});
  for (const int node : {0, 1}) cluster_.node(node).Signal(SIGSTOP);
  const Json miss = cluster_.ClusterWorker(970, "y", {"--deadline_s", "1"});
  for (const int node : {0, 1}) cluster_.node(node).Signal(SIGCONT);
  EXPECT_EQ(miss["hit_tokens"], 0);
  EXPECT_NE(miss["miss_reason"], "");
  EXPECT_LT(miss["lookup_fetch_s"], 4.0);
  ExpectSameBits(cluster_.LoneWorker(970, "y"), miss);
}

TEST_F(ResumeTest, ARestartedNodeServesWhatItHad) {
  const Json a = cluster_.ClusterWorker(970, "x", {"--store"});
  for (const int node : {0, 1}) {
    cluster_.node(node).Signal(SIGTERM);
    EXPECT_EQ(cluster_.node(node).Wait(std::chrono::seconds(30)), 0)
        << cluster_.node(node).output();
    cluster_.ForgetNode(node);
    cluster_.StartNode(node);
  }
  EXPECT_EQ(cluster_.Status()["objects"], a["stored_objects"]);
  const Json b = cluster_.ClusterWorker(970, "y");
  EXPECT_EQ(b["hit_tokens"], 960);
  ExpectSameBits(b, cluster_.LoneWorker(970, "y"));
}

TEST_F(ResumeTest, ARestartedControlPlaneKnowsEverythingFromTheNodes) {
  const Json a = cluster_.ClusterWorker(970, "x", {"--store"});
  cluster_.control().Signal(SIGKILL);
  cluster_.control().Wait(std::chrono::seconds(10));
  cluster_.ForgetControl();
  cluster_.StartControl();
  // Nodes learn of it by their next heartbeat, 200 ms; a worker is a natural way to wait.
  Json b = Json::object();
  for (int attempt = 0; attempt < 100 && b.value("hit_tokens", 0) == 0; ++attempt) {
    b = cluster_.ClusterWorker(970, "y");
  }
  EXPECT_EQ(b["hit_tokens"], 960);
  ExpectSameBits(b, cluster_.LoneWorker(970, "y"));
}

TEST_F(ResumeTest, NodesFindAControlPlaneThatWasAwayForLonger) {
  cluster_.ClusterWorker(970, "x", {"--store"});
  cluster_.control().Signal(SIGKILL);
  cluster_.control().Wait(std::chrono::seconds(10));
  cluster_.ForgetControl();
  // Long enough for several attempts of the nodes to fail.
  Json lone = Json::object();
  for (int i = 0; i < 20; ++i) lone = cluster_.LoneWorker(970, "y");
  cluster_.StartControl();
  Json b = Json::object();
  for (int attempt = 0; attempt < 100 && b.value("hit_tokens", 0) == 0; ++attempt) {
    b = cluster_.ClusterWorker(970, "y");
  }
  EXPECT_EQ(b["hit_tokens"], 960);
  ExpectSameBits(b, lone);
}

TEST_F(ResumeTest, AnArenaThatIsFullSpillsAndEveryObjectIsServed) {
  // A long tail makes few tokens many bytes: 1 + 24 bf16 blocks of 64 KiB, in an arena of 1 MiB.
  const std::vector<std::string> wide = {"--recent_tokens", "1536", "--deadline_s", "60"};
  cluster_.StartNode(2, {"--dram_bytes", "1048576"});
  for (const int node : {0, 1}) {  // Only the small one stays.
    cluster_.node(node).Signal(SIGTERM);
    cluster_.node(node).Wait(std::chrono::seconds(30));
  }
  // Until the control plane has given the other two up, puts may go to them and fail.
  Json a = Json::object();
  for (int attempt = 0; attempt < 100 && a.value("stored_bytes", 0) == 0; ++attempt) {
    const RunResult result =
        cluster_.Worker(2000, "x",
                        {"--control", cluster_.control_address(), "--recent_tokens", "1536",
                         "--deadline_s", "60", "--store"});
    if (result.code == 0) a = Json::parse(result.last_line);
  }
  EXPECT_GT(a.value("stored_bytes", 0), 1048576);
  EXPECT_GT(cluster_.Metric(2, "okv_node_spilled_bytes_total"), 0);
  const Json b = cluster_.ClusterWorker(2000, "y", wide);
  EXPECT_EQ(b["hit_tokens"], 1984);
  ExpectSameBits(b, cluster_.LoneWorker(2000, "y", wide));
}

}  // namespace
}  // namespace okv::testing_support
