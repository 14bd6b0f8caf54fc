#ifndef OKV_CACHE_NODE_TIERS_GROUP_TABLE_H_
#define OKV_CACHE_NODE_TIERS_GROUP_TABLE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache_node/tiers/tier.h"
#include "proto/sha256.h"

namespace okv {

// What a group's file says of itself, so that an index can be built from the files alone: the
// headers and tenants of its objects in the order of their payloads, and the formats they need.
// The file's trailer has the checksum (group_files.h). A plain value.
struct GroupTable {
  std::map<FormatId, std::string> formats;  // Format::Canonical().
  std::vector<TierRecord> objects;          // Each with its place in the group.
};

// Bytes that an object takes in its group's table, beside what the table itself does.
size_t GroupTableRowBytes(const HeldObject& object);

std::string EncodeGroupTable(const std::map<FormatId, std::string>& formats,
                             absl::Span<const TierWrite> objects);

// Reads EncodeGroupTable's bytes, of that group. kDataLoss for anything else; kFailedPrecondition
// for headers of another page layout version.
absl::StatusOr<GroupTable> ParseGroupTable(uint32_t group, absl::string_view bytes);

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_GROUP_TABLE_H_
