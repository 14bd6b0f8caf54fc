#include "client/transport/address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace okv {

std::string AddressText(const sockaddr_storage& storage) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  const socklen_t length =
      storage.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (getnameinfo(reinterpret_cast<const sockaddr*>(&storage), length, host, sizeof(host), port,
                  sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "?";
  }
  return absl::StrCat(storage.ss_family == AF_INET6 ? absl::StrCat("[", host, "]") : host, ":",
                      port);
}

absl::StatusOr<SocketAddress> ParseAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", address, "' is not an address of the form host:port"));
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot resolve '", address, "': ", gai_strerror(error)));
  }
  SocketAddress result;
  std::memcpy(&result.storage, found->ai_addr, found->ai_addrlen);
  result.length = found->ai_addrlen;
  freeaddrinfo(found);
  return result;
}

absl::Status CheckLoopback(absl::string_view field, const std::string& address) {
  const absl::StatusOr<SocketAddress> parsed = ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": ", absl::string_view(parsed.status().message())));
  }
  const sockaddr_storage& storage = parsed->storage;
  const bool loopback =
      storage.ss_family == AF_INET
          ? (ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr) >> 24) == 127
          : IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr) != 0;
  if (loopback) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": '", address,
                   "' is not a loopback address, and without certificates no program binds to any "
                   "other"));
}

}  // namespace okv
