#ifndef OKV_CACHE_NODE_TIERS_INDEX_ROW_H_
#define OKV_CACHE_NODE_TIERS_INDEX_ROW_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache_node/tiers/tier.h"

namespace okv {

// A row of the disk tier's index: (key, codec) -> place, tenant, encoded ObjectHeader.

std::string IndexRowKey(const ObjectId& id);
// Of key and row.
size_t IndexRowBytes(const HeldObject& object);
std::string EncodeIndexRow(const ObjectHeader& header, absl::string_view tenant,
                           const DiskPlace& place);
// kDataLoss for a row that is not what EncodeIndexRow gave for this key.
absl::StatusOr<TierRecord> ParseIndexRow(absl::string_view key, absl::string_view row);

// What an object takes of the disk tier's limit: whole pages of payload, its part of its group's
// table, its row.
uint64_t DiskCostBytes(const HeldObject& object);

// What a row counts as: cheaper to read than the whole.
struct IndexRowUse {
  DiskPlace place;
  uint64_t payload_bytes = 0;
  uint64_t table_bytes = 0;  // In its group's table.
  uint64_t cost_bytes = 0;   // DiskCostBytes.
};
// kDataLoss for a row without a place.
absl::StatusOr<IndexRowUse> ParseIndexRowUse(absl::string_view row);

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_INDEX_ROW_H_
