#ifndef OKV_CACHE_NODE_TIERS_TIER_H_
#define OKV_CACHE_NODE_TIERS_TIER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/object.h"
#include "proto/page_layout.h"

namespace okv {

// What a node knows of an object besides its payload. A plain value.
struct HeldObject {
  ObjectHeader header;
  std::string tenant;
  PageLayout layout;

  // What a BF16 cache would hold for the same tokens.
  uint64_t logical_bytes() const { return uint64_t{layout.elements_count()} * 2; }
};
// Shared: the table, a tier and transfers in flight each keep it for as long as they need it.
using ObjectRef = std::shared_ptr<const HeldObject>;

struct TierWrite {
  ObjectRef object;
  absl::Span<const uint8_t> payload;
};

// Where a payload is on disk: a group is what was spilled together, in one file.
struct DiskPlace {
  uint32_t group = 0;  // 0: nowhere.
  uint32_t page = 0;   // Of 4,096 bytes, in the group's file.

  bool known() const { return group != 0; }
  bool operator==(const DiskPlace&) const = default;
};

// What a tier lists: the layout follows from the format.
struct TierRecord {
  ObjectHeader header;
  std::string tenant;
  DiskPlace place;  // Of the disk tier only.
};

struct TierStats {
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;      // CostBytes of what is held.
  uint64_t occupied_bytes = 0;  // What the medium is short of: with what is not reclaimed yet.
  uint64_t objects_count = 0;
  uint64_t free_bytes = 0;   // Of the disk's file system; 0 for other tiers.
  uint64_t floor_bytes = 0;  // What the disk tier leaves of it to others.
};

// A place for payloads. One suite of tests runs on every implementation. Thread-safe.
class Tier {
 public:
  virtual ~Tier() = default;

  virtual absl::string_view name() const = 0;  // "hbm", "dram", "disk".

  // Bytes of the limit that an object takes.
  virtual uint64_t CostBytes(const HeldObject& object) const = 0;
  // Stores a group, all or nothing; payloads are in host memory. kResourceExhausted when it does
  // not fit; kAlreadyExists when one of it is there.
  virtual absl::Status Put(absl::Span<const TierWrite> group) = 0;
  // Returns when everything that was Put is as durable as this tier makes it: only then may a copy
  // above it go. Blocks.
  virtual absl::Status Flush() = 0;
  // Reads a payload into `buffer`, which is host memory. kNotFound when it is not here; kDataLoss
  // when what is here is damaged or not buffer.size() long. A caller still verifies the checksums.
  // May block on the disk.
  virtual absl::Status Read(const ObjectId& id, absl::Span<uint8_t> buffer) = 0;
  // OK also when it is not here.
  virtual absl::Status Remove(const ObjectId& id) = 0;
  // Every object, in any order, without reading payloads. kDataLoss records are left out and
  // counted by the return of `corrupt`, once each; empty: ignored.
  struct Listing {
    std::function<void(TierRecord record)> object;
    std::function<void(const absl::Status& why)> corrupt;
  };
  virtual absl::Status List(const Listing& listing) = 0;
  virtual TierStats stats() const = 0;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_TIER_H_
