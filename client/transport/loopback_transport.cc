#include "client/transport/loopback_transport.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/transport/address.h"
#include "client/transport/device_regions.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kCopyBytes = size_t{256} << 10;
constexpr size_t kHeaderBytesMax = 8000;  // About what UCX gives with 8 KiB segments.

class LoopbackConnection;

// What the two ends share: who is at each. A side is empty before the accept and after the close.
// Thread-safe.
class Link : public std::enable_shared_from_this<Link> {
 public:
  // Runs `work` on the thread of `side` if its end is still there then.
  void Post(int side, std::function<void(LoopbackConnection*)> work) ABSL_LOCKS_EXCLUDED(mu_);
  void Attach(int side, LoopbackTransport* transport, LoopbackConnection* connection)
      ABSL_LOCKS_EXCLUDED(mu_);
  void Detach(int side) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct End {
    LoopbackTransport* transport = nullptr;
    LoopbackConnection* connection = nullptr;
  };
  Mutex mu_;
  End ends_[2] ABSL_GUARDED_BY(mu_);
};

// A payload of the sender, readable by the receiver's thread until the sender takes it back.
// Thread-safe.
class Loan {
 public:
  explicit Loan(absl::Span<const uint8_t> payload) : size_(payload.size()), payload_(payload) {}
  size_t size() const { return size_; }
  // False when the sender took it back.
  bool Copy(size_t offset, absl::Span<uint8_t> to) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (payload_.empty()) return false;
    std::memcpy(to.data(), payload_.data() + offset, to.size());
    return true;
  }
  void TakeBack() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    payload_ = {};
  }

 private:
  const size_t size_;
  Mutex mu_;
  absl::Span<const uint8_t> payload_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

// Thread-safe as Transport says.
class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(LoopbackHub* hub, DeviceMemory* device, uint64_t device_staging_bytes)
      : hub_(hub),
        device_(device),
        device_staging_bytes_(device_staging_bytes),
        thread_([this] { Run(); }) {}
  ~LoopbackTransport() override;

  absl::StatusOr<std::string> Listen(const std::string& address, AcceptHandler* handler) override;
  absl::StatusOr<Connection*> Connect(const std::string& address,
                                      ConnectionHandler* handler) override;
  void Post(std::function<void()> work) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status RegisterMemory(absl::Span<uint8_t> memory, MemoryKind kind) override {
    if (kind == MemoryKind::kDevice) device_regions_.Add(memory, kind);
    return absl::OkStatus();
  }
  // One that is host memory, in truth: tests of what is done with it have such.
  bool takes_device_memory() const override { return true; }
  bool has_device_memory(absl::Span<const uint8_t> memory) const override {
    return device_regions_.Find(memory).has_value();
  }
  DeviceStaging* device_staging() override;

  LoopbackConnection* Adopt(std::unique_ptr<LoopbackConnection> connection);
  void Delete(LoopbackConnection* connection) { connections_.erase(connection); }

 private:
  void Run();
  void Stop();
  void Accept(std::shared_ptr<Link> link, const std::string& peer);

  LoopbackHub* const hub_;
  DeviceMemory* const device_;
  const uint64_t device_staging_bytes_;
  DeviceRegions<MemoryKind> device_regions_;
  Mutex mu_;
  CondVar posted_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // Owned by the transport thread.
  AcceptHandler* acceptor_ = nullptr;
  std::unique_ptr<DeviceStaging> staging_;
  absl::flat_hash_map<LoopbackConnection*, std::unique_ptr<LoopbackConnection>> connections_;

  std::thread thread_;  // Last: it uses the others.
};

namespace {

// Owned by the transport thread.
class LoopbackConnection final : public Connection {
 public:
  LoopbackConnection(LoopbackTransport* transport, ConnectionHandler* handler,
                     std::shared_ptr<Link> link, int side, std::string peer)
      : transport_(transport),
        handler_(handler),
        link_(std::move(link)),
        side_(side),
        peer_(std::move(peer)) {}

  void Send(MessageType type, std::string message) override {
    OKV_CHECK(message.size() <= kMessageBytesMax);
    if (!open_) return;
    ToPeer([type, text = std::move(message)](LoopbackConnection* peer) {
      if (peer->open_) peer->handler_->OnMessage(peer, type, text);
    });
  }
  void SendBulk(MessageType type, absl::string_view header, absl::Span<const uint8_t> payload,
                std::function<void(absl::Status)> done) override;
  void Close(std::function<void()> closed) override;
  size_t header_bytes_max() const override { return kHeaderBytesMax; }
  std::string description() const override { return absl::StrCat(peer_, " via loopback"); }

  void Fail(const absl::Status& why);
  bool open() const { return open_; }

  // For LoopbackReceive.
  void StartReceive(uint64_t sequence, std::shared_ptr<Loan> loan, absl::Span<uint8_t> buffer,
                    std::function<void(absl::Status)> done);
  void Acknowledge(uint64_t sequence, absl::Status status);
  std::shared_ptr<Link> link() const { return link_; }

 private:
  struct Sending {
    std::shared_ptr<Loan> loan;
    std::function<void(absl::Status)> done;
  };
  struct Receiving {
    std::shared_ptr<Loan> loan;
    absl::Span<uint8_t> buffer;
    std::function<void(absl::Status)> done;
    size_t copied = 0;
  };

  void ToPeer(std::function<void(LoopbackConnection*)> work) {
    link_->Post(1 - side_, std::move(work));
  }
  void CopySome(uint64_t sequence);
  void StartClose();
  void Finish();

  LoopbackTransport* const transport_;
  ConnectionHandler* const handler_;
  const std::shared_ptr<Link> link_;  // Shared with the other end, which may outlive this one.
  const int side_;
  const std::string peer_;
  bool open_ = true;
  absl::Status why_;
  std::vector<std::function<void()>> closed_;
  std::vector<std::function<void(absl::Status)>> late_dones_;
  uint64_t next_bulk_ = 0;
  absl::flat_hash_map<uint64_t, Sending> sends_;
  absl::flat_hash_map<uint64_t, Receiving> receives_;
};

// Owned by whoever was handed it; used on the transport thread.
class LoopbackReceive final : public BulkReceive {
 public:
  LoopbackReceive(LoopbackTransport* transport, std::shared_ptr<Link> link, int side,
                  uint64_t sequence, std::shared_ptr<Loan> loan)
      : transport_(transport),
        link_(std::move(link)),
        side_(side),
        sequence_(sequence),
        loan_(std::move(loan)) {}
  ~LoopbackReceive() override {
    if (received_) return;
    link_->Post(side_, [sequence = sequence_](LoopbackConnection* self) {
      self->Acknowledge(sequence, absl::AbortedError("the receiver refused it"));
    });
  }
  size_t payload_bytes() const override { return loan_->size(); }
  void Receive(absl::Span<uint8_t> buffer, std::function<void(absl::Status)> done) override {
    OKV_CHECK(!received_ && buffer.size() == loan_->size());
    received_ = true;
    // Through the link, which knows whether the connection is still there.
    auto owed = std::make_shared<std::function<void(absl::Status)>>(std::move(done));
    link_->Post(side_, [=, this_sequence = sequence_, loan = loan_](LoopbackConnection* self) {
      self->StartReceive(this_sequence, loan, buffer, std::exchange(*owed, nullptr));
    });
    // Behind it in the queue: nobody took `owed` when the connection had gone.
    transport_->Post([owed] {
      if (*owed) (*owed)(absl::UnavailableError("closed"));
    });
  }

 private:
  LoopbackTransport* const transport_;
  const std::shared_ptr<Link> link_;
  const int side_;
  const uint64_t sequence_;
  const std::shared_ptr<Loan> loan_;
  bool received_ = false;
};

void Link::Post(int side, std::function<void(LoopbackConnection*)> work) {
  MutexLock lock(&mu_);
  const End end = ends_[side];
  if (end.transport == nullptr) return;
  end.transport->Post([self = shared_from_this(), side, work = std::move(work)] {
    LoopbackConnection* connection;
    {
      MutexLock inner(&self->mu_);
      connection = self->ends_[side].connection;
    }
    if (connection != nullptr) work(connection);  // Only this thread detaches it.
  });
}

void Link::Attach(int side, LoopbackTransport* transport, LoopbackConnection* connection) {
  MutexLock lock(&mu_);
  ends_[side] = {.transport = transport, .connection = connection};
}

void Link::Detach(int side) {
  MutexLock lock(&mu_);
  ends_[side] = {};
}

void LoopbackConnection::SendBulk(MessageType type, absl::string_view header,
                                  absl::Span<const uint8_t> payload,
                                  std::function<void(absl::Status)> done) {
  OKV_CHECK(header.size() <= kHeaderBytesMax && !payload.empty());
  if (!open_) {
    late_dones_.push_back(std::move(done));
    return;
  }
  const uint64_t sequence = next_bulk_++;
  auto loan = std::make_shared<Loan>(payload);
  sends_[sequence] = {.loan = loan, .done = std::move(done)};
  ToPeer([type, sequence, loan, text = std::string(header)](LoopbackConnection* peer) {
    if (!peer->open_) return;
    peer->handler_->OnBulk(peer, type, text,
                           std::make_unique<LoopbackReceive>(peer->transport_, peer->link_,
                                                             peer->side_, sequence, loan));
  });
}

void LoopbackConnection::StartReceive(uint64_t sequence, std::shared_ptr<Loan> loan,
                                      absl::Span<uint8_t> buffer,
                                      std::function<void(absl::Status)> done) {
  if (!open_) {
    late_dones_.push_back(std::move(done));
    return;
  }
  receives_[sequence] = {.loan = std::move(loan), .buffer = buffer, .done = std::move(done)};
  CopySome(sequence);
}

void LoopbackConnection::CopySome(uint64_t sequence) {
  const auto found = receives_.find(sequence);
  if (found == receives_.end()) return;
  Receiving& receiving = found->second;
  const size_t bytes = std::min(kCopyBytes, receiving.buffer.size() - receiving.copied);
  // Taken back: the sender closed, and the news is on its way.
  if (!receiving.loan->Copy(receiving.copied, receiving.buffer.subspan(receiving.copied, bytes))) {
    return;
  }
  receiving.copied += bytes;
  if (receiving.copied < receiving.buffer.size()) {
    link_->Post(side_, [sequence](LoopbackConnection* self) { self->CopySome(sequence); });
    return;
  }
  const auto done = std::move(receiving.done);
  receives_.erase(found);
  Acknowledge(sequence, absl::OkStatus());
  done(absl::OkStatus());
}

void LoopbackConnection::Acknowledge(uint64_t sequence, absl::Status status) {
  if (!open_) return;
  ToPeer([sequence, status](LoopbackConnection* peer) {
    const auto found = peer->sends_.find(sequence);
    if (found == peer->sends_.end()) return;
    const auto done = std::move(found->second.done);
    peer->sends_.erase(found);
    done(status);
  });
}

void LoopbackConnection::Fail(const absl::Status& why) {
  if (!open_) return;
  why_ = why;
  StartClose();
}

void LoopbackConnection::Close(std::function<void()> closed) {
  closed_.push_back(std::move(closed));
  if (!open_) return;
  why_ = absl::CancelledError("closed");
  StartClose();
}

void LoopbackConnection::StartClose() {
  open_ = false;
  for (auto& [sequence, sending] : sends_) sending.loan->TakeBack();
  ToPeer([](LoopbackConnection* peer) {
    peer->Fail(absl::UnavailableError(absl::StrCat(peer->peer_, ": the peer closed")));
  });
  link_->Post(side_, [](LoopbackConnection* self) { self->Finish(); });
}

void LoopbackConnection::Finish() {
  const absl::Status status = closed_.empty() ? why_ : absl::CancelledError("closed");
  while (!sends_.empty() || !receives_.empty() || !late_dones_.empty()) {
    for (auto& [sequence, sending] : std::exchange(sends_, {})) sending.done(status);
    for (auto& [sequence, receiving] : std::exchange(receives_, {})) receiving.done(status);
    for (auto& done : std::exchange(late_dones_, {})) done(status);
  }
  link_->Detach(side_);
  if (closed_.empty()) {
    handler_->OnClosed(this, why_);
  } else {
    for (const auto& closed : closed_) closed();
  }
  transport_->Delete(this);
}

}  // namespace

LoopbackTransport::~LoopbackTransport() {
  {
    MutexLock lock(&hub_->mu_);
    for (auto it = hub_->listeners_.begin(); it != hub_->listeners_.end();) {
      const auto here = it++;
      if (here->second == this) hub_->listeners_.erase(here);
    }
  }
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    posted_.Signal();
  }
  thread_.join();
}

void LoopbackTransport::Post(std::function<void()> work) {
  MutexLock lock(&mu_);
  work_.push_back(std::move(work));
  posted_.Signal();
}

void LoopbackTransport::Run() {
  bool stopped = false;
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(&mu_);
      while (work_.empty() && !stopping_) posted_.Wait(&mu_);
      if (!work_.empty()) {
        work = std::move(work_.front());
        work_.pop_front();
      } else if (stopped && connections_.empty() && staging_ == nullptr) {
        return;
      }
    }
    if (work) {
      work();
    } else if (!stopped) {
      stopped = true;
      Stop();
    } else if (connections_.empty()) {
      staging_.reset();  // What its copies owe runs next.
    }
  }
}

void LoopbackTransport::Stop() {
  std::vector<LoopbackConnection*> open;
  for (const auto& [connection, owned] : connections_) open.push_back(connection);
  for (LoopbackConnection* connection : open) {
    connection->Fail(absl::CancelledError("the transport was closed"));
  }
}

LoopbackConnection* LoopbackTransport::Adopt(std::unique_ptr<LoopbackConnection> connection) {
  LoopbackConnection* raw = connection.get();
  connections_[raw] = std::move(connection);
  return raw;
}

absl::StatusOr<std::string> LoopbackTransport::Listen(const std::string& address,
                                                      AcceptHandler* handler) {
  OKV_RETURN_IF_ERROR(ParseAddress(address).status());
  MutexLock lock(&hub_->mu_);
  std::string bound = address;
  if (absl::EndsWith(address, ":0")) {
    bound = absl::StrCat(address.substr(0, address.size() - 1), hub_->next_port_++);
  }
  if (!hub_->listeners_.emplace(bound, this).second) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", bound, ": in use"));
  }
  Post([this, handler] { acceptor_ = handler; });  // Ahead of every Accept.
  return bound;
}

absl::StatusOr<Connection*> LoopbackTransport::Connect(const std::string& address,
                                                       ConnectionHandler* handler) {
  OKV_CHECK(std::this_thread::get_id() == thread_.get_id());
  OKV_RETURN_IF_ERROR(ParseAddress(address).status());
  const auto link = std::make_shared<Link>();
  LoopbackConnection* connection =
      Adopt(std::make_unique<LoopbackConnection>(this, handler, link, /*side=*/0, address));
  link->Attach(0, this, connection);
  MutexLock lock(&hub_->mu_);
  const auto found = hub_->listeners_.find(address);
  if (found == hub_->listeners_.end()) {
    link->Post(0, [address](LoopbackConnection* self) {
      self->Fail(absl::UnavailableError(absl::StrCat(address, ": connection refused")));
    });
    return connection;
  }
  LoopbackTransport* listener = found->second;
  // What this end sends from now on queues behind the accept.
  link->Attach(1, listener, nullptr);
  listener->Post([listener, link] { listener->Accept(link, "loopback peer"); });
  return connection;
}

void LoopbackTransport::Accept(std::shared_ptr<Link> link, const std::string& peer) {
  LoopbackConnection* connection =
      Adopt(std::make_unique<LoopbackConnection>(this, acceptor_, link, /*side=*/1, peer));
  link->Attach(1, this, connection);
  acceptor_->OnAccept(connection);
}

DeviceStaging* LoopbackTransport::device_staging() {
  if (staging_ == nullptr && device_ != nullptr) {
    auto staging =
        DeviceStaging::Create(device_, device_staging_bytes_,
                              [this](std::function<void()> work) { Post(std::move(work)); });
    OKV_CHECK(staging.ok());
    staging_ = *std::move(staging);
    device_regions_.Add(staging_->memory(), MemoryKind::kDevice);
  }
  return staging_.get();
}

std::unique_ptr<Transport> LoopbackHub::CreateTransport(DeviceMemory* device,
                                                        uint64_t device_staging_bytes) {
  return std::make_unique<LoopbackTransport>(this, device, device_staging_bytes);
}

}  // namespace okv
