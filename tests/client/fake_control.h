#ifndef OKV_TESTS_CLIENT_FAKE_CONTROL_H_
#define OKV_TESTS_CLIENT_FAKE_CONTROL_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "proto/check.h"
#include "proto/control.grpc.pb.h"
#include "proto/format.h"
#include "proto/mutex.h"
#include "proto/rotation_set.h"

namespace okv {

// A control plane that answers what a test wrote down, on a real gRPC port. Thread-safe.
class FakeControl : public v1::ControlPlane::Service {
 public:
  using LookupAnswer = std::function<grpc::Status(const v1::LookupRequest&, v1::LookupResponse*)>;
  using ReserveAnswer =
      std::function<grpc::Status(const v1::ReserveRequest&, v1::ReserveResponse*)>;

  // Listens on `address` ("127.0.0.1:0": any port).
  explicit FakeControl(const std::string& address = "127.0.0.1:0") {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    OKV_CHECK(server_ != nullptr);
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~FakeControl() override { server_->Shutdown(); }
  const std::string& address() const { return address_; }

  void AnswerOpen(const grpc::Status& status) {
    MutexLock lock(&mu_);
    open_status_ = status;
  }
  void SetTicketLife(absl::Duration life) {
    MutexLock lock(&mu_);
    ticket_life_ = life;
  }
  void AnswerLookup(LookupAnswer answer) {
    MutexLock lock(&mu_);
    lookup_ = std::move(answer);
  }
  void AnswerReserve(ReserveAnswer answer) {
    MutexLock lock(&mu_);
    reserve_ = std::move(answer);
  }
  void DamageRotation(std::function<void(std::string*)> damage) {
    MutexLock lock(&mu_);
    damage_rotation_ = std::move(damage);
  }

  int opens() {
    MutexLock lock(&mu_);
    return opens_;
  }
  std::vector<v1::ReserveRequest> reserves() {
    MutexLock lock(&mu_);
    return reserves_;
  }

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    const auto format = Format::Parse(request->format());
    OKV_CHECK(format.ok());
    MutexLock lock(&mu_);
    if (!open_status_.ok()) return open_status_;
    response->set_format_id(std::string(format->id().view()));
    response->set_ticket("ticket-" + std::to_string(++opens_));
    response->set_ticket_expires_wall_us(absl::ToUnixMicros(absl::Now() + ticket_life_));
    response->set_tenant_salt("salt of " + request->tenant());
    return grpc::Status::OK;
  }
  grpc::Status Lookup(grpc::ServerContext*, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override {
    LookupAnswer answer;
    {
      MutexLock lock(&mu_);
      answer = lookup_;
    }
    return answer(*request, response);
  }
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                       v1::ReserveResponse* response) override {
    ReserveAnswer answer;
    {
      MutexLock lock(&mu_);
      reserves_.push_back(*request);
      answer = reserve_;
    }
    return answer(*request, response);
  }
  grpc::Status PublishRotation(grpc::ServerContext*,
                               grpc::ServerReader<v1::PublishRotationRequest>* reader,
                               v1::PublishRotationResponse* response) override {
    std::string file;
    v1::PublishRotationRequest request;
    while (reader->Read(&request)) file += request.chunk();
    const auto parsed = RotationSet::Parse(file);
    if (!parsed.ok()) return {grpc::StatusCode::INVALID_ARGUMENT, "not a rotation set"};
    const std::string hash(parsed->hash().view());
    MutexLock lock(&mu_);
    rotations_[hash] = file;
    response->set_rotation_hash(hash);
    return grpc::Status::OK;
  }
  grpc::Status GetRotation(grpc::ServerContext*, const v1::GetRotationRequest* request,
                           grpc::ServerWriter<v1::GetRotationResponse>* writer) override {
    std::string file;
    {
      MutexLock lock(&mu_);
      const auto found = rotations_.find(request->rotation_hash());
      if (found == rotations_.end()) return {grpc::StatusCode::NOT_FOUND, "no such rotation set"};
      file = found->second;
      if (damage_rotation_) damage_rotation_(&file);
    }
    for (size_t begin = 0; begin < file.size(); begin += 4096) {
      v1::GetRotationResponse response;
      response.set_chunk(file.substr(begin, 4096));
      writer->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  Mutex mu_;
  grpc::Status open_status_ ABSL_GUARDED_BY(mu_);
  absl::Duration ticket_life_ ABSL_GUARDED_BY(mu_) = absl::Hours(1);
  LookupAnswer lookup_ ABSL_GUARDED_BY(mu_);
  ReserveAnswer reserve_ ABSL_GUARDED_BY(mu_);
  std::function<void(std::string*)> damage_rotation_ ABSL_GUARDED_BY(mu_);
  int opens_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<v1::ReserveRequest> reserves_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::string> rotations_ ABSL_GUARDED_BY(mu_);
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace okv

#endif  // OKV_TESTS_CLIENT_FAKE_CONTROL_H_
