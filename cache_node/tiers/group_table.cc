#include "cache_node/tiers/group_table.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_node/tiers/group_files.h"
#include "proto/fields.h"
#include "proto/format.h"
#include "proto/object.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Tags, on disk: never renumber.
enum Tag : uint8_t { kFormatsCount = 1, kFormat = 2, kObjectsCount = 3, kTenant = 4, kHeader = 5 };
constexpr size_t kFieldBytes = 5;          // Tag and length.
constexpr size_t kHeaderBytesFixed = 134;  // ObjectHeader::Encode() without checksums.
constexpr size_t kTenantBytesMax = 1024;
constexpr size_t kHeaderBytesMax = size_t{1} << 20;  // 512 layers x 256 heads x 4 B, and the rest.
// Every text at its longest, layer ids, and the rest.
constexpr size_t kFormatBytesMax = 8 * kFormatTextBytesMax;

}  // namespace

size_t GroupTableRowBytes(const HeldObject& object) {
  return 2 * kFieldBytes + object.tenant.size() + kHeaderBytesFixed +
         object.header.checksums.size() * 4;
}

std::string EncodeGroupTable(const std::map<FormatId, std::string>& formats,
                             absl::Span<const TierWrite> objects) {
  std::string table;
  FieldWriter writer(&table);
  writer.U32(kFormatsCount, static_cast<uint32_t>(formats.size()));
  for (const auto& [id, canonical] : formats) writer.Bytes(kFormat, canonical);
  writer.U32(kObjectsCount, static_cast<uint32_t>(objects.size()));
  for (const TierWrite& write : objects) {
    writer.Bytes(kTenant, write.object->tenant);
    writer.Bytes(kHeader, write.object->header.Encode());
  }
  return table;
}

absl::StatusOr<GroupTable> ParseGroupTable(uint32_t group, absl::string_view bytes) {
  GroupTable table;
  FieldReader reader(bytes);
  for (uint32_t left = reader.U32(kFormatsCount); reader.ok() && left > 0; --left) {
    const absl::string_view canonical = reader.Bytes(kFormat, kFormatBytesMax);
    if (reader.ok()) table.formats[{.bytes = Sha256(canonical)}] = std::string(canonical);
  }
  uint64_t page = 0;
  for (uint32_t left = reader.U32(kObjectsCount); reader.ok() && left > 0; --left) {
    const absl::string_view tenant = reader.Bytes(kTenant, kTenantBytesMax);
    const absl::string_view encoded = reader.Bytes(kHeader, kHeaderBytesMax);
    if (!reader.ok()) break;
    absl::StatusOr<ObjectHeader> header = ObjectHeader::Decode(encoded);
    if (!header.ok()) {
      return absl::Status(header.status().code(), absl::StrCat(GroupFiles::FileName(group), ": ",
                                                               header.status().message()));
    }
    const uint64_t pages = DiskPagesBytes(header->payload_bytes) / kDiskPageBytes;
    if (page > UINT32_MAX || pages > UINT32_MAX) break;
    table.objects.push_back({.header = *std::move(header),
                             .tenant = std::string(tenant),
                             .place = {.group = group, .page = static_cast<uint32_t>(page)}});
    page += pages;
  }
  if (reader.done()) return table;
  return absl::DataLossError(
      absl::StrCat(GroupFiles::FileName(group), " has a table that cannot be read"));
}

}  // namespace okv
