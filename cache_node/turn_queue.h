#ifndef OKV_CACHE_NODE_TURN_QUEUE_H_
#define OKV_CACHE_NODE_TURN_QUEUE_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace okv {

// What sessions wait for, handed out in turn: one of each session's, in its order, then one of the
// next session's. However much one of them queues, another waits behind one of its items at most.
// Thread-compatible.
template <typename T>
class TurnQueue {
 public:
  void Add(uint64_t session_id, T item) {
    std::deque<T>& items = by_session_[session_id];
    if (items.empty()) turns_.push_back(session_id);
    items.push_back(std::move(item));
  }

  // The next item and whose it is; nothing when nobody waits.
  std::optional<std::pair<uint64_t, T>> Next() {
    while (!turns_.empty()) {
      const uint64_t session_id = turns_.front();
      turns_.pop_front();
      const auto found = by_session_.find(session_id);
      if (found == by_session_.end()) continue;  // Dropped since.
      T item = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) {
        by_session_.erase(found);
      } else {
        turns_.push_back(session_id);
      }
      return std::make_pair(session_id, std::move(item));
    }
    return std::nullopt;
  }

  // Takes away what a session waits for. Its id may not be used again.
  std::deque<T> Drop(uint64_t session_id) {
    const auto found = by_session_.find(session_id);
    if (found == by_session_.end()) return {};
    std::deque<T> items = std::move(found->second);
    by_session_.erase(found);
    return items;
  }

 private:
  absl::flat_hash_map<uint64_t, std::deque<T>> by_session_;  // None of them empty.
  std::deque<uint64_t> turns_;  // One a session that waits, and of some that were dropped.
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TURN_QUEUE_H_
