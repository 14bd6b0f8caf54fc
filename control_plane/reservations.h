#ifndef OKV_CONTROL_PLANE_RESERVATIONS_H_
#define OKV_CONTROL_PLANE_RESERVATIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "control_plane/prefix_index.h"
#include "proto/ids.h"

namespace okv {

// One promise of room for one object.
struct PendingWrite {
  std::string write_group;
  WriteId write_id;
  NodeSlot node;
  uint64_t payload_bytes = 0;
  int64_t expires_nanos = 0;  // Clock::NowNanos()
};

// Open reservations: a writer that dies gives its room back when they expire, with no further
// traffic. Thread-compatible: the control plane guards it.
class Reservations {
 public:
  // Null when the object has none.
  const PendingWrite* Find(const ObjectId& id) const;
  // REQUIRES: Find(id) is null.
  void Add(const ObjectId& id, const PendingWrite& reservation);
  // Takes the object's reservation away (it was committed); false when there is none.
  bool Take(const ObjectId& id, PendingWrite* taken);
  // Takes those that expired by `now_nanos` away.
  std::vector<PendingWrite> Expire(int64_t now_nanos);

  size_t size() const { return open_.size(); }

 private:
  struct Deadline {
    int64_t expires_nanos;
    ObjectId id;
    WriteId write_id;
  };

  absl::flat_hash_map<ObjectId, PendingWrite> open_;
  std::deque<Deadline> deadlines_;  // In order of time: every reservation lives equally long.
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_RESERVATIONS_H_
