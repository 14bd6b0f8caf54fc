#include "cmd/bench/tiers.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_node/tiers/aligned_buffer.h"
#include "cache_node/tiers/group_files.h"
#include "nlohmann/json.hpp"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

using SteadyClock = std::chrono::steady_clock;

double Seconds(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

absl::Status FromErrno(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// Runs work(0..count-1) on threads that each take the next; the first error.
absl::Status OnThreads(uint32_t threads_count, uint32_t count,
                       const std::function<absl::Status(uint32_t)>& work) {
  std::atomic<uint32_t> next{0};
  std::vector<absl::Status> ends(threads_count);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < threads_count; ++i) {
    threads.emplace_back([&, i] {
      uint32_t piece;
      while (ends[i].ok() && (piece = next++) < count) ends[i] = work(piece);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& end : ends) OKV_RETURN_IF_ERROR(end);
  return absl::OkStatus();
}

// What the disk gives without us.
absl::Status MeasureDirect(const std::string& path, uint64_t piece_bytes, uint32_t pieces,
                           uint32_t threads, TiersReport::Round* round) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
  if (fd < 0) return FromErrno("opening a file for direct I/O");
  const uint64_t stride = DiskPagesBytes(piece_bytes);
  const double bytes = static_cast<double>(piece_bytes) * pieces;
  const AlignedBuffer piece = AllocateAligned(stride);
  FillPayload(1, absl::MakeSpan(piece.get(), stride));
  absl::Status status;
  auto start = SteadyClock::now();
  for (uint32_t i = 0; i < pieces && status.ok(); ++i) {
    if (pwrite(fd, piece.get(), stride, static_cast<off_t>(i * stride)) !=
        static_cast<ssize_t>(stride)) {
      status = FromErrno("direct write");
    }
  }
  if (status.ok() && fdatasync(fd) != 0) status = FromErrno("fdatasync");
  round->write = bytes / Seconds(start);
  start = SteadyClock::now();
  if (status.ok()) {
    status = OnThreads(threads, pieces, [&](uint32_t i) {
      thread_local AlignedBuffer buffer;
      thread_local uint64_t buffer_bytes = 0;
      if (buffer_bytes < stride) {
        buffer = AllocateAligned(stride);
        buffer_bytes = stride;
      }
      return pread(fd, buffer.get(), stride, static_cast<off_t>(i * stride)) ==
                     static_cast<ssize_t>(stride)
                 ? absl::OkStatus()
                 : FromErrno("direct read");
    });
  }
  round->read = bytes / Seconds(start);
  close(fd);
  unlink(path.c_str());
  return status;
}

class Bench {
 public:
  Bench(const TiersOptions& options, Format format, std::string directory)
      : options_(options),
        format_(std::move(format)),
        format_id_(format_.id()),
        directory_(std::move(directory)) {}

  absl::StatusOr<TiersReport> Run() {
    TiersReport report;
    report.object_bytes = PageLayout::Of(format_).block_bytes(Codec::kInt2);
    report.objects = std::max<uint64_t>(options_.bytes / report.object_bytes, 1);
    report.threads = options_.threads;
    objects_ = static_cast<uint32_t>(report.objects);
    object_bytes_ = report.object_bytes;
    for (uint32_t i = 0; i < options_.rounds; ++i) {
      TiersReport::Round round;
      OKV_RETURN_IF_ERROR(
          MeasureDirect(directory_ + "/direct", object_bytes_, objects_, options_.threads, &round));
      OKV_RETURN_IF_ERROR(Spill(&round, &report.direct_io));
      OKV_RETURN_IF_ERROR(Promote(&round));
      report.rounds.push_back(round);
    }
    return report;
  }

 private:
  absl::StatusOr<std::unique_ptr<BenchStorage>> OpenStorage() {
    // Nothing spills before it is told to: the high watermark is nine tenths.
    const uint64_t dram_bytes = (objects_ + 64) * DiskPagesBytes(object_bytes_) * 10 / 8;
    return BenchStorage::Open(
        {.data_dir = directory_ + "/data", .dram_bytes = dram_bytes, .disk_bytes = dram_bytes * 4});
  }

  absl::Status Spill(TiersReport::Round* round, bool* direct_io) {
    std::filesystem::remove_all(directory_ + "/data");
    OKV_ASSIGN_OR_RETURN(std::unique_ptr<BenchStorage> opened, OpenStorage());
    BenchStorage& storage = *opened;
    OKV_RETURN_IF_ERROR(storage->formats()->Add(format_).status());
    *direct_io = storage->disk()->direct_io();
    for (uint32_t number = 0; number < objects_; ++number) {
      OKV_ASSIGN_OR_RETURN(Extent extent, storage->dram()->Allocate(object_bytes_));
      FillPayload(number, extent.span());
      ObjectRef object = BenchBlock(format_, format_id_, number, extent.span());
      OKV_ASSIGN_OR_RETURN(WriteClaim claim,
                           storage->table()->Claim(object->header.id, object->header.parent));
      ids_.push_back(object->header.id);
      storage->table()->Commit(std::move(claim), std::move(object), std::move(extent));
    }
    storage->StopSpilling();
    const auto start = SteadyClock::now();
    storage->SpillRest(600'000'000'000);
    round->spill = static_cast<double>(object_bytes_) * objects_ / Seconds(start);
    if (storage->disk()->stats().objects_count == objects_) return absl::OkStatus();
    return absl::InternalError("not everything was spilled");
  }

  absl::Status Promote(TiersReport::Round* round) {
    OKV_ASSIGN_OR_RETURN(std::unique_ptr<BenchStorage> opened, OpenStorage());
    BenchStorage& storage = *opened;
    const auto start = SteadyClock::now();
    OKV_RETURN_IF_ERROR(OnThreads(options_.threads, objects_, [&](uint32_t number) -> absl::Status {
      OKV_ASSIGN_OR_RETURN(ObjectPin pin, storage->table()->Pin(ids_[number]));
      OKV_RETURN_IF_ERROR(storage->spiller()->Load(&pin).status());
      return pin.dram().empty() ? absl::InternalError("an object was not promoted")
                                : absl::OkStatus();
    }));
    round->promote = static_cast<double>(object_bytes_) * objects_ / Seconds(start);
    ids_.clear();
    return absl::OkStatus();
  }

  const TiersOptions options_;
  const Format format_;
  const FormatId format_id_;
  const std::string directory_;
  uint64_t object_bytes_ = 0;
  uint32_t objects_ = 0;
  std::vector<ObjectId> ids_;
};

double Median(const std::vector<TiersReport::Round>& rounds, double TiersReport::Round::*field) {
  std::vector<double> values;
  for (const TiersReport::Round& round : rounds) values.push_back(round.*field);
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

}  // namespace

absl::Status TiersOptions::Validate() const {
  if (directory.empty()) return absl::InvalidArgumentError("--dir is missing");
  if (threads == 0 || rounds == 0 || bytes == 0) {
    return absl::InvalidArgumentError("--threads, --rounds and --bytes must not be 0");
  }
  return absl::OkStatus();
}

std::string TiersReport::ToTable() const {
  std::string table = absl::StrFormat(
      "%u objects of %u B a round, %u threads read, direct I/O %s; GB/s\n"
      "%-8s %8s %8s %7s %9s %8s %7s\n",
      objects, object_bytes, threads, direct_io ? "on" : "off", "round", "spill", "write", "share",
      "promote", "read", "share");
  const auto line = [&](const std::string& name, const Round& round) {
    absl::StrAppendFormat(&table, "%-8s %8.3f %8.3f %6.1f%% %9.3f %8.3f %6.1f%%\n", name,
                          round.spill * 1e-9, round.write * 1e-9, 100 * round.spill / round.write,
                          round.promote * 1e-9, round.read * 1e-9,
                          100 * round.promote / round.read);
  };
  for (size_t i = 0; i < rounds.size(); ++i) line(absl::StrCat(i + 1), rounds[i]);
  line("median", {.spill = Median(rounds, &Round::spill),
                  .write = Median(rounds, &Round::write),
                  .promote = Median(rounds, &Round::promote),
                  .read = Median(rounds, &Round::read)});
  return table;
}

std::string TiersReport::ToJson() const {
  const double spill = Median(rounds, &Round::spill);
  const double write = Median(rounds, &Round::write);
  const double promote = Median(rounds, &Round::promote);
  const double read = Median(rounds, &Round::read);
  return nlohmann::ordered_json({{"bench", "tiers"},
                                 {"object_bytes", object_bytes},
                                 {"objects", objects},
                                 {"threads", threads},
                                 {"direct_io", direct_io},
                                 {"rounds", rounds.size()},
                                 {"spill_bytes_per_s", spill},
                                 {"write_bytes_per_s", write},
                                 {"spill_share", spill / write},
                                 {"promote_bytes_per_s", promote},
                                 {"read_bytes_per_s", read},
                                 {"promote_share", promote / read}})
      .dump();
}

absl::StatusOr<TiersReport> RunTiers(const TiersOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  OKV_ASSIGN_OR_RETURN(Format format, BenchFormat(options.shape));
  const std::string directory = absl::StrCat(options.directory, "/okv-bench-tiers-", getpid());
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return absl::FailedPreconditionError(absl::StrCat("--dir: ", error.message()));
  absl::StatusOr<TiersReport> report = Bench(options, std::move(format), directory).Run();
  std::filesystem::remove_all(directory, error);
  return report;
}

}  // namespace okv
