#include "tests/conformance/transport_conformance.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "client/transport/loopback_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace okv {
namespace {

using ::testing::HasSubstr;

struct Kind {
  const char* name;
  const char* tls;  // Null: the in-process transport.
  const char* description;
};

// Two transports, `a` connected to `b`, unless a test makes its own.
class TransportConformanceTest : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Transport> Make() {
    if (GetParam().tls == nullptr) return hub_.CreateTransport();
    UcxTransportOptions options;
    options.tls = GetParam().tls;
    auto made = CreateUcxTransport(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  void ConnectPair() {
    a_ = Make();
    b_ = Make();
    auto address = b_->Listen("127.0.0.1:0", &at_b_);
    ASSERT_TRUE(address.ok()) << address.status();
    address_ = *address;
    ab_ = ConnectTo(a_.get(), address_, &at_a_);
    ASSERT_NE(ab_, nullptr);
    // UCX connects when something is sent.
    RunOn(a_.get(), [this] { ab_->Send(MessageType::kHello, "hello"); });
    ASSERT_TRUE(at_b_.WaitForMessages(1));
    ba_ = at_b_.accepted(0);
  }

  LoopbackHub hub_;
  Recorder at_a_;
  Recorder at_b_;
  std::unique_ptr<Transport> a_;
  std::unique_ptr<Transport> b_;
  std::string address_;
  Connection* ab_ = nullptr;  // a's end.
  Connection* ba_ = nullptr;  // b's end.
};

// What vanishes in the middle of a transfer. Not on UCX's shared memory, which cannot close while
// the queue of a peer that is gone is full: UcxTransportOptions::tls.
class TransportFailureTest : public TransportConformanceTest {};

std::string TextBytes(size_t size, uint64_t seed) {
  const std::vector<uint8_t> bytes = PatternBytes(size, seed);
  return std::string(bytes.begin(), bytes.end());
}

TEST_P(TransportConformanceTest, MessagesOfEverySizeArriveWholeAndInOrder) {
  ConnectPair();
  std::vector<size_t> sizes = {0, 1, 7, 100, 8191, 8192, 8193, 65536, 100'000, kMessageBytesMax};
  for (size_t i = 0; i < 300; ++i) sizes.push_back(i % 7 == 0 ? 30'000 + i : i);
  RunOn(a_.get(), [&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      ab_->Send(i % 2 ? MessageType::kFetchRequest : MessageType::kObjectFailure,
                TextBytes(sizes[i], i));
    }
  });
  ASSERT_TRUE(at_b_.WaitForMessages(1 + sizes.size()));
  const auto messages = at_b_.messages();
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_EQ(messages[i + 1].first,
              i % 2 ? MessageType::kFetchRequest : MessageType::kObjectFailure);
    ASSERT_EQ(messages[i + 1].second, TextBytes(sizes[i], i)) << "message " << i;
  }
}

TEST_P(TransportConformanceTest, TheAcceptorAnswersOnTheSameConnection) {
  ConnectPair();
  RunOn(b_.get(), [&] { ba_->Send(MessageType::kHelloReply, "welcome"); });
  ASSERT_TRUE(at_a_.WaitForMessages(1));
  EXPECT_EQ(at_a_.messages()[0].second, "welcome");
}

TEST_P(TransportConformanceTest, BulkPayloadsOfEverySizeArriveByteExact) {
  ConnectPair();
  const std::vector<size_t> sizes = {1,     2,       63,      4096,    8191,   8192,
                                     65537, 200'000, 1 << 20, 1331200, 8 << 20};
  std::vector<std::vector<uint8_t>> payloads;
  for (size_t i = 0; i < sizes.size(); ++i) payloads.push_back(PatternBytes(sizes[i], i));
  Dones dones;
  RunOn(b_.get(), [&] {
    for (size_t i = 0; i < sizes.size(); ++i) {
      ba_->SendBulk(MessageType::kObjectDelivery, std::to_string(i), payloads[i], dones.Expect());
    }
  });
  for (const absl::Status& status : dones.Wait(sizes.size())) EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(at_a_.WaitForBulks(sizes.size()));
  for (const Recorder::Bulk& bulk : at_a_.bulks()) {
    EXPECT_EQ(bulk.type, MessageType::kObjectDelivery);
    EXPECT_TRUE(bulk.status.ok()) << bulk.status;
    EXPECT_TRUE(bulk.bytes == payloads[std::stoi(bulk.header)]) << "bulk " << bulk.header;
  }
}

TEST_P(TransportConformanceTest, TwoHundredBulksEachWayInFlightAllArrive) {
  ConnectPair();
  constexpr size_t kCount = 200;
  std::vector<std::vector<uint8_t>> payloads;
  for (size_t i = 0; i < 2 * kCount; ++i) payloads.push_back(PatternBytes(100'000 + i * 97, i));
  Dones dones;
  const auto send_all = [&](Connection* connection, size_t first) {
    for (size_t i = first; i < first + kCount; ++i) {
      connection->SendBulk(MessageType::kPutOffer, std::to_string(i), payloads[i], dones.Expect());
    }
  };
  a_->Post([&] { send_all(ab_, 0); });
  b_->Post([&] { send_all(ba_, kCount); });
  for (const absl::Status& status : dones.Wait(2 * kCount)) EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(at_a_.WaitForBulks(kCount));
  ASSERT_TRUE(at_b_.WaitForBulks(kCount));
  for (Recorder* recorder : {&at_a_, &at_b_}) {
    for (const Recorder::Bulk& bulk : recorder->bulks()) {
      EXPECT_TRUE(bulk.bytes == payloads[std::stoi(bulk.header)]) << "bulk " << bulk.header;
    }
  }
}

TEST_P(TransportConformanceTest, ABulkRefusedAtOnceReportsAborted) {
  at_b_.on_bulk = [](Connection*, absl::string_view, std::unique_ptr<BulkReceive>) {};
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(1 << 20, 1);
  Dones dones;
  RunOn(a_.get(), [&] { ab_->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect()); });
  EXPECT_TRUE(absl::IsAborted(dones.Wait(1).at(0)));
  // The connection lives on.
  RunOn(a_.get(), [&] { ab_->Send(MessageType::kPutReply, "still here"); });
  EXPECT_TRUE(at_b_.WaitForMessages(2));
}

TEST_P(TransportConformanceTest, ABulkRefusedLaterReportsAbortedAndTheOthersArrive) {
  std::vector<std::unique_ptr<BulkReceive>> held;
  std::atomic<int> offers = 0;
  at_b_.on_bulk = [&](Connection*, absl::string_view, std::unique_ptr<BulkReceive> bulk) {
    held.push_back(std::move(bulk));
    ++offers;
  };
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(300'000, 1);
  Dones refused;
  Dones received;
  RunOn(a_.get(), [&] {
    for (int i = 0; i < 2; ++i) {
      ab_->SendBulk(MessageType::kPutOffer, "h", payload, refused.Expect());
    }
    ab_->Send(MessageType::kPutReply, "all offered");
  });
  at_b_.WaitFor("two offers", [&] { return offers == 2; });
  std::vector<uint8_t> buffer(payload.size());
  RunOn(b_.get(), [&] {
    held[1].reset();
    held[0]->Receive(absl::MakeSpan(buffer), received.Expect());
  });
  EXPECT_TRUE(received.Wait(1).at(0).ok());
  EXPECT_TRUE(buffer == payload);
  const auto statuses = refused.Wait(2);
  EXPECT_EQ(absl::IsAborted(statuses[0]) + absl::IsAborted(statuses[1]), 1);
  EXPECT_EQ(statuses[0].ok() + statuses[1].ok(), 1);
  RunOn(b_.get(), [&] { held.clear(); });
}

TEST_P(TransportConformanceTest, ConnectingToNobodyReportsOnClosedUnavailable) {
  a_ = Make();
  {
    b_ = Make();
    auto address = b_->Listen("127.0.0.1:0", &at_b_);
    ASSERT_TRUE(address.ok()) << address.status();
    address_ = *address;
    b_.reset();  // Now nobody listens there.
  }
  Connection* connection = ConnectTo(a_.get(), address_, &at_a_);
  ASSERT_TRUE(at_a_.WaitForClosed(1));
  EXPECT_EQ(at_a_.closed()[0].first, connection);
  EXPECT_TRUE(absl::IsUnavailable(at_a_.closed()[0].second)) << at_a_.closed()[0].second;
}

TEST_P(TransportConformanceTest, WhatIsSentToNobodyIsDoneWithAnError) {
  a_ = Make();
  b_ = Make();
  address_ = *b_->Listen("127.0.0.1:0", &at_b_);
  b_.reset();
  const std::vector<uint8_t> payload = PatternBytes(100'000, 1);
  Dones dones;
  RunOn(a_.get(), [&] {
    Connection* connection = *a_->Connect(address_, &at_a_);
    connection->Send(MessageType::kHello, "hello");
    connection->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
  });
  EXPECT_TRUE(absl::IsUnavailable(dones.Wait(1).at(0))) << dones.Wait(1).at(0);
  EXPECT_TRUE(at_a_.WaitForClosed(1));
}

TEST_P(TransportConformanceTest, AnAddressThatIsNoneIsInvalidArgument) {
  a_ = Make();
  for (const char* bad : {"", "127.0.0.1", ":7", "127.0.0.1:x", "127.0.0.1:70000"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(a_->Listen(bad, &at_a_).status())) << bad;
    RunOn(a_.get(),
          [&] { EXPECT_TRUE(absl::IsInvalidArgument(a_->Connect(bad, &at_a_).status())) << bad; });
  }
}

TEST_P(TransportFailureTest, APeerThatIsDestroyedEndsOffersNobodyReceived) {
  std::vector<std::unique_ptr<BulkReceive>> held;
  std::atomic<int> offers = 0;
  at_b_.on_bulk = [&](Connection*, absl::string_view, std::unique_ptr<BulkReceive> bulk) {
    held.push_back(std::move(bulk));
    ++offers;
  };
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(4 << 20, 1);
  Dones dones;
  RunOn(a_.get(), [&] {
    for (int i = 0; i < 10; ++i) {
      ab_->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
    }
  });
  at_b_.WaitFor("offers", [&] { return offers == 10; });
  b_.reset();
  for (const absl::Status& status : dones.Wait(10)) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  }
  ASSERT_TRUE(at_a_.WaitForClosed(1));
  EXPECT_TRUE(absl::IsUnavailable(at_a_.closed()[0].second));
  ASSERT_TRUE(at_b_.WaitForClosed(1));
  EXPECT_TRUE(absl::IsCancelled(at_b_.closed()[0].second));
}

TEST_P(TransportFailureTest, ASenderThatIsDestroyedMidTransferEndsTheReceives) {
  ConnectPair();
  constexpr size_t kCount = 40;
  const std::vector<uint8_t> payload = PatternBytes(2 << 20, 1);
  Dones dones;
  a_->Post([&] {
    for (size_t i = 0; i < kCount; ++i) {
      ab_->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
    }
  });
  at_b_.WaitForBulks(1);
  a_.reset();
  ASSERT_TRUE(at_b_.WaitForClosed(1));
  dones.Wait(kCount);
  // Every receive that was started has ended, and none claims bytes that did not come.
  for (const Recorder::Bulk& bulk : at_b_.bulks()) {
    EXPECT_TRUE(bulk.done);
    if (bulk.status.ok()) {
      EXPECT_TRUE(bulk.bytes == payload);
    } else {
      EXPECT_TRUE(absl::IsUnavailable(bulk.status)) << bulk.status;
    }
  }
}

TEST_P(TransportFailureTest, AfterCloseNothingWritesIntoTheBuffers) {
  constexpr size_t kCount = 40;
  constexpr size_t kBytes = 2 << 20;
  std::vector<std::vector<uint8_t>> buffers(kCount, std::vector<uint8_t>(kBytes));
  std::vector<std::unique_ptr<BulkReceive>> offers;
  Dones received;
  Dones closed;
  size_t started = 0;
  at_b_.on_bulk = [&](Connection* connection, absl::string_view,
                      std::unique_ptr<BulkReceive> bulk) {
    bulk->Receive(absl::MakeSpan(buffers[started]), received.Expect());
    offers.push_back(std::move(bulk));
    if (++started == kCount / 2) {
      connection->Close([&, signal = closed.Expect()] {
        for (auto& buffer : buffers) std::memset(buffer.data(), 0x5a, buffer.size());
        signal(absl::OkStatus());
      });
    }
  };
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(kBytes, 1);
  Dones sent;
  RunOn(a_.get(), [&] {
    for (size_t i = 0; i < kCount; ++i) {
      ab_->SendBulk(MessageType::kPutOffer, "h", payload, sent.Expect());
    }
  });
  closed.Wait(1);
  EXPECT_EQ(received.Wait(kCount / 2).size(), kCount / 2);
  for (const absl::Status& status : received.Wait(kCount / 2)) {
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status) || absl::IsUnavailable(status)) << status;
  }
  EXPECT_EQ(sent.Wait(kCount).size(), kCount);
  ASSERT_TRUE(at_a_.WaitForClosed(1));
  RunOn(b_.get(), [&] { offers.clear(); });
  for (const auto& buffer : buffers) {
    EXPECT_TRUE(buffer == std::vector<uint8_t>(kBytes, 0x5a));
  }
  EXPECT_TRUE(at_b_.closed().empty());  // Whoever closes is told by `closed` only.
}

// Again and again: on a busy machine UCX 1.13 ended the sender's process in 3 of a hundred.
TEST_P(TransportFailureTest, ASenderOutlivesReceiversThatCloseInTheMiddle) {
  constexpr size_t kRounds = 40;
  constexpr size_t kCount = 40;
  constexpr size_t kBytes = 2 << 20;
  std::vector<std::vector<uint8_t>> buffers(kCount / 2, std::vector<uint8_t>(kBytes));
  std::vector<std::unique_ptr<BulkReceive>> offers;
  Dones received;
  Dones closed;
  at_b_.on_bulk = [&](Connection* connection, absl::string_view,
                      std::unique_ptr<BulkReceive> bulk) {
    bulk->Receive(absl::MakeSpan(buffers[offers.size()]), received.Expect());
    offers.push_back(std::move(bulk));
    if (offers.size() < buffers.size()) return;
    connection->Close([signal = closed.Expect()] { signal(absl::OkStatus()); });
  };
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(kBytes, 1);
  Dones sent;
  for (size_t round = 1; round <= kRounds; ++round) {
    Connection* const connection = ConnectTo(a_.get(), address_, &at_a_);
    ASSERT_NE(connection, nullptr);
    RunOn(a_.get(), [&] {
      for (size_t i = 0; i < kCount; ++i) {
        connection->SendBulk(MessageType::kPutOffer, "h", payload, sent.Expect());
      }
    });
    ASSERT_EQ(closed.Wait(round).size(), round);
    ASSERT_EQ(received.Wait(round * kCount / 2).size(), round * kCount / 2);
    ASSERT_EQ(sent.Wait(round * kCount).size(), round * kCount);
    ASSERT_TRUE(at_a_.WaitForClosed(round));
    RunOn(b_.get(), [&] { offers.clear(); });
  }
}

TEST_P(TransportFailureTest, AHandlerMayCloseItsConnectionAndTheOfferInItsHand) {
  Dones closed;
  at_b_.on_bulk = [&](Connection* connection, absl::string_view,
                      std::unique_ptr<BulkReceive> bulk) {
    auto signal = closed.Expect();
    connection->Close([signal] { signal(absl::OkStatus()); });
    bulk.reset();
  };
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(100'000, 1);
  Dones dones;
  RunOn(a_.get(), [&] { ab_->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect()); });
  EXPECT_EQ(closed.Wait(1).size(), 1u);
  EXPECT_FALSE(dones.Wait(1).at(0).ok());
  EXPECT_TRUE(at_a_.WaitForClosed(1));
}

TEST_P(TransportConformanceTest, ABulkSentWhileClosingIsDoneWithAnError) {
  ConnectPair();
  const std::vector<uint8_t> payload = PatternBytes(100'000, 1);
  Dones dones;
  Dones closed;
  RunOn(a_.get(), [&] {
    auto signal = closed.Expect();
    ab_->Close([signal] { signal(absl::OkStatus()); });
    ab_->Send(MessageType::kHello, "dropped");
    ab_->SendBulk(MessageType::kPutOffer, "h", payload, dones.Expect());
  });
  EXPECT_TRUE(absl::IsCancelled(dones.Wait(1).at(0)));
  closed.Wait(1);
}

TEST_P(TransportConformanceTest, AHeaderOfTheLargestSizeArrives) {
  ConnectPair();
  size_t header_bytes = 0;
  Dones dones;
  const std::vector<uint8_t> payload = PatternBytes(100'000, 1);
  RunOn(a_.get(), [&] {
    header_bytes = ab_->header_bytes_max();
    ab_->SendBulk(MessageType::kPutOffer, TextBytes(header_bytes, 3), payload, dones.Expect());
  });
  EXPECT_GE(header_bytes, 4096u);
  EXPECT_TRUE(dones.Wait(1).at(0).ok());
  ASSERT_TRUE(at_b_.WaitForBulks(1));
  EXPECT_EQ(at_b_.bulks().front().header, TextBytes(header_bytes, 3));
}

TEST_P(TransportConformanceTest, APortInUseIsUnavailableNamingTheAddress) {
  a_ = Make();
  b_ = Make();
  const auto address = b_->Listen("127.0.0.1:0", &at_b_);
  ASSERT_TRUE(address.ok());
  const absl::Status status = a_->Listen(*address, &at_a_).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(*address));
}

TEST_P(TransportConformanceTest, PortZeroGivesEachListenerItsOwnPort) {
  a_ = Make();
  b_ = Make();
  const auto first = a_->Listen("127.0.0.1:0", &at_a_);
  const auto second = b_->Listen("127.0.0.1:0", &at_b_);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(*first, *second);
  EXPECT_NE(*first, "127.0.0.1:0");
}

TEST_P(TransportConformanceTest, PostRunsEveryThreadsWorkInItsOrder) {
  a_ = Make();
  constexpr int kThreads = 8;
  constexpr int kPosts = 500;
  std::vector<std::vector<int>> seen(kThreads);  // Written by the transport's thread only.
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kPosts; ++i) a_->Post([&seen, t, i] { seen[t].push_back(i); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  RunOn(a_.get(), [] {});
  for (const auto& order : seen) {
    ASSERT_EQ(order.size(), static_cast<size_t>(kPosts));
    for (int i = 0; i < kPosts; ++i) EXPECT_EQ(order[i], i);
  }
}

TEST_P(TransportConformanceTest, OneListenerServesManyPeers) {
  b_ = Make();
  address_ = *b_->Listen("127.0.0.1:0", &at_b_);
  at_b_.on_message = [](Connection* connection, MessageType, absl::string_view text) {
    connection->Send(MessageType::kHelloReply, std::string(text));
  };
  constexpr size_t kPeers = 8;
  a_ = Make();
  std::vector<Recorder> recorders(kPeers);
  for (size_t i = 0; i < kPeers; ++i) {
    Connection* connection = ConnectTo(a_.get(), address_, &recorders[i]);
    RunOn(a_.get(), [&] { connection->Send(MessageType::kHello, std::to_string(i)); });
  }
  for (size_t i = 0; i < kPeers; ++i) {
    ASSERT_TRUE(recorders[i].WaitForMessages(1));
    EXPECT_EQ(recorders[i].messages()[0].second, std::to_string(i));
  }
  EXPECT_NE(at_b_.accepted(0), nullptr);
  a_.reset();
  EXPECT_TRUE(at_b_.WaitForClosed(kPeers));
}

TEST_P(TransportConformanceTest, TheDescriptionNamesPeerAndTransport) {
  ConnectPair();
  std::string text;
  RunOn(a_.get(), [&] { text = ab_->description(); });
  EXPECT_THAT(text, HasSubstr(address_));
  EXPECT_THAT(text, HasSubstr(GetParam().description));
}

std::string NameOf(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }

const Kind kLoopback = {"Loopback", nullptr, "loopback"};
const Kind kUcxDefault = {"UcxDefault", "^posix,sysv", "tcp/lo"};
const Kind kUcxSharedMemory = {"UcxSharedMemory", "all", "/memory"};

INSTANTIATE_TEST_SUITE_P(All, TransportConformanceTest,
                         ::testing::Values(kLoopback, kUcxDefault, kUcxSharedMemory), NameOf);
INSTANTIATE_TEST_SUITE_P(All, TransportFailureTest, ::testing::Values(kLoopback, kUcxDefault),
                         NameOf);

}  // namespace
}  // namespace okv
