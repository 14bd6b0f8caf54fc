#include "proto/control_channel.h"

#include <chrono>

namespace okv {
namespace {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  // A control plane is on this machine or in this cluster, never behind a web proxy.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // gRPC's own pauses between attempts begin at a second and grow to two minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // The time of one attempt: room for a lost packet, sent again after 1 s.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

ControlChannel::ControlChannel(const std::string& address)
    : channel_(MakeChannel(address)), stub_(v1::ControlPlane::NewStub(channel_)) {}

bool ControlChannel::Await(absl::Duration at_most) const {
  if (channel_->GetState(/*try_to_connect=*/true) != GRPC_CHANNEL_TRANSIENT_FAILURE) return true;
  return channel_->WaitForConnected(std::chrono::system_clock::now() +
                                    absl::ToChronoMicroseconds(at_most));
}

}  // namespace okv
