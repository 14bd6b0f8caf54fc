#include "cache_node/node.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "client/transport/address.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// How long a stopping node waits for the control plane to take its last reports.
constexpr std::chrono::milliseconds kDrainTimeout(2000);

bool IsLoopback(const sockaddr_storage& storage) {
  if (storage.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(storage);
    return ntohl(address.sin_addr.s_addr) >> 24 == 127;
  }
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

absl::Status CheckBind(absl::string_view flag, const std::string& address) {
  const absl::StatusOr<SocketAddress> parsed = ParseAddress(address);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " '", address, "': ", parsed.status().message()));
  }
  if (IsLoopback(parsed->storage)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " '", address,
      "' is not a loopback address, and without certificates a node binds to no other"));
}

}  // namespace

absl::Status NodeOptions::Validate() const {
  if (control_address.empty()) return absl::InvalidArgumentError("--control is missing");
  if (data_dir.empty()) return absl::InvalidArgumentError("--data_dir is missing");
  OKV_RETURN_IF_ERROR(CheckBind("--listen", listen_address));
  OKV_RETURN_IF_ERROR(CheckBind("--metrics", metrics_address));
  if (control_timeout.count() <= 0) {
    return absl::InvalidArgumentError("--control_timeout must be positive");
  }
  if (hbm_bytes > 0 && hbm_device == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hbm_bytes is ", hbm_bytes, ", and there is no device to hold them"));
  }
  OKV_RETURN_IF_ERROR(spill.Validate());
  return data_plane.Validate();
}

absl::StatusOr<std::unique_ptr<Node>> Node::Start(
    const NodeOptions& options, std::unique_ptr<Transport> transport, const Clock* clock,
    std::function<void(const std::string& line)> log) {
  OKV_RETURN_IF_ERROR(options.Validate());
  auto node = absl::WrapUnique(new Node(options, std::move(transport), clock, std::move(log)));
  OKV_RETURN_IF_ERROR(node->StartParts());
  return node;
}

Node::Node(const NodeOptions& options, std::unique_ptr<Transport> transport, const Clock* clock,
           std::function<void(const std::string& line)> log)
    : options_(options), clock_(clock), log_(std::move(log)), transport_(std::move(transport)) {}

StorageOptions Node::MakeStorageOptions() const {
  StorageOptions options;
  options.pool = {
      .arena_bytes = options_.dram_bytes, .prefault = options_.prefault, .progress = {}};
  options.hbm_pool = {
      .arena_bytes = options_.hbm_bytes, .device = options_.hbm_device, .progress = {}};
  options.hbm = options_.hbm;
  options.disk = {.data_dir = options_.data_dir,
                  .disk_bytes = options_.disk_bytes,
                  .node_id = options_.node_id,
                  .free_floor_bytes = options_.disk_free_floor_bytes,
                  .log = log_};
  options.spill = options_.spill;
  options.tenant_budgets = options_.tenant_budgets;
  return options;
}

MembershipOptions Node::MakeMembershipOptions() const {
  MembershipOptions options;
  options.control_address = options_.control_address;
  options.node_id = storage_->node_id();
  options.data_address = data_address_;
  options.metrics_address = metrics_server_->address();
  return options;
}

absl::Status Node::StartParts() {
  const auto on_removed = [this](const ObjectId& id, const absl::Status& why) {
    // Evictions are many, and the metrics count them.
    if (absl::IsDataLoss(why)) log_(absl::StrCat("quarantined ", id.Name(), ": ", why.message()));
    // The spill thread may evict before there is a membership: the inventory comes after that.
    if (Membership* membership = live_membership_.load()) membership->Removed(id);
  };
  OKV_ASSIGN_OR_RETURN(
      storage_, Storage::Open(MakeStorageOptions(),
                              {.metrics = &metrics_,
                               .clock = clock_,
                               .on_removed = on_removed,
                               .on_damaged = [this](const std::string& tenant,
                                                    const ObjectId& id) { OnDamaged(tenant, id); },
                               .log = log_}));
  OKV_RETURN_IF_ERROR(transport_->RegisterMemory(storage_->pool()->arena()));
  if (BlockPool* hbm = storage_->hbm_pool()) {
    OKV_RETURN_IF_ERROR(transport_->RegisterMemory(hbm->arena(), MemoryKind::kDevice));
  }
  data_plane_ = std::make_unique<DataPlane>(
      options_.data_plane,
      DataPlane::Parts{
          .transport = transport_.get(),
          .table = storage_->table(),
          .spiller = storage_->spiller(),
          .disk = storage_->disk(),
          .formats = storage_->formats(),
          .metrics = &metrics_,
          .clock = clock_,
          .hbm = storage_->hbm_mover(),
          .arena_bytes = storage_->pool()->capacity_bytes(),
          .node_id = storage_->node_id(),
          .ticket_key =
              [this] {
                const Membership* membership = live_membership_.load();
                return membership != nullptr ? membership->ticket_key() : std::string();
              },
          .draining =
              [this] {
                const Drainer* drainer = live_drainer_.load();
                return drainer != nullptr && drainer->draining();
              },
          .on_committed = [this](ObjectRef object) { membership_->Committed(std::move(object)); },
          .on_removed = on_removed,
          .log = log_});
  OKV_ASSIGN_OR_RETURN(data_address_, data_plane_->Listen(options_.listen_address));
  metrics_.SetSources({.table = storage_->table(),
                       .tiers = storage_->tiers(),
                       .sessions_count = [this] { return data_plane_->sessions_count(); },
                       .index_recovery = [this] { return storage_->disk()->recovery(); },
                       .drain_report = [this]() -> std::optional<DrainReport> {
                         const Drainer* drainer = live_drainer_.load();
                         return drainer != nullptr ? drainer->report() : std::nullopt;
                       }});
  OKV_ASSIGN_OR_RETURN(metrics_server_, MetricsServer::Start(options_.metrics_address,
                                                             [this] { return metrics_.Text(); }));
  return Join();
}

absl::Status Node::Join() {
  membership_ = std::make_unique<Membership>(
      MakeMembershipOptions(),
      Membership::Parts{.tiers =
                            [this] {
                              std::vector<std::pair<std::string, TierStats>> tiers;
                              for (const Tier* tier : storage_->tiers()) {
                                tiers.emplace_back(std::string(tier->name()), tier->stats());
                              }
                              return tiers;
                            },
                        .objects = [this] { return storage_->table()->Objects(); },
                        .log = log_,
                        .on_drain =
                            [this](const std::optional<DrainOrder>& order) {
                              if (Drainer* drainer = live_drainer_.load()) drainer->SetOrder(order);
                            },
                        .drain_report = [this] { return drainer_->report(); }});
  live_membership_ = membership_.get();
  DrainerOptions drain;
  drain.control_address = options_.control_address;
  drain.node_id = storage_->node_id();
  drainer_ = std::make_unique<Drainer>(
      drain, Drainer::Parts{.transport = transport_.get(),
                            .table = storage_->table(),
                            .spiller = storage_->spiller(),
                            .formats = storage_->formats(),
                            .clock = clock_,
                            .epoch = [this] { return membership_->epoch(); },
                            .on_damaged = [this](const std::string& tenant,
                                                 const ObjectId& id) { OnDamaged(tenant, id); },
                            .log = log_});
  live_drainer_ = drainer_.get();
  return membership_->Start(options_.control_timeout);
}

// Before there is a data plane nobody uses what could be found damaged.
void Node::OnDamaged(const std::string& tenant, const ObjectId& id) {
  data_plane_->Recheck(tenant, id);
}

void Node::SpillRest() {
  if (membership_ == nullptr) return;  // It never served.
  storage_->SpillRest(std::chrono::nanoseconds(options_.spill_timeout).count());
}

Node::~Node() {
  // Its transfers go over the transport, and its reads through the spiller.
  if (drainer_ != nullptr) drainer_->Stop();
  if (data_plane_ != nullptr) data_plane_->StopThreads();
  // What only memory holds is on disk before the transport goes: its end runs through all of UCX,
  // in whose 1.13 one of four ended the process while many workers were connecting. But what is
  // being sent cannot be spilled.
  bool quiet = true;
  if (data_plane_ != nullptr && !data_address_.empty()) quiet = data_plane_->EndSessions();
  if (storage_ != nullptr) storage_->StopSpilling();
  if (quiet) SpillRest();
  transport_.reset();
  if (!quiet) SpillRest();
  if (membership_ != nullptr) {
    membership_->Drain(kDrainTimeout);
    membership_->Stop();
  }
  metrics_server_.reset();
  metrics_.ClearSources();
  drainer_.reset();
  data_plane_.reset();
}

}  // namespace okv
