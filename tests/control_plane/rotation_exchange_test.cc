// The client library against a real okv-control, and what a node's reports are checked for.

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>

#include "client/cluster.h"
#include "control_plane/server.h"
#include "control_plane/state_rocksdb.h"
#include "proto/control.grpc.pb.h"
#include "proto/data_plane.h"
#include "tests/control_plane/harness.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using absl::StatusCode;
using testing::HasSubstr;
using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::IsStatus;
using testing_support::kSecondNanos;
using testing_support::kTenant;
using testing_support::SmallFormat;
using testing_support::SmallRotations;
using testing_support::TempDir;

class ExchangeTest : public testing::Test {
 protected:
  ExchangeTest() { Start(); }

  void Start() {
    server_.reset();
    ControlServerOptions options;
    options.data_dir = directory_.Path("control");
    auto server = ControlServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ClusterOptions Client() const {
    ClusterOptions options;
    options.control_address = server_->address();
    return options;
  }

  const TempDir directory_;
  std::unique_ptr<ControlServer> server_;
};

TEST_F(ExchangeTest, ClusterGetsBackTheBytesItPublishedAlsoAfterARestart) {
  RotationSet set = SmallRotations("hadamard", 2);
  set.promised_error_k = {0.25f, 0.5f};
  const auto hash = Cluster::PublishRotation(Client(), set);
  ASSERT_TRUE(hash.ok()) << hash.status();
  EXPECT_EQ(*hash, set.hash());
  EXPECT_EQ(*Cluster::PublishRotation(Client(), set), *hash);
  for (int life = 0; life < 2; ++life) {
    const auto got = Cluster::GetRotation(Client(), *hash);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->Serialize(), set.Serialize());
    EXPECT_EQ(*got, set);
    Start();
  }
}

TEST_F(ExchangeTest, SetOfManyChunksComesBackByteForByte) {
  RotationSet set = SmallRotations("hadamard", 2);
  set.provenance["notes"] = std::string(600'000, 'n');  // The server's chunks have 256 KiB.
  const std::string file = set.Serialize();
  ASSERT_GT(file.size(), size_t{2} << 18);
  const auto hash = Cluster::PublishRotation(Client(), set);
  ASSERT_TRUE(hash.ok()) << hash.status();
  const auto got = Cluster::GetRotation(Client(), *hash);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->Serialize(), file);
}

TEST_F(ExchangeTest, UnknownSetIsNotFound) {
  EXPECT_THAT(Cluster::GetRotation(Client(), RotationHash()).status(),
              IsStatus(StatusCode::kNotFound, RotationHash().Hex()));
}

// A whole record of the first block, before a test spoils one field.
v1::ReportCommitsRequest Commit(uint64_t epoch) {
  const Format format = SmallFormat(SmallRotations("hadamard", 2));
  v1::ReportCommitsRequest request;
  request.set_node_id("a");
  request.set_epoch(epoch);
  v1::ObjectRecord* record = request.add_added();
  record->set_format_id(std::string(format.id().view()));
  record->set_tenant(kTenant);
  record->set_key(std::string(32, 'k'));
  record->set_codec(v1::CODEC_BF16);
  record->set_payload_bytes(1);
  return request;
}

TEST_F(ExchangeTest, ReportsWithBadDigestsOrCodecsAreInvalidAndChangeNothing) {
  const auto stub = v1::ControlPlane::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
  const auto report = [&](const v1::ReportCommitsRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    v1::ReportCommitsResponse ignored;
    return stub->ReportCommits(&context, request, &ignored);
  };
  const auto objects = [&] {
    grpc::ClientContext context;
    v1::GetClusterStatusResponse response;
    EXPECT_TRUE(stub->GetClusterStatus(&context, {}, &response).ok());
    return response.objects_count();
  };
  v1::RegisterNodeRequest node;
  node.set_protocol_major(kProtocolMajor);
  node.set_protocol_minor(kProtocolMinor);
  node.set_node_id("a");
  node.set_data_address("127.0.0.1:7");
  v1::RegisterNodeResponse registered;
  grpc::ClientContext context;
  ASSERT_TRUE(stub->RegisterNode(&context, node, &registered).ok());

  for (const int codec : {0, 3, -1}) {
    v1::ReportCommitsRequest request = Commit(registered.epoch());
    request.mutable_added(0)->set_codec(static_cast<v1::CodecId>(codec));
    EXPECT_EQ(report(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT) << codec;
  }
  for (const size_t bytes : {size_t{0}, size_t{31}, size_t{33}}) {
    v1::ReportCommitsRequest request = Commit(registered.epoch());
    request.mutable_added(0)->set_key(std::string(bytes, 'k'));
    grpc::Status status = report(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat("key is ", bytes, " bytes")));
    request = Commit(registered.epoch());
    request.mutable_added(0)->set_format_id(std::string(bytes, 'f'));
    status = report(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("format_id"));
  }
  EXPECT_EQ(objects(), 0u);
  EXPECT_TRUE(report(Commit(registered.epoch())).ok());
  EXPECT_EQ(objects(), 1u);
}

TEST(DurableIdsTest, WriteIdsAndEpochsAreUniqueAcrossReopensOfTheDirectory) {
  const TempDir directory;
  std::set<uint64_t> seen;
  for (int life = 0; life < 3; ++life) {
    const auto state = OpenRocksdbState(directory.path());
    ASSERT_TRUE(state.ok()) << state.status();
    const auto ids = IdAllocator::Open(state->get());
    ASSERT_TRUE(ids.ok()) << ids.status();
    for (int i = 0; i < 50; ++i) {
      const auto id = (*ids)->Next();
      ASSERT_TRUE(id.ok()) << id.status();
      EXPECT_NE(*id, 0u);
      EXPECT_TRUE(seen.insert(*id).second) << *id << " came twice";
    }
  }
}

TEST(ReservedBytesTest, ExpiryCommitAndReplacementAllReturnToTheBaseline) {
  ControlHarness h;
  h.Open();
  const NodeEpoch a = h.AddNode("a");
  const auto keys = ChainKeys(0, 2);
  const auto reserved = [&](size_t node) {
    return h.control().Status().nodes[node].state.reserved_bytes;
  };
  const uint64_t bytes = h.block_bytes(Codec::kBf16);
  ASSERT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
  ASSERT_TRUE(h.ReserveOne(h.Object(keys, 0, Codec::kBf16), "w").status.ok());
  EXPECT_EQ(reserved(0), bytes) << "asking again reserves nothing more";
  ASSERT_TRUE(h.control().ReportCommits(a, {h.Object(keys, 0, Codec::kBf16)}, {}).ok());
  EXPECT_EQ(reserved(0), 0u);

  ASSERT_TRUE(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").status.ok());
  EXPECT_EQ(reserved(0), bytes);
  h.clock().AdvanceNanos(6 * kSecondNanos);
  h.control().Sweep();  // The node is gone, its reservation not yet.
  h.AddNode("b");
  EXPECT_EQ(h.ReserveOne(h.Object(keys, 1, Codec::kBf16), "w").node.node_id, "b");
  EXPECT_EQ(reserved(0), 0u);
  EXPECT_EQ(reserved(1), bytes);
  h.clock().AdvanceNanos(30 * kSecondNanos);
  h.control().Sweep();
  EXPECT_EQ(reserved(1), 0u);
  EXPECT_EQ(h.control().Status().reservations_count, 0u);
}

}  // namespace
}  // namespace okv
