#ifndef OKV_CLIENT_METRICS_SERVER_H_
#define OKV_CLIENT_METRICS_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace okv {

// Serves GET /metrics over HTTP/1.1, one request a connection, one connection at a time: its
// clients are a Prometheus server and people with curl. (prometheus-cpp's own server throws when
// its port is in use.) Thread-compatible.
class MetricsServer {
 public:
  // Listens on "host:port", port 0: any free one. kUnavailable naming the address when it is in
  // use; kInvalidArgument when it cannot be parsed. `text` is called on the server's thread.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address,
                                                              std::function<std::string()> text);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // With the port bound.
  const std::string& address() const { return address_; }

 private:
  MetricsServer(int listen_fd, int stop_fd, std::string address, std::function<std::string()> text);
  void Run();
  void Answer(int fd);

  const int listen_fd_;
  const int stop_fd_;  // An eventfd: written once, to stop.
  const std::string address_;
  const std::function<std::string()> text_;
  std::thread thread_;
};

}  // namespace okv

#endif  // OKV_CLIENT_METRICS_SERVER_H_
