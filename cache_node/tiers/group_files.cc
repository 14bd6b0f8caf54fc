#include "cache_node/tiers/group_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "proto/fields.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr const char* kSuffix = ".group";
constexpr const char* kProbeName = "probe";
constexpr int kPartsMax = 1024;  // IOV_MAX of Linux.

// The trailer: see the class comment.
constexpr absl::string_view kTrailerMagic = "OKVGROUP";
constexpr uint32_t kTrailerVersion = 1;
constexpr size_t kTrailerBytesCovered = 24;  // By the digest behind them, as the table is.
constexpr size_t kTrailerBytes = kTrailerBytesCovered + sizeof(FormatId::bytes);

// A file descriptor, closed at the end of its scope.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

absl::Status FromErrno(absl::string_view what, int error) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(text);
  }
  if (error == ENOENT) return absl::NotFoundError(text);
  // A disk that is gone, failing or read-only comes back, or the operator replaces it.
  return absl::UnavailableError(text);
}

bool Aligned(const uint8_t* memory) {
  return reinterpret_cast<uintptr_t>(memory) % kDiskPageBytes == 0;
}

// The part of a payload that direct I/O can move from or to where it is.
size_t DirectBytes(absl::Span<const uint8_t> payload) {
  return Aligned(payload.data()) ? payload.size() / kDiskPageBytes * kDiskPageBytes : 0;
}

iovec Part(const uint8_t* bytes, size_t count) {
  return {.iov_base = const_cast<uint8_t*>(bytes), .iov_len = count};
}

// The payloads as whole pages: where they are as far as possible, the rest copied to `copies`.
std::vector<iovec> WholePages(absl::Span<const absl::Span<const uint8_t>> payloads,
                              AlignedBuffer* copies) {
  uint64_t copied_bytes = 0;
  for (const absl::Span<const uint8_t> payload : payloads) {
    copied_bytes += DiskPagesBytes(payload.size()) - DirectBytes(payload);
  }
  *copies = AllocateAligned(copied_bytes);
  std::vector<iovec> parts;
  uint8_t* copy = copies->get();
  for (const absl::Span<const uint8_t> payload : payloads) {
    const size_t direct = DirectBytes(payload);
    if (direct > 0) parts.push_back(Part(payload.data(), direct));
    const size_t rest = payload.size() - direct;
    if (rest == 0) continue;
    std::memcpy(copy, payload.data() + direct, rest);
    std::memset(copy + rest, 0, DiskPagesBytes(rest) - rest);
    parts.push_back(Part(copy, DiskPagesBytes(rest)));
    copy += DiskPagesBytes(rest);
  }
  return parts;
}

// Takes `bytes` from the front of `parts` from `*next` on.
void Advance(std::vector<iovec>* parts, size_t* next, size_t bytes) {
  while (bytes > 0) {
    iovec& part = (*parts)[*next];
    const size_t taken = std::min(bytes, part.iov_len);
    part.iov_base = static_cast<uint8_t*>(part.iov_base) + taken;
    part.iov_len -= taken;
    bytes -= taken;
    if (part.iov_len == 0) ++*next;
  }
}

// 0 or an errno.
int WriteParts(int fd, std::vector<iovec> parts) {
  size_t next = 0;
  off_t offset = 0;
  while (next < parts.size()) {
    const int count = static_cast<int>(std::min<size_t>(parts.size() - next, kPartsMax));
    const ssize_t written = pwritev(fd, &parts[next], count, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : EIO;
    offset += written;
    Advance(&parts, &next, static_cast<size_t>(written));
  }
  return 0;
}

absl::string_view AsView(const uint8_t* bytes, size_t count) {
  return {reinterpret_cast<const char*>(bytes), count};
}

// Table, zeros, trailer: whole pages.
AlignedBuffer TablePages(absl::string_view table) {
  const size_t bytes = GroupFiles::TableBytes(table.size());
  AlignedBuffer pages = AllocateAligned(bytes);
  std::memset(pages.get(), 0, bytes);
  std::memcpy(pages.get(), table.data(), table.size());
  std::string trailer(kTrailerMagic);
  AppendU32(&trailer, kTrailerVersion);
  AppendU32(&trailer, 0);
  AppendU64(&trailer, table.size());
  const std::array<uint8_t, 32> digest = Sha256(absl::StrCat(table, trailer));
  uint8_t* const end = pages.get() + bytes - kTrailerBytes;
  std::memcpy(end, trailer.data(), trailer.size());
  std::memcpy(end + trailer.size(), digest.data(), digest.size());
  return pages;
}

bool HasDirectIo(int directory_fd) {
  const int fd = openat(directory_fd, kProbeName, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
  unlinkat(directory_fd, kProbeName, 0);
  return fd >= 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupFiles>> GroupFiles::Open(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", directory, "' cannot be created: ", error.message()));
  }
  const int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", directory, "' cannot be opened: ", std::strerror(errno)));
  }
  return absl::WrapUnique(new GroupFiles(fd, HasDirectIo(fd)));
}

GroupFiles::~GroupFiles() { close(directory_fd_); }

std::string GroupFiles::FileName(uint32_t group) {
  return absl::StrFormat("%08x%s", group, kSuffix);
}

uint64_t GroupFiles::TableBytes(size_t table_bytes) {
  return DiskPagesBytes(table_bytes + kTrailerBytes);
}

absl::StatusOr<std::vector<uint32_t>> GroupFiles::Write(
    uint32_t group, absl::Span<const absl::Span<const uint8_t>> payloads, absl::string_view table) {
  std::vector<uint32_t> pages;
  uint64_t file_bytes = 0;
  for (const absl::Span<const uint8_t> payload : payloads) {
    if (file_bytes / kDiskPageBytes > UINT32_MAX) {
      return absl::InvalidArgumentError("a group is larger than a file's 2^32 pages");
    }
    pages.push_back(static_cast<uint32_t>(file_bytes / kDiskPageBytes));
    file_bytes += DiskPagesBytes(payload.size());
  }
  const AlignedBuffer table_pages = TablePages(table);
  const uint64_t table_bytes = TableBytes(table.size());
  std::vector<absl::Span<const uint8_t>> parts(payloads.begin(), payloads.end());
  parts.push_back(absl::MakeConstSpan(table_pages.get(), table_bytes));
  const std::string name = FileName(group);
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | (direct_ ? O_DIRECT : 0);
  const File file(openat(directory_fd_, name.c_str(), flags, 0600));
  if (file.fd() < 0) {
    // A directory that went away is no miss.
    const int error = errno == ENOENT ? EIO : errno;
    return FromErrno(absl::StrCat("making ", name), error);
  }
  const absl::Status status = Fill(file.fd(), name, file_bytes + table_bytes, parts);
  if (status.ok()) return pages;
  unlinkat(directory_fd_, name.c_str(), 0);
  return status;
}

absl::Status GroupFiles::Fill(int fd, const std::string& name, uint64_t file_bytes,
                              absl::Span<const absl::Span<const uint8_t>> payloads) {
  // One extent instead of many, and a full disk is known before anything is written.
  if (fallocate(fd, 0, 0, static_cast<off_t>(file_bytes)) != 0 && errno != EOPNOTSUPP) {
    return FromErrno(absl::StrCat("making room for ", name), errno);
  }
  AlignedBuffer copies;
  const int error = WriteParts(fd, WholePages(payloads, &copies));
  if (error != 0) return FromErrno(absl::StrCat("writing ", name), error);
  if (fdatasync(fd) != 0) return FromErrno(absl::StrCat("syncing ", name), errno);
  if (fsync(directory_fd_) != 0) return FromErrno("syncing the directory of groups", errno);
  return absl::OkStatus();
}

absl::Status GroupFiles::Read(const DiskPlace& place, absl::Span<uint8_t> buffer) const {
  const std::string name = FileName(place.group);
  const File file(
      openat(directory_fd_, name.c_str(), O_RDONLY | O_CLOEXEC | (direct_ ? O_DIRECT : 0)));
  if (file.fd() < 0) return FromErrno(absl::StrCat("opening ", name), errno);
  const size_t direct = DirectBytes(buffer);
  const size_t rest = buffer.size() - direct;
  const AlignedBuffer copy = AllocateAligned(DiskPagesBytes(rest));
  std::vector<iovec> parts;
  if (direct > 0) parts.push_back(Part(buffer.data(), direct));
  if (rest > 0) parts.push_back(Part(copy.get(), DiskPagesBytes(rest)));
  off_t offset = static_cast<off_t>(uint64_t{place.page} * kDiskPageBytes);
  size_t next = 0;
  while (next < parts.size()) {
    const ssize_t count =
        preadv(file.fd(), &parts[next], static_cast<int>(parts.size() - next), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FromErrno(absl::StrCat("reading ", name), errno);
    if (count == 0) return absl::DataLossError(absl::StrCat(name, " ends inside a payload"));
    offset += count;
    Advance(&parts, &next, static_cast<size_t>(count));
  }
  std::memcpy(buffer.data() + direct, copy.get(), rest);
  return absl::OkStatus();
}

absl::StatusOr<std::string> GroupFiles::ReadTable(uint32_t group) const {
  const std::string name = FileName(group);
  struct stat file;
  if (fstatat(directory_fd_, name.c_str(), &file, 0) != 0) {
    return FromErrno(absl::StrCat("looking at ", name), errno);
  }
  const auto file_bytes = static_cast<uint64_t>(file.st_size);
  const absl::Status none = absl::NotFoundError(absl::StrCat(name, " has no table"));
  if (file_bytes == 0 || file_bytes % kDiskPageBytes != 0) return none;
  const auto read_end = [&](uint64_t bytes) -> absl::StatusOr<AlignedBuffer> {
    AlignedBuffer pages = AllocateAligned(bytes);
    const auto page = static_cast<uint32_t>((file_bytes - bytes) / kDiskPageBytes);
    OKV_RETURN_IF_ERROR(Read({.group = group, .page = page}, absl::MakeSpan(pages.get(), bytes)));
    return pages;
  };
  OKV_ASSIGN_OR_RETURN(AlignedBuffer pages, read_end(kDiskPageBytes));
  FieldReader trailer(AsView(pages.get() + kDiskPageBytes - kTrailerBytes, kTrailerBytes));
  if (trailer.Take(kTrailerMagic.size()) != kTrailerMagic) return none;
  const auto version = static_cast<uint32_t>(trailer.Unsigned(4));
  trailer.Take(4);
  const uint64_t table_bytes = trailer.Unsigned(8);
  const absl::Status damaged = absl::DataLossError(absl::StrCat("the table of ", name));
  if (table_bytes > file_bytes - kTrailerBytes) return damaged;
  const uint64_t bytes = TableBytes(table_bytes);
  OKV_ASSIGN_OR_RETURN(pages, read_end(bytes));
  const uint8_t* const end = pages.get() + bytes - kTrailerBytes;
  std::string table(AsView(pages.get(), table_bytes));
  const std::array<uint8_t, 32> digest =
      Sha256(absl::StrCat(table, AsView(end, kTrailerBytesCovered)));
  if (AsView(end + kTrailerBytesCovered, digest.size()) != AsView(digest.data(), digest.size())) {
    return damaged;
  }
  if (version == kTrailerVersion) return table;
  return absl::FailedPreconditionError(
      absl::StrCat(name, " is of version ", version, "; this program reads ", kTrailerVersion));
}

absl::Status GroupFiles::Delete(uint32_t group) {
  const std::string name = FileName(group);
  if (unlinkat(directory_fd_, name.c_str(), 0) == 0 || errno == ENOENT) return absl::OkStatus();
  return FromErrno(absl::StrCat("deleting ", name), errno);
}

absl::StatusOr<std::map<uint32_t, uint64_t>> GroupFiles::List() const {
  // A duplicate: closedir closes it.
  const int fd = openat(directory_fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* directory = fd >= 0 ? fdopendir(fd) : nullptr;
  if (directory == nullptr) return FromErrno("listing groups", errno);
  std::map<uint32_t, uint64_t> groups;
  // A list that is cut short would pass for files that are gone.
  int error = 0;
  while (error == 0) {
    errno = 0;
    const dirent* entry = readdir(directory);
    error = errno;
    if (entry == nullptr) break;
    char* end = nullptr;
    const unsigned long group = std::strtoul(entry->d_name, &end, 16);
    if (FileName(static_cast<uint32_t>(group)) != entry->d_name) continue;
    struct stat status;
    if (fstatat(fd, entry->d_name, &status, 0) == 0) {
      groups[static_cast<uint32_t>(group)] = static_cast<uint64_t>(status.st_size);
    } else if (errno != ENOENT) {
      error = errno;
    }
  }
  closedir(directory);
  if (error != 0) return FromErrno("listing groups", error == ENOENT ? EIO : error);
  return groups;
}

std::optional<uint64_t> GroupFiles::FreeBytes() const {
  struct statvfs status;
  if (fstatvfs(directory_fd_, &status) != 0) return std::nullopt;
  return uint64_t{status.f_bavail} * status.f_frsize;
}

}  // namespace okv
