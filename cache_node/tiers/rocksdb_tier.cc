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

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
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
enum Family : size_t { kDefault = 0, kIndex = 1, kPayload = 2, kFormats = 3, kFamiliesCount = 4 };
constexpr const char* kFamilyNames[kFamiliesCount] = {"default", "index", "payload", "formats"};

constexpr absl::string_view kNodeIdKey = "node_id";
constexpr size_t kNodeIdBytesMax = 128;
constexpr size_t kKeyBytes = 33;  // BlockKey, codec.
constexpr size_t kTenantBytesMax = 1024;
constexpr size_t kHeaderBytesMax = size_t{1} << 20;  // 512 layers x 256 heads x 4 B, and the rest.
// A spill group fits one write buffer, so that one group makes one blob file.
constexpr size_t kPayloadBufferBytes = size_t{64} << 20;
constexpr size_t kSmallBufferBytes = size_t{4} << 20;
constexpr size_t kBlockCacheBytes = size_t{32} << 20;  // Index rows and filters; blobs pass it by.

// Tags of an index row, on disk: never renumber.
enum Tag : uint8_t { kTenant = 1, kHeader = 2 };

rocksdb::Slice AsSlice(absl::string_view bytes) { return {bytes.data(), bytes.size()}; }
absl::string_view AsView(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

std::string RowKey(const ObjectId& id) {
  std::string key(id.key.view());
  key.push_back(static_cast<char>(id.codec));
  return key;
}

std::string IndexRow(const HeldObject& object) {
  std::string row;
  FieldWriter writer(&row);
  writer.Bytes(kTenant, object.tenant);
  writer.Bytes(kHeader, object.header.Encode());
  return row;
}

absl::StatusOr<TierRecord> ParseIndexRow(absl::string_view key, absl::string_view row) {
  FieldReader reader(row);
  const absl::string_view tenant = reader.Bytes(kTenant, kTenantBytesMax);
  const absl::string_view header = reader.Bytes(kHeader, kHeaderBytesMax);
  if (!reader.done()) return absl::DataLossError("an index row is damaged");
  OKV_ASSIGN_OR_RETURN(ObjectHeader parsed, ObjectHeader::Decode(header));
  if (RowKey(parsed.id) != key) return absl::DataLossError("an index row has another row's key");
  return TierRecord{.header = std::move(parsed), .tenant = std::string(tenant)};
}

absl::Status FromRocksdb(absl::string_view what, const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat(what, ": ", status.ToString());
  if (status.IsNotFound()) return absl::NotFoundError(text);
  // A blob file that is gone is data that is gone.
  if (status.IsCorruption() || status.IsPathNotFound()) return absl::DataLossError(text);
  if (status.IsNoSpace() || status.subcode() == rocksdb::Status::kSpaceLimit) {
    return absl::ResourceExhaustedError(text);
  }
  if (status.IsIOError() || status.IsBusy() || status.IsTryAgain() || status.IsIncomplete()) {
    return absl::UnavailableError(text);
  }
  return absl::InternalError(text);
}

rocksdb::WriteOptions NoLog() {
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  return options;
}

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.atomic_flush = true;
  options.max_background_jobs = 2;
  options.keep_log_file_num = 2;
  options.info_log_level = rocksdb::WARN_LEVEL;
  options.stats_dump_period_sec = 0;
  return options;
}

std::vector<rocksdb::ColumnFamilyDescriptor> FamilyDescriptors() {
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
  for (size_t family = 0; family < kFamiliesCount; ++family) {
    rocksdb::ColumnFamilyOptions options;
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    options.write_buffer_size = family == kPayload ? kPayloadBufferBytes : kSmallBufferBytes;
    options.compression = rocksdb::kNoCompression;  // INT2 codes do not compress.
    if (family == kPayload) {
      options.enable_blob_files = true;
      options.min_blob_size = 0;
      options.blob_file_size = uint64_t{256} << 20;
      // Compactions then move keys only, never payloads: blob garbage collection would copy live
      // ones again and again, and one damaged blob that it meets makes the whole database read-only
      // (seen on 7.8.3). Without it a blob file goes when the last of its payloads was removed;
      // only quarantined objects are removed here.
      options.enable_blob_garbage_collection = false;
    }
    families.emplace_back(kFamilyNames[family], options);
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
  OKV_RETURN_IF_ERROR(tier->OpenDatabase());
  OKV_RETURN_IF_ERROR(tier->AdoptNodeId());
  OKV_RETURN_IF_ERROR(tier->CountObjects());
  return tier;
}

RocksdbTier::RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<DirectoryLock> lock)
    : options_(options), lock_(std::move(lock)) {}

RocksdbTier::~RocksdbTier() {
  if (db_ == nullptr) return;
  for (rocksdb::ColumnFamilyHandle* family : families_) db_->DestroyColumnFamilyHandle(family);
  db_->Close();
}

absl::Status RocksdbTier::OpenDatabase() {
  rocksdb::DB* db = nullptr;
  const std::string path = absl::StrCat(options_.data_dir, "/rocksdb");
  const rocksdb::Status status =
      rocksdb::DB::Open(DatabaseOptions(), path, FamilyDescriptors(), &families_, &db);
  db_.reset(db);
  const std::string what = absl::StrCat("data_dir '", options_.data_dir, "'");
  if (status.IsIOError()) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": ", status.ToString()));
  }
  return FromRocksdb(what, status);
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
  OKV_RETURN_IF_ERROR(FromRocksdb("writing the node id",
                                  db_->Put(NoLog(), AsSlice(kNodeIdKey), AsSlice(node_id_))));
  return Flush();
}

absl::Status RocksdbTier::CountObjects() {
  uint64_t used_bytes = 0;
  uint64_t objects_count = 0;
  OKV_RETURN_IF_ERROR(List({.object =
                                [&](TierRecord record) {
                                  const HeldObject object{.header = std::move(record.header),
                                                          .tenant = std::move(record.tenant),
                                                          .layout = {}};
                                  used_bytes += CostBytes(object);
                                  ++objects_count;
                                },
                            .corrupt = {}}));
  MutexLock lock(&mu_);
  used_bytes_ = used_bytes;
  objects_count_ = objects_count;
  return absl::OkStatus();
}

uint64_t RocksdbTier::CostBytes(const HeldObject& object) const {
  // The fixed part of ObjectHeader::Encode() is 158 B; two keys; the fields of the index row.
  return object.header.payload_bytes + object.header.checksums.size() * 4 + 158 + 2 * kKeyBytes +
         object.tenant.size() + 10;
}

absl::Status RocksdbTier::CheckRoom(absl::Span<const TierWrite> group) {
  uint64_t bytes = 0;
  std::string row;
  for (const TierWrite& write : group) {
    const ObjectId& id = write.object->header.id;
    bytes += CostBytes(*write.object);
    const rocksdb::Status found =
        db_->Get(rocksdb::ReadOptions(), families_[kIndex], RowKey(id), &row);
    if (found.ok()) return absl::AlreadyExistsError(absl::StrCat(id.key.Short(), " is on disk"));
    if (!found.IsNotFound()) return FromRocksdb("looking for an object", found);
  }
  MutexLock lock(&mu_);
  if (used_bytes_ + bytes > options_.disk_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the disk tier has ", used_bytes_, " of ",
                                                     options_.disk_bytes, " bytes in use, and ",
                                                     bytes, " more do not fit"));
  }
  return absl::OkStatus();
}

absl::Status RocksdbTier::ResumeWrites() {
  MutexLock lock(&mu_);
  if (!write_failed_) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(FromRocksdb("resuming after a failed write", db_->Resume()));
  write_failed_ = false;
  return absl::OkStatus();
}

absl::Status RocksdbTier::Put(absl::Span<const TierWrite> group) {
  OKV_RETURN_IF_ERROR(CheckRoom(group));
  OKV_RETURN_IF_ERROR(ResumeWrites());
  rocksdb::WriteBatch batch;
  uint64_t bytes = 0;
  for (const TierWrite& write : group) {
    OKV_CHECK(write.payload.size() == write.object->header.payload_bytes);
    const std::string key = RowKey(write.object->header.id);
    batch.Put(families_[kIndex], key, IndexRow(*write.object));
    batch.Put(
        families_[kPayload], key,
        rocksdb::Slice(reinterpret_cast<const char*>(write.payload.data()), write.payload.size()));
    bytes += CostBytes(*write.object);
  }
  const absl::Status status = FromRocksdb("writing objects", db_->Write(NoLog(), &batch));
  MutexLock lock(&mu_);
  if (!status.ok()) {
    write_failed_ = true;
    return status;
  }
  used_bytes_ += bytes;
  objects_count_ += group.size();
  return absl::OkStatus();
}

absl::Status RocksdbTier::Flush() {
  OKV_RETURN_IF_ERROR(ResumeWrites());
  const absl::Status status =
      FromRocksdb("flushing objects", db_->Flush(rocksdb::FlushOptions(), families_));
  if (!status.ok()) {
    MutexLock lock(&mu_);
    write_failed_ = true;
  }
  return status;
}

absl::Status RocksdbTier::Read(const ObjectId& id, absl::Span<uint8_t> buffer) {
  rocksdb::ReadOptions options;
  options.verify_checksums = true;
  rocksdb::PinnableSlice payload;
  const rocksdb::Status status = db_->Get(options, families_[kPayload], RowKey(id), &payload);
  OKV_RETURN_IF_ERROR(FromRocksdb(absl::StrCat("reading ", id.key.Short()), status));
  if (payload.size() != buffer.size()) {
    return absl::DataLossError(
        absl::StrCat(id.key.Short(), ": ", payload.size(), " bytes on disk, not ", buffer.size()));
  }
  std::memcpy(buffer.data(), payload.data(), payload.size());
  return absl::OkStatus();
}

absl::Status RocksdbTier::Remove(const ObjectId& id) {
  const std::string key = RowKey(id);
  std::string row;
  const rocksdb::Status found = db_->Get(rocksdb::ReadOptions(), families_[kIndex], key, &row);
  if (found.IsNotFound()) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(FromRocksdb("removing an object", found));
  rocksdb::WriteBatch batch;
  batch.Delete(families_[kIndex], key);
  batch.Delete(families_[kPayload], key);
  OKV_RETURN_IF_ERROR(FromRocksdb("removing an object", db_->Write(NoLog(), &batch)));
  absl::StatusOr<TierRecord> record = ParseIndexRow(key, row);
  if (!record.ok()) return absl::OkStatus();  // It was never counted.
  const HeldObject object{
      .header = std::move(record->header), .tenant = std::move(record->tenant), .layout = {}};
  MutexLock lock(&mu_);
  used_bytes_ -= CostBytes(object);
  --objects_count_;
  return absl::OkStatus();
}

absl::Status RocksdbTier::List(const Listing& listing) {
  rocksdb::ReadOptions options;
  options.readahead_size = size_t{4} << 20;
  options.fill_cache = false;
  rocksdb::WriteBatch damaged;
  const std::unique_ptr<rocksdb::Iterator> rows(db_->NewIterator(options, families_[kIndex]));
  for (rows->SeekToFirst(); rows->Valid(); rows->Next()) {
    absl::StatusOr<TierRecord> record = ParseIndexRow(AsView(rows->key()), AsView(rows->value()));
    if (record.ok()) {
      listing.object(std::move(*record));
      continue;
    }
    if (listing.corrupt) listing.corrupt(record.status());
    if (!absl::IsDataLoss(record.status()) || !listing.corrupt) continue;
    damaged.Delete(families_[kIndex], rows->key());
    damaged.Delete(families_[kPayload], rows->key());
  }
  OKV_RETURN_IF_ERROR(FromRocksdb("listing objects", rows->status()));
  if (damaged.Count() == 0) return absl::OkStatus();
  return FromRocksdb("removing damaged rows", db_->Write(NoLog(), &damaged));
}

TierStats RocksdbTier::stats() const {
  MutexLock lock(&mu_);
  return {.capacity_bytes = options_.disk_bytes,
          .used_bytes = used_bytes_,
          .objects_count = objects_count_};
}

absl::Status RocksdbTier::SaveFormat(const Format& format) {
  const FormatId id = format.id();
  return FromRocksdb("writing a format", db_->Put(NoLog(), families_[kFormats], AsSlice(id.view()),
                                                  format.Canonical()));
}

absl::StatusOr<std::vector<Format>> RocksdbTier::LoadFormats() {
  std::vector<Format> formats;
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
