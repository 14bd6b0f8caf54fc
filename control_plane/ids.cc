#include "control_plane/ids.h"

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::string_view kMarkKey = "ids_end";
// One durable write (about a millisecond) for a million ids.
constexpr uint64_t kLease = 1'000'000;

}  // namespace

absl::StatusOr<std::unique_ptr<IdAllocator>> IdAllocator::Open(State* state) {
  uint64_t end = 0;
  const absl::StatusOr<std::string> stored = state->Get(kMarkKey);
  if (!stored.ok() && !absl::IsNotFound(stored.status())) return stored.status();
  if (stored.ok() && !absl::SimpleAtoi(*stored, &end)) {
    return absl::DataLossError(absl::StrCat("state: '", kMarkKey, "' is not a number"));
  }
  return absl::WrapUnique(new IdAllocator(state, end));
}

absl::StatusOr<uint64_t> IdAllocator::Next() {
  MutexLock lock(&mu_);
  if (last_ == end_) {
    OKV_RETURN_IF_ERROR(state_->Put(kMarkKey, absl::StrCat(end_ + kLease)));
    end_ += kLease;
  }
  return ++last_;
}

}  // namespace okv
