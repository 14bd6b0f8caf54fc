#ifndef OKV_CLIENT_TRANSPORT_UCX_PATHS_H_
#define OKV_CLIENT_TRANSPORT_UCX_PATHS_H_

// Private to ucx_transport.cc: which ways UCX has, and which it takes. UCX 1.13 tells much of this
// in printouts only.

#include <ucp/api/ucp.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/transport/transport.h"

namespace okv::ucx {

// The transports of an endpoint's lanes: "tcp/lo,cuda_ipc/cuda"; "(connecting)" before there are
// any.
std::string LanesOf(ucp_ep_h endpoint);

// Whether this version of UCX may carry a device's memory. 1.22.0 may not: when any connection to a
// process ends, its cuda_ipc unmaps all of that process's memory, in use or not (openucx/ucx, pull
// requests 11744 and 11777; releases before and after it do not).
bool SafeWithDevices(unsigned major, unsigned minor, unsigned release);

// kFailedPrecondition naming what `options` require and the context has not: a safe version and
// CUDA memory for a device, an RDMA device, a way between GPU memories.
absl::Status CheckPaths(const UcxTransportOptions& options, ucp_context_h context);

// What CheckPaths finds out by these, from a printout of a context's resources.
bool ListsRdma(absl::string_view resources);
bool ListsCudaIpc(absl::string_view resources);

// Connection::device_path of an endpoint with these lanes.
std::string DevicePath(absl::string_view lanes, const UcxTransportOptions& options);

}  // namespace okv::ucx

#endif  // OKV_CLIENT_TRANSPORT_UCX_PATHS_H_
