#include "cache_node/serve.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

TEST_F(ServeTest, WhatOneWorkerPutsAnotherFetches) {
  StartNode();
  const TestObject sink = MakeObject({.number = 0, .codec = Codec::kBf16});
  const TestObject history = MakeObject({.number = 1});
  const auto writer = OpenSession();
  EXPECT_TRUE(writer->Put(Offer(sink), sink.payload).ok());
  EXPECT_TRUE(writer->Put(Offer(history), history.payload).ok());
  EXPECT_EQ(committed(), (std::vector<ObjectId>{sink.id(), history.id()}));
  const auto reader = OpenSession();
  const auto delivered = reader->Fetch(Request({history, sink}));
  ExpectDelivered(delivered[0], history);
  ExpectDelivered(delivered[1], sink);
}

TEST_F(ServeTest, ObjectsOfAStoppedNodeComeFromDiskAfterItsRestart) {
  StartNode();
  std::vector<TestObject> objects;
  {
    const auto writer = OpenSession();
    for (uint32_t number = 0; number < 10; ++number) {
      objects.push_back(MakeObject({.number = number, .codec = kCodecs[number % 2]}));
      ASSERT_TRUE(writer->Put(Offer(objects.back()), objects.back().payload).ok());
    }
  }
  StopNode();
  StartNode();
  const auto reader = OpenSession();
  const auto delivered = reader->Fetch(Request(objects));
  for (size_t i = 0; i < objects.size(); ++i) ExpectDelivered(delivered[i], objects[i]);
  const auto again = reader->Fetch(Request(objects));
  for (size_t i = 0; i < objects.size(); ++i) ExpectDelivered(again[i], objects[i]);
  // A reader has its payload before the node counts it.
  EXPECT_TRUE(
      WaitUntil([this] { return node_.Metric("okv_node_fetch_hits_total{tier=\"dram\"}") == 10; }));
  EXPECT_EQ(node_.Metric("okv_node_fetch_hits_total{tier=\"disk\"}"), 10);
  EXPECT_GT(node_.Metric("okv_node_promoted_bytes_total"), 0);
}

TEST_F(ServeTest, AMessageBeforeHelloClosesTheSession) {
  StartNode();
  const auto fetching = Connect();
  fetching->Send(MessageType::kFetchRequest, Request({}).SerializeAsString());
  EXPECT_TRUE(fetching->WaitForClosed());
  const TestObject object = MakeObject({.number = 1});
  const auto putting = Connect();
  putting->Offer(Offer(object), object.payload);
  EXPECT_TRUE(putting->WaitForClosed());
  ExpectNothingStored();
}

TEST_F(ServeTest, ASecondHelloAndBytesThatAreNoMessageCloseTheSession) {
  StartNode();
  const auto twice = OpenSession();
  twice->Send(MessageType::kHello, Hello("tenant", TestFormat()).SerializeAsString());
  EXPECT_TRUE(twice->WaitForClosed());
  const auto garbage = OpenSession();
  garbage->Send(MessageType::kFetchRequest, "\xff\xff\xff\xff");
  EXPECT_TRUE(garbage->WaitForClosed());
}

TEST_F(ServeTest, AWorkerOfAnotherProtocolIsToldBothVersions) {
  StartNode();
  v1::Hello hello = Hello("tenant", TestFormat());
  hello.set_protocol_major(kProtocolMajor + 6);
  const auto worker = Connect();
  const v1::HelloReply reply = worker->Hello(hello);
  EXPECT_EQ(reply.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  for (const uint32_t major : {kProtocolMajor + 6, kProtocolMajor}) {
    const std::string version = absl::StrCat(" ", major, ".", kProtocolMinor);
    EXPECT_TRUE(absl::StrContains(reply.message(), version)) << reply.message();
  }
  clock_.AdvanceNanos(2'000'000'000);
  EXPECT_TRUE(worker->WaitForClosed());
}

TEST_F(ServeTest, TicketsAreChecked) {
  StartNode();
  v1::Hello forged = Hello("tenant", TestFormat());
  forged.set_ticket(SealTicket({.tenant = "tenant",
                                .format_id = TestFormat().id(),
                                .expires_wall_us = clock_.WallMicros() + 1'000'000},
                               "another key"));
  EXPECT_EQ(Connect()->Hello(forged).code(), static_cast<int>(absl::StatusCode::kPermissionDenied));
  v1::Hello expired = Hello("tenant", TestFormat());
  clock_.AdvanceNanos(2'000'000'000'000);
  const v1::HelloReply reply = Connect()->Hello(expired);
  EXPECT_EQ(reply.code(), static_cast<int>(absl::StatusCode::kPermissionDenied));
  EXPECT_TRUE(absl::StrContains(reply.message(), "expired")) << reply.message();
}

TEST_F(ServeTest, WithoutATicketKeyNobodyIsLetIn) {
  ticket_key_ = "";
  StartNode();
  EXPECT_EQ(Connect()->Hello(Hello("tenant", TestFormat())).code(),
            static_cast<int>(absl::StatusCode::kUnavailable));
}

TEST_F(ServeTest, AFormatThatIsNotTheTicketsIsRefusedNamingTheField) {
  StartNode();
  OpenSession();  // The node knows the ticket's format from here.
  v1::Hello hello = Hello("tenant", TestFormat());
  hello.set_format(OtherFormat().Canonical());
  const v1::HelloReply reply = Connect()->Hello(hello);
  EXPECT_EQ(reply.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(absl::StrContains(reply.message(), "rope_theta")) << reply.message();
  hello.set_format("not a format");
  EXPECT_EQ(Connect()->Hello(hello).code(), static_cast<int>(absl::StatusCode::kInvalidArgument));
}

TEST_F(ServeTest, AnObjectOfAnotherFormatIsRefusedNamingTheField) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto writer = OpenSession();
  ASSERT_TRUE(writer->Put(Offer(object), object.payload).ok());

  const auto reader = OpenSession("tenant", OtherFormat());
  v1::FetchRequest request = Request({object});
  const absl::Status of_request = reader->Fetch(request)[0].status;
  EXPECT_TRUE(absl::IsFailedPrecondition(of_request)) << of_request;
  EXPECT_TRUE(absl::StrContains(of_request.message(), "rope_theta")) << of_request;

  request = Request({object});
  request.set_format_id(std::string(OtherFormat().id().view()));
  const absl::Status of_object = reader->Fetch(request)[0].status;
  EXPECT_TRUE(absl::IsFailedPrecondition(of_object)) << of_object;
  EXPECT_TRUE(absl::StrContains(of_object.message(), "rope_theta")) << of_object;

  const TestObject other = MakeObject({.number = 2}, OtherFormat());
  const absl::Status of_put = writer->Put(Offer(other), other.payload);
  EXPECT_TRUE(absl::IsFailedPrecondition(of_put)) << of_put;
  EXPECT_TRUE(absl::StrContains(of_put.message(), "rope_theta")) << of_put;
}

TEST_F(ServeTest, AnotherTenantsObjectIsNotFound) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto writer = OpenSession();
  ASSERT_TRUE(writer->Put(Offer(object), object.payload).ok());
  const auto stranger = OpenSession("stranger");
  EXPECT_TRUE(absl::IsNotFound(stranger->Fetch(Request({object}))[0].status));
}

TEST_F(ServeTest, RequestsOutOfBoundsAreTheCallersBug) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());

  v1::FetchRequest bad_key = Request({object});
  bad_key.mutable_objects(0)->set_key("short");
  EXPECT_TRUE(absl::IsInvalidArgument(worker->Fetch(bad_key)[0].status));
  v1::FetchRequest wrong_index = Request({object});
  wrong_index.mutable_objects(0)->set_index(9);
  EXPECT_TRUE(absl::IsFailedPrecondition(worker->Fetch(wrong_index)[0].status));

  v1::FetchRequest too_many;
  too_many.set_request_id(next_request_++);
  too_many.set_format_id(std::string(TestFormat().id().view()));
  for (uint32_t i = 0; i <= kObjectsPerFetchMax; ++i) too_many.add_objects();
  worker->Send(MessageType::kFetchRequest, too_many.SerializeAsString());
  for (const auto& answer : worker->Answers(too_many.request_id(), kObjectsPerFetchMax)) {
    ASSERT_TRUE(absl::IsInvalidArgument(answer.status)) << answer.status;
  }
  v1::FetchRequest whole = Request({object});
  whole.set_layer_end(2);
  whole.set_head_end(2);
  ExpectDelivered(worker->Fetch(whole)[0], object);
}

TEST_F(ServeTest, AMissIsNotFoundAndTheOthersArrive) {
  StartNode();
  const TestObject held = MakeObject({.number = 1});
  const TestObject missing = MakeObject({.number = 2});
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(held), held.payload).ok());
  const auto delivered = worker->Fetch(Request({missing, held, missing}));
  EXPECT_TRUE(absl::IsNotFound(delivered[0].status));
  ExpectDelivered(delivered[1], held);
  EXPECT_TRUE(absl::IsNotFound(delivered[2].status));
}

TEST_F(ServeTest, ReservationsAreChecked) {
  StartNode();
  const auto worker = OpenSession();
  const TestObject object = MakeObject({.number = 1});
  const auto put = [&](const std::function<void(Reservation*)>& change) {
    Reservation reservation = ReservationFor(object);
    change(&reservation);
    return worker->Put(Offer(reservation, object.header()), object.payload);
  };
  const auto denied = [](const absl::Status& status) { return absl::IsPermissionDenied(status); };
  EXPECT_TRUE(denied(put([](Reservation* r) { r->node_id = "another"; })));
  EXPECT_TRUE(denied(put([](Reservation* r) { r->tenant = "another"; })));
  EXPECT_TRUE(denied(put([](Reservation* r) { r->object.codec = Codec::kBf16; })));
  EXPECT_TRUE(denied(put([](Reservation* r) { r->write_id = WriteId(77); })));
  // Its time is up: another write may have the object by now.
  EXPECT_TRUE(
      absl::IsAborted(put([&](Reservation* r) { r->expires_wall_us = clock_.WallMicros(); })));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(put([](Reservation* r) { r->format_id = OtherFormat().id(); })));
  v1::PutOffer forged = Offer(object);
  forged.set_reservation(SealReservation(ReservationFor(object), "another key"));
  EXPECT_TRUE(denied(worker->Put(forged, object.payload)));
  EXPECT_TRUE(committed().empty());
  ExpectNothingStored();
}

TEST_F(ServeTest, HeadersAndPayloadsAreChecked) {
  StartNode();
  const auto worker = OpenSession();
  const TestObject object = MakeObject({.number = 1});
  const auto put = [&](const std::function<void(ObjectHeader*)>& change,
                       absl::Span<const uint8_t> payload) {
    ObjectHeader header = object.header();
    change(&header);
    return worker->Put(Offer(ReservationFor(object), header), payload);
  };
  const auto unchanged = [](ObjectHeader*) {};
  EXPECT_TRUE(
      absl::IsInvalidArgument(put(unchanged, absl::MakeConstSpan(object.payload).subspan(1))));
  EXPECT_TRUE(
      absl::IsInvalidArgument(put([](ObjectHeader* h) { h->payload_bytes += 1; }, object.payload)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      put([](ObjectHeader* h) { h->checksums.pop_back(); }, object.payload)));
  EXPECT_TRUE(
      absl::IsInvalidArgument(put([](ObjectHeader* h) { h->parent.reset(); }, object.payload)));
  EXPECT_TRUE(absl::IsDataLoss(put([](ObjectHeader* h) { h->checksums[3] ^= 1; }, object.payload)));
  std::vector<uint8_t> flipped = object.payload;
  flipped[5000] ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(put(unchanged, flipped)));
  v1::PutOffer damaged = Offer(object);
  damaged.mutable_object_header()->back() ^= 1;
  EXPECT_TRUE(absl::IsDataLoss(worker->Put(damaged, object.payload)));
  EXPECT_TRUE(committed().empty());
  ExpectNothingStored();
}

TEST_F(ServeTest, AnObjectIsWrittenOnce) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto worker = OpenSession();
  EXPECT_TRUE(worker->Put(Offer(object), object.payload).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(worker->Put(Offer(object), object.payload)));

  const TestObject other = MakeObject({.number = 2});
  const absl::StatusOr<WriteClaim> claim =
      node_.storage->table()->Claim(other.id(), other.header().parent);
  EXPECT_TRUE(absl::IsAborted(worker->Put(Offer(other), other.payload)));
  EXPECT_EQ(committed().size(), 1u);
}

TEST_F(ServeTest, AWriterThatVanishesLeavesNothing) {
  StartNode();
  const TestObject object = MakeObject({.number = 1, .codec = Codec::kBf16});
  for (int round = 0; round < 20; ++round) {
    OpenSession()->OfferAndVanish(Offer(object), object.payload);
    EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
    if (!committed().empty()) break;  // It was faster than the close.
    ExpectNothingStored();
  }
}

TEST_F(ServeTest, AWriterThatVanishesWhileItWaitsForRoomLeavesNothing) {
  StartNode();
  Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);
  const TestObject object = MakeObject({.number = 1});
  {
    const auto worker = OpenSession();
    worker->Offer(Offer(object), object.payload);
    EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().claims_count == 1; }));
  }
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
  all = Extent();
  ExpectNothingStored();
}

TEST_F(ServeTest, APutWithoutRoomIsResourceExhaustedInTheEnd) {
  StartNode();
  const Extent all = *node_.AllocateAndWait(uint64_t{4} << 20);
  const TestObject object = MakeObject({.number = 1});
  const auto worker = OpenSession();
  const v1::PutOffer offer = Offer(object);
  worker->Offer(offer, object.payload);
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->spiller()->waiters_count() == 1; }));
  clock_.AdvanceNanos(SpillerOptions().allocate_wait_nanos);
  EXPECT_TRUE(absl::IsResourceExhausted(worker->PutAnswer(offer.request_id())));
  EXPECT_EQ(node_.storage->table()->stats().claims_count, 0u);
}

TEST_F(ServeTest, ManyObjectsPassThroughFewPlaces) {
  StartNode({.bulks_per_session_max = 2, .bulks_max = 3});
  std::vector<TestObject> objects;
  const auto first = OpenSession();
  const auto second = OpenSession();
  for (uint32_t number = 0; number < 50; ++number) {
    objects.push_back(MakeObject({.number = number}));
    ASSERT_TRUE(first->Put(Offer(objects.back()), objects.back().payload).ok());
  }
  const v1::FetchRequest request = Request(objects);
  first->Send(MessageType::kFetchRequest, request.SerializeAsString());
  const auto to_second = second->Fetch(Request(objects));
  const auto to_first = first->Answers(request.request_id(), objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    ExpectDelivered(to_first[i], objects[i]);
    ExpectDelivered(to_second[i], objects[i]);
  }
}

TEST_F(ServeTest, WhatWaitsPastItsDeadlineIsDeadlineExceeded) {
  StartNode({.bulks_per_session_max = 1, .bulks_max = 1});
  const TestObject a = MakeObject({.number = 1});
  const TestObject b = MakeObject({.number = 2});
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(a), a.payload).ok());
  ASSERT_TRUE(worker->Put(Offer(b), b.payload).ok());
  worker->HoldDeliveries();
  const v1::FetchRequest request = Request({a, b}, /*deadline_us=*/1000);
  worker->Send(MessageType::kFetchRequest, request.SerializeAsString());
  ASSERT_TRUE(worker->WaitForHeld(1));
  clock_.AdvanceNanos(1'000'000);
  EXPECT_TRUE(WaitUntil([&] { return worker->AnswersCount(request.request_id()) == 1; }));
  worker->ReceiveHeld();
  const auto delivered = worker->Answers(request.request_id(), 2);
  ExpectDelivered(delivered[0], a);
  EXPECT_TRUE(absl::IsDeadlineExceeded(delivered[1].status)) << delivered[1].status;
}

TEST_F(ServeTest, AReaderThatStallsLosesItsSessionAndItsPins) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
  worker->HoldDeliveries();
  worker->Send(MessageType::kFetchRequest,
               Request({object}, /*deadline_us=*/1000).SerializeAsString());
  ASSERT_TRUE(worker->WaitForHeld(1));
  EXPECT_EQ(node_.storage->table()->stats().pins_count, 1u);
  clock_.AdvanceNanos(1'000'000 + DataPlaneOptions().stall_nanos + 1);
  EXPECT_TRUE(worker->WaitForClosed());
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().pins_count == 0; }));
}

TEST_F(ServeTest, APeerThatSaysNothingIsClosed) {
  StartNode();
  const auto worker = Connect();
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 1; }));
  clock_.AdvanceNanos(DataPlaneOptions().hello_nanos_max + 1);
  EXPECT_TRUE(worker->WaitForClosed());
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 0; }));
}

TEST_F(ServeTest, SessionsAreLimited) {
  StartNode({.sessions_max = 2});
  const auto first = OpenSession();
  {
    const auto second = OpenSession();
    EXPECT_TRUE(Connect()->WaitForClosed());
  }
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 1; }));
  OpenSession();
}

TEST_F(ServeTest, StoppingInTheMiddleOfTransfersLeavesNoPins) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
  worker->HoldDeliveries();
  worker->Send(MessageType::kFetchRequest, Request({object}).SerializeAsString());
  ASSERT_TRUE(worker->WaitForHeld(1));
  StopNode();  // The table checks its pins when it goes.
  EXPECT_TRUE(worker->WaitForClosed());
}

TEST_F(ServeTest, MetricsEqualTheWorkload) {
  StartNode();
  const TestObject int2 = MakeObject({.number = 1});
  const TestObject bf16 = MakeObject({.number = 0, .codec = Codec::kBf16});
  {
    const auto worker = OpenSession();
    ASSERT_TRUE(worker->Put(Offer(int2), int2.payload).ok());
  }
  StopNode();
  StartNode();  // int2 is on disk now.
  // The registry outlives the restart: counters go on, gauges are the new table's.
  const auto worker = OpenSession();
  ASSERT_TRUE(worker->Put(Offer(bf16), bf16.payload).ok());
  EXPECT_FALSE(worker->Put(Offer(bf16), bf16.payload).ok());
  std::vector<uint8_t> flipped = bf16.payload;
  flipped[1] ^= 1;
  const TestObject bad = MakeObject({.number = 5, .codec = Codec::kBf16});
  EXPECT_FALSE(worker->Put(Offer(bad), flipped).ok());
  worker->Fetch(Request({int2, bf16, bad}));
  worker->Fetch(Request({int2}));
  OpenSession("stranger")->Fetch(Request({int2}));
  v1::FetchRequest part = Request({int2});
  part.set_layer_begin(1);
  worker->Fetch(part);
  EXPECT_TRUE(WaitUntil([this] { return data_plane_->sessions_count() == 1; }));
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->table()->stats().pins_count == 0; }));

  EXPECT_EQ(node_.Metric("okv_node_put_total{code=\"OK\"}"), 2);
  EXPECT_EQ(node_.Metric("okv_node_put_total{code=\"ALREADY_EXISTS\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_put_total{code=\"DATA_LOSS\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_hits_total{tier=\"disk\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_hits_total{tier=\"dram\"}"), 2);
  EXPECT_EQ(node_.Metric("okv_node_fetch_misses_total{reason=\"not_held\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_misses_total{reason=\"other_tenant\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_failures_total{code=\"INVALID_ARGUMENT\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_failures_total{code=\"NOT_FOUND\"}"), -1);
  EXPECT_EQ(node_.Metric("okv_node_fetch_seconds_count"), 3);
  // Two puts, one with bad bytes, one before the restart; one spill; one promotion.
  EXPECT_EQ(node_.Metric("okv_node_verify_seconds_count"), 5);
  EXPECT_EQ(node_.Metric("okv_node_spilled_bytes_total"), 10'240);
  EXPECT_EQ(node_.Metric("okv_node_promoted_bytes_total"), 10'240);
  EXPECT_EQ(node_.Metric("okv_node_stored_bytes{codec=\"int2\"}"), 10'240);
  EXPECT_EQ(node_.Metric("okv_node_stored_bytes{codec=\"bf16\"}"), 65'536);
  EXPECT_EQ(node_.Metric("okv_node_logical_bytes{codec=\"int2\"}"), 65'536);
  EXPECT_EQ(node_.Metric("okv_node_logical_bytes{codec=\"bf16\"}"), 65'536);
  EXPECT_EQ(node_.Metric("okv_node_objects{tier=\"dram\",codec=\"int2\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_objects{tier=\"disk\",codec=\"int2\"}"), 1);
  EXPECT_EQ(node_.Metric("okv_node_objects{tier=\"disk\",codec=\"bf16\"}"), 0);
  EXPECT_EQ(node_.Metric("okv_node_tier_capacity_bytes{tier=\"dram\"}"), 4 << 20);
  EXPECT_EQ(node_.Metric("okv_node_tier_used_bytes{tier=\"dram\"}"), 12'288 + 65'536);
  EXPECT_EQ(node_.Metric("okv_node_corrupt_objects_total{tier=\"disk\"}"), 0);
  EXPECT_EQ(node_.Metric("okv_node_pins"), 0);
}

}  // namespace
}  // namespace okv::testing_support
