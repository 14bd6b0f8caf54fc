#include "cache_node/membership.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "proto/data_plane.h"
#include "tests/cache_node/objects.h"
#include "tests/cache_node/scripted_control.h"

namespace okv {
namespace {

using std::chrono::milliseconds;
using testing_support::MakeObject;
using testing_support::ScriptedControl;
using testing_support::TestObject;
using Seen = ScriptedControl::Seen;

// A membership over a list of objects that the test keeps, as a table would.
class MembershipTest : public testing::Test {
 protected:
  std::unique_ptr<Membership> Make(const std::string& control_address, size_t reports_max = 1000) {
    MembershipOptions options;
    options.control_address = control_address;
    options.node_id = "node";
    options.data_address = "127.0.0.1:1";
    options.metrics_address = "127.0.0.1:2";
    options.backoff_min = milliseconds(5);
    options.backoff_max = milliseconds(20);
    options.objects_per_message = 3;
    options.reports_max = reports_max;
    EXPECT_TRUE(options.Validate().ok());
    return std::make_unique<Membership>(
        options,
        Membership::Parts{.tiers =
                              [] {
                                return std::vector<std::pair<std::string, TierStats>>{
                                    {"dram",
                                     {.capacity_bytes = 10, .used_bytes = 5, .objects_count = 1}}};
                              },
                          .objects =
                              [this] {
                                MutexLock lock(&mu_);
                                std::vector<ObjectRef> objects;
                                for (const auto& [id, object] : held_) objects.push_back(object);
                                return objects;
                              },
                          .log =
                              [this](const std::string& line) {
                                MutexLock lock(&mu_);
                                log_.push_back(line);
                              }});
  }
  void Hold(Membership* membership, uint32_t number) {
    const TestObject object = MakeObject({.number = number, .write_id = number + 100});
    {
      MutexLock lock(&mu_);
      held_[object.id()] = object.object;
    }
    if (membership != nullptr) membership->Committed(object.object);
  }
  void Drop(Membership* membership, uint32_t number) {
    const ObjectId id = MakeObject({.number = number}).id();
    {
      MutexLock lock(&mu_);
      held_.erase(id);
    }
    membership->Removed(id);
  }
  // The control plane knows exactly what the node holds.
  bool WaitUntilEqual(ScriptedControl* control) {
    std::map<std::pair<std::string, int>, uint64_t> expected;
    {
      MutexLock lock(&mu_);
      for (const auto& [id, object] : held_) {
        expected[{std::string(id.key.view()), static_cast<int>(id.codec)}] =
            object->header.generation;
      }
    }
    return control->WaitFor("the index to equal the table",
                            [&](const Seen& seen) { return seen.held == expected; });
  }
  std::string log() {
    MutexLock lock(&mu_);
    return absl::StrJoin(log_, "\n");
  }

 private:
  Mutex mu_;
  std::map<ObjectId, ObjectRef> held_;
  std::vector<std::string> log_;
};

TEST_F(MembershipTest, RegistersWithItsAddressesAndInventory) {
  ScriptedControl control;
  for (uint32_t number = 0; number < 10; ++number) Hold(nullptr, number);
  const auto membership = Make(control.address());
  EXPECT_EQ(membership->ticket_key(), "");
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  EXPECT_EQ(membership->ticket_key(), "the ticket key");
  EXPECT_TRUE(WaitUntilEqual(&control));
  const v1::RegisterNodeRequest request = control.seen().last_registration;
  EXPECT_EQ(request.node_id(), "node");
  EXPECT_EQ(request.data_address(), "127.0.0.1:1");
  EXPECT_EQ(request.metrics_address(), "127.0.0.1:2");
  EXPECT_EQ(request.protocol_major(), kProtocolMajor);
  ASSERT_EQ(request.tiers_size(), 1);
  EXPECT_EQ(request.tiers(0).capacity_bytes(), 10u);
  EXPECT_TRUE(control.WaitFor("heartbeats", [](const Seen& seen) { return seen.heartbeats >= 3; }));
}

TEST_F(MembershipTest, CommitsAndRemovalsArriveInOrder) {
  ScriptedControl control;
  const auto membership = Make(control.address());
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  for (uint32_t number = 0; number < 20; ++number) Hold(membership.get(), number);
  for (uint32_t number = 0; number < 20; number += 2) Drop(membership.get(), number);
  for (uint32_t number = 0; number < 20; number += 4) Hold(membership.get(), number);
  EXPECT_TRUE(membership->Drain(milliseconds(10'000)));
  EXPECT_TRUE(WaitUntilEqual(&control));
  EXPECT_EQ(control.seen().inventories, 1);
}

TEST_F(MembershipTest, AReportIsRepeatedUntilItIsAcknowledged) {
  ScriptedControl control;
  const auto membership = Make(control.address());
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  control.FailCommits(3, {grpc::StatusCode::UNAVAILABLE, "not now"});
  Hold(membership.get(), 1);
  EXPECT_TRUE(membership->Drain(milliseconds(10'000)));
  EXPECT_TRUE(WaitUntilEqual(&control));
  EXPECT_GE(control.seen().commit_calls, 4);
  EXPECT_EQ(control.seen().registrations, 1);
  EXPECT_TRUE(absl::StrContains(log(), "not now")) << log();
}

TEST_F(MembershipTest, AForgottenNodeRegistersAgainWithItsInventory) {
  ScriptedControl control;
  const auto membership = Make(control.address());
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  Hold(membership.get(), 1);
  Hold(membership.get(), 2);
  EXPECT_TRUE(membership->Drain(milliseconds(10'000)));
  control.ForgetNode();  // The next heartbeat, or report, says so.
  EXPECT_TRUE(control.WaitFor("a second registration",
                              [](const Seen& seen) { return seen.inventories >= 2; }));
  EXPECT_TRUE(WaitUntilEqual(&control));
  control.ForgetNode();
  Hold(membership.get(), 3);
  EXPECT_TRUE(WaitUntilEqual(&control));
}

TEST_F(MembershipTest, AnotherControlPlaneOnTheSameAddressLearnsEverything) {
  auto control = std::make_unique<ScriptedControl>();
  const std::string address = control->address();
  const auto membership = Make(address);
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  Hold(membership.get(), 1);
  EXPECT_TRUE(membership->Drain(milliseconds(10'000)));
  control.reset();
  Hold(membership.get(), 2);  // Nobody to tell; nothing blocks.
  EXPECT_FALSE(membership->Drain(milliseconds(1)));
  EXPECT_EQ(membership->ticket_key(), "the ticket key") << "reads need it meanwhile";
  control = std::make_unique<ScriptedControl>(address);
  EXPECT_TRUE(WaitUntilEqual(control.get()));
  EXPECT_TRUE(absl::StrContains(log(), "cannot be used")) << log();
}

TEST_F(MembershipTest, MoreReportsThanFitBecomeAnInventory) {
  ScriptedControl control;
  const auto membership = Make(control.address(), /*reports_max=*/5);
  ASSERT_TRUE(membership->Start(milliseconds(10'000)).ok());
  control.FailCommits(1'000'000, {grpc::StatusCode::UNAVAILABLE, "not now"});
  // No commit gets through, so what the index learns of these it learns from an inventory.
  for (uint32_t number = 0; number < 50; ++number) Hold(membership.get(), number);
  EXPECT_TRUE(control.WaitFor("an inventory in place of the reports",
                              [](const Seen& seen) { return seen.inventories >= 2; }));
  // It may have been taken between two of them: the last few can be reports again.
  control.FailCommits(0, grpc::Status::OK);
  EXPECT_TRUE(WaitUntilEqual(&control));
}

TEST_F(MembershipTest, AnAbsentControlPlaneIsNamedWhenTheTimeIsUp) {
  std::string address;
  {
    ScriptedControl control;
    address = control.address();
  }
  const auto membership = Make(address);
  const absl::Status status = membership->Start(milliseconds(200));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), address)) << status;
}

TEST_F(MembershipTest, ARefusalEndsTheStartAtOnce) {
  ScriptedControl control;
  control.SetRegisterStatus({grpc::StatusCode::FAILED_PRECONDITION, "protocol 1.0 is too old"});
  const auto membership = Make(control.address());
  const absl::Status status = membership->Start(milliseconds(60'000));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "protocol 1.0 is too old")) << status;
}

TEST_F(MembershipTest, ABusyControlPlaneIsTriedAgain) {
  ScriptedControl control;
  control.SetRegisterStatus({grpc::StatusCode::UNAVAILABLE, "starting"});
  const auto membership = Make(control.address());
  EXPECT_TRUE(absl::IsUnavailable(membership->Start(milliseconds(100))));
  control.SetRegisterStatus(grpc::Status::OK);
  const auto second = Make(control.address());
  EXPECT_TRUE(second->Start(milliseconds(10'000)).ok());
}

}  // namespace
}  // namespace okv
