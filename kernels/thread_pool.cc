#include "kernels/thread_pool.h"

#include "proto/check.h"

namespace okv {

ThreadPool::ThreadPool(size_t threads_count) {
  OKV_CHECK(threads_count >= 1);
  for (size_t i = 1; i < threads_count; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  work_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::ParallelFor(size_t tasks_count, const std::function<void(size_t)>& task) {
  if (tasks_count == 0) return;
  if (threads_.empty() || tasks_count == 1) {
    for (size_t i = 0; i < tasks_count; ++i) task(i);
    return;
  }
  {
    MutexLock lock(&mu_);
    OKV_CHECK(task_ == nullptr);
    task_ = &task;
    tasks_count_ = tasks_count;
    next_ = 0;
  }
  work_.SignalAll();
  Drain();
  MutexLock lock(&mu_);
  while (running_ > 0) done_.Wait(&mu_);
  task_ = nullptr;
}

void ThreadPool::Drain() {
  while (true) {
    const std::function<void(size_t)>* task;
    size_t index;
    {
      MutexLock lock(&mu_);
      if (task_ == nullptr || next_ >= tasks_count_) return;
      task = task_;
      index = next_++;
      ++running_;
    }
    (*task)(index);
    MutexLock lock(&mu_);
    if (--running_ == 0 && next_ >= tasks_count_) done_.SignalAll();
  }
}

void ThreadPool::Run() {
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!stopping_ && (task_ == nullptr || next_ >= tasks_count_)) work_.Wait(&mu_);
      if (stopping_) return;
    }
    Drain();
  }
}

}  // namespace okv
