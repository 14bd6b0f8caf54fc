#ifndef OKV_CONTROL_PLANE_ROTATION_REGISTRY_H_
#define OKV_CONTROL_PLANE_ROTATION_REGISTRY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control_plane/state.h"
#include "proto/clock.h"
#include "proto/format.h"
#include "proto/mutex.h"
#include "proto/rotation_set.h"

namespace okv {

// What an operator sees of a rotation set.
struct RotationInfo {
  RotationHash hash;
  std::string model;
  std::string weights_revision;
  std::string method;
  uint32_t layers_count = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t group_size = 0;
  uint64_t file_bytes = 0;
  int64_t published_wall_us = 0;
};

// Published rotation sets and the formats that use them: durable, validated when they come in. Only
// summaries stay in memory (a set is up to 63 MiB). Thread-safe.
class RotationRegistry {
 public:
  static constexpr size_t kFormatsMax = 4096;

  // Reads what `state` holds; it outlives the registry. kDataLoss naming a set that no longer
  // parses.
  static absl::StatusOr<std::unique_ptr<RotationRegistry>> Open(State* state, const Clock* clock);

  struct Published {
    RotationHash hash;
    bool already_known;
  };
  // Takes a safetensors file. One with the rotations of a published set but a promise of its own
  // takes that one's place: the last calibration's promise stands, so that drift is told from it.
  // Without a promise the file that is there stays. Errors are RotationSet::Parse's, and
  // kUnavailable when the state cannot be written: nothing is published then.
  absl::StatusOr<Published> Publish(const std::string& file) ABSL_LOCKS_EXCLUDED(mu_);

  // The file of a published set. kNotFound.
  absl::StatusOr<std::string> Get(const RotationHash& hash) const;

  // Those of `model`, or all when it is empty.
  std::vector<RotationInfo> List(const std::string& model) const;

  // Takes a format (canonical bytes) into use and gives its name. kInvalidArgument: Format::Parse.
  // kFailedPrecondition: its rotation set is not published ("rotation_hash"), or is for another
  // geometry; the message names the field. kResourceExhausted: kFormatsMax others are in use.
  absl::StatusOr<FormatId> RegisterFormat(const std::string& canonical) ABSL_LOCKS_EXCLUDED(mu_);
  // The format, which lives as long as the registry. kFailedPrecondition when no session was opened
  // with it: the caller opens one.
  absl::StatusOr<const Format*> FindFormat(const FormatId& id) const ABSL_LOCKS_EXCLUDED(mu_);

  size_t rotations_count() const;
  size_t formats_count() const;

 private:
  RotationRegistry(State* state, const Clock* clock) : state_(state), clock_(clock) {}
  absl::Status Load();

  // Constant after construction.
  State* const state_;
  const Clock* const clock_;

  mutable Mutex mu_;
  absl::flat_hash_map<RotationHash, RotationInfo> rotations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<FormatId, std::unique_ptr<const Format>> formats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_ROTATION_REGISTRY_H_
