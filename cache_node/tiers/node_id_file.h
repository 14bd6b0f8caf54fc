#ifndef OKV_CACHE_NODE_TIERS_NODE_ID_FILE_H_
#define OKV_CACHE_NODE_TIERS_NODE_ID_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace okv {

// The node's id a second time, outside the index: NODE_ID in the data directory, a text of three
// lines, the last of which is the SHA-256 of the two before it. A node whose index is built anew
// stays the node that it was.

// The id; empty when there is no such file, or it is damaged.
std::string ReadNodeIdFile(const std::string& data_dir);

// Writes it, durably, unless it is there already. kResourceExhausted when the disk is full,
// kUnavailable when it fails.
absl::Status WriteNodeIdFile(const std::string& data_dir, absl::string_view node_id);

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_NODE_ID_FILE_H_
