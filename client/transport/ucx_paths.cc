#include "client/transport/ucx_paths.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "proto/check.h"

namespace okv::ucx {
namespace {

// Whatever a UCX print function prints.
template <typename Print>
std::string Printed(Print print) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* stream = open_memstream(&text, &size);
  OKV_CHECK(stream != nullptr);
  print(stream);
  std::fclose(stream);
  std::string result(text, size);
  std::free(text);
  return result;
}

// With it an RDMA device registers GPU memory. (A kernel with dma-buf can do without, but UCX says
// nowhere whether it does.)
bool HasPeerMemory(const UcxTransportOptions& options) {
  return access(options.peer_memory_path.c_str(), F_OK) == 0;
}

}  // namespace

std::string LanesOf(ucp_ep_h endpoint) {
  const std::string text =
      Printed([endpoint](std::FILE* stream) { ucp_ep_print_info(endpoint, stream); });
  std::vector<std::string> lanes;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // "#   lane[0]:  2:posix/memory.0 md[2] -> ...": number, transport/device, path.
    const size_t slash = line.find('/');
    if (!absl::StrContains(line, "lane[") || slash == line.npos) continue;
    const size_t begin = line.rfind(':', slash);
    const size_t end = line.find_first_of(". ", slash);
    if (begin == line.npos || end == line.npos) continue;
    std::string lane(line.substr(begin + 1, end - begin - 1));
    if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(lane);
  }
  return lanes.empty() ? "(connecting)" : absl::StrJoin(lanes, ",");
}

bool ListsRdma(absl::string_view resources) {
  for (const absl::string_view name : {" rc_", " dc_", " ud_"}) {
    if (absl::StrContains(resources, name)) return true;
  }
  return false;
}

bool ListsCudaIpc(absl::string_view resources) {
  return absl::StrContains(resources, " cuda_ipc/");
}

bool SafeWithDevices(unsigned major, unsigned minor, unsigned release) {
  return major != 1 || minor != 22 || release != 0;
}

absl::Status CheckPaths(const UcxTransportOptions& options, ucp_context_h context) {
  if (options.device != nullptr) {
    unsigned major = 0;
    unsigned minor = 0;
    unsigned release = 0;
    ucp_get_version(&major, &minor, &release);
    if (!SafeWithDevices(major, minor, release)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "payloads are to be in the memory of ", options.device->name(), ", and UCX ", major, ".",
          minor, ".", release, " unmaps such memory while it is in use: take another version"));
    }
    ucp_context_attr_t attributes = {};
    attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    const ucs_status_t status = ucp_context_query(context, &attributes);
    if (status != UCS_OK || (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) == 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "payloads are to be in the memory of ", options.device->name(),
          ", and this UCX knows no CUDA memory (ucx_info -d lists what it has; "
          "deploy/bootstrap.sh --with-cuda fetches one that does; it needs the driver's "
          "libcuda and libnvidia-ml)"));
    }
  }
  if (!options.require_rdma && !options.require_gpudirect) return absl::OkStatus();
  const std::string resources =
      Printed([context](std::FILE* stream) { ucp_context_print_info(context, stream); });
  if (options.require_rdma && !ListsRdma(resources)) {
    return absl::FailedPreconditionError(
        "RDMA is required, but UCX found no RDMA device (ucx_info -d lists what it finds)");
  }
  if (options.require_gpudirect && !ListsCudaIpc(resources) &&
      !(ListsRdma(resources) && HasPeerMemory(options))) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPUDirect is required, but UCX found neither cuda_ipc nor an RDMA device "
                     "with peer memory (",
                     options.peer_memory_path, "); ucx_info -d lists what it finds"));
  }
  return absl::OkStatus();
}

std::string DevicePath(absl::string_view lanes, const UcxTransportOptions& options) {
  if (options.device == nullptr) return "";
  if (absl::StrContains(lanes, "cuda_ipc/")) return "cuda_ipc";
  for (const absl::string_view name : {"rc_", "dc_", "ud_"}) {
    if (absl::StrContains(lanes, name) && HasPeerMemory(options)) return "rdma";
  }
  return "staged";
}

}  // namespace okv::ucx
