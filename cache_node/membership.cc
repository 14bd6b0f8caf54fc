#include "cache_node/membership.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "proto/check.h"
#include "proto/data_plane.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long a node that stops may still wait for a connection.
constexpr absl::Duration kAwaitStep = absl::Milliseconds(20);
constexpr uint64_t kDrainMsMax = 1'000'000'000'000;  // 31 years: any longer is as good.

v1::CodecId CodecMessage(Codec codec) {
  return codec == Codec::kInt2 ? v1::CODEC_INT2 : v1::CODEC_BF16;
}

void Fill(const HeldObject& object, v1::ObjectRecord* record) {
  const ObjectHeader& header = object.header;
  record->set_format_id(std::string(header.format_id.view()));
  record->set_tenant(object.tenant);
  record->set_key(std::string(header.id.key.view()));
  if (header.parent.has_value()) record->set_parent(std::string(header.parent->view()));
  record->set_index(header.index.value());
  record->set_codec(CodecMessage(header.id.codec));
  record->set_payload_bytes(header.payload_bytes);
  record->set_write_id(header.generation);
}

template <typename Request>
void FillTiers(const std::vector<std::pair<std::string, TierStats>>& tiers, Request* request) {
  for (const auto& [name, stats] : tiers) {
    v1::TierUsage* usage = request->add_tiers();
    usage->set_tier(name);
    usage->set_capacity_bytes(stats.capacity_bytes);
    usage->set_used_bytes(stats.used_bytes);
    usage->set_objects_count(stats.objects_count);
  }
}

// Trying again cannot help.
bool IsRefusal(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsInvalidArgument(status) ||
         absl::IsUnimplemented(status) || absl::IsPermissionDenied(status) ||
         absl::IsUnauthenticated(status) || absl::IsAlreadyExists(status);
}

}  // namespace

absl::Status MembershipOptions::Validate() const {
  if (control_address.empty()) return absl::InvalidArgumentError("control is missing");
  if (node_id.empty()) return absl::InvalidArgumentError("node_id is missing");
  if (objects_per_message == 0 || reports_max == 0) {
    return absl::InvalidArgumentError("objects_per_message and reports_max must not be 0");
  }
  return absl::OkStatus();
}

Membership::Membership(const MembershipOptions& options, Parts parts)
    : options_(options), parts_(std::move(parts)), control_(options.control_address) {}

Membership::~Membership() { Stop(); }

absl::Status Membership::Start(milliseconds timeout) {
  thread_ = std::thread([this] { Run(); });
  absl::Status failure;
  {
    MutexLock lock(&mu_);
    const Time end = steady_clock::now() + timeout;
    while (!joined_ && !stopping_ && !IsRefusal(last_error_) && steady_clock::now() < end) {
      changed_.WaitFor(
          &mu_, std::min<std::chrono::nanoseconds>(milliseconds(100), end - steady_clock::now()));
    }
    if (joined_) return absl::OkStatus();
    failure = last_error_;
  }
  Stop();
  if (IsRefusal(failure)) {
    return absl::Status(failure.code(),
                        absl::StrCat("the control plane at ", options_.control_address,
                                     " refuses this node: ", failure.message()));
  }
  return absl::UnavailableError(absl::StrCat("no control plane at ", options_.control_address,
                                             " within ", timeout.count(),
                                             " ms: ", failure.message()));
}

void Membership::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    if (call_ != nullptr) call_->TryCancel();
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

std::string Membership::ticket_key() const {
  MutexLock lock(&mu_);
  return ticket_key_;
}

uint64_t Membership::epoch() const {
  MutexLock lock(&mu_);
  return shown_epoch_;
}

void Membership::Committed(ObjectRef object) {
  const ObjectId id = object->header.id;
  Enqueue({.id = id, .added = std::move(object)});
}

void Membership::Removed(const ObjectId& id) { Enqueue({.id = id, .added = nullptr}); }

void Membership::Enqueue(Report report) {
  MutexLock lock(&mu_);
  if (reports_.size() >= options_.reports_max) {
    reports_.clear();
    inventory_needed_ = true;
  }
  // The inventory is taken after this event, and says what it says.
  if (!inventory_needed_) reports_.push_back(std::move(report));
  changed_.SignalAll();
}

bool Membership::Drain(milliseconds timeout) {
  MutexLock lock(&mu_);
  const Time end = steady_clock::now() + timeout;
  while (!stopping_ && (!reports_.empty() || inventory_needed_) && steady_clock::now() < end) {
    changed_.WaitFor(&mu_, milliseconds(50));
  }
  return reports_.empty() && !inventory_needed_;
}

bool Membership::stopping() const {
  MutexLock lock(&mu_);
  return stopping_;
}

void Membership::Run() {
  while (!stopping()) {
    absl::Status status;
    if (!registered_) status = Register();
    if (status.ok()) status = Tend();
    const Time end = steady_clock::now() + Settle(status);
    if (absl::IsUnavailable(status) && !control_.Await(absl::ZeroDuration())) {
      while (!stopping() && steady_clock::now() < end && !control_.Await(kAwaitStep)) {
      }
      continue;
    }
    MutexLock lock(&mu_);
    // After a failure new reports wait for the next try, too.
    while (!stopping_ && !(status.ok() && (!reports_.empty() || inventory_needed_))) {
      const auto left = end - steady_clock::now();
      if (left.count() <= 0) break;
      changed_.WaitFor(&mu_, left);
    }
  }
}

milliseconds Membership::Settle(const absl::Status& status) {
  MutexLock lock(&mu_);
  last_error_ = status;
  if (status.ok()) {
    if (outage_logged_) {
      parts_.log(absl::StrCat("the control plane at ", options_.control_address, " is back"));
    }
    outage_logged_ = false;
    backoff_ = milliseconds(0);
    changed_.SignalAll();
    const auto left = std::chrono::ceil<milliseconds>(heartbeat_due_ - steady_clock::now());
    return std::max(left, milliseconds(0));
  }
  // It was restarted, or gave this node up: start over at once, but not in a tight circle.
  if (absl::IsAborted(status) || absl::IsNotFound(status)) registered_ = false;
  if (!outage_logged_ && !stopping_) {
    parts_.log(absl::StrCat("the control plane at ", options_.control_address,
                            " cannot be used, trying on: ", status.ToString()));
    outage_logged_ = true;
  }
  backoff_ = std::clamp(backoff_ * 2, options_.backoff_min, options_.backoff_max);
  changed_.SignalAll();
  return backoff_;
}

absl::Status Membership::Tend() {
  OKV_RETURN_IF_ERROR(SendReports());
  if (steady_clock::now() < heartbeat_due_) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(Heartbeat());
  heartbeat_due_ = steady_clock::now() + heartbeat_interval_;
  return absl::OkStatus();
}

absl::Status Membership::Register() {
  v1::RegisterNodeRequest request;
  request.set_protocol_major(kProtocolMajor);
  request.set_protocol_minor(kProtocolMinor);
  request.set_node_id(options_.node_id);
  request.set_data_address(options_.data_address);
  request.set_metrics_address(options_.metrics_address);
  FillTiers(parts_.tiers(), &request);
  v1::RegisterNodeResponse response;
  OKV_RETURN_IF_ERROR(Call(&v1::ControlPlane::Stub::RegisterNode, request, &response));
  if (response.ticket_key().empty()) {
    return absl::FailedPreconditionError("its answer has no ticket key");
  }
  epoch_ = response.epoch();
  heartbeat_interval_ = milliseconds(std::clamp(response.heartbeat_interval_ms(), 10u, 60'000u));
  heartbeat_due_ = steady_clock::now() + heartbeat_interval_;
  {
    MutexLock lock(&mu_);
    ticket_key_ = response.ticket_key();
    shown_epoch_ = epoch_;
    inventory_needed_ = true;
  }
  OKV_RETURN_IF_ERROR(SendInventory());
  registered_ = true;
  MutexLock lock(&mu_);
  joined_ = true;
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::Status Membership::SendInventory() {
  {
    // What is queued happened before the snapshot below; what follows it is queued anew.
    MutexLock lock(&mu_);
    reports_.clear();
    inventory_needed_ = false;
  }
  const std::vector<ObjectRef> objects = parts_.objects();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options_.inventory_timeout);
  absl::Status status = absl::CancelledError("stopping");
  if (BeginCall(&context)) {
    v1::ReportInventoryResponse response;
    const auto writer = control_.stub()->ReportInventory(&context, &response);
    size_t next = 0;
    do {
      v1::ReportInventoryRequest request;
      request.set_node_id(options_.node_id);
      request.set_epoch(epoch_);
      const size_t end = std::min(objects.size(), next + options_.objects_per_message);
      for (; next < end; ++next) Fill(*objects[next], request.add_objects());
      request.set_last(next == objects.size());
      if (!writer->Write(request)) break;
    } while (next < objects.size());
    writer->WritesDone();
    status = FromGrpc(writer->Finish());
    EndCall();
  }
  if (!status.ok()) {
    MutexLock lock(&mu_);
    reports_.clear();
    inventory_needed_ = true;
  }
  return status;
}

absl::Status Membership::SendReports() {
  bool inventory_needed;
  {
    MutexLock lock(&mu_);
    inventory_needed = inventory_needed_;
  }
  if (inventory_needed) OKV_RETURN_IF_ERROR(SendInventory());
  while (true) {
    v1::ReportCommitsRequest request;
    request.set_node_id(options_.node_id);
    request.set_epoch(epoch_);
    size_t count = 0;
    {
      MutexLock lock(&mu_);
      // One message has no order inside: an object is in it once.
      absl::flat_hash_set<ObjectId> seen;
      for (const Report& report : reports_) {
        if (count >= options_.objects_per_message || !seen.insert(report.id).second) break;
        if (report.added != nullptr) {
          Fill(*report.added, request.add_added());
        } else {
          v1::ObjectName* name = request.add_removed();
          name->set_key(std::string(report.id.key.view()));
          name->set_codec(CodecMessage(report.id.codec));
        }
        ++count;
      }
    }
    if (count == 0) return absl::OkStatus();
    v1::ReportCommitsResponse response;
    OKV_RETURN_IF_ERROR(Call(&v1::ControlPlane::Stub::ReportCommits, request, &response));
    MutexLock lock(&mu_);
    if (inventory_needed_) return absl::OkStatus();  // The queue overflowed meanwhile.
    reports_.erase(reports_.begin(), reports_.begin() + static_cast<ptrdiff_t>(count));
    changed_.SignalAll();
  }
}

absl::Status Membership::Heartbeat() {
  v1::HeartbeatRequest request;
  request.set_node_id(options_.node_id);
  request.set_epoch(epoch_);
  FillTiers(parts_.tiers(), &request);
  if (const auto report = parts_.drain_report ? parts_.drain_report() : std::nullopt) {
    report->Write(request.mutable_drain());
  }
  v1::HeartbeatResponse response;
  OKV_RETURN_IF_ERROR(Call(&v1::ControlPlane::Stub::Heartbeat, request, &response));
  if (response.register_again()) {
    return absl::AbortedError("it does not know this registration");
  }
  if (!parts_.on_drain) return absl::OkStatus();
  std::optional<DrainOrder> order;
  if (response.has_drain()) {
    const auto nanos = [](uint64_t ms) {
      return static_cast<int64_t>(std::min<uint64_t>(ms, kDrainMsMax)) * 1'000'000;
    };
    order = {.id = response.drain().drain_id(),
             .limit_nanos = nanos(response.drain().limit_ms()),
             .settle_nanos = nanos(response.drain().settle_ms())};
  }
  parts_.on_drain(order);
  return absl::OkStatus();
}

template <typename Request, typename Response>
absl::Status Membership::Call(grpc::Status (v1::ControlPlane::Stub::*method)(grpc::ClientContext*,
                                                                             const Request&,
                                                                             Response*),
                              const Request& request, Response* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options_.rpc_timeout);
  if (!BeginCall(&context)) return absl::CancelledError("stopping");
  const grpc::Status status = (control_.stub()->*method)(&context, request, response);
  EndCall();
  return FromGrpc(status);
}

bool Membership::BeginCall(grpc::ClientContext* context) {
  MutexLock lock(&mu_);
  if (stopping_) return false;
  call_ = context;
  return true;
}

void Membership::EndCall() {
  MutexLock lock(&mu_);
  call_ = nullptr;
}

}  // namespace okv
