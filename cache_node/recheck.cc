#include "cache_node/recheck.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/object.h"

namespace okv {
namespace {

// Between two tries of what waits for readers to leave.
constexpr std::chrono::milliseconds kRest(10);
// Buckets of tenants that have not complained for long are dropped beyond so many.
constexpr size_t kBucketsMax = 1024;

}  // namespace

Rechecker::Rechecker(const RecheckerOptions& options, Parts parts)
    : options_(options), parts_(std::move(parts)) {
  thread_ = std::thread([this] { Run(); });
}

Rechecker::~Rechecker() { Stop(); }

void Rechecker::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

bool Rechecker::TakeToken(const std::string& tenant) {
  const int64_t now_nanos = parts_.clock->NowNanos();
  const double max = options_.complaints_max;
  const auto left_now = [&](const Bucket& bucket) {
    return std::min(max, bucket.left + static_cast<double>(now_nanos - bucket.at_nanos) /
                                           static_cast<double>(options_.refill_nanos));
  };
  if (buckets_.size() >= kBucketsMax && !buckets_.contains(tenant)) {
    absl::erase_if(buckets_, [&](const auto& entry) { return left_now(entry.second) >= max; });
    if (buckets_.size() >= kBucketsMax) return false;
  }
  Bucket& bucket =
      buckets_.try_emplace(tenant, Bucket{.left = max, .at_nanos = now_nanos}).first->second;
  bucket = {.left = left_now(bucket), .at_nanos = now_nanos};
  if (bucket.left < 1) return false;
  bucket.left -= 1;
  return true;
}

void Rechecker::ReturnToken(const std::string& tenant) {
  MutexLock lock(&mu_);
  if (const auto found = buckets_.find(tenant); found != buckets_.end()) found->second.left += 1;
}

void Rechecker::Complain(const std::string& tenant, const ObjectId& id) {
  {
    MutexLock lock(&mu_);
    if (!stopping_ && jobs_.size() < options_.queue_max && !queued_.contains(id) &&
        TakeToken(tenant)) {
      queued_.insert(id);
      jobs_.push_back({.id = id, .tenant = tenant});
      changed_.SignalAll();
      return;
    }
  }
  parts_.metrics->Complained(NodeMetrics::Verdict::kNotChecked);
}

void Rechecker::Run() {
  std::deque<Job> later;
  while (true) {
    Job job;
    {
      MutexLock lock(&mu_);
      if (jobs_.empty() && !stopping_ && !later.empty()) changed_.WaitFor(&mu_, kRest);
      while (jobs_.empty() && later.empty() && !stopping_) changed_.Wait(&mu_);
      if (stopping_) return;
      for (Job& waiting : std::exchange(later, {})) jobs_.push_back(std::move(waiting));
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    if (!Do(&job)) {
      later.push_back(std::move(job));
      continue;
    }
    MutexLock lock(&mu_);
    queued_.erase(job.id);
  }
}

bool Rechecker::Do(Job* job) {
  if (job->step == Step::kCheck) return Check(job);
  if (job->step == Step::kReturn) return Return(job);
  absl::StatusOr<ObjectPin> pin = parts_.table->Pin(job->id);
  return !pin.ok() || pin->dram().empty() || !pin->on_disk() ||
         parts_.table->UnpinAndEvict(*std::move(pin)) > 0;
}

Rechecker::Findings Rechecker::Look(const ObjectPin& pin) const {
  const HeldObject& object = pin.object();
  Findings found = {.in_dram = !pin.dram().empty(), .on_disk = pin.on_disk()};
  if (found.in_dram) found.dram = parts_.spiller->Verify(object, pin.dram());
  if (found.on_disk) {
    const size_t bytes = object.header.payload_bytes;
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    const absl::Span<uint8_t> span = absl::MakeSpan(buffer.get(), bytes);
    found.disk = parts_.disk->Read(object.header.id, span);
    if (found.disk.ok()) found.disk = parts_.spiller->Verify(object, span);
    // The table knew it.
    if (absl::IsNotFound(found.disk)) found.disk = absl::DataLossError(found.disk.message());
  }
  return found;
}

bool Rechecker::Check(Job* job) {
  absl::StatusOr<ObjectPin> pin = parts_.table->Pin(job->id);
  if (!pin.ok() || pin->object().tenant != job->tenant) {
    parts_.metrics->Complained(NodeMetrics::Verdict::kNotHeld);
    return true;
  }
  const Findings found = Look(*pin);
  const bool bad_dram = absl::IsDataLoss(found.dram);
  const bool bad_disk = absl::IsDataLoss(found.disk);
  if (!bad_dram && !bad_disk) {
    // A disk that cannot be read says nothing about its bytes.
    parts_.metrics->Complained(found.disk.ok() ? NodeMetrics::Verdict::kUnfounded
                                               : NodeMetrics::Verdict::kNotChecked);
    return true;
  }
  parts_.metrics->Complained(NodeMetrics::Verdict::kConfirmed);
  ReturnToken(job->tenant);
  if (bad_dram) parts_.metrics->Corrupt("dram");
  if (bad_disk) parts_.metrics->Corrupt("disk");
  const bool good_dram = found.in_dram && !bad_dram;
  if (bad_dram && found.on_disk && !bad_disk) {
    parts_.log(absl::StrCat("dropping a DRAM copy, the disk has another: ", found.dram.message()));
    job->step = Step::kEvict;
    pin->Release();
    return Do(job);
  }
  if (bad_disk && good_dram) return DropDiskCopy(job, *std::move(pin), found.disk);
  Quarantine(*std::move(pin), bad_dram ? found.dram : found.disk);
  return true;
}

absl::StatusOr<Extent> Rechecker::Allocate(size_t bytes) {
  std::promise<absl::StatusOr<Extent>> room;
  parts_.spiller->Allocate(
      bytes, [&room](absl::StatusOr<Extent> extent) { room.set_value(std::move(extent)); });
  return room.get_future().get();
}

bool Rechecker::DropDiskCopy(Job* job, ObjectPin pin, const absl::Status& why) {
  absl::StatusOr<Extent> extent = Allocate(pin.object().header.payload_bytes);
  if (!extent.ok()) {
    // It stays in DRAM; when it leaves it, the load that finds the bad copy quarantines it.
    parts_.log(absl::StrCat("no room to save a copy whose disk copy is bad: ", why.message()));
    return true;
  }
  parts_.log(absl::StrCat("dropping a disk copy, DRAM has another: ", why.message()));
  const absl::Span<const uint8_t> payload = pin.dram();
  std::memcpy(extent->span().data(), payload.data(), payload.size());
  job->object = pin.object_ref();
  job->extent = *std::move(extent);
  job->step = Step::kReturn;
  if (!parts_.table->Doom(pin)) return true;  // Somebody else found it bad.
  const absl::Status removed = parts_.disk->Remove(job->id);
  if (!removed.ok()) parts_.log(absl::StrCat("removing it: ", removed.message()));
  parts_.table->Forget(std::move(pin));
  return Do(job);
}

bool Rechecker::Return(Job* job) {
  absl::StatusOr<WriteClaim> claim = parts_.table->Claim(job->id);
  if (absl::IsAborted(claim.status())) return false;  // Readers still hold the old entry.
  if (claim.ok()) {
    parts_.table->Commit(*std::move(claim), job->object, std::move(job->extent));
  }
  return true;
}

void Rechecker::Quarantine(ObjectPin pin, const absl::Status& why) {
  if (!parts_.table->Doom(pin)) return;
  const ObjectId id = pin.id();
  // A removal that fails leaves a row that a restart finds damaged again.
  const absl::Status removed = parts_.disk->Remove(id);
  if (!removed.ok()) parts_.log(absl::StrCat("removing ", id.Name(), ": ", removed.message()));
  parts_.table->Forget(std::move(pin));
  parts_.on_removed(id, why);
}

}  // namespace okv
