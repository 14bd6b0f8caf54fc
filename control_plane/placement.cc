#include "control_plane/placement.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "proto/sha256.h"

namespace okv {
namespace {

// Uniform in (0, 1), the same on every machine.
double UnitHash(const BlockKey& key, const std::string& node_id) {
  std::string bytes(key.view());
  bytes += node_id;
  const std::array<uint8_t, 32> digest = Sha256(bytes);
  uint64_t word;
  std::memcpy(&word, digest.data(), sizeof(word));
  return (static_cast<double>(word >> 11) + 0.5) * 0x1.0p-53;
}

}  // namespace

std::optional<NodeSlot> PlaceObject(const NodeTable& nodes, absl::Span<const NodeSlot> preferred,
                                    const BlockKey& key, uint64_t payload_bytes,
                                    absl::Span<const NodeSlot> avoid) {
  const auto fits = [payload_bytes, avoid](const NodeState& node) {
    return node.takes_puts() && node.FreeBytes() >= payload_bytes &&
           std::find(avoid.begin(), avoid.end(), node.slot) == avoid.end();
  };
  for (const NodeSlot slot : preferred) {
    if (fits(nodes.at(slot))) return slot;
  }
  std::optional<NodeSlot> best;
  double best_score = 0;
  for (const NodeState& node : nodes.nodes()) {
    if (!fits(node)) continue;
    const double weight = static_cast<double>(node.FreeBytes());
    const double score = -weight / std::log(UnitHash(key, node.description.node_id));
    if (best.has_value() && score <= best_score) continue;
    best = node.slot;
    best_score = score;
  }
  return best;
}

}  // namespace okv
