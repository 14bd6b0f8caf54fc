#ifndef OKV_CACHE_NODE_TIERS_HBM_TIER_H_
#define OKV_CACHE_NODE_TIERS_HBM_TIER_H_

#include "cache_node/tiers/arena_tier.h"
#include "proto/check.h"

namespace okv {

// Payloads in a GPU's memory: the pool has a device.
class HbmTier final : public ArenaTier {
 public:
  explicit HbmTier(BlockPool* pool) : ArenaTier("hbm", pool), device_(pool->device()) {
    OKV_CHECK(device_ != nullptr);
  }

  DeviceMemory* device() const { return device_; }

 private:
  DeviceMemory* const device_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_HBM_TIER_H_
