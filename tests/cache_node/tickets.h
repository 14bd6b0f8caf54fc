#ifndef OKV_TESTS_CACHE_NODE_TICKETS_H_
#define OKV_TESTS_CACHE_NODE_TICKETS_H_

#include <string>

#include "proto/clock.h"
#include "proto/data_plane.h"
#include "proto/data_plane.pb.h"
#include "proto/ticket.h"
#include "tests/cache_node/objects.h"

// What a worker shows a node that is registered with a ScriptedControl.
namespace okv::testing_support {

inline constexpr char kScriptedTicketKey[] = "the ticket key";

inline int64_t InAMinuteMicros() { return Clock::System()->WallMicros() + 60'000'000; }

inline v1::Hello ScriptedHello() {
  v1::Hello hello;
  hello.set_protocol_major(kProtocolMajor);
  hello.set_ticket(SealTicket(
      {.tenant = "tenant", .format_id = TestFormat().id(), .expires_wall_us = InAMinuteMicros()},
      kScriptedTicketKey));
  hello.set_format(TestFormat().Canonical());
  return hello;
}

inline v1::PutOffer ScriptedOffer(const std::string& node_id, const TestObject& object) {
  v1::PutOffer offer;
  offer.set_request_id(object.header().index.value());
  offer.set_reservation(SealReservation({.tenant = "tenant",
                                         .format_id = TestFormat().id(),
                                         .object = object.id(),
                                         .node_id = node_id,
                                         .write_id = WriteId(object.header().generation),
                                         .expires_wall_us = InAMinuteMicros()},
                                        kScriptedTicketKey));
  offer.set_object_header(object.header().Encode());
  return offer;
}

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_TICKETS_H_
