#include "control_plane/reservations.h"

#include "proto/check.h"

namespace okv {

const PendingWrite* Reservations::Find(const ScopedObject& object, int64_t now_nanos) const {
  const auto found = open_.find(object);
  if (found == open_.end() || found->second.expires_nanos <= now_nanos) return nullptr;
  return &found->second;
}

void Reservations::Add(const ScopedObject& object, const PendingWrite& reservation) {
  OKV_CHECK(open_.emplace(object, reservation).second);
  deadlines_.push_back({.expires_nanos = reservation.expires_nanos, .object = object});
}

void Reservations::Extend(const ScopedObject& object, int64_t expires_nanos) {
  PendingWrite& reservation = open_.at(object);
  if (reservation.expires_nanos >= expires_nanos) return;
  reservation.expires_nanos = expires_nanos;
  deadlines_.push_back({.expires_nanos = expires_nanos, .object = object});
}

bool Reservations::Take(const ScopedObject& object, PendingWrite* taken) {
  const auto found = open_.find(object);
  if (found == open_.end()) return false;
  *taken = std::move(found->second);
  open_.erase(found);
  return true;
}

std::vector<PendingWrite> Reservations::Expire(int64_t now_nanos) {
  std::vector<PendingWrite> expired;
  while (!deadlines_.empty() && deadlines_.front().expires_nanos <= now_nanos) {
    const auto found = open_.find(deadlines_.front().object);
    deadlines_.pop_front();
    // Committed, extended, or reserved anew since.
    if (found == open_.end() || found->second.expires_nanos > now_nanos) continue;
    expired.push_back(std::move(found->second));
    open_.erase(found);
  }
  return expired;
}

}  // namespace okv
