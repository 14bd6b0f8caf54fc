#ifndef OKV_CACHE_NODE_TENANT_BUDGETS_H_
#define OKV_CACHE_NODE_TENANT_BUDGETS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// Payload bytes that a tenant may hold on a node before its objects are the first to go. No quota:
// within a node that has room it may hold more. A plain value.
struct TenantBudgets {
  std::map<std::string, uint64_t, std::less<>> bytes;  // By tenant.
  uint64_t default_bytes = UINT64_MAX;                 // Of who is not named.

  uint64_t Of(absl::string_view tenant) const {
    const auto found = bytes.find(tenant);
    return found == bytes.end() ? default_bytes : found->second;
  }
  // Reads "tenant=bytes,tenant=bytes"; "*" names the default. kInvalidArgument naming the part that
  // cannot be read, or the tenant that is named twice.
  static absl::StatusOr<TenantBudgets> Parse(absl::string_view text);
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TENANT_BUDGETS_H_
