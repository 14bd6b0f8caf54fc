#ifndef OKV_CACHE_NODE_BLOCK_TABLE_H_
#define OKV_CACHE_NODE_BLOCK_TABLE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache_node/payload.h"
#include "cache_node/tenant_budgets.h"
#include "cache_node/tiers/dram_tier.h"
#include "cache_node/tiers/hbm_tier.h"
#include "cache_node/tiers/tier.h"
#include "cache_node/use_list.h"
#include "proto/ids.h"
#include "proto/mutex.h"

namespace okv {

class BlockTable;

namespace internal {
// What one tenant holds.
struct TenantUse {
  uint64_t payload_bytes = 0;
  uint64_t budget_bytes = 0;
  bool over() const { return payload_bytes > budget_bytes; }
};
struct InHbm {};
struct InDram {};
struct OnDisk {};
struct InGroup {};
// One object of the table: in up to four of its lists. Guarded by the table's mutex; `object`
// never changes.
struct TableEntry : ListHook<InHbm>, ListHook<InDram>, ListHook<OnDisk>, ListHook<InGroup> {
  ObjectRef object;
  absl::Span<const uint8_t> hbm;   // Empty: not in HBM.
  absl::Span<const uint8_t> dram;  // Empty: not in DRAM.
  DiskPlace place;                 // Unknown: not on disk.
  TenantUse* tenant = nullptr;
  uint64_t used = 0;    // The table's count of uses at the last one.
  uint64_t loaded = 0;  // The table's count of loaded bytes at the last load; 0: none.
  uint64_t missed = 0;  // The same of uses that HBM could not serve.
  uint32_t pins = 0;
  bool clean_in_hbm = false;   // As counted: in HBM, and elsewhere too.
  bool clean_in_dram = false;  // In DRAM, and on disk too.
  bool doomed = false;         // Nobody may pin it any more.
  bool released = false;       // Doomed, and its disk copy is gone: the last unpin forgets it.
};
}  // namespace internal

// A hold on an object: while it lives, its copies in HBM and DRAM, if any, stay where they are.
// Move-only.
// Thread-compatible; outlived by the table.
class ObjectPin {
 public:
  ObjectPin() = default;
  ObjectPin(ObjectPin&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)), entry_(other.entry_) {}
  ObjectPin& operator=(ObjectPin&& other) noexcept {
    if (this != &other) {
      Release();
      table_ = std::exchange(other.table_, nullptr);
      entry_ = other.entry_;
    }
    return *this;
  }
  ~ObjectPin() { Release(); }

  bool held() const { return table_ != nullptr; }
  // REQUIRES: held().
  const HeldObject& object() const { return *entry_->object; }
  ObjectRef object_ref() const { return entry_->object; }
  const ObjectId& id() const { return entry_->object->header.id; }
  // The payload where it is in DRAM, empty when it is not. Never changes once it is there.
  absl::Span<const uint8_t> dram() const;
  // The same in HBM.
  Payload hbm() const;
  // Where it is fastest: in HBM, else in DRAM, else empty.
  Payload memory() const;
  bool on_disk() const { return place().known(); }
  // Where its disk copy is; it moves when the disk tier makes room.
  DiskPlace place() const;
  void Release();

 private:
  friend class BlockTable;
  ObjectPin(BlockTable* table, internal::TableEntry* entry) : table_(table), entry_(entry) {}

  BlockTable* table_ = nullptr;
  internal::TableEntry* entry_ = nullptr;
};

// The right to write one object: nobody else gets it meanwhile. Given up unless committed.
// Move-only.
class WriteClaim {
 public:
  WriteClaim() = default;
  WriteClaim(WriteClaim&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)),
        id_(other.id_),
        parent_(other.parent_),
        parent_is_here_(other.parent_is_here_) {}
  WriteClaim& operator=(WriteClaim&& other) noexcept {
    if (this != &other) {
      Release();
      table_ = std::exchange(other.table_, nullptr);
      id_ = other.id_;
      parent_ = other.parent_;
      parent_is_here_ = other.parent_is_here_;
    }
    return *this;
  }
  ~WriteClaim() { Release(); }
  const ObjectId& id() const { return id_; }
  // It has no parent, or that was here, or being written, when the claim was made: it is no block
  // behind one that the node refused.
  bool parent_is_here() const { return parent_is_here_; }

 private:
  friend class BlockTable;
  WriteClaim(BlockTable* table, const ObjectId& id, const std::optional<BlockKey>& parent,
             bool parent_is_here)
      : table_(table), id_(id), parent_(parent), parent_is_here_(parent_is_here) {}
  void Release();

  BlockTable* table_ = nullptr;
  ObjectId id_;
  std::optional<BlockKey> parent_;
  bool parent_is_here_ = false;
};

// Everything counted once per object, whatever its copies.
struct TableStats {
  struct PerCodec {
    uint64_t stored_bytes = 0;   // Payload.
    uint64_t logical_bytes = 0;  // The same tokens in BF16.
    uint64_t hbm_objects = 0;
    uint64_t dram_objects = 0;
    uint64_t disk_objects = 0;
  };
  std::array<PerCodec, 2> codecs;  // In the order of kCodecs.
  uint64_t objects_count = 0;
  uint64_t pins_count = 0;
  uint64_t claims_count = 0;
};

// An object that could leave the node.
struct ColdObject {
  ObjectId id;
  DiskPlace place;  // Unknown: only in memory.
  bool in_memory = false;
  bool over_budget = false;  // Its tenant's turn, not its own.
  uint64_t payload_bytes = 0;
};

// What this node holds, and where. The only authority: metrics, inventory and the control plane's
// index follow it. An object leaves HBM only when it is in DRAM or on disk, DRAM only when it is on
// disk, and neither while somebody pins it. Thread-safe; `dram` and `hbm` (null: there is none)
// outlive it. Lock order: the disk's, the table's, another tier's, its pool's.
class BlockTable {
 public:
  explicit BlockTable(DramTier* dram, const TenantBudgets& budgets = {}, HbmTier* hbm = nullptr)
      : dram_(dram), hbm_(hbm), budgets_(budgets) {}
  ~BlockTable();
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // kAlreadyExists when the object is held; kAborted when another write of it is under way, or an
  // old copy is still leaving. While it is claimed it is a child of its parent.
  absl::StatusOr<WriteClaim> Claim(const ObjectId& id, const std::optional<BlockKey>& parent)
      ABSL_LOCKS_EXCLUDED(mu_);
  // The claimed object is held from now on, its payload in `extent`, of HBM or DRAM.
  void Commit(WriteClaim claim, ObjectRef object, Extent extent) ABSL_LOCKS_EXCLUDED(mu_);
  struct Adopted {
    ObjectRef object;
    DiskPlace place;
  };
  // These objects are on disk, as found there at start: those spilled first count as used first.
  // Those that the table knows are left out. Returns how many were not.
  size_t AdoptFromDisk(std::vector<Adopted> adopted) ABSL_LOCKS_EXCLUDED(mu_);

  // kNotFound when it is not held. Counts as a use.
  absl::StatusOr<ObjectPin> Pin(const ObjectId& id) ABSL_LOCKS_EXCLUDED(mu_);
  // Another hold on the same object. Not a use.
  ObjectPin PinAgain(const ObjectPin& pin) ABSL_LOCKS_EXCLUDED(mu_);
  // A copy from disk came up, or one from HBM down: it becomes the DRAM copy unless another got
  // there first.
  void AttachDram(const ObjectPin& pin, Extent extent) ABSL_LOCKS_EXCLUDED(mu_);
  // The same in HBM, from DRAM.
  void AttachHbm(const ObjectPin& pin, Extent extent) ABSL_LOCKS_EXCLUDED(mu_);

  enum class Where { kAnywhere, kOnDiskToo, kOnlyInDram };
  struct ColdestQuery {
    uint64_t bytes = 0;      // Until this much is found,
    size_t objects_max = 0;  // or this many.
    Where where = Where::kAnywhere;
  };
  // Pins the least recently used objects in DRAM that nobody pins, those of tenants over their
  // budget first. Not a use.
  std::vector<ObjectPin> PinColdest(const ColdestQuery& query) ABSL_LOCKS_EXCLUDED(mu_);
  enum class InHbm { kAnywhere, kElsewhereToo, kOnlyInHbm };
  struct HbmQuery {
    uint64_t bytes = 0;      // Until this much is found,
    size_t objects_max = 0;  // or this many.
    InHbm where = InHbm::kAnywhere;
  };
  // PinColdest of HBM.
  std::vector<ObjectPin> PinColdestInHbm(const HbmQuery& query) ABSL_LOCKS_EXCLUDED(mu_);
  // HBM could not serve a use of the object. True when it was so before, and no more than
  // `window_bytes` of payload were missed since.
  bool NoteHbmMiss(const ObjectPin& pin, uint64_t window_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // The object is about to be read from disk. True when it was before, and no more than
  // `window_bytes` of payload were read since.
  bool NoteLoad(const ObjectPin& pin, uint64_t window_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // A durable copy is on disk, at a place that may be new. REQUIRES: place.known().
  void MarkOnDisk(const ObjectPin& pin, const DiskPlace& place) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives the pin back and, if the object is on disk and no other pin is left, its DRAM copy.
  // Returns the payload bytes that left DRAM.
  uint64_t UnpinAndEvict(ObjectPin pin) ABSL_LOCKS_EXCLUDED(mu_);
  // The same of its HBM copy, if it is in DRAM or on disk.
  uint64_t UnpinAndEvictHbm(ObjectPin pin) ABSL_LOCKS_EXCLUDED(mu_);

  struct ColdQuery {
    uint64_t bytes = 0;      // Until this much is found.
    bool in_memory = false;  // What DRAM and HBM hold, and what of the disk goes with it.
  };
  // The least recently used objects that nobody pins and, unless `in_memory`, only the disk holds:
  // what may leave the node, with those of tenants over their budget first, as far as these are.
  // Never a block before its children here, written or being written: children come first, and one
  // whose child is not among them is left out.
  // O(what is looked at), under the table's lock.
  std::vector<ColdObject> Cold(const ColdQuery& query) ABSL_LOCKS_EXCLUDED(mu_);
  // Dooms those of `cold` of which that still holds, in order, and pins them. As after Doom, the
  // caller removes the disk copies, then calls Forget.
  std::vector<ObjectPin> DoomCold(absl::Span<const ColdObject> cold) ABSL_LOCKS_EXCLUDED(mu_);
  // Some object's disk copy is in this group.
  bool HasGroup(uint32_t group) const ABSL_LOCKS_EXCLUDED(mu_);
  // Pins every object of a group that is not doomed. Not a use.
  std::vector<ObjectPin> PinGroup(uint32_t group) ABSL_LOCKS_EXCLUDED(mu_);

  // The object is damaged: from now on it is not found. False when it was doomed before. The caller
  // removes the disk copy, then calls Forget: it goes when the last pin does.
  bool Doom(const ObjectPin& pin) ABSL_LOCKS_EXCLUDED(mu_);
  void Forget(ObjectPin pin) ABSL_LOCKS_EXCLUDED(mu_);
  struct Doomed {
    ObjectPin pin;
    DiskPlace place;  // As it was before; unknown: only in memory.
  };
  // Takes back what DoomCold did, instead of Forget: these disk copies could not be removed. The
  // first to leave are the first again, in their order of use.
  void Undoom(std::vector<Doomed> doomed) ABSL_LOCKS_EXCLUDED(mu_);

  // Every object held. A snapshot.
  std::vector<ObjectRef> Objects() const ABSL_LOCKS_EXCLUDED(mu_);
  TableStats stats() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  friend class ObjectPin;
  friend class WriteClaim;
  using Entry = internal::TableEntry;

  using HbmList = HookedList<Entry, internal::InHbm>;
  using DramList = HookedList<Entry, internal::InDram>;
  using DiskList = HookedList<Entry, internal::OnDisk>;
  using GroupList = HookedList<Entry, internal::InGroup>;

  absl::Span<const uint8_t> Dram(const Entry* entry) const ABSL_LOCKS_EXCLUDED(mu_);
  Payload Hbm(const Entry* entry) const ABSL_LOCKS_EXCLUDED(mu_);
  DiskPlace Place(const Entry* entry) const ABSL_LOCKS_EXCLUDED(mu_);
  void Unpin(Entry* entry) ABSL_LOCKS_EXCLUDED(mu_);
  void Unclaim(const WriteClaim& claim) ABSL_LOCKS_EXCLUDED(mu_);

  void UnpinLocked(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PinColdestLocked(const ColdestQuery& query, bool over_only, uint64_t* bytes,
                        std::vector<ObjectPin>* pins) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  ObjectPin PinLocked(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DoomLocked(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetHbm(Entry* entry, Extent extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropHbm(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetDram(Entry* entry, Extent extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropDram(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetPlace(Entry* entry, const DiskPlace& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LeaveGroup(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropPlace(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After every change of where the entry is.
  void CountClean(Entry* entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static bool InMemory(const Entry& entry) { return !entry.dram.empty() || !entry.hbm.empty(); }
  static bool MayLeave(const Entry& entry, bool in_memory) {
    return entry.pins == 0 && !entry.doomed && (in_memory || !InMemory(entry));
  }
  bool IsHere(const BlockKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint32_t ChildrenCount(const BlockKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  TableStats::PerCodec& CodecStats(const Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountChild(const std::optional<BlockKey>& parent, bool add)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Adds or takes away what the object counts as.
  void Count(const Entry& entry, bool add) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  internal::TenantUse* TenantOf(const HeldObject& object) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AnyTenantOver() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  DramTier* const dram_;
  HbmTier* const hbm_;
  const TenantBudgets budgets_;

  mutable Mutex mu_;
  absl::flat_hash_map<ObjectId, std::unique_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<ObjectId> claims_ ABSL_GUARDED_BY(mu_);
  // Everybody who holds something, or did: as many as there are tenants.
  absl::flat_hash_map<std::string, std::unique_ptr<internal::TenantUse>> tenants_
      ABSL_GUARDED_BY(mu_);
  uint64_t uses_count_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t loaded_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t missed_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // In HBM; in DRAM; on disk: the coldest first.
  HbmList in_hbm_ ABSL_GUARDED_BY(mu_);
  DramList in_dram_ ABSL_GUARDED_BY(mu_);
  DiskList on_disk_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint32_t, std::unique_ptr<GroupList>> groups_ ABSL_GUARDED_BY(mu_);
  // By the parent's key, of which the first 8 bytes do: a collision only makes a block stay longer.
  absl::flat_hash_map<uint64_t, uint32_t> children_ ABSL_GUARDED_BY(mu_);
  TableStats stats_ ABSL_GUARDED_BY(mu_);
  // What could leave HBM, or DRAM, at once. Mostly 0: spilled copies go right away.
  uint64_t clean_in_hbm_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t clean_in_dram_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_BLOCK_TABLE_H_
