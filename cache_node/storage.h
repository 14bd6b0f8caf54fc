#ifndef OKV_CACHE_NODE_STORAGE_H_
#define OKV_CACHE_NODE_STORAGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_node/block_pool.h"
#include "cache_node/block_table.h"
#include "cache_node/formats.h"
#include "cache_node/hbm_mover.h"
#include "cache_node/node_metrics.h"
#include "cache_node/spill.h"
#include "cache_node/tiers/dram_tier.h"
#include "cache_node/tiers/hbm_tier.h"
#include "cache_node/tiers/rocksdb_tier.h"
#include "proto/clock.h"

namespace okv {

struct StorageOptions {
  BlockPoolOptions pool;
  RocksdbTierOptions disk;
  SpillerOptions spill;
  BlockPoolOptions hbm_pool;  // 0 bytes: no HBM tier; otherwise it has a device.
  HbmMoverOptions hbm;
  TenantBudgets tenant_budgets;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// What a node holds: the tiers, the table over them, and what moves objects between them. Owns them
// in the order in which they need each other. Thread-safe as its parts are.
class Storage {
 public:
  struct Parts {
    NodeMetrics* metrics;
    const Clock* clock;
    std::function<void(const ObjectId& id, const absl::Status& why)> on_removed;
    // A promotion found a damaged copy, perhaps one of several: every copy is to be looked at.
    std::function<void(const std::string& tenant, const ObjectId& id)> on_damaged = {};
    std::function<void(const std::string& line)> log;
  };
  // Opens the directory, takes over every object it holds (reading the index only), maps and
  // prefaults the arenas: blocks for seconds. Errors are BlockPool::Create's and
  // RocksdbTier::Open's.
  static absl::StatusOr<std::unique_ptr<Storage>> Open(const StorageOptions& options,
                                                       const Parts& parts);
  ~Storage();

  // No more memory is given out, and the spill thread ends. When nothing is put any more, and
  // before the transport goes.
  void StopSpilling();
  // Copies to disk what only DRAM or HBM holds, for at most timeout_nanos, and says what was left.
  // After StopSpilling, when nothing changes any more.
  void SpillRest(int64_t timeout_nanos);

  BlockPool* pool() { return pool_.get(); }
  BlockTable* table() { return table_.get(); }
  Spiller* spiller() { return spiller_.get(); }
  Formats* formats() { return formats_.get(); }
  RocksdbTier* disk() { return disk_.get(); }
  DramTier* dram() { return dram_.get(); }
  // Null without an HBM tier.
  HbmTier* hbm() { return hbm_.get(); }
  HbmMover* hbm_mover() { return hbm_mover_.get(); }
  BlockPool* hbm_pool() { return hbm_pool_.get(); }
  const std::string& node_id() const { return disk_->node_id(); }
  // From the fastest down.
  std::vector<const Tier*> tiers() const;

 private:
  explicit Storage(const Parts& parts) : parts_(parts) {}
  absl::Status AdoptDisk();
  // Formats that these need and the disk's index does not have, from the groups' tables.
  absl::Status RecoverFormats(const std::vector<TierRecord>& strangers);
  absl::Status OpenHbm(const StorageOptions& options);
  // As the table wants it; null when the record fits no format known here.
  ObjectRef Held(TierRecord* record) const;

  const Parts parts_;
  std::unique_ptr<RocksdbTier> disk_;
  std::unique_ptr<Formats> formats_;
  std::unique_ptr<BlockPool> pool_;
  DeviceMemory* locking_device_ = nullptr;  // Of the pool's memory, if there is one.
  std::unique_ptr<DramTier> dram_;
  std::unique_ptr<BlockPool> hbm_pool_;
  std::unique_ptr<HbmTier> hbm_;
  std::unique_ptr<BlockTable> table_;
  std::unique_ptr<Spiller> spiller_;
  std::unique_ptr<HbmMover> hbm_mover_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_STORAGE_H_
