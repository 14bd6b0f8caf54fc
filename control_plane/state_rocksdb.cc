#include "control_plane/state_rocksdb.h"

#include <rocksdb/db.h>
#include <rocksdb/options.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "proto/rocksdb_log.h"

namespace okv {
namespace {

rocksdb::Slice ToSlice(absl::string_view text) { return rocksdb::Slice(text.data(), text.size()); }

// Thread-safe.
class RocksdbState final : public State {
 public:
  explicit RocksdbState(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}

  absl::Status Put(absl::string_view key, absl::string_view value) override {
    rocksdb::WriteOptions options;
    options.sync = true;
    const rocksdb::Status status = db_->Put(options, ToSlice(key), ToSlice(value));
    if (status.ok()) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("state: cannot write: ", status.ToString()));
  }

  absl::StatusOr<std::string> Get(absl::string_view key) const override {
    std::string value;
    const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), ToSlice(key), &value);
    if (status.ok()) return value;
    if (status.IsNotFound()) return absl::NotFoundError(absl::StrCat("state: no '", key, "'"));
    return absl::DataLossError(absl::StrCat("state: cannot read: ", status.ToString()));
  }

  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> List(
      absl::string_view prefix) const override {
    std::vector<std::pair<std::string, std::string>> entries;
    const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
    for (it->Seek(ToSlice(prefix)); it->Valid() && it->key().starts_with(ToSlice(prefix));
         it->Next()) {
      entries.emplace_back(it->key().ToString(), it->value().ToString());
    }
    if (it->status().ok()) return entries;
    return absl::DataLossError(absl::StrCat("state: cannot read: ", it->status().ToString()));
  }

 private:
  const std::unique_ptr<rocksdb::DB> db_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<State>> OpenRocksdbState(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("data directory '", directory, "': ", error.message()));
  }
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  options.max_open_files = 64;
  options.info_log = std::make_shared<NoRocksdbLog>();
  rocksdb::DB* db = nullptr;
  const rocksdb::Status status = rocksdb::DB::Open(options, directory, &db);
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "data directory '", directory, "' cannot be opened (not writable, or another process has ",
        "it): ", status.ToString()));
  }
  return std::make_unique<RocksdbState>(std::unique_ptr<rocksdb::DB>(db));
}

}  // namespace okv
