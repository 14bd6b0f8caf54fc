#include "client/transport/ucx_environment.h"

#include <ucp/api/ucp.h>

#include <cstdlib>
#include <string>

#include "proto/check.h"

namespace okv::ucx {
namespace {

// 0 where it worked, or was not needed. A zero-copy send over TCP that fails in its middle, because
// the peer is gone, is completed twice (tcp_ep.c: uct_tcp_ep_sendv), and where UCX has assertions,
// as Debian's 1.13 has, that ends the process: any worker that dies could end a node. Copies of
// 512 KiB instead of UCX's 8 KiB cost nothing that can be measured beside the socket's own.
// From 1.16 on these settings do not reach the protocols of payloads.
int AvoidZeroCopyOverTcp() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  if (major != 1 || minor >= 16) return 0;
  return setenv("UCX_ZCOPY_THRESH", "inf", /*overwrite=*/0) |
         setenv("UCX_TCP_TX_SEG_SIZE", std::to_string(kTcpSegmentBytes).c_str(), /*overwrite=*/0);
}

}  // namespace

void SetUcxEnvironment() {
  // A restarted node takes its old port again while its old connections linger.
  static const int reuse_address = setenv("UCX_TCP_CM_REUSEADDR", "y", /*overwrite=*/0);
  // With PUTs over TCP a sender whose receiver closed in the middle can get an acknowledgement that
  // it no longer waits for, and UCX 1.13 aborts the process (tcp_ep.c: PUT_TX_WAITING_ACK): any
  // worker that cuts a fetch could end a node. Messages carry the payload as well.
  static const int tcp_put = setenv("UCX_TCP_PUT_ENABLE", "n", /*overwrite=*/0);
  // Not the operator's choice: both ends must have the same.
  static const int tcp_segment =
      setenv("UCX_TCP_RX_SEG_SIZE", std::to_string(kTcpSegmentBytes).c_str(), /*overwrite=*/1);
  // Otherwise the transport's thread itself waits in connect(), for minutes when the link is down,
  // and no deadline of any connection is kept.
  static const int connect_async = setenv("UCX_TCP_CONN_NB", "y", /*overwrite=*/0);
  static const int copies = AvoidZeroCopyOverTcp();
  OKV_CHECK(reuse_address == 0 && tcp_put == 0 && tcp_segment == 0 && connect_async == 0 &&
            copies == 0);
}

void SetUcxDeviceEnvironment() {
  static const int get = setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on", /*overwrite=*/1);
  static const int no_put = setenv("UCX_PROTOS", "^rndv/put/*", /*overwrite=*/1);
  OKV_CHECK(get == 0 && no_put == 0);
}

}  // namespace okv::ucx
