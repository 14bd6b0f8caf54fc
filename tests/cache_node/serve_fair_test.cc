#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

class ServeFairTest : public ServeTest {
 protected:
  std::vector<TestObject> PutSome(uint32_t count) {
    std::vector<TestObject> objects;
    const auto writer = OpenSession();
    for (uint32_t number = 0; number < count; ++number) {
      objects.push_back(MakeObject({.number = number}));
      EXPECT_TRUE(writer->Put(Offer(objects.back()), objects.back().payload).ok());
    }
    return objects;
  }
  // `count` objects, of these again and again.
  v1::FetchRequest ManyOf(const std::vector<TestObject>& objects, size_t count,
                          int64_t deadline_us = 0) {
    std::vector<TestObject> many;
    for (size_t i = 0; i < count; ++i) many.push_back(objects[i % objects.size()]);
    return Request(many, deadline_us);
  }
  uint64_t pins() { return node_.storage->table()->stats().pins_count; }
};

TEST_F(ServeFairTest, OneObjectWaitsBehindAtMostOneTurnOfAGreedySession) {
  StartNode({.bulks_per_session_max = 1, .bulks_max = 1});
  const std::vector<TestObject> objects = PutSome(10);
  const auto greedy = OpenSession();
  const auto modest = OpenSession();
  size_t greedy_count = 0;  // Of the workers' transport thread, as the others.
  size_t asked_at = 0;
  size_t between = 0;
  greedy->set_on_delivery([&] { ++greedy_count; });
  modest->set_on_delivery([&] { between = greedy_count - asked_at; });
  const v1::FetchRequest many = ManyOf(objects, kObjectsPerFetchMax);
  greedy->Send(MessageType::kFetchRequest, many.SerializeAsString());
  size_t rounds = 0;
  while (greedy->AnswersCount(many.request_id()) < 3000) {
    const TestObject& object = objects[rounds++ % objects.size()];
    const v1::FetchRequest one = Request({object});
    modest->OnTransport([&] {
      asked_at = greedy_count;
      modest->SendNow(MessageType::kFetchRequest, one.SerializeAsString());
    });
    ExpectDelivered(modest->Answers(one.request_id(), 1)[0], object);
    // One that was on its way to the reader when it asked, one whose turn had begun when the node
    // read the request, and one turn.
    size_t seen = 0;
    modest->OnTransport([&] { seen = between; });
    EXPECT_LE(seen, 3u);
  }
  EXPECT_GT(rounds, 1u);
  greedy->Answers(many.request_id(), kObjectsPerFetchMax);
}

TEST_F(ServeFairTest, SessionsThatDoNotReadHoldTheirBoundsAndNobodyElseUp) {
  const DataPlaneOptions options = {.bulks_per_session_max = 2, .bulks_max = 4};
  StartNode(options);
  const std::vector<TestObject> objects = PutSome(10);
  std::vector<std::unique_ptr<TestWorker>> stopped;
  // Two take every place; each later one gets the one that every session may have.
  const size_t held[] = {2, 2, 1, 1, 1};
  uint64_t pins_expected = 0;
  for (const size_t held_count : held) {
    stopped.push_back(OpenSession());
    stopped.back()->HoldDeliveries();
    stopped.back()->Send(MessageType::kFetchRequest, ManyOf(objects, 3000).SerializeAsString());
    ASSERT_TRUE(stopped.back()->WaitForHeld(held_count));
    pins_expected += held_count;
    EXPECT_EQ(pins(), pins_expected);
  }
  const auto modest = OpenSession();
  for (const TestObject& object : objects) {
    ExpectDelivered(modest->Fetch(Request({object}))[0], object);
  }
  // And many at once, one after the other.
  const auto delivered = modest->Fetch(ManyOf(objects, 200));
  for (size_t i = 0; i < delivered.size(); ++i) {
    ExpectDelivered(delivered[i], objects[i % objects.size()]);
  }
  EXPECT_TRUE(WaitUntil([&] { return pins() == pins_expected; }));
  // Without a deadline of their own the node's is the limit, and a while to end.
  clock_.AdvanceNanos(options.fetch_nanos_max + options.stall_nanos + 1);
  for (const auto& worker : stopped) EXPECT_TRUE(worker->WaitForClosed());
  EXPECT_TRUE(WaitUntil([&] { return pins() == 0 && data_plane_->sessions_count() == 1; }));
  ExpectDelivered(modest->Fetch(Request({objects[0]}))[0], objects[0]);
}

TEST_F(ServeFairTest, ReadsThatWaitForTheDiskEndWithTheirSession) {
  const std::vector<TestObject> objects = [this] {
    StartNode();
    return PutSome(40);
  }();
  for (int round = 0; round < 5; ++round) {
    StopNode();
    StartNode({.disk_threads = 1});
    const auto modest = OpenSession();
    {
      const auto greedy = OpenSession();
      greedy->Send(MessageType::kFetchRequest, Request(objects).SerializeAsString());
      ExpectDelivered(modest->Fetch(Request({objects[39]}))[0], objects[39]);
    }
    EXPECT_TRUE(WaitUntil([&] { return pins() == 0 && data_plane_->sessions_count() == 1; }));
    // No place is lost.
    const auto delivered = modest->Fetch(Request(objects));
    for (size_t i = 0; i < objects.size(); ++i) ExpectDelivered(delivered[i], objects[i]);
  }
}

TEST_F(ServeFairTest, AReadThatHasNotBegunByItsDeadlineIsNotDone) {
  StartNode();
  const std::vector<TestObject> objects = PutSome(10);
  StopNode();
  StartNode({.bulks_per_session_max = 4096, .bulks_max = 4096, .disk_threads = 1});
  const Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);  // Nothing comes up for good.
  const auto worker = OpenSession();
  // The reads are far slower than this thread, unless something keeps it from running.
  const auto some_were_late = [&] {
    const v1::FetchRequest request = ManyOf(objects, 2000, /*deadline_us=*/1000);
    worker->Send(MessageType::kFetchRequest, request.SerializeAsString());
    EXPECT_TRUE(WaitUntil([&] { return worker->AnswersCount(request.request_id()) > 0; }));
    clock_.AdvanceNanos(1'000'000);
    size_t late_count = 0;
    const auto delivered = worker->Answers(request.request_id(), 2000);
    for (size_t i = 0; i < delivered.size(); ++i) {
      if (delivered[i].status.ok()) {
        EXPECT_TRUE(delivered[i].payload == objects[i % objects.size()].payload);
      } else {
        EXPECT_TRUE(absl::IsDeadlineExceeded(delivered[i].status)) << delivered[i].status;
        late_count += absl::StrContains(delivered[i].status.message(), "before it was read");
      }
    }
    return late_count > 0;
  };
  EXPECT_TRUE(WaitUntil(some_were_late));
  EXPECT_TRUE(WaitUntil([&] { return pins() == 0; }));
}

}  // namespace
}  // namespace okv::testing_support
