#include "client/prefix.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "proto/block_key.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

std::vector<BlockKey> KeysOf(const Cluster& cluster, absl::Span<const uint32_t> tokens) {
  return ComputeBlockKeys(cluster.format().id(), cluster.tenant_salt(), tokens, {});
}

std::vector<LookupResult::Node> NodesOf(const LookupResult& found, uint32_t block, Codec codec) {
  const LookupResult::Locations& locations = found.blocks[block];
  std::vector<LookupResult::Node> nodes;
  for (const uint32_t node : codec == Codec::kInt2 ? locations.int2_nodes : locations.bf16_nodes) {
    nodes.push_back(found.nodes[node]);
  }
  return nodes;
}

StoreResult Store(Cluster* cluster, const Sequence& sequence, absl::Span<const uint32_t> tokens,
                  const std::vector<PlannedObject>& plan, const std::string& write_group,
                  absl::Duration deadline) {
  StoreResult result;
  const std::vector<BlockKey> keys = KeysOf(*cluster, tokens);
  std::vector<std::vector<uint8_t>> payloads;
  std::vector<PutItem> items;
  payloads.reserve(plan.size());  // Items point into them.
  for (const PlannedObject& object : plan) {
    absl::StatusOr<std::vector<uint8_t>> payload = MakePayload(sequence, object);
    if (!payload.ok()) {
      result.failures.push_back(payload.status());
      continue;
    }
    payloads.push_back(*std::move(payload));
    const uint32_t index = object.index.value();
    items.push_back({.id = {.key = keys[index], .codec = object.codec},
                     .index = object.index,
                     .parent = index == 0 ? std::nullopt : std::optional<BlockKey>(keys[index - 1]),
                     .payload = payloads.back()});
  }
  const std::vector<absl::Status> statuses = cluster->Put(items, write_group, deadline);
  OKV_CHECK(statuses.size() == items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!statuses[i].ok() && !absl::IsAlreadyExists(statuses[i])) {
      result.failures.push_back(statuses[i]);
      continue;
    }
    ++(statuses[i].ok() ? result.stored_objects : result.present_objects);
    result.stored_bytes += items[i].payload.size();
    if (items[i].id.codec == Codec::kInt2) {
      result.int2_bytes += items[i].payload.size();
      ++result.int2_objects;
    }
  }
  return result;
}

}  // namespace

absl::StatusOr<ResumeResult> ResumePrefix(Cluster* cluster, Sequence* sequence,
                                          absl::Span<const uint32_t> tokens,
                                          absl::Duration deadline) {
  ResumeResult result;
  if (tokens.empty()) return result;
  std::vector<BlockKey> keys = KeysOf(*cluster, tokens);
  keys.resize(std::min<size_t>(keys.size(), (tokens.size() - 1) / kBlockTokens));
  if (keys.empty()) return result;
  const absl::Time end = absl::Now() + deadline;
  const absl::StatusOr<LookupResult> looked_up = cluster->Lookup(keys, deadline);
  if (absl::IsUnavailable(looked_up.status()) || absl::IsDeadlineExceeded(looked_up.status())) {
    result.fetch_status = looked_up.status();
    return result;
  }
  OKV_RETURN_IF_ERROR(looked_up.status());
  const LookupResult& found = *looked_up;
  if (found.resume_boundary == 0) return result;

  const BlockIndex boundary(found.resume_boundary);
  OKV_RETURN_IF_ERROR(sequence->StartResume(boundary));
  std::vector<FetchItem> items;
  for (const PlannedObject& object :
       PlanStore(cluster->format(), boundary, /*whole=*/false, boundary.value())) {
    OKV_ASSIGN_OR_RETURN(const absl::Span<uint8_t> buffer,
                         sequence->ResumeBuffer(object.index, object.codec));
    items.push_back({.id = {.key = keys[object.index.value()], .codec = object.codec},
                     .index = object.index,
                     .nodes = NodesOf(found, object.index.value(), object.codec),
                     .buffer = buffer});
  }
  const std::vector<absl::Status> statuses = cluster->Fetch(items, end - absl::Now());
  OKV_CHECK(statuses.size() == items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!statuses[i].ok()) {
      result.fetch_status.Update(statuses[i]);
      continue;
    }
    ++result.fetched_objects;
    result.fetched_bytes += items[i].buffer.size();
  }
  if (!result.fetch_status.ok()) {
    // What arrived is overwritten by the recomputation: the sequence starts from nothing.
    OKV_RETURN_IF_ERROR(sequence->StartResume(BlockIndex(0)));
    OKV_RETURN_IF_ERROR(sequence->FinishResume());
    return result;
  }
  OKV_RETURN_IF_ERROR(sequence->FinishResume());
  result.boundary = boundary.value();
  result.hit_tokens = boundary.value() * kBlockTokens;
  return result;
}

std::vector<PlannedObject> PlanStore(const Format& format, BlockIndex boundary, bool whole,
                                     uint32_t full_blocks) {
  const uint32_t sink = format.sink_blocks();
  const uint32_t recent = format.recent_blocks();
  const uint32_t end = boundary.value();
  const uint32_t tail = std::max(sink, end > recent ? end - recent : 0);
  std::vector<PlannedObject> plan;
  const auto add = [&plan](uint32_t from, uint32_t to, Codec codec) {
    for (uint32_t i = from; i < to; ++i) plan.push_back({.index = BlockIndex(i), .codec = codec});
  };
  add(0, std::min(sink, end), Codec::kBf16);
  add(sink, whole ? std::max(sink, full_blocks) : std::min(tail, end), Codec::kInt2);
  add(tail, end, Codec::kBf16);
  return plan;
}

absl::StatusOr<std::vector<uint8_t>> MakePayload(const Sequence& sequence,
                                                 const PlannedObject& object) {
  std::vector<uint8_t> payload(sequence.layout().block_bytes(object.codec));
  if (object.codec == Codec::kBf16) {
    OKV_RETURN_IF_ERROR(sequence.CopyBf16Block(object.index, absl::MakeSpan(payload)));
  } else {
    OKV_RETURN_IF_ERROR(sequence.SealBlock(object.index, absl::MakeSpan(payload)));
  }
  return payload;
}

StoreResult StorePrompt(Cluster* cluster, const Sequence& sequence,
                        absl::Span<const uint32_t> tokens, const std::string& write_group,
                        absl::Duration deadline) {
  if (tokens.empty()) return {};
  const BlockIndex boundary(static_cast<uint32_t>((tokens.size() - 1) / kBlockTokens));
  const auto plan = PlanStore(cluster->format(), boundary, /*whole=*/false, boundary.value());
  return Store(cluster, sequence, tokens, plan, write_group, deadline);
}

StoreResult StoreFinished(Cluster* cluster, const Sequence& sequence,
                          absl::Span<const uint32_t> tokens, const std::string& write_group,
                          absl::Duration deadline) {
  const uint32_t full_blocks = sequence.full_blocks();
  const auto plan =
      PlanStore(cluster->format(), BlockIndex(full_blocks), /*whole=*/true, full_blocks);
  return Store(cluster, sequence, tokens, plan, write_group, deadline);
}

}  // namespace okv
