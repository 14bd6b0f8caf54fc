#ifndef OKV_CACHE_NODE_WORK_QUEUE_H_
#define OKV_CACHE_NODE_WORK_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "proto/mutex.h"

namespace okv {

// A few threads for what blocks on the disk, so that the transport's thread never does.
// Thread-safe.
class WorkQueue {
 public:
  explicit WorkQueue(uint32_t threads_count) {
    for (uint32_t i = 0; i < threads_count; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~WorkQueue() { Stop(); }

  // Runs `work` soon, in order of arrival; drops it after Stop. The callers bound what they queue.
  void Add(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    if (stopping_) return;
    queue_.push_back(std::move(work));
    added_.Signal();
  }

  // Drops what has not begun and waits for what has.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_) {
    std::deque<std::function<void()>> dropped;  // Destroyed without the lock.
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      dropped.swap(queue_);
      added_.SignalAll();
    }
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_) {
    while (true) {
      std::function<void()> work;
      {
        MutexLock lock(&mu_);
        while (queue_.empty() && !stopping_) added_.Wait(&mu_);
        if (stopping_) return;
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
    }
  }

  Mutex mu_;
  CondVar added_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // Constant after construction.
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_WORK_QUEUE_H_
