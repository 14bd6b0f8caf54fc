#include "control_plane/reservations.h"

#include "proto/check.h"

namespace okv {

const PendingWrite* Reservations::Find(const ObjectId& id) const {
  const auto found = open_.find(id);
  return found == open_.end() ? nullptr : &found->second;
}

void Reservations::Add(const ObjectId& id, const PendingWrite& reservation) {
  OKV_CHECK(open_.emplace(id, reservation).second);
  deadlines_.push_back(
      {.expires_nanos = reservation.expires_nanos, .id = id, .write_id = reservation.write_id});
}

bool Reservations::Take(const ObjectId& id, PendingWrite* taken) {
  const auto found = open_.find(id);
  if (found == open_.end()) return false;
  *taken = std::move(found->second);
  open_.erase(found);
  return true;
}

std::vector<PendingWrite> Reservations::Expire(int64_t now_nanos) {
  std::vector<PendingWrite> expired;
  while (!deadlines_.empty() && deadlines_.front().expires_nanos <= now_nanos) {
    const Deadline deadline = deadlines_.front();
    deadlines_.pop_front();
    const auto found = open_.find(deadline.id);
    // Committed since, or reserved anew under another write id.
    if (found == open_.end() || found->second.write_id != deadline.write_id) continue;
    expired.push_back(std::move(found->second));
    open_.erase(found);
  }
  return expired;
}

}  // namespace okv
