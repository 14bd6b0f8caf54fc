#ifndef OKV_CONTROL_PLANE_IDS_H_
#define OKV_CONTROL_PLANE_IDS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "control_plane/state.h"
#include "proto/mutex.h"

namespace okv {

// Gives out numbers that never come twice, not even after a restart: write ids and node epochs. The
// durable mark moves a million ahead before the first of them is used; a restart loses what is left
// of that million. Thread-safe.
class IdAllocator {
 public:
  // Starts behind the mark in `state`, which outlives it. kDataLoss when the mark is not a number.
  static absl::StatusOr<std::unique_ptr<IdAllocator>> Open(State* state);

  // Never 0. kUnavailable when the mark cannot be written; blocks for that once in a million calls.
  absl::StatusOr<uint64_t> Next() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  IdAllocator(State* state, uint64_t end) : state_(state), last_(end), end_(end) {}

  State* const state_;  // Constant after construction.

  Mutex mu_;
  uint64_t last_ ABSL_GUARDED_BY(mu_);  // Given out.
  uint64_t end_ ABSL_GUARDED_BY(mu_);   // The durable mark.
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_IDS_H_
