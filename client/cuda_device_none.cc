#include "absl/strings/str_cat.h"
#include "client/device_memory.h"

namespace okv {

absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenCudaDevice(int device) {
  return absl::FailedPreconditionError(absl::StrCat(
      "cuda:", device, " cannot be used: this program was built without CUDA (OKV_CUDA=OFF)"));
}

}  // namespace okv
