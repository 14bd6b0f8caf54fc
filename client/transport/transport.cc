#include "client/transport/transport.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace okv {

bool UcxTransportOptions::uses_shared_memory() const {
  if (tls.empty()) return true;
  const bool excludes = tls.front() == '^';  // The list says what not to use.
  bool posix = excludes;
  bool sysv = excludes;
  for (const absl::string_view name : absl::StrSplit(absl::StripPrefix(tls, "^"), ',')) {
    const bool both = name == "all" || name == "sm" || name == "shm" || name == "mm";
    if (both || name == "posix") posix = !excludes;
    if (both || name == "sysv") sysv = !excludes;
  }
  return posix || sysv;
}

absl::Status CheckSharedMemory(const UcxTransportOptions& options) {
  if (!options.uses_shared_memory()) return absl::OkStatus();
  struct statvfs info;
  if (statvfs(options.shm_path.c_str(), &info) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("shared memory at ", options.shm_path, ": ", strerror(errno)));
  }
  const uint64_t free_bytes = uint64_t{info.f_bavail} * info.f_frsize;
  if (free_bytes >= options.shm_bytes_min) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      options.shm_path, " is too small: ", free_bytes,
      " bytes are free, the shared-memory transport ", "needs ", options.shm_bytes_min,
      ": enlarge it (containers: --shm-size), or choose transports ", "without (tcp,self)"));
}

absl::Status CheckNetworkDevices(const UcxTransportOptions& options) {
  if (access(options.net_path.c_str(), R_OK | X_OK) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("network devices at ", options.net_path, ": ", strerror(errno),
                   ": UCX finds them there (in a container or chroot: mount sysfs)"));
}

absl::Status UcxTransportOptions::Validate() const {
  if (absl::StrContains(tls, ' ')) {
    return absl::InvalidArgumentError(absl::StrCat("tls '", tls, "': a list without spaces"));
  }
  if (require_rdma && net_devices == "lo") {
    return absl::InvalidArgumentError(
        "require_rdma: net_devices is the loopback device, which is not an RDMA device");
  }
  if (require_gpudirect && device == nullptr) {
    return absl::InvalidArgumentError(
        "require_gpudirect: there is no device whose memory could be reached");
  }
  if (device_staging_bytes > 0 && device_staging_bytes < DeviceStaging::kBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("device_staging_bytes ", device_staging_bytes,
                                                   " is less than ", DeviceStaging::kBytesMin));
  }
  if (shm_path.empty()) return absl::InvalidArgumentError("shm_path is empty");
  return absl::OkStatus();
}

}  // namespace okv
