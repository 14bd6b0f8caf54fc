#include "client/cluster.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cluster_client.h"
#include "proto/data_plane.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr size_t kRotationChunkBytes = size_t{256} << 10;
// 126 layers x 8 heads x 2 x 128 x 128 x 2 B = 63 MiB with a rotation per head; far above it.
constexpr size_t kRotationBytesMax = size_t{1} << 30;
constexpr size_t kIdleSessionsMax = 4;
// Renewing a ticket that is still good may cost a fetch this much of its deadline, this often.
constexpr absl::Duration kRenewTimeout = absl::Seconds(1);
constexpr absl::Duration kRenewAgain = absl::Seconds(10);

// How long a call waits for a control plane that was away: a connection takes a few round trips.
// Much more and a worker that could compute would stand still.
constexpr absl::Duration kReconnectWait = absl::Milliseconds(100);

void SetDeadline(grpc::ClientContext* context, absl::Duration timeout) {
  context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout));
}

bool MayBeStarting(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// Repeats `call` while the control plane is not there, for connect_timeout.
absl::Status RetryConnecting(const ClusterOptions& options,
                             const std::function<absl::Status()>& call) {
  std::minstd_rand random(std::random_device{}());
  std::uniform_real_distribution<double> unit(0, 1);
  Mutex mu;
  CondVar elapsed;
  const absl::Time give_up = absl::Now() + options.connect_timeout;
  for (int attempt = 1;; ++attempt) {
    const absl::Status status = call();
    if (!MayBeStarting(status)) return status;
    const absl::Duration delay = internal::BackoffDelay(attempt, unit(random));
    if (absl::Now() + delay >= give_up) {
      return absl::UnavailableError(absl::StrCat(
          "no control plane at ", options.control_address, " after ", attempt, " attempts in ",
          absl::FormatDuration(options.connect_timeout), ": ", std::string(status.message())));
    }
    // Nobody signals it: the wait is the delay.
    MutexLock lock(&mu);
    elapsed.WaitFor(&mu, absl::ToChronoNanoseconds(delay));
  }
}

absl::StatusOr<LookupResult> ParseLookup(const v1::LookupResponse& response, size_t keys_count) {
  LookupResult result;
  result.prefix_blocks = response.prefix_blocks();
  result.resume_boundary = response.resume_boundary();
  for (const v1::NodeAddress& node : response.nodes()) {
    result.nodes.push_back({.node_id = node.node_id(), .data_address = node.data_address()});
  }
  for (const v1::BlockLocations& block : response.blocks()) {
    LookupResult::Locations locations;
    locations.int2_nodes.assign(block.int2_nodes().begin(), block.int2_nodes().end());
    locations.bf16_nodes.assign(block.bf16_nodes().begin(), block.bf16_nodes().end());
    for (const auto* nodes : {&locations.int2_nodes, &locations.bf16_nodes}) {
      for (const uint32_t node : *nodes) {
        if (node >= result.nodes.size()) {
          return absl::InternalError("a lookup names a node that it does not list");
        }
      }
    }
    result.blocks.push_back(std::move(locations));
  }
  const uint32_t blocks = std::max(result.prefix_blocks, result.resume_boundary);
  if (result.blocks.size() < blocks || blocks > keys_count) {
    return absl::InternalError("a lookup promises blocks that it does not list");
  }
  return result;
}

}  // namespace

namespace internal {

absl::Duration BackoffDelay(int attempt, double random_unit) {
  const int64_t full_ms = std::min<int64_t>(1000, int64_t{50} << std::min(attempt - 1, 10));
  return absl::Milliseconds(full_ms) * (0.5 + 0.5 * random_unit);
}

}  // namespace internal

absl::Status ClusterOptions::Validate() const {
  if (control_address.empty()) return absl::InvalidArgumentError("control_address is empty");
  if (control_address.rfind(':') == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("control_address '", control_address, "' is not host:port"));
  }
  if (tenant.empty()) return absl::InvalidArgumentError("tenant is empty");
  if (connect_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("connect_timeout must be positive");
  }
  if (rpc_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("rpc_timeout must be positive");
  }
  if (fetch_stall_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("fetch_stall_timeout must be positive");
  }
  return absl::OkStatus();
}

absl::StatusOr<RotationHash> Cluster::PublishRotation(const ClusterOptions& options,
                                                      const RotationSet& rotations) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_RETURN_IF_ERROR(rotations.Validate());
  const std::string file = rotations.Serialize();
  const ControlChannel control(options.control_address);
  v1::PublishRotationResponse response;
  OKV_RETURN_IF_ERROR(RetryConnecting(options, [&] {
    grpc::ClientContext context;
    SetDeadline(&context, options.rpc_timeout + absl::Seconds(file.size() >> 20));
    control.Await(kReconnectWait);
    const auto writer = control.stub()->PublishRotation(&context, &response);
    for (size_t begin = 0; begin < file.size(); begin += kRotationChunkBytes) {
      v1::PublishRotationRequest request;
      request.set_chunk(file.substr(begin, kRotationChunkBytes));
      if (!writer->Write(request)) break;  // Finish says why.
    }
    writer->WritesDone();
    return FromGrpc(writer->Finish());
  }));
  OKV_ASSIGN_OR_RETURN(const RotationHash hash, RotationHash::FromBytes(response.rotation_hash()));
  if (hash != rotations.hash()) {
    return absl::DataLossError(
        absl::StrCat("rotation set ", rotations.hash().Short(), " was stored as ", hash.Short()));
  }
  return hash;
}

absl::StatusOr<RotationSet> Cluster::GetRotation(const ClusterOptions& options,
                                                 const RotationHash& hash) {
  OKV_RETURN_IF_ERROR(options.Validate());
  const ControlChannel control(options.control_address);
  std::string file;
  OKV_RETURN_IF_ERROR(RetryConnecting(options, [&] {
    file.clear();
    grpc::ClientContext context;
    SetDeadline(&context, std::max(options.rpc_timeout, absl::Seconds(60)));
    v1::GetRotationRequest request;
    request.set_rotation_hash(std::string(hash.view()));
    control.Await(kReconnectWait);
    const auto reader = control.stub()->GetRotation(&context, request);
    v1::GetRotationResponse response;
    while (reader->Read(&response)) {
      if (file.size() + response.chunk().size() > kRotationBytesMax) {
        context.TryCancel();
        reader->Finish();
        return absl::DataLossError("a rotation set of more than 1 GiB");
      }
      file += response.chunk();
    }
    return FromGrpc(reader->Finish());
  }));
  absl::StatusOr<RotationSet> rotations = RotationSet::Parse(file);
  if (!rotations.ok()) {
    return absl::DataLossError(absl::StrCat("rotation set ", hash.Short(), " arrived damaged: ",
                                            std::string(rotations.status().message())));
  }
  if (rotations->hash() != hash) {
    return absl::DataLossError(
        absl::StrCat("rotation set ", rotations->hash().Short(), " arrived for ", hash.Short()));
  }
  return rotations;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Connect(const ClusterOptions& options,
                                                          const Format& format,
                                                          Transport* transport) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_RETURN_IF_ERROR(format.Validate());
  if (options.device != nullptr && !transport->takes_device_memory()) {
    return absl::InvalidArgumentError(absl::StrCat("device ", options.device->name(),
                                                   ": the transport was made without a device"));
  }
  auto client = std::make_unique<ClusterClient>(options, format, transport);
  OKV_RETURN_IF_ERROR(client->Open());
  return client;
}

ClusterClient::ClusterClient(const ClusterOptions& options, const Format& format,
                             Transport* transport)
    : options_(options),
      format_(format),
      format_id_(format.id()),
      layout_(PageLayout::Of(format)),
      transport_(transport),
      control_(options.control_address) {}

ClusterClient::~ClusterClient() {
  MutexLock lock(&mu_);
  for (auto& [node, sessions] : idle_) {
    for (const auto& session : sessions) session->Break(absl::CancelledError("closed"));
  }
}

absl::Status ClusterClient::Open() {
  return RetryConnecting(options_, [this] { return RenewTicket(options_.rpc_timeout); });
}

absl::StatusOr<MemoryKind> ClusterClient::KindOf(absl::Span<const uint8_t> memory,
                                                 std::optional<MemoryKind> said) const {
  DeviceMemory* device = options_.device;
  if (device == nullptr) {
    if (said == MemoryKind::kDevice) {
      return absl::InvalidArgumentError("it is in a device's memory, and this cluster has none");
    }
    return MemoryKind::kHost;
  }
  // What was registered is known without asking the driver for every object.
  const bool registered = transport_->has_device_memory(memory);
  MemoryKind kind = MemoryKind::kDevice;
  if (said.has_value()) {
    kind = *said;
  } else if (!registered) {
    OKV_ASSIGN_OR_RETURN(kind, device->KindOf(memory.data()));
  }
  if (kind == MemoryKind::kHost) return kind;
  if (reinterpret_cast<uintptr_t>(memory.data()) % 16 != 0) {
    return absl::InvalidArgumentError("in a device's memory it must be on a multiple of 16");
  }
  if (!registered) {
    return absl::InvalidArgumentError(
        "it is in a device's memory, but not within what was registered with the transport");
  }
  return kind;
}

absl::Status ClusterClient::RenewTicket(absl::Duration timeout) {
  v1::OpenSessionRequest request;
  request.set_protocol_major(kProtocolMajor);
  request.set_protocol_minor(kProtocolMinor);
  request.set_tenant(options_.tenant);
  request.set_format(format_.Canonical());
  v1::OpenSessionResponse response;
  grpc::ClientContext context;
  SetDeadline(&context, timeout);
  control_.Await(std::min(timeout, kReconnectWait));
  OKV_RETURN_IF_ERROR(Named(FromGrpc(control_.stub()->OpenSession(&context, request, &response))));
  if (response.format_id() != format_id_.view()) {
    return absl::FailedPreconditionError(
        "field 'format_id' differs: the control plane encodes formats otherwise");
  }
  const absl::Time now = absl::Now();
  const absl::Time expires = absl::FromUnixMicros(response.ticket_expires_wall_us());
  MutexLock lock(&mu_);
  ticket_ = response.ticket();
  ticket_renew_at_ = now + (expires - now) / 2;
  if (tenant_salt_.empty()) tenant_salt_ = response.tenant_salt();
  if (tenant_salt_ != response.tenant_salt()) {
    return absl::FailedPreconditionError("the tenant's salt changed: connect again");
  }
  return absl::OkStatus();
}

std::string ClusterClient::CurrentTicket() {
  bool renew;
  {
    MutexLock lock(&mu_);
    renew = absl::Now() >= ticket_renew_at_;
    // One call at a time tries, and without a control plane only now and then: reads go on.
    if (renew) ticket_renew_at_ = absl::Now() + kRenewAgain;
  }
  // The old ticket serves until it expires; the node then says so.
  if (renew) RenewTicket(std::min(options_.rpc_timeout, kRenewTimeout)).IgnoreError();
  MutexLock lock(&mu_);
  return ticket_;
}

absl::Duration ClusterClient::RpcTimeout(absl::Time end) const {
  return std::min(options_.rpc_timeout, end - absl::Now());
}

absl::Status ClusterClient::Named(const absl::Status& status) const {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("control plane at ", options_.control_address,
                                                  ": ", status.message()));
}

absl::Status ClusterClient::CallWithSession(absl::Time end, const Rpc& call) {
  const auto once = [&] {
    grpc::ClientContext context;
    const absl::Duration timeout = RpcTimeout(end);
    SetDeadline(&context, timeout);
    control_.Await(std::min(timeout, kReconnectWait));
    return FromGrpc(call(&context));
  };
  const absl::Status status = once();
  if (!absl::IsFailedPrecondition(status) && !absl::IsNotFound(status)) return Named(status);
  OKV_RETURN_IF_ERROR(RenewTicket(RpcTimeout(end)));
  return Named(once());
}

ClusterClient::Lease ClusterClient::Acquire(const LookupResult::Node& node) {
  {
    MutexLock lock(&mu_);
    auto& sessions = idle_[{node.node_id, node.data_address}];
    while (!sessions.empty()) {
      std::shared_ptr<NodeSession> session = std::move(sessions.back());
      sessions.pop_back();
      if (!session->broken()) return {.session = std::move(session), .reused = true};
    }
  }
  return AcquireNew(node);
}

ClusterClient::Lease ClusterClient::AcquireNew(const LookupResult::Node& node) {
  return {.session = NodeSession::Create(transport_, {.address = node.data_address,
                                                      .node_id = node.node_id,
                                                      .client_name = options_.client_name,
                                                      .ticket = CurrentTicket(),
                                                      .format = format_.Canonical(),
                                                      .format_id = format_id_})};
}

void ClusterClient::Release(const LookupResult::Node& node, std::shared_ptr<NodeSession> session) {
  if (session->broken()) return;
  MutexLock lock(&mu_);
  auto& sessions = idle_[{node.node_id, node.data_address}];
  if (sessions.size() < kIdleSessionsMax) {
    sessions.push_back(std::move(session));
  } else {
    session->Break(absl::CancelledError("closed"));
  }
}

ClusterStats ClusterClient::stats() const {
  MutexLock lock(&mu_);
  return stats_;
}

void ClusterClient::Count(const ClusterStats& call) {
  MutexLock lock(&mu_);
  stats_.fetched += call.fetched;
  stats_.fetched_bytes += call.fetched_bytes;
  stats_.fetch_failed += call.fetch_failed;
  stats_.failovers_unavailable += call.failovers_unavailable;
  stats_.failovers_stalled += call.failovers_stalled;
  stats_.failovers_damaged += call.failovers_damaged;
  stats_.failovers_missing += call.failovers_missing;
  stats_.complaints += call.complaints;
  stats_.fetched_to_device += call.fetched_to_device;
  stats_.verify_nanos += call.verify_nanos;
}

absl::StatusOr<LookupResult> ClusterClient::Lookup(absl::Span<const BlockKey> keys,
                                                   absl::Duration deadline) {
  const absl::Time end = absl::Now() + deadline;
  v1::LookupRequest request;
  request.set_tenant(options_.tenant);
  request.set_format_id(std::string(format_id_.view()));
  for (const BlockKey& key : keys) request.add_keys(std::string(key.view()));
  v1::LookupResponse response;
  OKV_RETURN_IF_ERROR(CallWithSession(end, [&](grpc::ClientContext* context) {
    return control_.stub()->Lookup(context, request, &response);
  }));
  return ParseLookup(response, keys.size());
}

void ClusterClient::Reserve(absl::Span<const PutItem> items, const std::string& write_group,
                            absl::Time end, std::vector<v1::Placement>* placements) {
  v1::ReserveRequest request;
  request.set_tenant(options_.tenant);
  request.set_format_id(std::string(format_id_.view()));
  request.set_write_group(write_group);
  for (const PutItem& item : items) {
    v1::ReserveObject* object = request.add_objects();
    object->set_key(std::string(item.id.key.view()));
    if (item.parent.has_value()) object->set_parent(std::string(item.parent->view()));
    object->set_index(item.index.value());
    object->set_codec(static_cast<v1::CodecId>(item.id.codec));
    object->set_payload_bytes(layout_.block_bytes(item.id.codec));
  }
  v1::ReserveResponse response;
  absl::Status status = CallWithSession(end, [&](grpc::ClientContext* context) {
    return control_.stub()->Reserve(context, request, &response);
  });
  if (status.ok() && static_cast<size_t>(response.placements_size()) != items.size()) {
    status = absl::InternalError("the control plane answered another number of objects");
  }
  if (absl::IsDeadlineExceeded(status)) {
    status = absl::UnavailableError(status.message());
  }
  for (size_t i = 0; i < items.size(); ++i) {
    v1::Placement placement;
    if (status.ok()) {
      placement = response.placements(static_cast<int>(i));
    } else {
      placement.set_code(static_cast<int32_t>(status.code()));
      placement.set_message(std::string(status.message()));
    }
    placements->push_back(std::move(placement));
  }
}

}  // namespace okv
