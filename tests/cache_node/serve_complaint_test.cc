#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

class ServeComplaintTest : public ServeTest {
 protected:
  void Complain(TestWorker* worker, const TestObject& object) {
    v1::Complaint complaint;
    complaint.set_key(std::string(object.id().key.view()));
    complaint.set_codec(static_cast<v1::CodecId>(object.id().codec));
    complaint.set_message("wrong checksum in layer 0, head 0");
    worker->Send(MessageType::kComplaint, complaint.SerializeAsString());
  }
  double Complaints(const std::string& verdict) const {
    return node_.Metric("okv_node_complaints_total{verdict=\"" + verdict + "\"}");
  }
  bool WaitForComplaints(const std::string& verdict, double count) {
    return WaitUntil([=, this] { return Complaints(verdict) == count; });
  }
  double Corrupt(const std::string& tier) const {
    return node_.Metric("okv_node_corrupt_objects_total{tier=\"" + tier + "\"}");
  }
  void Put(const TestObject& object) {
    const auto worker = OpenSession();
    ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
  }
  // Puts the object, brings it to disk and up again.
  void PutInBothTiers(const TestObject& object) {
    Put(object);
    StopNode();
    StartNode();
    const auto worker = OpenSession();
    ExpectDelivered(worker->Fetch(Request({object}))[0], object);
    EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().pins_count == 0; }));
  }
  void FlipInDram(const TestObject& object) {
    const ObjectPin pin = *node_.storage->table()->Pin(object.id());
    const_cast<uint8_t*>(pin.dram().data())[object.payload.size() / 3] ^= 0x20;
  }
  // What the worker of a complaint that is true sees from then on.
  void ExpectGone(TestWorker* worker, const TestObject& object) {
    EXPECT_TRUE(WaitUntil([this] { return removed().size() == 1; }));
    EXPECT_EQ(removed(), std::vector<ObjectId>{object.id()});
    EXPECT_TRUE(absl::IsNotFound(worker->Fetch(Request({object}))[0].status));
    ExpectNothingStored();
  }
};

TEST_F(ServeComplaintTest, AnUnfoundedComplaintIsCountedAndTheObjectStays) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("unfounded", 1));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_EQ(Corrupt("dram"), 0);
  EXPECT_EQ(Corrupt("disk"), 0);
  EXPECT_TRUE(removed().empty());
}

TEST_F(ServeComplaintTest, ABadCopyThatIsTheOnlyOneGoesAndIsReported) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  Put(object);
  FlipInDram(object);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  ExpectGone(worker.get(), object);
  EXPECT_EQ(Corrupt("dram"), 1);
  Put(object);  // Nothing of it keeps it from being written again.
}

TEST_F(ServeComplaintTest, ABadDramCopyGoesAndTheDisksServes) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  FlipInDram(object);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->pool()->used_bytes() == 0; }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_EQ(Corrupt("dram"), 1);
  EXPECT_EQ(Corrupt("disk"), 0);
  EXPECT_TRUE(removed().empty());
}

TEST_F(ServeComplaintTest, ABadDramCopyThatIsBeingReadGoesWhenItsReaderHas) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  FlipInDram(object);
  const auto reader = OpenSession();
  reader->HoldDeliveries();
  const v1::FetchRequest request = Request({object});
  reader->Send(MessageType::kFetchRequest, request.SerializeAsString());
  ASSERT_TRUE(reader->WaitForHeld(1));
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  EXPECT_GT(node_.storage->pool()->used_bytes(), 0u);
  reader->ReceiveHeld();
  reader->Answers(request.request_id(), 1);
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->pool()->used_bytes() == 0; }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
}

TEST_F(ServeComplaintTest, ABadDiskCopyGoesAndTheOneInDramStays) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  disk_->Flip(object.id());
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  const auto disk_objects = [this] {
    return node_.storage->table()->stats().codecs[0].disk_objects;
  };
  EXPECT_TRUE(WaitUntil(
      [&] { return disk_objects() == 0 && node_.storage->table()->stats().objects_count == 1; }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_EQ(Corrupt("disk"), 1);
  EXPECT_EQ(Corrupt("dram"), 0);
  EXPECT_TRUE(removed().empty());
  StopNode();
  StartNode();  // The next spill wrote it anew.
  const auto reader = OpenSession();
  ExpectDelivered(reader->Fetch(Request({object}))[0], object);
}

TEST_F(ServeComplaintTest, ABadDiskCopyIsReplacedWhenTheReadersOfTheGoodOneHaveLeft) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  disk_->Flip(object.id());
  const auto reader = OpenSession();
  reader->HoldDeliveries();
  const v1::FetchRequest request = Request({object});
  reader->Send(MessageType::kFetchRequest, request.SerializeAsString());
  ASSERT_TRUE(reader->WaitForHeld(1));
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  reader->ReceiveHeld();
  ExpectDelivered(reader->Answers(request.request_id(), 1)[0], object);
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().objects_count == 1; }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
}

TEST_F(ServeComplaintTest, ACopyThatMovesOnDiskWhileItIsLookedForIsLookedForAgain) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  disk_->AnswerOnce([&] {
    const ObjectPin pin = *node_.storage->table()->Pin(object.id());
    const auto stored = node_.storage->disk()->Store(
        {{.object = pin.object_ref(), .payload = object.payload}}, [](size_t) { return true; });
    EXPECT_TRUE(stored.ok() && stored->synced.ok());
    node_.storage->table()->MarkOnDisk(pin, stored->places[0]);
    return absl::DataLossError("the file of its old place is gone");
  });
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("unfounded", 1));
  EXPECT_EQ(Corrupt("disk"), 0);
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
}

TEST_F(ServeComplaintTest, AStopPutsAGoodCopyBackThatWaitedForReaders) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  disk_->Flip(object.id());
  const auto worker = OpenSession();
  ObjectPin reader = *node_.storage->table()->Pin(object.id());
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().objects_count == 0; }));
  reader.Release();
  StopNode();
  StartNode();
  const auto later = OpenSession();
  ExpectDelivered(later->Fetch(Request({object}))[0], object);
}

TEST_F(ServeComplaintTest, WithEveryCopyBadTheObjectGoes) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  FlipInDram(object);
  disk_->Flip(object.id());
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("confirmed", 1));
  ExpectGone(worker.get(), object);
  EXPECT_EQ(Corrupt("dram"), 1);
  EXPECT_EQ(Corrupt("disk"), 1);
}

TEST_F(ServeComplaintTest, ATenantsComplaintsAreLimitedAndTheLimitComesBack) {
  StartNode({.recheck = {.complaints_max = 3, .refill_nanos = 1'000'000'000, .queue_max = 256}});
  std::vector<TestObject> objects;
  for (uint32_t number = 0; number < 10; ++number) {
    objects.push_back(MakeObject({.number = number}));
    Put(objects.back());
  }
  const auto worker = OpenSession();
  for (const TestObject& object : objects) Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaints("not_checked", 7));
  EXPECT_TRUE(WaitForComplaints("unfounded", 3));
  clock_.AdvanceNanos(1'000'000'000);
  Complain(worker.get(), objects[5]);
  EXPECT_TRUE(WaitForComplaints("unfounded", 4));
  // A new session is no new limit.
  Complain(OpenSession().get(), objects[6]);
  EXPECT_TRUE(WaitForComplaints("not_checked", 8));
}

TEST_F(ServeComplaintTest, ComplaintsThatAreTrueCostNothing) {
  StartNode({.recheck = {.complaints_max = 1, .refill_nanos = 1'000'000'000, .queue_max = 256}});
  const auto worker = OpenSession();
  for (uint32_t number = 0; number < 10; ++number) {
    const TestObject object = MakeObject({.number = number});
    Put(object);
    FlipInDram(object);
    Complain(worker.get(), object);
    EXPECT_TRUE(WaitUntil([&] { return removed().size() == number + 1; }));
  }
  EXPECT_EQ(Complaints("confirmed"), 10);
}

TEST_F(ServeComplaintTest, AnotherTenantsObjectIsAsOneThatIsNotHere) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  Put(object);
  FlipInDram(object);
  Complain(OpenSession("stranger").get(), object);
  Complain(OpenSession("stranger").get(), MakeObject({.number = 2}));
  EXPECT_TRUE(WaitForComplaints("not_held", 2));
  EXPECT_EQ(node_.storage->table()->stats().objects_count, 1u);
}

TEST_F(ServeComplaintTest, TransfersGoOnWhileACopyIsChecked) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  PutInBothTiers(object);
  disk_->HoldReads(true);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(disk_->WaitForHeldRead());
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_EQ(Complaints("unfounded"), 0);
  disk_->HoldReads(false);
  EXPECT_TRUE(WaitForComplaints("unfounded", 1));
}

TEST_F(ServeComplaintTest, AComplaintThatIsNoneClosesTheSession) {
  StartNode();
  const auto garbage = OpenSession();
  garbage->Send(MessageType::kComplaint, "\xff\xff\xff");
  EXPECT_TRUE(garbage->WaitForClosed());
  const auto nameless = OpenSession();
  nameless->Send(MessageType::kComplaint, v1::Complaint().SerializeAsString());
  EXPECT_TRUE(nameless->WaitForClosed());
  const auto early = Connect();
  Complain(early.get(), MakeObject({.number = 1}));
  EXPECT_TRUE(early->WaitForClosed());
}

}  // namespace
}  // namespace okv::testing_support
