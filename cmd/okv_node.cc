// okv-node: a cache node. Holds objects in HBM, DRAM and on disk, takes and sends them over UCX,
// reports to okv-control, shows /metrics. Stops on SIGTERM or SIGINT: spills what only memory
// holds, then exits.
//
//   okv-node --control HOST:PORT --data_dir DIR [--listen HOST:PORT] [--metrics HOST:PORT] [...]
//
// Exit code 0 after a signal, or 1 with one line on stderr that names what is wrong.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache_node/node.h"
#include "client/device_memory.h"
#include "client/transport/transport.h"
#include "cmd/support/files.h"
#include "cmd/support/service.h"
#include "nlohmann/json.hpp"
#include "proto/clock.h"
#include "proto/status_macros.h"

ABSL_FLAG(std::string, control, "", "host:port of okv-control");
ABSL_FLAG(std::string, listen, "127.0.0.1:0", "host:port for workers (UCX); port 0: any free one");
ABSL_FLAG(std::string, metrics, "127.0.0.1:0", "host:port for /metrics; port 0: any free one");
ABSL_FLAG(std::string, data_dir, "", "directory of the disk tier; belongs to one node");
ABSL_FLAG(uint64_t, dram_bytes, uint64_t{1} << 30, "size of the DRAM arena");
ABSL_FLAG(uint64_t, hbm_bytes, 0, "size of the arena in a GPU's memory; 0: no HBM tier");
ABSL_FLAG(int32_t, hbm_device, 0, "the GPU of --hbm_bytes, by CUDA's number");
ABSL_FLAG(uint64_t, disk_bytes, uint64_t{16} << 30, "limit of the disk tier");
ABSL_FLAG(uint64_t, disk_free_floor_bytes, 0,
          "free bytes on data_dir's file system below which nothing is spilled");
ABSL_FLAG(
    std::string, tenant_budgets, "",
    "tenant=bytes,...,*=bytes: payload bytes beyond which a tenant's objects are the first to "
    "go; '*' is who is not named; default: no budgets");
ABSL_FLAG(std::string, node_id, "", "this node's name; default: the one data_dir remembers");
ABSL_FLAG(std::string, ucx_tls, okv::UcxTransportOptions().tls,
          "transports, as UCX_TLS takes them");
ABSL_FLAG(std::string, net_devices, "lo", "network devices, as UCX_NET_DEVICES takes them");
ABSL_FLAG(bool, require_rdma, false, "refuse to start without an RDMA device");
ABSL_FLAG(bool, require_gpudirect, false,
          "refuse to start when HBM reaches a worker's GPU through host memory only");
ABSL_FLAG(uint64_t, device_staging_bytes, okv::UcxTransportOptions().device_staging_bytes,
          "of the GPU's memory beside --hbm_bytes, where what lies apart in HBM is put together "
          "to travel; 0: each object travels on its own");
ABSL_FLAG(bool, prefault, true, "touch the whole arena before serving");
ABSL_FLAG(absl::Duration, control_timeout, absl::Seconds(30),
          "how long to try to register before giving up");
ABSL_FLAG(absl::Duration, spill_timeout, absl::Seconds(20),
          "how long a stopping node may spill what only memory holds");
ABSL_FLAG(std::string, ready_file, "",
          "written once the node serves: JSON with node_id, data_address, metrics_address");

namespace okv {
namespace {

void Log(const std::string& line) {
  std::fprintf(stderr, "%s okv-node: %s\n",
               absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone()).c_str(),
               line.c_str());
}

absl::StatusOr<NodeOptions> OptionsFromFlags() {
  NodeOptions options;
  options.control_address = absl::GetFlag(FLAGS_control);
  options.listen_address = absl::GetFlag(FLAGS_listen);
  options.metrics_address = absl::GetFlag(FLAGS_metrics);
  options.data_dir = absl::GetFlag(FLAGS_data_dir);
  options.disk_free_floor_bytes = absl::GetFlag(FLAGS_disk_free_floor_bytes);
  absl::StatusOr<TenantBudgets> budgets = TenantBudgets::Parse(absl::GetFlag(FLAGS_tenant_budgets));
  if (!budgets.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tenant_budgets: ", budgets.status().message()));
  }
  options.tenant_budgets = *std::move(budgets);
  options.node_id = absl::GetFlag(FLAGS_node_id);
  options.dram_bytes = absl::GetFlag(FLAGS_dram_bytes);
  options.hbm_bytes = absl::GetFlag(FLAGS_hbm_bytes);
  options.disk_bytes = absl::GetFlag(FLAGS_disk_bytes);
  options.prefault = absl::GetFlag(FLAGS_prefault);
  options.control_timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_control_timeout));
  options.spill_timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_spill_timeout));
  return options;
}

// The device of the HBM tier; null without one.
absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenDevice() {
  if (absl::GetFlag(FLAGS_hbm_bytes) == 0) {
    if (!absl::GetFlag(FLAGS_require_gpudirect)) return nullptr;
    return absl::InvalidArgumentError(
        "--require_gpudirect: there is no HBM tier that it could be about (--hbm_bytes)");
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> device =
      OpenCudaDevice(absl::GetFlag(FLAGS_hbm_device));
  if (device.ok()) return device;
  return absl::Status(device.status().code(),
                      absl::StrCat("--hbm_bytes ", absl::GetFlag(FLAGS_hbm_bytes), ": ",
                                   device.status().message()));
}

absl::Status Run(const StopWaiter& wait_for_stop) {
  OKV_ASSIGN_OR_RETURN(NodeOptions options, OptionsFromFlags());
  // First: the transport and the node hold it.
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceMemory> device, OpenDevice());
  options.hbm_device = device.get();
  OKV_RETURN_IF_ERROR(options.Validate());
  UcxTransportOptions ucx;
  ucx.tls = absl::GetFlag(FLAGS_ucx_tls);
  ucx.net_devices = absl::GetFlag(FLAGS_net_devices);
  ucx.require_rdma = absl::GetFlag(FLAGS_require_rdma);
  ucx.require_gpudirect = absl::GetFlag(FLAGS_require_gpudirect);
  ucx.device = device.get();
  ucx.device_staging_bytes = absl::GetFlag(FLAGS_device_staging_bytes);
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<Transport> transport, CreateUcxTransport(ucx));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<Node> node,
                       Node::Start(options, std::move(transport), Clock::System(), Log));
  const nlohmann::ordered_json ready = {{"node_id", node->node_id()},
                                        {"data_address", node->data_address()},
                                        {"metrics_address", node->metrics_address()}};
  if (const std::string path = absl::GetFlag(FLAGS_ready_file); !path.empty()) {
    OKV_RETURN_IF_ERROR(WriteFileAtomically(path, absl::StrCat(ready.dump(), "\n")));
  }
  std::printf("okv-node ready %s\n", ready.dump().c_str());
  std::fflush(stdout);
  Log(absl::StrCat("stopping on signal ", wait_for_stop()));
  return absl::OkStatus();
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("okv-node: a cache node of OscarKV (see --helpfull)");
  return okv::RunService("okv-node", argc, argv, okv::Run);
}
