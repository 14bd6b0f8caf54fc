#ifndef OKV_TESTS_CONFORMANCE_TRANSPORT_CONFORMANCE_H_
#define OKV_TESTS_CONFORMANCE_TRANSPORT_CONFORMANCE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/transport/transport.h"
#include "gtest/gtest.h"
#include "proto/mutex.h"

namespace okv {

// Nothing in these tests waits for time to pass; this bounds the wait for something that must
// happen.
inline constexpr std::chrono::seconds kTestPatience(20);

// Bytes that differ between any two seeds and between places of one buffer.
inline std::vector<uint8_t> PatternBytes(size_t size, uint64_t seed) {
  std::vector<uint8_t> bytes(size);
  uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;
  for (size_t i = 0; i < size; ++i) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    bytes[i] = static_cast<uint8_t>(x);
  }
  return bytes;
}

// What one transport's connections reported, for a test to wait for. Bulk payloads are received
// into buffers of its own unless on_bulk is set. Thread-safe; the hooks run on the transport's
// thread.
class Recorder : public Transport::AcceptHandler {
 public:
  struct Bulk {
    MessageType type;
    std::string header;
    std::vector<uint8_t> bytes;
    absl::Status status;
    bool done = false;
  };

  // Set before the first connection.
  std::function<void(Connection*, MessageType, absl::string_view)> on_message;
  std::function<void(Connection*, absl::string_view, std::unique_ptr<BulkReceive>)> on_bulk;

  void OnAccept(Connection* connection) override {
    MutexLock lock(&mu_);
    accepted_.push_back(connection);
    changed_.SignalAll();
  }
  void OnMessage(Connection* connection, MessageType type, absl::string_view message) override {
    if (on_message) on_message(connection, type, message);
    MutexLock lock(&mu_);
    messages_.emplace_back(type, std::string(message));
    changed_.SignalAll();
  }
  void OnBulk(Connection* connection, MessageType type, absl::string_view header,
              std::unique_ptr<BulkReceive> payload) override {
    if (on_bulk) {
      on_bulk(connection, header, std::move(payload));
      return;
    }
    Bulk* bulk;
    {
      MutexLock lock(&mu_);
      bulks_.push_back({.type = type,
                        .header = std::string(header),
                        .bytes = std::vector<uint8_t>(payload->payload_bytes()),
                        .status = absl::OkStatus()});
      bulk = &bulks_.back();
    }
    payload->Receive(absl::MakeSpan(bulk->bytes), [this, bulk](absl::Status status) {
      MutexLock lock(&mu_);
      bulk->status = status;
      bulk->done = true;
      changed_.SignalAll();
    });
  }
  void OnClosed(Connection* connection, const absl::Status& why) override {
    MutexLock lock(&mu_);
    closed_.emplace_back(connection, why);
    changed_.SignalAll();
  }

  // False (and a test failure) when `ready` did not become true in time.
  bool WaitFor(const char* what, const std::function<bool()>& ready) {
    MutexLock lock(&mu_);
    const auto end = std::chrono::steady_clock::now() + kTestPatience;
    while (!ready()) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "waited in vain for " << what;
        return false;
      }
      changed_.WaitFor(&mu_, std::chrono::milliseconds(100));
    }
    return true;
  }
  bool WaitForAccepted(size_t count) {
    return WaitFor("an accept", [=, this] { return accepted_.size() >= count; });
  }
  bool WaitForMessages(size_t count) {
    return WaitFor("messages", [=, this] { return messages_.size() >= count; });
  }
  bool WaitForBulks(size_t count) {
    return WaitFor("bulk messages", [=, this] {
      size_t done = 0;
      for (const Bulk& bulk : bulks_) done += bulk.done;
      return done >= count;
    });
  }
  bool WaitForClosed(size_t count) {
    return WaitFor("OnClosed", [=, this] { return closed_.size() >= count; });
  }

  // Copies or references for after the wait.
  Connection* accepted(size_t i) {
    MutexLock lock(&mu_);
    return accepted_.at(i);
  }
  std::vector<std::pair<MessageType, std::string>> messages() {
    MutexLock lock(&mu_);
    return messages_;
  }
  std::list<Bulk>& bulks() { return bulks_; }
  std::vector<std::pair<Connection*, absl::Status>> closed() {
    MutexLock lock(&mu_);
    return closed_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<Connection*> accepted_;
  std::vector<std::pair<MessageType, std::string>> messages_;
  std::list<Bulk> bulks_;  // Stable addresses.
  std::vector<std::pair<Connection*, absl::Status>> closed_;
};

// Statuses of dones, in order of arrival. Thread-safe.
class Dones {
 public:
  std::function<void(absl::Status)> Expect() {
    return [this](absl::Status status) {
      MutexLock lock(&mu_);
      statuses_.push_back(std::move(status));
      changed_.SignalAll();
    };
  }
  // The statuses once there are `count`; a test failure when that takes too long.
  std::vector<absl::Status> Wait(size_t count) {
    MutexLock lock(&mu_);
    const auto end = std::chrono::steady_clock::now() + kTestPatience;
    while (statuses_.size() < count) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << statuses_.size() << " of " << count << " dones came";
        break;
      }
      changed_.WaitFor(&mu_, std::chrono::milliseconds(100));
    }
    return statuses_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<absl::Status> statuses_;
};

// Runs `work` on the transport's thread and waits for it.
inline void RunOn(Transport* transport, std::function<void()> work) {
  Dones done;
  transport->Post([&work, signal = done.Expect()] {
    work();
    signal(absl::OkStatus());
  });
  done.Wait(1);
}

inline Connection* ConnectTo(Transport* transport, const std::string& address,
                             ConnectionHandler* handler) {
  Connection* connection = nullptr;
  RunOn(transport, [&] {
    absl::StatusOr<Connection*> made = transport->Connect(address, handler);
    ASSERT_TRUE(made.ok()) << made.status();
    connection = *made;
  });
  return connection;
}

}  // namespace okv

#endif  // OKV_TESTS_CONFORMANCE_TRANSPORT_CONFORMANCE_H_
