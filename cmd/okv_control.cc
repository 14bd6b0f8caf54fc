// okv-control: the control plane. Prefix index, placement, rotation sets; state in RocksDB.
//
//   okv-control --data_dir DIR [--listen HOST:PORT] [--metrics HOST:PORT] [...]
//
// Exit code 0 after SIGTERM or SIGINT, or 1 with one line on stderr that names what is wrong.

#include <cstdio>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "cmd/support/files.h"
#include "cmd/support/service.h"
#include "control_plane/server.h"
#include "proto/status_macros.h"

ABSL_FLAG(std::string, listen, "127.0.0.1:0",
          "host:port of the gRPC service; port 0: any free one");
ABSL_FLAG(std::string, metrics, "", "host:port for /metrics; empty: none");
ABSL_FLAG(std::string, data_dir, "", "directory of the durable state; belongs to one okv-control");
ABSL_FLAG(uint32_t, heartbeat_interval_ms, 1000, "what nodes are told");
ABSL_FLAG(uint32_t, node_timeout_ms, 5000, "a node silent for so long is given up");
ABSL_FLAG(uint32_t, reservation_timeout_ms, 30000, "a writer silent for so long loses its room");
ABSL_FLAG(uint32_t, ticket_lifetime_s, 3600, "how long a worker's ticket opens node sessions");
ABSL_FLAG(std::string, port_file, "", "written once it serves: the port, alone on a line");

namespace okv {
namespace {

absl::Status Run(const StopWaiter& wait_for_stop) {
  ControlServerOptions options;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.metrics = absl::GetFlag(FLAGS_metrics);
  options.data_dir = absl::GetFlag(FLAGS_data_dir);
  options.control.heartbeat_interval_ms = absl::GetFlag(FLAGS_heartbeat_interval_ms);
  options.control.node_timeout_ms = absl::GetFlag(FLAGS_node_timeout_ms);
  options.control.reservation_timeout_ms = absl::GetFlag(FLAGS_reservation_timeout_ms);
  options.control.ticket_lifetime_s = absl::GetFlag(FLAGS_ticket_lifetime_s);
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<ControlServer> server, ControlServer::Start(options));
  if (const std::string path = absl::GetFlag(FLAGS_port_file); !path.empty()) {
    const std::string port = server->address().substr(server->address().rfind(':') + 1);
    OKV_RETURN_IF_ERROR(WriteFileAtomically(path, absl::StrCat(port, "\n")));
  }
  if (const std::string metrics = server->metrics_address(); !metrics.empty()) {
    std::printf("okv-control metrics on %s\n", metrics.c_str());
  }
  std::printf("okv-control ready on %s\n", server->address().c_str());
  std::fflush(stdout);
  wait_for_stop();
  return absl::OkStatus();
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("okv-control: the control plane of OscarKV (see --helpfull)");
  return okv::RunService("okv-control", argc, argv, okv::Run);
}
