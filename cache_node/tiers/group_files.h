#ifndef OKV_CACHE_NODE_TIERS_GROUP_FILES_H_
#define OKV_CACHE_NODE_TIERS_GROUP_FILES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache_node/tiers/tier.h"

namespace okv {

// Direct I/O moves whole pages between a file and page-aligned memory.
inline constexpr size_t kDiskPageBytes = 4096;

inline constexpr uint64_t DiskPagesBytes(uint64_t bytes) {
  return (bytes + kDiskPageBytes - 1) / kDiskPageBytes * kDiskPageBytes;
}

// The payloads of spill groups: one file a group, one payload after the other, each from a page
// boundary on, then what the writer wants to know of them should its index be lost: the group's
// table. A file is written once, in large writes straight from the memory that holds the payloads,
// and goes as a whole: its space is back when Delete returns.
//
// A file ends, after zeros up to a whole page, in a trailer of 56 bytes, little-endian: "OKVGROUP",
// version u32 (1), 0 u32, bytes of the table u64, SHA-256 over the table and these 24 bytes. Files
// of the first version have no table and no trailer; they are read as ever.
//
// RocksDB's blob files were tried first and lost: a payload is copied three times on its way down
// and its CRC32C is computed on one core. 32 groups of 25 x 1.27 MiB on a disk that takes 1.5 GB/s
// in direct writes: 0.12 to 0.26 GB/s written, 0.2 to 0.4 GB/s read (RocksDB 7.8.3, 2 cores). Also
// a blob file goes only when compactions have met the removal of every one of its payloads.
//
// Knows nothing of what is in a payload or table. Thread-safe: different groups at the same time,
// one group by one writer.
class GroupFiles {
 public:
  // Opens a directory, making it when it is missing. kFailedPrecondition when it cannot be used.
  static absl::StatusOr<std::unique_ptr<GroupFiles>> Open(const std::string& directory);
  ~GroupFiles();
  GroupFiles(const GroupFiles&) = delete;
  GroupFiles& operator=(const GroupFiles&) = delete;

  // Writes a new file and syncs it and the directory: what it returns, the first page of each
  // payload, is durable. kResourceExhausted when the disk is full, kUnavailable when it fails in
  // another way; then no file is left as far as the disk still lets us remove it. kUnavailable also
  // when the group is there, which stays as it is. Payloads on page boundaries are not copied.
  absl::StatusOr<std::vector<uint32_t>> Write(uint32_t group,
                                              absl::Span<const absl::Span<const uint8_t>> payloads,
                                              absl::string_view table);
  // What a table of so many bytes adds to a file.
  static uint64_t TableBytes(size_t table_bytes);
  // The group's table, as it was written. kNotFound when the file has none: it is of the first
  // version, was not written to its end, or is damaged there; kDataLoss when it is damaged,
  // kFailedPrecondition naming the file when a later version wrote it, kUnavailable when the disk
  // fails.
  absl::StatusOr<std::string> ReadTable(uint32_t group) const;
  // Reads a payload; into page-aligned memory without a copy. kNotFound when there is no such file,
  // kDataLoss when it ends too early, kUnavailable when the disk fails.
  absl::Status Read(const DiskPlace& place, absl::Span<uint8_t> buffer) const;
  // OK also when it is not there. Who is reading it reads on. kUnavailable when the disk fails.
  absl::Status Delete(uint32_t group);
  // Every file with its bytes on disk. kUnavailable when the disk fails.
  absl::StatusOr<std::map<uint32_t, uint64_t>> List() const;
  // What the file system has left for us, if it says.
  std::optional<uint64_t> FreeBytes() const;
  // False where the file system has no direct I/O (tmpfs): then the page cache is in between.
  bool direct() const { return direct_; }

  static std::string FileName(uint32_t group);

 private:
  GroupFiles(int directory_fd, bool direct) : directory_fd_(directory_fd), direct_(direct) {}
  absl::Status Fill(int fd, const std::string& name, uint64_t file_bytes,
                    absl::Span<const absl::Span<const uint8_t>> payloads);

  const int directory_fd_;  // Files are named relative to it.
  const bool direct_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_GROUP_FILES_H_
