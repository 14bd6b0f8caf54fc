#ifndef OKV_TESTS_CACHE_NODE_FAILING_CALLS_H_
#define OKV_TESTS_CACHE_NODE_FAILING_CALLS_H_

#include <functional>
#include <string>

namespace okv::testing_support {

// A system call on a file, of this program or of a library in it.
enum class FileCall { kOpenToWrite, kRead, kWrite, kSync, kDelete, kList, kFreeSpace };

// While it lives it decides which of these calls fail: by the file's path (a deleted file's ends in
// " (deleted)") it returns 0, or the errno to fail with. Runs on any thread, one call at a time.
// One such object at a time.
class FailingCalls {
 public:
  using ErrnoOf = std::function<int(FileCall call, const std::string& path)>;
  explicit FailingCalls(ErrnoOf errno_of);
  ~FailingCalls();
  FailingCalls(const FailingCalls&) = delete;
  FailingCalls& operator=(const FailingCalls&) = delete;
};

}  // namespace okv::testing_support

#endif  // OKV_TESTS_CACHE_NODE_FAILING_CALLS_H_
