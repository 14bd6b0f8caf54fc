// The data plane over an HBM tier. The transport of these tests copies by address, so that the
// device is not fenced.

#include <algorithm>
#include <future>
#include <list>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "client/node_session.h"
#include "gtest/gtest.h"
#include "tests/cache_node/ranges.h"
#include "tests/cache_node/serve_fixture.h"

namespace okv::testing_support {
namespace {

class ServeHbmTest : public ServeTest {
 protected:
  ServeHbmTest() { hbm_bytes_ = uint64_t{4} << 20; }

  ObjectPin Pin(const TestObject& object) { return *node_.storage->table()->Pin(object.id()); }
  void Put(const TestObject& object, const Format& format = TestFormat()) {
    const auto worker = OpenSession("tenant", format);
    ASSERT_TRUE(worker->Put(Offer(object), object.payload).ok());
  }
  // The object gets a copy in DRAM, too.
  void CopyToDram(const TestObject& object) {
    const ObjectPin pin = Pin(object);
    Extent extent = *node_.AllocateAndWait(object.payload.size());
    std::copy(object.payload.begin(), object.payload.end(), extent.span().data());
    node_.storage->table()->AttachDram(pin, std::move(extent));
  }
  // In DRAM, with a copy on disk.
  DiskPlace ToDiskToo(const TestObject& object) {
    OKV_CHECK(node_.Write(object).ok());
    const ObjectPin pin = Pin(object);
    const auto stored = node_.storage->disk()->Store(
        {{.object = object.object, .payload = pin.dram()}}, [](size_t) { return true; });
    OKV_CHECK(stored.ok() && stored->synced.ok());
    node_.storage->table()->MarkOnDisk(pin, stored->places[0]);
    return stored->places[0];
  }
  void Complain(TestWorker* worker, const TestObject& object) {
    v1::Complaint complaint;
    complaint.set_key(std::string(object.id().key.view()));
    complaint.set_codec(static_cast<v1::CodecId>(object.id().codec));
    worker->Send(MessageType::kComplaint, complaint.SerializeAsString());
  }
  bool WaitForComplaint(const std::string& verdict) {
    return WaitUntil([=, this] {
      return node_.Metric("okv_node_complaints_total{verdict=\"" + verdict + "\"}") == 1;
    });
  }
  double Hits(const std::string& tier) {
    return node_.Metric("okv_node_fetch_hits_total{tier=\"" + tier + "\"}");
  }
  double Corrupt(const std::string& tier) {
    return node_.Metric("okv_node_corrupt_objects_total{tier=\"" + tier + "\"}");
  }
};

TEST_F(ServeHbmTest, APutArrivesInHbmIsVerifiedThereAndIsFetchedFromThere) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const uint64_t hashed = device_.blocks_hashed();
  Put(object);
  EXPECT_EQ(device_.blocks_hashed(), hashed + 1);
  EXPECT_FALSE(Pin(object).hbm().empty());
  EXPECT_TRUE(Pin(object).dram().empty());
  const auto worker = OpenSession();
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(WaitUntil([this] { return Hits("hbm") == 1; }));
  EXPECT_EQ(Hits("dram"), 0);
}

TEST_F(ServeHbmTest, APutWithAWrongByteIsRefused) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  std::vector<uint8_t> wrong = object.payload;
  wrong[4000] ^= 1;
  const auto worker = OpenSession();
  EXPECT_TRUE(absl::IsDataLoss(worker->Put(Offer(object), wrong)));
  ExpectNothingStored();
  EXPECT_TRUE(WaitUntil([this] { return node_.storage->hbm_pool()->used_bytes() == 0; }));
}

TEST_F(ServeHbmTest, RanksWriteAndReadTheirHeadsInHbm) {
  StartNode();
  const Format format = FormatOf(4);
  for (const Codec codec : kCodecs) {
    const TestObject object = MakeObject({.number = 7, .codec = codec}, format);
    const auto worker = OpenSession("tenant", format);
    std::list<std::vector<uint8_t>> shares;
    std::vector<uint64_t> requests;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const BlockRange range = RankRange(object.object->layout, rank, 2);
      ObjectHeader header = object.header();
      shares.push_back(Slice(object, range));
      header.checksums = RangeChecksums(object.id(), object.object->layout, range, shares.back());
      v1::PutOffer offer = Offer(ReservationFor(object), header);
      offer.set_head_begin(range.head_begin);
      offer.set_head_end(range.head_end);
      offer.set_layer_end(range.layer_end);
      worker->Offer(offer, shares.back());
      requests.push_back(offer.request_id());
    }
    for (const uint64_t request : requests) EXPECT_TRUE(worker->PutAnswer(request).ok());
    EXPECT_FALSE(Pin(object).hbm().empty());
    ExpectDelivered(worker->Fetch(Request({object}))[0], object);
    for (const uint32_t ranks_count : {1, 2, 4}) {
      for (uint32_t rank = 0; rank < ranks_count; ++rank) {
        const BlockRange range = RankRange(object.object->layout, rank, ranks_count);
        v1::FetchRequest request = Request({object});
        request.set_layer_end(range.layer_end);
        request.set_head_begin(range.head_begin);
        request.set_head_end(range.head_end);
        const auto delivered = worker->Fetch(request);
        ASSERT_TRUE(delivered[0].status.ok()) << delivered[0].status;
        EXPECT_TRUE(delivered[0].payload == Slice(object, range)) << range.ToString();
      }
    }
  }
}

TEST_F(ServeHbmTest, ABadCopyInHbmThatIsTheOnlyOneGoesAndIsReported) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  Put(object);
  device_.Flip(Pin(object).hbm().bytes.data() + 3000);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaint("confirmed"));
  EXPECT_TRUE(WaitUntil([this] { return removed().size() == 1; }));
  EXPECT_TRUE(absl::IsNotFound(worker->Fetch(Request({object}))[0].status));
  EXPECT_EQ(Corrupt("hbm"), 1);
  ExpectNothingStored();
}

TEST_F(ServeHbmTest, ABadCopyInHbmGoesAndDramsServes) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  Put(object);
  CopyToDram(object);
  device_.Flip(Pin(object).hbm().bytes.data() + 3000);
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaint("confirmed"));
  EXPECT_TRUE(WaitUntil([&] { return Pin(object).hbm().empty(); }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(removed().empty());
  EXPECT_EQ(Corrupt("hbm"), 1);
  EXPECT_EQ(Corrupt("dram"), 0);
}

TEST_F(ServeHbmTest, AGoodCopyInHbmIsKeptWhenDramsIsBad) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  Put(object);
  CopyToDram(object);
  {
    const ObjectPin pin = Pin(object);
    const_cast<uint8_t*>(pin.dram().data())[9] ^= 1;
  }
  const auto worker = OpenSession();
  Complain(worker.get(), object);
  EXPECT_TRUE(WaitForComplaint("confirmed"));
  // It comes back as it was in HBM, into DRAM.
  EXPECT_TRUE(WaitUntil([&] {
    const auto delivered = worker->Fetch(Request({object}))[0];
    return delivered.status.ok() && Hits("dram") >= 1;
  }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(removed().empty());
  EXPECT_EQ(Corrupt("dram"), 1);
}

TEST_F(ServeHbmTest, WhatIsFetchedFromDramComesUp) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  ASSERT_TRUE(node_.Write(object).ok());
  const auto worker = OpenSession();
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(WaitUntil([&] { return !Pin(object).hbm().empty(); }));
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(WaitUntil([this] { return Hits("hbm") == 1; }));
  EXPECT_EQ(Hits("dram"), 1);
}

TEST_F(ServeHbmTest, APromotionThatFindsDramsCopyBadLeavesTheDisks) {
  StartNode();
  const TestObject object = MakeObject({.number = 1});
  const DiskPlace place = ToDiskToo(object);
  ASSERT_TRUE(place.known());
  {
    const ObjectPin pin = Pin(object);
    const_cast<uint8_t*>(pin.dram().data())[9] ^= 1;
    node_.storage->hbm_mover()->Used(pin);
  }
  EXPECT_TRUE(WaitUntil([&] { return Corrupt("dram") == 1 && Pin(object).dram().empty(); }));
  EXPECT_EQ(Pin(object).place(), place);
  const auto worker = OpenSession();
  ExpectDelivered(worker->Fetch(Request({object}))[0], object);
  EXPECT_TRUE(removed().empty());
}

// Fetches by the client's session, whose requests say which buffers lie side by side.
class ServeMergedTest : public ServeHbmTest {
 protected:
  // An int2 block has 15 pages of the machine: neighbours leave no gap.
  const Format format_ = FormatOf(8);
  const PageLayout layout_ = PageLayout::Of(format_);
  const size_t block_bytes_ = layout_.block_bytes(Codec::kInt2);

  TestObject Object(uint32_t number) {
    return MakeObject({.number = number, .chain_blocks = 1}, format_);
  }
  double Merged() { return node_.Metric("okv_node_hbm_merged_objects_total"); }

  struct Target {
    TestObject object;
    size_t at;  // In the reader's memory.
  };
  std::vector<absl::Status> Fetch(const std::vector<Target>& targets,
                                  std::vector<uint8_t>* memory) {
    std::vector<NodeSession::FetchTarget> asked;
    for (const Target& target : targets) {
      asked.push_back({.id = target.object.id(),
                       .index = target.object.header().index,
                       .buffer = absl::MakeSpan(memory->data() + target.at, block_bytes_)});
    }
    std::vector<absl::Status> statuses;
    const auto headers = FetchBySession(format_, asked);
    for (size_t i = 0; i < headers.size(); ++i) {
      statuses.push_back(headers[i].status());
      EXPECT_TRUE(!headers[i].ok() || *headers[i] == targets[i].object.header());
    }
    return statuses;
  }
};

TEST_F(ServeMergedTest, NeighboursLeaveTogether) {
  StartNode();
  std::vector<Target> targets;
  const auto writer = OpenSession("tenant", format_);
  for (uint32_t i = 0; i < 30; ++i) {
    targets.push_back({.object = Object(i), .at = i * block_bytes_});
    ASSERT_TRUE(writer->Put(Offer(targets[i].object), targets[i].object.payload).ok());
  }
  writer->Close();
  std::vector<uint8_t> memory(30 * block_bytes_);
  for (const absl::Status& status : Fetch(targets, &memory)) EXPECT_TRUE(status.ok()) << status;
  for (const Target& target : targets) {
    EXPECT_TRUE(std::equal(target.object.payload.begin(), target.object.payload.end(),
                           memory.begin() + static_cast<ptrdiff_t>(target.at)));
  }
  EXPECT_EQ(Merged(), 29);
  EXPECT_EQ(Hits("hbm"), 30);
}

TEST_F(ServeMergedTest, GapsAndMissesAtEitherEndPartThem) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  StartNode();
  std::vector<uint32_t> order(40);
  std::iota(order.begin(), order.end(), 0);
  for (int i = 0; i < 6; ++i) std::swap(order[random() % 40], order[random() % 40]);
  const auto writer = OpenSession("tenant", format_);
  for (size_t i = 4; i < order.size(); ++i) {  // Four are missing.
    const TestObject object = Object(order[i]);
    ASSERT_TRUE(writer->Put(Offer(object), object.payload).ok());
  }
  writer->Close();
  for (int round = 0; round < 10; ++round) {
    std::vector<Target> targets;
    size_t at = 0;
    for (uint32_t i = 0; i < 40; ++i) {
      if (random() % 8 == 0) at += 16;
      targets.push_back({.object = Object(i), .at = at});
      at += block_bytes_;
    }
    std::vector<uint8_t> memory(at);
    const std::vector<absl::Status> statuses = Fetch(targets, &memory);
    for (uint32_t i = 0; i < 40; ++i) {
      const auto missing = std::find(order.begin(), order.begin() + 4, i);
      if (missing != order.begin() + 4) {
        EXPECT_TRUE(absl::IsNotFound(statuses[i])) << statuses[i];
        continue;
      }
      ASSERT_TRUE(statuses[i].ok()) << statuses[i];
      EXPECT_TRUE(std::equal(targets[i].object.payload.begin(), targets[i].object.payload.end(),
                             memory.begin() + static_cast<ptrdiff_t>(targets[i].at)))
          << "object " << i;
    }
  }
  EXPECT_GT(Merged(), 0);
  EXPECT_EQ(node_.storage->table()->stats().pins_count, 0u);
}

}  // namespace
}  // namespace okv::testing_support
