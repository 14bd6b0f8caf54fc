#ifndef OKV_CMD_BENCH_PEER_H_
#define OKV_CMD_BENCH_PEER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace okv {

// The same tokens through this service, as INT2 blocks, and through Mooncake Store, as the BF16
// bytes that an engine without quantization stores: one host, TCP, one storing process each (and
// okv-control, mooncake_master), a client that puts every block and gets it back into other memory.
// Quantization is not part of it: both clients start with the bytes that they store.
struct PeerOptions {
  std::string python;  // Of an environment with mooncake-transfer-engine-non-cuda.
  std::string script = "tests/bench/mooncake_peer.py";
  uint32_t tokens = 8192;       // Of a round; a multiple of 64.
  uint32_t request_blocks = 8;  // Blocks of a put or get.
  uint32_t rounds = 5;          // After one that does not count.
  uint32_t layers = 36;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;
  std::string directory = "/tmp";  // For the programs' files, which go at the end.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

// One direction.
struct PeerPhase {
  double tokens_per_second = 0;  // Median of the rounds.
  double request_ms_p50 = 0;     // Over all rounds' requests.
  double request_ms_p99 = 0;
  double cpu_seconds_per_million_tokens = 0;  // Median; all processes.
};

struct PeerResult {
  std::string name;
  uint64_t block_bytes = 0;
  PeerPhase put;
  PeerPhase get;
  // Resident bytes of the storing process over the tokens that it holds at the end.
  double rss_bytes_per_million_tokens = 0;
};

struct PeerReport {
  uint32_t tokens = 0;
  uint32_t request_blocks = 0;
  uint32_t rounds = 0;
  std::vector<PeerResult> results;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Runs both, a round of one and a round of the other in turn. kUnavailable with the output of the
// program that did not run; kDataLoss when other bytes came back. Progress goes to stderr. Blocks
// until done.
absl::StatusOr<PeerReport> RunPeer(const PeerOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_PEER_H_
