#include "proto/object.h"

#ifdef OKV_XXHASH_DISPATCHES
#include <xxh_x86dispatch.h>  // Replaces XXH3_64bits and its like.
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "proto/block_range.h"
#include "proto/check.h"
#include "proto/fields.h"

namespace okv {
namespace {

constexpr absl::string_view kMagic = "OKVO";
constexpr size_t kChecksumBytes = 4;
constexpr size_t kFixedBytesMax = 160;  // All of a header but its checksums.

uint32_t HeaderChecksum(absl::string_view bytes) {
  return static_cast<uint32_t>(XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace

void ObjectHeader::AppendTo(std::string* out) const {
  const size_t begin = out->size();
  out->reserve(begin + kFixedBytesMax + 4 * checksums.size());
  out->append(kMagic.data(), kMagic.size());
  AppendU32(out, page_layout_version);
  out->append(format_id.view().data(), format_id.view().size());
  out->append(id.key.view().data(), id.key.view().size());
  out->push_back(static_cast<char>(id.codec));
  out->push_back(parent.has_value() ? 1 : 0);
  const BlockKey parent_or_zero = parent.value_or(BlockKey{});
  out->append(parent_or_zero.view().data(), parent_or_zero.view().size());
  AppendU32(out, index.value());
  AppendU64(out, payload_bytes);
  AppendU64(out, generation);
  AppendU32(out, static_cast<uint32_t>(checksums.size()));
  AppendU32s(out, checksums);
  AppendU32(out, HeaderChecksum(absl::string_view(*out).substr(begin)));
}

std::string ObjectHeader::Encode() const {
  std::string out;
  AppendTo(&out);
  return out;
}

absl::StatusOr<ObjectHeader> ObjectHeader::Decode(absl::string_view bytes) {
  FieldReader reader(bytes);
  if (reader.Take(kMagic.size()) != kMagic || bytes.size() < kMagic.size() + kChecksumBytes) {
    return absl::DataLossError("not an object header: wrong magic");
  }
  const absl::string_view covered = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (FieldReader(bytes.substr(covered.size())).Unsigned(kChecksumBytes) !=
      HeaderChecksum(covered)) {
    return absl::DataLossError("object header: wrong checksum of the header itself");
  }
  ObjectHeader header;
  header.page_layout_version = static_cast<uint32_t>(reader.Unsigned(4));
  if (header.page_layout_version != kPageLayoutVersion) {
    return absl::FailedPreconditionError(absl::StrCat("object header: page_layout_version ",
                                                      header.page_layout_version,
                                                      "; this program reads ", kPageLayoutVersion));
  }
  const absl::string_view format_id = reader.Take(32);
  const absl::string_view key = reader.Take(32);
  const uint64_t codec = reader.Unsigned(1);
  const uint64_t has_parent = reader.Unsigned(1);
  const absl::string_view parent = reader.Take(32);
  header.index = BlockIndex(static_cast<uint32_t>(reader.Unsigned(4)));
  header.payload_bytes = reader.Unsigned(8);
  header.generation = reader.Unsigned(8);
  const uint64_t checksums_count = reader.Unsigned(4);
  const bool parent_fits = has_parent == 1 || (has_parent == 0 && parent == BlockKey{}.view());
  if (!reader.ok() || !IsCodec(static_cast<uint32_t>(codec)) || !parent_fits ||
      checksums_count > uint64_t{kLayersMax} * kKvHeadsMax ||
      reader.rest().size() != checksums_count * 4 + kChecksumBytes) {
    return absl::DataLossError("object header: truncated, or a field out of range");
  }
  header.format_id = *FormatId::FromBytes(format_id);
  header.id = {.key = *BlockKey::FromBytes(key), .codec = static_cast<Codec>(codec)};
  if (has_parent == 1) header.parent = *BlockKey::FromBytes(parent);
  header.checksums = reader.U32s(checksums_count);
  return header;
}

uint32_t RunChecksum(const ObjectId& id, uint32_t layer, uint32_t head,
                     absl::Span<const uint8_t> run) {
  // On the stack: a run of 4,608 bytes takes half a microsecond, about five allocations.
  std::array<uint8_t, sizeof(BlockKey::bytes) + 1 + 4 + 4> place;
  uint8_t* at = std::copy_n(id.key.bytes.begin(), id.key.bytes.size(), place.begin());
  *at++ = static_cast<uint8_t>(id.codec);
  for (const uint32_t value : {layer, head}) {
    for (int shift = 0; shift < 32; shift += 8) *at++ = static_cast<uint8_t>(value >> shift);
  }
  OKV_CHECK(at == place.end());
  const XXH64_hash_t seed = XXH3_64bits(place.data(), place.size());
  return static_cast<uint32_t>(XXH3_64bits_withSeed(run.data(), run.size(), seed));
}

std::vector<uint32_t> BlockChecksums(const ObjectId& id, const PageLayout& layout,
                                     absl::Span<const uint8_t> payload) {
  OKV_CHECK(payload.size() == layout.block_bytes(id.codec));
  std::vector<uint32_t> checksums;
  checksums.reserve(layout.runs_count());
  for (uint32_t layer = 0; layer < layout.layers_count; ++layer) {
    for (uint32_t head = 0; head < layout.kv_heads; ++head) {
      checksums.push_back(RunChecksum(
          id, layer, head,
          payload.subspan(layout.run_offset(id.codec, layer, head), layout.run_bytes(id.codec))));
    }
  }
  return checksums;
}

absl::Status VerifyObject(const ObjectHeader& header, const PageLayout& layout,
                          absl::Span<const uint8_t> payload) {
  return VerifyRange(header, layout, BlockRange::Whole(layout), payload);
}

}  // namespace okv
