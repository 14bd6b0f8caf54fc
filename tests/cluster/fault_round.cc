#include "tests/cluster/fault_round.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/clock.h"

namespace okv::faults {
namespace {

using testing_support::HttpGet;
using testing_support::Process;
using testing_support::ReadFileOrEmpty;

constexpr std::chrono::seconds kProcessTimeout(30);
constexpr std::chrono::seconds kWaitTimeout(30);
// The exit code of what SIGKILL ended.
constexpr int kKilled = 128 + SIGKILL;
// Objects in one call of an audit.
constexpr size_t kAuditBlocks = 64;

void Pause(uint64_t ms) { poll(nullptr, 0, static_cast<int>(ms)); }

nlohmann::json Flat(const std::vector<BlockName>& blocks) {
  nlohmann::json flat = nlohmann::json::array();
  for (const BlockName& block : blocks) {
    flat.push_back(block.chain);
    flat.push_back(block.index);
  }
  return flat;
}

std::string LastLines(const std::string& text, size_t bytes) {
  if (text.size() <= bytes) return text;
  return absl::StrCat("...", text.substr(text.find('\n', text.size() - bytes)));
}

}  // namespace

std::vector<BlockName> ChainBlocks(uint32_t chain, uint32_t first, uint32_t count) {
  std::vector<BlockName> blocks;
  for (uint32_t i = 0; i < count; ++i) blocks.push_back({.chain = chain, .index = first + i});
  return blocks;
}

std::vector<BlockName> operator+(std::vector<BlockName> a, const std::vector<BlockName>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Round::Round(uint64_t seed, const RoundOptions& options, Tally* tally)
    : options_(options), tally_(tally), random_(seed), oracle_(tally) {}

uint64_t Round::Pick(uint64_t low, uint64_t high) {
  // Not a distribution of the library: the choices of a seed are the same everywhere.
  return low + random_() % (high - low + 1);
}

void Round::RandomPause(uint64_t ms_max) { Pause(Pick(0, ms_max)); }

void Round::Fail(const std::string& what) {
  ++tally_->failed_checks;
  Note(what);
}

void Round::Note(const std::string& what) {
  failures_.push_back(what);
  std::fprintf(stderr, "okv_faults: %s\n", what.c_str());
}

void Round::Hang(const std::string& what) {
  ++tally_->hangs;
  broken_ = true;
  Note(absl::StrCat("hang: ", what));
}

// ---- Processes.

void Round::NotStarted(const std::string& name, Process* process) {
  if (process->running()) {
    Hang(absl::StrCat(name, " did not start: ", process->output()));
    return;
  }
  broken_ = true;
  Fail(absl::StrCat(name, " ended with ", process->Wait(kProcessTimeout),
                    " instead of starting: ", process->output()));
}

void Round::EndedOnItsOwn(NodeProcess* node, int code) {
  if (std::exchange(node->expected_down, true)) return;
  Fail(absl::StrCat(node->node_id, " ended on its own with ", code));
  broken_ = true;
}

void Round::CheckNodesRun() {
  for (NodeProcess& node : nodes_) {
    if (node.process == nullptr || node.process->running()) continue;
    EndedOnItsOwn(&node, node.process->Wait(kProcessTimeout));
  }
}

void Round::StartControl() {
  const std::string port_file = Path("control.port");
  std::remove(port_file.c_str());
  const std::string listen = control_address_.empty() ? "127.0.0.1:0" : control_address_;
  control_ =
      Process::Start({"okv-control", "--listen", listen, "--metrics", "127.0.0.1:0", "--data_dir",
                      Path("control"), "--port_file", port_file, "--heartbeat_interval_ms", "100",
                      "--node_timeout_ms", "1000", "--reservation_timeout_ms", "1500"});
  if (!WaitForFile(port_file, control_.get())) {
    NotStarted("okv-control", control_.get());
    return;
  }
  const std::string port = ReadFileOrEmpty(port_file);
  control_address_ = "127.0.0.1:" + port.substr(0, port.find('\n'));
  const std::string output = control_->output();
  const std::string mark = "okv-control metrics on ";
  const size_t at = output.find(mark);
  if (at != std::string::npos) {
    const size_t begin = at + mark.size();
    control_metrics_ = output.substr(begin, output.find('\n', begin) - begin);
  }
}

void Round::KillControl() {
  control_->Signal(SIGKILL);
  const int code = control_->Wait(kProcessTimeout);
  if (code == -1) Hang("okv-control was killed and did not end");
  if (code != -1 && code != kKilled) {
    Fail(absl::StrCat("okv-control ended on its own with ", code));
  }
  control_.reset();
}

std::string Round::NodeDirectory(size_t number) const {
  const std::string& given = nodes_.at(number).spec.data_dir;
  return given.empty() ? Path(absl::StrCat("node", number)) : given;
}

std::string Round::NodeId(size_t number) const { return absl::StrCat("node-", number); }

void Round::StartNode(size_t number, const NodeSpec& spec) {
  if (nodes_.size() <= number) nodes_.resize(number + 1);
  NodeProcess& node = nodes_[number];
  if (node.process != nullptr) node.old_logs += node.process->output();
  node.spec = spec;
  node.node_id = NodeId(number);
  const std::string ready = Path(absl::StrCat("node", number, ".json"));
  std::remove(ready.c_str());
  std::vector<std::string> argv = {"okv-node",
                                   "--control",
                                   control_address_,
                                   "--data_dir",
                                   NodeDirectory(number),
                                   "--node_id",
                                   node.node_id,
                                   "--dram_bytes",
                                   std::to_string(spec.dram_bytes),
                                   "--disk_bytes",
                                   std::to_string(spec.disk_bytes),
                                   "--ready_file",
                                   ready};
  if (spec.with_hbm && hbm_bytes() > 0) {
    const int device = options_.hbm_devices[number % options_.hbm_devices.size()];
    argv.insert(argv.end(), {"--hbm_bytes", std::to_string(hbm_bytes()), "--hbm_device",
                             std::to_string(device)});
  }
  node.process = Process::Start(argv);
  node.expected_down = false;
  if (!WaitForFile(ready, node.process.get())) {
    node.expected_down = true;
    NotStarted(node.node_id, node.process.get());
    return;
  }
  const Json json = Json::parse(ReadFileOrEmpty(ready));
  node.data_address = json["data_address"];
  node.metrics_address = json["metrics_address"];
}

void Round::SignalNode(size_t number, int signal) { nodes_.at(number).process->Signal(signal); }

uint64_t Round::KillNode(size_t number, uint64_t stopping_ms) {
  NodeProcess& node = nodes_.at(number);
  const auto on_disk = static_cast<uint64_t>(Metric(number, "okv_node_objects", "tier=\"disk\""));
  if (stopping_ms > 0) {
    node.process->Signal(SIGTERM);
    Pause(stopping_ms);
  }
  node.process->Signal(SIGKILL);
  const int code = node.process->Wait(kProcessTimeout);
  const bool stopped = stopping_ms > 0 && code == 0;
  if (code == -1) Hang(absl::StrCat(node.node_id, " was killed and did not end"));
  if (code != -1 && code != kKilled && !stopped) EndedOnItsOwn(&node, code);
  node.expected_down = true;
  oracle_.NodeKilled(node.node_id, Clock::System()->NowNanos());
  return on_disk;
}

void Round::StopNode(size_t number) {
  NodeProcess& node = nodes_.at(number);
  if (!node.process->running()) EndedOnItsOwn(&node, node.process->Wait(kProcessTimeout));
  if (std::exchange(node.expected_down, true)) return;
  node.process->Signal(SIGTERM);
  const int code = node.process->Wait(kProcessTimeout);
  if (code == -1) Hang(absl::StrCat(node.node_id, " did not stop"));
  if (code > 0) Fail(absl::StrCat(node.node_id, " ended with ", code));
}

std::unique_ptr<Process> Round::StartDrain(size_t number) {
  return Process::Start(
      {"okvctl", "--control", control_address_, "--drain_limit", "60s", "drain", NodeId(number)});
}

void Round::FinishDrain(Process* drain) {
  const int code = drain->Wait(2 * kProcessTimeout);
  if (code == -1) Hang("a drain did not end");
  if (code > 0) Fail(absl::StrCat("a drain ended with ", code, ": ", drain->output()));
}

bool Round::NodeRuns(size_t number) {
  return number < nodes_.size() && nodes_[number].process != nullptr &&
         nodes_[number].process->running();
}

std::string Round::NodeLog(size_t number) const {
  const NodeProcess& node = nodes_.at(number);
  return node.old_logs + (node.process != nullptr ? node.process->output() : "");
}

FaultWorker* Round::StartWorker() {
  const std::string name = absl::StrCat("worker", journals_.size());
  journals_.push_back(Path(name + ".journal"));
  worker_logs_.push_back(Path(name + ".log"));
  workers_.push_back(FaultWorker::Start(
      {.control_address = control_address_, .journal = journals_.back(), .name = name},
      worker_logs_.back()));
  FaultWorker* worker = workers_.back().get();
  const std::optional<Json> ready = Await(worker, kProcessTimeout);
  if (ready.has_value() && !ready->contains("ready")) Fail(name + ": " + ready->dump());
  return worker;
}

std::optional<Round::Json> Round::Await(FaultWorker* worker, Millis deadline) {
  if (broken_) return std::nullopt;
  std::optional<Json> answer = worker->Await(deadline + options_.slack);
  if (answer.has_value()) {
    CheckOverrun(*worker, *answer);
    CheckNodesRun();
  } else if (!worker->running()) {
    Fail(absl::StrCat(worker->name(), " ended on its own"));
    broken_ = true;
  } else {
    Hang(absl::StrCat(worker->name(), " gave no answer in ", deadline.count(), " ms and ",
                      options_.slack.count(), " more"));
    worker->Signal(SIGKILL);
  }
  return answer;
}

void Round::CheckOverrun(const FaultWorker& worker, const Json& answer) {
  const int64_t overrun_ms = answer.value("overrun_ms", int64_t{0});
  tally_->overrun_ms_max = std::max(tally_->overrun_ms_max, overrun_ms);
  if (overrun_ms <= options_.slack.count()) return;
  Hang(absl::StrCat(worker.name(), ": a call ran ", overrun_ms, " ms past its deadline"));
}

void Round::EndWorker(FaultWorker* worker) {
  const int code = worker->End(kProcessTimeout);
  if (code == -1) Hang(absl::StrCat(worker->name(), " did not end"));
  if (code > 0) Fail(absl::StrCat(worker->name(), " ended with ", code));
  std::erase_if(workers_, [worker](const auto& owned) { return owned.get() == worker; });
}

void Round::KillWorker(FaultWorker* worker) {
  worker->Signal(SIGKILL);
  std::erase_if(workers_, [worker](const auto& owned) { return owned.get() == worker; });
}

// ---- Commands.

void Round::SendPut(FaultWorker* worker, const Put& put) {
  worker->Send({{"op", "put"},
                {"blocks", Flat(put.blocks)},
                {"nonce", put.nonce},
                {"group", put.group},
                {"batch", put.batch},
                {"deadline_ms", put.deadline.count()}});
}

Round::Json Round::FinishPut(FaultWorker* worker, const Put& put) {
  const std::optional<Json> answer = Await(worker, put.deadline);
  return answer.has_value() ? answer->value("codes", Json::object()) : Json::object();
}

Round::Json Round::DoPut(FaultWorker* worker, const Put& put) {
  SendPut(worker, put);
  return FinishPut(worker, put);
}

void Round::SendFetch(FaultWorker* worker, const Fetch& fetch) {
  Json nodes = Json::array();
  std::vector<size_t> order;
  for (size_t number = 0; number < nodes_.size(); ++number) {
    nodes.push_back({nodes_[number].node_id, nodes_[number].data_address});
    if (fetch.by_home || NodeRuns(number)) order.push_back(number);
  }
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Pick(0, i - 1)]);
  Json where = Json::array();  // Indexes into nodes, for each block.
  for (const BlockName& block : fetch.blocks) {
    const auto home = oracle_.homes().find(block.chain);
    if (!fetch.by_home || home == oracle_.homes().end()) {
      where.push_back(order);
      continue;
    }
    Json one = Json::array();
    for (const size_t number : order) {
      if (nodes_[number].node_id == home->second) one.push_back(number);
    }
    where.push_back(std::move(one));
  }
  sent_nanos_[worker] = Clock::System()->NowNanos();
  worker->Send({{"op", "fetch"},
                {"blocks", Flat(fetch.blocks)},
                {"nodes", std::move(nodes)},
                {"where", std::move(where)},
                {"keep", fetch.keep},
                {"deadline_ms", fetch.deadline.count()}});
}

std::vector<Oracle::Read> Round::JudgeAll(const FaultWorker* worker,
                                          const std::vector<BlockName>& blocks, const Json& results,
                                          Oracle::Mode mode) {
  ReadJournals();
  std::vector<Oracle::Read> reads;
  for (size_t i = 0; i < results.size(); ++i) {
    reads.push_back({.block = blocks.at(i),
                     .sent_nanos = sent_nanos_[worker],
                     .code = results[i][0],
                     .nonce = results[i][1],
                     .wrong_bytes = results[i][2]});
    const std::string wrong = oracle_.Judge(reads.back(), mode);
    if (!wrong.empty()) Note(wrong);
  }
  return reads;
}

std::vector<Oracle::Read> Round::FinishFetch(FaultWorker* worker, const Fetch& fetch,
                                             Oracle::Mode mode) {
  const std::optional<Json> answer = Await(worker, fetch.deadline);
  if (!answer.has_value() || !answer->contains("results")) return {};
  return JudgeAll(worker, fetch.blocks, (*answer)["results"], mode);
}

std::vector<Oracle::Read> Round::DoFetch(FaultWorker* worker, const Fetch& fetch,
                                         Oracle::Mode mode) {
  SendFetch(worker, fetch);
  return FinishFetch(worker, fetch, mode);
}

void Round::CheckKept(FaultWorker* worker) {
  worker->Send({{"op", "kept"}});
  const std::optional<Json> answer = Await(worker, Millis(10'000));
  if (!answer.has_value()) return;
  const uint64_t changed_bytes = answer->value("changed_bytes", uint64_t{0});
  if (changed_bytes == 0) return;
  tally_->wrong_bytes += changed_bytes;
  Note(absl::StrCat(changed_bytes, " bytes changed in buffers of a call that had returned"));
}

void Round::LearnHomes(FaultWorker* worker, const std::vector<uint32_t>& chains) {
  for (const uint32_t chain : chains) {
    WaitUntil(absl::StrCat("the control plane knows chain ", chain), [&] {
      worker->Send({{"op", "lookup"},
                    {"chain", chain},
                    {"blocks_count", 1},
                    {"fetch", false},
                    {"deadline_ms", 5000}});
      const std::optional<Json> answer = Await(worker, Millis(5000));
      if (!answer.has_value() || answer->value("prefix", 0) == 0) return false;
      oracle_.SetHome(chain, (*answer)["homes"][0]);
      return true;
    });
  }
}

void Round::Audit(FaultWorker* worker) {
  ReadJournals();
  const std::vector<BlockName> blocks = oracle_.Attempted();
  for (size_t begin = 0; begin < blocks.size(); begin += kAuditBlocks) {
    const size_t end = std::min(blocks.size(), begin + kAuditBlocks);
    const Fetch fetch = {.blocks = {blocks.begin() + static_cast<ptrdiff_t>(begin),
                                    blocks.begin() + static_cast<ptrdiff_t>(end)}};
    for (const Oracle::Read& read : DoFetch(worker, fetch, Oracle::Mode::kStrict)) {
      present_[read.block] = read.code == 0;
    }
  }
}

void Round::CheckLookups(FaultWorker* worker) {
  std::map<uint32_t, uint32_t> held;  // Blocks of a chain up to its first hole.
  std::map<uint32_t, uint32_t> lengths;
  for (const auto& [block, present] : present_) {
    lengths[block.chain] = block.index + 1;
    uint32_t& prefix = held[block.chain];
    if (present && prefix == block.index) ++prefix;
  }
  for (const auto& [chain, length] : lengths) {
    const Json command = {
        {"op", "lookup"}, {"chain", chain}, {"blocks_count", length}, {"deadline_ms", 15'000}};
    std::string last;
    Json answer;
    const bool settled = WaitUntil(absl::StrCat("lookup of chain ", chain), [&] {
      Json probe = command;
      probe["fetch"] = false;
      worker->Send(probe);
      answer = Await(worker, Millis(15'000)).value_or(Json::object());
      return answer.value("prefix", uint32_t{0}) == held[chain];
    });
    if (!settled) {
      Note(absl::StrCat("its nodes have ", held[chain], " blocks of ", length, ", it says ",
                        answer.dump().substr(0, 100)));
      continue;
    }
    sent_nanos_[worker] = Clock::System()->NowNanos();
    worker->Send(command);
    answer = Await(worker, Millis(15'000)).value_or(Json::object());
    JudgeAll(worker, ChainBlocks(chain, 0, held[chain]), answer.value("results", Json::array()),
             Oracle::Mode::kStrict);
  }
}

// ---- Looks.

double Round::SumMetric(const std::string& text, const std::string& name,
                        const std::string& label) {
  std::istringstream lines(text);
  double sum = 0;
  for (std::string line; std::getline(lines, line);) {
    const char next = line.size() > name.size() ? line[name.size()] : '\0';
    if (line.compare(0, name.size(), name) != 0 || (next != '{' && next != ' ')) continue;
    if (line.find(label) == std::string::npos) continue;
    sum += std::stod(line.substr(line.rfind(' ')));
  }
  return sum;
}

double Round::Metric(size_t number, const std::string& name, const std::string& label) const {
  return SumMetric(HttpGet(nodes_.at(number).metrics_address, "/metrics"), name, label);
}

double Round::ControlMetric(const std::string& name) const {
  return SumMetric(HttpGet(control_metrics_, "/metrics"), name, "");
}

bool Round::WaitQuietly(Millis timeout, const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!done()) {
    CheckNodesRun();
    if (broken_ || std::chrono::steady_clock::now() > end) return false;
    Pause(5);
  }
  return true;
}

bool Round::WaitUntil(const std::string& what, const std::function<bool()>& done) {
  if (WaitQuietly(kWaitTimeout, done)) return true;
  if (broken_) return false;  // The first failure says more.
  Fail(absl::StrCat("waited in vain: ", what));
  return false;
}

void Round::ReadJournals() {
  for (const std::string& journal : journals_) oracle_.ReadJournal(journal);
}

void Round::CheckGauges(size_t number) {
  const std::string& address = nodes_[number].metrics_address;
  const PageLayout layout = PageLayout::Of(FaultFormat());
  std::string text;
  const auto objects_bytes = [&](const std::string& tier) {
    double bytes = 0;
    for (const Codec codec : kCodecs) {
      const std::string labels = absl::StrCat("tier=\"", tier, "\",codec=\"", CodecName(codec));
      const std::string other = absl::StrCat("codec=\"", CodecName(codec), "\",tier=\"", tier);
      bytes += (SumMetric(text, "okv_node_objects", labels) +
                SumMetric(text, "okv_node_objects", other)) *
               static_cast<double>(layout.block_bytes(codec));
    }
    return bytes;
  };
  const auto used_bytes = [&](const std::string& tier) {
    return SumMetric(text, "okv_node_tier_used_bytes", absl::StrCat("tier=\"", tier));
  };
  // Beside the payloads the disk has headers and keys. While a group is on its way down its bytes
  // are used, and no object of it is on disk yet.
  const auto disk_agrees = [&] {
    return used_bytes("disk") >= objects_bytes("disk") &&
           used_bytes("disk") <= objects_bytes("disk") * 1.05;
  };
  const bool at_rest = WaitQuietly(kWaitTimeout, [&] {
    text = HttpGet(address, "/metrics");
    return !text.empty() && SumMetric(text, "okv_node_sessions", "") == 0 &&
           SumMetric(text, "okv_node_pins", "") == 0 &&
           SumMetric(text, "okv_node_claims", "") == 0 &&
           used_bytes("dram") == objects_bytes("dram") &&
           used_bytes("hbm") == objects_bytes("hbm") && disk_agrees();
  });
  if (at_rest) return;
  Fail(absl::StrCat(NodeId(number), " at rest: sessions ", SumMetric(text, "okv_node_sessions", ""),
                    ", pins ", SumMetric(text, "okv_node_pins", ""), ", claims ",
                    SumMetric(text, "okv_node_claims", ""), ", dram ", used_bytes("dram"),
                    " bytes used by ", objects_bytes("dram"), " bytes of objects, hbm ",
                    used_bytes("hbm"), " by ", objects_bytes("hbm"), ", disk ", used_bytes("disk"),
                    " by ", objects_bytes("disk")));
}

void Round::Finish() {
  if (std::exchange(finished_, true)) return;
  while (!workers_.empty()) {
    FaultWorker* worker = workers_.back().get();
    if (broken_)
      KillWorker(worker);  // It may be in a call that nobody waits for.
    else
      EndWorker(worker);
  }
  CheckNodesRun();
  for (size_t number = 0; number < nodes_.size(); ++number) {
    if (NodeRuns(number)) CheckGauges(number);
  }
  WaitUntil("no reservation is open",
            [&] { return ControlMetric("okv_control_reservations") == 0; });
  for (size_t number = 0; number < nodes_.size(); ++number) {
    if (NodeRuns(number)) StopNode(number);
  }
  control_->Signal(SIGTERM);
  const int code = control_->Wait(kProcessTimeout);
  if (code == -1) Hang("okv-control did not stop");
  if (code > 0) Fail(absl::StrCat("okv-control ended with ", code));
}

std::string Round::Logs() const {
  std::string text;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    absl::StrAppend(&text, "---- node-", i, "\n", LastLines(NodeLog(i), 3000), "\n");
  }
  if (control_ != nullptr) {
    absl::StrAppend(&text, "---- okv-control\n", LastLines(control_->output(), 1500), "\n");
  }
  for (const std::string& log : worker_logs_) {
    const std::string lines = ReadFileOrEmpty(log);
    if (!lines.empty()) absl::StrAppend(&text, "---- ", log, "\n", LastLines(lines, 1500), "\n");
  }
  return text;
}

}  // namespace okv::faults
