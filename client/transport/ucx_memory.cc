#include "client/transport/ucx_memory.h"

#include <optional>

#include "absl/strings/str_cat.h"

namespace okv::ucx {

absl::Status Memories::Register(ucp_context_h context, absl::Span<uint8_t> memory,
                                MemoryKind kind) {
  ucp_mem_map_params_t params = {};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = memory.data();
  params.length = memory.size();
  if (kind == MemoryKind::kDevice) {
    params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = UCS_MEMORY_TYPE_CUDA;
  }
  ucp_mem_h handle;
  // UCX's registration cache finds it again by address; the handle keeps it there.
  const ucs_status_t status = ucp_mem_map(context, &params, &handle);
  if (status != UCS_OK) {
    return absl::UnavailableError(absl::StrCat("cannot register ", memory.size(), " bytes of ",
                                               kind == MemoryKind::kDevice ? "a device's" : "host",
                                               " memory: ", ucs_status_string(status)));
  }
  handles_.push_back(handle);
  if (kind == MemoryKind::kDevice) {
    device_regions_.Add(memory, handle);
    has_device_memory_ = true;
  }
  return absl::OkStatus();
}

void Memories::UnregisterAll(ucp_context_h context) {
  for (const ucp_mem_h handle : handles_) ucp_mem_unmap(context, handle);
  handles_.clear();
}

void Memories::Describe(absl::Span<const uint8_t> buffer, ucp_request_param_t* param) const {
  if (!has_device_memory_) return;
  param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param->memory_type = UCS_MEMORY_TYPE_HOST;
  const std::optional<ucp_mem_h> handle = device_regions_.Find(buffer);
  if (!handle.has_value()) return;
  param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  param->memory_type = UCS_MEMORY_TYPE_CUDA;
  param->memh = *handle;
}

}  // namespace okv::ucx
