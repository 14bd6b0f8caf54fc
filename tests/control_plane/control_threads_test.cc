// Control under threads: nodes come and go while writers reserve and readers look up.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/control_plane/harness.h"

namespace okv {
namespace {

using testing_support::ChainKeys;
using testing_support::ControlHarness;
using testing_support::kSecondNanos;
using testing_support::kTenant;

constexpr uint32_t kBlocks = 200;

// A node's life: inventory, commits, removals, and again under a new registration.
void LiveAsNode(ControlHarness* h, const std::string& node_id, absl::Span<const BlockKey> keys,
                const std::atomic<bool>& stop) {
  const auto objects = h->Objects(keys, kBlocks);
  while (!stop.load()) {
    const NodeEpoch node = h->AddNode(node_id);
    // Every one of these may be refused: the sweeper moves the clock past the node's timeout.
    h->SendInventory(node, objects).IgnoreError();
    for (uint32_t i = 0; i < kBlocks; i += 20) {
      h->control().ReportCommits(node, {}, {objects[i].id}).IgnoreError();
      h->control().Heartbeat(node, {{.tier = "dram", .capacity_bytes = uint64_t{1} << 40}});
      h->control().ReportCommits(node, {objects[i]}, {}).IgnoreError();
    }
  }
}

void LiveAsReader(ControlHarness* h, absl::Span<const BlockKey> keys, const std::atomic<bool>& stop,
                  std::atomic<uint64_t>* found) {
  while (!stop.load()) {
    const LookupAnswer answer = h->Lookup(keys);
    ASSERT_LE(answer.resume_boundary, kBlocks);
    for (const LookupAnswer::Location& location : answer.locations) {
      ASSERT_LT(location.node, answer.nodes.size());
    }
    if (answer.resume_boundary > 0) found->fetch_add(1);
  }
}

void LiveAsWriter(ControlHarness* h, uint32_t sequence, const std::atomic<bool>& stop,
                  std::atomic<uint64_t>* granted) {
  const auto keys = ChainKeys(1000 + sequence, 50);
  const auto objects = h->Objects(keys, 50);
  const std::string group = absl::StrCat("w", sequence);
  while (!stop.load()) {
    const auto answers = h->control().Reserve(kTenant, h->format_id(), group, objects);
    ASSERT_TRUE(answers.ok());
    for (const PlacementAnswer& answer : *answers) granted->fetch_add(answer.status.ok() ? 1 : 0);
  }
}

TEST(ControlThreadsTest, NodesReadersWritersAndTheSweepDoNotDisturbEachOther) {
  ControlHarness h;
  h.Open();
  const auto keys = ChainKeys(0, kBlocks);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> found{0};
  std::atomic<uint64_t> granted{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] { LiveAsNode(&h, "a", keys, stop); });
  threads.emplace_back([&] { LiveAsNode(&h, "b", keys, stop); });
  threads.emplace_back([&] { LiveAsReader(&h, keys, stop, &found); });
  threads.emplace_back([&] { LiveAsWriter(&h, 1, stop, &granted); });
  threads.emplace_back([&] { LiveAsWriter(&h, 2, stop, &granted); });
  int sweeps = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while ((sweeps < 2000 || found.load() < 20 || granted.load() < 200) &&
         std::chrono::steady_clock::now() < end) {
    h.clock().AdvanceNanos(kSecondNanos);
    h.control().Sweep();
    static_cast<void>(h.control().Status());
    ++sweeps;
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(found.load(), 20u);
  EXPECT_GE(granted.load(), 200u);

  // All nodes and writers fall silent: nothing may be left.
  h.clock().AdvanceNanos(60 * kSecondNanos);
  h.control().Sweep();
  const ClusterStatus status = h.control().Status();
  EXPECT_EQ(status.objects_count, 0u);
  EXPECT_EQ(status.reservations_count, 0u);
  for (const auto& node : status.nodes) EXPECT_EQ(node.state.reserved_bytes, 0u);
}

}  // namespace
}  // namespace okv
