#ifndef OKV_CONTROL_PLANE_FAIR_MUTEX_H_
#define OKV_CONTROL_PLANE_FAIR_MUTEX_H_

#include "absl/base/thread_annotations.h"
#include "proto/mutex.h"

namespace okv {

// A mutex that a thread which locks it over and over cannot keep from the others. A plain mutex
// goes to whoever asks first, and the thread that has just given it up asks before a waiter has
// woken up: with a plain one a lookup waited for whole inventories. Here the first waiter holds the
// place of the next owner, and the thread that gave the mutex up queues behind it. Thread-safe.
class ABSL_LOCKABLE FairMutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    MutexLock lock(&next_);
    mu_.Lock();
  }
  void Unlock() ABSL_UNLOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Unlock(); }

 private:
  Mutex next_;  // Held by the one thread that waits for mu_.
  Mutex mu_;
};

// Holds a FairMutex for a scope.
class ABSL_SCOPED_LOCKABLE FairMutexLock {
 public:
  explicit FairMutexLock(FairMutex* mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_->Lock(); }
  ~FairMutexLock() ABSL_UNLOCK_FUNCTION() { mu_->Unlock(); }
  FairMutexLock(const FairMutexLock&) = delete;
  FairMutexLock& operator=(const FairMutexLock&) = delete;

 private:
  FairMutex* const mu_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_FAIR_MUTEX_H_
