#ifndef OKV_CACHE_NODE_FORMATS_H_
#define OKV_CACHE_NODE_FORMATS_H_

#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/format.h"
#include "proto/mutex.h"
#include "proto/page_layout.h"

namespace okv {

inline constexpr size_t kFormatsMax = 4096;

// The formats this node has objects or sessions of, by id. Formats are never forgotten: a restart
// needs them to read what is on disk. Thread-safe.
class Formats {
 public:
  // `save` makes a new format durable no later than the objects that need it.
  explicit Formats(std::function<absl::Status(const Format&)> save) : save_(std::move(save)) {}

  // Remembers `format`, which stays at the address returned. kResourceExhausted when there are
  // kFormatsMax; else the error of `save`. REQUIRES: format.Validate() is OK.
  absl::StatusOr<const Format*> Add(const Format& format) ABSL_LOCKS_EXCLUDED(mu_);
  // As found on disk at start.
  void AddStored(const Format& format) ABSL_LOCKS_EXCLUDED(mu_);
  // Null when it was never seen.
  const Format* Find(const FormatId& id) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const std::function<absl::Status(const Format&)> save_;

  mutable Mutex mu_;
  absl::flat_hash_map<FormatId, std::unique_ptr<const Format>> formats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_FORMATS_H_
