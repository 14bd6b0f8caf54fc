#ifndef OKV_CONTROL_PLANE_STATE_H_
#define OKV_CONTROL_PLANE_STATE_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace okv {

// What must survive the control plane: rotation sets, formats, the ticket key, the write ids given
// out. A small ordered map from strings to strings. Thread-safe.
class State {
 public:
  virtual ~State() = default;
  // On disk when it returns. kUnavailable naming the reason when it cannot be written.
  virtual absl::Status Put(absl::string_view key, absl::string_view value) = 0;
  // kNotFound when there is no such key.
  virtual absl::StatusOr<std::string> Get(absl::string_view key) const = 0;
  // Every (key, value) whose key starts with `prefix`, in order.
  virtual absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(
      absl::string_view prefix) const = 0;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_STATE_H_
