#ifndef OKV_CACHE_NODE_USE_LIST_H_
#define OKV_CACHE_NODE_USE_LIST_H_

#include "proto/check.h"

namespace okv {

// An owner's place in one list: a base of the owner, 16 B, one for each list it can be in. Not
// copyable: its neighbours point at it.
template <typename Tag>
struct ListHook {
  ListHook() = default;
  ListHook(const ListHook&) = delete;
  ListHook& operator=(const ListHook&) = delete;

  ListHook* previous = nullptr;
  ListHook* next = nullptr;  // Null: in no list.
};

// A list of what it does not own. Nothing is allocated, and an owner leaves in O(1) without anybody
// knowing the list. Thread-compatible.
template <typename Owner, typename Tag>
class HookedList {
 public:
  using Hook = ListHook<Tag>;
  HookedList() { head_.previous = head_.next = &head_; }
  HookedList(const HookedList&) = delete;
  HookedList& operator=(const HookedList&) = delete;

  bool empty() const { return head_.next == &head_; }
  // REQUIRES: it is in no list of this tag.
  void PushBack(Owner* owner) { Insert(owner, &head_); }
  // REQUIRES: it is in no list of this tag.
  void PushFront(Owner* owner) { Insert(owner, head_.next); }
  // Nothing happens to an owner that is in no list.
  static void Remove(Owner* owner) {
    Hook* hook = owner;
    if (hook->next == nullptr) return;
    hook->previous->next = hook->next;
    hook->next->previous = hook->previous;
    hook->previous = hook->next = nullptr;
  }
  void MoveToBack(Owner* owner) {
    Remove(owner);
    PushBack(owner);
  }

  // Front to back. The one it stands on may not leave meanwhile.
  class Iterator {
   public:
    explicit Iterator(Hook* hook) : hook_(hook) {}
    Owner* operator*() const { return static_cast<Owner*>(hook_); }
    Iterator& operator++() {
      hook_ = hook_->next;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return hook_ != other.hook_; }

   private:
    Hook* hook_;
  };
  Iterator begin() const { return Iterator(head_.next); }
  Iterator end() const { return Iterator(&head_); }

 private:
  void Insert(Owner* owner, Hook* next) {
    Hook* hook = owner;
    OKV_CHECK(hook->next == nullptr);
    hook->previous = next->previous;
    hook->next = next;
    hook->previous->next = hook;
    next->previous = hook;
  }

  mutable Hook head_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_USE_LIST_H_
