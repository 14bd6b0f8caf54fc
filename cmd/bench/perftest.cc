#include "cmd/bench/perftest.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "cmd/bench/child.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// The last line is "messages p50 average overall MB/s MB/s(overall) ...", latencies in us; its MB
// is 2^20 bytes.
absl::StatusOr<double> ParseBandwidth(const std::string& output) {
  const absl::string_view text = absl::StripTrailingAsciiWhitespace(output);
  const std::vector<absl::string_view> words =
      absl::StrSplit(text.substr(text.rfind('\n') + 1), ' ', absl::SkipEmpty());
  double mib = 0;
  if (words.size() < 8 || !absl::SimpleAtod(words[5], &mib) || mib <= 0) {
    return absl::UnavailableError(absl::StrCat("ucx_perftest printed no bandwidth: ", output));
  }
  return mib * 1048576.0;
}

}  // namespace

absl::StatusOr<double> RunPerftest(const PerftestOptions& options) {
  OKV_ASSIGN_OR_RETURN(const int port, FreeTcpPort());
  std::vector<std::pair<std::string, std::string>> environment = {
      {"UCX_TLS", options.tls},
      {"UCX_NET_DEVICES", options.net_devices},
      // Else it would inherit what this process's transport has set for itself.
      {"UCX_TCP_PUT_ENABLE", options.service_terms ? "n" : "y"},
      {"UCX_TCP_RX_SEG_SIZE", options.service_terms ? "512K" : "64K"}};
  if (options.service_terms) {
    environment.emplace_back("UCX_MM_ERROR_HANDLING", "y");
  } else {  // UCX's own, whatever SetUcxEnvironment() made of them in this process.
    environment.emplace_back("UCX_TCP_TX_SEG_SIZE", "8K");
    environment.emplace_back("UCX_ZCOPY_THRESH", "auto");
  }
  ChildOptions server_options = {.argv = {options.program, "-p", absl::StrCat(port)},
                                 .environment = environment,
                                 .output_path = absl::StrCat(options.output_path, ".server")};
  OKV_ASSIGN_OR_RETURN(const auto server, ChildProcess::Start(server_options));
  ChildOptions client_options = server_options;
  for (const std::string& word : std::vector<std::string>{
           "127.0.0.1", "-f", "-t", options.test, "-s", absl::StrCat(options.message_bytes), "-n",
           absl::StrCat(options.messages), "-w", absl::StrCat(options.warmup_messages), "-O",
           absl::StrCat(options.outstanding)}) {
    client_options.argv.push_back(word);
  }
  if (options.service_terms) client_options.argv.push_back("-e");
  const absl::Time until = absl::Now() + options.timeout;
  OKV_RETURN_IF_ERROR(server->WaitForListener(port, until));
  client_options.output_path = absl::StrCat(options.output_path, ".client");
  OKV_ASSIGN_OR_RETURN(const auto client, ChildProcess::Start(client_options));
  OKV_ASSIGN_OR_RETURN(const int code, client->Wait(until));
  if (code == 0) return ParseBandwidth(client->output());
  return absl::UnavailableError(absl::StrCat(options.program, " ended with code ", code, ": ",
                                             client->output(), server->output()));
}

}  // namespace okv
