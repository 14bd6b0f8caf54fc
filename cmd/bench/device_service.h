#ifndef OKV_CMD_BENCH_DEVICE_SERVICE_H_
#define OKV_CMD_BENCH_DEVICE_SERVICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cmd/bench/device_service_model.h"

namespace okv {

// A worker, a node and a control plane of one machine, end to end: the worker quantizes random K
// and V, puts the int2 blocks, forgets them, fetches them, verifies them and attends to them, in
// GPU memory (the node's HBM tier) or in host memory. Every step beside what it cannot be faster
// than: the copy rate of the same run, and, between the two processes, the same blocks copied by
// the CUDA runtime alone.
struct ServiceOptions {
  std::string memory = "device";  // For messages; the factory decides.
  GpuPair gpus;                   // Where device memory is.
  uint32_t tokens = 102400;       // Of history, a multiple of 64.
  BlockShape shape;
  uint32_t query_heads = 32;
  std::vector<uint32_t> in_flight = {1, 8, 32, 0};  // Objects of a request; 0: all in one.
  std::vector<uint32_t> streams = {1, 2, 4, 8};     // Of the copies without a service.
  uint32_t rounds = 9;
  uint32_t put_batches = 8;  // So many calls put everything.
  std::string tls;           // Of node and worker; empty: the service's own choice.
  bool require_gpudirect = false;
  std::string directory = "/tmp";  // For the programs' files, which go at the end.
  std::string log_directory;       // The ends of their logs stay here; empty: nowhere.
  uint64_t seed = 1;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
  uint32_t blocks() const { return tokens / 64; }
};

// One step over all blocks.
struct ServiceStep {
  std::string name;
  uint64_t bytes = 0;        // That it must move.
  double first_seconds = 0;  // Of its first run in this process.
  double seconds = 0;        // Median of the later ones; 0: there is only the first.
  double limit_seconds = 0;  // bytes at the limit's rate; 0: no limit was measured.
  std::string limit;         // "copy", "peer copy"
};

// One way of fetching all blocks, in rates of payload.
struct ServiceFetchRate {
  double first_bytes_per_second = 0;
  double bytes_per_second = 0;  // Median of the rounds.
  double of_peer_copy = 0;      // Median of the rounds' ratios to the fastest copies; 0: none.
  double request_us_p50 = 0;
  double request_us_p99 = 0;
  double verify_seconds = 0;  // Of a pass: what the caller's thread spent on it; median.
};
struct ServiceFetchCase {
  std::string order;  // Of the destinations: "in order", "random"
  uint64_t request_objects = 0;
  ServiceFetchRate unverified;
  ServiceFetchRate verified;
};

// Blocks copied between two processes without a service.
struct ServicePeerRate {
  uint32_t streams = 0;
  double first_bytes_per_second = 0;
  double bytes_per_second = 0;
};

struct ServiceReport {
  std::string device;
  std::string memory;
  GpuPair gpus;
  BlockShape shape;
  uint64_t block_bytes = 0;
  uint32_t blocks = 0;
  uint32_t rounds = 0;
  double copy_bytes_per_second = 0;  // Read and written.
  std::vector<ServicePeerRate> peer_rates;
  std::vector<ServiceFetchCase> fetches;
  std::vector<ServiceStep> steps;
  // Bytes that did not come back; bits of attention's output over the fetched blocks that differ
  // from those before they were put, and of two runs over the same blocks.
  bool compared = false;
  uint64_t different_bytes = 0;
  bool attention_equal = false;
  bool attention_repeats = true;
  // What the node's metrics say of its HBM tier and where hits came from, "name{labels} value".
  std::vector<std::string> node_metrics;
  // What ended the run early, "put: UNAVAILABLE: ..."; what was measured before is here.
  std::string error;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Starts okv-control and okv-node (beside this program). Errors only when nothing was measured:
// kInvalidArgument naming a flag, kUnavailable without a GPU; later ones are in the report.
// Progress, with every figure as it is measured, goes to stderr. Blocks until done.
absl::StatusOr<ServiceReport> RunService(const ServiceOptions& options,
                                         const ServiceModelFactory& make_model);

}  // namespace okv

#endif  // OKV_CMD_BENCH_DEVICE_SERVICE_H_
