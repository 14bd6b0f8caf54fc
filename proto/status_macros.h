#ifndef OKV_PROTO_STATUS_MACROS_H_
#define OKV_PROTO_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define OKV_RETURN_IF_ERROR(expr) \
  do { \
    if (::absl::Status okv_status = (expr); !okv_status.ok()) return okv_status; \
  } while (false)

#define OKV_MACRO_CONCAT_INNER(a, b) a##b
#define OKV_MACRO_CONCAT(a, b) OKV_MACRO_CONCAT_INNER(a, b)

// OKV_ASSIGN_OR_RETURN(auto x, MayFail()): x, or the status out of this function.
#define OKV_ASSIGN_OR_RETURN(lhs, expr) \
  OKV_ASSIGN_OR_RETURN_IMPL(OKV_MACRO_CONCAT(okv_statusor_, __LINE__), lhs, expr)
#define OKV_ASSIGN_OR_RETURN_IMPL(statusor, lhs, expr) \
  auto statusor = (expr); \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = std::move(statusor).value()

#endif  // OKV_PROTO_STATUS_MACROS_H_
