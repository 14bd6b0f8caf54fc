#ifndef OKV_CALIB_FILES_H_
#define OKV_CALIB_FILES_H_

#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// A whole file, mapped read-only: a layer's dump may be hundreds of megabytes, of which a check of
// the header needs a page. The file must not be truncated while it is mapped. Move-only,
// Thread-safe.
class MappedFile {
 public:
  // The errno's status (kNotFound, kPermissionDenied, ...) with the path.
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile();

  absl::string_view bytes() const { return absl::string_view(data_, bytes_); }

 private:
  MappedFile(const char* data, size_t bytes) : data_(data), bytes_(bytes) {}
  const char* data_;
  size_t bytes_;
};

// A file that appears under its name complete or not at all: written as `path`.tmp, synced,
// renamed. Move-only; a file that was not committed is removed. Thread-compatible.
class AtomicFile {
 public:
  // The errno's status with the path.
  static absl::StatusOr<AtomicFile> Create(const std::string& path);
  AtomicFile(AtomicFile&& other) noexcept
      : path_(std::move(other.path_)), file_(std::exchange(other.file_, nullptr)) {}
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  // Each: the errno's status (a full disk is kResourceExhausted) with the path.
  absl::Status Append(absl::string_view bytes);
  absl::Status AppendFile(const std::string& path);
  absl::Status Commit();

 private:
  AtomicFile(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}
  std::string TempPath() const { return path_ + ".tmp"; }

  std::string path_;
  std::FILE* file_;  // Null once committed.
};

// Appends to a plain file, created if absent. The errno's status with the path.
absl::Status AppendToFile(const std::string& path, absl::string_view bytes);

}  // namespace okv

#endif  // OKV_CALIB_FILES_H_
