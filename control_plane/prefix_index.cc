#include "control_plane/prefix_index.h"

#include <algorithm>
#include <cstring>

#include "proto/check.h"

namespace okv {
namespace {

// Keys whose hash table lines are fetched ahead of their turn: a lookup is a row of cache misses.
constexpr size_t kKeysAhead = 8;

}  // namespace

PrefixIndex::PrefixIndex() {
  tables_.reserve(kTables);
  for (size_t i = 0; i < kTables; ++i) {
    tables_.emplace_back(0, BlockHash{this}, BlockEqual{this});
  }
}

size_t PrefixIndex::HashOf(const BlockKey& key) {
  uint64_t word;  // A key is uniform: eight bytes of it are a hash.
  std::memcpy(&word, key.bytes.data(), sizeof(word));
  return word;
}

HolderSlot PrefixIndex::AddHolder(NodeSlot node) {
  HolderSlot slot(static_cast<uint32_t>(holders_.size()));
  if (free_holders_.empty()) {
    holders_.emplace_back();
  } else {
    slot = free_holders_.back();
    free_holders_.pop_back();
  }
  holders_[slot.value()] = Holder{.node = node};
  return slot;
}

void PrefixIndex::Show(HolderSlot holder) { holders_[holder.value()].shown = true; }

void PrefixIndex::Drop(HolderSlot holder) {
  holders_[holder.value()].shown = false;
  dropped_.push_back(holder);
}

bool PrefixIndex::Collect(size_t objects_max) {
  size_t left = objects_max;
  while (!dropped_.empty()) {
    const HolderSlot slot = dropped_.front();
    Holder& holder = holders_[slot.value()];
    for (; holder.holdings != kNone; --left) {
      if (left == 0) return true;
      Unlink(holder.holdings);
    }
    free_holders_.push_back(slot);
    dropped_.pop_front();
  }
  return false;
}

void PrefixIndex::Add(HolderSlot slot, const IndexedObject& object) {
  uint32_t block = FindBlock(object.scope, object.id.key);
  if (block == kNone) {
    block = blocks_.Allocate();
    blocks_[block] = {.key = object.id.key, .scope = object.scope};
    TableOf(object.id.key).insert(block);
  } else if (FindHolding(block, object.id.codec, slot) != kNone) {
    return;
  }
  if (!HasCodec(block, object.id.codec)) ++objects_count_;
  Holder& holder = holders_[slot.value()];
  const uint32_t added = holdings_.Allocate();
  holdings_[added] = {.payload_bytes = object.payload_bytes,
                      .block = block,
                      .next_of_block = blocks_[block].holdings,
                      .next_of_holder = holder.holdings,
                      .holder = slot,
                      .codec = object.id.codec};
  if (holder.holdings != kNone) holdings_[holder.holdings].previous_of_holder = added;
  holder.holdings = added;
  blocks_[block].holdings = added;
  ++holder.objects_count;
  holder.objects_bytes += object.payload_bytes;
}

void PrefixIndex::Remove(HolderSlot holder, const ObjectId& id) {
  const Table& table = TableOf(id.key);
  const auto found = table.find(HeldKey{.key = id.key, .codec = id.codec, .holder = holder});
  if (found != table.end()) Unlink(FindHolding(*found, id.codec, holder));
}

void PrefixIndex::Unlink(uint32_t name) {
  const Holding holding = holdings_[name];
  Holder& holder = holders_[holding.holder.value()];
  if (holding.previous_of_holder == kNone) {
    OKV_CHECK(holder.holdings == name);
    holder.holdings = holding.next_of_holder;
  } else {
    holdings_[holding.previous_of_holder].next_of_holder = holding.next_of_holder;
  }
  if (holding.next_of_holder != kNone) {
    holdings_[holding.next_of_holder].previous_of_holder = holding.previous_of_holder;
  }
  --holder.objects_count;
  holder.objects_bytes -= holding.payload_bytes;

  Block& block = blocks_[holding.block];
  uint32_t* link = &block.holdings;
  while (*link != name) link = &holdings_[*link].next_of_block;
  *link = holding.next_of_block;
  holdings_.Release(name);
  if (!HasCodec(holding.block, holding.codec)) --objects_count_;
  if (block.holdings != kNone) return;
  Table& table = TableOf(block.key);
  const auto found = table.find(ScopedKey{.key = block.key, .scope = block.scope});
  OKV_CHECK(found != table.end());
  table.erase(found);
  blocks_.Release(holding.block);
}

uint32_t PrefixIndex::FindBlock(ScopeId scope, const BlockKey& key) const {
  const Table& table = TableOf(key);
  const auto found = table.find(ScopedKey{.key = key, .scope = scope});
  return found == table.end() ? kNone : *found;
}

uint32_t PrefixIndex::FindHolding(uint32_t block, Codec codec, HolderSlot holder) const {
  for (uint32_t at = blocks_[block].holdings; at != kNone; at = holdings_[at].next_of_block) {
    if (holdings_[at].holder == holder && holdings_[at].codec == codec) return at;
  }
  return kNone;
}

bool PrefixIndex::HasCodec(uint32_t block, Codec codec) const {
  for (uint32_t at = blocks_[block].holdings; at != kNone; at = holdings_[at].next_of_block) {
    if (holdings_[at].codec == codec) return true;
  }
  return false;
}

PrefixIndex::Nodes PrefixIndex::Find(ScopeId scope, const ObjectId& id) const {
  Nodes nodes;
  const uint32_t block = FindBlock(scope, id.key);
  if (block == kNone) return nodes;
  for (uint32_t at = blocks_[block].holdings; at != kNone; at = holdings_[at].next_of_block) {
    const Holder& holder = holders_[holdings_[at].holder.value()];
    if (holder.shown && holdings_[at].codec == id.codec) nodes.push_back(holder.node);
  }
  return nodes;
}

PrefixIndex::Held PrefixIndex::Locate(uint32_t block, uint32_t place,
                                      std::vector<ObjectLocation>* locations) const {
  Held held;
  if (block == kNone) return held;
  for (uint32_t at = blocks_[block].holdings; at != kNone;) {
    const Holding& holding = holdings_[at];
    at = holding.next_of_block;
    const Holder& holder = holders_[holding.holder.value()];
    if (!holder.shown) continue;
    (holding.codec == Codec::kInt2 ? held.int2 : held.bf16) = true;
    locations->push_back({.block = place, .codec = holding.codec, .node = holder.node});
  }
  return held;
}

PrefixMatch PrefixIndex::Match(ScopeId scope, absl::Span<const BlockKey> keys,
                               const PrefixWindows& windows) const {
  const uint32_t count = static_cast<uint32_t>(keys.size());
  const uint32_t sink = windows.sink_blocks;
  const uint64_t recent = windows.recent_blocks;
  PrefixMatch match;
  uint64_t int2_end = sink;  // int2 of blocks sink..int2_end-1 is held, without a hole.
  bool int2_open = true;
  uint64_t bf16_run = 0;  // bf16 of the last bf16_run blocks before the boundary is held.
  for (uint32_t block = 0; block < count; ++block) {
    if (block + kKeysAhead < count) {
      const BlockKey& ahead = keys[block + kKeysAhead];
      TableOf(ahead).prefetch(ScopedKey{.key = ahead, .scope = scope});
    }
    const Held held = Locate(FindBlock(scope, keys[block]), block, &match.locations);
    if (block < sink) {
      if (!held.bf16) break;
      match.prefix_blocks = block + 1;
    } else {
      int2_open = int2_open && held.int2;
      if (int2_open) {
        int2_end = block + 1;
        match.prefix_blocks = block + 1;
      }
      bf16_run = held.bf16 ? bf16_run + 1 : 0;
    }
    const uint64_t boundary = uint64_t{block} + 1;
    const uint64_t tail = boundary > sink ? std::min(recent, boundary - sink) : 0;
    if (bf16_run >= tail && int2_end + recent >= boundary) match.resume_boundary = block + 1;
    if (!int2_open && boundary >= int2_end + recent) break;  // No later boundary can hold.
  }
  const uint32_t blocks = std::max(match.prefix_blocks, match.resume_boundary);
  while (!match.locations.empty() && match.locations.back().block >= blocks) {
    match.locations.pop_back();
  }
  return match;
}

size_t PrefixIndex::holder_objects_count(HolderSlot holder) const {
  return holders_[holder.value()].objects_count;
}

uint64_t PrefixIndex::holder_objects_bytes(HolderSlot holder) const {
  return holders_[holder.value()].objects_bytes;
}

size_t PrefixIndex::memory_bytes() const {
  size_t bytes = blocks_.memory_bytes() + holdings_.memory_bytes();
  // A slot is its name and one control byte.
  for (const Table& table : tables_) bytes += table.capacity() * (sizeof(uint32_t) + 1);
  return bytes;
}

}  // namespace okv
