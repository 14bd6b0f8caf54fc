#ifndef OKV_CONTROL_PLANE_PREFIX_INDEX_H_
#define OKV_CONTROL_PLANE_PREFIX_INDEX_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "control_plane/record_pool.h"
#include "proto/ids.h"

namespace okv {

// A node's place in NodeTable; never reused while the process lives.
using NodeSlot = StrongInt<struct NodeSlotTag, uint32_t>;
// One list of what a node holds, as one registration or inventory of it said.
using HolderSlot = StrongInt<struct HolderSlotTag, uint32_t>;
// One (tenant, format): what is recorded under one scope is invisible under any other.
using ScopeId = StrongInt<struct ScopeIdTag, uint32_t>;

struct IndexedObject {
  ScopeId scope;
  ObjectId id;
  uint64_t payload_bytes = 0;
};

struct PrefixWindows {
  uint32_t sink_blocks;    // S
  uint32_t recent_blocks;  // W
};

// Where one object of a chain is.
struct ObjectLocation {
  uint32_t block;  // Place in the chain.
  Codec codec;
  NodeSlot node;
};

struct PrefixMatch {
  uint32_t prefix_blocks = 0;    // Blocks 0..n-1 are held: sink as bf16, the others as int2.
  uint32_t resume_boundary = 0;  // The last exact resume point; 0 = none.
  // Of blocks 0..max(prefix_blocks, resume_boundary)-1, in order of blocks.
  std::vector<ObjectLocation> locations;
};

// Which node holds which object: soft state, rebuilt from what nodes report.
//
// One block costs 40 B, plus 32 B for each codec on each node, plus about 8 B of hash table: 80 B
// for a history block on one node, 176 B for a block in both codecs on two nodes.
//
// A node's list can be dropped at once, whatever its length: lookups pass over it from then on, and
// Collect() takes it apart in steps, so that nobody waits for the loss of a node.
// Thread-compatible: Control guards it with its one mutex; every call but Match is short.
class PrefixIndex {
 public:
  using Nodes = absl::InlinedVector<NodeSlot, 4>;

  PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // A new, empty list of what `node` holds; lookups see it once it is shown.
  HolderSlot AddHolder(NodeSlot node);
  void Show(HolderSlot holder);
  // Lookups no longer see it. The slot is reused after Collect() took the last object. O(1).
  void Drop(HolderSlot holder);
  // Takes up to `objects_max` objects of dropped lists apart; false once nothing is left.
  bool Collect(size_t objects_max);

  // Records that `holder` has the object. Idempotent. REQUIRES: not dropped; the same for Remove.
  void Add(HolderSlot holder, const IndexedObject& object);
  // Forgets it. Idempotent.
  void Remove(HolderSlot holder, const ObjectId& id);

  // Nodes whose shown lists have the object under `scope`.
  Nodes Find(ScopeId scope, const ObjectId& id) const;

  // How far the chain `keys` (block 0 first) is held, and where. O(blocks that match).
  PrefixMatch Match(ScopeId scope, absl::Span<const BlockKey> keys,
                    const PrefixWindows& windows) const;

  // Distinct (key, codec), those of dropped lists included until they are collected.
  size_t objects_count() const { return objects_count_; }
  size_t holder_objects_count(HolderSlot holder) const;
  uint64_t holder_objects_bytes(HolderSlot holder) const;
  size_t memory_bytes() const;

 private:
  static constexpr uint32_t kNone = RecordPool<int>::kNone;

  struct Block {
    BlockKey key;
    ScopeId scope;
    uint32_t holdings = kNone;  // The first.
  };
  // One object on one node: in the list of its block and in that of its holder.
  struct Holding {
    uint64_t payload_bytes = 0;
    uint32_t block = kNone;
    uint32_t next_of_block = kNone;
    uint32_t previous_of_holder = kNone;
    uint32_t next_of_holder = kNone;
    HolderSlot holder;
    Codec codec = Codec::kInt2;
  };
  struct Holder {
    NodeSlot node;
    bool shown = false;
    uint32_t holdings = kNone;  // The first.
    size_t objects_count = 0;
    uint64_t objects_bytes = 0;
  };
  static_assert(sizeof(Block) == 40 && sizeof(Holding) == 32);

  // What a block is looked up by. A key belongs to one scope (it is a hash over the tenant's salt
  // and the format), but it is only a claim: blocks of one key and two scopes are two blocks.
  struct ScopedKey {
    const BlockKey& key;
    ScopeId scope;
  };
  // The block of that key that `holder` has in that codec.
  struct HeldKey {
    const BlockKey& key;
    Codec codec;
    HolderSlot holder;
  };
  struct BlockHash {
    using is_transparent = void;
    const PrefixIndex* index;
    size_t operator()(uint32_t block) const { return HashOf(index->blocks_[block].key); }
    size_t operator()(const ScopedKey& key) const { return HashOf(key.key); }
    size_t operator()(const HeldKey& key) const { return HashOf(key.key); }
  };
  struct BlockEqual {
    using is_transparent = void;
    const PrefixIndex* index;
    bool operator()(uint32_t a, uint32_t b) const { return a == b; }
    bool operator()(uint32_t block, const ScopedKey& key) const {
      const Block& record = index->blocks_[block];
      return record.scope == key.scope && record.key == key.key;
    }
    bool operator()(uint32_t block, const HeldKey& key) const {
      return index->blocks_[block].key == key.key &&
             index->FindHolding(block, key.codec, key.holder) != kNone;
    }
  };
  using Table = absl::flat_hash_set<uint32_t, BlockHash, BlockEqual>;
  // A table that grows stops everybody until it has moved: 256 small ones move 1/256 at a time.
  static constexpr size_t kTables = 256;

  static size_t HashOf(const BlockKey& key);
  Table& TableOf(const BlockKey& key) { return tables_[key.bytes[31]]; }
  const Table& TableOf(const BlockKey& key) const { return tables_[key.bytes[31]]; }
  uint32_t FindBlock(ScopeId scope, const BlockKey& key) const;
  uint32_t FindHolding(uint32_t block, Codec codec, HolderSlot holder) const;
  bool HasCodec(uint32_t block, Codec codec) const;
  // Unlinks a holding from both lists; a block without holdings goes too.
  void Unlink(uint32_t holding);
  struct Held {
    bool int2 = false;
    bool bf16 = false;
  };
  // Appends where block `place` of a chain is, and says in which codecs.
  Held Locate(uint32_t block, uint32_t place, std::vector<ObjectLocation>* locations) const;

  RecordPool<Block> blocks_;
  RecordPool<Holding> holdings_;
  std::vector<Table> tables_;  // By the key's last byte.
  std::vector<Holder> holders_;
  std::vector<HolderSlot> free_holders_;
  std::deque<HolderSlot> dropped_;
  size_t objects_count_ = 0;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_PREFIX_INDEX_H_
