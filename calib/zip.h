#ifndef OKV_CALIB_ZIP_H_
#define OKV_CALIB_ZIP_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// The CRC-32 of ZIP: polynomial 0xedb88320, reflected.
uint32_t Crc32(absl::string_view bytes);

// A ZIP container in memory whose entries are stored, as PyTorch writes them: ZIP64 records, data
// descriptors and padding in extra fields are understood, compression and encryption are not.
// Entries are views into the bytes that Open was given, which must outlive it. Thread-compatible.
class ZipReader {
 public:
  static constexpr uint64_t kEntriesMax = 65'536;

  // Checks the directory and each entry's header, and reads no entry: the work is bounded by the
  // directory that the bytes hold. kDataLoss: a ZIP file that ends early. kInvalidArgument: not a
  // ZIP file, several disks, more than kEntriesMax entries, and, naming the entry: compressed,
  // encrypted, beyond the file, a name that stands twice.
  static absl::StatusOr<ZipReader> Open(absl::string_view bytes);

  bool Contains(absl::string_view name) const { return entries_.count(std::string(name)) > 0; }
  // The name of the entry that the directory lists first; "" of an empty container.
  const std::string& first_name() const { return first_name_; }

  // The entry's size. kInvalidArgument naming the entry when there is none.
  absl::StatusOr<uint64_t> Size(absl::string_view name) const;
  // The entry's bytes. Reads all of them: kDataLoss naming the entry when they do not have the
  // CRC-32 of the directory. kInvalidArgument as Size.
  absl::StatusOr<absl::string_view> Read(absl::string_view name) const;

 private:
  struct Entry {
    absl::string_view data;
    uint32_t crc32;
  };
  struct Directory {
    uint64_t offset;
    uint64_t bytes;
    uint64_t entries_count;
  };
  explicit ZipReader(absl::string_view bytes) : bytes_(bytes) {}
  absl::StatusOr<Directory> FindDirectory() const;
  absl::Status ReadWideDirectory(uint64_t locator_at, Directory* directory) const;
  absl::Status ReadEntries(const Directory& directory);

  absl::string_view bytes_;
  std::map<std::string, Entry> entries_;
  std::string first_name_;
};

// Writes a ZIP container of stored entries, each one's data aligned to 64 bytes by padding in its
// extra field, as PyTorch's own reader expects of storages. Thread-compatible.
class ZipWriter {
 public:
  // REQUIRES: the name was not added before.
  void Add(absl::string_view name, absl::string_view data);
  // The whole file. kInvalidArgument beyond 4 GiB or 65,535 entries, which only ZIP64 can hold.
  absl::StatusOr<std::string> Finish();

 private:
  std::string file_;
  std::string directory_;
  uint64_t entries_count_ = 0;
};

}  // namespace okv

#endif  // OKV_CALIB_ZIP_H_
