#ifndef OKV_TESTS_CONTROL_PLANE_HARNESS_H_
#define OKV_TESTS_CONTROL_PLANE_HARNESS_H_

#include <gmock/gmock.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "control_plane/control.h"
#include "control_plane/state.h"
#include "proto/check.h"
#include "proto/clock.h"
#include "proto/mutex.h"
#include "proto/page_layout.h"
#include "tests/control_plane/keys.h"
#include "tests/support/fixtures.h"

namespace okv::testing_support {

MATCHER_P2(IsStatus, code, words, "") {
  *result_listener << "which is " << arg.ToString();
  return arg.code() == code && absl::StrContains(std::string(arg.message()), words);
}

// State in memory, whose disk can fill up. Thread-safe.
class MemoryState final : public State {
 public:
  void FailWrites(bool fail) {
    MutexLock lock(&mu_);
    fail_ = fail;
  }
  // `done` runs at the end of the next write, in its thread.
  void AfterNextPut(std::function<void()> done) {
    MutexLock lock(&mu_);
    after_put_ = std::move(done);
  }
  absl::Status Put(absl::string_view key, absl::string_view value) override {
    std::function<void()> done;
    {
      MutexLock lock(&mu_);
      if (fail_) return absl::UnavailableError("state: cannot write: no space left");
      entries_[std::string(key)] = std::string(value);
      done = std::exchange(after_put_, nullptr);
    }
    if (done) done();
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> Get(absl::string_view key) const override {
    MutexLock lock(&mu_);
    const auto found = entries_.find(std::string(key));
    if (found == entries_.end()) return absl::NotFoundError("no such key");
    return found->second;
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(
      absl::string_view prefix) const override {
    MutexLock lock(&mu_);
    std::vector<std::pair<std::string, std::string>> found;
    for (const auto& [key, value] : entries_) {
      if (absl::StartsWith(key, prefix)) found.emplace_back(key, value);
    }
    return found;
  }

 private:
  mutable Mutex mu_;
  bool fail_ ABSL_GUARDED_BY(mu_) = false;
  std::function<void()> after_put_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::string> entries_ ABSL_GUARDED_BY(mu_);
};

inline constexpr int64_t kSecondNanos = 1'000'000'000;
inline constexpr char kTenant[] = "acme";

// A control plane that can be restarted, with a published rotation set and a clock to move by hand.
class ControlHarness {
 public:
  explicit ControlHarness(const ControlOptions& options = {}) : options_(options) {
    Restart();
    OKV_CHECK(control().rotations()->Publish(rotations_.Serialize()).ok());
  }

  void Restart() {
    auto control = Control::Create(options_, &state_, &clock_);
    OKV_CHECK(control.ok());
    control_ = *std::move(control);
  }

  Control& control() { return *control_; }
  MemoryState& state() { return state_; }
  FakeClock& clock() { return clock_; }
  const RotationSet& rotations() const { return rotations_; }
  const Format& format() const { return format_; }
  FormatId format_id() const { return format_.id(); }
  uint64_t block_bytes(Codec codec) const { return PageLayout::Of(format_).block_bytes(codec); }

  FormatId Open(const std::string& tenant = kTenant) {
    const auto session = control().OpenSession(tenant, format_.Canonical());
    OKV_CHECK(session.ok());
    return session->format_id;
  }

  NodeEpoch AddNode(const std::string& node_id, uint64_t capacity_bytes = uint64_t{1} << 40) {
    NodeDescription node;
    node.node_id = node_id;
    node.data_address = absl::StrCat(node_id, ":1");
    node.tiers = {{.tier = "dram", .capacity_bytes = capacity_bytes}};
    const auto registration = control().RegisterNode(node);
    OKV_CHECK(registration.ok());
    return {.node_id = node_id, .epoch = registration->epoch};
  }

  // Block `index` of the chain `keys`, as a writer announces it and a node reports it.
  ObjectAnnouncement Object(absl::Span<const BlockKey> keys, uint32_t index, Codec codec,
                            const std::string& tenant = kTenant) const {
    ObjectAnnouncement object;
    object.format_id = format_.id();
    object.tenant = tenant;
    object.id = {.key = keys[index], .codec = codec};
    if (index > 0) object.parent = keys[index - 1];
    object.index = BlockIndex(index);
    object.payload_bytes = block_bytes(codec);
    return object;
  }
  // Blocks 0..count-1 as an exact prefix of `count` blocks: everything bf16.
  std::vector<ObjectAnnouncement> Objects(absl::Span<const BlockKey> keys, uint32_t count,
                                          const std::string& tenant = kTenant) const {
    std::vector<ObjectAnnouncement> objects;
    for (uint32_t i = 0; i < count; ++i) objects.push_back(Object(keys, i, Codec::kBf16, tenant));
    return objects;
  }

  PlacementAnswer ReserveOne(const ObjectAnnouncement& object, const std::string& group) {
    auto answers = control().Reserve(object.tenant, object.format_id, group, {object});
    OKV_CHECK(answers.ok() && answers->size() == 1);
    return std::move(answers->front());
  }

  LookupAnswer Lookup(absl::Span<const BlockKey> keys, const std::string& tenant = kTenant) {
    auto answer = control().Lookup(tenant, format_.id(), keys);
    OKV_CHECK(answer.ok());
    return *std::move(answer);
  }
  uint32_t Resume(absl::Span<const BlockKey> keys, const std::string& tenant = kTenant) {
    return Lookup(keys, tenant).resume_boundary;
  }

  absl::Status SendInventory(const NodeEpoch& node, absl::Span<const ObjectAnnouncement> objects) {
    const auto inventory = control().BeginInventory(node);
    if (!inventory.ok()) return inventory.status();
    const absl::Status added = control().AddInventory(node, *inventory, objects);
    return added.ok() ? control().EndInventory(node, *inventory) : added;
  }

 private:
  const ControlOptions options_;
  const RotationSet rotations_ = SmallRotations("hadamard", 2);
  const Format format_ = SmallFormat(rotations_);
  MemoryState state_;
  FakeClock clock_;
  std::unique_ptr<Control> control_;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CONTROL_PLANE_HARNESS_H_
