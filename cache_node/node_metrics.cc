#include "cache_node/node_metrics.h"

#include <map>
#include <utility>

#include "prometheus/text_serializer.h"

namespace okv {
namespace {

using prometheus::ClientMetric;
using prometheus::Counter;
using prometheus::Family;
using prometheus::Histogram;
using prometheus::MetricFamily;

// From a hit in DRAM of one small block (20 us) to a disk that is busy with something else.
const Histogram::BucketBoundaries kFetchBuckets = {2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3,
                                                   5e-3, 1e-2, 2e-2, 5e-2, 0.1,  0.5,  2};
// 230 KiB at 10 GB/s take 23 us.
const Histogram::BucketBoundaries kVerifyBuckets = {1e-5, 2e-5, 5e-5, 1e-4, 2e-4,
                                                    5e-4, 1e-3, 5e-3, 2e-2};

Family<Counter>* Counters(prometheus::Registry* registry, const char* name, const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(*registry);
}

Histogram* Seconds(prometheus::Registry* registry, const char* name, const char* help,
                   const Histogram::BucketBoundaries& buckets) {
  return &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry).Add({}, buckets);
}

using Labels = std::vector<std::pair<std::string, std::string>>;

MetricFamily Gauge(const char* name, const char* help) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = prometheus::MetricType::Gauge;
  return family;
}

void Set(MetricFamily* family, uint64_t value, const Labels& labels) {
  ClientMetric metric;
  for (const auto& [label, text] : labels) metric.label.push_back({label, text});
  metric.gauge.value = static_cast<double>(value);
  family->metric.push_back(std::move(metric));
}

MetricFamily Total(const char* name, const char* help, uint64_t value) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = prometheus::MetricType::Counter;
  ClientMetric metric;
  metric.counter.value = static_cast<double>(value);
  family.metric.push_back(std::move(metric));
  return family;
}

const char* MissReason(NodeMetrics::Miss reason) {
  return reason == NodeMetrics::Miss::kNotHeld ? "not_held" : "other_tenant";
}

const char* EvictionReason(NodeMetrics::Eviction reason) {
  switch (reason) {
    case NodeMetrics::Eviction::kDiskLimit:
      return "disk_limit";
    case NodeMetrics::Eviction::kFreeFloor:
      return "free_floor";
    case NodeMetrics::Eviction::kTenantBudget:
      return "tenant_budget";
  }
  return "";
}

const char* VerdictName(NodeMetrics::Verdict verdict) {
  switch (verdict) {
    case NodeMetrics::Verdict::kConfirmed:
      return "confirmed";
    case NodeMetrics::Verdict::kUnfounded:
      return "unfounded";
    case NodeMetrics::Verdict::kNotHeld:
      return "not_held";
    case NodeMetrics::Verdict::kNotChecked:
      return "not_checked";
  }
  return "";
}

}  // namespace

NodeMetrics::NodeMetrics()
    : hits_(Counters(&registry_, "okv_node_fetch_hits_total",
                     "Objects delivered, by the tier they came from")),
      misses_(Counters(&registry_, "okv_node_fetch_misses_total",
                       "Objects asked for that this node does not hold for the tenant")),
      failures_(Counters(&registry_, "okv_node_fetch_failures_total",
                         "Objects asked for and not delivered for another reason than a miss")),
      puts_(Counters(&registry_, "okv_node_put_total", "Objects offered, by the answer's code")),
      corrupt_(Counters(&registry_, "okv_node_corrupt_objects_total",
                        "Objects quarantined because their copy in a tier was damaged")),
      complaints_(Counters(&registry_, "okv_node_complaints_total",
                           "Complaints of readers, by what a check of this node's copies found")),
      abandoned_(&Counters(&registry_, "okv_node_blocks_abandoned_total",
                           "Blocks given up because shares of them never came")
                      ->Add({})),
      evicted_objects_(Counters(&registry_, "okv_node_evicted_objects_total",
                                "Objects that left the node to make room on disk, by reason")),
      evicted_bytes_(Counters(&registry_, "okv_node_evicted_bytes_total",
                              "Payload bytes of the objects that left the node, by reason")),
      spill_failures_(Counters(&registry_, "okv_node_spill_failures_total",
                               "Groups that the disk did not take, by the answer's code")),
      spilled_bytes_(&Counters(&registry_, "okv_node_spilled_bytes_total",
                               "Payload bytes copied from DRAM to disk")
                          ->Add({})),
      promoted_bytes_(&Counters(&registry_, "okv_node_promoted_bytes_total",
                                "Payload bytes copied from disk to DRAM and kept there")
                           ->Add({})),
      hbm_spilled_bytes_(&Counters(&registry_, "okv_node_hbm_spilled_bytes_total",
                                   "Payload bytes copied from HBM to DRAM")
                              ->Add({})),
      hbm_promoted_bytes_(&Counters(&registry_, "okv_node_hbm_promoted_bytes_total",
                                    "Payload bytes copied from DRAM to HBM")
                               ->Add({})),
      hbm_sent_bytes_(Counters(&registry_, "okv_node_hbm_sent_bytes_total",
                               "Payload bytes delivered from HBM, by the way to the reader's GPU: "
                               "cuda_ipc, rdma, staged")),
      hbm_merged_objects_(&Counters(&registry_, "okv_node_hbm_merged_objects_total",
                                    "Objects that left HBM in the transfer of another one")
                               ->Add({})),
      hbm_packed_objects_(
          &Counters(&registry_, "okv_node_hbm_packed_objects_total",
                    "Objects, or ranges of them, that were put together in HBM to leave it")
               ->Add({})),
      passed_bytes_(&Counters(&registry_, "okv_node_passed_bytes_total",
                              "Payload bytes read from disk for one use and not kept in DRAM")
                         ->Add({})),
      fetch_seconds_(Seconds(&registry_, "okv_node_fetch_seconds",
                             "From a fetch request to the end of one object's transfer",
                             kFetchBuckets)),
      verify_seconds_(Seconds(&registry_, "okv_node_verify_seconds",
                              "Verification of one object's checksums", kVerifyBuckets)) {
  // Zero is a value too: an alert on a rate needs the series before the first event.
  for (const char* tier : {"hbm", "dram", "disk"}) {
    hits_->Add({{"tier", tier}});
    corrupt_->Add({{"tier", tier}});
  }
  for (const Eviction reason :
       {Eviction::kDiskLimit, Eviction::kFreeFloor, Eviction::kTenantBudget}) {
    evicted_objects_->Add({{"reason", EvictionReason(reason)}});
    evicted_bytes_->Add({{"reason", EvictionReason(reason)}});
  }
  for (const Verdict verdict :
       {Verdict::kConfirmed, Verdict::kUnfounded, Verdict::kNotHeld, Verdict::kNotChecked}) {
    complaints_->Add({{"verdict", VerdictName(verdict)}});
  }
  for (const Miss reason : {Miss::kNotHeld, Miss::kOtherTenant}) {
    misses_->Add({{"reason", MissReason(reason)}});
  }
}

void NodeMetrics::SetSources(Sources sources) {
  MutexLock lock(&mu_);
  sources_ = std::move(sources);
}

void NodeMetrics::FetchHits(absl::string_view tier, absl::Span<const double> seconds) {
  hits_->Add({{"tier", std::string(tier)}}).Increment(static_cast<double>(seconds.size()));
  for (const double one : seconds) fetch_seconds_->Observe(one);
}

void NodeMetrics::FetchMiss(Miss reason) {
  misses_->Add({{"reason", MissReason(reason)}}).Increment();
}

void NodeMetrics::FetchFailure(absl::StatusCode code) {
  failures_->Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

void NodeMetrics::Put(absl::StatusCode code) {
  puts_->Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

void NodeMetrics::BlockAbandoned() { abandoned_->Increment(); }

void NodeMetrics::Spilled(uint64_t payload_bytes) {
  spilled_bytes_->Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::Promoted(uint64_t payload_bytes) {
  promoted_bytes_->Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::HbmSpilled(uint64_t payload_bytes) {
  hbm_spilled_bytes_->Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::HbmPromoted(uint64_t payload_bytes) {
  hbm_promoted_bytes_->Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::HbmSent(absl::string_view path, uint64_t payload_bytes) {
  hbm_sent_bytes_->Add({{"path", std::string(path)}}).Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::HbmMerged(uint64_t objects_count) {
  hbm_merged_objects_->Increment(static_cast<double>(objects_count));
}

void NodeMetrics::HbmPacked(uint64_t objects_count) {
  hbm_packed_objects_->Increment(static_cast<double>(objects_count));
}

void NodeMetrics::Passed(uint64_t payload_bytes) {
  passed_bytes_->Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::SpillFailed(absl::StatusCode code) {
  spill_failures_->Add({{"code", absl::StatusCodeToString(code)}}).Increment();
}

void NodeMetrics::Evicted(Eviction reason, uint64_t objects_count, uint64_t payload_bytes) {
  const std::map<std::string, std::string> labels = {{"reason", EvictionReason(reason)}};
  evicted_objects_->Add(labels).Increment(static_cast<double>(objects_count));
  evicted_bytes_->Add(labels).Increment(static_cast<double>(payload_bytes));
}

void NodeMetrics::Corrupt(absl::string_view tier) {
  corrupt_->Add({{"tier", std::string(tier)}}).Increment();
}

void NodeMetrics::Complained(Verdict verdict) {
  complaints_->Add({{"verdict", VerdictName(verdict)}}).Increment();
}

void NodeMetrics::Verified(double seconds) { verify_seconds_->Observe(seconds); }

std::vector<MetricFamily> NodeMetrics::Gauges() const {
  MetricFamily stored = Gauge("okv_node_stored_bytes", "Payload bytes of the objects held");
  MetricFamily logical =
      Gauge("okv_node_logical_bytes", "What the objects held would take in BF16");
  MetricFamily objects = Gauge("okv_node_objects", "Objects with a copy in a tier");
  MetricFamily used = Gauge("okv_node_tier_used_bytes", "Bytes of a tier's capacity in use");
  MetricFamily capacity = Gauge("okv_node_tier_capacity_bytes", "A tier's capacity");
  MetricFamily occupied = Gauge("okv_node_tier_occupied_bytes",
                                "What a tier takes from its medium, unreclaimed space included");
  MetricFamily free = Gauge("okv_node_disk_free_bytes", "What the disk's file system has left");
  MetricFamily floor =
      Gauge("okv_node_disk_free_floor_bytes", "Free bytes below which nothing is spilled");
  MetricFamily sessions = Gauge("okv_node_sessions", "Data-plane connections that are open");
  MetricFamily pins = Gauge("okv_node_pins", "Holds on objects by transfers and spills");
  MetricFamily claims = Gauge("okv_node_claims", "Objects that are being written");

  MutexLock lock(&mu_);
  if (sources_.table == nullptr) return {};
  const TableStats stats = sources_.table->stats();
  for (size_t i = 0; i < stats.codecs.size(); ++i) {
    const std::string codec(CodecName(kCodecs[i]));
    Set(&stored, stats.codecs[i].stored_bytes, {{"codec", codec}});
    Set(&logical, stats.codecs[i].logical_bytes, {{"codec", codec}});
    Set(&objects, stats.codecs[i].hbm_objects, {{"tier", "hbm"}, {"codec", codec}});
    Set(&objects, stats.codecs[i].dram_objects, {{"tier", "dram"}, {"codec", codec}});
    Set(&objects, stats.codecs[i].disk_objects, {{"tier", "disk"}, {"codec", codec}});
  }
  for (const Tier* tier : sources_.tiers) {
    const TierStats tier_stats = tier->stats();
    Set(&used, tier_stats.used_bytes, {{"tier", std::string(tier->name())}});
    Set(&capacity, tier_stats.capacity_bytes, {{"tier", std::string(tier->name())}});
    Set(&occupied, tier_stats.occupied_bytes, {{"tier", std::string(tier->name())}});
    if (tier->name() != "disk") continue;
    Set(&free, tier_stats.free_bytes, {});
    Set(&floor, tier_stats.floor_bytes, {});
  }
  Set(&sessions, sources_.sessions_count ? sources_.sessions_count() : 0, {});
  Set(&pins, stats.pins_count, {});
  Set(&claims, stats.claims_count, {});
  std::vector<MetricFamily> families = {stored, logical, objects,  used, capacity, occupied,
                                        free,   floor,   sessions, pins, claims};
  if (sources_.drain_report) AddDrain(sources_.drain_report(), &families);
  if (sources_.index_recovery) AddRecovery(sources_.index_recovery(), &families);
  return families;
}

void NodeMetrics::AddDrain(const std::optional<DrainReport>& report,
                           std::vector<MetricFamily>* families) {
  MetricFamily draining = Gauge("okv_node_draining",
                                "1 while this node refuses puts and copies "
                                "what only it holds to others");
  MetricFamily left =
      Gauge("okv_node_drain_left_objects", "Objects that no other node is known to hold");
  MetricFamily moved =
      Gauge("okv_node_drain_moved_bytes", "Payload bytes that this drain copied to others");
  Set(&draining, report.has_value() ? 1 : 0, {});
  Set(&left, report.has_value() ? report->objects_left : 0, {});
  Set(&moved, report.has_value() ? report->bytes_moved : 0, {});
  for (MetricFamily* family : {&draining, &left, &moved}) families->push_back(std::move(*family));
}

void NodeMetrics::AddRecovery(const IndexRecovery& recovery, std::vector<MetricFamily>* families) {
  families->push_back(Total("okv_node_index_rebuilds_total",
                            "Disk indexes that were damaged and built anew from the group files",
                            recovery.rebuilds));
  families->push_back(Total("okv_node_index_recovered_objects_total",
                            "Objects on disk that the index did not have and a group's table did",
                            recovery.objects));
  families->push_back(
      Total("okv_node_index_lost_groups_total",
            "Groups on disk that neither the index nor a table of their own tells anything of",
            recovery.groups_lost));
  families->push_back(Total("okv_node_index_lost_bytes_total", "Bytes of these groups' files",
                            recovery.group_bytes_lost));
}

std::string NodeMetrics::Text() const {
  std::vector<MetricFamily> families = registry_.Collect();
  for (MetricFamily& family : Gauges()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace okv
