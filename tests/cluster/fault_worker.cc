#include "tests/cluster/fault_worker.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/okv.h"
#include "proto/check.h"
#include "proto/clock.h"
#include "tests/cluster/fault_data.h"

namespace okv::faults {
namespace {

using Json = nlohmann::json;

// Between two tries of something that another process must change first.
void Pause(int ms) { poll(nullptr, 0, ms); }

std::vector<BlockName> Blocks(const Json& flat) {
  std::vector<BlockName> blocks;
  for (size_t i = 0; i + 1 < flat.size(); i += 2) {
    blocks.push_back({.chain = flat[i].get<uint32_t>(), .index = flat[i + 1].get<uint32_t>()});
  }
  return blocks;
}

// How far `call` ran past the deadline it was given.
template <typename Call>
auto Timed(absl::Duration deadline, int64_t* overrun_ms, const Call& call) {
  const absl::Time start = absl::Now();
  auto result = call();
  *overrun_ms = std::max(*overrun_ms, absl::ToInt64Milliseconds(absl::Now() - start - deadline));
  return result;
}

bool MayRepeat(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status) ||
         absl::IsAborted(status) || absl::IsDeadlineExceeded(status);
}

// Owned by the process's main thread.
class Worker {
 public:
  Worker(const WorkerOptions& options, Cluster* cluster)
      : keys_(cluster->tenant_salt()),
        cluster_(cluster),
        journal_fd_(
            open(options.journal.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600)) {
    OKV_CHECK(journal_fd_ >= 0);
  }
  ~Worker() { close(journal_fd_); }

  Json Do(const Json& command) {
    const std::string op = command.value("op", "");
    if (op == "put") return Put(command);
    if (op == "fetch") return Fetch(command);
    if (op == "lookup") return Lookup(command);
    if (op == "kept") return Kept();
    return {{"error", "unknown op"}};
  }

 private:
  // A line is one write: a killed worker leaves none by half, and none it did not get to.
  void Journal(const std::string& line) {
    OKV_CHECK(write(journal_fd_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }

  Json Put(const Json& command) {
    const std::vector<BlockName> blocks = Blocks(command["blocks"]);
    const absl::Time end = absl::Now() + absl::Milliseconds(command["deadline_ms"].get<int>());
    const size_t batch = command["batch"].get<size_t>();
    std::map<std::string, int> codes;
    int64_t overrun_ms = 0;
    for (size_t begin = 0; begin < blocks.size(); begin += batch) {
      const size_t count = std::min(batch, blocks.size() - begin);
      PutBatch({blocks.begin() + static_cast<ptrdiff_t>(begin),
                blocks.begin() + static_cast<ptrdiff_t>(begin + count)},
               command, end, &codes, &overrun_ms);
    }
    return {{"codes", codes}, {"overrun_ms", overrun_ms}};
  }

  void PutBatch(std::vector<BlockName> blocks, const Json& command, absl::Time end,
                std::map<std::string, int>* codes, int64_t* overrun_ms) {
    const uint64_t nonce = command["nonce"].get<uint64_t>();
    while (!blocks.empty() && absl::Now() < end) {
      std::vector<std::vector<uint8_t>> payloads;
      std::vector<PutItem> items;
      std::string attempts;
      const int64_t now_nanos = Clock::System()->NowNanos();
      for (const BlockName& block : blocks) {
        const ObjectId id = keys_.Id(block);
        payloads.emplace_back(layout_.block_bytes(id.codec));
        FillPattern(id, layout_, nonce, absl::MakeSpan(payloads.back()));
        items.push_back({.id = id,
                         .index = BlockIndex(block.index),
                         .parent = keys_.Parent(block),
                         .payload = payloads.back()});
        absl::StrAppend(&attempts, "T ", now_nanos, " 0 ", block.chain, " ", block.index, " ",
                        nonce, "\n");
      }
      Journal(attempts);
      const absl::Duration left = std::max(end - absl::Now(), absl::Milliseconds(1));
      const absl::Duration deadline = std::min(left, absl::Seconds(5));
      const std::vector<absl::Status> statuses = Timed(deadline, overrun_ms, [&] {
        return cluster_->Put(items, command["group"].get<std::string>(), deadline);
      });
      std::vector<BlockName> again;
      for (size_t i = 0; i < statuses.size(); ++i) {
        if (statuses[i].ok()) {
          Journal(absl::StrCat("A ", now_nanos, " ", Clock::System()->NowNanos(), " ",
                               blocks[i].chain, " ", blocks[i].index, " ", nonce, "\n"));
        }
        if (MayRepeat(statuses[i]) && absl::Now() + absl::Milliseconds(20) < end) {
          again.push_back(blocks[i]);
          continue;
        }
        ++(*codes)[absl::StatusCodeToString(statuses[i].code())];
        if (!statuses[i].ok() && !absl::IsAlreadyExists(statuses[i])) {
          std::fprintf(stderr, "put %u/%u: %s\n", blocks[i].chain, blocks[i].index,
                       statuses[i].ToString().c_str());
        }
      }
      blocks = std::move(again);
      if (!blocks.empty()) Pause(10);
    }
    if (!blocks.empty()) (*codes)["DEADLINE_EXCEEDED"] += static_cast<int>(blocks.size());
  }

  // Fetches into fresh buffers: [code, nonce, wrong bytes] for each block.
  Json FetchItems(const std::vector<BlockName>& blocks, std::vector<FetchItem> items,
                  absl::Duration deadline, bool keep, int64_t* overrun_ms) {
    std::vector<std::vector<uint8_t>> buffers;
    for (size_t i = 0; i < blocks.size(); ++i) {
      buffers.emplace_back(layout_.block_bytes(blocks[i].codec()));
      items[i].id = keys_.Id(blocks[i]);
      items[i].index = BlockIndex(blocks[i].index);
      items[i].buffer = absl::MakeSpan(buffers.back());
    }
    const std::vector<absl::Status> statuses =
        Timed(deadline, overrun_ms, [&] { return cluster_->Fetch(items, deadline); });
    Json results = Json::array();
    for (size_t i = 0; i < statuses.size(); ++i) {
      PatternCheck check;
      if (statuses[i].ok()) {
        check = CheckPattern(items[i].id, layout_, items[i].buffer);
      } else if (!absl::IsNotFound(statuses[i])) {
        std::fprintf(stderr, "fetch %u/%u: %s\n", blocks[i].chain, blocks[i].index,
                     statuses[i].ToString().c_str());
      }
      results.push_back({static_cast<int>(statuses[i].code()), check.nonce, check.wrong_bytes});
    }
    if (keep) {
      for (std::vector<uint8_t>& buffer : buffers) {
        std::fill(buffer.begin(), buffer.end(), kPoison);
        kept_.push_back(std::move(buffer));
      }
    }
    return results;
  }

  Json Fetch(const Json& command) {
    const std::vector<BlockName> blocks = Blocks(command["blocks"]);
    std::vector<FetchItem> items(blocks.size());
    for (size_t i = 0; i < items.size(); ++i) {
      for (const size_t number : command["where"][i]) {
        const Json& node = command["nodes"][number];
        items[i].nodes.push_back({.node_id = node[0], .data_address = node[1]});
      }
    }
    int64_t overrun_ms = 0;
    Json results =
        FetchItems(blocks, std::move(items), absl::Milliseconds(command["deadline_ms"].get<int>()),
                   command.value("keep", false), &overrun_ms);
    return {{"results", std::move(results)}, {"overrun_ms", overrun_ms}};
  }

  Json Lookup(const Json& command) {
    const uint32_t chain = command["chain"].get<uint32_t>();
    const absl::Duration deadline = absl::Milliseconds(command["deadline_ms"].get<int>());
    const std::vector<BlockKey> keys = keys_.Chain(chain, command["blocks_count"].get<uint32_t>());
    int64_t overrun_ms = 0;
    const absl::StatusOr<LookupResult> found =
        Timed(deadline, &overrun_ms, [&] { return cluster_->Lookup(keys, deadline); });
    if (!found.ok()) {
      return {{"code", static_cast<int>(found.status().code())}, {"overrun_ms", overrun_ms}};
    }
    std::vector<BlockName> blocks;
    std::vector<FetchItem> items;
    Json homes = Json::array();
    for (uint32_t i = 0; i < found->prefix_blocks; ++i) {
      blocks.push_back({.chain = chain, .index = i});
      FetchItem item;
      const LookupResult::Locations& where = found->blocks[i];
      for (const uint32_t node : i == 0 ? where.bf16_nodes : where.int2_nodes) {
        item.nodes.push_back(found->nodes[node]);
      }
      homes.push_back(item.nodes.empty() ? "" : item.nodes[0].node_id);
      items.push_back(std::move(item));
    }
    Json results = Json::array();
    if (command.value("fetch", true)) {
      results = FetchItems(blocks, std::move(items), deadline, /*keep=*/false, &overrun_ms);
    }
    return {{"code", 0},
            {"prefix", found->prefix_blocks},
            {"homes", std::move(homes)},
            {"results", std::move(results)},
            {"overrun_ms", overrun_ms}};
  }

  Json Kept() {
    uint64_t changed_bytes = 0;
    for (const std::vector<uint8_t>& buffer : kept_) {
      for (const uint8_t byte : buffer) changed_bytes += byte != kPoison;
    }
    const size_t buffers_count = kept_.size();
    kept_.clear();
    return {{"changed_bytes", changed_bytes}, {"buffers", buffers_count}};
  }

  const PageLayout layout_ = PageLayout::Of(FaultFormat());
  BlockKeys keys_;
  Cluster* const cluster_;
  const int journal_fd_;
  std::vector<std::vector<uint8_t>> kept_;
};

void Answer(const Json& answer) {
  std::printf("%s\n", answer.dump().c_str());
  std::fflush(stdout);
}

}  // namespace

int RunWorker(const WorkerOptions& options) {
  signal(SIGPIPE, SIG_IGN);
  absl::StatusOr<std::unique_ptr<Transport>> transport = CreateUcxTransport({});
  ClusterOptions cluster_options;
  cluster_options.control_address = options.control_address;
  cluster_options.client_name = options.name;
  cluster_options.connect_timeout = absl::Seconds(30);
  absl::Status status = transport.status();
  if (status.ok()) {
    status = Cluster::PublishRotation(cluster_options, FaultRotations()).status();
  }
  absl::StatusOr<std::unique_ptr<Cluster>> cluster = absl::UnavailableError(status.message());
  if (status.ok()) cluster = Cluster::Connect(cluster_options, FaultFormat(), transport->get());
  if (!cluster.ok()) {
    Answer({{"error", cluster.status().ToString()}});
    return 1;
  }
  Worker worker(options, cluster->get());
  Answer({{"ready", true}, {"salt", (*cluster)->tenant_salt()}});
  for (std::string line; std::getline(std::cin, line);) {
    const Json command = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!command.is_object()) return 2;
    Answer(worker.Do(command));
  }
  return 0;
}

std::unique_ptr<FaultWorker> FaultWorker::Start(const WorkerOptions& options,
                                                const std::string& log) {
  auto worker = std::unique_ptr<FaultWorker>(new FaultWorker(options, log));
  const std::vector<std::string> argv = {
      "okv_faults", "--worker", absl::StrCat("--control=", options.control_address),
      absl::StrCat("--journal=", options.journal), absl::StrCat("--name=", options.name)};
  std::vector<char*> pointers;
  for (const std::string& word : argv) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  int in[2];
  int out[2];
  OKV_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  const pid_t parent = getpid();
  worker->pid_ = fork();
  OKV_CHECK(worker->pid_ >= 0);
  if (worker->pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    const int error = open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    dup2(error, STDERR_FILENO);
    execv("/proc/self/exe", pointers.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  worker->to_ = in[1];
  worker->from_ = out[0];
  return worker;
}

FaultWorker::~FaultWorker() {
  if (!Reap()) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (to_ >= 0) close(to_);
  close(from_);
}

bool FaultWorker::Reap() {
  if (ended_) return true;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
  ended_ = true;
  code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return true;
}

void FaultWorker::Signal(int signal) const {
  if (!ended_) kill(pid_, signal);
}

void FaultWorker::Send(const Json& command) {
  const std::string line = command.dump() + "\n";
  // A worker that was killed no longer reads; its end is what the caller asks about.
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t n = write(to_, line.data() + sent, line.size() - sent);
    if (n <= 0) return;
    sent += static_cast<size_t>(n);
  }
}

std::optional<FaultWorker::Json> FaultWorker::Await(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    if (const size_t eol = received_.find('\n'); eol != std::string::npos) {
      const std::string line = received_.substr(0, eol);
      received_.erase(0, eol + 1);
      // UCX writes there, too: that a node which stops turned a connection away, among others.
      if (line.empty() || line[0] != '{') continue;
      return Json::parse(line);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd fd = {.fd = from_, .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || poll(&fd, 1, static_cast<int>(left.count())) <= 0) return std::nullopt;
    char buffer[65536];
    const ssize_t got = read(from_, buffer, sizeof(buffer));
    if (got <= 0) return std::nullopt;
    received_.append(buffer, static_cast<size_t>(got));
  }
}

int FaultWorker::End(std::chrono::milliseconds timeout) {
  if (to_ >= 0) close(to_);
  to_ = -1;
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!Reap()) {
    if (std::chrono::steady_clock::now() > end) return -1;
    Pause(2);
  }
  return code_;
}

}  // namespace okv::faults
