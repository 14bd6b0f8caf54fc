#ifndef OKV_PROTO_CHECK_H_
#define OKV_PROTO_CHECK_H_

#include <cstdio>
#include <cstdlib>

namespace okv::internal {
[[noreturn]] inline void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "%s:%d: OKV_CHECK failed: %s\n", file, line, condition);
  std::abort();
}
}  // namespace okv::internal

// Aborts when a broken invariant shows, in release builds too: bytes that are wrong are worse than
// a process that is gone.
#define OKV_CHECK(condition) \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0) \
       : ::okv::internal::CheckFailed(__FILE__, __LINE__, #condition))

#endif  // OKV_PROTO_CHECK_H_
