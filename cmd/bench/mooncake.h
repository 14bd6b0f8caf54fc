#ifndef OKV_CMD_BENCH_MOONCAKE_H_
#define OKV_CMD_BENCH_MOONCAKE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/child.h"

namespace okv {

// What one round of puts and gets took, of whichever store.
struct PeerRound {
  std::vector<double> put_request_seconds;
  std::vector<double> get_request_seconds;
  double put_cpu_seconds = 0;
  double get_cpu_seconds = 0;
};

struct MooncakeOptions {
  std::string python;
  std::string script;
  std::string directory;  // Exists, and is empty.
  uint64_t blocks = 0;    // Of a round.
  uint64_t block_bytes = 0;
  uint64_t request_blocks = 0;
};

// mooncake_master, a process that stores and one that puts and gets: mooncake_peer.py drives the
// last two. Thread-compatible.
class Mooncake {
 public:
  // kUnavailable with the output of what did not start. Blocks until all are ready.
  static absl::StatusOr<std::unique_ptr<Mooncake>> Start(const MooncakeOptions& options);

  // Puts and gets every block, compares all bytes and removes them. kUnavailable with the output
  // when the client fails.
  absl::StatusOr<PeerRound> Run();
  // Resident bytes of the storing process.
  absl::StatusOr<uint64_t> StoreRssBytes() const;

 private:
  explicit Mooncake(const MooncakeOptions& options) : options_(options) {}
  absl::Status StartProcesses();
  std::string Path(const std::string& name) const;

  const MooncakeOptions options_;
  uint32_t next_round_ = 0;
  std::unique_ptr<ChildProcess> master_;
  std::unique_ptr<ChildProcess> store_;
  std::unique_ptr<ChildProcess> client_;
};

}  // namespace okv

#endif  // OKV_CMD_BENCH_MOONCAKE_H_
