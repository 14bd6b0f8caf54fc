#include "cmd/bench/mooncake.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cmd/support/files.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::Duration kStartTimeout = absl::Seconds(120);
constexpr absl::Duration kRoundTimeout = absl::Seconds(300);

}  // namespace

std::string Mooncake::Path(const std::string& name) const {
  return absl::StrCat(options_.directory, "/", name);
}

absl::StatusOr<std::unique_ptr<Mooncake>> Mooncake::Start(const MooncakeOptions& options) {
  auto mooncake = absl::WrapUnique(new Mooncake(options));
  OKV_RETURN_IF_ERROR(mooncake->StartProcesses());
  return mooncake;
}

absl::Status Mooncake::StartProcesses() {
  const absl::Time until = absl::Now() + kStartTimeout;
  // The package's program is beside its Python.
  const std::string master_program =
      (std::filesystem::path(options_.python).parent_path() / "mooncake_master").string();
  OKV_ASSIGN_OR_RETURN(const int port, FreeTcpPort());
  OKV_ASSIGN_OR_RETURN(const int metrics_port, FreeTcpPort());
  OKV_ASSIGN_OR_RETURN(
      master_, ChildProcess::Start({.argv = {master_program, absl::StrCat("-rpc_port=", port),
                                             absl::StrCat("-metrics_port=", metrics_port)},
                                    .environment = {},
                                    .output_path = Path("master.log")}));
  OKV_RETURN_IF_ERROR(master_->WaitForListener(port, until));
  const std::string address = absl::StrCat("127.0.0.1:", port);
  // A quarter more than a round needs: it evicts above nine tenths.
  const uint64_t segment_bytes = options_.blocks * options_.block_bytes * 5 / 4;
  OKV_ASSIGN_OR_RETURN(
      store_, ChildProcess::Start({.argv = {options_.python, options_.script, "store", "--master",
                                            address, "--directory", options_.directory,
                                            "--segment_bytes", absl::StrCat(segment_bytes)},
                                   .environment = {},
                                   .output_path = Path("store.log")}));
  OKV_RETURN_IF_ERROR(store_->WaitForFile(Path("store.ready"), until));
  OKV_ASSIGN_OR_RETURN(
      client_, ChildProcess::Start({.argv = {options_.python, options_.script, "client", "--master",
                                             address, "--directory", options_.directory, "--blocks",
                                             absl::StrCat(options_.blocks), "--block_bytes",
                                             absl::StrCat(options_.block_bytes), "--request_blocks",
                                             absl::StrCat(options_.request_blocks), "--pids",
                                             absl::StrCat(master_->pid(), ",", store_->pid())},
                                    .environment = {},
                                    .output_path = Path("client.log")}));
  return client_->WaitForFile(Path("client.ready"), until);
}

absl::StatusOr<PeerRound> Mooncake::Run() {
  const uint32_t round = next_round_++;
  OKV_RETURN_IF_ERROR(WriteFileAtomically(Path(absl::StrCat("go.", round)), "go\n"));
  const std::string result_path = Path(absl::StrCat("done.", round));
  OKV_RETURN_IF_ERROR(client_->WaitForFile(result_path, absl::Now() + kRoundTimeout));
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadFile(result_path));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::UnavailableError("mooncake_peer.py wrote no JSON");
  PeerRound result;
  result.put_request_seconds = json.value("put_request_seconds", std::vector<double>());
  result.get_request_seconds = json.value("get_request_seconds", std::vector<double>());
  result.put_cpu_seconds = json.value("put_cpu_seconds", 0.0);
  result.get_cpu_seconds = json.value("get_cpu_seconds", 0.0);
  return result;
}

absl::StatusOr<uint64_t> Mooncake::StoreRssBytes() const {
  OKV_ASSIGN_OR_RETURN(const ChildUsage usage, store_->Usage());
  return usage.rss_bytes;
}

}  // namespace okv
