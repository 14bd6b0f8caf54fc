#include "calib/zip.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "calib/quoted.h"
#include "proto/fields.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kLocalMagic("PK\x03\x04", 4);
constexpr absl::string_view kCentralMagic("PK\x01\x02", 4);
constexpr absl::string_view kEndMagic("PK\x05\x06", 4);
constexpr absl::string_view kWideEndMagic("PK\x06\x06", 4);
constexpr absl::string_view kWideLocatorMagic("PK\x06\x07", 4);
constexpr size_t kEndBytes = 22;
constexpr size_t kWideLocatorBytes = 20;
constexpr size_t kCommentBytesMax = 65'535;
constexpr uint32_t kNarrowMax = 0xffffffff;  // "See the ZIP64 field."
constexpr uint16_t kShortMax = 0xffff;
constexpr uint16_t kWideExtraId = 1;
constexpr uint16_t kEncryptedFlag = 1;
constexpr size_t kAlignmentBytes = 64;

absl::Status Bad(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("zip: ", why));
}
absl::Status Truncated(const std::string& where) {
  return absl::DataLossError(absl::StrCat("zip: the file ends in ", where));
}

// Eight tables: table[k][b] is the CRC of byte b followed by k zero bytes.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

CrcTables MakeCrcTables() {
  CrcTables tables;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

// One record of the central directory.
struct Record {
  uint16_t flags;
  uint16_t method;
  uint32_t crc32;
  uint64_t stored_bytes;
  uint64_t bytes;
  uint64_t local_offset;
  absl::string_view name;
};

// Replaces the fields that say kNarrowMax by those of the ZIP64 extra field.
absl::Status ReadWideFields(absl::string_view extra, Record* record) {
  FieldReader reader(extra);
  while (reader.ok() && reader.rest().size() >= 4) {
    const uint64_t id = reader.Unsigned(2);
    const absl::string_view content = reader.Take(reader.Unsigned(2));
    if (id != kWideExtraId) continue;
    FieldReader wide(content);
    for (uint64_t* field : {&record->bytes, &record->stored_bytes, &record->local_offset}) {
      if (*field == kNarrowMax) *field = wide.Unsigned(8);
    }
    if (!wide.ok()) return Bad(absl::StrCat("entry ", Quoted(record->name), " has no ZIP64 size"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Record> ReadRecord(FieldReader* directory) {
  if (directory->Take(4) != kCentralMagic) return Bad("its directory holds no entry where one is");
  directory->Take(4);  // Versions.
  Record record{};
  record.flags = static_cast<uint16_t>(directory->Unsigned(2));
  record.method = static_cast<uint16_t>(directory->Unsigned(2));
  directory->Take(4);  // Time and date.
  record.crc32 = static_cast<uint32_t>(directory->Unsigned(4));
  record.stored_bytes = directory->Unsigned(4);
  record.bytes = directory->Unsigned(4);
  const size_t name_bytes = directory->Unsigned(2);
  const size_t extra_bytes = directory->Unsigned(2);
  const size_t comment_bytes = directory->Unsigned(2);
  directory->Take(8);  // Disk, attributes.
  record.local_offset = directory->Unsigned(4);
  record.name = directory->Take(name_bytes);
  const absl::string_view extra = directory->Take(extra_bytes);
  directory->Take(comment_bytes);
  if (!directory->ok()) return Bad("an entry reaches beyond its directory");
  OKV_RETURN_IF_ERROR(ReadWideFields(extra, &record));
  if ((record.flags & kEncryptedFlag) != 0) {
    return Bad(absl::StrCat("entry ", Quoted(record.name), " is encrypted"));
  }
  if (record.method != 0 || record.stored_bytes != record.bytes) {
    return Bad(absl::StrCat("entry ", Quoted(record.name), " is compressed (method ", record.method,
                            "): only stored entries are read"));
  }
  return record;
}

// The entry's data; the local header may differ from the directory in its extra field's length, and
// in sizes and CRC, which a data descriptor leaves to the directory.
absl::StatusOr<absl::string_view> FindData(absl::string_view before_directory,
                                           const Record& record) {
  const auto bad = [&](const char* why) {
    return Bad(absl::StrCat("entry ", Quoted(record.name), " ", why));
  };
  if (record.local_offset > before_directory.size()) return bad("begins beyond the file");
  FieldReader local(before_directory.substr(record.local_offset));
  if (local.Take(4) != kLocalMagic) return bad("has no header where the directory says");
  local.Take(22);
  const size_t name_bytes = local.Unsigned(2);
  const size_t extra_bytes = local.Unsigned(2);
  if (local.Take(name_bytes) != record.name) return bad("has another name in its header");
  local.Take(extra_bytes);
  if (!local.ok() || record.bytes > local.rest().size()) return bad("reaches beyond the file");
  return local.Take(record.bytes);
}

}  // namespace

uint32_t Crc32(absl::string_view bytes) {
  static const CrcTables tables = MakeCrcTables();
  uint32_t crc = 0xffffffff;
  size_t at = 0;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[at + i]); };
  for (; at + 8 <= bytes.size(); at += 8) {
    uint32_t next = 0;
    for (size_t i = 0; i < 4; ++i) next ^= tables[7 - i][byte(i) ^ ((crc >> (8 * i)) & 0xff)];
    for (size_t i = 4; i < 8; ++i) next ^= tables[7 - i][byte(i)];
    crc = next;
  }
  for (; at < bytes.size(); ++at) crc = (crc >> 8) ^ tables[0][(crc ^ byte(0)) & 0xff];
  return ~crc;
}

absl::StatusOr<ZipReader> ZipReader::Open(absl::string_view bytes) {
  ZipReader reader(bytes);
  OKV_ASSIGN_OR_RETURN(const Directory directory, reader.FindDirectory());
  OKV_RETURN_IF_ERROR(reader.ReadEntries(directory));
  return reader;
}

absl::StatusOr<ZipReader::Directory> ZipReader::FindDirectory() const {
  const bool begins_as_zip = absl::StartsWith(bytes_, kLocalMagic);
  const size_t first = bytes_.size() > kEndBytes + kCommentBytesMax
                           ? bytes_.size() - kEndBytes - kCommentBytesMax
                           : 0;
  const size_t end = bytes_.substr(first).rfind(kEndMagic);
  if (end == absl::string_view::npos) {
    return begins_as_zip ? Truncated("the middle: it has no directory") : Bad("not a ZIP file");
  }
  FieldReader reader(bytes_.substr(first + end + 4));
  const uint64_t disk = reader.Unsigned(2);
  const uint64_t directory_disk = reader.Unsigned(2);
  const uint64_t disk_entries_count = reader.Unsigned(2);
  Directory directory{};
  directory.entries_count = reader.Unsigned(2);
  directory.bytes = reader.Unsigned(4);
  directory.offset = reader.Unsigned(4);
  const uint64_t comment_bytes = reader.Unsigned(2);
  if (!reader.ok() || comment_bytes > reader.rest().size()) return Truncated("its end record");
  if (disk != 0 || directory_disk != 0 || disk_entries_count != directory.entries_count) {
    return Bad("it spans several disks");
  }
  const uint64_t end_at = first + end;
  if (end_at >= kWideLocatorBytes &&
      absl::StartsWith(bytes_.substr(end_at - kWideLocatorBytes), kWideLocatorMagic)) {
    OKV_RETURN_IF_ERROR(ReadWideDirectory(end_at - kWideLocatorBytes, &directory));
  }
  if (directory.offset > end_at || directory.bytes > end_at - directory.offset) {
    return Bad("its directory reaches beyond the file");
  }
  return directory;
}

// The ZIP64 end record; where the plain record has values of its own they must agree.
absl::Status ZipReader::ReadWideDirectory(uint64_t locator_at, Directory* directory) const {
  FieldReader locator(bytes_.substr(locator_at + kWideLocatorMagic.size()));
  locator.Take(4);  // Disk.
  const uint64_t at = locator.Unsigned(8);
  if (!locator.ok() || at > locator_at) return Bad("its ZIP64 end record lies beyond the file");
  FieldReader reader(bytes_.substr(at, locator_at - at));
  if (reader.Take(4) != kWideEndMagic) return Bad("it has no ZIP64 end record");
  reader.Take(8 + 4 + 8);  // Size, versions, disks.
  const uint64_t disk_entries_count = reader.Unsigned(8);
  const Directory wide = {.offset = 0, .bytes = 0, .entries_count = reader.Unsigned(8)};
  const uint64_t bytes = reader.Unsigned(8);
  const uint64_t offset = reader.Unsigned(8);
  if (!reader.ok()) return Bad("its ZIP64 end record is cut");
  const auto agrees = [](uint64_t narrow, uint64_t unknown, uint64_t value) {
    return narrow == unknown || narrow == value;
  };
  if (disk_entries_count != wide.entries_count ||
      !agrees(directory->entries_count, kShortMax, wide.entries_count) ||
      !agrees(directory->bytes, kNarrowMax, bytes) ||
      !agrees(directory->offset, kNarrowMax, offset)) {
    return Bad("its two end records disagree");
  }
  *directory = {.offset = offset, .bytes = bytes, .entries_count = wide.entries_count};
  return absl::OkStatus();
}

absl::Status ZipReader::ReadEntries(const Directory& directory) {
  if (directory.entries_count > kEntriesMax) {
    return Bad(absl::StrCat(directory.entries_count, " entries, at most ", kEntriesMax));
  }
  FieldReader reader(bytes_.substr(directory.offset, directory.bytes));
  for (uint64_t i = 0; i < directory.entries_count; ++i) {
    OKV_ASSIGN_OR_RETURN(const Record record, ReadRecord(&reader));
    OKV_ASSIGN_OR_RETURN(const absl::string_view data,
                         FindData(bytes_.substr(0, directory.offset), record));
    if (i == 0) first_name_ = std::string(record.name);
    const Entry entry = {.data = data, .crc32 = record.crc32};
    if (!entries_.emplace(std::string(record.name), entry).second) {
      return Bad(absl::StrCat("entry ", Quoted(record.name), " stands twice"));
    }
  }
  if (!reader.done()) return Bad("its directory holds more than its entries");
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ZipReader::Size(absl::string_view name) const {
  const auto found = entries_.find(std::string(name));
  if (found == entries_.end()) return Bad(absl::StrCat("there is no entry ", Quoted(name)));
  return found->second.data.size();
}

absl::StatusOr<absl::string_view> ZipReader::Read(absl::string_view name) const {
  const auto found = entries_.find(std::string(name));
  if (found == entries_.end()) return Bad(absl::StrCat("there is no entry ", Quoted(name)));
  if (Crc32(found->second.data) != found->second.crc32) {
    return absl::DataLossError(absl::StrCat("zip: entry ", Quoted(name), " has another CRC-32"));
  }
  return found->second.data;
}

namespace {

void AppendU16(std::string* out, uint64_t value) {
  out->push_back(static_cast<char>(value));
  out->push_back(static_cast<char>(value >> 8));
}

// What local header and directory have in common, from the version on.
std::string CommonFields(absl::string_view name, absl::string_view data, size_t extra_bytes) {
  std::string fields;
  AppendU16(&fields, 20);          // Version 2.0 reads it.
  AppendU16(&fields, 0);           // Flags.
  AppendU16(&fields, 0);           // Stored.
  AppendU32(&fields, 0x00210000);  // 1980-01-01, midnight: equal content gives equal bytes.
  AppendU32(&fields, Crc32(data));
  AppendU32(&fields, static_cast<uint32_t>(data.size()));
  AppendU32(&fields, static_cast<uint32_t>(data.size()));
  AppendU16(&fields, name.size());
  AppendU16(&fields, extra_bytes);
  return fields;
}

}  // namespace

void ZipWriter::Add(absl::string_view name, absl::string_view data) {
  const uint64_t local_offset = file_.size();
  const size_t header_bytes = 30 + name.size() + 4;  // With the extra field's own header.
  const size_t padding =
      (kAlignmentBytes - (local_offset + header_bytes) % kAlignmentBytes) % kAlignmentBytes;
  absl::StrAppend(&file_, kLocalMagic, CommonFields(name, data, 4 + padding), name, "FB");
  AppendU16(&file_, padding);
  file_.append(padding, 'Z');
  absl::StrAppend(&file_, data);

  absl::StrAppend(&directory_, kCentralMagic);
  AppendU16(&directory_, 20);
  absl::StrAppend(&directory_, CommonFields(name, data, 0));
  directory_.append(2 + 2 + 2 + 4, '\0');  // Comment, disk, attributes.
  AppendU32(&directory_, static_cast<uint32_t>(local_offset));
  absl::StrAppend(&directory_, name);
  ++entries_count_;
}

absl::StatusOr<std::string> ZipWriter::Finish() {
  const uint64_t directory_offset = file_.size();
  if (directory_offset + directory_.size() >= kNarrowMax || entries_count_ >= kShortMax) {
    return Bad(absl::StrCat(directory_offset, " bytes in ", entries_count_,
                            " entries are more than a plain ZIP file holds"));
  }
  absl::StrAppend(&file_, directory_, kEndMagic);
  file_.append(4, '\0');  // Disks.
  AppendU16(&file_, entries_count_);
  AppendU16(&file_, entries_count_);
  AppendU32(&file_, static_cast<uint32_t>(directory_.size()));
  AppendU32(&file_, static_cast<uint32_t>(directory_offset));
  AppendU16(&file_, 0);  // Comment.
  return std::move(file_);
}

}  // namespace okv
