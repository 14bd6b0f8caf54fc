#include "cmd/bench/object_reader.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/time/clock.h"
#include "proto/mutex.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr absl::Duration kRequestTimeout = absl::Seconds(50);

// The results of one request's targets, left by the transport's thread. Thread-safe.
class Arrivals {
 public:
  Arrivals(size_t count, ObjectHeader* headers) : left_(count), headers_(headers) {}

  void Add(size_t target, absl::StatusOr<ObjectHeader> header) ABSL_LOCKS_EXCLUDED(mu_) {
    if (header.ok()) headers_[target] = *std::move(header);  // Each target has its own.
    MutexLock lock(&mu_);
    status_.Update(header.status());
    if (--left_ == 0) all_here_.SignalAll();
  }
  absl::Status Wait() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (left_ > 0) all_here_.Wait(&mu_);
    return status_;
  }

 private:
  Mutex mu_;
  CondVar all_here_;
  size_t left_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  ObjectHeader* const headers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ObjectReader>> ObjectReader::Create(LocalService* service) {
  OKV_ASSIGN_OR_RETURN(const std::string ticket, service->Ticket());
  return absl::WrapUnique(new ObjectReader(
      service,
      NodeSession::Create(service->transport(), {.address = service->node_address().data_address,
                                                 .node_id = service->node_address().node_id,
                                                 .client_name = "okv-bench",
                                                 .ticket = ticket,
                                                 .format = service->format().Canonical(),
                                                 .format_id = service->format().id()})));
}

ObjectReader::~ObjectReader() { session_->Break(absl::CancelledError("closed")); }

template <class Request>
absl::StatusOr<ReadPass> ObjectReader::Read(absl::Span<const FetchItem> items,
                                            size_t request_objects, const Request& request) {
  const auto cpu_seconds = [this]() -> absl::StatusOr<double> {
    OKV_ASSIGN_OR_RETURN(const ChildUsage node, service_->node()->Usage());
    return OwnCpuSeconds() + node.cpu_seconds;
  };
  OKV_ASSIGN_OR_RETURN(const double cpu_before, cpu_seconds());
  ReadPass pass;
  const absl::Time begin = absl::Now();
  absl::Time last = begin;
  for (size_t first = 0; first < items.size(); first += request_objects) {
    OKV_RETURN_IF_ERROR(request(items.subspan(first, request_objects), first));
    const absl::Time now = absl::Now();
    pass.request_seconds.push_back(absl::ToDoubleSeconds(now - last));
    last = now;
  }
  pass.seconds = absl::ToDoubleSeconds(last - begin);
  OKV_ASSIGN_OR_RETURN(const double cpu_after, cpu_seconds());
  pass.cpu_seconds = cpu_after - cpu_before;
  return pass;
}

absl::StatusOr<ReadPass> ObjectReader::ReadVerified(absl::Span<const FetchItem> items,
                                                    size_t request_objects) {
  return Read(
      items, request_objects, [this](absl::Span<const FetchItem> request, size_t /*first*/) {
        absl::Status all;
        for (const absl::Status& status : service_->cluster()->Fetch(request, kRequestTimeout)) {
          all.Update(status);
        }
        return all;
      });
}

absl::StatusOr<ReadPass> ObjectReader::ReadUnverified(absl::Span<const FetchItem> items,
                                                      size_t request_objects) {
  headers_.resize(items.size());
  return Read(items, request_objects, [this](absl::Span<const FetchItem> request, size_t first) {
    return FetchUnverified(request, first);
  });
}

absl::Status ObjectReader::FetchUnverified(absl::Span<const FetchItem> items, size_t first) {
  std::vector<NodeSession::FetchTarget> targets;
  for (const FetchItem& item : items) {
    targets.push_back({.id = item.id, .index = item.index, .buffer = item.buffer});
  }
  Arrivals arrivals(items.size(), headers_.data() + first);
  session_->Fetch(std::move(targets), BlockRange(), kRequestTimeout,
                  [&arrivals](size_t target, absl::StatusOr<ObjectHeader> header) {
                    arrivals.Add(target, std::move(header));
                  });
  return arrivals.Wait();
}

}  // namespace okv
