#ifndef OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_
#define OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cache_node/tiers/group_files.h"
#include "cache_node/tiers/index_row.h"
#include "cache_node/tiers/tier.h"
#include "proto/format.h"
#include "proto/mutex.h"

namespace rocksdb {
class ColumnFamilyHandle;
class DB;
class Status;
}  // namespace rocksdb

namespace okv {

struct RocksdbTierOptions {
  std::string data_dir;     // Created when missing; belongs to one node.
  uint64_t disk_bytes = 0;  // Limit on what the directory occupies.
  std::string node_id;      // The id the directory must have, or gets when it is new. Empty: the
                            // directory's, or a random one.
  uint64_t free_floor_bytes = 0;  // Left to others on the file system: nothing is written below it.
  std::function<void(const std::string& line)> log = {};  // Of what was lost and found.
  // Somebody above reads by places in this group: its file stays, whatever the rows say. After a
  // failed write they may name other places than the caller was told. Called while the tier is
  // locked; empty: nobody.
  std::function<bool(uint32_t group)> in_use = {};

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// What a group takes, and what of it is still of use.
struct GroupUse {
  uint32_t group = 0;
  uint64_t file_bytes = 0;
  uint64_t live_bytes = 0;   // In whole pages.
  uint64_t table_bytes = 0;  // What a table of the objects alive takes.
};

// What became of an index that was damaged, since the tier was opened.
struct IndexRecovery {
  uint64_t rebuilds = 0;     // An index that could not be read was left for a new one.
  uint64_t objects = 0;      // Taken back from the tables of their groups,
  uint64_t groups = 0;       // of so many.
  uint64_t groups_lost = 0;  // Without a table that can be read: nobody knows what was in them.
  uint64_t group_bytes_lost = 0;
};

// Payloads in group files (group_files.h), what is known of them in RocksDB. Column families:
//   index    (key, codec) -> tenant, encoded ObjectHeader, place   a restart reads only this
//   formats  format id -> Format::Canonical()
//   default  "node_id" -> the node's id, "rebuilding" while an index is built anew
// A group's file is durable before its rows are written, and its rows are one batch in the
// write-ahead log, after the format they need: one sync makes them durable. (Without the
// log each group would flush the memtables: several syncs, and a small file for each.) A file goes
// when the removal of its last row is durable, so that no row ever names bytes that are not there.
//
// The index can be lost: a group's file says itself what is in it (group_table.h), and the
// directory which node it belongs to (node_id_file.h). An index that RocksDB finds damaged, or that
// is not there, is put aside as "rocksdb.damaged", and a new one gets a row for every object of
// every group, the youngest group first: also for what was evicted while its group stayed, which is
// as right as ever. A payload is verified when it is read, as always. Where only the end of the
// write-ahead log is gone, whole groups are without rows: the objects of these that still verify
// get theirs. That is also what a crash between a file and its rows leaves, and a file without
// anything to take back goes.
//
// Thread-safe: writes one at a time, reads beside them.
class RocksdbTier final : public Tier {
 public:
  // kFailedPrecondition naming the directory when it cannot be created or written, is open in
  // another node, or belongs to another node id; or when a later version wrote to it.
  static absl::StatusOr<std::unique_ptr<RocksdbTier>> Open(const RocksdbTierOptions& options);
  ~RocksdbTier() override;

  absl::string_view name() const override { return "disk"; }
  uint64_t CostBytes(const HeldObject& object) const override;
  absl::Status Put(absl::Span<const TierWrite> group) override ABSL_LOCKS_EXCLUDED(write_mu_, mu_);
  absl::Status Flush() override ABSL_LOCKS_EXCLUDED(write_mu_, mu_);
  absl::Status Read(const ObjectId& id, absl::Span<uint8_t> buffer) override
      ABSL_LOCKS_EXCLUDED(write_mu_);
  absl::Status Remove(const ObjectId& id) override ABSL_LOCKS_EXCLUDED(write_mu_, mu_);
  // Records that kDataLoss makes unreadable are also removed.
  absl::Status List(const Listing& listing) override ABSL_LOCKS_EXCLUDED(write_mu_, mu_);
  TierStats stats() const override ABSL_LOCKS_EXCLUDED(mu_);

  struct Stored {
    std::vector<DiskPlace> places;
    // The payloads are durable, and the places are those of the index. An error: a crash may lose
    // the rows. So what only memory had stays there; but what was on disk has moved all the same.
    absl::Status synced;
  };
  // Put, durable when it returns `synced`: where each payload is. Objects that are here move; their
  // old places can be read until the next call after this one. kResourceExhausted when it does not
  // fit, or the disk is full; kUnavailable when the disk fails: the next call tries again.
  // `keep` is called for each of the group while the payloads are being written, on this thread:
  // what it refuses is not stored, and its place stays unknown.
  absl::StatusOr<Stored> Store(absl::Span<const TierWrite> group,
                               const std::function<bool(size_t)>& keep)
      ABSL_LOCKS_EXCLUDED(write_mu_, mu_);
  // Read without the index, by the place that Store or List told. kNotFound also when the object
  // has moved since: ask where it is now.
  absl::Status ReadAt(const DiskPlace& place, absl::Span<uint8_t> buffer) const {
    return files_->Read(place, buffer);
  }
  // Whether the index takes writes, after a try to mend it where the last one failed.
  absl::Status CheckWrites() ABSL_LOCKS_EXCLUDED(write_mu_) {
    MutexLock lock(&write_mu_);
    return ResumeWrites();
  }
  // Remove for many; their space is back after the next Flush that leaves a group without objects.
  absl::Status RemoveAll(absl::Span<const ObjectId> ids) ABSL_LOCKS_EXCLUDED(write_mu_, mu_);

  // What can still be written: up to the limit and down to the floor of free space. 0 when the file
  // system does not say what is free.
  uint64_t RoomBytes() const ABSL_LOCKS_EXCLUDED(mu_);
  // How much must be given back until `bytes` can be written; with 0 bytes: until limit and floor
  // hold. Nothing for the floor when the file system does not say what is free.
  uint64_t ShortBytes(uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  // 0 also when the file system does not say.
  uint64_t FreeBytes() const { return files_->FreeBytes().value_or(0); }
  std::vector<GroupUse> Groups() const ABSL_LOCKS_EXCLUDED(mu_);
  bool direct_io() const { return files_->direct(); }
  IndexRecovery recovery() const ABSL_LOCKS_EXCLUDED(mu_);

  // Made with the directory, kept for its life.
  const std::string& node_id() const { return node_id_; }

  // Remembers a format: durable with the next Flush, so before any object that needs it.
  absl::Status SaveFormat(const Format& format) ABSL_LOCKS_EXCLUDED(write_mu_);
  // kDataLoss when one cannot be read.
  absl::StatusOr<std::vector<Format>> LoadFormats() ABSL_LOCKS_EXCLUDED(write_mu_);
  // A format that LoadFormats did not give, from the table of a group that has objects of it; it is
  // remembered from now on. kNotFound when the group does not tell; other errors are the disk's, or
  // of a later version's group.
  absl::StatusOr<Format> RecoverFormat(const FormatId& id, uint32_t group)
      ABSL_LOCKS_EXCLUDED(write_mu_);

 private:
  // A file that is locked for as long as this is there.
  class DirectoryLock;
  struct Group {
    uint64_t file_bytes = 0;
    uint64_t live_bytes = 0;
    uint64_t live_table_bytes = 0;
    uint64_t live_objects = 0;
  };
  using GroupSizes = std::map<uint32_t, uint64_t>;  // Of the files.

  RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<DirectoryLock> lock);
  void Log(const std::string& line) const;
  std::string IndexPath() const;
  // Opens the index and reads all of it, or builds it anew when it is damaged. `starting`: nobody
  // knows more of the groups than they and the index say.
  absl::Status OpenIndex(bool starting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  // kDataLoss: the index is damaged, or gone.
  absl::Status ReadIndex(bool starting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Puts the damaged index aside and begins an empty one.
  absl::Status ReplaceIndex() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // kDataLoss also when there are groups and no index, unless a new one may begin.
  absl::Status OpenDatabase(bool may_begin) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  void CloseDatabase() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  absl::Status AdoptNodeId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  absl::Status ReadFormats() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Counts rows and files; returns the groups without rows.
  absl::StatusOr<GroupSizes> CountObjects() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Deletes a group without rows, or counts it as empty while somebody reads from it.
  absl::Status DropGroup(uint32_t group, uint64_t file_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // Takes back what is in groups without rows, then drops those that gave nothing.
  absl::Status AdoptGroups(const GroupSizes& groups, bool rebuilding)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns how many objects got a row. kNotFound or kDataLoss: the group has no table to read.
  // Other errors say nothing of what is in it.
  absl::StatusOr<uint64_t> AdoptGroup(uint32_t group, uint64_t file_bytes, bool verify)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // The row names bytes that are there.
  bool HasBytes(const IndexRowUse& use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  // kDataLoss when the payload is not what the table says.
  absl::Status VerifyPayload(const TierRecord& record, const Format& format) const;
  // After a failed write: RocksDB takes writes again, or is opened again.
  absl::Status ResumeWrites() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::vector<DiskPlace>> WriteGroup(absl::Span<const TierWrite> group,
                                                    const std::function<bool(size_t)>& keep)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // How a write of RocksDB's ended; a failed one is remembered.
  absl::Status Written(absl::string_view what, const rocksdb::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  absl::Status CheckRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status SyncLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // And deletes the groups that are empty, and not in use.
  absl::Status FlushLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(mu_);
  // What the row of `id` counts as; kNotFound.
  absl::StatusOr<IndexRowUse> FindUse(const ObjectId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  bool InUse(uint32_t group) const { return options_.in_use && options_.in_use(group); }
  void CountAdded(const IndexRowUse& use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountRemoved(const IndexRowUse& use) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_, mu_);
  uint64_t OccupiedLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t IndexBytes() const;

  // Constant once open.
  const RocksdbTierOptions options_;
  const std::unique_ptr<DirectoryLock> lock_;
  std::unique_ptr<GroupFiles> files_;
  std::string node_id_;

  // Held while a group is written: of the calls above only reads by place and stats go beside it.
  // Before mu_.
  mutable Mutex write_mu_;
  std::unique_ptr<rocksdb::DB> db_ ABSL_GUARDED_BY(write_mu_);  // Null: could not be reopened.
  // Of db_, which gives them back.
  std::vector<rocksdb::ColumnFamilyHandle*> families_ ABSL_GUARDED_BY(write_mu_);
  bool write_failed_ ABSL_GUARDED_BY(write_mu_) = false;  // RocksDB may refuse writes.
  // All that are stored: a group's table has those it needs, and a database that is opened again
  // may have lost those not flushed.
  std::map<FormatId, std::string> formats_ ABSL_GUARDED_BY(write_mu_);
  uint32_t next_group_ ABSL_GUARDED_BY(write_mu_) = 1;
  // Without objects once the next flush returned.
  std::vector<uint32_t> emptied_ ABSL_GUARDED_BY(write_mu_);

  mutable Mutex mu_;
  absl::flat_hash_map<uint32_t, Group> groups_ ABSL_GUARDED_BY(mu_);
  uint64_t files_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // Of groups_.
  uint64_t index_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // RocksDB's files.
  uint64_t rows_bytes_ ABSL_GUARDED_BY(mu_) = 0;   // Written since those were counted.
  uint64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t objects_count_ ABSL_GUARDED_BY(mu_) = 0;
  IndexRecovery recovery_ ABSL_GUARDED_BY(mu_);
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_TIERS_ROCKSDB_TIER_H_
