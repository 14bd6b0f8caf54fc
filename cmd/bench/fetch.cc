#include "cmd/bench/fetch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cmd/bench/local_service.h"
#include "cmd/bench/object_reader.h"
#include "cmd/bench/perftest.h"
#include "cmd/bench/sample.h"
#include "proto/object.h"
#include "proto/page_layout.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint64_t kRunBytesMax = uint64_t{64} << 30;
constexpr uint32_t kRoundsMax = 1000;
constexpr uint64_t kFillBytes = uint64_t{32} << 20;  // Put at a time.
constexpr uint32_t kCachedOutstanding = 32;          // As many as a node sends a session at once.

// What the passes of one round are compared with, in bytes a second; 0: nothing.
struct RoundBaseline {
  double fastest = 0;
  double service_terms = 0;
};

// The rounds' numbers of one way of fetching.
struct RateSamples {
  std::vector<double> bytes_per_second;
  std::vector<double> ratios;
  std::vector<double> service_ratios;
  std::vector<double> request_seconds;
  std::vector<double> cpu_seconds;

  void Add(const ReadPass& pass, uint64_t bytes, const RoundBaseline& baseline) {
    bytes_per_second.push_back(static_cast<double>(bytes) / pass.seconds);
    if (baseline.fastest > 0) {
      ratios.push_back(bytes_per_second.back() / baseline.fastest);
      service_ratios.push_back(bytes_per_second.back() / baseline.service_terms);
    }
    request_seconds.insert(request_seconds.end(), pass.request_seconds.begin(),
                           pass.request_seconds.end());
    cpu_seconds.push_back(pass.cpu_seconds);
  }
  FetchRate Rate(uint64_t bytes) const {
    return {.bytes_per_second = Quantile(bytes_per_second, 0.5),
            .of_baseline = Quantile(ratios, 0.5),
            .of_service_terms = Quantile(service_ratios, 0.5),
            .request_us_p50 = 1e6 * Quantile(request_seconds, 0.5),
            .request_us_p99 = 1e6 * Quantile(request_seconds, 0.99),
            .cpu_seconds_per_gb = Quantile(cpu_seconds, 0.5) * 1e9 / static_cast<double>(bytes)};
  }
};

// One transport and block size: a service of its own, and all rounds. Thread-compatible.
class FetchRun {
 public:
  FetchRun(const FetchOptions& options, std::string tls, uint32_t layers)
      : options_(options), tls_(std::move(tls)) {
    shape_ = {.layers = layers,
              .kv_heads = options.kv_heads,
              .head_dim = options.head_dim,
              .group_size = options.group_size};
    objects_ = std::max<uint64_t>(1, options.run_bytes / shape_.block_bytes());
    bytes_ = objects_ * shape_.block_bytes();
  }

  absl::Status Run(FetchReport* report);

 private:
  absl::Status Fill(LocalService* service);
  absl::StatusOr<double> Perftest(PerftestOptions options);
  absl::StatusOr<RoundBaseline> RunBaseline();
  absl::Status CheckHeaders(const ObjectReader& reader);
  void Append(FetchReport* report) const;

  const FetchOptions& options_;
  const std::string tls_;
  BlockShape shape_;
  uint64_t objects_ = 0;
  uint64_t bytes_ = 0;
  std::unique_ptr<ScratchDirectory> directory_;
  std::unique_ptr<PayloadMemory> memory_;  // Every object's buffer.
  std::vector<FetchItem> items_;
  std::vector<double> get_;
  std::vector<double> am_;
  std::vector<double> service_terms_;
  std::vector<double> cached_am_;
  uint32_t perftests_count_ = 0;
  std::vector<std::pair<RateSamples, RateSamples>> samples_;  // [in_flight] unverified, verified.
};

absl::Status FetchRun::Fill(LocalService* service) {
  const uint64_t block_bytes = shape_.block_bytes();
  const uint64_t batch = std::max<uint64_t>(1, kFillBytes / block_bytes);
  for (uint64_t first = 0; first < objects_; first += batch) {
    const absl::Span<uint8_t> payloads =
        memory_->span().subspan(first * block_bytes, batch * block_bytes);
    FillRandom(first, payloads);
    OKV_RETURN_IF_ERROR(service->Put(first, payloads));
  }
  std::memset(memory_->span().data(), 0, bytes_);
  return absl::OkStatus();
}

absl::StatusOr<double> FetchRun::Perftest(PerftestOptions options) {
  options.program = options_.perftest;
  options.tls = tls_;
  options.output_path = directory_->Path(absl::StrCat("perftest.", perftests_count_++));
  return RunPerftest(options);
}

absl::StatusOr<RoundBaseline> FetchRun::RunBaseline() {
  if (options_.perftest.empty()) return RoundBaseline{};
  PerftestOptions options;
  options.message_bytes = bytes_;
  options.messages = 1;
  options.test = "ucp_get";
  OKV_ASSIGN_OR_RETURN(const double get, Perftest(options));
  options.test = "ucp_am_bw";
  OKV_ASSIGN_OR_RETURN(const double am, Perftest(options));
  options.service_terms = true;
  OKV_ASSIGN_OR_RETURN(const double service_terms, Perftest(options));
  options.service_terms = false;
  options.message_bytes = shape_.block_bytes();
  options.messages = objects_;
  options.outstanding = kCachedOutstanding;
  OKV_ASSIGN_OR_RETURN(const double cached, Perftest(options));
  get_.push_back(get);
  am_.push_back(am);
  service_terms_.push_back(service_terms);
  cached_am_.push_back(cached);
  return RoundBaseline{.fastest = std::max(get, am), .service_terms = service_terms};
}

// The unverified pass left what a worker's GPU would verify; here it is done after the clock.
absl::Status FetchRun::CheckHeaders(const ObjectReader& reader) {
  const PageLayout layout = {.layers_count = shape_.layers,
                             .kv_heads = shape_.kv_heads,
                             .head_dim = shape_.head_dim,
                             .group_size = shape_.group_size};
  for (size_t i = 0; i < items_.size(); ++i) {
    OKV_RETURN_IF_ERROR(VerifyObject(reader.headers()[i], layout, items_[i].buffer));
  }
  return absl::OkStatus();
}

absl::Status FetchRun::Run(FetchReport* report) {
  OKV_ASSIGN_OR_RETURN(directory_, ScratchDirectory::Create(options_.directory));
  OKV_ASSIGN_OR_RETURN(memory_, PayloadMemory::Create(bytes_));
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<LocalService> service,
                       LocalService::Start({.directory = directory_->Path("."),
                                            .shape = shape_,
                                            .tls = tls_,
                                            .objects_bytes = bytes_}));
  OKV_RETURN_IF_ERROR(service->transport()->RegisterMemory(memory_->span()));
  OKV_RETURN_IF_ERROR(Fill(service.get()));
  items_ = service->Items(0, memory_->span());
  OKV_ASSIGN_OR_RETURN(const std::unique_ptr<ObjectReader> reader,
                       ObjectReader::Create(service.get()));
  OKV_RETURN_IF_ERROR(reader->ReadVerified(items_, items_.size()).status());  // Warms up.
  samples_.resize(options_.in_flight.size());
  for (uint32_t round = 0; round < options_.rounds; ++round) {
    std::fprintf(stderr, "%s, %u objects of %u bytes: round %u of %u\n", tls_.c_str(),
                 static_cast<unsigned>(objects_), static_cast<unsigned>(shape_.block_bytes()),
                 round + 1, options_.rounds);
    OKV_ASSIGN_OR_RETURN(const RoundBaseline baseline, RunBaseline());
    for (size_t i = 0; i < options_.in_flight.size(); ++i) {
      const size_t count = options_.in_flight[i] == 0 ? items_.size() : options_.in_flight[i];
      OKV_ASSIGN_OR_RETURN(const ReadPass raw, reader->ReadUnverified(items_, count));
      samples_[i].first.Add(raw, bytes_, baseline);
      OKV_RETURN_IF_ERROR(CheckHeaders(*reader));
      OKV_ASSIGN_OR_RETURN(const ReadPass verified, reader->ReadVerified(items_, count));
      samples_[i].second.Add(verified, bytes_, baseline);
    }
  }
  Append(report);
  return absl::OkStatus();
}

void FetchRun::Append(FetchReport* report) const {
  if (!get_.empty()) {
    report->baselines.push_back({.tls = tls_,
                                 .block_bytes = shape_.block_bytes(),
                                 .get_bytes_per_second = Quantile(get_, 0.5),
                                 .am_bytes_per_second = Quantile(am_, 0.5),
                                 .service_terms_bytes_per_second = Quantile(service_terms_, 0.5),
                                 .cached_am_bytes_per_second = Quantile(cached_am_, 0.5)});
  }
  for (size_t i = 0; i < samples_.size(); ++i) {
    const uint64_t count = options_.in_flight[i] == 0 ? objects_ : options_.in_flight[i];
    report->cases.push_back({.tls = tls_,
                             .block_bytes = shape_.block_bytes(),
                             .objects = objects_,
                             .request_objects = count,
                             .unverified = samples_[i].first.Rate(bytes_),
                             .verified = samples_[i].second.Rate(bytes_)});
  }
}

nlohmann::ordered_json ToJson(const FetchRate& rate) {
  return {
      {"bytes_per_second", rate.bytes_per_second}, {"of_baseline", rate.of_baseline},
      {"of_service_terms", rate.of_service_terms}, {"request_us_p50", rate.request_us_p50},
      {"request_us_p99", rate.request_us_p99},     {"cpu_seconds_per_gb", rate.cpu_seconds_per_gb}};
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ParseCounts(absl::string_view flag, const std::string& text) {
  std::vector<uint32_t> counts;
  for (const absl::string_view word : absl::StrSplit(text, ',')) {
    uint32_t count;
    if (!absl::SimpleAtoi(word, &count)) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " '", text, "': numbers, comma-separated"));
    }
    counts.push_back(count);
  }
  return counts;
}

absl::Status FetchOptions::Validate() const {
  const auto refuse = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  if (transports.empty()) return refuse("--transports is empty");
  for (const std::string& tls : transports) {
    if (tls.empty()) return refuse("--transports names an empty list");
  }
  if (in_flight.empty()) return refuse("--in_flight is empty");
  if (layers.empty()) return refuse("--block_layers is empty");
  if (run_bytes == 0 || run_bytes > kRunBytesMax) {
    return refuse("--run_bytes ", run_bytes, ": 1 to ", kRunBytesMax);
  }
  for (const uint32_t count : layers) {
    const BlockShape shape = {
        .layers = count, .kv_heads = kv_heads, .head_dim = head_dim, .group_size = group_size};
    OKV_RETURN_IF_ERROR(shape.Validate());
    if (shape.block_bytes() > run_bytes) {
      return refuse("--run_bytes ", run_bytes, " are less than a block of ", shape.block_bytes());
    }
  }
  if (rounds == 0 || rounds > kRoundsMax) {
    return refuse("--rounds ", rounds, ": 1 to ", kRoundsMax);
  }
  return absl::OkStatus();
}

absl::StatusOr<FetchReport> RunFetch(const FetchOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  FetchReport report;
  report.run_bytes = options.run_bytes;
  report.rounds = options.rounds;
  for (const std::string& tls : options.transports) {
    for (const uint32_t layers : options.layers) {
      OKV_RETURN_IF_ERROR(FetchRun(options, tls, layers).Run(&report));
    }
  }
  return report;
}

std::string FetchReport::ToTable() const {
  std::string table = absl::StrFormat(
      "%.0f MB of distinct objects a pass, %d rounds, medians; GB/s (share of the faster of "
      "ucp_get "
      "and ucp_am_bw, of ucp_am_bw on the service's terms)\n",
      static_cast<double>(run_bytes) / 1e6, rounds);
  for (const FetchBaseline& baseline : baselines) {
    absl::StrAppendFormat(&table,
                          "%s, %d bytes: ucp_get %.2f, ucp_am_bw %.2f, on the service's terms "
                          "%.2f; one cached block, "
                          "ucp_am_bw %.2f\n",
                          baseline.tls, baseline.block_bytes, baseline.get_bytes_per_second / 1e9,
                          baseline.am_bytes_per_second / 1e9,
                          baseline.service_terms_bytes_per_second / 1e9,
                          baseline.cached_am_bytes_per_second / 1e9);
  }
  absl::StrAppendFormat(&table, "%-10s %9s %9s %18s %19s %8s %18s %19s %8s\n", "transport", "bytes",
                        "in flight", "not verified", "p50, p99 us", "CPU s/GB", "verified",
                        "p50, p99 us", "CPU s/GB");
  for (const FetchCase& one : cases) {
    absl::StrAppendFormat(&table, "%-10s %9d %9d", one.tls, one.block_bytes, one.request_objects);
    for (const FetchRate* rate : {&one.unverified, &one.verified}) {
      absl::StrAppendFormat(
          &table, " %18s %19s %8.2f",
          absl::StrFormat("%.2f (%.0f, %.0f %%)", rate->bytes_per_second / 1e9,
                          100 * rate->of_baseline, 100 * rate->of_service_terms),
          absl::StrFormat("%.0f, %.0f", rate->request_us_p50, rate->request_us_p99),
          rate->cpu_seconds_per_gb);
    }
    table += "\n";
  }
  return table;
}

std::string FetchReport::ToJson() const {
  nlohmann::ordered_json json = {
      {"command", "fetch"}, {"run_bytes", run_bytes}, {"rounds", rounds}};
  json["baselines"] = nlohmann::ordered_json::array();
  for (const FetchBaseline& baseline : baselines) {
    json["baselines"].push_back(
        {{"tls", baseline.tls},
         {"block_bytes", baseline.block_bytes},
         {"ucp_get_bytes_per_second", baseline.get_bytes_per_second},
         {"ucp_am_bw_bytes_per_second", baseline.am_bytes_per_second},
         {"service_terms_ucp_am_bw_bytes_per_second", baseline.service_terms_bytes_per_second},
         {"cached_ucp_am_bw_bytes_per_second", baseline.cached_am_bytes_per_second}});
  }
  json["cases"] = nlohmann::ordered_json::array();
  for (const FetchCase& one : cases) {
    json["cases"].push_back({{"tls", one.tls},
                             {"block_bytes", one.block_bytes},
                             {"objects", one.objects},
                             {"request_objects", one.request_objects},
                             {"unverified", okv::ToJson(one.unverified)},
                             {"verified", okv::ToJson(one.verified)}});
  }
  return json.dump();
}

}  // namespace okv
