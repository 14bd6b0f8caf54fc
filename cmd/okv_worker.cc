// okv-worker: the reference decode worker. `run` continues a prompt, `dump` writes activations for
// okv-calibrate.

#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/drift.h"
#include "client/transport/transport.h"
#include "cmd/support/command_flags.h"
#include "cmd/worker/dump.h"
#include "cmd/worker/run.h"

ABSL_FLAG(std::string, model, "", "GGUF file of a Llama-family model");
ABSL_FLAG(std::string, rotation, "",
          "run: rotation set file, or with --control the hash of a published one");
ABSL_FLAG(uint32_t, sink_tokens, 64, "run: tokens at the beginning kept in BF16");
ABSL_FLAG(uint32_t, recent_tokens, 256, "run: last tokens kept in BF16");
ABSL_FLAG(std::string, prompt_file, "", "run: text file that opens the prompt");
ABSL_FLAG(uint32_t, prompt_tokens, 0, "run: tokens of --prompt_file to take; 0 = all");
ABSL_FLAG(std::string, ending, "", "run: text behind them");
ABSL_FLAG(std::string, ending_tokens, "", "run: token ids behind that, separated by commas");
ABSL_FLAG(uint32_t, max_new_tokens, 32, "run: tokens to generate");
ABSL_FLAG(float, temperature, 0, "run: sampling temperature; 0 = greedy");
ABSL_FLAG(uint32_t, top_k, 0, "run: sample from the k likeliest; 0 = all");
ABSL_FLAG(float, top_p, 1, "run: sample from the likeliest that sum to p");
ABSL_FLAG(uint64_t, seed, 0, "run: seed of the sampler");
ABSL_FLAG(uint32_t, prefill_chunk, 512,
          "run: tokens per prefill step; changes no bit of the result");
ABSL_FLAG(uint32_t, threads, 0, "threads; 0 = one per core");
ABSL_FLAG(std::string, control, "", "run: host:port of okv-control; empty = no cluster");
ABSL_FLAG(std::string, tenant, "default", "run: tenant of the session");
ABSL_FLAG(std::string, ucx_tls, okv::UcxTransportOptions().tls,
          "run: transports, as UCX_TLS takes them");
ABSL_FLAG(bool, require_rdma, false, "run: fail when UCX has no RDMA device");
ABSL_FLAG(bool, store, false, "run: store the prompt's resume point");
ABSL_FLAG(bool, store_finished, false, "run: store the finished sequence");
ABSL_FLAG(double, connect_timeout_s, 10, "run: how long to retry an absent control plane");
ABSL_FLAG(double, deadline_s, 30, "run: deadline of a fetch, and of a put");
ABSL_FLAG(std::string, metrics, "",
          "run: host:port for /metrics while it runs; port 0: any free one; empty: none");
ABSL_FLAG(uint32_t, drift_rows_per_sample, okv::DriftOptions().rows_per_sample,
          "run: measure one of so many demoted rows of a layer against the rotation set; 0 = none");
ABSL_FLAG(bool, json, false, "run: print one JSON object as the last line");
ABSL_FLAG(std::string, text, "", "dump: text file to run through the model");
ABSL_FLAG(uint32_t, skip_tokens, 0, "dump: tokens of the text to leave out first");
ABSL_FLAG(uint32_t, tokens, 16384, "dump: tokens, a multiple of --window");
ABSL_FLAG(uint32_t, window, 2048, "dump: tokens per sequence; evenly over the text");
ABSL_FLAG(std::string, out, "", "dump: directory to write");

namespace okv {
namespace {

absl::StatusOr<std::vector<uint32_t>> ParseTokens(const std::string& text) {
  std::vector<uint32_t> tokens;
  for (const absl::string_view piece : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    uint32_t token = 0;
    if (!absl::SimpleAtoi(piece, &token)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ending_tokens: '", piece, "' is not a token id"));
    }
    tokens.push_back(token);
  }
  return tokens;
}

absl::Status Run() {
  absl::StatusOr<std::vector<uint32_t>> ending = ParseTokens(absl::GetFlag(FLAGS_ending_tokens));
  if (!ending.ok()) return ending.status();
  const RunOptions options = {
      .model = absl::GetFlag(FLAGS_model),
      .rotation = absl::GetFlag(FLAGS_rotation),
      .sink_tokens = absl::GetFlag(FLAGS_sink_tokens),
      .recent_tokens = absl::GetFlag(FLAGS_recent_tokens),
      .prompt_file = absl::GetFlag(FLAGS_prompt_file),
      .prompt_tokens = absl::GetFlag(FLAGS_prompt_tokens),
      .ending = absl::GetFlag(FLAGS_ending),
      .ending_tokens = *std::move(ending),
      .max_new_tokens = absl::GetFlag(FLAGS_max_new_tokens),
      .temperature = absl::GetFlag(FLAGS_temperature),
      .top_k = absl::GetFlag(FLAGS_top_k),
      .top_p = absl::GetFlag(FLAGS_top_p),
      .seed = absl::GetFlag(FLAGS_seed),
      .prefill_chunk = absl::GetFlag(FLAGS_prefill_chunk),
      .threads = absl::GetFlag(FLAGS_threads),
      .control = absl::GetFlag(FLAGS_control),
      .tenant = absl::GetFlag(FLAGS_tenant),
      .ucx_tls = absl::GetFlag(FLAGS_ucx_tls),
      .require_rdma = absl::GetFlag(FLAGS_require_rdma),
      .store = absl::GetFlag(FLAGS_store),
      .store_finished = absl::GetFlag(FLAGS_store_finished),
      .connect_timeout = absl::Seconds(absl::GetFlag(FLAGS_connect_timeout_s)),
      .deadline = absl::Seconds(absl::GetFlag(FLAGS_deadline_s)),
      .metrics = absl::GetFlag(FLAGS_metrics),
      .drift_rows_per_sample = absl::GetFlag(FLAGS_drift_rows_per_sample),
  };
  absl::StatusOr<RunReport> report = RunWorker(options);
  if (!report.ok()) return report.status();
  std::printf("prompt %u tokens, %u from the cache (%u objects)\n", report->prompt_tokens,
              report->hit_tokens, report->fetched_objects);
  std::printf("first token after %.3f s; %zu tokens generated\n", report->ttft_s,
              report->tokens.size());
  std::printf("%s\n", report->text.c_str());
  if (absl::GetFlag(FLAGS_json)) std::printf("%s\n", report->ToJson().c_str());
  if (report->store_failures.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(report->store_failures.size(),
                   " objects were not stored, the first: ", report->store_failures.front()));
}

absl::Status Dump() {
  return RunDump({.model = absl::GetFlag(FLAGS_model),
                  .text = absl::GetFlag(FLAGS_text),
                  .skip_tokens = absl::GetFlag(FLAGS_skip_tokens),
                  .tokens = absl::GetFlag(FLAGS_tokens),
                  .window = absl::GetFlag(FLAGS_window),
                  .threads = absl::GetFlag(FLAGS_threads),
                  .out = absl::GetFlag(FLAGS_out)});
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("okv-worker run|dump [flags]; --helpfull lists the flags");
  const std::vector<const char*> arguments(argv, argv + argc);
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  const std::string command = words.size() == 2 ? words[1] : "";
  if (command != "run" && command != "dump") {
    std::fprintf(stderr, "okv-worker: error: one command is needed: run or dump\n");
    return 2;
  }
  absl::Status status = okv::CheckFlagsOf(command, {"run", "dump"}, arguments);
  if (status.ok()) status = command == "run" ? okv::Run() : okv::Dump();
  if (status.ok()) return 0;
  std::fprintf(stderr, "okv-worker: error: %s\n", status.ToString().c_str());
  return 1;
}
