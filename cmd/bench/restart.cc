#include "cmd/bench/restart.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cmd/bench/stored_blocks.h"
#include "nlohmann/json.hpp"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// One layer, one head of 64 channels: 2,560 B a block.
constexpr BlocksShape kSmallest = {.layers = 1, .kv_heads = 1, .head_dim = 64, .group_size = 64};
constexpr uint32_t kGroupObjects = 4096;
constexpr uint64_t kDiskBytes = uint64_t{1} << 40;
constexpr uint64_t kArenaBytes = uint64_t{1} << 20;
constexpr uint32_t kReads = 1000;

double Seconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t size_pages = 0;
  uint64_t resident_pages = 0;
  file >> size_pages >> resident_pages;
  return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Bytes of the index; the page cache lets go of them.
uint64_t ForgetIndex(const std::string& data_dir) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(data_dir + "/rocksdb")) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    bytes += entry.file_size();
  }
  return bytes;
}

absl::Status Fill(const std::string& data_dir, const Format& format, uint32_t objects) {
  OKV_ASSIGN_OR_RETURN(
      std::unique_ptr<BenchStorage> opened,
      BenchStorage::Open(
          {.data_dir = data_dir, .dram_bytes = kArenaBytes, .disk_bytes = kDiskBytes}));
  BenchStorage& storage = *opened;
  OKV_RETURN_IF_ERROR(storage->formats()->Add(format).status());
  const FormatId format_id = format.id();
  std::vector<uint8_t> payload(PageLayout::Of(format).block_bytes(Codec::kInt2));
  FillPayload(0, absl::MakeSpan(payload));
  for (uint32_t next = 0; next < objects;) {
    std::vector<TierWrite> group;
    for (; next < objects && group.size() < kGroupObjects; ++next) {
      group.push_back({.object = BenchBlock(format, format_id, next, payload), .payload = payload});
    }
    OKV_ASSIGN_OR_RETURN(const RocksdbTier::Stored stored,
                         storage->disk()->Store(group, [](size_t) { return true; }));
    OKV_RETURN_IF_ERROR(stored.synced);
  }
  return absl::OkStatus();
}

absl::Status CheckReads(BenchStorage* opened, const Format& format, RestartReport* report) {
  BenchStorage& storage = *opened;
  const FormatId format_id = format.id();
  std::vector<uint8_t> payload(report->object_bytes);
  FillPayload(0, absl::MakeSpan(payload));
  const uint32_t step = std::max<uint32_t>(report->objects / kReads, 1);
  for (uint32_t number = 0; number < report->objects; number += step) {
    const ObjectId id = BenchBlock(format, format_id, number, payload)->header.id;
    OKV_ASSIGN_OR_RETURN(ObjectPin pin, storage->table()->Pin(id));
    OKV_RETURN_IF_ERROR(storage->spiller()->Load(&pin).status());
    ++report->objects_read;
  }
  return absl::OkStatus();
}

absl::StatusOr<RestartReport> Run(const RestartOptions& options, const std::string& data_dir) {
  OKV_ASSIGN_OR_RETURN(const Format format, BenchFormat(kSmallest));
  RestartReport report;
  report.objects = options.objects;
  report.object_bytes = PageLayout::Of(format).block_bytes(Codec::kInt2);
  auto start = std::chrono::steady_clock::now();
  OKV_RETURN_IF_ERROR(Fill(data_dir, format, options.objects));
  report.fill_seconds = Seconds(start);
  report.index_bytes = static_cast<double>(ForgetIndex(data_dir)) / options.objects;
  malloc_trim(0);  // What filling left behind is no memory of the node.
  const uint64_t before_bytes = ResidentBytes();
  start = std::chrono::steady_clock::now();
  OKV_ASSIGN_OR_RETURN(
      std::unique_ptr<BenchStorage> opened,
      BenchStorage::Open(
          {.data_dir = data_dir, .dram_bytes = kArenaBytes, .disk_bytes = kDiskBytes}));
  report.open_seconds = Seconds(start);
  malloc_trim(0);
  report.memory_bytes =
      static_cast<double>(ResidentBytes() - std::min(before_bytes, ResidentBytes())) /
      options.objects;
  if ((*opened)->table()->stats().objects_count != options.objects) {
    return absl::InternalError(absl::StrCat((*opened)->table()->stats().objects_count, " of ",
                                            options.objects, " objects were adopted"));
  }
  OKV_RETURN_IF_ERROR(CheckReads(opened.get(), format, &report));
  return report;
}

}  // namespace

absl::Status RestartOptions::Validate() const {
  if (directory.empty()) return absl::InvalidArgumentError("--dir is missing");
  if (objects == 0) return absl::InvalidArgumentError("--objects must not be 0");
  return absl::OkStatus();
}

std::string RestartReport::ToTable() const {
  return absl::StrFormat(
      "%u objects of %u B written in %.1f s\n"
      "adopted in %.2f s (%.0f objects/s), %.0f B of memory and %.0f B of index each; %u read\n",
      objects, object_bytes, fill_seconds, open_seconds, objects / open_seconds, memory_bytes,
      index_bytes, objects_read);
}

std::string RestartReport::ToJson() const {
  return nlohmann::ordered_json({{"bench", "restart"},
                                 {"objects", objects},
                                 {"object_bytes", object_bytes},
                                 {"fill_seconds", fill_seconds},
                                 {"restart_seconds", open_seconds},
                                 {"memory_bytes_per_object", memory_bytes},
                                 {"index_bytes_per_object", index_bytes},
                                 {"objects_read", objects_read}})
      .dump();
}

absl::StatusOr<RestartReport> RunRestart(const RestartOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  const std::string data_dir = absl::StrCat(options.directory, "/okv-bench-restart-", getpid());
  absl::StatusOr<RestartReport> report = Run(options, data_dir);
  std::error_code error;
  std::filesystem::remove_all(data_dir, error);
  return report;
}

}  // namespace okv
