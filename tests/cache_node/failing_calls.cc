// The dynamic linker prefers a program's own definition of a name to a library's: what is defined
// here stands before the C library's calls, in RocksDB too.

#include "tests/cache_node/failing_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <mutex>
#include <utility>

#include "proto/check.h"

namespace okv::testing_support {
namespace {

std::atomic<bool> installed{false};

std::mutex& HookMutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

FailingCalls::ErrnoOf& Hook() {
  static FailingCalls::ErrnoOf& hook = *new FailingCalls::ErrnoOf;
  return hook;
}

std::string PathOf(int fd) {
  char path[512];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t bytes = readlink(link.c_str(), path, sizeof(path));
  return bytes > 0 ? std::string(path, static_cast<size_t>(bytes)) : "";
}

std::string PathAt(int directory_fd, const char* name) {
  const bool relative = directory_fd != AT_FDCWD && name[0] != '/';
  return relative ? PathOf(directory_fd) + "/" + name : name;
}

// True: the call is to fail, and errno says how.
template <typename PathFunction>
bool Fails(FileCall call, const PathFunction& path) {
  if (!installed) return false;
  const int errno_before = errno;
  const std::string name = path();
  std::lock_guard lock(HookMutex());
  const int error = Hook() ? Hook()(call, name) : 0;
  errno = error != 0 ? error : errno_before;
  return error != 0;
}

bool FailsOn(FileCall call, int fd) {
  return Fails(call, [fd] { return PathOf(fd); });
}

bool FailsToOpen(int directory_fd, const char* name, int flags) {
  if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) == 0) return false;
  return Fails(FileCall::kOpenToWrite, [&] { return PathAt(directory_fd, name); });
}

// The C library's own.
template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

mode_t ModeOf(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

FailingCalls::FailingCalls(ErrnoOf errno_of) {
  std::lock_guard lock(HookMutex());
  OKV_CHECK(!Hook());
  Hook() = std::move(errno_of);
  installed = true;
}

FailingCalls::~FailingCalls() {
  std::lock_guard lock(HookMutex());
  installed = false;
  Hook() = nullptr;
}

}  // namespace okv::testing_support

using okv::testing_support::FailsOn;
using okv::testing_support::FailsToOpen;
using okv::testing_support::FileCall;
using okv::testing_support::ModeOf;
using okv::testing_support::Next;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  static auto* const next = Next<int(const char*, int, ...)>("open");
  return FailsToOpen(AT_FDCWD, path, flags) ? -1 : next(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  static auto* const next = Next<int(const char*, int, ...)>("open64");
  return FailsToOpen(AT_FDCWD, path, flags) ? -1 : next(path, flags, mode);
}

int openat(int directory_fd, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  static auto* const next = Next<int(int, const char*, int, ...)>("openat");
  return FailsToOpen(directory_fd, path, flags) ? -1 : next(directory_fd, path, flags, mode);
}

ssize_t preadv(int fd, const iovec* parts, int count, off_t offset) {
  static auto* const next = Next<ssize_t(int, const iovec*, int, off_t)>("preadv");
  return FailsOn(FileCall::kRead, fd) ? -1 : next(fd, parts, count, offset);
}

ssize_t write(int fd, const void* bytes, size_t count) {
  static auto* const next = Next<ssize_t(int, const void*, size_t)>("write");
  return FailsOn(FileCall::kWrite, fd) ? -1 : next(fd, bytes, count);
}

int fsync(int fd) {
  static auto* const next = Next<int(int)>("fsync");
  return FailsOn(FileCall::kSync, fd) ? -1 : next(fd);
}

int fdatasync(int fd) {
  static auto* const next = Next<int(int)>("fdatasync");
  return FailsOn(FileCall::kSync, fd) ? -1 : next(fd);
}

int unlinkat(int directory_fd, const char* path, int flags) noexcept {
  static auto* const next = Next<int(int, const char*, int)>("unlinkat");
  const auto fails = [&] {
    return okv::testing_support::Fails(
        FileCall::kDelete, [&] { return okv::testing_support::PathAt(directory_fd, path); });
  };
  return fails() ? -1 : next(directory_fd, path, flags);
}

dirent* readdir(DIR* directory) {
  static auto* const next = Next<dirent*(DIR*)>("readdir");
  return FailsOn(FileCall::kList, dirfd(directory)) ? nullptr : next(directory);
}

int fstatvfs(int fd, struct statvfs* status) noexcept {
  static auto* const next = Next<int(int, struct statvfs*)>("fstatvfs");
  return FailsOn(FileCall::kFreeSpace, fd) ? -1 : next(fd, status);
}

}  // extern "C"
