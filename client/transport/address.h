#ifndef OKV_CLIENT_TRANSPORT_ADDRESS_H_
#define OKV_CLIENT_TRANSPORT_ADDRESS_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// A socket address, as the system takes it.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
};

// Reads "host:port", "[v6]:port". kInvalidArgument when it is neither, or the host does not
// resolve. A host name is looked up, which can block: nodes advertise numbers where they can.
absl::StatusOr<SocketAddress> ParseAddress(const std::string& address);

// The numeric "host:port" that ParseAddress reads.
std::string AddressText(const sockaddr_storage& storage);

// kInvalidArgument naming `field` unless `address` is on this machine alone: nothing authenticates
// or encrypts a port yet, so no program binds to any other. Errors of ParseAddress, too.
absl::Status CheckLoopback(absl::string_view field, const std::string& address);

}  // namespace okv

#endif  // OKV_CLIENT_TRANSPORT_ADDRESS_H_
