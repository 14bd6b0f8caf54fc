// What a person gets wrong: each program says what, by name, and exits.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/bf16.h"
#include "proto/rotation_set.h"
#include "tests/cluster/local_cluster.h"

namespace okv::testing_support {
namespace {

using ::testing::HasSubstr;

void ExpectRefused(const RunResult& result, const std::string& what) {
  EXPECT_THAT(result.code, ::testing::AllOf(::testing::Gt(0), ::testing::Lt(128))) << result.output;
  EXPECT_THAT(result.output, HasSubstr(what));
}

// A port that somebody listens on.
class BusyPort {
 public:
  BusyPort() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~BusyPort() { close(fd_); }
  const std::string& address() const { return address_; }

 private:
  const int fd_;
  std::string address_;
};

TEST(UnknownFlagTest, EveryProgramNamesIt) {
  for (const char* program :
       {"okv-control", "okv-node", "okv-worker", "okv-calibrate", "okv-bench", "okvctl"}) {
    ExpectRefused(RunProgram({program, "--no_such_flag=1"}), "no_such_flag");
  }
}

TEST(UnknownFlagTest, AFlagOfAnotherCommandIsRefused) {
  ExpectRefused(RunProgram({"okv-bench", "prefill", "--shapes", "8x1024"}),
                "--shapes is for attend, not for prefill");
  ExpectRefused(RunProgram({"okv-calibrate", "report", "--group_size=64"}),
                "--group_size is for fit, import, not for report");
  ExpectRefused(RunProgram({"okv-worker", "dump", "--nostore"}),
                "--store is for run, not for dump");
}

TEST(PortInUseTest, TheControlPlaneNamesTheAddress) {
  const BusyPort port;
  TempDir directory;
  ExpectRefused(
      RunProgram({"okv-control", "--listen", port.address(), "--data_dir", directory.Path("data")}),
      port.address());
}

TEST(PortInUseTest, TheNodeNamesTheAddress) {
  const BusyPort port;
  LocalCluster cluster;
  cluster.StartControl();
  for (const char* flag : {"--listen", "--metrics"}) {
    ExpectRefused(RunProgram({"okv-node", "--control", cluster.control_address(), "--data_dir",
                              cluster.Path("n"), "--dram_bytes", "4194304", flag, port.address()}),
                  port.address());
  }
}

TEST(BindTest, AnAddressBeyondLoopbackIsRefused) {
  TempDir directory;
  ExpectRefused(
      RunProgram({"okv-control", "--listen", "0.0.0.0:0", "--data_dir", directory.Path("data")}),
      "not a loopback address");
}

TEST(DataDirTest, OneThatCannotBeMadeIsNamed) {
  TempDir directory;
  WriteFile(directory.Path("file"), "x");
  const std::string data = directory.Path("file") + "/data";
  ExpectRefused(RunProgram({"okv-control", "--data_dir", data}), data);
  LocalCluster cluster;
  cluster.StartControl();
  ExpectRefused(RunProgram({"okv-node", "--control", cluster.control_address(), "--dram_bytes",
                            "4194304", "--data_dir", data}),
                data);
}

TEST(DataDirTest, ASecondProcessOnItIsRefused) {
  LocalCluster cluster;
  cluster.StartControl();
  cluster.StartNode(0);
  ExpectRefused(RunProgram({"okv-node", "--control", cluster.control_address(), "--dram_bytes",
                            "4194304", "--data_dir", cluster.Path("node0")}),
                cluster.Path("node0"));
  ExpectRefused(RunProgram({"okv-control", "--data_dir", cluster.Path("control")}),
                cluster.Path("control"));
}

TEST(AbsentControlPlaneTest, NodeAndWorkerSayWhereTheyLookedForIt) {
  LocalCluster cluster;
  const std::string nobody = "127.0.0.1:1";
  ExpectRefused(RunProgram({"okv-node", "--control", nobody, "--dram_bytes", "4194304",
                            "--data_dir", cluster.Path("n"), "--control_timeout", "1s"}),
                nobody);
  ExpectRefused(cluster.Worker(100, "x", {"--control", nobody, "--connect_timeout_s", "1"}),
                nobody);
}

TEST(GgufTest, ATruncatedOrForeignModelIsNamed) {
  LocalCluster cluster;
  const std::string whole = ReadFileOrEmpty(cluster.model());
  WriteFile(cluster.model(), whole.substr(0, whole.size() / 2));
  ExpectRefused(cluster.Worker(100, "x"), cluster.model());
  WriteFile(cluster.model(), "PK\x03\x04 this is no model");
  ExpectRefused(cluster.Worker(100, "x"), cluster.model());
}

TEST(WorkerFlagsTest, AValueOutOfRangeIsNamed) {
  LocalCluster cluster;
  ExpectRefused(cluster.Worker(100, "x", {"--threads", "200000"}), "--threads");
  for (const char* tokens : {"4294967290", "100000"}) {
    ExpectRefused(cluster.Worker(100, "x", {"--max_new_tokens", tokens}), "--max_new_tokens");
  }
  ExpectRefused(cluster.Worker(100, "x", {"--store"}), "--control");
}

TEST(FileTest, ADirectoryInPlaceOfAFileIsNamed) {
  LocalCluster cluster;
  ExpectRefused(cluster.Worker(100, "x", {"--rotation", cluster.Path("")}), cluster.Path(""));
  ExpectRefused(cluster.Worker(100, "x", {"--prompt_file", cluster.Path("")}), cluster.Path(""));
}

class RotationSetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto set = RotationSet::Parse(ReadFileOrEmpty(cluster_.rotation()));
    ASSERT_TRUE(set.ok()) << set.status();
    set_ = *set;
    cluster_.StartControl();
  }

  // Neither the control plane nor a worker takes the file.
  void ExpectRefusedEverywhere(const std::string& what) {
    ExpectRefused(RunProgram({"okvctl", "--control", cluster_.control_address(), "publish",
                              cluster_.rotation()}),
                  what);
    ExpectRefused(cluster_.Worker(100, "x"), what);
    EXPECT_EQ(cluster_.Status()["rotations"], 0);
  }

  LocalCluster cluster_;
  RotationSet set_;
};

TEST_F(RotationSetTest, ATruncatedOneIsRefused) {
  const std::string whole = ReadFileOrEmpty(cluster_.rotation());
  WriteFile(cluster_.rotation(), whole.substr(0, whole.size() - 100));
  ExpectRefusedEverywhere("truncated");
}

TEST_F(RotationSetTest, ANanIsRefused) {
  set_.r_k[77] = 0x7fc0;
  std::string bytes = ReadFileOrEmpty(cluster_.rotation());
  // r_k's bytes, wherever the file has them: Serialize takes valid sets only.
  RotationSet good = *RotationSet::Parse(bytes);
  const std::string needle(reinterpret_cast<const char*>(good.r_k.data()), good.r_k.size() * 2);
  const size_t at = bytes.find(needle);
  ASSERT_NE(at, std::string::npos);
  bytes[at + 154] = '\xc0';
  bytes[at + 155] = '\x7f';
  WriteFile(cluster_.rotation(), bytes);
  ExpectRefusedEverywhere("NaN");
}

TEST_F(RotationSetTest, OneThatIsNotOrthogonalIsRefused) {
  std::string bytes = ReadFileOrEmpty(cluster_.rotation());
  const std::string needle(reinterpret_cast<const char*>(set_.r_k.data()), set_.r_k.size() * 2);
  const size_t at = bytes.find(needle);
  ASSERT_NE(at, std::string::npos);
  const uint16_t two = FloatToBf16(2.0f);
  std::memcpy(bytes.data() + at, &two, sizeof(two));
  WriteFile(cluster_.rotation(), bytes);
  ExpectRefusedEverywhere("orthogonal");
}

TEST_F(RotationSetTest, OneForAnotherModelIsRefusedByTheWorkerNamingTheField) {
  set_.weights_revision = "another";
  WriteFile(cluster_.rotation(), set_.Serialize());
  cluster_.Publish();
  ExpectRefused(cluster_.Worker(100, "x"), "weights_revision");
}

TEST_F(RotationSetTest, OneThatIsNotPublishedIsRefusedByTheControlPlane) {
  ExpectRefused(cluster_.Worker(100, "x", {"--control", cluster_.control_address()}),
                "rotation_hash");
}

}  // namespace
}  // namespace okv::testing_support
