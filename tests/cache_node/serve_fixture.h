#ifndef OKV_TESTS_CACHE_NODE_SERVE_FIXTURE_H_
#define OKV_TESTS_CACHE_NODE_SERVE_FIXTURE_H_

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cache_node/serve.h"
#include "client/node_session.h"
#include "client/transport/loopback_transport.h"
#include "gtest/gtest.h"
#include "proto/ticket.h"
#include "tests/cache_node/objects.h"
#include "tests/cache_node/test_worker.h"
#include "tests/support/host_device.h"

namespace okv::testing_support {

inline constexpr char kTicketKey[] = "ticket key";
inline constexpr char kNodeId[] = "node";

inline Format OtherFormat() {
  Format format = TestFormat();
  format.rope_theta = 500'000;
  return format;
}

// A disk that reads some objects with a bit flipped, and may be slow. Thread-safe.
class FlippingTier final : public Tier {
 public:
  explicit FlippingTier(Tier* disk) : disk_(disk) {}

  void Flip(const ObjectId& id) {
    MutexLock lock(&mu_);
    flipped_.insert(id);
  }
  // What the next read says instead.
  void AnswerOnce(std::function<absl::Status()> answer) {
    MutexLock lock(&mu_);
    answer_ = std::move(answer);
  }
  // Reads wait until they are let go.
  void HoldReads(bool hold) {
    MutexLock lock(&mu_);
    hold_ = hold;
    changed_.SignalAll();
  }
  bool WaitForHeldRead() {
    MutexLock lock(&mu_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (held_count_ == 0 && std::chrono::steady_clock::now() < end) {
      changed_.WaitFor(&mu_, std::chrono::milliseconds(100));
    }
    return held_count_ > 0;
  }

  absl::string_view name() const override { return disk_->name(); }
  uint64_t CostBytes(const HeldObject& object) const override { return disk_->CostBytes(object); }
  absl::Status Put(absl::Span<const TierWrite> group) override { return disk_->Put(group); }
  absl::Status Flush() override { return disk_->Flush(); }
  absl::Status Read(const ObjectId& id, absl::Span<uint8_t> buffer) override {
    std::function<absl::Status()> answer;
    {
      MutexLock lock(&mu_);
      answer = std::exchange(answer_, nullptr);
    }
    absl::Status status = answer ? answer() : disk_->Read(id, buffer);
    MutexLock lock(&mu_);
    ++held_count_;
    changed_.SignalAll();
    while (hold_) changed_.Wait(&mu_);
    --held_count_;
    if (flipped_.contains(id)) buffer[buffer.size() / 2] ^= 4;
    return status;
  }
  absl::Status Remove(const ObjectId& id) override {
    {
      MutexLock lock(&mu_);
      flipped_.erase(id);
    }
    return disk_->Remove(id);
  }
  absl::Status List(const Listing& listing) override { return disk_->List(listing); }
  TierStats stats() const override { return disk_->stats(); }

 private:
  Tier* const disk_;
  Mutex mu_;
  CondVar changed_;
  std::set<ObjectId> flipped_ ABSL_GUARDED_BY(mu_);
  std::function<absl::Status()> answer_ ABSL_GUARDED_BY(mu_);
  bool hold_ ABSL_GUARDED_BY(mu_) = false;
  int held_count_ ABSL_GUARDED_BY(mu_) = 0;
};

// A data plane over real storage, on the in-process transport, and workers for it.
class ServeTest : public testing::Test {
 protected:
  ~ServeTest() override { StopNode(); }

  void StartNode(DataPlaneOptions options = {}) {
    StorageOptions storage = TestStorageOptions(directory_.path());
    storage.pool.arena_bytes = uint64_t{4} << 20;
    storage.disk.node_id = kNodeId;
    storage.hbm_pool = {.arena_bytes = hbm_bytes_, .device = &device_, .progress = {}};
    node_.clock = &clock_;
    node_.on_damaged = [this](const std::string& tenant, const ObjectId& id) {
      data_plane_->Recheck(tenant, id);
    };
    ASSERT_TRUE(node_.Open(storage).ok());
    node_transport_ = hub_.CreateTransport(hbm_bytes_ > 0 ? &device_ : nullptr, staging_bytes_);
    disk_ = std::make_unique<FlippingTier>(node_.storage->disk());
    data_plane_ = std::make_unique<DataPlane>(
        options, DataPlane::Parts{.transport = node_transport_.get(),
                                  .table = node_.storage->table(),
                                  .spiller = node_.storage->spiller(),
                                  .disk = disk_.get(),
                                  .formats = node_.storage->formats(),
                                  .metrics = &node_.metrics,
                                  .clock = &clock_,
                                  .hbm = node_.storage->hbm_mover(),
                                  .arena_bytes = node_.storage->pool()->capacity_bytes(),
                                  .node_id = kNodeId,
                                  .ticket_key = [this] { return ticket_key_; },
                                  .draining = {},
                                  .on_committed =
                                      [this](ObjectRef object) {
                                        MutexLock lock(&mu_);
                                        committed_.push_back(object->header.id);
                                      },
                                  .on_removed =
                                      [this](const ObjectId& id, const absl::Status&) {
                                        MutexLock lock(&mu_);
                                        removed_.push_back(id);
                                      },
                                  .log = [](const std::string&) {}});
    address_ = *data_plane_->Listen("127.0.0.1:0");
  }
  void StopNode() {
    if (data_plane_ == nullptr) return;
    data_plane_->StopThreads();
    node_.storage->StopSpilling();
    node_transport_.reset();
    data_plane_.reset();
    node_.Close();
  }
  std::unique_ptr<TestWorker> Connect() {
    return std::make_unique<TestWorker>(worker_transport_.get(), address_);
  }
  // A session of the client's own, for what depends on where a reader's buffers are.
  std::shared_ptr<NodeSession> ClientSession(const Format& format) {
    const v1::Hello hello = Hello("tenant", format);
    return NodeSession::Create(worker_transport_.get(), {.address = address_,
                                                         .node_id = kNodeId,
                                                         .client_name = "test",
                                                         .ticket = hello.ticket(),
                                                         .format = hello.format(),
                                                         .format_id = format.id()});
  }
  // Fetches by such a session, and ends it.
  std::vector<absl::StatusOr<ObjectHeader>> FetchBySession(
      const Format& format, const std::vector<NodeSession::FetchTarget>& targets,
      const BlockRange& range = {}) {
    const std::shared_ptr<NodeSession> session = ClientSession(format);
    std::vector<absl::StatusOr<ObjectHeader>> headers(targets.size(),
                                                      absl::UnknownError("no answer"));
    size_t left = targets.size();
    std::promise<void> done;
    session->Fetch(targets, range, absl::Seconds(60),
                   [&](size_t target, absl::StatusOr<ObjectHeader> header) {
                     headers[target] = std::move(header);
                     if (--left == 0) done.set_value();
                   });
    done.get_future().wait();
    session->Break(absl::CancelledError("the test is over"));
    EXPECT_TRUE(WaitUntil([&] { return data_plane_->sessions_count() == other_sessions_; }));
    return headers;
  }
  std::unique_ptr<TestWorker> OpenSession(const std::string& tenant = "tenant",
                                          const Format& format = TestFormat()) {
    auto worker = Connect();
    const v1::HelloReply reply = worker->Hello(Hello(tenant, format));
    EXPECT_EQ(reply.code(), 0) << reply.message();
    EXPECT_EQ(reply.node_id(), kNodeId);
    return worker;
  }

  v1::Hello Hello(const std::string& tenant, const Format& format) {
    v1::Hello hello;
    hello.set_protocol_major(kProtocolMajor);
    hello.set_protocol_minor(kProtocolMinor);
    hello.set_ticket(SealTicket({.tenant = tenant,
                                 .format_id = format.id(),
                                 .expires_wall_us = clock_.WallMicros() + 1'000'000'000},
                                kTicketKey));
    hello.set_format(format.Canonical());
    hello.set_client_name("test");
    return hello;
  }
  Reservation ReservationFor(const TestObject& object) {
    return {.tenant = object.object->tenant,
            .format_id = object.header().format_id,
            .object = object.id(),
            .node_id = kNodeId,
            .write_id = WriteId(object.header().generation),
            .expires_wall_us = clock_.WallMicros() + 1'000'000'000};
  }
  v1::PutOffer Offer(const TestObject& object) {
    return Offer(ReservationFor(object), object.header());
  }
  v1::PutOffer Offer(const Reservation& reservation, const ObjectHeader& header) {
    v1::PutOffer offer;
    offer.set_request_id(next_request_++);
    offer.set_reservation(SealReservation(reservation, kTicketKey));
    offer.set_object_header(header.Encode());
    return offer;
  }
  v1::FetchRequest Request(const std::vector<TestObject>& objects, int64_t deadline_us = 0) {
    v1::FetchRequest request;
    request.set_request_id(next_request_++);
    request.set_format_id(
        std::string((objects.empty() ? TestFormat().id() : objects[0].header().format_id).view()));
    request.set_deadline_us(static_cast<uint64_t>(deadline_us));
    for (const TestObject& object : objects) {
      v1::FetchObject* wanted = request.add_objects();
      wanted->set_key(std::string(object.id().key.view()));
      wanted->set_codec(static_cast<v1::CodecId>(object.id().codec));
      wanted->set_index(object.header().index.value());
    }
    return request;
  }
  void ExpectDelivered(const TestWorker::Delivered& delivered, const TestObject& object) {
    ASSERT_TRUE(delivered.status.ok()) << delivered.status;
    EXPECT_EQ(delivered.object_header, object.header().Encode());
    EXPECT_EQ(delivered.payload, object.payload);
  }
  // Nothing of an unfinished or refused put is left, once its extent, claim and pin are given back:
  // one after the other, on the node's thread.
  void ExpectNothingStored() {
    EXPECT_TRUE(WaitUntil([this] {
      const TableStats now = node_.storage->table()->stats();
      return node_.storage->pool()->used_bytes() == 0 && now.claims_count == 0 &&
             now.pins_count == 0;
    }));
    const TableStats stats = node_.storage->table()->stats();
    EXPECT_EQ(stats.objects_count, 0u);
    EXPECT_EQ(stats.claims_count, 0u);
    EXPECT_EQ(stats.pins_count, 0u);
  }
  static bool WaitUntil(const std::function<bool()>& ready) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ready()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }
  std::vector<ObjectId> committed() {
    MutexLock lock(&mu_);
    return committed_;
  }

  std::vector<ObjectId> removed() {
    MutexLock lock(&mu_);
    return removed_;
  }

  const TempDir directory_;
  FakeClock clock_;
  uint64_t hbm_bytes_ = 0;  // Without an HBM tier.
  uint64_t staging_bytes_ = uint64_t{1} << 20;
  uint64_t other_sessions_ = 0;  // Open while FetchBySession runs, and behind it.
  HostDevice device_{/*fenced=*/false};
  std::string ticket_key_ = kTicketKey;
  LoopbackHub hub_;
  std::unique_ptr<Transport> worker_transport_ = hub_.CreateTransport();
  TestStorage node_;
  std::unique_ptr<FlippingTier> disk_;  // As complaints are checked; transfers use the real one.
  std::unique_ptr<Transport> node_transport_;
  std::unique_ptr<DataPlane> data_plane_;
  std::string address_;
  uint64_t next_request_ = 1;
  Mutex mu_;
  std::vector<ObjectId> committed_;
  std::vector<ObjectId> removed_;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_SERVE_FIXTURE_H_
