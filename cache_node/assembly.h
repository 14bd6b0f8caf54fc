#ifndef OKV_CACHE_NODE_ASSEMBLY_H_
#define OKV_CACHE_NODE_ASSEMBLY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache_node/block_pool.h"
#include "cache_node/block_table.h"
#include "proto/block_range.h"
#include "proto/object.h"

namespace okv {

// What one writer offers of a block: the whole, or the runs of its heads. A plain value.
struct Share {
  ObjectHeader header;  // Of the block, but with the checksums of these runs only, in their order.
  std::string tenant;
  PageLayout layout;
  BlockRange range;
};

// One block being put together in one extent, from the shares of a write group: a tensor-parallel
// rank writes its heads, and a writer without ranks has one share, the whole. Made by Assemblies;
// shared with the transfers into the extent, which may end after it was given up.
class Assembly {
 public:
  const ObjectId& id() const { return header_.id; }
  WriteId write_id() const { return WriteId(header_.generation); }

  size_t block_bytes() const { return header_.payload_bytes; }
  // Committed or given up.
  bool ended() const { return ended_; }

  // The data plane's: the extent comes some time after the first share; who waits for it; and who
  // has brought a share while others are missing.
  struct Offer {
    uint64_t session_id;
    uint64_t serial;
  };
  struct Waiter {
    uint64_t session_id;
    uint64_t request_id;
  };
  Extent extent;
  std::vector<Offer> wait_for_room;
  std::vector<Waiter> wait_for_others;

  // Checks a share's bytes by the checksums of its writer where they are stored: in the extent
  // already, or, when `staged` is not empty, copied there from it, the range's own bytes. kDataLoss
  // naming the first bad run; kUnavailable when the extent's device fails. Any thread; the share is
  // joined and not yet completed.
  absl::Status Store(const Share& share, absl::Span<const uint8_t> staged) const;

  // See WriteClaim.
  bool parent_is_here() const { return claim_.parent_is_here(); }

 private:
  friend class Assemblies;
  struct Part {
    BlockRange range;
    bool complete = false;
  };

  absl::Status StoreOnDevice(const Share& share, absl::Span<const uint8_t> staged) const;
  uint32_t& Checksum(uint32_t layer, uint32_t head);
  std::vector<uint32_t> ChecksumsOf(const BlockRange& range) const;

  ObjectHeader header_;  // The checksums of what is complete are filled in.
  std::string tenant_;
  PageLayout layout_;
  WriteClaim claim_;
  std::vector<Part> parts_;  // They do not overlap.
  size_t runs_complete_ = 0;
  int64_t deadline_nanos_ = 0;
  bool ended_ = false;
};
using AssemblyRef = std::shared_ptr<Assembly>;

// Every block that is on its way in. Owned by the data plane's transport thread; outlived by the
// table.
class Assemblies {
 public:
  // A block whose shares are not complete `nanos_max` after the first one came is given up, once no
  // transfer into it is left.
  Assemblies(BlockTable* table, int64_t nanos_max) : table_(table), nanos_max_(nanos_max) {}

  // Makes the share a part of its block. kAlreadyExists when the object is held; kAborted when this
  // very share is being received, another write id is at the object, or the block's time is up;
  // kInvalidArgument naming what differs when a share overlaps another one or describes another
  // object than the others of its write id.
  struct Joined {
    AssemblyRef assembly;
    bool is_first = false;  // The caller finds an extent.
    // This very share is here already: its writer lost the connection before it was told.
    bool is_here = false;
  };
  absl::StatusOr<Joined> Join(const Share& share, int64_t now_nanos);
  // The share's bytes will not come, or are bad: its place is free again. Gives the block up when
  // it was the only share.
  void Withdraw(const AssemblyRef& assembly, const BlockRange& range);
  // The share is stored. When it was the last one, the block is held from now on: returns it.
  // Otherwise null.
  ObjectRef Complete(const AssemblyRef& assembly, const Share& share);
  // Nothing comes of it: its claim and, with the last transfer, its extent go.
  void Abandon(const AssemblyRef& assembly);

  // Gives up the blocks whose time is up; those that wait get the reason.
  struct Expired {
    AssemblyRef assembly;
    absl::Status why;  // kAborted.
  };
  std::vector<Expired> Expire(int64_t now_nanos);

  size_t size() const { return open_.size(); }

 private:
  // Whether the share is here already, or else why it may not become a part.
  absl::StatusOr<bool> IsHere(const Assembly& assembly, const Share& share,
                              int64_t now_nanos) const;

  BlockTable* const table_;
  const int64_t nanos_max_;
  absl::flat_hash_map<ObjectId, AssemblyRef> open_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_ASSEMBLY_H_
