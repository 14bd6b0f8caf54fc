#include "cache_node/tiers/rocksdb_tier.h"

#include <fcntl.h>
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "cache_node/tiers/group_table.h"
#include "cache_node/tiers/node_id_file.h"
#include "proto/check.h"
#include "proto/object.h"
#include "proto/rocksdb_log.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Positions in families_ and names on disk.
enum Family : size_t { kDefault = 0, kIndex = 1, kFormats = 2, kFamiliesCount = 3 };
constexpr const char* kFamilyNames[kFamiliesCount] = {"default", "index", "formats"};
// Of the first version, which kept payloads in blob files.
constexpr absl::string_view kOldPayloadFamily = "payload";

constexpr absl::string_view kNodeIdKey = "node_id";
constexpr absl::string_view kRebuildingKey = "rebuilding";
constexpr size_t kNodeIdBytesMax = 128;
// What of a table is not its objects: trailer, counts, a format's canonical encoding.
constexpr size_t kTableBytesFixed = 512;
constexpr size_t kIndexBufferBytes = size_t{4} << 20;
constexpr size_t kBlockCacheBytes = size_t{32} << 20;  // Index rows and filters.
// RocksDB's manifest and write-ahead log count against the limit: a few MB at most.
constexpr size_t kManifestBytesMax = size_t{1} << 20;
constexpr size_t kLogBytesMax = size_t{8} << 20;

rocksdb::Slice AsSlice(absl::string_view bytes) { return {bytes.data(), bytes.size()}; }
absl::string_view AsView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

absl::Status FromRocksdb(absl::string_view what, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat(what, ": ", status.ToString());
  if (status.IsNotFound()) return absl::NotFoundError(text);
  if (status.IsCorruption()) return absl::DataLossError(text);
  if (status.IsNoSpace() || status.subcode() == rocksdb::Status::kSpaceLimit) {
    return absl::ResourceExhaustedError(text);
  }
  if (status.IsIOError() || status.IsBusy() || status.IsTryAgain() || status.IsIncomplete()) {
    return absl::UnavailableError(text);
  }
  return absl::InternalError(text);
}

// Neither there, nor gone, nor damaged: the disk fails, or a later version wrote it.
bool SaysNothing(const absl::Status& status) {
  return !status.ok() && !absl::IsNotFound(status) && !absl::IsDataLoss(status);
}

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.max_total_wal_size = kLogBytesMax;
  options.max_background_jobs = 2;
  options.info_log = std::make_shared<NoRocksdbLog>();
  options.max_manifest_file_size = kManifestBytesMax;
  options.allow_fallocate = false;  // What is preallocated is occupied, and not counted.
  options.stats_dump_period_sec = 0;
  return options;
}

std::vector<rocksdb::ColumnFamilyDescriptor> FamilyDescriptors() {
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  // The distribution's RocksDB computes CRC32C at a third of the speed of a scan without it.
  table.checksum = rocksdb::kXXH3;
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
  for (const char* name : kFamilyNames) {
    rocksdb::ColumnFamilyOptions options;
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    options.write_buffer_size = kIndexBufferBytes;
    options.compression = rocksdb::kNoCompression;  // Keys and checksums do not compress.
    families.emplace_back(name, options);
  }
  return families;
}

std::string RandomNodeId() {
  std::random_device random;
  return absl::StrFormat("node-%08x%08x", random(), random());
}

}  // namespace

class RocksdbTier::DirectoryLock {
 public:
  // RocksDB has a lock too, but tells a lock that is taken from other failures only by its text.
  static absl::StatusOr<std::unique_ptr<DirectoryLock>> Take(const std::string& data_dir) {
    std::error_code error;
    std::filesystem::create_directories(data_dir, error);
    if (error) {
      return absl::FailedPreconditionError(
          absl::StrCat("data_dir '", data_dir, "' cannot be created: ", error.message()));
    }
    const std::string path = absl::StrCat(data_dir, "/NODE_LOCK");
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("data_dir '", data_dir, "' cannot be written: ", std::strerror(errno)));
    }
    auto lock = std::make_unique<DirectoryLock>(fd);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("data_dir '", data_dir, "' is in use by another node"));
    }
    return lock;
  }
  explicit DirectoryLock(int fd) : fd_(fd) {}
  ~DirectoryLock() { close(fd_); }

 private:
  const int fd_;
};

absl::Status RocksdbTierOptions::Validate() const {
  if (data_dir.empty()) return absl::InvalidArgumentError("data_dir is missing");
  if (disk_bytes == 0) return absl::InvalidArgumentError("disk_bytes is 0");
  if (node_id.size() > kNodeIdBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("node_id is longer than ", kNodeIdBytesMax, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<RocksdbTier>> RocksdbTier::Open(const RocksdbTierOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_ASSIGN_OR_RETURN(auto lock, DirectoryLock::Take(options.data_dir));
  auto tier = absl::WrapUnique(new RocksdbTier(options, std::move(lock)));
  OKV_ASSIGN_OR_RETURN(tier->files_, GroupFiles::Open(absl::StrCat(options.data_dir, "/groups")));
  MutexLock write_lock(&tier->write_mu_);
  OKV_RETURN_IF_ERROR(tier->OpenIndex(/*starting=*/true));
  return tier;
}

RocksdbTier::RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<DirectoryLock> lock)
    : options_(options), lock_(std::move(lock)) {}

RocksdbTier::~RocksdbTier() {
  MutexLock lock(&write_mu_);
  CloseDatabase();
}

void RocksdbTier::Log(const std::string& line) const {
  if (options_.log) options_.log(line);
}

std::string RocksdbTier::IndexPath() const { return absl::StrCat(options_.data_dir, "/rocksdb"); }

absl::Status RocksdbTier::OpenIndex(bool starting) {
  const absl::Status status = ReadIndex(starting);
  if (!absl::IsDataLoss(status)) return status;
  Log(absl::StrCat("the disk's index is damaged, building it anew from the groups' own tables: ",
                   status.message()));
  CloseDatabase();
  OKV_RETURN_IF_ERROR(ReplaceIndex());
  return ReadIndex(starting);
}

absl::Status RocksdbTier::ReadIndex(bool starting) {
  if (db_ == nullptr) OKV_RETURN_IF_ERROR(OpenDatabase(/*may_begin=*/false));
  OKV_RETURN_IF_ERROR(AdoptNodeId());
  OKV_RETURN_IF_ERROR(ReadFormats());
  OKV_ASSIGN_OR_RETURN(const GroupSizes rowless, CountObjects());
  std::string mark;
  const rocksdb::Status marked = db_->Get(rocksdb::ReadOptions(), AsSlice(kRebuildingKey), &mark);
  if (!marked.ok() && !marked.IsNotFound()) return FromRocksdb("reading the index", marked);
  if (starting || marked.ok()) {
    OKV_RETURN_IF_ERROR(AdoptGroups(rowless, /*rebuilding=*/marked.ok()));
  } else {
    // Who wrote them was told that they failed.
    for (const auto& [group, bytes] : rowless) OKV_RETURN_IF_ERROR(DropGroup(group, bytes));
  }
  if (!marked.ok()) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(FromRocksdb("writing to the index",
                                  db_->Delete(rocksdb::WriteOptions(), AsSlice(kRebuildingKey))));
  return SyncLocked();
}

absl::Status RocksdbTier::DropGroup(uint32_t group, uint64_t file_bytes) {
  if (!InUse(group)) return files_->Delete(group);
  MutexLock lock(&mu_);
  groups_[group].file_bytes = file_bytes;
  files_bytes_ += file_bytes;
  emptied_.push_back(group);
  return absl::OkStatus();
}

absl::Status RocksdbTier::ReplaceIndex() {
  const std::string aside = absl::StrCat(IndexPath(), ".damaged");
  std::error_code error;
  if (std::filesystem::exists(IndexPath(), error)) {
    std::filesystem::remove_all(aside, error);
    if (!error) std::filesystem::rename(IndexPath(), aside, error);
  }
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("putting '", IndexPath(), "' aside: ", error.message()));
  }
  OKV_RETURN_IF_ERROR(OpenDatabase(/*may_begin=*/true));
  {
    MutexLock lock(&mu_);
    ++recovery_.rebuilds;
  }
  // Should this be cut short, the next start goes on with it.
  rocksdb::WriteOptions synced;
  synced.sync = true;
  return FromRocksdb("writing to the index", db_->Put(synced, AsSlice(kRebuildingKey), "1"));
}

absl::Status RocksdbTier::OpenDatabase(bool may_begin) {
  const std::string path = IndexPath();
  const std::string what = absl::StrCat("data_dir '", options_.data_dir, "'");
  std::vector<std::string> names;  // None in a new directory.
  if (rocksdb::DB::ListColumnFamilies(DatabaseOptions(), path, &names).ok()) {
    for (const std::string& name : names) {
      if (name != kOldPayloadFamily) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          what, " has the layout of the first version, payloads inside RocksDB: empty it"));
    }
  }
  std::error_code error;
  OKV_ASSIGN_OR_RETURN(const GroupSizes groups, files_->List());
  if (!may_begin && !groups.empty() &&
      !std::filesystem::exists(absl::StrCat(path, "/CURRENT"), error)) {
    return absl::DataLossError(absl::StrCat(what, ": rocksdb/CURRENT is missing"));
  }
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(DatabaseOptions(), path, FamilyDescriptors(), &families_, &db);
  db_.reset(db);
  if (status.IsPathNotFound() || status.IsNotFound()) {
    return absl::DataLossError(absl::StrCat(what, ": ", status.ToString()));  // A file is missing.
  }
  if (status.IsIOError()) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": ", status.ToString()));
  }
  return FromRocksdb(what, status);
}

void RocksdbTier::CloseDatabase() {
  if (db_ == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* family : families_) db_->DestroyColumnFamilyHandle(family);
  families_.clear();
  db_->Close();
  db_.reset();
}

absl::Status RocksdbTier::AdoptNodeId() {
  std::string stored;
  const rocksdb::Status found = db_->Get(rocksdb::ReadOptions(), AsSlice(kNodeIdKey), &stored);
  if (!found.ok() && !found.IsNotFound()) return FromRocksdb("reading the node id", found);
  if (found.IsNotFound()) stored = ReadNodeIdFile(options_.data_dir);
  // A database that is opened again may have lost it; the node has not.
  const std::string& wanted = node_id_.empty() ? options_.node_id : node_id_;
  if (!stored.empty() && !wanted.empty() && wanted != stored) {
    return absl::FailedPreconditionError(absl::StrCat("data_dir '", options_.data_dir,
                                                      "' belongs to node '", stored, "', not to '",
                                                      wanted, "'"));
  }
  if (node_id_.empty()) {
    node_id_ = !stored.empty() ? stored : !wanted.empty() ? wanted : RandomNodeId();
  }
  if (const absl::Status written = WriteNodeIdFile(options_.data_dir, node_id_); !written.ok()) {
    Log(absl::StrCat("the node's id is in the index only: ", written.message()));
  }
  if (found.ok()) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(
      FromRocksdb("writing the node id",
                  db_->Put(rocksdb::WriteOptions(), AsSlice(kNodeIdKey), AsSlice(node_id_))));
  return FromRocksdb("syncing the index's log", db_->SyncWAL());
}

absl::Status RocksdbTier::ReadFormats() {
  // Those that were saved since the start may be missing from a database that is opened again.
  for (const auto& [id, canonical] : formats_) {
    OKV_RETURN_IF_ERROR(FromRocksdb(
        "writing a format",
        db_->Put(rocksdb::WriteOptions(), families_[kFormats], AsSlice(id.view()), canonical)));
  }
  const std::unique_ptr<rocksdb::Iterator> rows(
      db_->NewIterator(rocksdb::ReadOptions(), families_[kFormats]));
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    const absl::StatusOr<FormatId> id = FormatId::FromBytes(AsView(rows->key()));
    if (id.ok()) formats_[*id] = rows->value().ToString();
  }
  return FromRocksdb("listing formats", rows->status());
}

absl::StatusOr<RocksdbTier::GroupSizes> RocksdbTier::CountObjects() {
  OKV_ASSIGN_OR_RETURN(GroupSizes files, files_->List());
  rocksdb::ReadOptions options;
  options.readahead_size = size_t{4} << 20;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> rows(db_->NewIterator(options, families_[kIndex]));
  MutexLock lock(&mu_);
  groups_.clear();
  emptied_.clear();
  files_bytes_ = used_bytes_ = objects_count_ = rows_bytes_ = 0;
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    const absl::StatusOr<IndexRowUse> use = ParseIndexRowUse(AsView(rows->value()));
    if (use.ok() && files.contains(use->place.group)) CountAdded(*use);
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("counting objects", rows->status()));
  for (const auto& [group, file_bytes] : files) next_group_ = std::max(next_group_, group + 1);
  for (auto& [number, group] : groups_) {
    group.file_bytes = files.at(number);
    files_bytes_ += group.file_bytes;
    files.erase(number);
  }
  index_bytes_ = IndexBytes();
  return files;
}

bool RocksdbTier::HasBytes(const IndexRowUse& use) {
  const uint64_t end_bytes =
      uint64_t{use.place.page} * kDiskPageBytes + DiskPagesBytes(use.payload_bytes);
  MutexLock lock(&mu_);
  const auto group = groups_.find(use.place.group);
  return group != groups_.end() && end_bytes <= group->second.file_bytes;
}

absl::Status RocksdbTier::VerifyPayload(const TierRecord& record, const Format& format) const {
  const ObjectHeader& header = record.header;
  const PageLayout layout = PageLayout::Of(format);
  if (header.payload_bytes != layout.block_bytes(header.id.codec)) {
    return absl::DataLossError("another size than its format's");
  }
  const AlignedBuffer buffer = AllocateAligned(header.payload_bytes);
  const absl::Span<uint8_t> payload(buffer.get(), header.payload_bytes);
  OKV_RETURN_IF_ERROR(ReadAt(record.place, payload));
  return VerifyObject(header, layout, payload);
}

absl::StatusOr<uint64_t> RocksdbTier::AdoptGroup(uint32_t group, uint64_t file_bytes, bool verify) {
  OKV_ASSIGN_OR_RETURN(const std::string bytes, files_->ReadTable(group));
  OKV_ASSIGN_OR_RETURN(const GroupTable table, ParseGroupTable(group, bytes));
  std::map<FormatId, Format> formats;
  rocksdb::WriteBatch batch;
  for (const auto& [id, canonical] : table.formats) {
    const absl::StatusOr<Format> format = Format::Parse(canonical);
    if (!format.ok()) continue;
    formats.emplace(id, *format);
    formats_[id] = canonical;
    batch.Put(families_[kFormats], AsSlice(id.view()), canonical);
  }
  std::vector<IndexRowUse> added;
  std::vector<IndexRowUse> replaced;
  for (const TierRecord& record : table.objects) {
    const ObjectId& id = record.header.id;
    const auto format = formats.find(record.header.format_id);
    if (format == formats.end()) continue;
    const absl::StatusOr<IndexRowUse> old = FindUse(id);
    if (SaysNothing(old.status())) return old.status();
    if (old.ok() && HasBytes(*old)) continue;
    const absl::Status verified = verify ? VerifyPayload(record, format->second) : absl::OkStatus();
    if (SaysNothing(verified)) return verified;
    if (!verified.ok()) continue;
    const std::string row = EncodeIndexRow(record.header, record.tenant, record.place);
    if (old.ok()) replaced.push_back(*old);
    OKV_ASSIGN_OR_RETURN(const IndexRowUse use, ParseIndexRowUse(row));
    added.push_back(use);
    batch.Put(families_[kIndex], IndexRowKey(id), row);
  }
  if (added.empty()) return 0;
  const absl::Status written = Written("writing rows", db_->Write(rocksdb::WriteOptions(), &batch));
  // Whatever is wrong with the index, the group is not damaged.
  if (!written.ok()) return absl::UnavailableError(written.message());
  MutexLock lock(&mu_);
  groups_[group].file_bytes = file_bytes;
  files_bytes_ += file_bytes;
  for (const IndexRowUse& use : added) CountAdded(use);
  for (const IndexRowUse& use : replaced) CountRemoved(use);
  return added.size();
}

absl::Status RocksdbTier::AdoptGroups(const GroupSizes& groups, bool rebuilding) {
  IndexRecovery found;
  std::vector<uint32_t> useless;
  // Of the groups that an object is in, the youngest has it as it was written last.
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    // All of an index is too much to verify before serving: there each is verified when it is read.
    const absl::StatusOr<uint64_t> adopted =
        AdoptGroup(group->first, group->second, /*verify=*/!rebuilding);
    if (adopted.ok() && *adopted > 0) {
      found.objects += *adopted;
      ++found.groups;
      continue;
    }
    const absl::Status& status = adopted.status();
    if (SaysNothing(status)) return status;
    useless.push_back(group->first);
    if (status.ok() || !rebuilding) continue;  // Else what a crash cut short.
    ++found.groups_lost;
    found.group_bytes_lost += group->second;
    Log(absl::StrCat("what was in ", GroupFiles::FileName(group->first), ", ", group->second,
                     " bytes, is lost: ", status.message()));
  }
  OKV_RETURN_IF_ERROR(SyncLocked());
  for (const uint32_t group : useless) OKV_RETURN_IF_ERROR(DropGroup(group, groups.at(group)));
  if (rebuilding || found.objects > 0) {
    Log(absl::StrCat("took back ", found.objects, " objects of ", found.groups,
                     " groups that the disk's index did not have; ", found.groups_lost,
                     " groups could not be read"));
  }
  MutexLock lock(&mu_);
  recovery_.objects += found.objects;
  recovery_.groups += found.groups;
  recovery_.groups_lost += found.groups_lost;
  recovery_.group_bytes_lost += found.group_bytes_lost;
  return absl::OkStatus();
}

uint64_t RocksdbTier::IndexBytes() const {
  uint64_t bytes = 0;
  for (const std::string& path : {IndexPath(), absl::StrCat(IndexPath(), ".damaged")}) {
    std::error_code error;
    std::filesystem::directory_iterator entry(path, error);
    while (!error && entry != std::filesystem::directory_iterator()) {
      std::error_code gone;  // Compactions delete files meanwhile.
      const uintmax_t file_bytes = entry->file_size(gone);
      if (!gone) bytes += DiskPagesBytes(file_bytes);
      entry.increment(error);
    }
  }
  return bytes;
}

uint64_t RocksdbTier::CostBytes(const HeldObject& object) const { return DiskCostBytes(object); }

void RocksdbTier::CountAdded(const IndexRowUse& use) {
  Group& group = groups_[use.place.group];
  group.live_bytes += DiskPagesBytes(use.payload_bytes);
  group.live_table_bytes += use.table_bytes;
  ++group.live_objects;
  used_bytes_ += use.cost_bytes;
  ++objects_count_;
}

void RocksdbTier::CountRemoved(const IndexRowUse& use) {
  const auto found = groups_.find(use.place.group);
  if (found == groups_.end()) return;  // A row whose file was missing at the start.
  found->second.live_bytes -= DiskPagesBytes(use.payload_bytes);
  found->second.live_table_bytes -= use.table_bytes;
  if (--found->second.live_objects == 0) emptied_.push_back(use.place.group);
  used_bytes_ -= use.cost_bytes;
  --objects_count_;
}

uint64_t RocksdbTier::OccupiedLocked() const { return files_bytes_ + index_bytes_ + rows_bytes_; }

uint64_t RocksdbTier::RoomBytes() const {
  const uint64_t free = FreeBytes();  // Or unknown: no room.
  const uint64_t above_floor = free - std::min(free, options_.free_floor_bytes);
  MutexLock lock(&mu_);
  return std::min(options_.disk_bytes - std::min(options_.disk_bytes, OccupiedLocked()),
                  above_floor);
}

uint64_t RocksdbTier::ShortBytes(uint64_t bytes) const {
  const auto above = [](uint64_t wanted, uint64_t have) { return wanted - std::min(wanted, have); };
  const std::optional<uint64_t> free = files_->FreeBytes();
  // What is unknown is no reason to evict.
  const uint64_t floor_short =
      free.has_value() ? above(options_.free_floor_bytes + bytes, *free) : 0;
  MutexLock lock(&mu_);
  return std::max(above(OccupiedLocked() + bytes, options_.disk_bytes), floor_short);
}

absl::Status RocksdbTier::CheckRoom(uint64_t bytes) {
  if (RoomBytes() >= bytes) return absl::OkStatus();
  if (!emptied_.empty()) OKV_RETURN_IF_ERROR(FlushLocked());
  if (RoomBytes() >= bytes) return absl::OkStatus();
  const std::optional<uint64_t> free = files_->FreeBytes();
  if (!free.has_value()) return absl::UnavailableError("the file system does not say what is free");
  MutexLock lock(&mu_);
  return absl::ResourceExhaustedError(
      absl::StrCat(bytes, " bytes do not fit: the disk tier occupies ", OccupiedLocked(), " of ",
                   options_.disk_bytes, " bytes, and its file system has ", *free,
                   " left, of which ", options_.free_floor_bytes, " are not ours"));
}

absl::Status RocksdbTier::ResumeWrites() {
  if (!write_failed_ && db_ != nullptr) return absl::OkStatus();
  if (db_ != nullptr && db_->Resume().ok()) {
    write_failed_ = false;
    return absl::OkStatus();
  }
  // Not every error lets it resume (a disk that was read-only does not): it starts anew from its
  // files, without what it held in memory, and that is still above.
  CloseDatabase();
  const absl::Status opened = OpenIndex(/*starting=*/false);
  if (!opened.ok()) {
    CloseDatabase();
    return absl::UnavailableError(absl::StrCat("after a failed write: ", opened.message()));
  }
  write_failed_ = false;
  return absl::OkStatus();
}

absl::StatusOr<IndexRowUse> RocksdbTier::FindUse(const ObjectId& id) {
  std::string row;
  OKV_RETURN_IF_ERROR(
      FromRocksdb("looking for an object",
                  db_->Get(rocksdb::ReadOptions(), families_[kIndex], IndexRowKey(id), &row)));
  return ParseIndexRowUse(row);
}

absl::Status RocksdbTier::Put(absl::Span<const TierWrite> group) {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  for (const TierWrite& write : group) {
    const ObjectId& id = write.object->header.id;
    const absl::StatusOr<IndexRowUse> found = FindUse(id);
    if (found.ok()) return absl::AlreadyExistsError(absl::StrCat(id.key.Short(), " is on disk"));
    if (!absl::IsNotFound(found.status())) return found.status();
  }
  return WriteGroup(group, [](size_t) { return true; }).status();
}

absl::StatusOr<RocksdbTier::Stored> RocksdbTier::Store(absl::Span<const TierWrite> group,
                                                       const std::function<bool(size_t)>& keep) {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  OKV_ASSIGN_OR_RETURN(std::vector<DiskPlace> places, WriteGroup(group, keep));
  // What this emptied stays until its objects' new places are known above: Flush deletes it.
  return Stored{.places = std::move(places), .synced = SyncLocked()};
}

absl::StatusOr<std::vector<DiskPlace>> RocksdbTier::WriteGroup(
    absl::Span<const TierWrite> group, const std::function<bool(size_t)>& keep) {
  uint64_t rows_bytes = 0;
  uint64_t file_bytes = 0;
  std::vector<absl::Span<const uint8_t>> payloads;
  std::map<FormatId, std::string> formats;
  std::vector<IndexRowUse> moved;
  for (const TierWrite& write : group) {
    OKV_CHECK(write.payload.size() == write.object->header.payload_bytes);
    payloads.push_back(write.payload);
    rows_bytes += IndexRowBytes(*write.object);
    file_bytes += DiskPagesBytes(write.payload.size());
    const auto format = formats_.find(write.object->header.format_id);
    if (format != formats_.end()) formats.insert(*format);
    const absl::StatusOr<IndexRowUse> old = FindUse(write.object->header.id);
    moved.push_back(old.ok() ? *old : IndexRowUse{});
    // A damaged row is replaced too; other errors are the disk's.
    if (absl::IsUnavailable(old.status())) return old.status();
  }
  const std::string table = EncodeGroupTable(formats, group);
  file_bytes += GroupFiles::TableBytes(table.size());
  OKV_RETURN_IF_ERROR(CheckRoom(rows_bytes + file_bytes));
  const uint32_t number = next_group_++;
  absl::StatusOr<std::vector<uint32_t>> pages = absl::UnknownError("");
  std::thread writer([&] { pages = files_->Write(number, payloads, table); });
  std::vector<bool> kept;
  for (size_t i = 0; i < group.size(); ++i) kept.push_back(keep(i));
  writer.join();
  OKV_RETURN_IF_ERROR(pages.status());
  rocksdb::WriteBatch batch;
  std::vector<DiskPlace> places(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    if (!kept[i]) continue;
    places[i] = {.group = number, .page = (*pages)[i]};
    batch.Put(families_[kIndex], IndexRowKey(group[i].object->header.id),
              EncodeIndexRow(group[i].object->header, group[i].object->tenant, places[i]));
  }
  OKV_RETURN_IF_ERROR(Written("writing objects", db_->Write(rocksdb::WriteOptions(), &batch)));
  MutexLock lock(&mu_);
  groups_[number].file_bytes = file_bytes;
  files_bytes_ += file_bytes;
  rows_bytes_ += rows_bytes;
  for (size_t i = 0; i < group.size(); ++i) {
    if (!kept[i]) continue;
    CountAdded({.place = places[i],
                .payload_bytes = payloads[i].size(),
                .table_bytes = GroupTableRowBytes(*group[i].object),
                .cost_bytes = CostBytes(*group[i].object)});
    if (moved[i].place.known()) CountRemoved(moved[i]);
  }
  if (groups_[number].live_objects == 0) emptied_.push_back(number);
  return places;
}

absl::Status RocksdbTier::Written(absl::string_view what, const rocksdb::Status& status) {
  if (!status.ok()) write_failed_ = true;
  return FromRocksdb(what, status);
}

absl::Status RocksdbTier::Flush() {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  return FlushLocked();
}

absl::Status RocksdbTier::SyncLocked() {
  OKV_RETURN_IF_ERROR(Written("syncing the index's log", db_->SyncWAL()));
  const uint64_t index_bytes = IndexBytes();
  MutexLock lock(&mu_);
  index_bytes_ = index_bytes;
  rows_bytes_ = 0;
  return absl::OkStatus();
}

absl::Status RocksdbTier::FlushLocked() {
  OKV_RETURN_IF_ERROR(SyncLocked());
  std::vector<uint32_t> kept;  // In use, or not deleted: the next flush tries again.
  for (const uint32_t group : emptied_) {
    const bool deleted = !InUse(group) && files_->Delete(group).ok();
    MutexLock lock(&mu_);
    if (deleted) {
      files_bytes_ -= groups_.at(group).file_bytes;
      groups_.erase(group);
    } else {
      kept.push_back(group);
    }
  }
  emptied_ = std::move(kept);
  return absl::OkStatus();
}

absl::Status RocksdbTier::Read(const ObjectId& id, absl::Span<uint8_t> buffer) {
  IndexRowUse use;
  {
    MutexLock lock(&write_mu_);
    if (db_ == nullptr) return absl::UnavailableError("the index is not open");
    OKV_ASSIGN_OR_RETURN(use, FindUse(id));
  }
  if (use.payload_bytes != buffer.size()) {
    return absl::DataLossError(absl::StrCat(id.key.Short(), ": ", use.payload_bytes,
                                            " bytes on disk, not ", buffer.size()));
  }
  const absl::Status status = ReadAt(use.place, buffer);
  return absl::IsNotFound(status) ? absl::DataLossError(status.message()) : status;
}

absl::Status RocksdbTier::Remove(const ObjectId& id) { return RemoveAll({id}); }

absl::Status RocksdbTier::RemoveAll(absl::Span<const ObjectId> ids) {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  rocksdb::WriteBatch batch;
  std::vector<IndexRowUse> removed;
  for (const ObjectId& id : ids) {
    const absl::StatusOr<IndexRowUse> use = FindUse(id);
    if (absl::IsNotFound(use.status())) continue;
    if (!use.ok() && !absl::IsDataLoss(use.status())) return use.status();
    batch.Delete(families_[kIndex], IndexRowKey(id));
    if (use.ok()) removed.push_back(*use);  // A damaged row was never counted.
  }
  OKV_RETURN_IF_ERROR(Written("removing objects", db_->Write(rocksdb::WriteOptions(), &batch)));
  MutexLock counts_lock(&mu_);
  for (const IndexRowUse& use : removed) CountRemoved(use);
  return absl::OkStatus();
}

absl::Status RocksdbTier::List(const Listing& listing) {
  MutexLock lock(&write_mu_);
  if (db_ == nullptr) return absl::UnavailableError("the index is not open");
  absl::flat_hash_map<uint32_t, uint64_t> files_bytes;
  {
    MutexLock counts_lock(&mu_);
    for (const auto& [number, group] : groups_) files_bytes[number] = group.file_bytes;
  }
  rocksdb::ReadOptions options;
  options.readahead_size = size_t{4} << 20;
  options.fill_cache = false;
  rocksdb::WriteBatch damaged;
  std::vector<IndexRowUse> uses;
  const std::unique_ptr<rocksdb::Iterator> rows(db_->NewIterator(options, families_[kIndex]));
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    absl::StatusOr<TierRecord> record = ParseIndexRow(AsView(rows->key()), AsView(rows->value()));
    if (record.ok()) {
      const auto file = files_bytes.find(record->place.group);
      const uint64_t end_bytes = uint64_t{record->place.page} * kDiskPageBytes +
                                 DiskPagesBytes(record->header.payload_bytes);
      if (file == files_bytes.end() || end_bytes > file->second) {
        record = absl::DataLossError(absl::StrCat("the file of ", record->header.id.key.Short(),
                                                  ", group ", record->place.group,
                                                  ", is missing or too short"));
      }
    }
    if (record.ok()) {
      listing.object(std::move(*record));
      continue;
    }
    if (listing.corrupt) listing.corrupt(record.status());
    if (!absl::IsDataLoss(record.status()) || !listing.corrupt) continue;
    damaged.Delete(families_[kIndex], rows->key());
    if (const auto use = ParseIndexRowUse(AsView(rows->value())); use.ok()) uses.push_back(*use);
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("listing objects", rows->status()));
  if (damaged.Count() == 0) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(
      FromRocksdb("removing damaged rows", db_->Write(rocksdb::WriteOptions(), &damaged)));
  MutexLock counts_lock(&mu_);
  for (const IndexRowUse& use : uses) CountRemoved(use);
  return absl::OkStatus();
}

TierStats RocksdbTier::stats() const {
  const uint64_t free_bytes = FreeBytes();
  MutexLock lock(&mu_);
  return {.capacity_bytes = options_.disk_bytes,
          .used_bytes = used_bytes_,
          .occupied_bytes = OccupiedLocked(),
          .objects_count = objects_count_,
          .free_bytes = free_bytes,
          .floor_bytes = options_.free_floor_bytes};
}

IndexRecovery RocksdbTier::recovery() const {
  MutexLock lock(&mu_);
  return recovery_;
}

std::vector<GroupUse> RocksdbTier::Groups() const {
  std::vector<GroupUse> uses;
  MutexLock lock(&mu_);
  for (const auto& [number, group] : groups_) {
    uses.push_back({.group = number,
                    .file_bytes = group.file_bytes,
                    .live_bytes = group.live_bytes,
                    .table_bytes = DiskPagesBytes(group.live_table_bytes + kTableBytesFixed)});
  }
  return uses;
}

absl::Status RocksdbTier::SaveFormat(const Format& format) {
  const FormatId id = format.id();
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  formats_[id] = format.Canonical();
  return FromRocksdb("writing a format", db_->Put(rocksdb::WriteOptions(), families_[kFormats],
                                                  AsSlice(id.view()), formats_[id]));
}

absl::StatusOr<std::vector<Format>> RocksdbTier::LoadFormats() {
  std::vector<Format> formats;
  MutexLock lock(&write_mu_);
  if (db_ == nullptr) return absl::UnavailableError("the index is not open");
  const std::unique_ptr<rocksdb::Iterator> rows(
      db_->NewIterator(rocksdb::ReadOptions(), families_[kFormats]));
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    absl::StatusOr<Format> format = Format::Parse(AsView(rows->value()));
    if (!format.ok()) {
      return absl::DataLossError(
          absl::StrCat("a stored format cannot be read: ", format.status().message()));
    }
    formats.push_back(*std::move(format));
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("listing formats", rows->status()));
  return formats;
}

absl::StatusOr<Format> RocksdbTier::RecoverFormat(const FormatId& id, uint32_t group) {
  const absl::StatusOr<std::string> bytes = files_->ReadTable(group);
  const absl::StatusOr<GroupTable> table =
      bytes.ok() ? ParseGroupTable(group, *bytes) : bytes.status();
  if (table.ok() && table->formats.contains(id)) {
    const absl::StatusOr<Format> format = Format::Parse(table->formats.at(id));
    if (format.ok()) {
      OKV_RETURN_IF_ERROR(SaveFormat(*format));
      return *format;
    }
  }
  if (SaysNothing(table.status())) return table.status();
  return absl::NotFoundError(
      absl::StrCat(GroupFiles::FileName(group), " does not tell format ", id.Short()));
}

}  // namespace okv
