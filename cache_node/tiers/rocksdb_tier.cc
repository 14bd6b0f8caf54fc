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
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/check.h"
#include "proto/fields.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// Positions in families_ and names on disk.
enum Family : size_t { kDefault = 0, kIndex = 1, kFormats = 2, kFamiliesCount = 3 };
constexpr const char* kFamilyNames[kFamiliesCount] = {"default", "index", "formats"};
// Of the first version, which kept payloads in blob files.
constexpr absl::string_view kOldPayloadFamily = "payload";

constexpr absl::string_view kNodeIdKey = "node_id";
constexpr size_t kNodeIdBytesMax = 128;
constexpr size_t kKeyBytes = 33;  // BlockKey, codec.
constexpr size_t kTenantBytesMax = 1024;
constexpr size_t kHeaderBytesMax = size_t{1} << 20;  // 512 layers x 256 heads x 4 B, and the rest.
constexpr size_t kHeaderBytesFixed = 134;            // ObjectHeader::Encode() without checksums.
constexpr size_t kIndexBufferBytes = size_t{4} << 20;
constexpr size_t kBlockCacheBytes = size_t{32} << 20;  // Index rows and filters.
// RocksDB's logs of itself count against the limit: a few MB at most.
constexpr size_t kManifestBytesMax = size_t{1} << 20;
constexpr size_t kLogBytesMax = size_t{8} << 20;
constexpr size_t kInfoLogBytesMax = size_t{256} << 10;

// Tags of an index row, on disk: never renumber.
enum Tag : uint8_t { kTenant = 1, kHeader = 2, kPlace = 3 };
constexpr size_t kPlaceBytes = 16;  // Group u32, page u32, payload bytes u64, little-endian.
constexpr size_t kFieldBytes = 5;   // Tag and length.

rocksdb::Slice AsSlice(absl::string_view bytes) { return {bytes.data(), bytes.size()}; }
absl::string_view AsView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

std::string RowKey(const ObjectId& id) {
  std::string key(id.key.view());
  key.push_back(static_cast<char>(id.codec));
  return key;
}

size_t IndexRowBytes(const HeldObject& object) {
  return 3 * kFieldBytes + kPlaceBytes + object.tenant.size() + kHeaderBytesFixed +
         object.header.checksums.size() * 4;
}

// The place first: counting what a directory holds reads nothing else.
std::string IndexRow(const HeldObject& object, const DiskPlace& place) {
  std::string row;
  row.reserve(IndexRowBytes(object));
  std::string place_bytes;
  AppendU32(&place_bytes, place.group);
  AppendU32(&place_bytes, place.page);
  AppendU64(&place_bytes, object.header.payload_bytes);
  FieldWriter writer(&row);
  writer.Bytes(kPlace, place_bytes);
  writer.Bytes(kTenant, object.tenant);
  writer.Bytes(kHeader, object.header.Encode());
  OKV_CHECK(row.size() == IndexRowBytes(object));
  return row;
}

DiskPlace ReadPlace(FieldReader* row, uint64_t* payload_bytes) {
  FieldReader reader(row->Bytes(kPlace, kPlaceBytes));
  DiskPlace place;
  place.group = static_cast<uint32_t>(reader.Unsigned(4));
  place.page = static_cast<uint32_t>(reader.Unsigned(4));
  *payload_bytes = reader.Unsigned(8);
  return reader.done() ? place : DiskPlace{};
}

absl::StatusOr<TierRecord> ParseIndexRow(absl::string_view key, absl::string_view row) {
  FieldReader reader(row);
  uint64_t payload_bytes = 0;
  const DiskPlace place = ReadPlace(&reader, &payload_bytes);
  const absl::string_view tenant = reader.Bytes(kTenant, kTenantBytesMax);
  const absl::string_view header = reader.Bytes(kHeader, kHeaderBytesMax);
  if (!reader.done() || !place.known()) return absl::DataLossError("an index row is damaged");
  OKV_ASSIGN_OR_RETURN(ObjectHeader parsed, ObjectHeader::Decode(header));
  if (RowKey(parsed.id) != key) return absl::DataLossError("an index row has another row's key");
  if (parsed.payload_bytes != payload_bytes) {
    return absl::DataLossError("an index row has another size than its header");
  }
  return TierRecord{.header = std::move(parsed), .tenant = std::string(tenant), .place = place};
}

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

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.max_total_wal_size = kLogBytesMax;
  options.max_background_jobs = 2;
  options.keep_log_file_num = 2;
  options.max_log_file_size = kInfoLogBytesMax;
  options.max_manifest_file_size = kManifestBytesMax;
  options.allow_fallocate = false;  // What is preallocated is occupied, and not counted.
  options.info_log_level = rocksdb::WARN_LEVEL;
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
  OKV_RETURN_IF_ERROR(tier->OpenDatabase());
  OKV_RETURN_IF_ERROR(tier->AdoptNodeId());
  OKV_RETURN_IF_ERROR(tier->CountObjects());
  return tier;
}

RocksdbTier::RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<DirectoryLock> lock)
    : options_(options), lock_(std::move(lock)) {}

RocksdbTier::~RocksdbTier() {
  MutexLock lock(&write_mu_);
  CloseDatabase();
}

absl::Status RocksdbTier::OpenDatabase() {
  const std::string path = absl::StrCat(options_.data_dir, "/rocksdb");
  const std::string what = absl::StrCat("data_dir '", options_.data_dir, "'");
  std::vector<std::string> names;  // None in a new directory.
  if (rocksdb::DB::ListColumnFamilies(DatabaseOptions(), path, &names).ok()) {
    for (const std::string& name : names) {
      if (name != kOldPayloadFamily) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          what, " has the layout of the first version, payloads inside RocksDB: empty it"));
    }
  }
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(DatabaseOptions(), path, FamilyDescriptors(), &families_, &db);
  db_.reset(db);
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
  const rocksdb::Status found = db_->Get(rocksdb::ReadOptions(), AsSlice(kNodeIdKey), &node_id_);
  if (found.ok()) {
    if (options_.node_id.empty() || options_.node_id == node_id_) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("data_dir '", options_.data_dir,
                                                      "' belongs to node '", node_id_,
                                                      "', not to '", options_.node_id, "'"));
  }
  if (!found.IsNotFound()) return FromRocksdb("reading the node id", found);
  node_id_ = options_.node_id.empty() ? RandomNodeId() : options_.node_id;
  OKV_RETURN_IF_ERROR(
      FromRocksdb("writing the node id",
                  db_->Put(rocksdb::WriteOptions(), AsSlice(kNodeIdKey), AsSlice(node_id_))));
  return FlushLocked();
}

absl::StatusOr<RocksdbTier::RowUse> RocksdbTier::ParseUse(absl::string_view row) {
  RowUse use;
  FieldReader reader(row);
  use.place = ReadPlace(&reader, &use.payload_bytes);
  if (!use.place.known()) return absl::DataLossError("an index row is damaged");
  use.cost_bytes = DiskPagesBytes(use.payload_bytes) + row.size() + kKeyBytes;
  return use;
}

absl::Status RocksdbTier::CountObjects() {
  OKV_ASSIGN_OR_RETURN(const auto files, files_->List());
  rocksdb::ReadOptions options;
  options.readahead_size = size_t{4} << 20;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> rows(db_->NewIterator(options, families_[kIndex]));
  MutexLock lock(&mu_);
  groups_.clear();
  emptied_.clear();
  files_bytes_ = used_bytes_ = objects_count_ = rows_bytes_ = 0;
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    const absl::StatusOr<RowUse> use = ParseUse(AsView(rows->value()));
    if (use.ok() && files.contains(use->place.group)) CountAdded(*use);
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("counting objects", rows->status()));
  for (const auto& [group, file_bytes] : files) {
    next_group_ = std::max(next_group_, group + 1);
    const auto found = groups_.find(group);
    if (found == groups_.end()) {
      // A crash came between the file and its rows, or between the last removal and the file's.
      OKV_RETURN_IF_ERROR(files_->Delete(group));
      continue;
    }
    found->second.file_bytes = file_bytes;
    files_bytes_ += file_bytes;
  }
  index_bytes_ = IndexBytes();
  return absl::OkStatus();
}

uint64_t RocksdbTier::IndexBytes() const {
  uint64_t bytes = 0;
  std::error_code error;
  const std::string path = absl::StrCat(options_.data_dir, "/rocksdb");
  std::filesystem::directory_iterator entry(path, error);
  while (!error && entry != std::filesystem::directory_iterator()) {
    std::error_code gone;  // Compactions delete files meanwhile.
    const uintmax_t file_bytes = entry->file_size(gone);
    if (!gone) bytes += DiskPagesBytes(file_bytes);
    entry.increment(error);
  }
  return bytes;
}

uint64_t RocksdbTier::CostBytes(const HeldObject& object) const {
  return DiskPagesBytes(object.header.payload_bytes) + IndexRowBytes(object) + kKeyBytes;
}

void RocksdbTier::CountAdded(const RowUse& use) {
  Group& group = groups_[use.place.group];
  group.live_bytes += DiskPagesBytes(use.payload_bytes);
  ++group.live_objects;
  used_bytes_ += use.cost_bytes;
  ++objects_count_;
}

void RocksdbTier::CountRemoved(const RowUse& use) {
  const auto found = groups_.find(use.place.group);
  if (found == groups_.end()) return;  // A row whose file was missing at the start.
  found->second.live_bytes -= DiskPagesBytes(use.payload_bytes);
  if (--found->second.live_objects == 0) emptied_.push_back(use.place.group);
  used_bytes_ -= use.cost_bytes;
  --objects_count_;
}

uint64_t RocksdbTier::OccupiedLocked() const { return files_bytes_ + index_bytes_ + rows_bytes_; }

uint64_t RocksdbTier::RoomBytes() const {
  const uint64_t free = FreeBytes();
  const uint64_t above_floor = free - std::min(free, options_.free_floor_bytes);
  MutexLock lock(&mu_);
  return std::min(options_.disk_bytes - std::min(options_.disk_bytes, OccupiedLocked()),
                  above_floor);
}

uint64_t RocksdbTier::ShortBytes(uint64_t bytes) const {
  const auto above = [](uint64_t wanted, uint64_t have) { return wanted - std::min(wanted, have); };
  const uint64_t floor_short = above(options_.free_floor_bytes + bytes, FreeBytes());
  MutexLock lock(&mu_);
  return std::max(above(OccupiedLocked() + bytes, options_.disk_bytes), floor_short);
}

absl::Status RocksdbTier::CheckRoom(uint64_t bytes) {
  if (RoomBytes() >= bytes) return absl::OkStatus();
  if (!emptied_.empty()) OKV_RETURN_IF_ERROR(FlushLocked());
  if (RoomBytes() >= bytes) return absl::OkStatus();
  const uint64_t free = FreeBytes();
  MutexLock lock(&mu_);
  return absl::ResourceExhaustedError(
      absl::StrCat(bytes, " bytes do not fit: the disk tier occupies ", OccupiedLocked(), " of ",
                   options_.disk_bytes, " bytes, and its file system has ", free,
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
  const absl::Status opened = OpenDatabase();
  if (!opened.ok()) {
    CloseDatabase();
    return absl::UnavailableError(absl::StrCat("after a failed write: ", opened.message()));
  }
  OKV_RETURN_IF_ERROR(CountObjects());
  for (const auto& [id, canonical] : saved_formats_) {
    OKV_RETURN_IF_ERROR(FromRocksdb(
        "writing a format",
        db_->Put(rocksdb::WriteOptions(), families_[kFormats], AsSlice(id.view()), canonical)));
  }
  write_failed_ = false;
  return absl::OkStatus();
}

absl::StatusOr<RocksdbTier::RowUse> RocksdbTier::FindUse(const ObjectId& id) {
  std::string row;
  OKV_RETURN_IF_ERROR(
      FromRocksdb("looking for an object",
                  db_->Get(rocksdb::ReadOptions(), families_[kIndex], RowKey(id), &row)));
  return ParseUse(row);
}

absl::Status RocksdbTier::Put(absl::Span<const TierWrite> group) {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  for (const TierWrite& write : group) {
    const ObjectId& id = write.object->header.id;
    const absl::StatusOr<RowUse> found = FindUse(id);
    if (found.ok()) return absl::AlreadyExistsError(absl::StrCat(id.key.Short(), " is on disk"));
    if (!absl::IsNotFound(found.status())) return found.status();
  }
  return WriteGroup(group, [](size_t) { return true; }).status();
}

absl::StatusOr<std::vector<DiskPlace>> RocksdbTier::Store(absl::Span<const TierWrite> group,
                                                          const std::function<bool(size_t)>& keep) {
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  OKV_ASSIGN_OR_RETURN(std::vector<DiskPlace> places, WriteGroup(group, keep));
  // What this emptied stays until its objects' new places are known above: Flush deletes it.
  OKV_RETURN_IF_ERROR(SyncLocked());
  return places;
}

absl::StatusOr<std::vector<DiskPlace>> RocksdbTier::WriteGroup(
    absl::Span<const TierWrite> group, const std::function<bool(size_t)>& keep) {
  uint64_t bytes = 0;
  uint64_t file_bytes = 0;
  std::vector<absl::Span<const uint8_t>> payloads;
  std::vector<RowUse> moved;
  for (const TierWrite& write : group) {
    OKV_CHECK(write.payload.size() == write.object->header.payload_bytes);
    payloads.push_back(write.payload);
    bytes += CostBytes(*write.object);
    file_bytes += DiskPagesBytes(write.payload.size());
    const absl::StatusOr<RowUse> old = FindUse(write.object->header.id);
    moved.push_back(old.ok() ? *old : RowUse{});
    // A damaged row is replaced too; other errors are the disk's.
    if (absl::IsUnavailable(old.status())) return old.status();
  }
  OKV_RETURN_IF_ERROR(CheckRoom(bytes));
  const uint32_t number = next_group_++;
  absl::StatusOr<std::vector<uint32_t>> pages = absl::UnknownError("");
  std::thread writer([&] { pages = files_->Write(number, payloads); });
  std::vector<bool> kept;
  for (size_t i = 0; i < group.size(); ++i) kept.push_back(keep(i));
  writer.join();
  OKV_RETURN_IF_ERROR(pages.status());
  rocksdb::WriteBatch batch;
  std::vector<DiskPlace> places(group.size());
  for (size_t i = 0; i < group.size(); ++i) {
    if (!kept[i]) continue;
    places[i] = {.group = number, .page = (*pages)[i]};
    batch.Put(families_[kIndex], RowKey(group[i].object->header.id),
              IndexRow(*group[i].object, places[i]));
  }
  OKV_RETURN_IF_ERROR(Written("writing objects", db_->Write(rocksdb::WriteOptions(), &batch)));
  MutexLock lock(&mu_);
  groups_[number].file_bytes = file_bytes;
  files_bytes_ += file_bytes;
  rows_bytes_ += bytes - file_bytes;
  for (size_t i = 0; i < group.size(); ++i) {
    if (!kept[i]) continue;
    CountAdded({.place = places[i],
                .payload_bytes = payloads[i].size(),
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
  std::vector<uint32_t> kept;  // Those whose deletion failed: the next flush tries again.
  MutexLock lock(&mu_);
  for (const uint32_t group : emptied_) {
    if (files_->Delete(group).ok()) {
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
  RowUse use;
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
  std::vector<RowUse> removed;
  for (const ObjectId& id : ids) {
    const absl::StatusOr<RowUse> use = FindUse(id);
    if (absl::IsNotFound(use.status())) continue;
    if (!use.ok() && !absl::IsDataLoss(use.status())) return use.status();
    batch.Delete(families_[kIndex], RowKey(id));
    if (use.ok()) removed.push_back(*use);  // A damaged row was never counted.
  }
  OKV_RETURN_IF_ERROR(Written("removing objects", db_->Write(rocksdb::WriteOptions(), &batch)));
  MutexLock counts_lock(&mu_);
  for (const RowUse& use : removed) CountRemoved(use);
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
  std::vector<RowUse> uses;
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
    if (const auto use = ParseUse(AsView(rows->value())); use.ok()) uses.push_back(*use);
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("listing objects", rows->status()));
  if (damaged.Count() == 0) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(
      FromRocksdb("removing damaged rows", db_->Write(rocksdb::WriteOptions(), &damaged)));
  MutexLock counts_lock(&mu_);
  for (const RowUse& use : uses) CountRemoved(use);
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

std::vector<GroupUse> RocksdbTier::Groups() const {
  std::vector<GroupUse> uses;
  MutexLock lock(&mu_);
  for (const auto& [number, group] : groups_) {
    uses.push_back(
        {.group = number, .file_bytes = group.file_bytes, .live_bytes = group.live_bytes});
  }
  return uses;
}

absl::Status RocksdbTier::SaveFormat(const Format& format) {
  const FormatId id = format.id();
  MutexLock lock(&write_mu_);
  OKV_RETURN_IF_ERROR(ResumeWrites());
  saved_formats_[id] = format.Canonical();
  return FromRocksdb("writing a format", db_->Put(rocksdb::WriteOptions(), families_[kFormats],
                                                  AsSlice(id.view()), saved_formats_[id]));
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

}  // namespace okv
