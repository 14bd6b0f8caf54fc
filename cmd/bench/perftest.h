#ifndef OKV_CMD_BENCH_PERFTEST_H_
#define OKV_CMD_BENCH_PERFTEST_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace okv {

// One run of UCX's own benchmark between two processes of this machine: what the transport can do
// without a service around it.
struct PerftestOptions {
  std::string program = "ucx_perftest";
  std::string test;  // "ucp_get", "ucp_am_bw".
  std::string tls;   // UCX_TLS.
  std::string net_devices = "lo";
  uint64_t message_bytes = 0;  // Of every message, and of either process's one buffer.
  uint64_t messages = 0;
  uint64_t warmup_messages = 1;
  uint32_t outstanding = 1;
  // False: UCX as it comes. True: on the service's terms, with endpoints that notice a dead peer,
  // also over shared memory, and without TCP PUTs, which end a process whose peer closes in the
  // middle (client/transport/ucx_transport.cc).
  bool service_terms = false;
  std::string output_path;  // Its output, kept with the measurement's other files.
  absl::Duration timeout = absl::Seconds(120);
};

// Bytes a second, over all messages. kUnavailable with the program's output when it does not run,
// kDeadlineExceeded when it takes longer than the timeout. Blocks.
absl::StatusOr<double> RunPerftest(const PerftestOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_PERFTEST_H_
