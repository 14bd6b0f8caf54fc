#include "cache_node/tiers/index_row.h"

#include <utility>

#include "cache_node/tiers/group_files.h"
#include "cache_node/tiers/group_table.h"
#include "proto/check.h"
#include "proto/fields.h"
#include "proto/object.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Tags of a row, on disk: never renumber.
enum Tag : uint8_t { kTenant = 1, kHeader = 2, kPlace = 3 };
constexpr size_t kFieldBytes = 5;   // Tag and length.
constexpr size_t kPlaceBytes = 16;  // Group u32, page u32, payload bytes u64, little-endian.
constexpr size_t kKeyBytes = 33;    // BlockKey, codec.
constexpr size_t kTenantBytesMax = 1024;
constexpr size_t kHeaderBytesMax = size_t{1} << 20;  // 512 layers x 256 heads x 4 B, and the rest.

DiskPlace ReadPlace(FieldReader* row, uint64_t* payload_bytes) {
  FieldReader reader(row->Bytes(kPlace, kPlaceBytes));
  DiskPlace place;
  place.group = static_cast<uint32_t>(reader.Unsigned(4));
  place.page = static_cast<uint32_t>(reader.Unsigned(4));
  *payload_bytes = reader.Unsigned(8);
  return reader.done() ? place : DiskPlace{};
}

}  // namespace

std::string IndexRowKey(const ObjectId& id) {
  std::string key(id.key.view());
  key.push_back(static_cast<char>(id.codec));
  return key;
}

size_t IndexRowBytes(const HeldObject& object) {
  // Tenant and header are the same two fields in a group's table.
  return kKeyBytes + kFieldBytes + kPlaceBytes + GroupTableRowBytes(object);
}

// The place first: counting what a directory holds reads nothing else.
std::string EncodeIndexRow(const ObjectHeader& header, absl::string_view tenant,
                           const DiskPlace& place) {
  std::string place_bytes;
  AppendU32(&place_bytes, place.group);
  AppendU32(&place_bytes, place.page);
  AppendU64(&place_bytes, header.payload_bytes);
  std::string row;
  FieldWriter writer(&row);
  writer.Bytes(kPlace, place_bytes);
  writer.Bytes(kTenant, tenant);
  writer.Bytes(kHeader, header.Encode());
  return row;
}

absl::StatusOr<TierRecord> ParseIndexRow(absl::string_view key, absl::string_view row) {
  FieldReader reader(row);
  uint64_t payload_bytes = 0;
  const DiskPlace place = ReadPlace(&reader, &payload_bytes);
  const absl::string_view tenant = reader.Bytes(kTenant, kTenantBytesMax);
  const absl::string_view header = reader.Bytes(kHeader, kHeaderBytesMax);
  if (!reader.done() || !place.known()) return absl::DataLossError("an index row is damaged");
  OKV_ASSIGN_OR_RETURN(ObjectHeader parsed, ObjectHeader::Decode(header));
  if (IndexRowKey(parsed.id) != key) {
    return absl::DataLossError("an index row has another row's key");
  }
  if (parsed.payload_bytes != payload_bytes) {
    return absl::DataLossError("an index row has another size than its header");
  }
  return TierRecord{.header = std::move(parsed), .tenant = std::string(tenant), .place = place};
}

uint64_t DiskCostBytes(const HeldObject& object) {
  return DiskPagesBytes(object.header.payload_bytes) + GroupTableRowBytes(object) +
         IndexRowBytes(object);
}

absl::StatusOr<IndexRowUse> ParseIndexRowUse(absl::string_view row) {
  IndexRowUse use;
  FieldReader reader(row);
  use.place = ReadPlace(&reader, &use.payload_bytes);
  if (!use.place.known()) return absl::DataLossError("an index row is damaged");
  use.table_bytes = reader.rest().size();
  use.cost_bytes = DiskPagesBytes(use.payload_bytes) + use.table_bytes + kKeyBytes + row.size();
  return use;
}

}  // namespace okv
