#ifndef OKV_CACHE_NODE_TIERS_ARENA_TIER_H_
#define OKV_CACHE_NODE_TIERS_ARENA_TIER_H_

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cache_node/block_pool.h"
#include "cache_node/tiers/tier.h"
#include "proto/mutex.h"

namespace okv {

// Payloads in an arena, from where they are sent and into which they are received: nothing copies
// them. Thread-safe. `pool` outlives it.
class ArenaTier : public Tier {
 public:
  // `name`: a literal.
  ArenaTier(absl::string_view name, BlockPool* pool) : name_(name), pool_(pool) {}

  absl::string_view name() const override { return name_; }
  uint64_t CostBytes(const HeldObject& object) const override;
  absl::Status Put(absl::Span<const TierWrite> group) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Flush() override { return absl::OkStatus(); }
  absl::Status Read(const ObjectId& id, absl::Span<uint8_t> buffer) override
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Remove(const ObjectId& id) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status List(const Listing& listing) override ABSL_LOCKS_EXCLUDED(mu_);
  TierStats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

  // Memory for a payload that is on its way. Errors are BlockPool::Allocate's.
  absl::StatusOr<Extent> Allocate(size_t bytes) { return pool_->Allocate(bytes); }
  // Keeps `extent`, which holds the object's payload. The span stays valid until Remove.
  // REQUIRES: the object is not here.
  absl::Span<const uint8_t> Adopt(ObjectRef object, Extent extent) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Held {
    ObjectRef object;
    Extent extent;
  };

  absl::Status Copy(absl::Span<const MemoryCopy> copies);

  const absl::string_view name_;
  BlockPool* const pool_;

  mutable Mutex mu_;
  absl::flat_hash_map<ObjectId, Held> objects_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_ARENA_TIER_H_
