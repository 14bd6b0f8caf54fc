#ifndef OKV_TESTS_CACHE_NODE_SCRIPTED_CONTROL_H_
#define OKV_TESTS_CACHE_NODE_SCRIPTED_CONTROL_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "proto/check.h"
#include "proto/control.grpc.pb.h"
#include "proto/mutex.h"

namespace okv::testing_support {

// The nodes' half of a control plane on a real gRPC port: it remembers what a node told it, and
// says what a test wants said. A real one cannot be made to lose a registration at a given moment.
// Thread-safe.
class ScriptedControl final : public v1::ControlPlane::Service {
 public:
  explicit ScriptedControl(const std::string& address = "127.0.0.1:0") {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    OKV_CHECK(server_ != nullptr);
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~ScriptedControl() override { server_->Shutdown(std::chrono::system_clock::now()); }
  const std::string& address() const { return address_; }

  // What to answer from now on.
  void SetRegisterStatus(grpc::Status status) {
    MutexLock lock(&mu_);
    register_status_ = std::move(status);
  }
  void FailCommits(int count, grpc::Status status) {
    MutexLock lock(&mu_);
    commit_failures_ = count;
    commit_status_ = std::move(status);
  }
  // Everything reserved goes to this peer.
  void SetPlacement(const v1::Placement& placement) {
    MutexLock lock(&mu_);
    placement_ = placement;
  }
  void SetOpenSessionStatus(grpc::Status status) {
    MutexLock lock(&mu_);
    open_session_status_ = std::move(status);
  }
  void ForgetNode() {
    MutexLock lock(&mu_);
    epoch_ += 100;
    held_.clear();
  }

  struct Seen {
    int registrations = 0;
    int inventories = 0;
    int heartbeats = 0;
    int commit_calls = 0;
    int reserve_calls = 0;
    int session_calls = 0;
    v1::RegisterNodeRequest last_registration;
    // (key, codec) -> write id, as the index would have it.
    std::map<std::pair<std::string, int>, uint64_t> held;
  };
  Seen seen() {
    MutexLock lock(&mu_);
    Seen copy = seen_;
    copy.held = held_;
    return copy;
  }
  // False (and a test failure) when `ready` does not come true.
  bool WaitFor(const char* what, const std::function<bool(const Seen&)>& ready) {
    MutexLock lock(&mu_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (true) {
      Seen now = seen_;
      now.held = held_;
      if (ready(now)) return true;
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "waited in vain for " << what;
        return false;
      }
      changed_.WaitFor(&mu_, std::chrono::milliseconds(100));
    }
  }

  grpc::Status RegisterNode(grpc::ServerContext*, const v1::RegisterNodeRequest* request,
                            v1::RegisterNodeResponse* response) override {
    MutexLock lock(&mu_);
    if (!register_status_.ok()) return register_status_;
    ++seen_.registrations;
    seen_.last_registration = *request;
    response->set_epoch(++epoch_);
    response->set_ticket_key("the ticket key");
    response->set_heartbeat_interval_ms(20);
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override {
    MutexLock lock(&mu_);
    ++seen_.heartbeats;
    response->set_register_again(request->epoch() != epoch_);
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status ReportInventory(grpc::ServerContext*,
                               grpc::ServerReader<v1::ReportInventoryRequest>* reader,
                               v1::ReportInventoryResponse* response) override {
    std::map<std::pair<std::string, int>, uint64_t> held;
    v1::ReportInventoryRequest request;
    uint64_t epoch = 0;
    bool last = false;
    while (reader->Read(&request)) {
      last = request.last();
      epoch = request.epoch();
      for (const v1::ObjectRecord& object : request.objects()) {
        held[{object.key(), object.codec()}] = object.write_id();
      }
    }
    MutexLock lock(&mu_);
    if (!last) return {grpc::StatusCode::CANCELLED, "the inventory was cut"};
    if (epoch != epoch_) return {grpc::StatusCode::ABORTED, "stale epoch"};
    ++seen_.inventories;
    response->set_objects_count(held.size());
    held_ = std::move(held);
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status ReportCommits(grpc::ServerContext*, const v1::ReportCommitsRequest* request,
                             v1::ReportCommitsResponse*) override {
    MutexLock lock(&mu_);
    ++seen_.commit_calls;
    changed_.SignalAll();
    if (commit_failures_ > 0) {
      --commit_failures_;
      return commit_status_;
    }
    if (request->epoch() != epoch_) return {grpc::StatusCode::ABORTED, "stale epoch"};
    for (const v1::ObjectRecord& object : request->added()) {
      held_[{object.key(), object.codec()}] = object.write_id();
    }
    for (const v1::ObjectName& name : request->removed()) held_.erase({name.key(), name.codec()});
    return grpc::Status::OK;
  }
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                       v1::ReserveResponse* response) override {
    MutexLock lock(&mu_);
    ++seen_.reserve_calls;
    for (int i = 0; i < request->objects_size(); ++i) *response->add_placements() = placement_;
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest*,
                           v1::OpenSessionResponse*) override {
    MutexLock lock(&mu_);
    ++seen_.session_calls;
    changed_.SignalAll();
    return open_session_status_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  grpc::Status register_status_ ABSL_GUARDED_BY(mu_);
  grpc::Status commit_status_ ABSL_GUARDED_BY(mu_);
  int commit_failures_ ABSL_GUARDED_BY(mu_) = 0;
  v1::Placement placement_ ABSL_GUARDED_BY(mu_);
  grpc::Status open_session_status_ ABSL_GUARDED_BY(mu_);
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  Seen seen_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<std::string, int>, uint64_t> held_ ABSL_GUARDED_BY(mu_);
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_SCRIPTED_CONTROL_H_
