#ifndef OKV_CONTROL_PLANE_RESERVATIONS_H_
#define OKV_CONTROL_PLANE_RESERVATIONS_H_

#include <compare>
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

// What is reserved: an object of one tenant and format. Without the scope a tenant that knows
// another's key could keep it from being written.
struct ScopedObject {
  ScopeId scope;
  ObjectId id;

  auto operator<=>(const ScopedObject&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const ScopedObject& object) {
    return H::combine(std::move(h), object.scope, object.id);
  }
};

// One promise of room for one object: an open reservation.
struct PendingWrite {
  std::string write_group;
  WriteId write_id;
  NodeSlot node;
  uint64_t payload_bytes = 0;
  int64_t expires_nanos = 0;  // Clock::NowNanos()
};

// Open reservations: a writer that dies gives its room back when they expire. Thread-compatible:
// Control guards it.
class Reservations {
 public:
  // The object's reservation that is open at `now_nanos`; null when it has none.
  const PendingWrite* Find(const ScopedObject& object, int64_t now_nanos) const;
  // REQUIRES: the object has none, not even an expired one (Take it first).
  void Add(const ScopedObject& object, const PendingWrite& reservation);
  // Moves the end of an open reservation. REQUIRES: it has one; a later end.
  void Extend(const ScopedObject& object, int64_t expires_nanos);
  // Takes the object's reservation away, expired or not; false when there is none.
  bool Take(const ScopedObject& object, PendingWrite* taken);
  // Takes those that expired by `now_nanos` away.
  std::vector<PendingWrite> Expire(int64_t now_nanos);

  size_t size() const { return open_.size(); }

 private:
  struct Deadline {
    int64_t expires_nanos;
    ScopedObject object;
  };

  absl::flat_hash_map<ScopedObject, PendingWrite> open_;
  // In order of time: every reservation lives equally long from its last Add or Extend. One that
  // was taken or extended since leaves its deadline behind.
  std::deque<Deadline> deadlines_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_RESERVATIONS_H_
