// The UCX transport between two real processes: this program starts itself again as the peer.

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>

#include "client/transport/transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/check.h"
#include "tests/conformance/transport_conformance.h"

extern char** environ;

namespace okv {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPayloadBytes =
    1331200;  // An int2 block of 32 layers, 8 heads, d 128 has 1.1 MiB.
constexpr size_t kPayloads = 64;

const std::string kDefault = UcxTransportOptions().tls;
const char* const kDefaultTls = kDefault.c_str();

// ---- The peer's side: listens, prints its address, serves until it is killed.

class PeerHandler : public Transport::AcceptHandler {
 public:
  explicit PeerHandler(std::string mode) : mode_(std::move(mode)) {
    for (size_t i = 0; i < kPayloads; ++i) payloads_.push_back(PatternBytes(kPayloadBytes, i));
  }
  void OnAccept(Connection*) override {}
  // "send" answers every message with all payloads.
  void OnMessage(Connection* connection, MessageType, absl::string_view) override {
    for (size_t i = 0; i < kPayloads; ++i) {
      connection->SendBulk(MessageType::kObjectDelivery, std::to_string(i), payloads_[i],
                           [](absl::Status) {});
    }
  }
  // "hold" takes offers and never receives them; otherwise they are received.
  void OnBulk(Connection*, MessageType, absl::string_view,
              std::unique_ptr<BulkReceive> payload) override {
    if (mode_ != "hold") {
      payload->Receive(absl::MakeSpan(buffer_), [](absl::Status) {});
    }
    held_.push_back(std::move(payload));
  }
  void OnClosed(Connection*, const absl::Status&) override {}

 private:
  const std::string mode_;
  std::vector<std::vector<uint8_t>> payloads_;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(kPayloadBytes);
  std::vector<std::unique_ptr<BulkReceive>> held_;
};

int PeerMain(const char* mode, const char* tls, const char* address) {
  PeerHandler handler(mode);
  UcxTransportOptions options;
  options.tls = tls;
  auto transport = CreateUcxTransport(options);
  OKV_CHECK(transport.ok());
  const auto bound = (*transport)->Listen(address, &handler);
  std::printf("%s\n", bound.ok() ? bound->c_str() : bound.status().ToString().c_str());
  std::fflush(stdout);
  while (true) pause();
}

// ---- The test's side.

// A peer process. Killed and reaped at the end.
class Peer {
 public:
  explicit Peer(const char* mode, const char* tls = kDefaultTls,
                const char* address = "127.0.0.1:0") {
    int out[2];
    OKV_CHECK(pipe(out) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_addclose(&actions, out[0]);
    const char* argv[] = {"ucx_peer", "--peer", mode, tls, address, nullptr};
    OKV_CHECK(posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, const_cast<char**>(argv),
                          environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    char byte;
    while (read(out[0], &byte, 1) == 1 && byte != '\n') address_ += byte;
    close(out[0]);
  }
  ~Peer() { Kill(); }
  void Kill() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  void Stop() { kill(pid_, SIGSTOP); }
  const std::string& address() const { return address_; }

 private:
  pid_t pid_ = 0;
  std::string address_;
};

class UcxProcessTest : public ::testing::Test {
 protected:
  void Start(const std::string& tls = UcxTransportOptions().tls) {
    UcxTransportOptions options;
    options.tls = tls;
    auto made = CreateUcxTransport(options);
    ASSERT_TRUE(made.ok()) << made.status();
    transport_ = *std::move(made);
  }
  // Fetches every payload of a "send" peer and returns how it was connected.
  std::string FetchAll(const std::string& address) {
    Connection* connection = ConnectTo(transport_.get(), address, &recorder_);
    RunOn(transport_.get(), [&] { connection->Send(MessageType::kFetchRequest, "all"); });
    EXPECT_TRUE(recorder_.WaitForBulks(kPayloads));
    for (const Recorder::Bulk& bulk : recorder_.bulks()) {
      EXPECT_TRUE(bulk.status.ok()) << bulk.status;
      EXPECT_TRUE(bulk.bytes == PatternBytes(kPayloadBytes, std::stoi(bulk.header)));
    }
    std::string text;
    RunOn(transport_.get(), [&] { text = connection->description(); });
    return text;
  }

  Recorder recorder_;
  std::unique_ptr<Transport> transport_;
};

TEST_F(UcxProcessTest, PayloadsOfAnotherProcessArriveByteExact) {
  Peer peer("send");
  Start();
  EXPECT_THAT(FetchAll(peer.address()), HasSubstr("tcp/lo"));
}

// UCX 1.13 crashes where the receiver's segments are smaller than the sender's messages.
TEST_F(UcxProcessTest, APeersEnvironmentCannotMakeItsSegmentsOfAnotherSize) {
  Start();  // Sets this process's own, once.
  const char* const own = getenv("UCX_TCP_RX_SEG_SIZE");
  ASSERT_NE(own, nullptr);
  const std::string size = own;
  ASSERT_EQ(setenv("UCX_TCP_RX_SEG_SIZE", "2M", /*overwrite=*/1), 0);
  Peer peer("send");
  ASSERT_EQ(setenv("UCX_TCP_RX_SEG_SIZE", size.c_str(), /*overwrite=*/1), 0);
  EXPECT_THAT(FetchAll(peer.address()), HasSubstr("tcp/lo"));
}

TEST_F(UcxProcessTest, PayloadsThroughSharedMemoryArriveByteExact) {
  Peer peer("send", "all");
  Start("all");
  EXPECT_THAT(FetchAll(peer.address()), HasSubstr("/memory"));
  transport_.reset();  // While the peer lives: UcxTransportOptions::tls.
}

TEST_F(UcxProcessTest, AKilledReceiverEndsEveryBulkWithinSeconds) {
  Peer peer("hold");
  Start();
  Connection* connection = ConnectTo(transport_.get(), peer.address(), &recorder_);
  const std::vector<uint8_t> payload = PatternBytes(kPayloadBytes, 1);
  Dones dones;
  RunOn(transport_.get(), [&] {
    for (size_t i = 0; i < 20; ++i) {
      connection->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
    }
    connection->Send(MessageType::kFetchRequest, "the answer shows that the offers are there");
  });
  ASSERT_TRUE(recorder_.WaitForBulks(1));
  const auto killed = std::chrono::steady_clock::now();
  peer.Kill();
  for (const absl::Status& status : dones.Wait(20)) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  ASSERT_TRUE(recorder_.WaitForClosed(1));
  EXPECT_TRUE(absl::IsUnavailable(recorder_.closed()[0].second));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(5));
}

TEST_F(UcxProcessTest, AKilledSenderEndsEveryReceiveAndNoneClaimsMissingBytes) {
  Peer peer("send");
  Start();
  Connection* connection = ConnectTo(transport_.get(), peer.address(), &recorder_);
  RunOn(transport_.get(), [&] {
    for (int i = 0; i < 4; ++i) connection->Send(MessageType::kFetchRequest, "all");
  });
  ASSERT_TRUE(recorder_.WaitForBulks(3));
  const auto killed = std::chrono::steady_clock::now();
  peer.Kill();
  ASSERT_TRUE(recorder_.WaitForClosed(1));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(5));
  for (const Recorder::Bulk& bulk : recorder_.bulks()) {
    EXPECT_TRUE(bulk.done);
    if (bulk.status.ok()) {
      EXPECT_TRUE(bulk.bytes == PatternBytes(kPayloadBytes, std::stoi(bulk.header)));
    }
  }
}

TEST_F(UcxProcessTest, AfterCloseNothingArrivesInTheBuffersOfACutFetch) {
  Peer peer("send");
  Start();
  std::vector<std::vector<uint8_t>> buffers(kPayloads, std::vector<uint8_t>(kPayloadBytes));
  std::vector<std::unique_ptr<BulkReceive>> offers;
  std::atomic<size_t> started = 0;
  Dones dones;
  recorder_.on_bulk = [&](Connection*, absl::string_view, std::unique_ptr<BulkReceive> bulk) {
    bulk->Receive(absl::MakeSpan(buffers[started]), dones.Expect());
    offers.push_back(std::move(bulk));
    ++started;
  };
  Connection* connection = ConnectTo(transport_.get(), peer.address(), &recorder_);
  RunOn(transport_.get(), [&] { connection->Send(MessageType::kFetchRequest, "all"); });
  dones.Wait(2);
  Dones closed;
  RunOn(transport_.get(), [&] {
    auto signal = closed.Expect();
    connection->Close([&, signal] {
      for (auto& buffer : buffers) std::memset(buffer.data(), 0x5a, buffer.size());
      signal(absl::OkStatus());
    });
  });
  closed.Wait(1);
  EXPECT_EQ(dones.Wait(started).size(), started);
  // The peer still has what it needs to write, and 300 more round trips of time to do it.
  Recorder again;
  Connection* second = ConnectTo(transport_.get(), peer.address(), &again);
  RunOn(transport_.get(), [&] { second->Send(MessageType::kFetchRequest, "all"); });
  ASSERT_TRUE(again.WaitForBulks(kPayloads));
  for (const auto& buffer : buffers) {
    EXPECT_TRUE(buffer == std::vector<uint8_t>(kPayloadBytes, 0x5a));
  }
  RunOn(transport_.get(), [&] { offers.clear(); });
  transport_.reset();
}

// A sender in another process outlives receivers that close in the middle, again and again.
TEST_F(UcxProcessTest, APeerSurvivesManyCutFetches) {
  Peer peer("send");
  Start();
  std::vector<std::vector<uint8_t>> buffers(kPayloads, std::vector<uint8_t>(kPayloadBytes));
  for (int cut = 0; cut < 40; ++cut) {
    std::vector<std::unique_ptr<BulkReceive>> offers;
    std::atomic<size_t> started = 0;
    Dones dones;
    Recorder recorder;
    recorder.on_bulk = [&](Connection*, absl::string_view, std::unique_ptr<BulkReceive> bulk) {
      bulk->Receive(absl::MakeSpan(buffers[started]), dones.Expect());
      offers.push_back(std::move(bulk));
      ++started;
    };
    Connection* connection = ConnectTo(transport_.get(), peer.address(), &recorder);
    RunOn(transport_.get(), [&] { connection->Send(MessageType::kFetchRequest, "all"); });
    dones.Wait(1 + static_cast<size_t>(cut) % 3);
    Dones closed;
    RunOn(transport_.get(),
          [&] { connection->Close([signal = closed.Expect()] { signal(absl::OkStatus()); }); });
    closed.Wait(1);
    dones.Wait(started);
    RunOn(transport_.get(), [&] { offers.clear(); });
  }
  Recorder again;
  Connection* last = ConnectTo(transport_.get(), peer.address(), &again);
  RunOn(transport_.get(), [&] { last->Send(MessageType::kFetchRequest, "all"); });
  EXPECT_TRUE(again.WaitForBulks(kPayloads));
  transport_.reset();
}

TEST_F(UcxProcessTest, AConnectionToAStoppedPeerClosesWithinSeconds) {
  Peer peer("hold");
  Start();
  const std::vector<uint8_t> payload = PatternBytes(kPayloadBytes, 1);
  Connection* connection = ConnectTo(transport_.get(), peer.address(), &recorder_);
  RunOn(transport_.get(), [&] { connection->Send(MessageType::kFetchRequest, "all"); });
  ASSERT_TRUE(recorder_.WaitForBulks(1));
  peer.Stop();
  // More than any socket buffer holds.
  const std::string message(kMessageBytesMax, 'x');
  Dones dones;
  Dones closed;
  RunOn(transport_.get(), [&] {
    for (int i = 0; i < 64; ++i) {
      connection->Send(MessageType::kFetchRequest, message);
      connection->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  RunOn(transport_.get(), [&] {
    auto signal = closed.Expect();
    connection->Close([signal] { signal(absl::OkStatus()); });
  });
  EXPECT_EQ(closed.Wait(1).size(), 1u);
  for (const absl::Status& status : dones.Wait(64)) EXPECT_TRUE(absl::IsCancelled(status));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST_F(UcxProcessTest, AKilledListenersPortCanBeTakenAgainAtOnce) {
  Peer first("send");
  Start();
  Connection* connection = ConnectTo(transport_.get(), first.address(), &recorder_);
  RunOn(transport_.get(), [&] { connection->Send(MessageType::kFetchRequest, "all"); });
  ASSERT_TRUE(recorder_.WaitForBulks(1));
  first.Kill();
  ASSERT_TRUE(recorder_.WaitForClosed(1));
  Peer second("send", kDefaultTls, first.address().c_str());
  EXPECT_EQ(second.address(), first.address());
}

// ---- Creation

TEST(UcxTransportTest, ASharedMemoryFolderThatIsTooSmallFailsGivingBothSizes) {
  UcxTransportOptions options;
  options.tls = "all";
  options.shm_bytes_min = uint64_t{1} << 60;
  const absl::Status status = CreateUcxTransport(options).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/dev/shm is too small: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("1152921504606846976"));
}

TEST(UcxTransportTest, ASharedMemoryFolderThatIsMissingFailsNamingIt) {
  UcxTransportOptions options;
  options.tls = "";
  options.shm_path = "/nonexistent/shm";
  const absl::Status status = CreateUcxTransport(options).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/shm"));
}

TEST(UcxTransportTest, WithoutNetworkDevicesCreationFailsNamingTheFolder) {
  UcxTransportOptions options;
  options.net_path = "/nonexistent/net";
  const absl::Status status = CreateUcxTransport(options).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/net"));
}

TEST(UcxTransportTest, TransportsWithoutSharedMemoryNeedNoFolder) {
  UcxTransportOptions options;
  options.shm_path = "/nonexistent/shm";
  for (const char* tls : {"^posix,sysv", "^sm", "tcp,self"}) {
    options.tls = tls;
    EXPECT_FALSE(options.uses_shared_memory()) << tls;
    EXPECT_TRUE(CreateUcxTransport(options).ok()) << tls;
  }
  for (const char* tls : {"", "all", "shm,tcp", "posix,tcp", "^sysv", "^tcp"}) {
    options.tls = tls;
    EXPECT_TRUE(options.uses_shared_memory()) << tls;
  }
}

TEST(UcxTransportTest, TransportsThatUcxDoesNotHaveFailNamingThem) {
  UcxTransportOptions options;
  options.tls = "carrier_pigeon";
  const absl::Status status = CreateUcxTransport(options).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("carrier_pigeon"));
}

TEST(UcxTransportTest, RequiredRdmaOnTheLoopbackDeviceIsInvalidArgument) {
  UcxTransportOptions options;
  options.require_rdma = true;
  EXPECT_TRUE(absl::IsInvalidArgument(CreateUcxTransport(options).status()));
}

TEST(UcxTransportTest, RequiredRdmaFailsWhenTransportsAreLimitedToTcp) {
  UcxTransportOptions options;
  options.require_rdma = true;
  options.tls = "tcp,self";
  options.net_devices = "";
  const absl::Status status = CreateUcxTransport(options).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

TEST(UcxTransportTest, RegisteredMemorySendsAndReceivesLikeAnyOther) {
  std::vector<uint8_t> arena = PatternBytes(kPayloadBytes, 5);
  Recorder at_a;
  Recorder at_b;
  auto a = *CreateUcxTransport({});
  auto b = *CreateUcxTransport({});
  ASSERT_TRUE(a->RegisterMemory(absl::MakeSpan(arena)).ok());
  Connection* connection = ConnectTo(a.get(), *b->Listen("127.0.0.1:0", &at_b), &at_a);
  Dones dones;
  RunOn(a.get(), [&] { connection->SendBulk(MessageType::kPutOffer, "h", arena, dones.Expect()); });
  EXPECT_TRUE(dones.Wait(1).at(0).ok());
  ASSERT_TRUE(at_b.WaitForBulks(1));
  EXPECT_TRUE(at_b.bulks().front().bytes == arena);
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--peer") == 0) {
    return okv::PeerMain(argv[2], argv[3], argv[4]);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
