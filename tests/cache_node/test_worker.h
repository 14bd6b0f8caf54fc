#ifndef OKV_TESTS_CACHE_NODE_TEST_WORKER_H_
#define OKV_TESTS_CACHE_NODE_TEST_WORKER_H_

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/transport/transport.h"
#include "gtest/gtest.h"
#include "proto/data_plane.h"
#include "proto/data_plane.pb.h"
#include "proto/mutex.h"
#include "proto/object.h"

namespace okv::testing_support {

// The worker's end of one session, message by message, so that a test can also send what a real
// worker never would. Thread-safe but for what its comments say.
class TestWorker final : public ConnectionHandler {
 public:
  struct Delivered {
    absl::Status status;
    std::string object_header;
    std::vector<uint8_t> payload;
  };

  TestWorker(Transport* transport, const std::string& address) : transport_(transport) {
    OnThread([&] {
      absl::StatusOr<Connection*> made = transport_->Connect(address, this);
      ASSERT_TRUE(made.ok()) << made.status();
      connection_ = *made;
    });
  }
  ~TestWorker() override { Close(); }

  // Cuts the connection; returns when nothing of it is left.
  void Close() {
    std::promise<void> closed;
    OnThread([&] {
      held_.clear();
      if (connection_ == nullptr) {
        closed.set_value();
      } else {
        connection_->Close([&] { closed.set_value(); });
        connection_ = nullptr;
      }
    });
    closed.get_future().wait();
  }

  void Send(MessageType type, const std::string& message) {
    OnThread([&] {
      if (connection_ != nullptr) connection_->Send(type, message);
    });
  }
  v1::HelloReply Hello(const v1::Hello& hello) {
    Send(MessageType::kHello, hello.SerializeAsString());
    WaitFor("a HelloReply", [this] { return hello_reply_.has_value(); });
    MutexLock lock(&mu_);
    return hello_reply_.value_or(v1::HelloReply());
  }

  // Offers without waiting. `payload` stays alive until the worker is closed.
  void Offer(const v1::PutOffer& offer, absl::Span<const uint8_t> payload) {
    OnThread([&] {
      if (connection_ == nullptr) return;
      connection_->SendBulk(MessageType::kPutOffer, offer.SerializeAsString(), payload,
                            [](absl::Status) {});
    });
  }
  // Offers and closes before anything was received.
  void OfferAndVanish(const v1::PutOffer& offer, absl::Span<const uint8_t> payload) {
    std::promise<void> closed;
    OnThread([&] {
      connection_->SendBulk(MessageType::kPutOffer, offer.SerializeAsString(), payload,
                            [](absl::Status) {});
      connection_->Close([&] { closed.set_value(); });
      connection_ = nullptr;
    });
    closed.get_future().wait();
  }
  absl::Status PutAnswer(uint64_t request_id) {
    WaitFor("a PutReply", [=, this] { return put_replies_.count(request_id) > 0; });
    MutexLock lock(&mu_);
    const v1::PutReply reply = put_replies_[request_id];
    return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
  }
  // True when the node has the share and waits for the block's others.
  bool WaitForPending(uint64_t request_id) {
    return WaitFor("a pending PutReply", [=, this] { return put_pending_.count(request_id) > 0; });
  }
  bool answered(uint64_t request_id) {
    MutexLock lock(&mu_);
    return put_replies_.count(request_id) > 0;
  }
  absl::Status Put(const v1::PutOffer& offer, absl::Span<const uint8_t> payload) {
    Offer(offer, payload);
    return PutAnswer(offer.request_id());
  }

  // What came for every object of the request, in its order.
  std::vector<Delivered> Fetch(const v1::FetchRequest& request) {
    Send(MessageType::kFetchRequest, request.SerializeAsString());
    return Answers(request.request_id(), static_cast<size_t>(request.objects_size()));
  }
  std::vector<Delivered> Answers(uint64_t request_id, size_t count) {
    WaitFor("the objects", [=, this] { return delivered_[request_id].size() >= count; });
    MutexLock lock(&mu_);
    std::vector<Delivered> all(
        count, {.status = absl::UnknownError("no answer"), .object_header = "", .payload = {}});
    for (auto& [ordinal, delivered] : delivered_[request_id]) all.at(ordinal) = delivered;
    return all;
  }
  size_t AnswersCount(uint64_t request_id) {
    MutexLock lock(&mu_);
    return delivered_[request_id].size();
  }

  // On the transport's thread, where deliveries come: what a test must order with them.
  void OnTransport(std::function<void()> work) { OnThread(std::move(work)); }
  // From OnTransport only.
  void SendNow(MessageType type, const std::string& message) { connection_->Send(type, message); }
  void set_on_delivery(std::function<void()> on_delivery) {
    OnThread([&] { on_delivery_ = std::move(on_delivery); });
  }

  // From now on deliveries are neither received nor refused, until ReceiveHeld.
  void HoldDeliveries() {
    OnThread([this] { hold_ = true; });
  }
  bool WaitForHeld(size_t count) {
    return WaitFor("deliveries", [=, this] { return held_count_ >= count; });
  }
  void ReceiveHeld() {
    OnThread([this] {
      hold_ = false;
      for (auto& [header, bulk] : std::exchange(held_, {})) Receive(header, std::move(bulk));
    });
  }

  // True when the node closed the connection.
  bool WaitForClosed() {
    return WaitFor("the node to close", [this] { return closed_; });
  }

 private:
  void OnMessage(Connection*, MessageType type, absl::string_view message) override {
    MutexLock lock(&mu_);
    const std::string text(message);
    if (type == MessageType::kHelloReply) {
      EXPECT_TRUE(hello_reply_.emplace().ParseFromString(text));
    } else if (type == MessageType::kObjectFailure) {
      v1::ObjectFailure failure;
      EXPECT_TRUE(failure.ParseFromString(text));
      delivered_[failure.request_id()][failure.ordinal()] = {
          .status = absl::Status(static_cast<absl::StatusCode>(failure.code()), failure.message()),
          .object_header = "",
          .payload = {}};
    } else if (type == MessageType::kPutReply) {
      v1::PutReply reply;
      EXPECT_TRUE(reply.ParseFromString(text));
      EXPECT_EQ(put_replies_.count(reply.request_id()), 0u) << "answered twice";
      if (reply.pending()) {
        EXPECT_TRUE(put_pending_.insert(reply.request_id()).second) << "pending twice";
      } else {
        put_replies_[reply.request_id()] = reply;
      }
    } else if (type == MessageType::kObjectHeaders) {
      v1::ObjectHeaders headers;
      EXPECT_TRUE(headers.ParseFromString(text));
    } else {
      ADD_FAILURE() << "message type " << static_cast<int>(type);
    }
    changed_.SignalAll();
  }
  void OnBulk(Connection*, MessageType type, absl::string_view header,
              std::unique_ptr<BulkReceive> payload) override {
    EXPECT_EQ(type, MessageType::kObjectDelivery);
    v1::ObjectDelivery delivery;
    EXPECT_TRUE(delivery.ParseFromString(std::string(header)));
    if (on_delivery_) on_delivery_();
    if (hold_) {
      held_.emplace_back(delivery, std::move(payload));
      MutexLock lock(&mu_);
      ++held_count_;
      changed_.SignalAll();
    } else {
      Receive(delivery, std::move(payload));
    }
  }
  void OnClosed(Connection*, const absl::Status&) override {
    connection_ = nullptr;
    held_.clear();
    MutexLock lock(&mu_);
    closed_ = true;
    changed_.SignalAll();
  }
  void Receive(const v1::ObjectDelivery& delivery, std::unique_ptr<BulkReceive> payload) {
    auto buffer = std::make_shared<std::vector<uint8_t>>(payload->payload_bytes());
    BulkReceive* const raw = payload.get();
    const std::shared_ptr<BulkReceive> bulk = std::move(payload);
    raw->Receive(absl::MakeSpan(*buffer), [this, delivery, buffer, bulk](absl::Status status) {
      MutexLock lock(&mu_);
      delivered_[delivery.request_id()][delivery.ordinal()] = {
          .status = status, .object_header = delivery.object_header(), .payload = *buffer};
      changed_.SignalAll();
    });
  }

  void OnThread(std::function<void()> work) {
    std::promise<void> done;
    transport_->Post([&] {
      work();
      done.set_value();
    });
    done.get_future().wait();
  }
  bool WaitFor(const char* what, const std::function<bool()>& ready) {
    MutexLock lock(&mu_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ready()) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "waited in vain for " << what;
        return false;
      }
      changed_.WaitFor(&mu_, std::chrono::milliseconds(100));
    }
    return true;
  }

  Transport* const transport_;
  // Owned by the transport's thread.
  Connection* connection_ = nullptr;
  bool hold_ = false;
  std::function<void()> on_delivery_;
  std::vector<std::pair<v1::ObjectDelivery, std::unique_ptr<BulkReceive>>> held_;

  Mutex mu_;
  CondVar changed_;
  std::optional<v1::HelloReply> hello_reply_;
  std::map<uint64_t, v1::PutReply> put_replies_;
  std::set<uint64_t> put_pending_;
  std::map<uint64_t, std::map<uint32_t, Delivered>> delivered_;  // By request, then ordinal.
  size_t held_count_ = 0;
  bool closed_ = false;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_TEST_WORKER_H_
