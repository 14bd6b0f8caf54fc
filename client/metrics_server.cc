#include "client/metrics_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/transport/address.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kRequestBytesMax = 8192;
constexpr int kListenBacklog = 16;
// A client that neither reads nor writes keeps the others waiting no longer than this.
constexpr timeval kPatience = {.tv_sec = 2, .tv_usec = 0};

std::string Response(absl::string_view status, absl::string_view body) {
  return absl::StrCat("HTTP/1.1 ", status,
                      "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8"
                      "\r\nContent-Length: ",
                      body.size(), "\r\nConnection: close\r\n\r\n", body);
}

// The request up to the empty line; "" when it does not come or is too long.
std::string ReadRequest(int fd) {
  std::string request;
  char buffer[1024];
  while (!absl::StrContains(request, "\r\n\r\n")) {
    const ssize_t count = recv(fd, buffer, sizeof(buffer), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0 || request.size() + count > kRequestBytesMax) return "";
    request.append(buffer, count);
  }
  return request;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, std::function<std::string()> text) {
  OKV_ASSIGN_OR_RETURN(const SocketAddress parsed, ParseAddress(address));
  const int fd = socket(parsed.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int reuse = 1;
  SocketAddress bound = {.storage = {}, .length = sizeof(sockaddr_storage)};
  if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse)) != 0 ||
      bind(fd, reinterpret_cast<const sockaddr*>(&parsed.storage), parsed.length) != 0 ||
      listen(fd, kListenBacklog) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return absl::UnavailableError(
        absl::StrCat("cannot listen on metrics address ", address, ": ", std::strerror(error)));
  }
  const int stop_fd = eventfd(0, EFD_CLOEXEC);
  OKV_CHECK(stop_fd >= 0);
  return absl::WrapUnique(
      new MetricsServer(fd, stop_fd, AddressText(bound.storage), std::move(text)));
}

MetricsServer::MetricsServer(int listen_fd, int stop_fd, std::string address,
                             std::function<std::string()> text)
    : listen_fd_(listen_fd),
      stop_fd_(stop_fd),
      address_(std::move(address)),
      text_(std::move(text)),
      thread_([this] { Run(); }) {}

MetricsServer::~MetricsServer() {
  const uint64_t one = 1;
  OKV_CHECK(write(stop_fd_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  close(listen_fd_);
  close(stop_fd_);
}

void MetricsServer::Run() {
  while (true) {
    pollfd fds[] = {{.fd = listen_fd_, .events = POLLIN, .revents = 0},
                    {.fd = stop_fd_, .events = POLLIN, .revents = 0}};
    if (poll(fds, 2, -1) < 0 && errno != EINTR) return;
    if (fds[1].revents != 0) return;
    if (fds[0].revents == 0) continue;
    const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof(kPatience));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof(kPatience));
    Answer(fd);
    close(fd);
  }
}

void MetricsServer::Answer(int fd) {
  const std::string request = ReadRequest(fd);
  if (request.empty()) return;
  const bool known =
      absl::StartsWith(request, "GET /metrics ") || absl::StartsWith(request, "GET /metrics?");
  const std::string response =
      known ? Response("200 OK", text_()) : Response("404 Not Found", "see /metrics\n");
  for (size_t sent = 0; sent < response.size();) {
    const ssize_t count = send(fd, response.data() + sent, response.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    sent += count;
  }
  shutdown(fd, SHUT_WR);
}

}  // namespace okv
