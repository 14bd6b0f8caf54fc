#ifndef OKV_CLIENT_CALL_BOARD_H_
#define OKV_CLIENT_CALL_BOARD_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/mutex.h"
#include "proto/object.h"

namespace okv {

// Where the transport's thread leaves the results of a call's targets for the caller's thread,
// which waits for them. The caller outwaits every target, so that the board may live on its stack.
// Thread-safe.
class CallBoard {
 public:
  struct Result {
    size_t group = 0;  // Which session's.
    size_t item = 0;
    absl::Status status;
    std::optional<ObjectHeader> header;  // Of a fetched object.
  };

  void Post(Result result) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    results_.push_back(std::move(result));
    if (results_.size() == 1) changed_.SignalAll();  // Whoever wakes takes all.
  }

  // Everything posted since the last call, waiting until there is something or `until` has passed.
  std::vector<Result> Take(absl::Time until) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (results_.empty()) {
      const absl::Duration left = std::min(until - absl::Now(), absl::Seconds(1));
      if (left <= absl::ZeroDuration()) break;
      changed_.WaitFor(&mu_, absl::ToChronoNanoseconds(left));
    }
    return std::exchange(results_, {});
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<Result> results_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CLIENT_CALL_BOARD_H_
