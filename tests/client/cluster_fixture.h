#ifndef OKV_TESTS_CLIENT_CLUSTER_FIXTURE_H_
#define OKV_TESTS_CLIENT_CLUSTER_FIXTURE_H_

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "client/cluster.h"
#include "client/cluster_client.h"
#include "client/transport/loopback_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_control.h"
#include "tests/client/fake_node.h"
#include "tests/support/fixtures.h"

namespace okv {

using ::testing::HasSubstr;
using ::testing::StartsWith;

inline const absl::Duration kLong = absl::Seconds(30);

// A port that nobody listens on.
inline std::string UnusedAddress() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  OKV_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0);
  OKV_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  close(fd);
  return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
}

// A node and the transport that it runs on.
struct NodeProcess {
  FakeNode node;
  std::unique_ptr<Transport> transport;
  std::string address;

  LookupResult::Node where() const { return {.node_id = node.node_id, .data_address = address}; }
};

// Runs on the in-process transport and on UCX.
class ClusterTest : public ::testing::TestWithParam<bool> {
 protected:
  ClusterTest()
      : rotations_(testing_support::SmallRotations("hadamard", 0)),
        format_(testing_support::SmallFormat(rotations_)),
        layout_(PageLayout::Of(format_)) {
    transport_ = MakeTransport();
    options_.control_address = control_.address();
    options_.rpc_timeout = absl::Seconds(10);
  }
  ~ClusterTest() override {
    cluster_.reset();
    transport_.reset();
    for (auto& process : processes_) process->transport.reset();
  }

  std::unique_ptr<Transport> MakeTransport() {
    if (!GetParam()) return hub_.CreateTransport();
    auto made = CreateUcxTransport({});
    OKV_CHECK(made.ok());
    return *std::move(made);
  }

  NodeProcess* AddNode(const std::string& node_id) {
    processes_.push_back(std::make_unique<NodeProcess>());
    processes_.back()->node.node_id = node_id;
    return processes_.back().get();
  }
  void Start(NodeProcess* process, const std::string& address = "127.0.0.1:0") {
    process->transport = MakeTransport();
    const auto bound = process->transport->Listen(address, &process->node);
    ASSERT_TRUE(bound.ok()) << bound.status();
    process->address = *bound;
  }

  // On the node's thread; returns when it is done.
  static void RunOnNode(NodeProcess* process, std::function<void()> work) {
    std::promise<void> done;
    process->transport->Post([&] {
      work();
      done.set_value();
    });
    done.get_future().wait();
  }

  Cluster* cluster() {
    if (cluster_ == nullptr) {
      auto connected = Cluster::Connect(options_, format_, transport_.get());
      OKV_CHECK(connected.ok());
      cluster_ = *std::move(connected);
    }
    return cluster_.get();
  }

  static ObjectId Id(uint32_t i, Codec codec = Codec::kInt2) {
    ObjectId id{.key = {}, .codec = codec};
    id.key.bytes[0] = static_cast<uint8_t>(i);
    id.key.bytes[31] = 1;
    return id;
  }
  std::vector<uint8_t> PayloadOf(uint32_t i, Codec codec = Codec::kInt2) const {
    std::vector<uint8_t> payload(layout_.block_bytes(codec));
    for (size_t k = 0; k < payload.size(); ++k) payload[k] = static_cast<uint8_t>(k * 7 + i);
    return payload;
  }
  FakeNode::Stored Object(uint32_t i, Codec codec = Codec::kInt2) const {
    FakeNode::Stored object;
    object.payload = PayloadOf(i, codec);
    object.header.format_id = format_.id();
    object.header.id = Id(i, codec);
    object.header.index = BlockIndex(i);
    object.header.payload_bytes = object.payload.size();
    object.header.generation = 1;
    object.header.checksums = BlockChecksums(object.header.id, layout_, object.payload);
    return object;
  }
  void Store(NodeProcess* process, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) process->node.objects[Id(i)] = Object(i);
  }

  // Fetches objects 0..count-1 from `nodes`, best first.
  std::vector<absl::Status> Fetch(uint32_t count, const std::vector<LookupResult::Node>& nodes,
                                  absl::Duration deadline = kLong) {
    buffers_.assign(count, std::vector<uint8_t>(layout_.block_bytes(Codec::kInt2)));
    std::vector<FetchItem> items;
    for (uint32_t i = 0; i < count; ++i) {
      items.push_back({.id = Id(i),
                       .index = BlockIndex(i),
                       .nodes = nodes,
                       .buffer = absl::MakeSpan(buffers_[i])});
    }
    return cluster()->Fetch(items, deadline);
  }
  void ExpectAllFetched(const std::vector<absl::Status>& statuses) {
    for (uint32_t i = 0; i < statuses.size(); ++i) {
      EXPECT_TRUE(statuses[i].ok()) << statuses[i];
      EXPECT_TRUE(buffers_[i] == PayloadOf(i)) << "object " << i;
    }
  }

  // Puts objects 0..count-1; the control plane sends each where `place` says.
  std::vector<absl::Status> Put(uint32_t count, absl::Duration deadline = kLong) {
    std::vector<std::vector<uint8_t>> payloads;
    std::vector<PutItem> items;
    for (uint32_t i = 0; i < count; ++i) payloads.push_back(PayloadOf(i));
    for (uint32_t i = 0; i < count; ++i) {
      items.push_back({.id = Id(i),
                       .index = BlockIndex(i),
                       .parent = i == 0 ? std::nullopt : std::optional<BlockKey>(Id(i - 1).key),
                       .payload = payloads[i]});
    }
    return cluster()->Put(items, "group-1", deadline);
  }
  void PlaceAllOn(const NodeProcess* process) {
    control_.AnswerReserve([node = process->where()](const v1::ReserveRequest& request,
                                                     v1::ReserveResponse* response) {
      for (int i = 0; i < request.objects_size(); ++i) {
        v1::Placement* placement = response->add_placements();
        placement->mutable_node()->set_node_id(node.node_id);
        placement->mutable_node()->set_data_address(node.data_address);
        placement->set_write_id(100 + i);
        placement->set_reservation("reservation " + std::to_string(i));
      }
      return grpc::Status::OK;
    });
  }

  const RotationSet rotations_;
  const Format format_;
  const PageLayout layout_;
  LoopbackHub hub_;
  FakeControl control_;
  ClusterOptions options_;
  std::unique_ptr<Transport> transport_;
  std::vector<std::unique_ptr<NodeProcess>> processes_;
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::vector<uint8_t>> buffers_;
};

}  // namespace okv

#endif  // OKV_TESTS_CLIENT_CLUSTER_FIXTURE_H_
