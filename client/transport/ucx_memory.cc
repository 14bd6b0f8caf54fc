#include "client/transport/ucx_memory.h"

#include <iterator>

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
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  memories_[begin] = {.end = begin + memory.size(), .kind = kind, .handle = handle};
  has_device_memory_ |= kind == MemoryKind::kDevice;
  return absl::OkStatus();
}

void Memories::UnregisterAll(ucp_context_h context) {
  for (const auto& [begin, memory] : memories_) ucp_mem_unmap(context, memory.handle);
  memories_.clear();
}

void Memories::Describe(const void* buffer, ucp_request_param_t* param) const {
  if (!has_device_memory_) return;
  param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param->memory_type = UCS_MEMORY_TYPE_HOST;
  const auto address = reinterpret_cast<uintptr_t>(buffer);
  const auto after = memories_.upper_bound(address);
  if (after == memories_.begin()) return;
  const Memory& memory = std::prev(after)->second;
  if (address >= memory.end || memory.kind != MemoryKind::kDevice) return;
  param->op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
  param->memory_type = UCS_MEMORY_TYPE_CUDA;
  param->memh = memory.handle;
}

}  // namespace okv::ucx
