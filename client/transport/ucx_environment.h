#ifndef OKV_CLIENT_TRANSPORT_UCX_ENVIRONMENT_H_
#define OKV_CLIENT_TRANSPORT_UCX_ENVIRONMENT_H_

#include <cstddef>

namespace okv::ucx {

// A payload over TCP comes in messages of this size, each read from the socket into a buffer and
// copied from there (UCX's PUTs, which need no buffer, are off: see SetUcxEnvironment). With UCX's
// own 64 KiB 0.7 CPU seconds a GB, sender and receiver together, with 512 KiB 0.5, as with PUTs; 1
// MiB gained nothing more, and misses a core's L2. A connection has a buffer only while bytes wait
// in it. Part of the protocol: UCX 1.13 does not tell its peer, and a receiver with a smaller
// buffer than its sender's messages crashes. Whoever changes it raises kProtocolMajor.
inline constexpr size_t kTcpSegmentBytes = size_t{512} << 10;

// What UCX reads from the environment only: ucp_config_modify does not reach connection managers.
// Before the first ucp_init of the process. What an operator set stays, but for the segment size.
void SetUcxEnvironment();

// For a process with a device's memory, before SetUcxEnvironment: the receiver fetches payloads
// (GET), the sender never writes them (PUT). A GET ends in the receiver's own process, before the
// buffer is its owner's again. A PUT is the peer's: one that was stopped in between would write
// into the buffer when it goes on, long after this side gave the transfer up, and UCX takes no
// right to a device's memory back. Over a machine without NVLink UCX would choose PUT.
void SetUcxDeviceEnvironment();

}  // namespace okv::ucx

#endif  // OKV_CLIENT_TRANSPORT_UCX_ENVIRONMENT_H_
