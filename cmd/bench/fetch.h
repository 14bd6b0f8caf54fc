#ifndef OKV_CMD_BENCH_FETCH_H_
#define OKV_CMD_BENCH_FETCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace okv {

// How fast one reader fetches distinct objects from a node in another process of this machine,
// beside what UCX's own benchmark moves between two processes over the same transport in the same
// run.
//
// The baseline is ucx_perftest, ucp_get and ucp_am_bw, with one message of all the run's bytes:
// ucx_perftest has one buffer, sends it again and again, and so measures a cache unless the buffer
// is larger than that. Reported beside it: ucp_am_bw on the service's terms (PerftestOptions), and
// with messages of the block's size out of one such small buffer. Every round measures everything
// once, in turn, and a ratio is of one round: other work on the machine meets both sides alike.
struct FetchOptions {
  std::vector<std::string> transports = {"tcp,self"};  // UCX_TLS lists.
  std::vector<uint32_t> layers = {36};                 // Of a block: its size.
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;
  std::vector<uint32_t> in_flight = {64};  // Objects of a request; 0: all in one.
  uint64_t run_bytes = uint64_t{512} << 20;
  uint32_t rounds = 5;
  std::string perftest = "ucx_perftest";  // Empty: no baseline.
  std::string directory = "/tmp";         // For the programs' files, which go at the end.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

// One way of fetching.
struct FetchRate {
  double bytes_per_second = 0;  // Median of the rounds.
  double of_baseline = 0;       // Median of the rounds' ratios; 0: no baseline.
  double of_service_terms = 0;  // The same, to ucp_am_bw on the service's terms.
  double request_us_p50 = 0;    // Over all rounds' requests.
  double request_us_p99 = 0;
  double cpu_seconds_per_gb = 0;  // Of the reader and the node.
};

struct FetchCase {
  std::string tls;
  uint64_t block_bytes = 0;
  uint64_t objects = 0;
  uint64_t request_objects = 0;
  FetchRate unverified;  // Bytes in the reader's memory, checksums not looked at.
  FetchRate verified;    // Cluster::Fetch.
};

struct FetchBaseline {
  std::string tls;
  uint64_t block_bytes = 0;
  double get_bytes_per_second = 0;            // ucp_get, one message of the run's bytes; medians.
  double am_bytes_per_second = 0;             // ucp_am_bw, the same.
  double service_terms_bytes_per_second = 0;  // ucp_am_bw, the same on the service's terms.
  double cached_am_bytes_per_second = 0;      // ucp_am_bw, messages of a block's size, one buffer.
};

struct FetchReport {
  uint64_t run_bytes = 0;
  uint32_t rounds = 0;
  std::vector<FetchBaseline> baselines;  // Empty: none.
  std::vector<FetchCase> cases;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Starts okv-control and okv-node (beside this program) for each transport and size. kDataLoss when
// an object did not arrive as it was put. kUnavailable naming the program that does not run.
// Progress goes to stderr. Blocks until done.
absl::StatusOr<FetchReport> RunFetch(const FetchOptions& options);

// Reads "1,8,64": kInvalidArgument naming `flag`.
absl::StatusOr<std::vector<uint32_t>> ParseCounts(absl::string_view flag, const std::string& text);

}  // namespace okv

#endif  // OKV_CMD_BENCH_FETCH_H_
