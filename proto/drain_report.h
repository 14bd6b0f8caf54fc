#ifndef OKV_PROTO_DRAIN_REPORT_H_
#define OKV_PROTO_DRAIN_REPORT_H_

#include <cstdint>
#include <string>

#include "proto/control.pb.h"

namespace okv {

// What a node says came of the last drain it was asked for (control.proto), between the node and
// the control plane.
struct DrainReport {
  enum class State { kNone, kRunning, kDone, kGivenUp };
  uint64_t id = 0;  // 0: it was never asked.
  State state = State::kNone;
  uint64_t objects_moved = 0;
  uint64_t bytes_moved = 0;
  uint64_t objects_left = 0;
  uint64_t bytes_left = 0;
  std::string message;  // Why the last of these could not be moved.

  static DrainReport Read(const v1::DrainReport& message);
  void Write(v1::DrainReport* to) const;
};

}  // namespace okv

#endif  // OKV_PROTO_DRAIN_REPORT_H_
