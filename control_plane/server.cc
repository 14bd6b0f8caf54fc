#include "control_plane/server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>
#include <prometheus/text_serializer.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/metrics_server.h"
#include "client/transport/address.h"
#include "control_plane/control_metrics.h"
#include "control_plane/service.h"
#include "control_plane/state_rocksdb.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// 65,536 records of about 150 B.
constexpr int kMessageBytesMax = 16 << 20;
// Calls at a time; more are answered RESOURCE_EXHAUSTED. An inventory holds one while it runs.
constexpr int kThreadsMax = 512;

// Calls Control::Sweep every heartbeat interval. Thread-safe.
class Sweeper {
 public:
  explicit Sweeper(Control* control)
      : control_(control),
        interval_(std::chrono::milliseconds(control->options().heartbeat_interval_ms)),
        thread_([this] { Run(); }) {}
  ~Sweeper() {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    wake_.Signal();
    thread_.join();
  }

 private:
  void Run() {
    MutexLock lock(&mu_);
    while (!stopping_) {
      wake_.WaitFor(&mu_, interval_);
      control_->Sweep();
    }
  }

  Control* const control_;
  const std::chrono::milliseconds interval_;
  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

// Members go in reverse order: the server first.
class GrpcControlServer final : public ControlServer {
 public:
  GrpcControlServer(std::unique_ptr<State> state, std::unique_ptr<Control> control)
      : state_(std::move(state)),
        control_(std::move(control)),
        metrics_(control_.get()),
        service_(control_.get(), &metrics_) {}
  ~GrpcControlServer() override {
    if (server_ == nullptr) return;
    // Calls in flight get a second to end.
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }

  absl::Status Serve(const ControlServerOptions& options) {
    if (!options.metrics.empty()) {
      OKV_ASSIGN_OR_RETURN(metrics_server_, MetricsServer::Start(options.metrics, [this] {
                             return prometheus::TextSerializer().Serialize(metrics_.Collect());
                           }));
    }
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.SetResourceQuota(grpc::ResourceQuota("okv-control").SetMaxThreads(kThreadsMax));
    // Two control planes on one port would each get half of the calls.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    int port = 0;
    builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (server_ == nullptr || port == 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", options.listen, ": the port is in use"));
    }
    address_ = absl::StrCat(options.listen.substr(0, options.listen.rfind(':')), ":", port);
    sweeper_.emplace(control_.get());
    return absl::OkStatus();
  }

  std::string address() const override { return address_; }
  std::string metrics_address() const override {
    return metrics_server_ == nullptr ? "" : metrics_server_->address();
  }

 private:
  const std::unique_ptr<State> state_;
  const std::unique_ptr<Control> control_;
  ControlMetrics metrics_;
  ControlService service_;
  std::unique_ptr<MetricsServer> metrics_server_;
  std::unique_ptr<grpc::Server> server_;
  std::optional<Sweeper> sweeper_;
  std::string address_;
};

}  // namespace

absl::Status ControlServerOptions::Validate() const {
  OKV_RETURN_IF_ERROR(CheckLoopback("listen", listen));
  if (!metrics.empty()) OKV_RETURN_IF_ERROR(CheckLoopback("metrics", metrics));
  if (data_dir.empty()) return absl::InvalidArgumentError("data_dir is missing");
  return control.Validate();
}

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(
    const ControlServerOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<State> state, OpenRocksdbState(options.data_dir));
  OKV_ASSIGN_OR_RETURN(std::unique_ptr<Control> control,
                       Control::Create(options.control, state.get(), Clock::System()));
  auto server = std::make_unique<GrpcControlServer>(std::move(state), std::move(control));
  OKV_RETURN_IF_ERROR(server->Serve(options));
  return server;
}

}  // namespace okv
