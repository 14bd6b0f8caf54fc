// A node in this process: in which order it ends.

#include "cache_node/node.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/transport/loopback_transport.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"
#include "tests/cache_node/scripted_control.h"
#include "tests/cache_node/test_worker.h"
#include "tests/cache_node/tickets.h"
#include "tests/support/process.h"

namespace okv::testing_support {
namespace {

// Another transport, and a call when it goes.
class WatchedTransport final : public Transport {
 public:
  WatchedTransport(std::unique_ptr<Transport> transport, std::function<void()> on_end)
      : transport_(std::move(transport)), on_end_(std::move(on_end)) {}
  ~WatchedTransport() override { on_end_(); }

  absl::StatusOr<std::string> Listen(const std::string& address, AcceptHandler* handler) override {
    return transport_->Listen(address, handler);
  }
  absl::StatusOr<Connection*> Connect(const std::string& address,
                                      ConnectionHandler* handler) override {
    return transport_->Connect(address, handler);
  }
  void Post(std::function<void()> work) override { transport_->Post(std::move(work)); }
  absl::Status RegisterMemory(absl::Span<uint8_t> memory, MemoryKind kind) override {
    return transport_->RegisterMemory(memory, kind);
  }
  bool takes_device_memory() const override { return transport_->takes_device_memory(); }
  bool has_device_memory(absl::Span<const uint8_t> memory) const override {
    return transport_->has_device_memory(memory);
  }
  DeviceStaging* device_staging() override { return transport_->device_staging(); }

 private:
  const std::unique_ptr<Transport> transport_;
  const std::function<void()> on_end_;
};

TEST(NodeTest, WhatOnlyMemoryHoldsIsOnDiskBeforeTheTransportGoesAndNobodyGetsInMeanwhile) {
  ScriptedControl control;
  const TempDir data;
  LoopbackHub hub;
  const std::unique_ptr<Transport> worker_transport = hub.CreateTransport();
  std::vector<TestObject> objects;
  for (uint32_t number = 0; number < 30; ++number)
    objects.push_back(MakeObject({.number = number}));

  std::unique_ptr<Node> node;
  std::unique_ptr<TestWorker> late;
  Node* alive = nullptr;
  size_t on_disk = 0;
  bool turned_away = false;
  const auto on_end = [&] {
    for (const TestObject& object : objects) {
      const absl::StatusOr<ObjectPin> pin = alive->storage()->table()->Pin(object.id());
      if (pin.ok() && pin->on_disk()) ++on_disk;
    }
    late = std::make_unique<TestWorker>(worker_transport.get(), alive->data_address());
    turned_away = late->WaitForClosed();
  };
  NodeOptions options;
  options.control_address = control.address();
  options.data_dir = data.path();
  options.dram_bytes = uint64_t{4} << 20;
  options.disk_bytes = uint64_t{64} << 20;
  auto started =
      Node::Start(options, std::make_unique<WatchedTransport>(hub.CreateTransport(), on_end),
                  Clock::System(), [](const std::string&) {});
  ASSERT_TRUE(started.ok()) << started.status();
  node = *std::move(started);
  alive = node.get();

  TestWorker worker(worker_transport.get(), node->data_address());
  ASSERT_EQ(worker.Hello(ScriptedHello()).code(), 0);
  for (const TestObject& object : objects) {
    ASSERT_TRUE(worker.Put(ScriptedOffer(node->node_id(), object), object.payload).ok());
  }
  node.reset();
  EXPECT_TRUE(worker.WaitForClosed());
  EXPECT_EQ(on_disk, objects.size());
  EXPECT_TRUE(turned_away);
}

}  // namespace
}  // namespace okv::testing_support
