#ifndef OKV_CACHE_NODE_TIERS_DRAM_TIER_H_
#define OKV_CACHE_NODE_TIERS_DRAM_TIER_H_

#include "cache_node/tiers/arena_tier.h"

namespace okv {

// Payloads in the machine's memory.
class DramTier final : public ArenaTier {
 public:
  explicit DramTier(BlockPool* pool) : ArenaTier("dram", pool) {}
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_DRAM_TIER_H_
