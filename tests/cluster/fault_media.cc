#include "tests/cluster/fault_media.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "tests/support/process.h"

namespace okv::faults {
namespace {

// Larger mappings are no arena of a test.
constexpr uint64_t kRegionBytesMax = uint64_t{128} << 20;

std::string Errno(const std::string& what) {
  return absl::StrCat(what, ": ", std::strerror(errno));
}

bool SetImmutable(const std::string& path, bool on) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  int flags = 0;
  bool done = ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0;
  flags = on ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
  done = done && ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0;
  close(fd);
  return done;
}

}  // namespace

std::vector<FilePlace> FindInFiles(const std::string& directory, const std::string& needle) {
  std::vector<FilePlace> places;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    const std::string path = entry.path().string();
    if (!entry.is_regular_file()) continue;
    const std::string bytes = testing_support::ReadFileOrEmpty(path);
    if (const size_t at = bytes.find(needle); at != std::string::npos) {
      places.push_back({.path = path, .offset = at});
    }
  }
  return places;
}

bool FlipInFile(const FilePlace& place, unsigned bit) {
  const int fd = open(place.path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return false;
  uint8_t byte = 0;
  const auto at = static_cast<off_t>(place.offset);
  bool done = pread(fd, &byte, 1, at) == 1;
  byte ^= static_cast<uint8_t>(1u << bit);
  done = done && pwrite(fd, &byte, 1, at) == 1;
  close(fd);
  return done;
}

absl::StatusOr<size_t> FlipInMemory(pid_t pid, const std::string& needle, size_t offset,
                                    unsigned bit) {
  const int fd = open(absl::StrCat("/proc/", pid, "/mem").c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return absl::PermissionDeniedError(Errno("opening another process's memory"));
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  size_t places = 0;
  absl::Status status;
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0;
    uint64_t end = 0;
    char dash = 0;
    std::string rights;
    std::istringstream fields(line);
    fields >> std::hex >> begin >> dash >> end >> rights;
    if (rights.compare(0, 2, "rw") != 0 || end - begin > kRegionBytesMax) continue;
    std::string bytes(end - begin, '\0');
    const ssize_t got = pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(begin));
    if (got <= 0) continue;
    for (size_t at = bytes.find(needle); at != std::string::npos; at = bytes.find(needle, at + 1)) {
      const uint8_t byte =
          static_cast<uint8_t>(bytes[at + offset]) ^ static_cast<uint8_t>(1u << bit);
      const bool done = pwrite(fd, &byte, 1, static_cast<off_t>(begin + at + offset)) == 1;
      if (!done) status = absl::PermissionDeniedError(Errno("writing another process's memory"));
      places += done ? 1 : 0;
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return places;
}

std::string OwnMounts() {
  if (unshare(CLONE_NEWNS) != 0) return Errno("unshare(CLONE_NEWNS)");
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return Errno("making mounts private");
  }
  return "";
}

std::string MountSmallDisk(const std::string& path, uint64_t bytes) {
  std::filesystem::create_directories(path);
  const std::string options = absl::StrCat("size=", bytes);
  if (mount("okv_faults", path.c_str(), "tmpfs", 0, options.c_str()) == 0) return "";
  return Errno("mounting a tmpfs");
}

std::string ResizeDisk(const std::string& path, uint64_t bytes) {
  const std::string options = absl::StrCat("size=", bytes);
  if (mount("okv_faults", path.c_str(), "tmpfs", MS_REMOUNT, options.c_str()) == 0) return "";
  return Errno("resizing a tmpfs");
}

ImmutableDirectories::~ImmutableDirectories() {
  for (const std::string& path : paths_) SetImmutable(path, false);
}

std::string ImmutableDirectories::Add(const std::string& path) {
  if (!SetImmutable(path, true)) return Errno("making a directory immutable");
  paths_.push_back(path);
  return "";
}

std::unique_ptr<OwnLink> OwnLink::Create(std::string* why_not) {
  const int outer = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
  if (outer < 0) {
    *why_not = Errno("opening the network namespace");
    return nullptr;
  }
  if (unshare(CLONE_NEWNET) != 0) {
    *why_not = Errno("unshare(CLONE_NEWNET)");
    close(outer);
    return nullptr;
  }
  std::unique_ptr<OwnLink> link(new OwnLink(outer));
  link->Set(true);
  return link;
}

OwnLink::~OwnLink() {
  setns(outer_, CLONE_NEWNET);
  close(outer_);
}

void OwnLink::Set(bool up) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request = {};
  std::strcpy(request.ifr_name, "lo");
  ioctl(fd, SIOCGIFFLAGS, &request);
  request.ifr_flags =
      static_cast<short>(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
  ioctl(fd, SIOCSIFFLAGS, &request);
  close(fd);
}

}  // namespace okv::faults
