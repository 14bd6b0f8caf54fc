#include "cmd/bench/peer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cmd/bench/child.h"
#include "cmd/bench/local_service.h"
#include "cmd/bench/mooncake.h"
#include "cmd/bench/sample.h"
#include "cmd/support/files.h"
#include "proto/format.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

constexpr uint32_t kTokensMax = 1 << 20;
constexpr uint32_t kRoundsMax = 1000;
constexpr absl::Duration kRequestTimeout = absl::Seconds(50);

BlockShape ShapeOf(const PeerOptions& options) {
  return {.layers = options.layers,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .group_size = options.group_size};
}

// This service's rounds. Thread-compatible.
class OwnRounds {
 public:
  OwnRounds(const PeerOptions& options, LocalService* service)
      : options_(options), service_(service), blocks_(options.tokens / kBlockTokens) {}

  absl::Status Prepare();
  // Puts and gets new blocks, and compares all bytes.
  absl::StatusOr<PeerRound> Run();

 private:
  struct Phase {
    std::vector<double> request_seconds;
    double cpu_seconds = 0;
  };
  absl::StatusOr<Phase> Time(
      const std::function<absl::Status(uint64_t first, uint64_t count)>& request);
  absl::StatusOr<double> CpuSeconds() const;

  const PeerOptions& options_;
  LocalService* const service_;
  const uint64_t blocks_;
  uint64_t next_block_ = 0;
  std::unique_ptr<PayloadMemory> source_;
  std::unique_ptr<PayloadMemory> target_;
};

absl::Status OwnRounds::Prepare() {
  for (auto* memory : {&source_, &target_}) {
    OKV_ASSIGN_OR_RETURN(*memory, PayloadMemory::Create(blocks_ * service_->block_bytes()));
    OKV_RETURN_IF_ERROR(service_->transport()->RegisterMemory((*memory)->span()));
  }
  FillRandom(1, source_->span());
  return absl::OkStatus();
}

absl::StatusOr<double> OwnRounds::CpuSeconds() const {
  OKV_ASSIGN_OR_RETURN(const ChildUsage node, service_->node()->Usage());
  OKV_ASSIGN_OR_RETURN(const ChildUsage control, service_->control()->Usage());
  return OwnCpuSeconds() + node.cpu_seconds + control.cpu_seconds;
}

absl::StatusOr<OwnRounds::Phase> OwnRounds::Time(
    const std::function<absl::Status(uint64_t first, uint64_t count)>& request) {
  Phase phase;
  OKV_ASSIGN_OR_RETURN(const double cpu, CpuSeconds());
  for (uint64_t first = 0; first < blocks_; first += options_.request_blocks) {
    const absl::Time begin = absl::Now();
    OKV_RETURN_IF_ERROR(
        request(first, std::min<uint64_t>(options_.request_blocks, blocks_ - first)));
    phase.request_seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
  }
  OKV_ASSIGN_OR_RETURN(const double cpu_after, CpuSeconds());
  phase.cpu_seconds = cpu_after - cpu;
  return phase;
}

absl::StatusOr<PeerRound> OwnRounds::Run() {
  const uint64_t bytes = service_->block_bytes();
  const uint64_t round_first = next_block_;
  next_block_ += blocks_;
  for (uint64_t i = 0; i < blocks_; ++i) {  // Every block of every round is another one.
    const uint64_t number = round_first + i;
    std::memcpy(source_->span().data() + i * bytes, &number, sizeof(number));
  }
  OKV_ASSIGN_OR_RETURN(Phase put, Time([&](uint64_t first, uint64_t count) {
                         return service_->Put(
                             round_first + first,
                             source_->span().subspan(first * bytes, count * bytes));
                       }));
  std::memset(target_->span().data(), 0, blocks_ * bytes);
  OKV_ASSIGN_OR_RETURN(
      Phase get, Time([&](uint64_t first, uint64_t count) {
        absl::Status all;
        const std::vector<FetchItem> items = service_->Items(
            round_first + first, target_->span().subspan(first * bytes, count * bytes));
        for (const absl::Status& status : service_->cluster()->Fetch(items, kRequestTimeout)) {
          all.Update(status);
        }
        return all;
      }));
  if (std::memcmp(source_->span().data(), target_->span().data(), blocks_ * bytes) != 0) {
    return absl::DataLossError("other bytes came back than were put");
  }
  return PeerRound{.put_request_seconds = std::move(put.request_seconds),
                   .get_request_seconds = std::move(get.request_seconds),
                   .put_cpu_seconds = put.cpu_seconds,
                   .get_cpu_seconds = get.cpu_seconds};
}

// The rounds' numbers of one store.
struct PeerSamples {
  struct Direction {
    std::vector<double> tokens_per_second;
    std::vector<double> request_seconds;
    std::vector<double> cpu_seconds;

    void Add(const std::vector<double>& requests, double cpu, uint32_t tokens) {
      const double seconds = std::accumulate(requests.begin(), requests.end(), 0.0);
      tokens_per_second.push_back(tokens / seconds);
      request_seconds.insert(request_seconds.end(), requests.begin(), requests.end());
      cpu_seconds.push_back(cpu);
    }
    PeerPhase Phase(uint32_t tokens) const {
      return {.tokens_per_second = Quantile(tokens_per_second, 0.5),
              .request_ms_p50 = 1e3 * Quantile(request_seconds, 0.5),
              .request_ms_p99 = 1e3 * Quantile(request_seconds, 0.99),
              .cpu_seconds_per_million_tokens = 1e6 * Quantile(cpu_seconds, 0.5) / tokens};
    }
  };
  Direction put;
  Direction get;

  void Add(const PeerRound& round, uint32_t tokens) {
    put.Add(round.put_request_seconds, round.put_cpu_seconds, tokens);
    get.Add(round.get_request_seconds, round.get_cpu_seconds, tokens);
  }
};

nlohmann::ordered_json ToJson(const PeerPhase& phase) {
  return {{"tokens_per_second", phase.tokens_per_second},
          {"request_ms_p50", phase.request_ms_p50},
          {"request_ms_p99", phase.request_ms_p99},
          {"cpu_seconds_per_million_tokens", phase.cpu_seconds_per_million_tokens}};
}

}  // namespace

absl::Status PeerOptions::Validate() const {
  const auto refuse = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(what...));
  };
  if (python.empty()) {
    return refuse("--mooncake_python is missing: the Python of an environment with ",
                  "mooncake-transfer-engine-non-cuda");
  }
  if (!ReadFile(script).ok()) return refuse("--mooncake_script '", script, "' cannot be read");
  if (tokens == 0 || tokens % kBlockTokens != 0 || tokens > kTokensMax) {
    return refuse("--peer_tokens ", tokens, ": a multiple of ", kBlockTokens, ", at most ",
                  kTokensMax);
  }
  if (request_blocks == 0) return refuse("--request_blocks is 0");
  if (rounds == 0 || rounds > kRoundsMax) return refuse("--rounds ", rounds, ": 1 to ", kRoundsMax);
  return ShapeOf(*this).Validate();
}

absl::StatusOr<PeerReport> RunPeer(const PeerOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  const BlockShape shape = ShapeOf(options);
  const uint64_t blocks = options.tokens / kBlockTokens;
  OKV_ASSIGN_OR_RETURN(const auto own_directory, ScratchDirectory::Create(options.directory));
  OKV_ASSIGN_OR_RETURN(const auto mooncake_directory, ScratchDirectory::Create(options.directory));
  OKV_ASSIGN_OR_RETURN(
      const auto service,
      LocalService::Start({.directory = own_directory->Path("."),
                           .shape = shape,
                           .tls = UcxTransportOptions().tls,
                           .objects_bytes = blocks * shape.block_bytes() * (options.rounds + 1)}));
  OwnRounds own(options, service.get());
  OKV_RETURN_IF_ERROR(own.Prepare());
  OKV_ASSIGN_OR_RETURN(const auto mooncake,
                       Mooncake::Start({.python = options.python,
                                        .script = options.script,
                                        .directory = mooncake_directory->Path("."),
                                        .blocks = blocks,
                                        .block_bytes = shape.bf16_bytes(),
                                        .request_blocks = options.request_blocks}));
  PeerSamples own_samples;
  PeerSamples mooncake_samples;
  for (uint32_t round = 0; round <= options.rounds; ++round) {
    std::fprintf(stderr, "round %u of %u\n", round, options.rounds);
    OKV_ASSIGN_OR_RETURN(const PeerRound ours, own.Run());
    OKV_ASSIGN_OR_RETURN(const PeerRound theirs, mooncake->Run());
    if (round == 0) continue;  // Their memory's first touch; ours is touched at start.
    own_samples.Add(ours, options.tokens);
    mooncake_samples.Add(theirs, options.tokens);
  }
  OKV_ASSIGN_OR_RETURN(const ChildUsage node, service->node()->Usage());
  OKV_ASSIGN_OR_RETURN(const uint64_t store_rss, mooncake->StoreRssBytes());
  PeerReport report;
  report.tokens = options.tokens;
  report.request_blocks = options.request_blocks;
  report.rounds = options.rounds;
  const auto append = [&](const char* name, uint64_t block_bytes, const PeerSamples& samples,
                          uint64_t rss_bytes, double held_tokens) {
    report.results.push_back(
        {.name = name,
         .block_bytes = block_bytes,
         .put = samples.put.Phase(options.tokens),
         .get = samples.get.Phase(options.tokens),
         .rss_bytes_per_million_tokens = 1e6 * static_cast<double>(rss_bytes) / held_tokens});
  };
  // Nothing takes a block away here; a round there ends with an empty store whose memory stays.
  append("OscarKV, INT2", shape.block_bytes(), own_samples, node.rss_bytes,
         static_cast<double>(options.tokens) * (options.rounds + 1));
  append("Mooncake, BF16", shape.bf16_bytes(), mooncake_samples, store_rss, options.tokens);
  return report;
}

std::string PeerReport::ToTable() const {
  std::string table = absl::StrFormat(
      "%d tokens a round, %d blocks a request, medians of %d rounds\n%-16s %8s %22s %16s %8s %22s "
      "%16s %8s %12s\n",
      tokens, request_blocks, rounds, "store", "bytes", "put tokens/s (GB/s)", "p50, p99 ms",
      "CPU s/M", "got tokens/s (GB/s)", "p50, p99 ms", "CPU s/M", "RSS GB/M");
  for (const PeerResult& result : results) {
    absl::StrAppendFormat(&table, "%-16s %8d", result.name, result.block_bytes);
    for (const PeerPhase* phase : {&result.put, &result.get}) {
      const double bytes_per_second =
          phase->tokens_per_second / kBlockTokens * static_cast<double>(result.block_bytes);
      absl::StrAppendFormat(
          &table, " %22s %16s %8.2f",
          absl::StrFormat("%.0f (%.2f)", phase->tokens_per_second, bytes_per_second / 1e9),
          absl::StrFormat("%.1f, %.1f", phase->request_ms_p50, phase->request_ms_p99),
          phase->cpu_seconds_per_million_tokens);
    }
    absl::StrAppendFormat(&table, " %12.1f\n", result.rss_bytes_per_million_tokens / 1e9);
  }
  return table;
}

std::string PeerReport::ToJson() const {
  nlohmann::ordered_json json = {{"command", "peer"},
                                 {"tokens", tokens},
                                 {"request_blocks", request_blocks},
                                 {"rounds", rounds}};
  json["results"] = nlohmann::ordered_json::array();
  for (const PeerResult& result : results) {
    json["results"].push_back(
        {{"name", result.name},
         {"block_bytes", result.block_bytes},
         {"put", okv::ToJson(result.put)},
         {"get", okv::ToJson(result.get)},
         {"rss_bytes_per_million_tokens", result.rss_bytes_per_million_tokens}});
  }
  return json.dump();
}

}  // namespace okv
