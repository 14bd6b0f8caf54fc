#include "calib/all_reduce_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kRanksMax = 1024;
constexpr uint32_t kMagic = 0x524b564f;     // "OVKR", as bytes in memory.
constexpr uint64_t kFailed = ~uint64_t{0};  // In place of a count: the sum cannot be made.

// What a rank says first.
struct Hello {
  uint32_t magic;
  uint32_t rank;
  uint32_t ranks_count;
};

absl::Status ErrnoStatus(absl::string_view what) { return absl::ErrnoToStatus(errno, what); }

// Closes what it holds.
class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

absl::StatusOr<Socket> OpenSocket() {
  Socket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) return ErrnoStatus("cannot make a socket");
  return socket;
}

absl::StatusOr<sockaddr_in> Address(const TcpRankOptions& options) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(options.port);
  if (inet_pton(AF_INET, options.host.c_str(), &address.sin_addr) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("'", options.host, "' is no IPv4 address"));
  }
  return address;
}

// Waits for bytes or a connection. False when the time is over.
bool WaitReadable(int fd, Clock::time_point deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd one = {.fd = fd, .events = POLLIN, .revents = 0};
    const int found = poll(&one, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (found > 0) return true;
    if (found == 0 || errno != EINTR) return false;
  }
}

absl::Status Receive(int fd, void* data, size_t bytes, Clock::time_point deadline) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    if (!WaitReadable(fd, deadline)) {
      return absl::UnavailableError("another rank says nothing for too long");
    }
    const ssize_t count = recv(fd, at, bytes, 0);
    if (count == 0) return absl::UnavailableError("another rank has left");
    if (count < 0) {
      if (errno == EINTR) continue;
      return absl::UnavailableError(absl::StrCat("another rank has left: ", strerror(errno)));
    }
    at += count;
    bytes -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::Status Send(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = send(fd, at, bytes, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      return absl::UnavailableError(absl::StrCat("another rank has left: ", strerror(errno)));
    }
    at += count;
    bytes -= static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

// Small messages go out at once; a host that vanishes is noticed.
void SetOptions(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
}

// Rank 0 has a socket to each other rank, in their order; the others have one to rank 0. A message
// is a count (u64) and as many doubles.
class TcpRank : public AllReduce {
 public:
  TcpRank(const TcpRankOptions& options, std::vector<Socket> peers)
      : options_(options), peers_(std::move(peers)) {}

  uint32_t rank() const override { return options_.rank; }
  uint32_t ranks_count() const override { return options_.ranks_count; }
  absl::Status Sum(absl::Span<double> values) override {
    return options_.rank == 0 ? Collect(values) : Ask(values);
  }

 private:
  Clock::time_point Deadline() const { return Clock::now() + options_.sum_timeout; }

  absl::Status Collect(absl::Span<double> values) {
    std::vector<double> theirs(values.size());
    for (const Socket& peer : peers_) {
      uint64_t count = 0;
      OKV_RETURN_IF_ERROR(Receive(peer.fd(), &count, sizeof(count), Deadline()));
      if (count != values.size()) {
        for (const Socket& other : peers_) {
          // One that has left needs no word.
          (void)Send(other.fd(), &kFailed, sizeof(kFailed));
        }
        return absl::InvalidArgumentError("the ranks sum different counts of numbers");
      }
      OKV_RETURN_IF_ERROR(
          Receive(peer.fd(), theirs.data(), theirs.size() * sizeof(double), Deadline()));
      for (size_t i = 0; i < theirs.size(); ++i) values[i] += theirs[i];
    }
    for (const Socket& peer : peers_) OKV_RETURN_IF_ERROR(SendValues(peer.fd(), values));
    return absl::OkStatus();
  }

  absl::Status Ask(absl::Span<double> values) {
    const int fd = peers_[0].fd();
    OKV_RETURN_IF_ERROR(SendValues(fd, values));
    uint64_t count = 0;
    OKV_RETURN_IF_ERROR(Receive(fd, &count, sizeof(count), Deadline()));
    if (count != values.size()) {
      return absl::InvalidArgumentError("the ranks sum different counts of numbers");
    }
    return Receive(fd, values.data(), values.size() * sizeof(double), Deadline());
  }

  static absl::Status SendValues(int fd, absl::Span<const double> values) {
    const uint64_t count = values.size();
    OKV_RETURN_IF_ERROR(Send(fd, &count, sizeof(count)));
    return Send(fd, values.data(), values.size() * sizeof(double));
  }

  const TcpRankOptions options_;
  const std::vector<Socket> peers_;
};

absl::StatusOr<std::unique_ptr<AllReduce>> Connect(const TcpRankOptions& options) {
  OKV_ASSIGN_OR_RETURN(const sockaddr_in address, Address(options));
  const Clock::time_point deadline = Clock::now() + options.join_timeout;
  while (true) {
    OKV_ASSIGN_OR_RETURN(Socket socket, OpenSocket());
    if (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      SetOptions(socket.fd());
      const Hello hello = {
          .magic = kMagic, .rank = options.rank, .ranks_count = options.ranks_count};
      OKV_RETURN_IF_ERROR(Send(socket.fd(), &hello, sizeof(hello)));
      std::vector<Socket> peers;
      peers.push_back(std::move(socket));
      return std::make_unique<TcpRank>(options, std::move(peers));
    }
    if (errno != ECONNREFUSED && errno != EINTR && errno != ETIMEDOUT && errno != EHOSTUNREACH) {
      return ErrnoStatus(absl::StrCat("cannot connect to ", options.host, ":", options.port));
    }
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank 0 does not listen at ", options.host, ":", options.port));
    }
    poll(nullptr, 0, 50);  // Rank 0 is not there yet; nothing tells when it is.
  }
}

}  // namespace

absl::Status TcpRankOptions::Validate() const {
  if (ranks_count == 0 || ranks_count > kRanksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", ranks_count, " ranks, not 1 to ", kRanksMax));
  }
  if (rank >= ranks_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank is ", rank, ", not below the ", ranks_count, " ranks"));
  }
  if (rank > 0 && port == 0) return absl::InvalidArgumentError("port is 0: where is rank 0?");
  return Address(*this).status();
}

TcpListener::TcpListener(TcpListener&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)), port_(other.port_), options_(other.options_) {}

TcpListener::~TcpListener() {
  if (socket_ >= 0) close(socket_);
}

absl::StatusOr<TcpListener> TcpListener::Create(const TcpRankOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  if (options.rank != 0) return absl::InvalidArgumentError("rank 0 alone listens");
  OKV_ASSIGN_OR_RETURN(sockaddr_in address, Address(options));
  OKV_ASSIGN_OR_RETURN(Socket socket, OpenSocket());
  const int on = 1;
  setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  socklen_t bytes = sizeof(address);
  sockaddr* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(socket.fd(), generic, bytes) != 0 ||
      listen(socket.fd(), static_cast<int>(kRanksMax)) != 0 ||
      getsockname(socket.fd(), generic, &bytes) != 0) {
    return ErrnoStatus(absl::StrCat("cannot listen at ", options.host, ":", options.port));
  }
  return TcpListener(socket.Release(), ntohs(address.sin_port), options);
}

absl::StatusOr<std::unique_ptr<AllReduce>> TcpListener::Accept() {
  std::vector<int> by_rank(options_.ranks_count, -1);  // The places of sockets in `peers`.
  std::vector<Socket> peers;
  const Clock::time_point deadline = Clock::now() + options_.join_timeout;
  while (peers.size() + 1 < options_.ranks_count) {
    if (!WaitReadable(socket_, deadline)) {
      return absl::DeadlineExceededError(
          absl::StrCat(peers.size() + 1, " of ", options_.ranks_count, " ranks are there"));
    }
    Socket peer(accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.fd() < 0) continue;  // It has gone again.
    SetOptions(peer.fd());
    Hello hello = {};
    // One that connects and says nothing, or something else, is no rank.
    const auto hello_deadline = std::min(deadline, Clock::now() + std::chrono::seconds(5));
    if (!Receive(peer.fd(), &hello, sizeof(hello), hello_deadline).ok()) continue;
    if (hello.magic != kMagic) continue;
    if (hello.ranks_count != options_.ranks_count) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", hello.rank, " counts ",
                                                     hello.ranks_count, " ranks, rank 0 ",
                                                     options_.ranks_count));
    }
    if (hello.rank == 0 || hello.rank >= options_.ranks_count || by_rank[hello.rank] >= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is a second rank ", hello.rank, ", or no such one"));
    }
    by_rank[hello.rank] = static_cast<int>(peers.size());
    peers.push_back(std::move(peer));
  }
  std::vector<Socket> ordered;
  for (uint32_t rank = 1; rank < options_.ranks_count; ++rank) {
    ordered.push_back(std::move(peers[static_cast<size_t>(by_rank[rank])]));
  }
  return std::make_unique<TcpRank>(options_, std::move(ordered));
}

absl::StatusOr<std::unique_ptr<AllReduce>> JoinTcpRanks(const TcpRankOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  if (options.rank > 0) return Connect(options);
  OKV_ASSIGN_OR_RETURN(TcpListener listener, TcpListener::Create(options));
  return listener.Accept();
}

}  // namespace okv
