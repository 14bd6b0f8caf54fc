#ifndef OKV_TESTS_CLIENT_FAKE_NODE_H_
#define OKV_TESTS_CLIENT_FAKE_NODE_H_

#include <algorithm>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/transport/transport.h"
#include "gtest/gtest.h"
#include "proto/check.h"
#include "proto/data_plane.pb.h"
#include "proto/object.h"

namespace okv {

// The node's side of data_plane.proto over a map, with the faults that a test asks for. Everything
// but the constructor runs on its transport's thread, or after the transport is gone.
class FakeNode : public Transport::AcceptHandler {
 public:
  struct Stored {
    ObjectHeader header;
    std::vector<uint8_t> payload;
  };

  // Set before the first connection.
  std::string node_id = "node-1";
  absl::Status hello_status;  // What Hello is answered.
  std::function<absl::Status(const v1::Hello&)> check_hello;
  std::map<ObjectId, Stored> objects;
  std::map<ObjectId, absl::Status> failures;
  std::map<ObjectId, ObjectId> swapped;  // Answers the second when asked the first.
  bool silent = false;                   // Never answers a fetch or an offer.
  std::optional<PageLayout> layout;      // Of the objects, for fetches of a range.
  uint32_t protocol_minor = kProtocolMinor;
  enum class Together { kNo, kHeadersFirst, kHeadersLast };
  Together together = Together::kNo;  // How all objects of a request leave in one delivery.
  std::map<ObjectId, std::string> bad_headers;  // What such a delivery says instead.
  int deliveries_before_death = -1;             // Then closes the connection.
  absl::Status put_status;                      // What offers are answered.
  bool refuse_puts = false;                     // Refuses the payload, too.
  size_t answer_puts_by = 1;  // Answers when so many wait for it, or puts_count are here.
  size_t puts_count = 0;
  bool puts_pending = false;  // Says of each offer that it is here, before it answers any.

  // Read after the transport is gone.
  std::vector<std::string> tickets;
  std::vector<v1::Complaint> complaints;
  std::vector<v1::FetchRequest> fetches;
  std::map<ObjectId, Stored> put_objects;
  size_t offers_in_flight = 0;
  size_t offers_in_flight_max = 0;
  size_t accepted = 0;

  void OnAccept(Connection*) override { ++accepted; }
  void OnClosed(Connection* connection, const absl::Status&) override {
    std::erase_if(late_, [connection](const auto& late) { return late.first == connection; });
  }
  // Answers what it was silent about, to those who are still there.
  void AnswerLate() {
    for (const auto& [connection, request] : std::exchange(late_, {})) {
      for (int i = 0; i < request.objects_size(); ++i) Answer(connection, request, i);
    }
  }

  void OnMessage(Connection* connection, MessageType type, absl::string_view message) override {
    if (type == MessageType::kHello) {
      v1::Hello hello;
      OKV_CHECK(hello.ParseFromArray(message.data(), static_cast<int>(message.size())));
      tickets.push_back(hello.ticket());
      absl::Status status = hello_status;
      if (check_hello) status = check_hello(hello);
      v1::HelloReply reply;
      reply.set_code(static_cast<int32_t>(status.code()));
      reply.set_message(std::string(status.message()));
      reply.set_protocol_major(kProtocolMajor);
      reply.set_protocol_minor(protocol_minor);
      reply.set_node_id(node_id);
      reply.set_objects_per_fetch_max(7);  // So that a test's fetch takes several requests.
      connection->Send(MessageType::kHelloReply, reply.SerializeAsString());
      return;
    }
    if (type == MessageType::kComplaint) {
      v1::Complaint complaint;
      OKV_CHECK(complaint.ParseFromArray(message.data(), static_cast<int>(message.size())));
      complaints.push_back(complaint);
      return;
    }
    v1::FetchRequest request;
    OKV_CHECK(type == MessageType::kFetchRequest);
    OKV_CHECK(request.ParseFromArray(message.data(), static_cast<int>(message.size())));
    OKV_CHECK(request.objects_size() <= 7 && request.deadline_us() > 0);
    fetches.push_back(request);
    if (silent) {
      late_.emplace_back(connection, request);
      return;
    }
    if (together != Together::kNo) {
      AnswerTogether(connection, request);
      return;
    }
    for (int i = 0; i < request.objects_size(); ++i) Answer(connection, request, i);
  }

  void OnBulk(Connection* connection, MessageType type, absl::string_view header,
              std::unique_ptr<BulkReceive> payload) override {
    OKV_CHECK(type == MessageType::kPutOffer);
    v1::PutOffer offer;
    OKV_CHECK(offer.ParseFromArray(header.data(), static_cast<int>(header.size())));
    offers_in_flight_max = std::max(offers_in_flight_max, ++offers_in_flight);
    if (silent) {
      held_.push_back(std::move(payload));
      return;
    }
    if (refuse_puts) {
      payload.reset();
      Reply(connection, offer.request_id(), put_status);
      return;
    }
    auto stored = std::make_shared<Stored>();
    auto decoded = ObjectHeader::Decode(offer.object_header());
    OKV_CHECK(decoded.ok());
    stored->header = *decoded;
    stored->payload.resize(payload->payload_bytes());
    held_.push_back(std::move(payload));
    held_.back()->Receive(
        absl::MakeSpan(stored->payload),
        [this, connection, stored, id = offer.request_id()](absl::Status status) {
          if (!status.ok()) return;
          put_objects[stored->header.id] = *stored;
          if (puts_pending) {
            v1::PutReply reply;
            reply.set_request_id(id);
            reply.set_pending(true);
            connection->Send(MessageType::kPutReply, reply.SerializeAsString());
          }
          unanswered_.push_back([this, connection, id] { Reply(connection, id, put_status); });
          if (unanswered_.size() < answer_puts_by && put_objects.size() < puts_count) return;
          for (const auto& answer : std::exchange(unanswered_, {})) answer();
        });
  }

 private:
  void Answer(Connection* connection, const v1::FetchRequest& request, int ordinal) {
    if (deliveries_before_death == 0) {
      deliveries_before_death = -2;
      connection->Close([] {});
    }
    if (deliveries_before_death == -2) return;
    ObjectId id;
    id.key = *BlockKey::FromBytes(request.objects(ordinal).key());
    id.codec = static_cast<Codec>(request.objects(ordinal).codec());
    if (swapped.contains(id)) id = swapped.at(id);
    const auto found = objects.find(id);
    if (found == objects.end() || failures.contains(id)) {
      const absl::Status status =
          found == objects.end() ? absl::NotFoundError("not here") : failures.at(id);
      v1::ObjectFailure failure;
      failure.set_request_id(request.request_id());
      failure.set_ordinal(ordinal);
      failure.set_code(static_cast<int32_t>(status.code()));
      failure.set_message(std::string(status.message()));
      connection->Send(MessageType::kObjectFailure, failure.SerializeAsString());
      return;
    }
    v1::ObjectDelivery delivery;
    delivery.set_request_id(request.request_id());
    delivery.set_ordinal(ordinal);
    delivery.set_object_header(found->second.header.Encode());
    const bool last = deliveries_before_death == 1;
    if (deliveries_before_death > 0) --deliveries_before_death;
    const absl::Span<const uint8_t> payload = PayloadOf(found->second, request);
    connection->SendBulk(MessageType::kObjectDelivery, delivery.SerializeAsString(), payload,
                         [this, connection, last](absl::Status status) {
                           if (!last || !status.ok()) return;
                           deliveries_before_death = -2;
                           connection->Close([] {});
                         });
    if (last) deliveries_before_death = -2;  // The others wait for an answer that never comes.
  }

  void AnswerTogether(Connection* connection, const v1::FetchRequest& request) {
    v1::ObjectHeaders headers;
    headers.set_request_id(request.request_id());
    std::vector<uint8_t>& bytes = ranges_.emplace_back();
    for (const v1::FetchObject& object : request.objects()) {
      ObjectId id;
      id.key = *BlockKey::FromBytes(object.key());
      id.codec = static_cast<Codec>(object.codec());
      if (swapped.contains(id)) id = swapped.at(id);
      const Stored& stored = objects.at(id);
      headers.add_object_headers(bad_headers.contains(id) ? bad_headers.at(id)
                                                          : stored.header.Encode());
      bytes.insert(bytes.end(), stored.payload.begin(), stored.payload.end());
    }
    v1::ObjectDelivery delivery;
    delivery.set_request_id(request.request_id());
    delivery.set_count(static_cast<uint32_t>(request.objects_size()));
    const auto say = [&] {
      connection->Send(MessageType::kObjectHeaders, headers.SerializeAsString());
    };
    if (together == Together::kHeadersFirst) say();
    connection->SendBulk(MessageType::kObjectDelivery, delivery.SerializeAsString(), bytes,
                         [](const absl::Status&) {});
    if (together == Together::kHeadersLast) say();
  }

  // The range that the request asks for, run by run.
  absl::Span<const uint8_t> PayloadOf(const Stored& object, const v1::FetchRequest& request) {
    if (request.head_end() == 0 && request.layer_end() == 0) return object.payload;
    const Codec codec = object.header.id.codec;
    std::vector<uint8_t>& bytes = ranges_.emplace_back();
    for (uint32_t layer = request.layer_begin(); layer < request.layer_end(); ++layer) {
      for (uint32_t head = request.head_begin(); head < request.head_end(); ++head) {
        const auto run =
            object.payload.begin() + static_cast<ptrdiff_t>(layout->run_offset(codec, layer, head));
        bytes.insert(bytes.end(), run, run + static_cast<ptrdiff_t>(layout->run_bytes(codec)));
      }
    }
    return bytes;
  }

  void Reply(Connection* connection, uint64_t request_id, const absl::Status& status) {
    --offers_in_flight;
    v1::PutReply reply;
    reply.set_request_id(request_id);
    reply.set_code(static_cast<int32_t>(status.code()));
    reply.set_message(std::string(status.message()));
    connection->Send(MessageType::kPutReply, reply.SerializeAsString());
  }

  std::vector<std::pair<Connection*, v1::FetchRequest>> late_;
  std::list<std::vector<uint8_t>> ranges_;  // Being sent, or sent.
  std::vector<std::unique_ptr<BulkReceive>> held_;
  std::vector<std::function<void()>> unanswered_;
};

}  // namespace okv

#endif  // OKV_TESTS_CLIENT_FAKE_NODE_H_
