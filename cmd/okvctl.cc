// okvctl: what an operator asks of a control plane.
//
//   okvctl --control HOST:PORT [--json] status | rotations | publish FILE | get HASH FILE
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
#include "client/cluster.h"
#include "cmd/support/files.h"
#include "proto/control.grpc.pb.h"
#include "proto/control_channel.h"
#include "proto/status_macros.h"

ABSL_FLAG(std::string, control, "", "host:port of okv-control");
ABSL_FLAG(double, timeout_s, 10, "how long to try");
ABSL_FLAG(bool, json, false, "print one JSON object as the last line");

namespace okv {
namespace {

using Json = nlohmann::ordered_json;

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

absl::Status Status() {
  OKV_ASSIGN_OR_RETURN(
      const v1::GetClusterStatusResponse status,
      Ask<v1::GetClusterStatusResponse>([](v1::ControlPlane::Stub& stub,
                                           grpc::ClientContext* context,
                                           v1::GetClusterStatusResponse* response) {
        return stub.GetClusterStatus(context, v1::GetClusterStatusRequest(), response);
      }));
  std::string text;
  Json nodes = Json::array();
  for (const v1::NodeStatus& node : status.nodes()) {
    absl::StrAppend(&text, node.node_id(), " ", node.alive() ? "alive" : "dead", " data ",
                    node.data_address(), " metrics ", node.metrics_address(), " objects ",
                    node.objects_count(), " bytes ", node.objects_bytes(), "\n");
    nodes.push_back({{"node_id", node.node_id()},
                     {"alive", node.alive()},
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
      "okvctl --control HOST:PORT status | rotations | publish FILE | get HASH FILE");
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
  } else {
    std::fprintf(stderr, "okvctl: error: a command is needed: %s\n",
                 "status, rotations, publish FILE, or get HASH FILE");
    return 2;
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "okvctl: error: %s\n", std::string(status.message()).c_str());
  return 1;
}
