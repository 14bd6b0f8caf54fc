#include "control_plane/prefix_index.h"

#include <algorithm>

namespace okv {

void PrefixIndex::Add(NodeSlot node, const IndexedObject& object) {
  NodeObjects& held = nodes_[node];
  if (!held.ids.insert(object.id).second) return;
  held.bytes += object.payload_bytes;
  Entry& entry = objects_[object.id];
  entry.scope = object.scope;
  entry.payload_bytes = object.payload_bytes;
  entry.nodes.push_back(node);
}

void PrefixIndex::Remove(NodeSlot node, const ObjectId& id) {
  const auto held = nodes_.find(node);
  if (held == nodes_.end() || held->second.ids.erase(id) == 0) return;
  const auto entry = objects_.find(id);
  held->second.bytes -= entry->second.payload_bytes;
  Nodes& nodes = entry->second.nodes;
  nodes.erase(std::remove(nodes.begin(), nodes.end(), node), nodes.end());
  if (nodes.empty()) objects_.erase(entry);
}

void PrefixIndex::RemoveNode(NodeSlot node) {
  const auto held = nodes_.find(node);
  if (held == nodes_.end()) return;
  for (const ObjectId& id : held->second.ids) {
    const auto entry = objects_.find(id);
    Nodes& nodes = entry->second.nodes;
    nodes.erase(std::remove(nodes.begin(), nodes.end(), node), nodes.end());
    if (nodes.empty()) objects_.erase(entry);
  }
  nodes_.erase(held);
}

const PrefixIndex::Nodes* PrefixIndex::Find(ScopeId scope, const ObjectId& id) const {
  const auto entry = objects_.find(id);
  if (entry == objects_.end() || entry->second.scope != scope) return nullptr;
  return &entry->second.nodes;
}

PrefixMatch PrefixIndex::Match(ScopeId scope, absl::Span<const BlockKey> keys,
                               const PrefixWindows& windows) const {
  const uint32_t count = static_cast<uint32_t>(keys.size());
  const uint32_t sink = windows.sink_blocks;
  const uint32_t recent = windows.recent_blocks;
  const auto holds = [&](uint32_t block, Codec codec) {
    return Find(scope, {.key = keys[block], .codec = codec}) != nullptr;
  };
  PrefixMatch match;
  uint32_t int2_end = sink;  // int2 of blocks sink..int2_end-1 is held, without a hole.
  bool int2_open = true;
  uint32_t bf16_run = 0;  // bf16 of the last bf16_run blocks in front of the boundary is held.
  for (uint32_t block = 0; block < count; ++block) {
    const bool bf16 = holds(block, Codec::kBf16);
    if (block < sink) {
      if (!bf16) break;
      match.prefix_blocks = block + 1;
    } else {
      int2_open = int2_open && holds(block, Codec::kInt2);
      if (int2_open) {
        int2_end = block + 1;
        match.prefix_blocks = int2_end;
      }
      bf16_run = bf16 ? bf16_run + 1 : 0;
    }
    const uint32_t boundary = block + 1;
    const uint32_t tail = boundary > sink ? std::min(recent, boundary - sink) : 0;
    if (bf16_run >= tail && int2_end + recent >= boundary) match.resume_boundary = boundary;
    if (!int2_open && boundary >= int2_end + recent) break;  // No later boundary can hold.
  }
  return match;
}

size_t PrefixIndex::node_objects_count(NodeSlot node) const {
  const auto held = nodes_.find(node);
  return held == nodes_.end() ? 0 : held->second.ids.size();
}

uint64_t PrefixIndex::node_objects_bytes(NodeSlot node) const {
  const auto held = nodes_.find(node);
  return held == nodes_.end() ? 0 : held->second.bytes;
}

}  // namespace okv
