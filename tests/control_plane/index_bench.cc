// Measures the promises about the index on synthetic chains and prints one line each:
//   okv_index_bench [chains, default 1250]
// Chains have 1,600 blocks (about 100,000 tokens); the default makes 2,000,000 blocks.

#include <grpcpp/grpcpp.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "control_plane/server.h"
#include "proto/control.grpc.pb.h"
#include "proto/data_plane.h"
#include "tests/control_plane/harness.h"
#include "tests/support/process.h"

namespace okv {
namespace {

using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::kTenant;

using Clock = std::chrono::steady_clock;
using Chains = std::vector<std::vector<BlockKey>>;
constexpr uint32_t kChainBlocks = 1600;

double Micros(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// Time that this thread had a core: others share the machine.
double ThreadMicros() {
  timespec now;
  OKV_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double At(std::vector<double>* values, double share) {
  std::sort(values->begin(), values->end());
  return (*values)[static_cast<size_t>(share * static_cast<double>(values->size() - 1))];
}

void BenchIndex(const Chains& chains) {
  PrefixIndex index;
  std::vector<HolderSlot> holders;
  for (uint32_t i = 0; i < 4; ++i) {
    holders.push_back(index.AddHolder(NodeSlot(i)));
    index.Show(holders[i]);
  }
  const double blocks = static_cast<double>(chains.size()) * kChainBlocks;
  double start_us = ThreadMicros();
  // Block by block over all chains: neighbours of a chain are not neighbours in memory.
  for (uint32_t i = 0; i < kChainBlocks; ++i) {
    for (size_t c = 0; c < chains.size(); ++c) {
      const Codec codec = i == 0 ? Codec::kBf16 : Codec::kInt2;
      index.Add(holders[c % 4], {.scope = ScopeId(0), .id = {chains[c][i], codec}});
    }
  }
  std::printf("index: %.0f blocks, %.1f B a block, add %.0f ns\n", blocks,
              static_cast<double>(index.memory_bytes()) / blocks,
              1000 * (ThreadMicros() - start_us) / blocks);
  std::mt19937 random(1);
  constexpr int kLookups = 3000;
  start_us = ThreadMicros();
  for (int i = 0; i < kLookups; ++i) {
    const PrefixMatch match = index.Match(ScopeId(0), chains[random() % chains.size()],
                                          {.sink_blocks = 1, .recent_blocks = 4});
    OKV_CHECK(match.prefix_blocks == kChainBlocks);
  }
  std::printf("index: lookups of %.2f million keys/s on a core\n",
              kLookups * double{kChainBlocks} / (ThreadMicros() - start_us));
}

// Nodes 1 and 2 register again with an inventory each, over and over.
void ComeAndGo(ControlHarness* h, const Chains& chains, const std::atomic<bool>& stop) {
  std::vector<ObjectAnnouncement> objects;
  for (size_t c = 0; c < std::min<size_t>(chains.size(), 60); ++c) {
    for (const ObjectAnnouncement& object : h->Objects(chains[c], kChainBlocks)) {
      objects.push_back(object);
    }
  }
  while (!stop.load()) {
    for (const char* node_id : {"1", "2"}) {
      const NodeEpoch node = h->AddNode(node_id);
      OKV_CHECK(h->SendInventory(node, objects).ok());
    }
  }
}

void BenchControl(const Chains& chains, bool with_churn) {
  ControlHarness h;
  h.Open();
  const NodeEpoch stable = h.AddNode("0");
  for (const std::vector<BlockKey>& keys : chains) {
    std::vector<ObjectAnnouncement> objects = {h.Object(keys, 0, Codec::kBf16)};
    for (uint32_t i = 1; i < kChainBlocks; ++i) objects.push_back(h.Object(keys, i, Codec::kInt2));
    OKV_CHECK(h.control().ReportCommits(stable, objects, {}).ok());
  }
  std::atomic<bool> stop{false};
  std::thread churn;
  if (with_churn) churn = std::thread([&] { ComeAndGo(&h, chains, stop); });
  std::mt19937 random(2);
  std::vector<double> times;
  for (int i = 0; i < 5000; ++i) {
    const Clock::time_point start = Clock::now();
    const LookupAnswer answer = h.Lookup(chains[random() % chains.size()]);
    times.push_back(Micros(Clock::now() - start));
    OKV_CHECK(answer.prefix_blocks == kChainBlocks);
  }
  stop.store(true);
  if (churn.joinable()) churn.join();
  std::printf("control: lookup of 1,600 keys%s: p50 %.0f us, p99 %.0f us\n",
              with_churn ? " while nodes come and go" : "", At(&times, 0.5), At(&times, 0.99));
}

// A wait on a condition that nobody signals: the load is a rate, not an event.
void PaceUntil(Clock::time_point time) {
  Mutex mu;
  CondVar never;
  MutexLock lock(&mu);
  while (Clock::now() < time) never.WaitFor(&mu, time - Clock::now());
}

// Runs one unary RPC that must succeed.
template <typename Request, typename Response>
void Call(v1::ControlPlane::Stub* stub,
          grpc::Status (v1::ControlPlane::Stub::*method)(grpc::ClientContext*, const Request&,
                                                         Response*),
          const Request& request, Response* response) {
  grpc::ClientContext context;
  OKV_CHECK((stub->*method)(&context, request, response).ok());
}

// Publishes, opens a session and registers node "0"; gives its epoch.
uint64_t SetUp(v1::ControlPlane::Stub* stub, const RotationSet& rotations, const Format& format) {
  grpc::ClientContext context;
  v1::PublishRotationResponse published;
  const auto writer = stub->PublishRotation(&context, &published);
  v1::PublishRotationRequest chunk;
  chunk.set_chunk(rotations.Serialize());
  writer->Write(chunk);
  writer->WritesDone();
  OKV_CHECK(writer->Finish().ok());
  v1::OpenSessionRequest open;
  open.set_protocol_major(kProtocolMajor);
  open.set_tenant(kTenant);
  open.set_format(format.Canonical());
  v1::OpenSessionResponse session;
  Call(stub, &v1::ControlPlane::Stub::OpenSession, open, &session);
  v1::RegisterNodeRequest node;
  node.set_protocol_major(kProtocolMajor);
  node.set_node_id("0");
  node.set_data_address("127.0.0.1:7");
  v1::RegisterNodeResponse registration;
  Call(stub, &v1::ControlPlane::Stub::RegisterNode, node, &registration);
  return registration.epoch();
}

void Commit(v1::ControlPlane::Stub* stub, const Format& format, uint64_t epoch,
            const std::vector<BlockKey>& keys) {
  v1::ReportCommitsRequest request;
  request.set_node_id("0");
  request.set_epoch(epoch);
  for (uint32_t i = 0; i < kChainBlocks; ++i) {
    v1::ObjectRecord* record = request.add_added();
    record->set_format_id(std::string(format.id().view()));
    record->set_tenant(kTenant);
    record->set_key(std::string(keys[i].view()));
    if (i > 0) record->set_parent(std::string(keys[i - 1].view()));
    record->set_index(i);
    record->set_codec(i == 0 ? v1::CODEC_BF16 : v1::CODEC_INT2);
  }
  v1::ReportCommitsResponse response;
  Call(stub, &v1::ControlPlane::Stub::ReportCommits, request, &response);
}

// 200 chains a second through gRPC, in one process with the server.
void BenchGrpc(const Chains& chains) {
  const testing_support::TempDir directory;
  ControlServerOptions options;
  options.data_dir = directory.path();
  const auto server = ControlServer::Start(options);
  OKV_CHECK(server.ok());
  const auto stub = v1::ControlPlane::NewStub(
      grpc::CreateChannel((*server)->address(), grpc::InsecureChannelCredentials()));
  const RotationSet rotations = testing_support::SmallRotations("hadamard", 2);
  const Format format = testing_support::SmallFormat(rotations);
  const uint64_t epoch = SetUp(stub.get(), rotations, format);
  const size_t chains_used = std::min<size_t>(chains.size(), 100);
  for (size_t c = 0; c < chains_used; ++c) Commit(stub.get(), format, epoch, chains[c]);

  std::vector<double> times;
  const Clock::time_point begin = Clock::now();
  // Less than the node timeout: the node sends no heartbeat here.
  for (int i = 0; i < 800; ++i) {
    v1::LookupRequest request;
    request.set_tenant(kTenant);
    request.set_format_id(std::string(format.id().view()));
    for (const BlockKey& key : chains[static_cast<size_t>(i) % chains_used]) {
      request.add_keys(std::string(key.view()));
    }
    PaceUntil(begin + i * std::chrono::milliseconds(5));
    v1::LookupResponse response;
    const Clock::time_point start = Clock::now();
    Call(stub.get(), &v1::ControlPlane::Stub::Lookup, request, &response);
    times.push_back(Micros(Clock::now() - start));
    OKV_CHECK(response.prefix_blocks() == kChainBlocks);
  }
  std::printf("gRPC: lookup of 1,600 keys at 200 chains/s: p50 %.0f us, p99 %.0f us\n",
              At(&times, 0.5), At(&times, 0.99));
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  const uint32_t chains_count = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 1250;
  okv::Chains chains;
  for (uint32_t c = 0; c < chains_count; ++c) {
    chains.push_back(okv::ChainKeys(c, okv::kChainBlocks));
  }
  okv::BenchIndex(chains);
  okv::BenchControl(chains, /*with_churn=*/false);
  okv::BenchControl(chains, /*with_churn=*/true);
  okv::BenchGrpc(chains);
  return 0;
}
