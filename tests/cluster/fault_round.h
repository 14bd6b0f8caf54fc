#ifndef OKV_TESTS_CLUSTER_FAULT_ROUND_H_
#define OKV_TESTS_CLUSTER_FAULT_ROUND_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/cluster/fault_oracle.h"
#include "tests/cluster/fault_worker.h"
#include "tests/support/process.h"

namespace okv::faults {

struct RoundOptions {
  // How far past its deadline a call counts as hung: what a loaded machine needs to schedule it.
  std::chrono::milliseconds slack{8000};
  // The GPUs of the nodes' HBM tiers: node i has the i-th, beginning again behind the last. Empty:
  // no node has such a tier.
  std::vector<int> hbm_devices = {};
  uint64_t hbm_bytes = 0;  // Of each node's.
};

// One round: a control plane, nodes and workers of its own in a directory of its own, the oracle
// over what they do, and the checks. What goes wrong is kept in failures() and in the tally; the
// scenario goes on as far as it can. Thread-compatible.
class Round {
 public:
  using Json = nlohmann::json;
  using Millis = std::chrono::milliseconds;

  Round(uint64_t seed, const RoundOptions& options, Tally* tally);

  // ---- The seed's choices.
  uint64_t Pick(uint64_t low, uint64_t high);  // Both included.
  // Lets up to `ms_max` milliseconds pass: the faults come at random moments.
  void RandomPause(uint64_t ms_max);

  // ---- Processes.
  struct NodeSpec {
    uint64_t dram_bytes = uint64_t{2} << 20;
    uint64_t disk_bytes = uint64_t{512} << 20;
    std::string data_dir = {};  // Empty: one of this round's directory.
    bool with_hbm = true;       // An HBM tier, if the run has them.
  };
  void StartControl();
  void KillControl();
  // The same number again: the same data directory and node id.
  void StartNode(size_t number, const NodeSpec& spec);
  void StartNode(size_t number) { StartNode(number, NodeSpec()); }
  void SignalNode(size_t number, int signal);
  // SIGKILL, `stopping_ms` after SIGTERM unless that is 0. Returns how many objects the node had
  // said to have on disk just before.
  uint64_t KillNode(size_t number, uint64_t stopping_ms = 0);
  // SIGTERM; it must end with 0.
  void StopNode(size_t number);
  // okvctl drain, under way.
  std::unique_ptr<testing_support::Process> StartDrain(size_t number);
  // It must say, in time, that other nodes have everything.
  void FinishDrain(testing_support::Process* drain);
  bool NodeRuns(size_t number);
  std::string NodeDirectory(size_t number) const;
  std::string NodeId(size_t number) const;
  std::string NodeLog(size_t number) const;
  pid_t NodePid(size_t number) const { return nodes_.at(number).process->pid(); }
  // How many bytes a node of this run keeps in a GPU's memory, beside those of its spec.
  uint64_t hbm_bytes() const { return options_.hbm_devices.empty() ? 0 : options_.hbm_bytes; }

  FaultWorker* StartWorker();
  // Its answer; nothing, and a hang counted, when it does not come in time. `deadline`: what the
  // command was given, all calls together.
  std::optional<Json> Await(FaultWorker* worker, Millis deadline);
  // Ends it; it must have nothing wrong with it.
  void EndWorker(FaultWorker* worker);
  void KillWorker(FaultWorker* worker);

  // ---- Commands.
  struct Put {
    std::vector<BlockName> blocks;
    uint64_t nonce = 1;
    std::string group = "writer";
    size_t batch = 8;
    Millis deadline{20'000};
  };
  void SendPut(FaultWorker* worker, const Put& put);
  // Waits for the answer: the count of each code.
  Json FinishPut(FaultWorker* worker, const Put& put);
  Json DoPut(FaultWorker* worker, const Put& put);

  struct Fetch {
    std::vector<BlockName> blocks;
    Millis deadline{15'000};
    bool keep = false;
    // Each block from its chain's home alone, as a lookup would say; otherwise from any node that
    // runs.
    bool by_home = false;
  };
  void SendFetch(FaultWorker* worker, const Fetch& fetch);
  // Waits for the answer and judges it. Returns a read for each block; none after a hang.
  std::vector<Oracle::Read> FinishFetch(FaultWorker* worker, const Fetch& fetch, Oracle::Mode mode);
  std::vector<Oracle::Read> DoFetch(FaultWorker* worker, const Fetch& fetch, Oracle::Mode mode);
  // Wrong unless no byte of the buffers that were kept has changed since.
  void CheckKept(FaultWorker* worker);

  // Asks the control plane where the chains' first blocks are, and tells the oracle.
  void LearnHomes(FaultWorker* worker, const std::vector<uint32_t>& chains);
  // Every block that anybody tried to write, from every node, strictly.
  void Audit(FaultWorker* worker);
  // What the control plane reports of each chain is what the nodes have, and reads byte-exact.
  void CheckLookups(FaultWorker* worker);
  // Ends the workers, waits until nothing is held for anybody, stops everything. Once.
  void Finish();

  // ---- Looks.
  // Sum of a node's metric over the lines that have `label` in them.
  double Metric(size_t number, const std::string& name, const std::string& label = "") const;
  double ControlMetric(const std::string& name) const;
  // Waits until `done`; a failed check, and false, after 30 s.
  bool WaitUntil(const std::string& what, const std::function<bool()>& done);
  bool WaitQuietly(Millis timeout, const std::function<bool()>& done);

  Oracle& oracle() { return oracle_; }
  void ReadJournals();
  Tally& tally() { return *tally_; }
  std::string Path(const std::string& name) const { return directory_.Path(name); }
  // Counts, if `is`, that the round met what it is after.
  void Saw(const std::string& what, bool is) { seen_[what] += is ? 1 : 0; }
  const std::map<std::string, uint64_t>& seen() const { return seen_; }
  // Fails for each node that ended without being told to.
  void CheckNodesRun();
  // Something is wrong that no count says.
  void Fail(const std::string& what);
  void Note(const std::string& what);  // Wrong, and counted already.
  const std::vector<std::string>& failures() const { return failures_; }
  // The ends of all logs, for whoever reads a failure.
  std::string Logs() const;

 private:
  struct NodeProcess {
    std::unique_ptr<testing_support::Process> process;
    bool expected_down = false;  // It was told to end or killed, or its own end is noted.
    NodeSpec spec;
    std::string node_id;
    std::string data_address;
    std::string metrics_address;
    std::string old_logs;
  };

  void Hang(const std::string& what);
  // Nobody had told the node to end with this code.
  void EndedOnItsOwn(NodeProcess* node, int code);
  // A process that was started wrote no file that says it is up.
  void NotStarted(const std::string& name, testing_support::Process* process);
  std::vector<Oracle::Read> JudgeAll(const FaultWorker* worker,
                                     const std::vector<BlockName>& blocks, const Json& results,
                                     Oracle::Mode mode);
  void CheckOverrun(const FaultWorker& worker, const Json& answer);
  void CheckGauges(size_t number);
  static double SumMetric(const std::string& text, const std::string& name,
                          const std::string& label);

  const RoundOptions options_;
  Tally* const tally_;
  std::mt19937_64 random_;
  testing_support::TempDir directory_;
  Oracle oracle_;
  std::string control_address_;
  std::string control_metrics_;
  std::unique_ptr<testing_support::Process> control_;
  std::vector<NodeProcess> nodes_;
  std::vector<std::unique_ptr<FaultWorker>> workers_;
  std::vector<std::string> journals_;
  std::vector<std::string> worker_logs_;
  std::map<const FaultWorker*, int64_t> sent_nanos_;  // Its last question.
  std::map<BlockName, bool> present_;                 // As the last audit found it.
  std::vector<std::string> failures_;
  std::map<std::string, uint64_t> seen_;
  bool finished_ = false;
  bool broken_ = false;  // A process hung or ended: nothing is waited for any more.
};

// chain's blocks [first, first + count).
std::vector<BlockName> ChainBlocks(uint32_t chain, uint32_t first, uint32_t count);
std::vector<BlockName> operator+(std::vector<BlockName> a, const std::vector<BlockName>& b);

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_ROUND_H_
