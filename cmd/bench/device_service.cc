#include "cmd/bench/device_service.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "cmd/bench/local_service.h"
#include "cmd/bench/object_reader.h"
#include "cmd/bench/sample.h"
#include "cmd/support/files.h"
#include "proto/check.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kTokensMax = uint32_t{1} << 21;
constexpr uint32_t kRoundsMax = 1000;
constexpr uint32_t kStreamsMax = 32;
constexpr uint32_t kQueryHeadsPerKvHeadMax = 16;
// In the order in which a worker takes them.
constexpr const char* kStepNames[] = {"quantize",        "put",   "fetch, not verified", "verify",
                                      "fetch, verified", "attend"};
constexpr size_t kLogBytesMax = size_t{256} << 10;

template <class... Args>
void Progress(const absl::FormatSpec<Args...>& format, const Args&... args) {
  std::fprintf(stderr, "service: %s\n", absl::StrFormat(format, args...).c_str());
}

double GbPerS(double bytes, double seconds) { return seconds > 0 ? bytes / seconds / 1e9 : 0; }

// One way of fetching, over the rounds.
struct RateSamples {
  std::vector<double> bytes_per_second;
  std::vector<double> ratios;
  std::vector<double> request_seconds;
  std::vector<double> verify_seconds;

  void Add(const ReadPass& pass, uint64_t bytes, double peer_bytes_per_second) {
    bytes_per_second.push_back(static_cast<double>(bytes) / pass.seconds);
    if (peer_bytes_per_second > 0) {
      ratios.push_back(bytes_per_second.back() / peer_bytes_per_second);
    }
    request_seconds.insert(request_seconds.end(), pass.request_seconds.begin(),
                           pass.request_seconds.end());
  }
  ServiceFetchRate Rate() const {
    return {.first_bytes_per_second = bytes_per_second.empty() ? 0 : bytes_per_second[0],
            .bytes_per_second = Quantile(bytes_per_second, 0.5),
            .of_peer_copy = Quantile(ratios, 0.5),
            .request_us_p50 = 1e6 * Quantile(request_seconds, 0.5),
            .request_us_p99 = 1e6 * Quantile(request_seconds, 0.99),
            .verify_seconds = Quantile(verify_seconds, 0.5)};
  }
};

// Where block i of a fetch goes.
struct Order {
  const char* name;
  std::vector<uint32_t> slots;
};

// All phases, one after the other; each leaves what it measured in the report. Thread-compatible.
class ServiceRun {
 public:
  ServiceRun(const ServiceOptions& options, ServiceReport* report)
      : options_(options), report_(report) {}

  // The model and the directory: what fails here leaves nothing to report.
  absl::Status Prepare(const ServiceModelFactory& make_model);
  void RunPhases();

 private:
  absl::Status Quantize();
  absl::Status MeasurePeer();
  absl::Status StartService();
  absl::Status Put();
  absl::Status FetchAndCompare();
  absl::Status MeasureKernels();
  absl::Status MeasureFetches();

  // Rates of the peer's copies by number of streams; the fastest, 0 without a peer.
  absl::StatusOr<double> PeerRound();
  void AddPeerRates();
  absl::Status FetchPass(const Order& order, uint32_t in_flight, double peer, RateSamples* raw,
                         RateSamples* verified);
  std::vector<FetchItem> ItemsOf(const Order& order);
  void AddFetchCase(const Order& order, uint32_t in_flight, const RateSamples& raw,
                    const RateSamples& verified);
  ServiceStep* Step(const std::string& name);
  // Moves the steps that were taken into the report, beside their limits.
  void AddSteps();
  void ReadMetrics();
  void SaveLogs();
  uint64_t payload_bytes() const { return report_->block_bytes * report_->blocks; }

  const ServiceOptions& options_;
  ServiceReport* const report_;
  RotationSet rotations_;
  std::unique_ptr<ScratchDirectory> directory_;
  // Each goes before the one above: a transport before the memory that it knows.
  std::unique_ptr<ServiceModel> model_;
  std::unique_ptr<LocalService> service_;
  std::unique_ptr<ObjectReader> reader_;
  std::vector<Order> orders_;  // The last one: a pool in use.
  ServiceStep steps_[std::size(kStepNames)];
  bool has_peer_ = false;
  std::vector<std::vector<double>> peer_seconds_;  // [streams][rounds]
  std::string metrics_;                            // The node's, at the end.
  std::vector<uint8_t> output_before_;             // Of attention, over what was put.
};

absl::Status ServiceRun::Prepare(const ServiceModelFactory& make_model) {
  rotations_ = MakeHadamardSet(options_.shape);
  report_->memory = options_.memory;
  report_->gpus = options_.gpus;
  report_->shape = options_.shape;
  report_->block_bytes = options_.shape.block_bytes();
  report_->blocks = options_.blocks();
  report_->rounds = options_.rounds;
  OKV_ASSIGN_OR_RETURN(directory_, ScratchDirectory::Create(options_.directory));
  OKV_ASSIGN_OR_RETURN(model_, make_model({.shape = options_.shape,
                                           .query_heads = options_.query_heads,
                                           .blocks = options_.blocks(),
                                           .rotations = &rotations_,
                                           .gpus = options_.gpus,
                                           .seed = options_.seed}));
  report_->device = model_->device();
  std::vector<uint32_t> in_order(options_.blocks());
  std::iota(in_order.begin(), in_order.end(), 0u);
  orders_.push_back({.name = "in order", .slots = std::move(in_order)});
  orders_.push_back({.name = "random", .slots = RandomSlots(options_.blocks(), options_.seed)});
  peer_seconds_.resize(options_.streams.size());
  return absl::OkStatus();
}

void ServiceRun::RunPhases() {
  const struct {
    const char* name;
    absl::Status (ServiceRun::*run)();
  } phases[] = {{"quantize", &ServiceRun::Quantize},
                {"copies without a service", &ServiceRun::MeasurePeer},
                {"start", &ServiceRun::StartService},
                {"put", &ServiceRun::Put},
                {"fetch and compare", &ServiceRun::FetchAndCompare},
                {"kernels", &ServiceRun::MeasureKernels},
                {"fetch rounds", &ServiceRun::MeasureFetches}};
  for (const auto& phase : phases) {
    const absl::Status status = (this->*phase.run)();
    if (status.ok()) continue;
    report_->error = absl::StrCat(phase.name, ": ", status.ToString());
    Progress("error: %s", report_->error);
    break;
  }
  AddPeerRates();
  AddSteps();
  if (service_ != nullptr) ReadMetrics();
  SaveLogs();
}

ServiceStep* ServiceRun::Step(const std::string& name) {
  const auto* const place = std::find(std::begin(kStepNames), std::end(kStepNames), name);
  OKV_CHECK(place != std::end(kStepNames));
  return &steps_[place - std::begin(kStepNames)];
}

absl::Status ServiceRun::Quantize() {
  OKV_ASSIGN_OR_RETURN(const double seconds, model_->Quantize());
  ServiceStep* const quantize = Step("quantize");
  quantize->bytes = model_->quantize_bytes();
  quantize->first_seconds = seconds;
  Progress("quantize, first: %.3f ms", seconds * 1e3);
  const std::vector<uint32_t>& in_order = orders_.front().slots;
  OKV_ASSIGN_OR_RETURN(ServiceModel::AttendResult first,
                       model_->Attend(ServiceModel::Pool::kSealed, in_order));
  OKV_ASSIGN_OR_RETURN(const ServiceModel::AttendResult second,
                       model_->Attend(ServiceModel::Pool::kSealed, in_order));
  report_->attention_repeats = first.output == second.output;
  output_before_ = std::move(first.output);
  ServiceStep* const attend = Step("attend");
  attend->bytes = model_->attend_bytes();
  attend->first_seconds = first.seconds;
  Progress("attend, first: %.3f ms, twice the same: %d", first.seconds * 1e3,
           report_->attention_repeats);
  return absl::OkStatus();
}

absl::Status ServiceRun::MeasurePeer() {
  const absl::Status started = model_->StartPeer(directory_->Path("."));
  if (absl::IsUnimplemented(started)) return absl::OkStatus();
  OKV_RETURN_IF_ERROR(started);
  has_peer_ = true;
  for (uint32_t round = 0; round <= options_.rounds; ++round) {
    OKV_RETURN_IF_ERROR(PeerRound().status());
  }
  for (size_t i = 0; i < options_.streams.size(); ++i) {
    Progress("copies from another process, %d streams: %.1f GB/s", options_.streams[i],
             GbPerS(static_cast<double>(payload_bytes()), Quantile(peer_seconds_[i], 0.5)));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> ServiceRun::PeerRound() {
  if (!has_peer_) return 0.0;
  double fastest = 0;
  for (size_t i = 0; i < options_.streams.size(); ++i) {
    OKV_ASSIGN_OR_RETURN(const double seconds,
                         model_->CopyFromPeer(orders_.back().slots, options_.streams[i]));
    peer_seconds_[i].push_back(seconds);
    fastest = std::max(fastest, static_cast<double>(payload_bytes()) / seconds);
  }
  return fastest;
}

void ServiceRun::AddPeerRates() {
  const auto bytes = static_cast<double>(payload_bytes());
  for (size_t i = 0; i < peer_seconds_.size(); ++i) {
    const std::vector<double>& seconds = peer_seconds_[i];
    if (seconds.size() < 2) continue;
    report_->peer_rates.push_back(
        {.streams = options_.streams[i],
         .first_bytes_per_second = bytes / seconds[0],
         .bytes_per_second = bytes / Quantile({seconds.begin() + 1, seconds.end()}, 0.5)});
  }
}

absl::Status ServiceRun::StartService() {
  const absl::Time begin = absl::Now();
  LocalServiceOptions service = {.directory = directory_->Path("."),
                                 .shape = options_.shape,
                                 .tls = options_.tls,
                                 .objects_bytes = payload_bytes()};
  if (service.tls.empty()) service.tls = UcxTransportOptions().tls;
  if (model_->on_device()) service.gpus = options_.gpus;
  service.require_gpudirect = options_.require_gpudirect;
  OKV_ASSIGN_OR_RETURN(service_, LocalService::Start(service));
  const MemoryKind kind = model_->on_device() ? MemoryKind::kDevice : MemoryKind::kHost;
  for (const absl::Span<uint8_t> pool : {model_->sealed(), model_->fetched()}) {
    OKV_RETURN_IF_ERROR(service_->transport()->RegisterMemory(pool, kind));
  }
  OKV_ASSIGN_OR_RETURN(reader_, ObjectReader::Create(service_.get()));
  Progress("started in %.1f s", absl::ToDoubleSeconds(absl::Now() - begin));
  return absl::OkStatus();
}

absl::Status ServiceRun::Put() {
  ServiceStep* const put = Step("put");
  const uint64_t batches = std::min<uint64_t>(options_.put_batches, report_->blocks);
  std::vector<double> seconds_per_byte;
  double total_seconds = 0;
  for (uint64_t batch = 0; batch < batches; ++batch) {
    const uint64_t first = report_->blocks * batch / batches;
    const uint64_t end = report_->blocks * (batch + 1) / batches;
    const uint64_t bytes = (end - first) * report_->block_bytes;
    const absl::Time begin = absl::Now();
    OKV_RETURN_IF_ERROR(
        service_->Put(first, model_->sealed().subspan(first * report_->block_bytes, bytes)));
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
    total_seconds += seconds;
    seconds_per_byte.push_back(seconds / static_cast<double>(bytes));
    Progress("put, %d blocks: %.3f ms, %.2f GB/s", end - first, seconds * 1e3,
             GbPerS(static_cast<double>(bytes), seconds));
  }
  // All of it as it was, and as if every batch had been like the median one behind the first.
  put->bytes = payload_bytes();
  put->first_seconds = total_seconds;
  if (batches > 1) {
    put->seconds = static_cast<double>(payload_bytes()) *
                   Quantile({seconds_per_byte.begin() + 1, seconds_per_byte.end()}, 0.5);
  }
  return model_->Forget();
}

std::vector<FetchItem> ServiceRun::ItemsOf(const Order& order) {
  const uint64_t block_bytes = report_->block_bytes;
  std::vector<FetchItem> items = service_->Items(0, model_->fetched());
  for (size_t i = 0; i < items.size(); ++i) {
    items[i].buffer = model_->fetched().subspan(order.slots[i] * block_bytes, block_bytes);
  }
  return items;
}

absl::Status ServiceRun::FetchAndCompare() {
  const Order& order = orders_.back();
  const std::vector<FetchItem> items = ItemsOf(order);
  const auto done = [this](const std::string& name, double seconds) {
    ServiceStep* const step = Step(name);
    step->bytes = payload_bytes();
    step->first_seconds = seconds;
    Progress("%s, first: %.3f ms, %.2f GB/s", name, seconds * 1e3,
             GbPerS(static_cast<double>(payload_bytes()), seconds));
  };
  OKV_ASSIGN_OR_RETURN(const ReadPass raw, reader_->ReadUnverified(items, items.size()));
  done("fetch, not verified", raw.seconds);
  OKV_ASSIGN_OR_RETURN(const double verify, model_->Verify(reader_->headers(), order.slots));
  done("verify", verify);
  OKV_RETURN_IF_ERROR(model_->ClearFetched());
  OKV_ASSIGN_OR_RETURN(const ReadPass verified, reader_->ReadVerified(items, items.size()));
  done("fetch, verified", verified.seconds);
  OKV_ASSIGN_OR_RETURN(report_->different_bytes, model_->CountDifferentBytes(order.slots));
  OKV_ASSIGN_OR_RETURN(const ServiceModel::AttendResult attended,
                       model_->Attend(ServiceModel::Pool::kFetched, order.slots));
  report_->attention_equal = attended.output == output_before_;
  report_->compared = true;
  Progress("%d bytes differ, attention equal: %d", report_->different_bytes,
           report_->attention_equal);
  if (report_->different_bytes == 0 && report_->attention_equal) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(report_->different_bytes,
                                          " bytes did not come back; attention is ",
                                          report_->attention_equal ? "equal" : "not equal"));
}

absl::Status ServiceRun::MeasureKernels() {
  OKV_ASSIGN_OR_RETURN(const ServiceModelTimes times, model_->Measure(options_.rounds));
  report_->copy_bytes_per_second = times.copy_bytes_per_second;
  Step("quantize")->seconds = times.quantize_seconds;
  Step("verify")->seconds = times.verify_seconds;
  Step("attend")->seconds = times.attend_seconds;
  Progress("quantize %.3f ms, verify %.3f ms, attend %.3f ms, copy %.1f GB/s",
           times.quantize_seconds * 1e3, times.verify_seconds * 1e3, times.attend_seconds * 1e3,
           times.copy_bytes_per_second / 1e9);
  return absl::OkStatus();
}

absl::Status ServiceRun::FetchPass(const Order& order, uint32_t in_flight, double peer,
                                   RateSamples* raw, RateSamples* verified) {
  const std::vector<FetchItem> items = ItemsOf(order);
  const size_t count = in_flight == 0 ? items.size() : in_flight;
  OKV_RETURN_IF_ERROR(model_->ClearFetched());
  OKV_ASSIGN_OR_RETURN(const ReadPass raw_pass, reader_->ReadUnverified(items, count));
  raw->Add(raw_pass, payload_bytes(), peer);
  OKV_RETURN_IF_ERROR(model_->Verify(reader_->headers(), order.slots).status());
  OKV_RETURN_IF_ERROR(model_->ClearFetched());
  const uint64_t nanos_before = service_->cluster()->stats().verify_nanos;
  OKV_ASSIGN_OR_RETURN(const ReadPass verified_pass, reader_->ReadVerified(items, count));
  verified->Add(verified_pass, payload_bytes(), peer);
  const uint64_t nanos = service_->cluster()->stats().verify_nanos - nanos_before;
  verified->verify_seconds.push_back(static_cast<double>(nanos) * 1e-9);
  return model_->Verify(reader_->headers(), order.slots).status();
}

absl::Status ServiceRun::MeasureFetches() {
  for (const Order& order : orders_) {
    for (const uint32_t in_flight : options_.in_flight) {
      RateSamples raw;
      RateSamples verified;
      absl::Status status;
      for (uint32_t round = 0; round < options_.rounds && status.ok(); ++round) {
        const absl::StatusOr<double> peer = PeerRound();
        status = peer.ok() ? FetchPass(order, in_flight, *peer, &raw, &verified) : peer.status();
      }
      AddFetchCase(order, in_flight, raw, verified);  // Also what came before an error.
      OKV_RETURN_IF_ERROR(status);
    }
  }
  return absl::OkStatus();
}

void ServiceRun::AddFetchCase(const Order& order, uint32_t in_flight, const RateSamples& raw,
                              const RateSamples& verified) {
  const ServiceFetchCase one = {.order = order.name,
                                .request_objects = in_flight == 0 ? report_->blocks : in_flight,
                                .unverified = raw.Rate(),
                                .verified = verified.Rate()};
  report_->fetches.push_back(one);
  Progress("fetch %s, %d in flight: %.2f GB/s (%.0f %% of copies), verified %.2f GB/s (%.0f %%)",
           order.name, one.request_objects, one.unverified.bytes_per_second / 1e9,
           100 * one.unverified.of_peer_copy, one.verified.bytes_per_second / 1e9,
           100 * one.verified.of_peer_copy);
  // The steps' medians are those of the whole in one request to a pool in use.
  if (one.request_objects != report_->blocks || &order != &orders_.back()) return;
  const auto bytes = static_cast<double>(payload_bytes());
  if (one.unverified.bytes_per_second > 0) {
    Step("fetch, not verified")->seconds = bytes / one.unverified.bytes_per_second;
  }
  if (one.verified.bytes_per_second > 0) {
    Step("fetch, verified")->seconds = bytes / one.verified.bytes_per_second;
  }
}

void ServiceRun::AddSteps() {
  double peer = 0;
  for (const ServicePeerRate& rate : report_->peer_rates) {
    peer = std::max(peer, rate.bytes_per_second);
  }
  for (size_t i = 0; i < std::size(steps_); ++i) {
    ServiceStep& step = steps_[i];
    if (step.first_seconds == 0) continue;
    step.name = kStepNames[i];
    const bool crosses = step.name == "put" || absl::StartsWith(step.name, "fetch");
    const double rate = crosses ? peer : report_->copy_bytes_per_second;
    if (rate > 0) {
      step.limit = crosses ? "copies between processes" : "copy rate";
      step.limit_seconds = static_cast<double>(step.bytes) / rate;
    }
    report_->steps.push_back(step);
  }
}

void ServiceRun::ReadMetrics() {
  const absl::StatusOr<std::string> text = service_->NodeMetrics();
  metrics_ = text.ok() ? *text : text.status().ToString();
  for (const absl::string_view line : absl::StrSplit(metrics_, '\n')) {
    const bool of_interest =
        absl::StrContains(line, "hbm") || absl::StartsWith(line, "okv_node_fetch_hits_total");
    if (!of_interest || absl::StartsWith(line, "#") || absl::EndsWith(line, " 0")) continue;
    report_->node_metrics.emplace_back(line);
  }
}

void ServiceRun::SaveLogs() {
  if (options_.log_directory.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(options_.log_directory, error);
  const auto save = [this](const std::string& name, std::string text) {
    if (text.size() > kLogBytesMax) text.erase(0, text.size() - kLogBytesMax);
    const absl::Status status =
        WriteFileAtomically(absl::StrCat(options_.log_directory, "/", name), text);
    if (!status.ok()) Progress("%s was not kept: %s", name, status.ToString());
  };
  for (const char* name : {"control.log", "node.log", "ipc_owner.log"}) {
    const absl::StatusOr<std::string> text = ReadFile(directory_->Path(name));
    if (text.ok()) save(name, *text);
  }
  if (!metrics_.empty()) save("node.metrics", metrics_);
}

std::string ShapeText(const ServiceReport& report) {
  return absl::StrFormat("%d blocks of %d bytes (%d layers, %d KV heads, d %d, g %d), %.1f MB",
                         report.blocks, report.block_bytes, report.shape.layers,
                         report.shape.kv_heads, report.shape.head_dim, report.shape.group_size,
                         static_cast<double>(report.block_bytes * report.blocks) / 1e6);
}

nlohmann::ordered_json RateJson(const ServiceFetchRate& rate) {
  return {{"first_bytes_per_second", rate.first_bytes_per_second},
          {"bytes_per_second", rate.bytes_per_second},
          {"of_peer_copy", rate.of_peer_copy},
          {"request_us_p50", rate.request_us_p50},
          {"request_us_p99", rate.request_us_p99},
          {"verify_seconds", rate.verify_seconds}};
}

}  // namespace

absl::Status ServiceOptions::Validate() const {
  const auto refuse = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  if (tokens == 0 || tokens % kBlockTokens != 0 || tokens > kTokensMax) {
    return refuse("--service_tokens ", tokens, ": a multiple of 64 up to ", kTokensMax);
  }
  OKV_RETURN_IF_ERROR(shape.Validate());
  if (query_heads == 0 || query_heads % shape.kv_heads != 0 ||
      query_heads / shape.kv_heads > kQueryHeadsPerKvHeadMax) {
    return refuse("--query_heads ", query_heads, ": 1 to ", kQueryHeadsPerKvHeadMax,
                  " times --kv_heads");
  }
  if (in_flight.empty()) return refuse("--in_flight is empty");
  if (streams.empty()) return refuse("--streams is empty");
  for (const uint32_t count : streams) {
    if (count == 0 || count > kStreamsMax) {
      return refuse("--streams ", count, ": 1 to ", kStreamsMax);
    }
  }
  if (rounds == 0 || rounds > kRoundsMax) {
    return refuse("--rounds ", rounds, ": 1 to ", kRoundsMax);
  }
  if (put_batches == 0) return refuse("--put_batches 0: at least 1");
  return absl::OkStatus();
}

absl::StatusOr<ServiceReport> RunService(const ServiceOptions& options,
                                         const ServiceModelFactory& make_model) {
  OKV_RETURN_IF_ERROR(options.Validate());
  ServiceReport report;
  ServiceRun run(options, &report);
  OKV_RETURN_IF_ERROR(run.Prepare(make_model));
  run.RunPhases();
  return report;
}

std::string ServiceReport::ToTable() const {
  std::string table = absl::StrFormat("%s, %s memory", device, memory);
  if (memory == "device") {
    absl::StrAppendFormat(&table, ", worker on GPU %d, node on GPU %d", gpus.worker, gpus.node);
  }
  absl::StrAppendFormat(&table, "; %s, %d rounds\n", ShapeText(*this), rounds);
  for (const ServicePeerRate& rate : peer_rates) {
    absl::StrAppendFormat(
        &table, "copies between two processes, %d streams: %.1f GB/s, the first time %.1f\n",
        rate.streams, rate.bytes_per_second / 1e9, rate.first_bytes_per_second / 1e9);
  }
  absl::StrAppendFormat(&table, "%-22s %10s %10s %10s %10s %9s  %s\n", "step", "MB", "first ms",
                        "median ms", "limit ms", "share", "limit");
  for (const ServiceStep& step : steps) {
    const double seconds = step.seconds > 0 ? step.seconds : step.first_seconds;
    absl::StrAppendFormat(&table, "%-22s %10.1f %10.3f %10.3f", step.name,
                          static_cast<double>(step.bytes) / 1e6, step.first_seconds * 1e3,
                          step.seconds * 1e3);
    if (step.limit_seconds > 0) {
      absl::StrAppendFormat(&table, " %10.3f %8.1f%%  %s", step.limit_seconds * 1e3,
                            100 * step.limit_seconds / seconds, step.limit);
    }
    table += "\n";
  }
  if (copy_bytes_per_second > 0) {
    absl::StrAppendFormat(&table, "copy rate, read and written: %.0f GB/s\n",
                          copy_bytes_per_second / 1e9);
  }
  if (!fetches.empty()) {
    absl::StrAppendFormat(&table, "%-10s %9s %26s %19s %26s %19s\n", "fetch to", "in flight",
                          "not verified GB/s", "p50, p99 us", "verified GB/s", "p50, p99 us");
  }
  for (const ServiceFetchCase& one : fetches) {
    absl::StrAppendFormat(&table, "%-10s %9d", one.order, one.request_objects);
    for (const ServiceFetchRate* rate : {&one.unverified, &one.verified}) {
      absl::StrAppendFormat(
          &table, " %26s %19s",
          absl::StrCat(absl::StrFormat("%.2f", rate->bytes_per_second / 1e9),
                       rate->of_peer_copy > 0
                           ? absl::StrFormat(" (%.0f %% of copies)", 100 * rate->of_peer_copy)
                           : ""),
          absl::StrFormat("%.0f, %.0f", rate->request_us_p50, rate->request_us_p99));
    }
    table += "\n";
  }
  if (compared) {
    absl::StrAppendFormat(&table, "%d bytes differ; attention over the fetched blocks %s\n",
                          different_bytes,
                          attention_equal ? "equals that over the blocks put, bit for bit"
                                          : "DIFFERS from that over the blocks put");
  }
  if (!attention_repeats) table += "two runs of attention over the same blocks differ\n";
  for (const std::string& line : node_metrics) absl::StrAppendFormat(&table, "node: %s\n", line);
  if (!error.empty()) absl::StrAppendFormat(&table, "FAILED: %s\n", error);
  return table;
}

std::string ServiceReport::ToJson() const {
  nlohmann::ordered_json json = {{"command", "service"},
                                 {"device", device},
                                 {"memory", memory},
                                 {"worker_gpu", gpus.worker},
                                 {"node_gpu", gpus.node},
                                 {"layers", shape.layers},
                                 {"kv_heads", shape.kv_heads},
                                 {"head_dim", shape.head_dim},
                                 {"group_size", shape.group_size},
                                 {"blocks", blocks},
                                 {"block_bytes", block_bytes},
                                 {"rounds", rounds},
                                 {"copy_bytes_per_second", copy_bytes_per_second},
                                 {"compared", compared},
                                 {"different_bytes", different_bytes},
                                 {"attention_equal", attention_equal},
                                 {"attention_repeats", attention_repeats},
                                 {"node_metrics", node_metrics},
                                 {"error", error}};
  json["peer_copies"] = nlohmann::ordered_json::array();
  for (const ServicePeerRate& rate : peer_rates) {
    json["peer_copies"].push_back({{"streams", rate.streams},
                                   {"first_bytes_per_second", rate.first_bytes_per_second},
                                   {"bytes_per_second", rate.bytes_per_second}});
  }
  json["steps"] = nlohmann::ordered_json::array();
  for (const ServiceStep& step : steps) {
    json["steps"].push_back({{"name", step.name},
                             {"bytes", step.bytes},
                             {"first_seconds", step.first_seconds},
                             {"seconds", step.seconds},
                             {"limit_seconds", step.limit_seconds},
                             {"limit", step.limit}});
  }
  json["fetches"] = nlohmann::ordered_json::array();
  for (const ServiceFetchCase& one : fetches) {
    json["fetches"].push_back({{"order", one.order},
                               {"request_objects", one.request_objects},
                               {"unverified", RateJson(one.unverified)},
                               {"verified", RateJson(one.verified)}});
  }
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace okv
