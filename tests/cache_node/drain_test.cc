// A drain whose control plane says what a test wants said.

#include "cache_node/drain.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "client/transport/loopback_transport.h"
#include "gtest/gtest.h"
#include "tests/cache_node/objects.h"
#include "tests/cache_node/scripted_control.h"

namespace okv {
namespace {

using testing_support::MakeObject;
using testing_support::ScriptedControl;
using testing_support::TempDir;
using testing_support::TestObject;
using testing_support::TestStorage;
using testing_support::TestStorageOptions;
using Seen = ScriptedControl::Seen;

constexpr int64_t kLimitNanos = 600'000'000'000;

TestObject Lone(uint32_t number) { return MakeObject({.number = number, .chain_blocks = 1}); }

class DrainTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(node_.Open(TestStorageOptions(directory_.path())).ok());
    ASSERT_TRUE(node_.storage->formats()->Add(testing_support::TestFormat()).ok());
    ASSERT_TRUE(node_.Write(Lone(0)).ok());
    DrainerOptions options;
    options.control_address = control_.address();
    options.node_id = "drained";
    options.retry_nanos = 1'000'000;
    options.recheck_nanos = 1'000'000;
    drainer_ = std::make_unique<Drainer>(
        options, Drainer::Parts{.transport = transport_.get(),
                                .table = node_.storage->table(),
                                .spiller = node_.storage->spiller(),
                                .formats = node_.storage->formats(),
                                .clock = Clock::System(),
                                .epoch = [] { return uint64_t{1}; },
                                .on_damaged = [](const std::string&, const ObjectId&) {},
                                .log = [](const std::string&) {}});
  }
  void TearDown() override {
    drainer_.reset();
    node_.Close();
  }

  const TempDir directory_;
  ScriptedControl control_;
  LoopbackHub hub_;
  const std::unique_ptr<Transport> transport_ = hub_.CreateTransport();
  TestStorage node_;
  std::unique_ptr<Drainer> drainer_;
};

TEST_F(DrainTest, AControlPlaneThatOpensNoSessionIsAskedAgain) {
  v1::Placement placement;
  placement.mutable_node()->set_node_id("peer");
  placement.mutable_node()->set_data_address("127.0.0.1:1");
  control_.SetPlacement(placement);
  control_.SetOpenSessionStatus({grpc::StatusCode::UNAVAILABLE, "not now"});
  drainer_->SetOrder(DrainOrder{.id = 1, .limit_nanos = kLimitNanos, .settle_nanos = 0});
  ASSERT_TRUE(
      control_.WaitFor("sessions", [](const Seen& seen) { return seen.session_calls > 2; }));
  EXPECT_EQ(drainer_->report()->state, DrainReport::State::kRunning);
  EXPECT_EQ(drainer_->report()->objects_left, 1u);
  EXPECT_EQ(drainer_->report()->message, "not now");
}

TEST_F(DrainTest, APutThatIsStillArrivingIsNotDrained) {
  v1::Placement elsewhere;
  elsewhere.set_code(static_cast<int>(absl::StatusCode::kAlreadyExists));
  control_.SetPlacement(elsewhere);
  {
    const WriteClaim arriving = *node_.storage->table()->Claim(Lone(1).id(), std::nullopt);
    drainer_->SetOrder(DrainOrder{.id = 1, .limit_nanos = kLimitNanos, .settle_nanos = 0});
    ASSERT_TRUE(
        control_.WaitFor("passes", [](const Seen& seen) { return seen.reserve_calls > 3; }));
    EXPECT_EQ(drainer_->report()->state, DrainReport::State::kRunning);
    EXPECT_EQ(drainer_->report()->objects_left, 1u);
    EXPECT_EQ(drainer_->report()->message, "puts are still arriving");
  }
  ASSERT_TRUE(control_.WaitFor("the end", [this](const Seen&) {
    return drainer_->report()->state == DrainReport::State::kDone;
  }));
  EXPECT_EQ(drainer_->report()->objects_left, 0u);
}

}  // namespace
}  // namespace okv
