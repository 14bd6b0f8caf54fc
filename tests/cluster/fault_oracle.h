#ifndef OKV_TESTS_CLUSTER_FAULT_ORACLE_H_
#define OKV_TESTS_CLUSTER_FAULT_ORACLE_H_

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/cluster/fault_data.h"

namespace okv::faults {

// What a whole run counts; the last line of `okv_faults --json`.
struct Tally {
  struct Scenario {
    uint64_t rounds = 0;
    uint64_t skipped = 0;
    std::string skip_reason;
    // How often a fault met what it is after: a run that never does shows nothing.
    std::map<std::string, uint64_t> seen;
  };
  uint64_t rounds = 0;
  uint64_t reads = 0;          // Objects asked for.
  uint64_t verified_hits = 0;  // Objects that arrived with every byte as some writer put it.
  uint64_t unexpected_misses = 0;
  uint64_t wrong_bytes = 0;
  uint64_t lost_objects = 0;
  uint64_t hangs = 0;
  uint64_t failed_checks = 0;
  int64_t overrun_ms_max = 0;  // The most that a call ran past its deadline.
  std::map<std::string, Scenario> scenarios;
};

// Rounds of a scenario that must between them have seen each of its marks. What half of the rounds
// see is missing in one of 1,000 runs of so many.
inline constexpr uint64_t kRoundsToJudge = 10;
// Those of `marks` that no round of the scenario saw; none after fewer than kRoundsToJudge rounds.
std::vector<std::string> MarksNotSeen(const Tally::Scenario& counts,
                                      const std::vector<std::string>& marks);

// What must be true, from the journals of acknowledged writes and from what was done to the nodes.
// Thread-compatible.
class Oracle {
 public:
  explicit Oracle(Tally* tally) : tally_(tally) {}

  // Reads what was appended to a worker's journal since the last time.
  void ReadJournal(const std::string& path);
  // Where the blocks of a chain are, its first write having said so.
  void SetHome(uint32_t chain, const std::string& node_id) { homes_[chain] = node_id; }
  const std::map<uint32_t, std::string>& homes() const { return homes_; }
  // The node lost its DRAM at `nanos` (Clock::NowNanos(), which is the machine's).
  void NodeKilled(const std::string& node_id, int64_t nanos);
  // Every node was stopped cleanly: whatever was acknowledged is on disk.
  void AllSpilled();
  // Somebody damaged a copy of the block: it must not be delivered.
  void Damaged(const BlockName& block) { fates_[block].damaged = true; }
  // It was written again.
  void Repaired(const BlockName& block) { fates_[block].damaged = false; }
  // A fault is allowed to cost the block (a copy in a place that failed for good).
  void MayBeLost(const BlockName& block) { fates_[block].may_be_lost = true; }

  // Acknowledged, and nothing that was done may have cost it.
  bool Required(const BlockName& block) const;
  bool IsDamaged(const BlockName& block) const;
  std::vector<BlockName> Attempted() const;
  std::vector<BlockName> Acknowledged() const;
  // Writers that were told that they committed the block.
  std::set<uint64_t> AcknowledgedNonces(const BlockName& block) const;

  // Counts one read. kStrict: nothing is wrong at the moment, so that a required block must arrive.
  // kExcused: a fault is going on, so that it may fail, with a code; bytes must still be right.
  // Returns what is wrong, or "".
  enum class Mode { kStrict, kExcused };
  struct Read {
    BlockName block;
    int64_t sent_nanos = std::numeric_limits<int64_t>::max();  // When it was asked for.
    int code = 0;
    uint64_t nonce = 0;
    uint64_t wrong_bytes = 0;
  };
  std::string Judge(const Read& read, Mode mode);

 private:
  struct Fate {
    std::set<uint64_t> attempted;  // Nonces.
    std::set<uint64_t> acked;      // Nonces.
    int64_t acked_nanos = 0;       // When the last acknowledged attempt began.
    int64_t first_ack_nanos = std::numeric_limits<int64_t>::max();
    bool on_disk = false;
    bool damaged = false;
    bool may_be_lost = false;
  };
  struct Kill {
    std::string node_id;
    int64_t nanos;
  };

  Tally* const tally_;
  std::map<BlockName, Fate> fates_;
  std::map<uint32_t, std::string> homes_;
  std::vector<Kill> kills_;
  std::map<std::string, size_t> journal_offsets_;
};

std::string ToString(const BlockName& block);

}  // namespace okv::faults

#endif  // OKV_TESTS_CLUSTER_FAULT_ORACLE_H_
