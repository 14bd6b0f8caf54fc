#include "cache_node/tenant_budgets.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace okv {

absl::StatusOr<TenantBudgets> TenantBudgets::Parse(absl::string_view text) {
  TenantBudgets budgets;
  bool has_default = false;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    // A tenant may have a '=' in its name; a number has none.
    const size_t equals = part.rfind('=');
    uint64_t bytes = 0;
    if (equals == absl::string_view::npos || equals == 0 ||
        !absl::SimpleAtoi(part.substr(equals + 1), &bytes)) {
      return absl::InvalidArgumentError(absl::StrCat("'", part, "' is not tenant=bytes"));
    }
    const std::string tenant(part.substr(0, equals));
    const bool is_new = tenant == "*" ? !has_default : budgets.bytes.emplace(tenant, bytes).second;
    if (!is_new) {
      return absl::InvalidArgumentError(absl::StrCat("tenant '", tenant, "' is named twice"));
    }
    if (tenant != "*") continue;
    has_default = true;
    budgets.default_bytes = bytes;
  }
  return budgets;
}

}  // namespace okv
