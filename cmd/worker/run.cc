#include "cmd/worker/run.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cluster.h"
#include "client/metrics_server.h"
#include "client/prefix.h"
#include "client/transport/address.h"
#include "client/transport/transport.h"
#include "cmd/engine/model.h"
#include "cmd/engine/sampler.h"
#include "cmd/engine/tokenizer.h"
#include "cmd/support/files.h"
#include "cmd/support/kv.h"
#include "cmd/worker/metrics.h"
#include "proto/sha256.h"
#include "proto/status_macros.h"

namespace okv {
namespace {

// SHA-256 of a sequence of pieces: the hash of their hashes.
class PieceHash {
 public:
  void Add(absl::string_view piece) {
    const std::array<uint8_t, 32> digest = Sha256(piece);
    digests_.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  }
  std::string Hex() const {
    const std::array<uint8_t, 32> digest = Sha256(digests_);
    return absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  }

 private:
  std::string digests_;
};

// What one run holds, from the model to the session. Members go in reverse order.
struct Worker {
  explicit Worker(size_t threads_count) : pool(threads_count) {}

  ThreadPool pool;
  std::unique_ptr<Model> model;
  RotationSet rotations;
  Format format;
  std::unique_ptr<DriftMonitor> drift;
  std::unique_ptr<DriftMetrics> metrics;
  ClusterMetrics cluster_metrics;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Cluster> cluster;
  std::unique_ptr<MetricsServer> metrics_server;  // Looks at both.
  std::unique_ptr<Sequence> sequence;
  std::vector<uint32_t> tokens;  // The prompt, then what was generated.
};

ClusterOptions MakeClusterOptions(const RunOptions& options) {
  return {.control_address = options.control,
          .tenant = options.tenant,
          .client_name = absl::StrCat("okv-worker-", getpid()),
          .connect_timeout = options.connect_timeout};
}

absl::StatusOr<RotationSet> LoadRotations(const RunOptions& options) {
  std::string raw;
  if (options.rotation.size() != 64 || options.control.empty() ||
      options.rotation.find_first_not_of("0123456789abcdef") != std::string::npos) {
    return ReadRotationFile(options.rotation);
  }
  OKV_ASSIGN_OR_RETURN(const RotationHash hash,
                       RotationHash::FromBytes(absl::HexStringToBytes(options.rotation)));
  return Cluster::GetRotation(MakeClusterOptions(options), hash);
}

absl::StatusOr<std::vector<uint32_t>> MakePrompt(const RunOptions& options,
                                                 const Tokenizer& tokenizer) {
  std::vector<uint32_t> tokens;
  if (!options.prompt_file.empty()) {
    OKV_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.prompt_file));
    tokens = tokenizer.Encode(text);
    if (options.prompt_tokens > tokens.size()) {
      return absl::InvalidArgumentError(absl::StrCat("--prompt_tokens ", options.prompt_tokens,
                                                     ", but '", options.prompt_file, "' has only ",
                                                     tokens.size()));
    }
    if (options.prompt_tokens > 0) tokens.resize(options.prompt_tokens);
  }
  for (const uint32_t token : tokenizer.Encode(options.ending)) tokens.push_back(token);
  for (const uint32_t token : options.ending_tokens) tokens.push_back(token);
  if (tokens.empty()) return absl::InvalidArgumentError("the prompt is empty");
  return tokens;
}

// Counts what is demoted and shows it on --metrics. The address is printed at once: the run may be
// long, and the port any free one.
absl::Status StartMetrics(const RunOptions& options, Worker* worker) {
  worker->drift = std::make_unique<DriftMonitor>(
      &worker->rotations, DriftOptions{.rows_per_sample = options.drift_rows_per_sample});
  if (options.metrics.empty()) return absl::OkStatus();
  worker->metrics =
      std::make_unique<DriftMetrics>(worker->drift.get(), worker->format.rotation_hash);
  OKV_ASSIGN_OR_RETURN(worker->metrics_server, MetricsServer::Start(options.metrics, [worker] {
                         return absl::StrCat(worker->metrics->Text(),
                                             worker->cluster_metrics.Text());
                       }));
  std::printf("okv-worker metrics on %s\n", worker->metrics_server->address().c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status OpenSequence(const RunOptions& options, Worker* worker) {
  SequenceOptions sequence =
      MakeSequenceOptions(worker->model->config(), worker->format,
                          static_cast<uint32_t>(worker->tokens.size()) + options.max_new_tokens);
  sequence.drift = worker->drift.get();
  // Another prompt shows other rows; the same one always the same.
  const std::array<uint8_t, 32> digest =
      Sha256(absl::string_view(reinterpret_cast<const char*>(worker->tokens.data()),
                               worker->tokens.size() * sizeof(uint32_t)));
  std::memcpy(&sequence.drift_salt, digest.data(), sizeof(sequence.drift_salt));
  OKV_ASSIGN_OR_RETURN(worker->sequence,
                       Sequence::Create(sequence, &worker->rotations, &worker->pool));
  return absl::OkStatus();
}

absl::Status OpenCluster(const RunOptions& options, Worker* worker) {
  OKV_ASSIGN_OR_RETURN(
      worker->transport,
      CreateUcxTransport({.tls = options.ucx_tls, .require_rdma = options.require_rdma}));
  OKV_ASSIGN_OR_RETURN(worker->cluster, Cluster::Connect(MakeClusterOptions(options),
                                                         worker->format, worker->transport.get()));
  worker->cluster_metrics.Watch(worker->cluster.get());
  return absl::OkStatus();
}

absl::Status Resume(const RunOptions& options, Worker* worker, RunReport* report) {
  const absl::Time start = absl::Now();
  OKV_ASSIGN_OR_RETURN(const ResumeResult resumed,
                       ResumePrefix(worker->cluster.get(), worker->sequence.get(), worker->tokens,
                                    options.deadline));
  report->lookup_fetch_s = absl::ToDoubleSeconds(absl::Now() - start);
  report->hit_tokens = resumed.hit_tokens;
  report->fetched_objects = resumed.fetched_objects;
  report->fetched_bytes = resumed.fetched_bytes;
  if (resumed.hit_tokens == 0) {
    report->miss_reason =
        resumed.fetch_status.ok() ? "no resume point is held" : resumed.fetch_status.ToString();
  }
  return absl::OkStatus();
}

void AddFailures(const StoreResult& stored, RunReport* report) {
  for (const absl::Status& failure : stored.failures) {
    report->store_failures.push_back(failure.ToString());
  }
}

void AddStored(const PageLayout& layout, const StoreResult& stored, RunReport* report) {
  const uint32_t objects = stored.stored_objects + stored.present_objects;
  const uint64_t bf16_block = layout.block_bytes(Codec::kBf16);
  report->stored_objects += objects;
  report->stored_bytes += stored.stored_bytes;
  report->bf16_bytes += objects * bf16_block;
  report->history_bytes += stored.int2_bytes;
  report->history_bf16_bytes += stored.int2_objects * bf16_block;
  AddFailures(stored, report);
}

// Hashes what a finished (or just prefilled) sequence would store.
absl::Status HashObjects(const Worker& worker, bool whole, PieceHash* hash) {
  const uint32_t full_blocks = worker.sequence->full_blocks();
  const uint32_t boundary =
      whole ? full_blocks : static_cast<uint32_t>((worker.tokens.size() - 1) / kBlockTokens);
  for (const PlannedObject& object :
       PlanStore(worker.format, BlockIndex(boundary), whole, full_blocks)) {
    OKV_ASSIGN_OR_RETURN(const std::vector<uint8_t> payload, MakePayload(*worker.sequence, object));
    hash->Add(absl::string_view(reinterpret_cast<const char*>(payload.data()), payload.size()));
  }
  return absl::OkStatus();
}

absl::Status StorePromptObjects(const RunOptions& options, Worker* worker,
                                const std::string& write_group, RunReport* report) {
  if (!options.store) return absl::OkStatus();
  AddStored(worker->sequence->layout(),
            StorePrompt(worker->cluster.get(), *worker->sequence, worker->tokens, write_group,
                        options.deadline),
            report);
  return absl::OkStatus();
}

// Prefill from hit_tokens on, then sampling: fills the report's timings, tokens and logits hash.
absl::Status Generate(const RunOptions& options, Worker* worker, const std::string& write_group,
                      absl::Time start, RunReport* report, PieceHash* objects) {
  SequenceCache cache(worker->sequence.get());
  Sampler sampler({.temperature = options.temperature,
                   .top_k = options.top_k,
                   .top_p = options.top_p,
                   .seed = options.seed});
  PieceHash logits_hash;
  std::vector<uint32_t> feed(worker->tokens.begin() + report->hit_tokens, worker->tokens.end());
  absl::Time first_token;
  for (uint32_t step = 0; step < options.max_new_tokens; ++step) {
    OKV_ASSIGN_OR_RETURN(const std::vector<float> logits,
                         worker->model->Forward(feed, &cache, options.prefill_chunk));
    logits_hash.Add(absl::string_view(reinterpret_cast<const char*>(logits.data()),
                                      logits.size() * sizeof(float)));
    const uint32_t token = sampler.Sample(logits);
    if (step == 0) {
      first_token = absl::Now();
      report->ttft_s = absl::ToDoubleSeconds(first_token - start);
      OKV_RETURN_IF_ERROR(StorePromptObjects(options, worker, write_group, report));
      OKV_RETURN_IF_ERROR(HashObjects(*worker, /*whole=*/false, objects));
      first_token = absl::Now();
    }
    report->tokens.push_back(token);
    worker->tokens.push_back(token);
    if (token == worker->model->tokenizer().eos_token()) break;
    feed = {token};
  }
  report->decode_s = absl::ToDoubleSeconds(absl::Now() - first_token);
  report->logits_sha256 = logits_hash.Hex();
  report->text = worker->model->tokenizer().Decode(report->tokens);
  return absl::OkStatus();
}

}  // namespace

absl::Status RunOptions::Validate() const {
  if (model.empty()) return absl::InvalidArgumentError("--model is missing");
  if (rotation.empty()) return absl::InvalidArgumentError("--rotation is missing");
  if (max_new_tokens == 0) return absl::InvalidArgumentError("--max_new_tokens must be positive");
  OKV_RETURN_IF_ERROR(ValidateThreads(threads));
  if (prefill_chunk == 0) return absl::InvalidArgumentError("--prefill_chunk must be positive");
  if (!(temperature >= 0)) return absl::InvalidArgumentError("--temperature may not be negative");
  if (!(top_p > 0) || top_p > 1) return absl::InvalidArgumentError("--top_p must be in (0, 1]");
  if ((store || store_finished) && control.empty()) {
    return absl::InvalidArgumentError("--store and --store_finished need --control");
  }
  return metrics.empty() ? absl::OkStatus() : CheckLoopback("metrics", metrics);
}

absl::StatusOr<RunReport> RunWorker(const RunOptions& options) {
  OKV_RETURN_IF_ERROR(options.Validate());
  Worker worker(options.threads != 0 ? options.threads
                                     : std::max(1u, std::thread::hardware_concurrency()));
  OKV_ASSIGN_OR_RETURN(worker.model, Model::Load(options.model, &worker.pool));
  const ModelConfig& config = worker.model->config();
  OKV_ASSIGN_OR_RETURN(worker.rotations, LoadRotations(options));
  worker.format =
      MakeFormat(config, worker.rotations,
                 {.sink_tokens = options.sink_tokens, .recent_tokens = options.recent_tokens});
  OKV_RETURN_IF_ERROR(StartMetrics(options, &worker));
  OKV_ASSIGN_OR_RETURN(worker.tokens, MakePrompt(options, worker.model->tokenizer()));
  const uint32_t prompt_tokens = static_cast<uint32_t>(worker.tokens.size());
  if (uint64_t{prompt_tokens} + options.max_new_tokens > config.context_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a prompt of ", prompt_tokens, " tokens and --max_new_tokens ", options.max_new_tokens,
        " exceed the model's context of ", config.context_tokens));
  }
  OKV_RETURN_IF_ERROR(OpenSequence(options, &worker));
  if (!options.control.empty()) OKV_RETURN_IF_ERROR(OpenCluster(options, &worker));

  RunReport report;
  report.rotation_hash = worker.format.rotation_hash.Hex();
  report.format_id = worker.format.id().Hex();
  report.prompt_tokens = prompt_tokens;
  const std::string write_group =
      absl::StrCat("okv-worker-", getpid(), "-", absl::Hex(std::random_device{}()));
  const absl::Time start = absl::Now();
  if (worker.cluster != nullptr) OKV_RETURN_IF_ERROR(Resume(options, &worker, &report));
  PieceHash objects;
  OKV_RETURN_IF_ERROR(Generate(options, &worker, write_group, start, &report, &objects));
  OKV_RETURN_IF_ERROR(HashObjects(worker, /*whole=*/true, &objects));
  report.objects_sha256 = objects.Hex();
  report.drift = worker.drift->Stats();
  if (options.store_finished) {
    const StoreResult stored = StoreFinished(worker.cluster.get(), *worker.sequence, worker.tokens,
                                             write_group, options.deadline);
    report.finished_objects = stored.stored_objects + stored.present_objects;
    report.finished_bytes = stored.stored_bytes;
    AddFailures(stored, &report);
  }
  return report;
}

namespace {

// The layers that have sampled rows, K and V apart.
nlohmann::json DriftJson(const DriftStats& stats) {
  nlohmann::json json = nlohmann::json::array();
  for (const DriftLayer& layer : stats.layers) {
    for (const bool is_value : {false, true}) {
      const DriftTensor& sums = is_value ? layer.v : layer.k;
      if (sums.rows == 0) continue;
      json.push_back({{"layer", layer.layer_id},
                      {"tensor", is_value ? "v" : "k"},
                      {"sampled_rows", sums.rows},
                      {"sampled_elements", sums.elements},
                      {"clipped_elements", sums.clipped_elements},
                      {"squared_error", sums.squared_error},
                      {"squared_norm", sums.squared_norm}});
      if (sums.promised_error.has_value()) json.back()["promised_error"] = *sums.promised_error;
    }
  }
  return json;
}

}  // namespace

std::string RunReport::ToJson() const {
  const nlohmann::json json = {{"rotation_hash", rotation_hash},
                               {"format_id", format_id},
                               {"prompt_tokens", prompt_tokens},
                               {"hit_tokens", hit_tokens},
                               {"miss_reason", miss_reason},
                               {"fetched_objects", fetched_objects},
                               {"fetched_bytes", fetched_bytes},
                               {"lookup_fetch_s", lookup_fetch_s},
                               {"stored_objects", stored_objects},
                               {"stored_bytes", stored_bytes},
                               {"bf16_bytes", bf16_bytes},
                               {"history_bytes", history_bytes},
                               {"history_bf16_bytes", history_bf16_bytes},
                               {"finished_objects", finished_objects},
                               {"finished_bytes", finished_bytes},
                               {"store_failures", store_failures},
                               {"ttft_s", ttft_s},
                               {"decode_s", decode_s},
                               {"tokens", tokens},
                               {"text", text},
                               {"logits_sha256", logits_sha256},
                               {"objects_sha256", objects_sha256},
                               {"drift", DriftJson(drift)}};
  // Generated bytes may end inside a UTF-8 character.
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace okv
