#include "cmd/bench/local_service.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/transport/address.h"
#include "cmd/support/files.h"
#include "proto/bf16.h"
#include "proto/check.h"
#include "proto/control_channel.h"
#include "proto/data_plane.h"
#include "proto/page_layout.h"
#include "proto/rotation_set.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr char kTenant[] = "bench";
constexpr uint64_t kDramBesideHbmBytes = uint64_t{256} << 20;
constexpr absl::Duration kPutTimeout = absl::Seconds(60);

Format MakeFormat(const RotationSet& rotations) {
  Format format;
  format.model = rotations.model;
  format.weights_revision = rotations.weights_revision;
  format.layer_ids = rotations.layer_ids;
  format.kv_heads = rotations.kv_heads;
  format.head_dim_k = rotations.head_dim;
  format.head_dim_v = rotations.head_dim;
  format.rope_theta = 10000;
  format.group_size = rotations.group_size;
  format.rotation_hash = rotations.hash();
  return format;
}

PageLayout LayoutOf(const BlockShape& shape) {
  return {.layers_count = shape.layers,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .group_size = shape.group_size};
}

BlockKey KeyOf(uint64_t number) { return {.bytes = Sha256(absl::StrCat("block ", number))}; }

}  // namespace

absl::Status BlockShape::Validate() const {
  const auto refuse = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  if (layers == 0 || layers > kLayersMax) {
    return refuse("--block_layers ", layers, ": 1 to ", kLayersMax);
  }
  if (kv_heads == 0 || kv_heads > kKvHeadsMax) {
    return refuse("--kv_heads ", kv_heads, ": 1 to ", kKvHeadsMax);
  }
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return refuse("--head_dim ", head_dim, ": 64, 128 or 256");
  }
  if (group_size < 32 || group_size > head_dim || !std::has_single_bit(group_size)) {
    return refuse("--group_size ", group_size, ": a power of two, 32 to --head_dim");
  }
  return absl::OkStatus();
}

RotationSet MakeHadamardSet(const BlockShape& shape) {
  RotationSet set;
  set.model = std::string("made-up");
  set.weights_revision = std::string("1");
  for (uint32_t layer = 0; layer < shape.layers; ++layer) set.layer_ids.push_back(layer);
  set.kv_heads = shape.kv_heads;
  set.head_dim = shape.head_dim;
  set.group_size = shape.group_size;
  set.method = "hadamard";
  const float entry = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (uint32_t i = 0; i < shape.head_dim; ++i) {
      for (uint32_t j = 0; j < shape.head_dim; ++j) {
        set.r_k.push_back(FloatToBf16((std::popcount(i & j) & 1) != 0 ? -entry : entry));
      }
    }
  }
  set.r_v = set.r_k;
  const size_t heads = size_t{shape.layers} * shape.kv_heads;
  const uint32_t last = shape.head_dim - 1;
  set.clip_rank_k.assign(heads, last - 5 * shape.head_dim / 128);
  set.clip_rank_v.assign(heads, last - 10 * shape.head_dim / 128);
  return set;
}

uint64_t BlockShape::block_bytes() const { return LayoutOf(*this).block_bytes(Codec::kInt2); }
uint64_t BlockShape::bf16_bytes() const { return LayoutOf(*this).block_bytes(Codec::kBf16); }

absl::StatusOr<std::unique_ptr<PayloadMemory>> PayloadMemory::Create(uint64_t bytes) {
  void* base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes, " bytes: ", std::strerror(errno)));
  }
  madvise(base, bytes, MADV_HUGEPAGE);  // Where the system has them.
  std::memset(base, 0, bytes);
  return absl::WrapUnique(new PayloadMemory({static_cast<uint8_t*>(base), bytes}));
}

PayloadMemory::~PayloadMemory() { munmap(span_.data(), span_.size()); }

void FillRandom(uint64_t seed, absl::Span<uint8_t> bytes) {
  std::mt19937_64 random(seed);
  size_t at = 0;
  for (; at + sizeof(uint64_t) <= bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, sizeof(word));
  }
  for (; at < bytes.size(); ++at) bytes[at] = static_cast<uint8_t>(random());
}

absl::StatusOr<std::unique_ptr<LocalService>> LocalService::Start(
    const LocalServiceOptions& options) {
  auto service = absl::WrapUnique(new LocalService(options));
  const RotationSet rotations = MakeHadamardSet(options.shape);
  OKV_RETURN_IF_ERROR(rotations.Validate());
  service->format_ = MakeFormat(rotations);
  OKV_RETURN_IF_ERROR(service->format_.Validate());
  OKV_RETURN_IF_ERROR(service->StartPrograms());
  ClusterOptions cluster;
  cluster.control_address = service->control_address_;
  OKV_RETURN_IF_ERROR(Cluster::PublishRotation(cluster, rotations).status());
  OKV_RETURN_IF_ERROR(service->Connect());
  return service;
}

LocalService::~LocalService() {
  cluster_.reset();
  transport_.reset();
  // What they hold was made up: nothing is worth a clean stop, which would write it to disk.
}

std::vector<std::string> LocalService::NodeCommand() const {
  // An eighth more than is put stays below the watermark (0.9) above which a node spills.
  const uint64_t bytes = options_.objects_bytes + options_.objects_bytes / 8 + (64 << 20);
  std::vector<std::string> argv = {ProgramPath("okv-node"),
                                   "--control",
                                   control_address_,
                                   "--data_dir",
                                   absl::StrCat(options_.directory, "/node"),
                                   "--ucx_tls",
                                   options_.tls,
                                   "--ready_file",
                                   absl::StrCat(options_.directory, "/node.json")};
  const auto add = [&argv](const auto&... word) { argv.push_back(absl::StrCat(word...)); };
  if (options_.gpus.has_value()) {
    add("--hbm_bytes=", bytes);
    add("--hbm_device=", options_.gpus->node);
    add("--require_gpudirect=", options_.require_gpudirect ? "true" : "false");
    add("--dram_bytes=", kDramBesideHbmBytes);
  } else {
    add("--dram_bytes=", bytes);
  }
  return argv;
}

absl::Status LocalService::StartPrograms() {
  const absl::Time until = absl::Now() + options_.start_timeout;
  const auto path = [this](const char* name) {
    return absl::StrCat(options_.directory, "/", name);
  };
  const std::string port_file = path("control.port");
  OKV_ASSIGN_OR_RETURN(control_,
                       ChildProcess::Start({.argv = {ProgramPath("okv-control"), "--data_dir",
                                                     path("control"), "--port_file", port_file},
                                            .environment = {},
                                            .output_path = path("control.log")}));
  OKV_RETURN_IF_ERROR(control_->WaitForFile(port_file, until));
  OKV_ASSIGN_OR_RETURN(std::string port, ReadFile(port_file));
  control_address_ = absl::StrCat("127.0.0.1:", absl::StripTrailingAsciiWhitespace(port));
  OKV_ASSIGN_OR_RETURN(
      node_, ChildProcess::Start(
                 {.argv = NodeCommand(), .environment = {}, .output_path = path("node.log")}));
  OKV_RETURN_IF_ERROR(node_->WaitForFile(path("node.json"), until));
  OKV_ASSIGN_OR_RETURN(const std::string text, ReadFile(path("node.json")));
  const auto ready = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!ready.is_object()) return absl::UnavailableError("okv-node wrote no JSON");
  node_address_ = {.node_id = ready.value("node_id", ""),
                   .data_address = ready.value("data_address", "")};
  metrics_address_ = ready.value("metrics_address", "");
  return absl::OkStatus();
}

absl::Status LocalService::Connect() {
  UcxTransportOptions ucx;
  ucx.tls = options_.tls;
  if (options_.gpus.has_value()) {
    OKV_ASSIGN_OR_RETURN(device_, OpenCudaDevice(static_cast<int>(options_.gpus->worker)));
    ucx.device = device_.get();
    ucx.require_gpudirect = options_.require_gpudirect;
  }
  OKV_ASSIGN_OR_RETURN(transport_, CreateUcxTransport(ucx));
  ClusterOptions options;
  options.control_address = control_address_;
  options.tenant = kTenant;
  options.client_name = "okv-bench";
  options.device = device_.get();
  OKV_ASSIGN_OR_RETURN(cluster_, Cluster::Connect(options, format_, transport_.get()));
  return absl::OkStatus();
}

absl::StatusOr<std::string> LocalService::NodeMetrics() const {
  OKV_ASSIGN_OR_RETURN(const SocketAddress address, ParseAddress(metrics_address_));
  const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval timeout = {.tv_sec = 5, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  constexpr absl::string_view kRequest = "GET /metrics HTTP/1.0\r\n\r\n";
  std::string answer;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0 &&
      write(fd, kRequest.data(), kRequest.size()) == static_cast<ssize_t>(kRequest.size())) {
    char buffer[4096];
    for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, got);
  }
  close(fd);
  const size_t body = answer.find("\r\n\r\n");
  if (body != std::string::npos) return answer.substr(body + 4);
  return absl::UnavailableError(absl::StrCat("no metrics at ", metrics_address_));
}

absl::StatusOr<std::string> LocalService::Ticket() const {
  const ControlChannel control(control_address_);
  v1::OpenSessionRequest request;
  request.set_protocol_major(kProtocolMajor);
  request.set_protocol_minor(kProtocolMinor);
  request.set_tenant(kTenant);
  request.set_format(format_.Canonical());
  v1::OpenSessionResponse response;
  grpc::ClientContext context;
  OKV_RETURN_IF_ERROR(FromGrpc(control.stub()->OpenSession(&context, request, &response)));
  return response.ticket();
}

absl::Status LocalService::Put(uint64_t first, absl::Span<const uint8_t> payloads) {
  OKV_CHECK(payloads.size() % block_bytes() == 0);
  std::vector<PutItem> items;
  for (size_t at = 0; at < payloads.size(); at += block_bytes()) {
    const uint64_t number = first + items.size();
    // Block 0 would be a sink, and BF16.
    items.push_back({.id = {.key = KeyOf(number + 1), .codec = Codec::kInt2},
                     .index = BlockIndex(static_cast<uint32_t>(number + 1)),
                     .parent = KeyOf(number),
                     .payload = payloads.subspan(at, block_bytes()),
                     .memory = memory_kind()});
  }
  for (const absl::Status& status : cluster_->Put(items, "bench", kPutTimeout)) {
    OKV_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

std::vector<FetchItem> LocalService::Items(uint64_t first, absl::Span<uint8_t> buffers) const {
  const uint64_t bytes = options_.shape.block_bytes();
  OKV_CHECK(buffers.size() % bytes == 0);
  std::vector<FetchItem> items;
  for (size_t at = 0; at < buffers.size(); at += bytes) {
    const uint64_t number = first + items.size() + 1;
    items.push_back({.id = {.key = KeyOf(number), .codec = Codec::kInt2},
                     .index = BlockIndex(static_cast<uint32_t>(number)),
                     .nodes = {node_address_},
                     .buffer = buffers.subspan(at, bytes),
                     .memory = memory_kind()});
  }
  return items;
}

}  // namespace okv
