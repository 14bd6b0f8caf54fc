#ifndef OKV_CONTROL_PLANE_SERVER_H_
#define OKV_CONTROL_PLANE_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control_plane/control.h"

namespace okv {

struct ControlServerOptions {
  std::string listen = "127.0.0.1:0";  // Loopback only: there are no certificates yet.
  std::string metrics;                 // host:port of /metrics; empty: none.
  std::string data_dir;
  ControlOptions control;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// One okv-control: gRPC service (control.proto), gRPC health, /metrics, and the sweep thread.
// Thread-safe.
class ControlServer {
 public:
  virtual ~ControlServer() = default;  // Stops.

  // Starts serving. kUnavailable naming the address that is in use, or the data directory that
  // cannot be opened.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Start(const ControlServerOptions& options);

  // host:port with the port bound.
  virtual std::string address() const = 0;
  // host:port of /metrics; empty when there is none.
  virtual std::string metrics_address() const = 0;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_SERVER_H_
