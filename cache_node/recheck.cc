#include "cache_node/recheck.h"

#include <algorithm>
#include <chrono>
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
      if (jobs_.empty() && !stopping_ && !later.empty()) {
        changed_.WaitFor(&mu_, kRest);
        for (Job& waiting : std::exchange(later, {})) jobs_.push_back(std::move(waiting));
      }
      while (jobs_.empty() && !stopping_) changed_.Wait(&mu_);
      if (stopping_) break;
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
  {
    MutexLock lock(&mu_);
    for (Job& job : std::exchange(jobs_, {})) later.push_back(std::move(job));
  }
  // What waits to be put back is the only good copy.
  for (Job& job : later) {
    if (job.step == Step::kReturn && !Return(&job)) {
      parts_.log(
          absl::StrCat(job.id.Name(), " is still read from a bad copy: the good one is lost"));
    }
  }
}

bool Rechecker::Do(Job* job) {
  if (job->step == Step::kCheck) return Check(job);
  return job->step == Step::kReturn ? Return(job) : Evict(job);
}

bool Rechecker::Evict(Job* job) {
  for (bool* which : {&job->evict_hbm, &job->evict_dram}) {
    if (!*which) continue;
    absl::StatusOr<ObjectPin> pin = parts_.table->Pin(job->id);
    if (!pin.ok()) return true;
    const bool is_hbm = which == &job->evict_hbm;
    const bool gone = is_hbm ? pin->hbm().empty() || (pin->dram().empty() && !pin->on_disk())
                             : pin->dram().empty() || !pin->on_disk();
    if (!gone && (is_hbm ? parts_.table->UnpinAndEvictHbm(*std::move(pin))
                         : parts_.table->UnpinAndEvict(*std::move(pin))) == 0) {
      return false;
    }
    *which = false;
  }
  return true;
}

Rechecker::Findings Rechecker::Look(const ObjectPin& pin) const {
  const HeldObject& object = pin.object();
  Findings found = {
      .in_hbm = !pin.hbm().empty(), .in_dram = !pin.dram().empty(), .on_disk = pin.on_disk()};
  if (found.in_hbm) found.hbm = parts_.spiller->Verify(object, pin.hbm());
  if (found.in_dram) found.dram = parts_.spiller->Verify(object, pin.dram());
  if (found.on_disk) {
    const size_t bytes = object.header.payload_bytes;
    const auto buffer = std::make_unique_for_overwrite<uint8_t[]>(bytes);
    const absl::Span<uint8_t> span = absl::MakeSpan(buffer.get(), bytes);
    DiskPlace place;
    do {  // Between row and place a move looks like a file that is gone.
      place = pin.place();
      found.disk = parts_.disk->Read(object.header.id, span);
    } while (!found.disk.ok() && pin.place() != place);
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
  const bool bad_hbm = absl::IsDataLoss(found.hbm);
  const bool bad_dram = absl::IsDataLoss(found.dram);
  const bool bad_disk = absl::IsDataLoss(found.disk);
  if (!bad_hbm && !bad_dram && !bad_disk) {
    // A disk that cannot be read says nothing about its bytes.
    const bool looked = found.hbm.ok() && found.disk.ok();
    parts_.metrics->Complained(looked ? NodeMetrics::Verdict::kUnfounded
                                      : NodeMetrics::Verdict::kNotChecked);
    return true;
  }
  parts_.metrics->Complained(NodeMetrics::Verdict::kConfirmed);
  ReturnToken(job->tenant);
  if (bad_hbm) parts_.metrics->Corrupt("hbm");
  if (bad_dram) parts_.metrics->Corrupt("dram");
  if (bad_disk) parts_.metrics->Corrupt("disk");
  const bool good_hbm = found.in_hbm && found.hbm.ok();
  const bool good_dram = found.in_dram && !bad_dram;
  const bool good_disk = found.on_disk && !bad_disk;
  const absl::Status& why = bad_hbm ? found.hbm : bad_dram ? found.dram : found.disk;
  // A copy may go while a lower one is left.
  const bool lowest_is_good = found.on_disk ? good_disk : good_dram;
  if (lowest_is_good) {
    parts_.log(absl::StrCat(bad_hbm ? "dropping an HBM copy, a lower tier has another: "
                                    : "dropping a DRAM copy, the disk has another: ",
                            why.message()));
    job->step = Step::kEvict;
    job->evict_hbm = bad_hbm;
    job->evict_dram = bad_dram;
    pin->Release();
    return Do(job);
  }
  if (good_dram || good_hbm) {
    const Payload good = good_dram ? Payload{.bytes = pin->dram()} : pin->hbm();
    return Rescue(job, *std::move(pin), good, bad_disk ? found.disk : found.dram);
  }
  Quarantine(*std::move(pin), why);
  return true;
}

absl::StatusOr<Extent> Rechecker::Allocate(size_t bytes) {
  std::promise<absl::StatusOr<Extent>> room;
  parts_.spiller->Allocate(bytes, /*may_drop=*/true, [&room](absl::StatusOr<Extent> extent) {
    room.set_value(std::move(extent));
  });
  return room.get_future().get();
}

bool Rechecker::Rescue(Job* job, ObjectPin pin, const Payload& good, const absl::Status& why) {
  const size_t bytes = pin.object().header.payload_bytes;
  absl::StatusOr<Extent> extent = Allocate(bytes);
  if (!extent.ok()) {
    // It stays in memory; when it leaves it, the load that finds the bad copy quarantines it.
    parts_.log(absl::StrCat("no room to save a copy, one below it is bad: ", why.message()));
    return true;
  }
  parts_.log(absl::StrCat("dropping a bad copy, memory has another: ", why.message()));
  const absl::Status saved = GatherPieces(good, {{.offset = 0, .bytes = bytes}}, extent->span());
  if (!saved.ok()) {
    parts_.log(absl::StrCat("saving it: ", saved.message()));
    return true;
  }
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
  absl::StatusOr<WriteClaim> claim = parts_.table->Claim(job->id, job->object->header.parent);
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
  parts_.on_removed(id, why);  // Before it may be written, and reported, again.
  parts_.table->Forget(std::move(pin));
}

}  // namespace okv
