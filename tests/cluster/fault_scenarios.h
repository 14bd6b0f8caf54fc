#ifndef OKV_TESTS_CLUSTER_FAULT_SCENARIOS_H_
#define OKV_TESTS_CLUSTER_FAULT_SCENARIOS_H_

#include <string>
#include <vector>

#include "tests/cluster/fault_round.h"

namespace okv::faults {

// One kind of fault. `run` starts what it needs, does the harm and audits; the caller ends the
// round with Round::Finish(). Returns why this machine cannot run it, or "".
struct Scenario {
  const char* name;
  std::string (*run)(Round* round);
  // What it is after, as it tells Round::Saw(): about half of the rounds see each.
  std::vector<std::string> marks = {};
};

// Nodes and workers: killed, stopped, slow (fault_scenarios.cc).
std::vector<Scenario> ProcessScenarios();
// Bits and links (fault_scenarios_media.cc).
std::vector<Scenario> MediaScenarios();
// Disks: full, gone, damaged (fault_scenarios_disk.cc).
std::vector<Scenario> DiskScenarios();

// ---- What several of them do.

void StartNodes(Round* round, size_t count, const Round::NodeSpec& spec);
// Blocks to write beside those that a node's other memory needs to overflow: what fills its HBM
// tier, where the run has them.
uint32_t HbmBlocks(const Round& round);
// Writes block 0 of chains [first, first + count) and learns where they went.
void PutHeads(Round* round, FaultWorker* writer, uint32_t first, uint32_t count);
// Every block is stored by now; other codes are failures.
void ExpectStored(Round* round, const std::string& who, const nlohmann::json& codes);
// Up to `count` acknowledged blocks, chosen by the seed.
std::vector<BlockName> SomeAcknowledged(Round* round, size_t count);
// A fresh worker reads everything, from the nodes and by lookups.
void AuditAll(Round* round);
// How many objects the node adopted when it started last.
uint64_t AdoptedCount(Round* round, size_t node);

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_SCENARIOS_H_
