#include "control_plane/service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/data_plane.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr int kKeysMax = 65536;
// An answer has about 350 B a placement, and gRPC clients take messages of up to 4 MiB.
constexpr int kReserveObjectsMax = 4096;
constexpr size_t kRotationFileBytesMax = size_t{256} << 20;
constexpr size_t kChunkBytes = size_t{256} << 10;
constexpr uint64_t kDrainLimitMs = 600'000;

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

absl::Status CheckVersion(uint32_t major, uint32_t minor) {
  if (ProtocolCompatible(major, minor)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("protocol ", major, ".", minor, " there, ",
                                                    kProtocolMajor, ".", kProtocolMinor,
                                                    " here: not compatible"));
}

absl::Status CheckCount(absl::string_view what, int count, int count_max = kKeysMax) {
  if (count <= count_max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(count, " ", what, "; at most ", count_max));
}

template <typename DigestType>
absl::Status ReadDigest(absl::string_view field, const std::string& raw, DigestType* digest) {
  absl::StatusOr<DigestType> parsed = DigestType::FromBytes(raw);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", raw.size(), " bytes, not 32"));
  }
  *digest = *parsed;
  return absl::OkStatus();
}

absl::Status ReadObjectId(const std::string& key, v1::CodecId codec, ObjectId* id) {
  OKV_RETURN_IF_ERROR(ReadDigest("key", key, &id->key));
  if (!IsCodec(static_cast<uint32_t>(codec))) {
    return absl::InvalidArgumentError(
        absl::StrCat("codec ", static_cast<int>(codec), " is not known"));
  }
  id->codec = static_cast<Codec>(codec);
  return absl::OkStatus();
}

// Reads what ReserveObject and ObjectRecord share.
template <typename Message>
absl::Status ReadObject(const Message& message, ObjectAnnouncement* object) {
  OKV_RETURN_IF_ERROR(ReadObjectId(message.key(), message.codec(), &object->id));
  object->index = BlockIndex(message.index());
  object->payload_bytes = message.payload_bytes();
  if (message.parent().empty()) return absl::OkStatus();
  return ReadDigest("parent", message.parent(), &object->parent.emplace());
}

absl::StatusOr<std::vector<ObjectAnnouncement>> ReadRecords(
    const google::protobuf::RepeatedPtrField<v1::ObjectRecord>& records) {
  OKV_RETURN_IF_ERROR(CheckCount("objects", records.size()));
  std::vector<ObjectAnnouncement> objects(records.size());
  for (int i = 0; i < records.size(); ++i) {
    OKV_RETURN_IF_ERROR(ReadObject(records[i], &objects[i]));
    OKV_RETURN_IF_ERROR(ReadDigest("format_id", records[i].format_id(), &objects[i].format_id));
    objects[i].tenant = records[i].tenant();
    if (objects[i].tenant.empty()) return absl::InvalidArgumentError("tenant is missing");
  }
  return objects;
}

std::vector<TierState> ReadTiers(const google::protobuf::RepeatedPtrField<v1::TierUsage>& tiers) {
  std::vector<TierState> states;
  for (const v1::TierUsage& tier : tiers) {
    states.push_back({.tier = tier.tier(),
                      .capacity_bytes = tier.capacity_bytes(),
                      .used_bytes = tier.used_bytes(),
                      .objects_count = tier.objects_count()});
  }
  return states;
}

void WriteAddress(const NodeAddressInfo& node, v1::NodeAddress* address) {
  address->set_node_id(node.node_id);
  address->set_data_address(node.data_address);
}

absl::Status DoOpenSession(Control* control, const v1::OpenSessionRequest& request,
                           v1::OpenSessionResponse* response) {
  OKV_RETURN_IF_ERROR(CheckVersion(request.protocol_major(), request.protocol_minor()));
  OKV_ASSIGN_OR_RETURN(const Session session,
                       control->OpenSession(request.tenant(), request.format()));
  response->set_format_id(std::string(session.format_id.view()));
  response->set_ticket(session.ticket);
  response->set_ticket_expires_wall_us(session.ticket_expires_wall_us);
  response->set_tenant_salt(session.tenant_salt);
  return absl::OkStatus();
}

absl::Status DoLookup(Control* control, const v1::LookupRequest& request,
                      v1::LookupResponse* response) {
  OKV_RETURN_IF_ERROR(CheckCount("keys", request.keys_size()));
  FormatId format_id;
  OKV_RETURN_IF_ERROR(ReadDigest("format_id", request.format_id(), &format_id));
  std::vector<BlockKey> keys(request.keys_size());
  for (int i = 0; i < request.keys_size(); ++i) {
    OKV_RETURN_IF_ERROR(ReadDigest("key", request.keys(i), &keys[i]));
  }
  OKV_ASSIGN_OR_RETURN(const LookupAnswer answer,
                       control->Lookup(request.tenant(), format_id, keys));
  response->set_prefix_blocks(answer.prefix_blocks);
  response->set_resume_boundary(answer.resume_boundary);
  const uint32_t blocks = std::max(answer.prefix_blocks, answer.resume_boundary);
  for (uint32_t i = 0; i < blocks; ++i) response->add_blocks();
  for (const LookupAnswer::Location& location : answer.locations) {
    v1::BlockLocations* block = response->mutable_blocks(static_cast<int>(location.block));
    if (location.codec == Codec::kInt2) {
      block->add_int2_nodes(location.node);
    } else {
      block->add_bf16_nodes(location.node);
    }
  }
  for (const NodeAddressInfo& node : answer.nodes) WriteAddress(node, response->add_nodes());
  return absl::OkStatus();
}

absl::Status DoReserve(Control* control, ControlMetrics* metrics, const v1::ReserveRequest& request,
                       v1::ReserveResponse* response) {
  OKV_RETURN_IF_ERROR(CheckCount("objects", request.objects_size(), kReserveObjectsMax));
  FormatId format_id;
  OKV_RETURN_IF_ERROR(ReadDigest("format_id", request.format_id(), &format_id));
  std::vector<ObjectAnnouncement> objects(request.objects_size());
  for (int i = 0; i < request.objects_size(); ++i) {
    OKV_RETURN_IF_ERROR(ReadObject(request.objects(i), &objects[i]));
    objects[i].tenant = request.tenant();
    objects[i].format_id = format_id;
  }
  const v1::MoveSource& from = request.move_from();
  const MoveSource source = {
      .node = {.node_id = from.node_id(), .epoch = from.epoch()},
      .avoid_node_ids = {from.avoid_node_ids().begin(), from.avoid_node_ids().end()}};
  OKV_ASSIGN_OR_RETURN(
      const std::vector<PlacementAnswer> answers,
      request.has_move_from()
          ? control->ReserveMoves(source, request.tenant(), format_id, objects)
          : control->Reserve(request.tenant(), format_id, request.write_group(), objects));
  for (const PlacementAnswer& answer : answers) {
    v1::Placement* placement = response->add_placements();
    placement->set_code(static_cast<int32_t>(answer.status.code()));
    placement->set_message(std::string(answer.status.message()));
    metrics->CountPlacement(absl::StatusCodeToString(answer.status.code()));
    if (!answer.status.ok()) continue;
    WriteAddress(answer.node, placement->mutable_node());
    placement->set_write_id(answer.write_id.value());
    placement->set_reservation(answer.reservation);
  }
  return absl::OkStatus();
}

absl::Status DoPublish(Control* control, grpc::ServerReader<v1::PublishRotationRequest>* reader,
                       v1::PublishRotationResponse* response) {
  std::string file;
  v1::PublishRotationRequest request;
  while (reader->Read(&request)) {
    if (file.size() + request.chunk().size() > kRotationFileBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("a rotation set of more than ", kRotationFileBytesMax, " bytes"));
    }
    file += request.chunk();
  }
  OKV_ASSIGN_OR_RETURN(const RotationRegistry::Published published,
                       control->rotations()->Publish(file));
  response->set_rotation_hash(std::string(published.hash.view()));
  response->set_already_known(published.already_known);
  return absl::OkStatus();
}

absl::Status DoRegister(Control* control, const v1::RegisterNodeRequest& request,
                        v1::RegisterNodeResponse* response) {
  OKV_RETURN_IF_ERROR(CheckVersion(request.protocol_major(), request.protocol_minor()));
  NodeDescription node;
  node.node_id = request.node_id();
  node.data_address = request.data_address();
  node.metrics_address = request.metrics_address();
  node.tiers = ReadTiers(request.tiers());
  OKV_ASSIGN_OR_RETURN(const NodeRegistration registration, control->RegisterNode(node));
  response->set_epoch(registration.epoch);
  response->set_ticket_key(registration.ticket_key);
  response->set_heartbeat_interval_ms(control->options().heartbeat_interval_ms);
  return absl::OkStatus();
}

// Feeds the rest of the stream, whose first message is `request`, into the inventory. kCancelled
// when it ends before its last message.
absl::StatusOr<uint64_t> ReadInventory(Control* control, const NodeEpoch& node, uint64_t inventory,
                                       grpc::ServerReader<v1::ReportInventoryRequest>* reader,
                                       v1::ReportInventoryRequest* request) {
  uint64_t objects_count = 0;
  bool last = false;
  do {
    last = request->last();
    OKV_ASSIGN_OR_RETURN(const std::vector<ObjectAnnouncement> objects,
                         ReadRecords(request->objects()));
    OKV_RETURN_IF_ERROR(control->AddInventory(node, inventory, objects));
    objects_count += objects.size();
  } while (reader->Read(request));
  if (!last) return absl::CancelledError("the inventory was cut");
  return objects_count;
}

absl::Status DoInventory(Control* control, grpc::ServerReader<v1::ReportInventoryRequest>* reader,
                         v1::ReportInventoryResponse* response) {
  v1::ReportInventoryRequest request;
  if (!reader->Read(&request)) {
    return absl::InvalidArgumentError("an inventory without a first message");
  }
  const NodeEpoch node = {.node_id = request.node_id(), .epoch = request.epoch()};
  OKV_ASSIGN_OR_RETURN(const uint64_t inventory, control->BeginInventory(node));
  const absl::StatusOr<uint64_t> count = ReadInventory(control, node, inventory, reader, &request);
  if (!count.ok()) {
    control->AbandonInventory(node, inventory);
    return count.status();
  }
  OKV_RETURN_IF_ERROR(control->EndInventory(node, inventory));
  response->set_objects_count(*count);
  return absl::OkStatus();
}

absl::Status DoCommits(Control* control, const v1::ReportCommitsRequest& request) {
  OKV_RETURN_IF_ERROR(CheckCount("removals", request.removed_size()));
  OKV_ASSIGN_OR_RETURN(const std::vector<ObjectAnnouncement> added, ReadRecords(request.added()));
  std::vector<ObjectId> removed(request.removed_size());
  for (int i = 0; i < request.removed_size(); ++i) {
    OKV_RETURN_IF_ERROR(
        ReadObjectId(request.removed(i).key(), request.removed(i).codec(), &removed[i]));
  }
  return control->ReportCommits({.node_id = request.node_id(), .epoch = request.epoch()}, added,
                                removed);
}

}  // namespace

grpc::Status ControlService::OpenSession(grpc::ServerContext* context,
                                         const v1::OpenSessionRequest* request,
                                         v1::OpenSessionResponse* response) {
  return ToGrpc(DoOpenSession(control_, *request, response));
}

grpc::Status ControlService::Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                                    v1::LookupResponse* response) {
  const absl::Time start = absl::Now();
  const absl::Status status = DoLookup(control_, *request, response);
  metrics_->CountLookup(!status.ok()                      ? "error"
                        : response->resume_boundary() > 0 ? "hit"
                        : response->prefix_blocks() > 0   ? "prefix"
                                                          : "miss",
                        absl::ToDoubleSeconds(absl::Now() - start));
  return ToGrpc(status);
}

grpc::Status ControlService::Reserve(grpc::ServerContext* context,
                                     const v1::ReserveRequest* request,
                                     v1::ReserveResponse* response) {
  return ToGrpc(DoReserve(control_, metrics_, *request, response));
}

grpc::Status ControlService::PublishRotation(grpc::ServerContext* context,
                                             grpc::ServerReader<v1::PublishRotationRequest>* reader,
                                             v1::PublishRotationResponse* response) {
  return ToGrpc(DoPublish(control_, reader, response));
}

grpc::Status ControlService::GetRotation(grpc::ServerContext* context,
                                         const v1::GetRotationRequest* request,
                                         grpc::ServerWriter<v1::GetRotationResponse>* writer) {
  RotationHash hash;
  if (absl::Status status = ReadDigest("rotation_hash", request->rotation_hash(), &hash);
      !status.ok()) {
    return ToGrpc(status);
  }
  const absl::StatusOr<std::string> file = control_->rotations()->Get(hash);
  if (!file.ok()) return ToGrpc(file.status());
  for (size_t at = 0; at < file->size(); at += kChunkBytes) {
    v1::GetRotationResponse response;
    response.set_chunk(file->substr(at, kChunkBytes));
    if (!writer->Write(response)) return grpc::Status::CANCELLED;
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::ListRotations(grpc::ServerContext* context,
                                           const v1::ListRotationsRequest* request,
                                           v1::ListRotationsResponse* response) {
  for (const RotationInfo& info : control_->rotations()->List(request->model())) {
    v1::RotationSummary* summary = response->add_rotations();
    summary->set_rotation_hash(std::string(info.hash.view()));
    summary->set_model(info.model);
    summary->set_weights_revision(info.weights_revision);
    summary->set_method(info.method);
    summary->set_layers_count(info.layers_count);
    summary->set_kv_heads(info.kv_heads);
    summary->set_head_dim(info.head_dim);
    summary->set_group_size(info.group_size);
    summary->set_file_bytes(info.file_bytes);
    summary->set_published_wall_us(info.published_wall_us);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::RegisterNode(grpc::ServerContext* context,
                                          const v1::RegisterNodeRequest* request,
                                          v1::RegisterNodeResponse* response) {
  return ToGrpc(DoRegister(control_, *request, response));
}

grpc::Status ControlService::Heartbeat(grpc::ServerContext* context,
                                       const v1::HeartbeatRequest* request,
                                       v1::HeartbeatResponse* response) {
  const NodeEpoch node = {.node_id = request->node_id(), .epoch = request->epoch()};
  const bool known = control_->Heartbeat(node, ReadTiers(request->tiers()));
  response->set_register_again(!known);
  const DrainRequest order = control_->ExchangeDrain(node, DrainReport::Read(request->drain()));
  if (order.id == 0) return grpc::Status::OK;
  const ControlOptions& options = control_->options();
  response->mutable_drain()->set_drain_id(order.id);
  response->mutable_drain()->set_limit_ms(order.limit_ms);
  response->mutable_drain()->set_settle_ms(options.node_timeout_ms +
                                           2 * options.heartbeat_interval_ms);
  return grpc::Status::OK;
}

grpc::Status ControlService::DrainNode(grpc::ServerContext* context,
                                       const v1::DrainNodeRequest* request,
                                       v1::DrainNodeResponse* response) {
  if (request->cancel()) return ToGrpc(control_->CancelDrain(request->node_id()));
  const absl::StatusOr<uint64_t> id = control_->DrainNode(
      request->node_id(), request->limit_ms() > 0 ? request->limit_ms() : kDrainLimitMs);
  if (id.ok()) response->set_drain_id(*id);
  return ToGrpc(id.status());
}

grpc::Status ControlService::ReportInventory(grpc::ServerContext* context,
                                             grpc::ServerReader<v1::ReportInventoryRequest>* reader,
                                             v1::ReportInventoryResponse* response) {
  return ToGrpc(DoInventory(control_, reader, response));
}

grpc::Status ControlService::ReportCommits(grpc::ServerContext* context,
                                           const v1::ReportCommitsRequest* request,
                                           v1::ReportCommitsResponse* response) {
  return ToGrpc(DoCommits(control_, *request));
}

grpc::Status ControlService::GetClusterStatus(grpc::ServerContext* context,
                                              const v1::GetClusterStatusRequest* request,
                                              v1::GetClusterStatusResponse* response) {
  const ClusterStatus status = control_->Status();
  for (const ClusterStatus::Node& node : status.nodes) {
    v1::NodeStatus* out = response->add_nodes();
    out->set_node_id(node.state.description.node_id);
    out->set_data_address(node.state.description.data_address);
    out->set_metrics_address(node.state.description.metrics_address);
    out->set_alive(node.state.alive);
    out->set_heartbeat_age_ms(node.heartbeat_age_ms);
    out->set_objects_count(node.objects_count);
    out->set_objects_bytes(node.objects_bytes);
    out->set_draining(node.state.draining());
    node.state.drain_report.Write(out->mutable_drain());
    for (const TierState& tier : node.state.description.tiers) {
      v1::TierUsage* usage = out->add_tiers();
      usage->set_tier(tier.tier);
      usage->set_capacity_bytes(tier.capacity_bytes);
      usage->set_used_bytes(tier.used_bytes);
      usage->set_objects_count(tier.objects_count);
    }
  }
  response->set_objects_count(status.objects_count);
  response->set_formats_count(status.formats_count);
  response->set_rotations_count(status.rotations_count);
  response->set_reservations_count(status.reservations_count);
  return grpc::Status::OK;
}

}  // namespace okv
