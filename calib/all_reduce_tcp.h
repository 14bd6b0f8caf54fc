#ifndef OKV_CALIB_ALL_REDUCE_TCP_H_
#define OKV_CALIB_ALL_REDUCE_TCP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "calib/all_reduce.h"

namespace okv {

// Ranks that are processes, on one host or on several that trust each other: rank 0 listens, the
// others connect to it, and it adds up in the order of ranks. A covariance of 8 heads of 128
// channels is 1 MiB: a star is enough, where NCCL does not do it (all_reduce_nccl.h). Numbers
// travel as they lie in memory; all supported hosts are little-endian.
struct TcpRankOptions {
  uint32_t rank = 0;
  uint32_t ranks_count = 1;        // At most 1,024.
  std::string host = "127.0.0.1";  // Where rank 0 listens: an IPv4 address.
  uint16_t port = 0;               // 0, of rank 0 alone: one that is free.
  // How long to wait for the others to come, and for a message of a rank that is at work.
  std::chrono::seconds join_timeout{60};
  std::chrono::seconds sum_timeout{3600};

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// A port that is listened on, before the others are there.
class TcpListener {
 public:
  // kInvalidArgument: the options, or rank is not 0. Otherwise the errno's status.
  static absl::StatusOr<TcpListener> Create(const TcpRankOptions& options);
  TcpListener(TcpListener&& other) noexcept;
  TcpListener& operator=(TcpListener&&) = delete;
  ~TcpListener();

  uint16_t port() const { return port_; }

  // Waits for all other ranks. kDeadlineExceeded naming how many came; what says hello wrongly is
  // turned away. kInvalidArgument: a rank that came twice, or counts other ranks.
  absl::StatusOr<std::unique_ptr<AllReduce>> Accept();

 private:
  TcpListener(int socket, uint16_t port, const TcpRankOptions& options)
      : socket_(socket), port_(port), options_(options) {}
  int socket_;
  uint16_t port_;
  TcpRankOptions options_;
};

// Joins as any rank: rank 0 listens and accepts. Others try until rank 0 is there.
// kDeadlineExceeded, or as TcpListener.
absl::StatusOr<std::unique_ptr<AllReduce>> JoinTcpRanks(const TcpRankOptions& options);

}  // namespace okv

#endif  // OKV_CALIB_ALL_REDUCE_TCP_H_
