// control.proto over a real channel: what a client, a node and an operator see of one okv-control.

#include "control_plane/server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/control.grpc.pb.h"
#include "proto/data_plane.h"
#include "proto/ticket.h"
#include "tests/control_plane/harness.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing::HasSubstr;
using testing_support::ChainKeys;
using testing_support::IsStatus;
using testing_support::kTenant;
using testing_support::SmallFormat;
using testing_support::SmallRotations;
using testing_support::TempDir;

std::string Raw(const BlockKey& key) { return std::string(key.view()); }

class ServerTest : public testing::Test {
 protected:
  ServerTest() { Start(); }

  ControlServerOptions Options() const {
    ControlServerOptions options;
    options.data_dir = directory_.Path("control");
    return options;
  }
  void Start() {
    server_.reset();
    auto server = ControlServer::Start(Options());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ = grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials());
    stub_ = v1::ControlPlane::NewStub(channel_);
  }

  // Runs one unary RPC.
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::ControlPlane::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return (stub_.get()->*method)(&context, request, response);
  }

  grpc::Status Publish(const std::string& file, v1::PublishRotationResponse* response) {
    grpc::ClientContext context;
    const auto writer = stub_->PublishRotation(&context, response);
    for (size_t at = 0; at < file.size(); at += 1000) {
      v1::PublishRotationRequest request;
      request.set_chunk(file.substr(at, 1000));
      if (!writer->Write(request)) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }
  grpc::Status OpenSession(uint32_t major, uint32_t minor, v1::OpenSessionResponse* response) {
    v1::OpenSessionRequest request;
    request.set_protocol_major(major);
    request.set_protocol_minor(minor);
    request.set_tenant(kTenant);
    request.set_format(format_.Canonical());
    return Call(&v1::ControlPlane::Stub::OpenSession, request, response);
  }
  void PublishAndOpen() {
    v1::PublishRotationResponse published;
    ASSERT_TRUE(Publish(rotations_.Serialize(), &published).ok());
    v1::OpenSessionResponse session;
    ASSERT_TRUE(OpenSession(kProtocolMajor, kProtocolMinor, &session).ok());
  }
  grpc::Status Register(const std::string& node_id, v1::RegisterNodeResponse* response) {
    v1::RegisterNodeRequest request;
    request.set_protocol_major(kProtocolMajor);
    request.set_protocol_minor(kProtocolMinor);
    request.set_node_id(node_id);
    request.set_data_address("127.0.0.1:7");
    v1::TierUsage* tier = request.add_tiers();
    tier->set_tier("dram");
    tier->set_capacity_bytes(uint64_t{1} << 40);
    return Call(&v1::ControlPlane::Stub::RegisterNode, request, response);
  }

  v1::ObjectRecord Record(uint32_t index, Codec codec) const {
    v1::ObjectRecord record;
    record.set_format_id(std::string(format_.id().view()));
    record.set_tenant(kTenant);
    record.set_key(Raw(keys_[index]));
    if (index > 0) record.set_parent(Raw(keys_[index - 1]));
    record.set_index(index);
    record.set_codec(static_cast<v1::CodecId>(codec));
    record.set_payload_bytes(PageLayout::Of(format_).block_bytes(codec));
    record.set_write_id(index + 1);
    return record;
  }
  v1::LookupRequest LookupOf(uint32_t count) const {
    v1::LookupRequest request;
    request.set_tenant(kTenant);
    request.set_format_id(std::string(format_.id().view()));
    for (uint32_t i = 0; i < count; ++i) request.add_keys(Raw(keys_[i]));
    return request;
  }
  v1::ReserveRequest ReserveOf(uint32_t count) const {
    v1::ReserveRequest request;
    request.set_tenant(kTenant);
    request.set_format_id(std::string(format_.id().view()));
    request.set_write_group("w");
    for (uint32_t i = 0; i < count; ++i) {
      v1::ReserveObject* object = request.add_objects();
      object->set_key(Raw(keys_[i]));
      if (i > 0) object->set_parent(Raw(keys_[i - 1]));
      object->set_index(i);
      object->set_codec(v1::CODEC_BF16);
      object->set_payload_bytes(PageLayout::Of(format_).block_bytes(Codec::kBf16));
    }
    return request;
  }
  uint64_t ObjectsCount() {
    v1::GetClusterStatusResponse response;
    EXPECT_TRUE(
        Call(&v1::ControlPlane::Stub::GetClusterStatus, v1::GetClusterStatusRequest(), &response)
            .ok());
    return response.objects_count();
  }

  const TempDir directory_;
  const RotationSet rotations_ = SmallRotations("hadamard", 2);
  const Format format_ = SmallFormat(rotations_);
  const std::vector<BlockKey> keys_ = ChainKeys(0, 20);
  std::unique_ptr<ControlServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ControlPlane::Stub> stub_;
};

TEST_F(ServerTest, RotationSetGoesThroughInChunks) {
  const std::string file = rotations_.Serialize();
  v1::PublishRotationResponse published;
  ASSERT_TRUE(Publish(file, &published).ok());
  EXPECT_EQ(published.rotation_hash(), rotations_.hash().view());
  EXPECT_FALSE(published.already_known());
  ASSERT_TRUE(Publish(file, &published).ok());
  EXPECT_TRUE(published.already_known());

  Start();  // Durable.
  grpc::ClientContext context;
  v1::GetRotationRequest request;
  request.set_rotation_hash(std::string(rotations_.hash().view()));
  const auto reader = stub_->GetRotation(&context, request);
  std::string got;
  v1::GetRotationResponse part;
  while (reader->Read(&part)) got += part.chunk();
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(got, file);

  v1::ListRotationsRequest list_request;
  v1::ListRotationsResponse list;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::ListRotations, list_request, &list).ok());
  ASSERT_EQ(list.rotations_size(), 1);
  EXPECT_EQ(list.rotations(0).method(), "hadamard");
  list_request.set_model("another");
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::ListRotations, list_request, &list).ok());
  EXPECT_EQ(list.rotations_size(), 0);
}

TEST_F(ServerTest, BadRotationSetsAreRefusedWithTypedErrors) {
  v1::PublishRotationResponse published;
  EXPECT_EQ(Publish("", &published).error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(Publish("not a safetensors file at all", &published).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  const std::string file = rotations_.Serialize();
  EXPECT_EQ(Publish(file.substr(0, file.size() - 9), &published).error_code(),
            grpc::StatusCode::DATA_LOSS);

  for (const std::string& hash : {std::string(32, 'x'), std::string("short")}) {
    grpc::ClientContext context;
    v1::GetRotationRequest request;
    request.set_rotation_hash(hash);
    const auto reader = stub_->GetRotation(&context, request);
    v1::GetRotationResponse part;
    EXPECT_FALSE(reader->Read(&part));
    EXPECT_EQ(reader->Finish().error_code(),
              hash.size() == 32 ? grpc::StatusCode::NOT_FOUND : grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(ServerTest, IncompatibleProtocolNamesBothVersions) {
  PublishAndOpen();
  v1::OpenSessionResponse session;
  const grpc::Status status = OpenSession(kProtocolMajor + 1, 7, &session);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr(absl::StrCat(kProtocolMajor + 1, ".7 there")));
  EXPECT_THAT(status.error_message(),
              HasSubstr(absl::StrCat(kProtocolMajor, ".", kProtocolMinor, " here")));
  EXPECT_TRUE(OpenSession(kProtocolMajor, kProtocolMinor + 1, &session).ok());
  EXPECT_EQ(OpenSession(kProtocolMajor, kProtocolMinor + 2, &session).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  v1::RegisterNodeRequest node;
  node.set_node_id("a");
  node.set_data_address("127.0.0.1:7");
  v1::RegisterNodeResponse response;
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::RegisterNode, node, &response).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ServerTest, LifeOfABlock) {
  PublishAndOpen();
  v1::RegisterNodeResponse node;
  ASSERT_TRUE(Register("a", &node).ok());
  EXPECT_EQ(node.heartbeat_interval_ms(), 1000u);

  v1::ReserveResponse reserved;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Reserve, ReserveOf(3), &reserved).ok());
  ASSERT_EQ(reserved.placements_size(), 3);
  for (const v1::Placement& placement : reserved.placements()) {
    EXPECT_EQ(placement.code(), 0) << placement.message();
    EXPECT_EQ(placement.node().node_id(), "a");
    EXPECT_EQ(placement.node().data_address(), "127.0.0.1:7");
    EXPECT_GT(placement.write_id(), 0u);
    EXPECT_FALSE(placement.reservation().empty());
  }

  v1::ReportCommitsRequest commits;
  commits.set_node_id("a");
  commits.set_epoch(node.epoch());
  for (uint32_t i = 0; i < 3; ++i) *commits.add_added() = Record(i, Codec::kBf16);
  *commits.add_added() = Record(1, Codec::kInt2);
  v1::ReportCommitsResponse ignored;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::ReportCommits, commits, &ignored).ok());

  v1::LookupResponse found;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Lookup, LookupOf(5), &found).ok());
  EXPECT_EQ(found.prefix_blocks(), 2u);
  EXPECT_EQ(found.resume_boundary(), 3u);
  ASSERT_EQ(found.blocks_size(), 3);
  ASSERT_EQ(found.nodes_size(), 1);
  EXPECT_EQ(found.nodes(0).node_id(), "a");
  EXPECT_EQ(found.blocks(0).bf16_nodes_size(), 1);
  EXPECT_EQ(found.blocks(0).int2_nodes_size(), 0);
  EXPECT_EQ(found.blocks(1).bf16_nodes_size(), 1);
  EXPECT_EQ(found.blocks(1).int2_nodes_size(), 1);

  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Reserve, ReserveOf(4), &reserved).ok());
  EXPECT_EQ(reserved.placements(2).code(), 6);  // ALREADY_EXISTS
  EXPECT_EQ(reserved.placements(3).code(), 0);

  commits.clear_added();
  v1::ObjectName* removed = commits.add_removed();
  removed->set_key(Raw(keys_[1]));
  removed->set_codec(v1::CODEC_BF16);
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::ReportCommits, commits, &ignored).ok());
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Lookup, LookupOf(5), &found).ok());
  EXPECT_EQ(found.resume_boundary(), 1u);
}

TEST_F(ServerTest, RestartedControlPlaneTellsNodesToRegisterAgain) {
  PublishAndOpen();
  v1::RegisterNodeResponse node;
  ASSERT_TRUE(Register("a", &node).ok());
  const std::string ticket_key = node.ticket_key();
  v1::HeartbeatRequest heartbeat;
  heartbeat.set_node_id("a");
  heartbeat.set_epoch(node.epoch());
  v1::HeartbeatResponse beat;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Heartbeat, heartbeat, &beat).ok());
  EXPECT_FALSE(beat.register_again());

  Start();
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Heartbeat, heartbeat, &beat).ok());
  EXPECT_TRUE(beat.register_again());
  ASSERT_TRUE(Register("a", &node).ok());
  EXPECT_EQ(node.ticket_key(), ticket_key) << "tickets from before still open";

  grpc::ClientContext context;
  v1::ReportInventoryResponse counted;
  const auto writer = stub_->ReportInventory(&context, &counted);
  v1::ReportInventoryRequest part;
  part.set_node_id("a");
  part.set_epoch(node.epoch());
  for (uint32_t i = 0; i < 20; ++i) {
    part.clear_objects();
    *part.add_objects() = Record(i, i == 0 || i >= 16 ? Codec::kBf16 : Codec::kInt2);
    part.set_last(i == 19);
    ASSERT_TRUE(writer->Write(part));
  }
  writer->WritesDone();
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(counted.objects_count(), 20u);
  v1::LookupResponse found;
  ASSERT_TRUE(Call(&v1::ControlPlane::Stub::Lookup, LookupOf(20), &found).ok());
  EXPECT_EQ(found.resume_boundary(), 20u) << "the format is known without a new session";
}

TEST_F(ServerTest, InventoryThatIsCutOrBadChangesNothing) {
  PublishAndOpen();
  v1::RegisterNodeResponse node;
  ASSERT_TRUE(Register("a", &node).ok());
  enum class End { kWhole, kCut, kTooEarly };
  const auto send = [&](const v1::ObjectRecord& second, End end) {
    grpc::ClientContext context;
    v1::ReportInventoryResponse counted;
    const auto writer = stub_->ReportInventory(&context, &counted);
    v1::ReportInventoryRequest part;
    part.set_node_id("a");
    part.set_epoch(node.epoch());
    *part.add_objects() = Record(0, Codec::kBf16);
    writer->Write(part);
    *part.mutable_objects(0) = second;
    part.set_last(end == End::kWhole);
    writer->Write(part);
    if (end == End::kCut) {
      context.TryCancel();
    } else {
      writer->WritesDone();
    }
    return writer->Finish();
  };
  EXPECT_FALSE(send(Record(1, Codec::kBf16), End::kCut).ok());
  // What the server sees of a node that dies, before it hears that the stream was cut.
  EXPECT_EQ(send(Record(1, Codec::kBf16), End::kTooEarly).error_code(),
            grpc::StatusCode::CANCELLED);
  v1::ObjectRecord bad = Record(1, Codec::kBf16);
  bad.set_codec(static_cast<v1::CodecId>(9));
  EXPECT_EQ(send(bad, End::kWhole).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  bad = Record(1, Codec::kBf16);
  bad.set_tenant("");
  EXPECT_EQ(send(bad, End::kWhole).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ObjectsCount(), 0u);
  EXPECT_TRUE(send(Record(1, Codec::kBf16), End::kWhole).ok());
  EXPECT_EQ(ObjectsCount(), 2u);

  grpc::ClientContext context;
  v1::ReportInventoryResponse counted;
  const auto empty = stub_->ReportInventory(&context, &counted);
  empty->WritesDone();
  EXPECT_EQ(empty->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTest, StaleEpochIsAborted) {
  v1::RegisterNodeResponse old;
  v1::RegisterNodeResponse now;
  ASSERT_TRUE(Register("a", &old).ok());
  ASSERT_TRUE(Register("a", &now).ok());
  v1::ReportCommitsRequest commits;
  commits.set_node_id("a");
  commits.set_epoch(old.epoch());
  *commits.add_added() = Record(0, Codec::kBf16);
  v1::ReportCommitsResponse ignored;
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::ReportCommits, commits, &ignored).error_code(),
            grpc::StatusCode::ABORTED);
}

TEST_F(ServerTest, OutOfBoundsRequestsAreInvalid) {
  PublishAndOpen();
  v1::LookupResponse found;
  v1::LookupRequest lookup = LookupOf(2);
  lookup.set_keys(1, "31 bytes, one too few, as it is");
  grpc::Status status = Call(&v1::ControlPlane::Stub::Lookup, lookup, &found);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("31 bytes"));
  lookup = LookupOf(1);
  lookup.set_format_id("");
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::Lookup, lookup, &found).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  lookup.set_format_id(std::string(32, 'f'));
  status = Call(&v1::ControlPlane::Stub::Lookup, lookup, &found);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("open a session first"));
  lookup = LookupOf(0);
  for (int i = 0; i < 65536; ++i) lookup.add_keys(Raw(keys_[0]));
  EXPECT_TRUE(Call(&v1::ControlPlane::Stub::Lookup, lookup, &found).ok());
  lookup.add_keys(Raw(keys_[0]));
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::Lookup, lookup, &found).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);

  v1::ReserveResponse reserved;
  v1::ReserveRequest reserve = ReserveOf(1);
  reserve.mutable_objects(0)->set_codec(v1::CODEC_UNSPECIFIED);
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::Reserve, reserve, &reserved).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  reserve = ReserveOf(1);
  reserve.mutable_objects(0)->set_parent("x");
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::Reserve, reserve, &reserved).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  reserve = ReserveOf(1);
  const v1::ReserveObject object = reserve.objects(0);
  for (int i = 0; i < 4096; ++i) *reserve.add_objects() = object;
  EXPECT_EQ(Call(&v1::ControlPlane::Stub::Reserve, reserve, &reserved).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ServerTest, HealthServiceSaysServing) {
  // grpc.health.v1.HealthCheckResponse {status: SERVING} is "08 01": no need of generated code.
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  grpc::Slice empty;
  grpc::ByteBuffer response;
  grpc::Status status;
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel_);
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                          grpc::ByteBuffer(&empty, 1), &queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag;
  bool ok;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  ASSERT_TRUE(ok && status.ok()) << status.error_message();
  grpc::Slice answer;
  ASSERT_TRUE(response.TrySingleSlice(&answer).ok());
  EXPECT_EQ(std::string(answer.begin(), answer.end()), std::string("\x08\x01", 2));
}

TEST(ServerStartTest, WhatIsWrongIsNamed) {
  const TempDir directory;
  ControlServerOptions options;
  options.data_dir = directory.Path("a");
  const auto first = ControlServer::Start(options);
  ASSERT_TRUE(first.ok()) << first.status();

  EXPECT_THAT(ControlServer::Start(options).status(),
              IsStatus(absl::StatusCode::kUnavailable, directory.Path("a")));
  ControlServerOptions other = options;
  other.data_dir = directory.Path("b");
  other.listen = (*first)->address();
  EXPECT_THAT(ControlServer::Start(other).status(),
              IsStatus(absl::StatusCode::kUnavailable, (*first)->address()));
  other.listen = "127.0.0.1:0";
  other.metrics = (*first)->address();
  EXPECT_THAT(ControlServer::Start(other).status(),
              IsStatus(absl::StatusCode::kUnavailable, (*first)->address()));
  other.metrics = "";
  other.listen = "0.0.0.0:0";
  EXPECT_THAT(ControlServer::Start(other).status(),
              IsStatus(absl::StatusCode::kInvalidArgument, "listen"));
  other.listen = "127.0.0.1:0";
  other.metrics = "0.0.0.0:0";
  EXPECT_THAT(ControlServer::Start(other).status(),
              IsStatus(absl::StatusCode::kInvalidArgument, "metrics"));
  other.metrics = "";
  other.data_dir = "";
  EXPECT_THAT(ControlServer::Start(other).status(),
              IsStatus(absl::StatusCode::kInvalidArgument, "data_dir"));
  other.data_dir = directory.Path("b");
  EXPECT_TRUE(ControlServer::Start(other).ok()) << "a failed start leaves nothing behind";
}

}  // namespace
}  // namespace okv
