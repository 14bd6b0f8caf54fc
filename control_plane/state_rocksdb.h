#ifndef OKV_CONTROL_PLANE_STATE_ROCKSDB_H_
#define OKV_CONTROL_PLANE_STATE_ROCKSDB_H_

#include <memory>
#include <string>

#include "control_plane/state.h"

namespace okv {

// The embedded default: RocksDB in `directory`, created if need be. kUnavailable naming the
// directory when it cannot be written, or when another process has it.
absl::StatusOr<std::unique_ptr<State>> OpenRocksdbState(const std::string& directory);

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_STATE_ROCKSDB_H_
