#ifndef OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_
#define OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "cache_node/tiers/tier.h"
#include "proto/format.h"
#include "proto/mutex.h"

namespace rocksdb {
class ColumnFamilyHandle;
class DB;
}  // namespace rocksdb

namespace okv {

struct RocksdbTierOptions {
  std::string data_dir;     // Created when missing; belongs to one node.
  uint64_t disk_bytes = 0;  // Limit on CostBytes of what is stored.
  // The id the directory must have, or gets when it is new. Empty: the directory's, or a random
  // one.
  std::string node_id;

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// Payloads in RocksDB. Column families:
//   index    (key, codec) -> tenant, encoded ObjectHeader   a restart reads only this
//   payload  (key, codec) -> payload                        in blob files: written once, never
//   merged formats  format id -> Format::Canonical() default  "node_id" -> the node's id
// An object's two rows, and the format they need, become durable together: one batch, and an atomic
// flush over all families. No write-ahead log: with it a payload is written twice (measured: 2.0x
// the bytes against 1.0x), and what it would save is still in the tier above until Flush returned.
// Thread-safe.
class RocksdbTier final : public Tier {
 public:
  // kFailedPrecondition naming the directory when it cannot be created or written, is open in
  // another node, or belongs to another node id; kDataLoss when RocksDB finds it damaged.
  static absl::StatusOr<std::unique_ptr<RocksdbTier>> Open(const RocksdbTierOptions& options);
  ~RocksdbTier() override;

  absl::string_view name() const override { return "disk"; }
  uint64_t CostBytes(const HeldObject& object) const override;
  absl::Status Put(absl::Span<const TierWrite> group) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Flush() override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Read(const ObjectId& id, absl::Span<uint8_t> buffer) override;
  absl::Status Remove(const ObjectId& id) override ABSL_LOCKS_EXCLUDED(mu_);
  // Records that kDataLoss makes unreadable are also removed.
  absl::Status List(const Listing& listing) override;
  TierStats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

  // Made with the directory, kept for its life.
  const std::string& node_id() const { return node_id_; }

  // Remembers a format: durable with the next Flush, so before any object that needs it.
  absl::Status SaveFormat(const Format& format);
  // kDataLoss when one cannot be read.
  absl::StatusOr<std::vector<Format>> LoadFormats();

 private:
  // A file that is locked for as long as this is there.
  class DirectoryLock;

  RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<DirectoryLock> lock);
  absl::Status OpenDatabase();
  absl::Status AdoptNodeId();
  absl::Status CountObjects() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckRoom(absl::Span<const TierWrite> group) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ResumeWrites() ABSL_LOCKS_EXCLUDED(mu_);

  // Constant once open.
  const RocksdbTierOptions options_;
  const std::unique_ptr<DirectoryLock> lock_;
  std::unique_ptr<rocksdb::DB> db_;
  std::vector<rocksdb::ColumnFamilyHandle*> families_;  // Of db_, which gives them back.
  std::string node_id_;

  mutable Mutex mu_;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t objects_count_ ABSL_GUARDED_BY(mu_) = 0;
  bool write_failed_ ABSL_GUARDED_BY(mu_) = false;  // RocksDB refuses writes until Resume.
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_
