#ifndef OKV_KERNELS_THREAD_POOL_H_
#define OKV_KERNELS_THREAD_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "proto/mutex.h"

namespace okv {

// A fixed set of threads for data-parallel loops. The caller works too, so ThreadPool(1) starts no
// thread. Thread-compatible: one ParallelFor at a time.
class ThreadPool {
 public:
  // REQUIRES: threads_count >= 1.
  explicit ThreadPool(size_t threads_count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  size_t threads_count() const { return threads_.size() + 1; }

  // Calls task(i) for every i in [0, tasks_count), in any order on any thread, and returns when all
  // are done. Tasks are handed out one by one, so uneven ones balance.
  void ParallelFor(size_t tasks_count, const std::function<void(size_t)>& task);

 private:
  void Run();
  void Drain() ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar work_;
  CondVar done_;
  const std::function<void(size_t)>* task_ ABSL_GUARDED_BY(mu_) = nullptr;
  size_t tasks_count_ ABSL_GUARDED_BY(mu_) = 0;
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;
  size_t running_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // Constant after construction.
};

}  // namespace okv

#endif  // OKV_KERNELS_THREAD_POOL_H_
