#ifndef OKV_CMD_WORKER_RUN_H_
#define OKV_CMD_WORKER_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/drift.h"
#include "client/transport/transport.h"

namespace okv {

// One prompt through the reference decode worker: resume what the cluster holds, prefill the rest,
// store, generate.
struct RunOptions {
  std::string model;     // GGUF file.
  std::string rotation;  // Rotation set file, or the hash (64 hex digits) of a published one.
  uint32_t sink_tokens = 64;
  uint32_t recent_tokens = 256;

  std::string prompt_file;  // Text; its first prompt_tokens tokens (0 = all) open the prompt.
  uint32_t prompt_tokens = 0;
  std::string ending;                   // Text put behind them.
  std::vector<uint32_t> ending_tokens;  // Token ids put behind that.
  uint32_t max_new_tokens = 32;
  float temperature = 0;  // 0: greedy.
  uint32_t top_k = 0;
  float top_p = 1;
  uint64_t seed = 0;
  uint32_t prefill_chunk = 512;
  uint32_t threads = 0;  // 0: one per core.

  std::string control;  // Empty: no cluster, everything is computed here.
  std::string tenant = "default";
  std::string ucx_tls = UcxTransportOptions().tls;
  bool require_rdma = false;
  bool store = false;           // Store the prompt's resume point after prefill.
  bool store_finished = false;  // Store the whole sequence at the end.
  absl::Duration connect_timeout = absl::Seconds(10);
  absl::Duration deadline = absl::Seconds(30);  // Of one fetch, or one put.

  std::string metrics;  // host:port of /metrics while it runs; empty: none.
  uint32_t drift_rows_per_sample = DriftOptions().rows_per_sample;  // 0: none.

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

struct RunReport {
  std::string rotation_hash;
  std::string format_id;
  uint32_t prompt_tokens = 0;
  uint32_t hit_tokens = 0;
  uint32_t fetched_objects = 0;
  uint64_t fetched_bytes = 0;
  double lookup_fetch_s = 0;
  std::string miss_reason;      // Why hit_tokens is 0 although a cluster was asked.
  uint32_t stored_objects = 0;  // By this run, or found in place.
  uint64_t stored_bytes = 0;
  uint64_t bf16_bytes = 0;     // The same blocks in BF16.
  uint64_t history_bytes = 0;  // The int2 objects among stored_bytes.
  uint64_t history_bf16_bytes = 0;
  uint32_t finished_objects = 0;  // What store_finished stored or found in place.
  uint64_t finished_bytes = 0;
  std::vector<std::string> store_failures;
  double ttft_s = 0;             // Lookup, fetch and prefill, to the first token.
  double decode_s = 0;           // The tokens after the first.
  std::vector<uint32_t> tokens;  // Generated.
  std::string text;
  std::string logits_sha256;   // Over the logits of every sampled position.
  std::string objects_sha256;  // Over the payloads this run stores, or would store.
  DriftStats drift;            // Of the rows that this run demoted.

  std::string ToJson() const;
};

// Errors are those of the parts, each naming its file, field or address. Blocks until done.
absl::StatusOr<RunReport> RunWorker(const RunOptions& options);

}  // namespace okv

#endif  // OKV_CMD_WORKER_RUN_H_
