// okvctl: what an operator asks of a control plane.
//
//   okvctl --control HOST:PORT [--json] status | rotations | publish FILE | get HASH FILE
//   okvctl --control HOST:PORT [--json] [--drain_limit 10m] drain NODE | undrain NODE
//
// Exit code 0, or 1 with one line on stderr that names what is wrong; 2 for a wrong command line.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cluster.h"
#include "cmd/support/files.h"
#include "proto/control.grpc.pb.h"
#include "proto/control_channel.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

ABSL_FLAG(std::string, control, "", "host:port of okv-control");
ABSL_FLAG(double, timeout_s, 10, "how long to try");
ABSL_FLAG(absl::Duration, drain_limit, absl::Minutes(10),
          "how long a node that is drained may copy what only it holds");
ABSL_FLAG(bool, json, false, "print one JSON object as the last line");

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::chrono::milliseconds kDrainPoll(100);

ClusterOptions OptionsFromFlags() {
  return {.control_address = absl::GetFlag(FLAGS_control),
          .client_name = "okvctl",
          .connect_timeout = absl::Seconds(absl::GetFlag(FLAGS_timeout_s))};
}

// Runs one RPC that needs no session.
template <typename Response, typename Call>
absl::StatusOr<Response> Ask(const Call& call) {
  const ControlChannel control(absl::GetFlag(FLAGS_control));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::milliseconds(static_cast<int64_t>(1000 * absl::GetFlag(FLAGS_timeout_s))));
  Response response;
  const absl::Status status = FromGrpc(call(*control.stub(), &context, &response));
  if (status.ok()) return response;
  return absl::Status(status.code(), absl::StrCat("control plane at ", absl::GetFlag(FLAGS_control),
                                                  ": ", status.message()));
}

void Print(const std::string& text, const Json& json) {
  std::printf("%s", text.c_str());
  if (absl::GetFlag(FLAGS_json)) std::printf("%s\n", json.dump().c_str());
}

std::string HexOf(const std::string& raw) { return absl::BytesToHexString(raw); }

absl::StatusOr<v1::GetClusterStatusResponse> AskStatus() {
  return Ask<v1::GetClusterStatusResponse>([](v1::ControlPlane::Stub& stub,
                                              grpc::ClientContext* context,
                                              v1::GetClusterStatusResponse* response) {
    return stub.GetClusterStatus(context, v1::GetClusterStatusRequest(), response);
  });
}

absl::Status Status() {
  OKV_ASSIGN_OR_RETURN(const v1::GetClusterStatusResponse status, AskStatus());
  std::string text;
  Json nodes = Json::array();
  for (const v1::NodeStatus& node : status.nodes()) {
    absl::StrAppend(&text, node.node_id(), " ", node.alive() ? "alive" : "dead",
                    node.draining() ? " draining" : "", " data ", node.data_address(), " metrics ",
                    node.metrics_address(), " objects ", node.objects_count(), " bytes ",
                    node.objects_bytes(), "\n");
    nodes.push_back({{"node_id", node.node_id()},
                     {"alive", node.alive()},
                     {"draining", node.draining()},
                     {"data_address", node.data_address()},
                     {"metrics_address", node.metrics_address()},
                     {"objects", node.objects_count()},
                     {"bytes", node.objects_bytes()},
                     {"heartbeat_age_ms", node.heartbeat_age_ms()}});
  }
  absl::StrAppend(&text, status.objects_count(), " objects, ", status.rotations_count(),
                  " rotation sets, ", status.formats_count(), " formats, ",
                  status.reservations_count(), " open reservations\n");
  Print(text, {{"nodes", nodes},
               {"objects", status.objects_count()},
               {"rotations", status.rotations_count()},
               {"formats", status.formats_count()},
               {"reservations", status.reservations_count()}});
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> AskDrain(const std::string& node_id, bool cancel) {
  OKV_ASSIGN_OR_RETURN(
      const v1::DrainNodeResponse response,
      Ask<v1::DrainNodeResponse>([&](v1::ControlPlane::Stub& stub, grpc::ClientContext* context,
                                     v1::DrainNodeResponse* response) {
        v1::DrainNodeRequest request;
        request.set_node_id(node_id);
        request.set_cancel(cancel);
        request.set_limit_ms(
            static_cast<uint64_t>(absl::ToInt64Milliseconds(absl::GetFlag(FLAGS_drain_limit))));
        return stub.DrainNode(context, request, response);
      }));
  return response.drain_id();
}

// The node's line of the status.
absl::StatusOr<v1::NodeStatus> AskNode(const std::string& node_id) {
  OKV_ASSIGN_OR_RETURN(const v1::GetClusterStatusResponse status, AskStatus());
  for (const v1::NodeStatus& node : status.nodes()) {
    if (node.node_id() == node_id) return node;
  }
  return absl::NotFoundError(absl::StrCat("no node '", node_id, "' is known"));
}

// Waits until the node says that others have everything, or that its time is up. A control plane
// that is away meanwhile is waited for, for --timeout_s, and so is a node that it calls dead: after
// its own restart it does so until the node has registered. A node that says nothing of this drain
// is waited for, for --drain_limit and --timeout_s.
absl::Status Drain(const std::string& node_id) {
  if (absl::GetFlag(FLAGS_drain_limit) < absl::Milliseconds(1)) {
    return absl::InvalidArgumentError("--drain_limit must be positive");
  }
  OKV_ASSIGN_OR_RETURN(const uint64_t drain_id, AskDrain(node_id, /*cancel=*/false));
  using Steady = std::chrono::steady_clock;
  const absl::Duration dead_limit = absl::Seconds(absl::GetFlag(FLAGS_timeout_s));
  const absl::Duration silent_limit = absl::GetFlag(FLAGS_drain_limit) + dead_limit;
  Steady::time_point alive_at = Steady::now();
  Steady::time_point heard_at = alive_at;
  Mutex mu;
  CondVar elapsed;
  while (true) {
    OKV_ASSIGN_OR_RETURN(const v1::NodeStatus node, AskNode(node_id));
    const Steady::time_point now = Steady::now();
    const v1::DrainReport& report = node.drain();
    const bool heard = report.drain_id() == drain_id;
    if (!node.draining()) return absl::AbortedError("the drain was ended");
    if (node.alive()) alive_at = now;
    if (node.alive() && heard) heard_at = now;
    if (absl::FromChrono(now - alive_at) > dead_limit) {
      return absl::UnavailableError(absl::StrCat(
          "node '", node_id, "' is dead; ", heard ? absl::StrCat(report.objects_left()) : "its",
          " objects were on it only. It goes on when it is back"));
    }
    if (absl::FromChrono(now - heard_at) > silent_limit) {
      return absl::DeadlineExceededError(
          absl::StrCat("node '", node_id, "' says nothing of this drain"));
    }
    if (!node.alive() || !heard || report.state() == v1::DRAIN_RUNNING) {
      MutexLock lock(&mu);
      elapsed.WaitFor(&mu, kDrainPoll);  // Nobody signals it: the wait is the pause.
      continue;
    }
    const bool done = report.state() == v1::DRAIN_DONE;
    const std::string moved = absl::StrCat(report.objects_moved(), " objects of ",
                                           report.bytes_moved(), " bytes were copied");
    Print(done ? absl::StrCat("drained ", node_id, ": ", moved, "; others have everything\n") : "",
          {{"node_id", node_id},
           {"done", done},
           {"objects_moved", report.objects_moved()},
           {"bytes_moved", report.bytes_moved()},
           {"objects_left", report.objects_left()},
           {"bytes_left", report.bytes_left()},
           {"message", report.message()}});
    if (done) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(
        "node '", node_id, "': the time is up. ", moved, "; ", report.objects_left(),
        " objects of ", report.bytes_left(), " bytes could not be moved: ", report.message(),
        ". It serves them, and takes no puts until undrained"));
  }
}

absl::Status Undrain(const std::string& node_id) {
  OKV_RETURN_IF_ERROR(AskDrain(node_id, /*cancel=*/true).status());
  Print(absl::StrCat(node_id, " takes puts again\n"), {{"node_id", node_id}});
  return absl::OkStatus();
}

absl::Status Rotations() {
  OKV_ASSIGN_OR_RETURN(
      const v1::ListRotationsResponse list,
      Ask<v1::ListRotationsResponse>([](v1::ControlPlane::Stub& stub, grpc::ClientContext* context,
                                        v1::ListRotationsResponse* response) {
        return stub.ListRotations(context, v1::ListRotationsRequest(), response);
      }));
  std::string text;
  Json rotations = Json::array();
  for (const v1::RotationSummary& set : list.rotations()) {
    const std::string hash = HexOf(set.rotation_hash());
    absl::StrAppend(&text, hash, " ", set.model(), " ", set.method(), " layers ",
                    set.layers_count(), " kv_heads ", set.kv_heads(), " head_dim ", set.head_dim(),
                    " group_size ", set.group_size(), "\n");
    rotations.push_back({{"rotation_hash", hash},
                         {"model", set.model()},
                         {"weights_revision", set.weights_revision()},
                         {"method", set.method()},
                         {"group_size", set.group_size()},
                         {"file_bytes", set.file_bytes()}});
  }
  Print(text, {{"rotations", rotations}});
  return absl::OkStatus();
}

absl::Status Publish(const std::string& path) {
  OKV_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  const absl::StatusOr<RotationSet> set = RotationSet::Parse(bytes);
  if (!set.ok()) {
    return absl::Status(set.status().code(),
                        absl::StrCat("'", path, "': ", absl::string_view(set.status().message())));
  }
  OKV_ASSIGN_OR_RETURN(const RotationHash hash, Cluster::PublishRotation(OptionsFromFlags(), *set));
  Print(absl::StrCat("published ", hash.Hex(), "\n"), {{"rotation_hash", hash.Hex()}});
  return absl::OkStatus();
}

absl::Status Get(const std::string& hex, const std::string& path) {
  if (hex.size() != 64 || hex.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", hex, "' is not a hash of 64 lower-case hex digits"));
  }
  OKV_ASSIGN_OR_RETURN(const RotationHash hash,
                       RotationHash::FromBytes(absl::HexStringToBytes(hex)));
  OKV_ASSIGN_OR_RETURN(const RotationSet set, Cluster::GetRotation(OptionsFromFlags(), hash));
  OKV_RETURN_IF_ERROR(WriteFileAtomically(path, set.Serialize()));
  Print(absl::StrCat("wrote ", path, "\n"), {{"file", path}});
  return absl::OkStatus();
}

}  // namespace
}  // namespace okv

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "okvctl --control HOST:PORT status | rotations | publish FILE | get HASH FILE | drain NODE | "
      "undrain NODE");
  const std::vector<char*> pointers = absl::ParseCommandLine(argc, argv);
  const std::vector<std::string> words(pointers.begin() + 1, pointers.end());
  if (absl::GetFlag(FLAGS_control).empty()) {
    std::fprintf(stderr, "okvctl: error: --control is missing\n");
    return 2;
  }
  absl::Status status;
  if (words == std::vector<std::string>{"status"}) {
    status = okv::Status();
  } else if (words == std::vector<std::string>{"rotations"}) {
    status = okv::Rotations();
  } else if (words.size() == 2 && words[0] == "publish") {
    status = okv::Publish(words[1]);
  } else if (words.size() == 3 && words[0] == "get") {
    status = okv::Get(words[1], words[2]);
  } else if (words.size() == 2 && words[0] == "drain") {
    status = okv::Drain(words[1]);
  } else if (words.size() == 2 && words[0] == "undrain") {
    status = okv::Undrain(words[1]);
  } else {
    std::fprintf(stderr, "okvctl: error: a command is needed: %s\n",
                 "status, rotations, publish FILE, get HASH FILE, drain NODE, or undrain NODE");
    return 2;
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "okvctl: error: %s\n", std::string(status.message()).c_str());
  return 1;
}
