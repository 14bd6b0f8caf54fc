#ifndef OKV_PROTO_TICKET_H_
#define OKV_PROTO_TICKET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/ids.h"

namespace okv {

// What the control plane signs so that a node can check it without asking: HMAC-SHA-256 with the
// ticket key that a node gets when it registers. Plain values.

inline constexpr size_t kTicketTextBytesMax = 1024;

// Opens a data-plane session.
struct Ticket {
  std::string tenant;
  FormatId format_id;
  int64_t expires_wall_us = 0;
};

// Allows one object to be written to one node, once.
struct Reservation {
  std::string tenant;
  FormatId format_id;
  ObjectId object;
  std::string node_id;
  WriteId write_id;
  int64_t expires_wall_us = 0;
};

// REQUIRES: a ticket key; tenant and node id of at most kTicketTextBytesMax bytes (a longer one
// could not be opened).
std::string SealTicket(const Ticket& ticket, absl::string_view ticket_key);
std::string SealReservation(const Reservation& reservation, absl::string_view ticket_key);

// kPermissionDenied, saying which, when the seal is malformed or signed with another key, and when
// there is no ticket key: an empty key would let anyone sign. One that expired (by now_wall_us) is
// kPermissionDenied for a ticket, and kAborted for a reservation: its writer was too slow, has lost
// its place, and starts over.
absl::StatusOr<Ticket> OpenTicket(absl::string_view sealed, absl::string_view ticket_key,
                                  int64_t now_wall_us);
absl::StatusOr<Reservation> OpenReservation(absl::string_view sealed, absl::string_view ticket_key,
                                            int64_t now_wall_us);

}  // namespace okv

#endif  // OKV_PROTO_TICKET_H_
