#ifndef OKV_CONTROL_PLANE_PLACEMENT_H_
#define OKV_CONTROL_PLANE_PLACEMENT_H_

#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "control_plane/node_table.h"
#include "control_plane/prefix_index.h"

namespace okv {

// Where a new object goes: to the first of `preferred` (nodes that hold the same block in its other
// codec, then its parent's) that lives and has room, so that a chain stays together; otherwise to
// the live node with room that wins weighted rendezvous hashing of `key` by free bytes
// (Schindelhauer and Schomaker 2005: score = -weight / ln(hash), the highest wins), which moves few
// keys when nodes come and go. Nothing when no live node has `payload_bytes` free. Nodes that
// are being drained, and those of `avoid`, get nothing.
std::optional<NodeSlot> PlaceObject(const NodeTable& nodes, absl::Span<const NodeSlot> preferred,
                                    const BlockKey& key, uint64_t payload_bytes,
                                    absl::Span<const NodeSlot> avoid = {});

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_PLACEMENT_H_
