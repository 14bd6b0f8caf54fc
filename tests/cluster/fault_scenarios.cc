#include "tests/cluster/fault_scenarios.h"

#include <signal.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace okv::faults {
namespace {

using Json = nlohmann::json;
using Mode = Oracle::Mode;
using Millis = std::chrono::milliseconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kOk = static_cast<int>(absl::StatusCode::kOk);

// Blocks [first, first + count) of each of some chains, the chains in turn.
std::vector<BlockName> Interleaved(uint32_t first_chain, uint32_t chains, uint32_t first,
                                   uint32_t count) {
  std::vector<BlockName> blocks;
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t chain = 0; chain < chains; ++chain) {
      blocks.push_back({.chain = first_chain + chain, .index = first + i});
    }
  }
  return blocks;
}

// Blocks that a killed node had on disk are there again: it adopts at least what it had counted.
void ExpectAdopted(Round* round, size_t victim, uint64_t on_disk) {
  const uint64_t adopted = AdoptedCount(round, victim);
  if (adopted >= on_disk) return;
  round->tally().lost_objects += on_disk - adopted;
  round->Note(
      absl::StrCat("the killed node had ", on_disk, " objects on disk, and adopted ", adopted));
}

// While a node is dead its blocks fail at once, and with the code that says so.
void ReadFromTheDead(Round* round, FaultWorker* reader) {
  const Round::Fetch fetch = {
      .blocks = SomeAcknowledged(round, 8), .deadline = Millis(3000), .by_home = true};
  for (const Oracle::Read& read : round->DoFetch(reader, fetch, Mode::kExcused)) {
    const auto code = static_cast<absl::StatusCode>(read.code);
    if (code == absl::StatusCode::kOk || code == absl::StatusCode::kNotFound) continue;
    round->Saw("reads_of_a_dead_node", true);
    if (code == absl::StatusCode::kUnavailable) continue;
    round->Fail(
        absl::StrCat(ToString(read.block), " of a dead node: ", absl::StatusCodeToString(code)));
  }
}

// A node is killed at a random point of spills, index updates and promotions: two writers store
// twice what the arenas hold while a reader brings spilled blocks back. Sometimes it was stopping
// and spilled the rest, and sometimes it dies a second time soon after its restart.
std::string KillNode(Round* round) {
  const Round::NodeSpec spec = {.dram_bytes = 2 * kMiB};
  StartNodes(round, 2, spec);
  FaultWorker* writers[] = {round->StartWorker(), round->StartWorker()};
  FaultWorker* reader = round->StartWorker();
  const uint32_t length = 30 + HbmBlocks(*round) / 3;  // Of one in three chains of a node.
  std::vector<Round::Put> puts;
  for (uint32_t i = 0; i < 2; ++i) {
    PutHeads(round, writers[i], i * 3, 3);
    puts.push_back({.blocks = Interleaved(i * 3, 3, 1, length), .nonce = 10 + i});
    puts.back().group = absl::StrCat("writer", i);
    round->SendPut(writers[i], puts.back());
  }
  const size_t victim = round->Pick(0, 1);
  for (uint64_t reads = round->Pick(0, 5); reads > 0; --reads) {
    round->DoFetch(reader, {.blocks = SomeAcknowledged(round, 8)}, Mode::kStrict);
  }
  const Round::Fetch last = {.blocks = SomeAcknowledged(round, 8)};
  round->SendFetch(reader, last);
  round->RandomPause(20);
  const bool stopping = round->Pick(0, 3) == 0;
  const uint64_t on_disk = round->KillNode(victim, stopping ? round->Pick(0, 30) : 0);
  round->Saw("kills_with_objects_on_disk", on_disk > 0);
  round->Saw("kills_of_a_stopping_node", stopping);
  round->FinishFetch(reader, last, Mode::kExcused);
  ReadFromTheDead(round, reader);
  round->StartNode(victim, spec);
  ExpectAdopted(round, victim, on_disk);
  if (round->Pick(0, 2) == 0) {
    round->RandomPause(60);
    const uint64_t again = round->KillNode(victim);
    round->StartNode(victim, spec);
    ExpectAdopted(round, victim, again);
  }
  for (uint32_t i = 0; i < 2; ++i) {
    ExpectStored(round, "a writer", round->FinishPut(writers[i], puts[i]));
  }
  AuditAll(round);
  return "";
}

// A node is drained while a reader reads, and leaves for good: everything is on others. Half of the
// time a writer goes on meanwhile; otherwise a peer that takes objects dies and comes back.
std::string Drain(Round* round) {
  const Round::NodeSpec spec = {.dram_bytes = 4 * kMiB};
  StartNodes(round, 3, spec);
  FaultWorker* writer = round->StartWorker();
  FaultWorker* reader = round->StartWorker();
  PutHeads(round, writer, 0, 6);
  const Round::Put put = {.blocks = Interleaved(0, 6, 1, 20)};
  const bool peer_dies = round->Pick(0, 1) == 1;
  // What is written during the drain goes to peers: only a whole one keeps what only its DRAM has.
  if (peer_dies) {
    ExpectStored(round, "writer", round->DoPut(writer, put));
  } else {
    round->SendPut(writer, put);
    round->RandomPause(20);
  }
  const std::unique_ptr<testing_support::Process> drain = round->StartDrain(0);
  round->RandomPause(peer_dies ? 300 : 20);
  if (peer_dies) {
    const size_t peer = round->Pick(1, 2);
    round->KillNode(peer);
    round->Saw("peers_killed_in_a_drain", drain->running());
    round->StartNode(peer, spec);
  }
  while (drain->running()) {
    round->DoFetch(reader, {.blocks = SomeAcknowledged(round, 8)}, Mode::kStrict);
  }
  round->FinishDrain(drain.get());
  round->Saw("drains_that_moved_blocks", round->Metric(0, "okv_node_drain_moved_bytes") > 0);
  if (!peer_dies) {
    // What was on offer when the drain began was refused: the next try gets another place.
    round->FinishPut(writer, put);
    ExpectStored(round, "writer", round->DoPut(writer, put));
  }
  round->StopNode(0);
  AuditAll(round);
  return "";
}

// All readers fetch the same and are stopped in the middle: tried until the node holds something
// for one of them, at most 20 times, as a fetch takes a few milliseconds. Whether it does then.
bool StopWhilePinned(Round* round, const std::vector<FaultWorker*>& readers,
                     const Round::Fetch& fetch, uint64_t pause_ms) {
  constexpr int kTries = 20;
  for (int tries = 1;; ++tries) {
    // Spills hold objects as well.
    round->WaitUntil("nothing is held", [round] { return round->Metric(0, "okv_node_pins") == 0; });
    for (FaultWorker* reader : readers) round->SendFetch(reader, fetch);
    round->RandomPause(pause_ms);
    for (FaultWorker* reader : readers) reader->Signal(SIGSTOP);
    const bool pinned = round->Metric(0, "okv_node_pins") > 0;
    if (pinned || tries == kTries) return pinned;
    for (FaultWorker* reader : readers) reader->Signal(SIGCONT);
    for (FaultWorker* reader : readers) round->FinishFetch(reader, fetch, Mode::kStrict);
    pause_ms = std::max<uint64_t>(1, pause_ms / 2);
  }
}

// A reader stops in the middle of a fetch while a writer fills the arena twice; half of the time
// what it reads was spilled before. It goes on, or dies.
std::string SlowReader(Round* round) {
  StartNodes(round, 1, {.dram_bytes = 4 * kMiB});
  FaultWorker* writer = round->StartWorker();
  FaultWorker* reader = round->StartWorker();
  PutHeads(round, writer, 0, 1);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(0, 1, 40)}));
  const uint32_t more = HbmBlocks(*round);
  uint32_t next = 1;
  if (round->Pick(0, 1) == 1) {
    const Round::Put put = {.blocks = ChainBlocks(next++, 0, 100 + more)};
    ExpectStored(round, "writer", round->DoPut(writer, put));
  }
  const auto count = static_cast<uint32_t>(round->Pick(1, 40));
  const Round::Fetch fetch = {.blocks = ChainBlocks(0, 0, count), .deadline = Millis(20'000)};
  round->Saw("slow_readers_with_pins", StopWhilePinned(round, {reader}, fetch, 10));
  const Round::Put twice = {.blocks = ChainBlocks(next, 0, 200 + 2 * more)};
  ExpectStored(round, "writer", round->DoPut(writer, twice));
  if (round->Pick(0, 3) == 0) {
    round->KillWorker(reader);
  } else {
    reader->Signal(SIGCONT);
    round->FinishFetch(reader, fetch, Mode::kStrict);
  }
  AuditAll(round);
  return "";
}

// Many writers of the same blocks, each with bytes of its own; half are killed at random moments.
// One version commits, and everybody reads that one.
std::string ManyWritersOfOneKey(Round* round) {
  constexpr uint32_t kWriters = 6;
  constexpr uint32_t kBlocks = 4;
  StartNodes(round, 2, {.dram_bytes = 4 * kMiB});
  std::vector<FaultWorker*> writers;
  for (uint32_t i = 0; i < kWriters; ++i) writers.push_back(round->StartWorker());
  FaultWorker* reader = round->StartWorker();
  std::vector<Round::Put> puts;
  for (uint32_t i = 0; i < kWriters; ++i) {
    puts.push_back({.blocks = ChainBlocks(0, 0, kBlocks), .nonce = 100 + i});
    puts.back().group = absl::StrCat("writer", i);
    puts.back().batch = round->Pick(1, kBlocks);
    round->SendPut(writers[i], puts.back());
  }
  for (uint32_t i = 0; i < kWriters / 2; ++i) {
    round->RandomPause(8);
    round->KillWorker(writers[i]);
    round->DoFetch(reader, {.blocks = ChainBlocks(0, 0, kBlocks)}, Mode::kStrict);
  }
  for (uint32_t i = kWriters / 2; i < kWriters; ++i) {
    ExpectStored(round, "a writer", round->FinishPut(writers[i], puts[i]));
  }
  std::map<BlockName, uint64_t> versions;
  for (int again = 0; again < 3; ++again) {
    for (const Oracle::Read& read :
         round->DoFetch(reader, {.blocks = ChainBlocks(0, 0, kBlocks)}, Mode::kStrict)) {
      const std::set<uint64_t> told = round->oracle().AcknowledgedNonces(read.block);
      if (told.size() > 1) round->Fail(ToString(read.block) + ": two writers committed it");
      if (!told.empty() && !told.contains(read.nonce)) {
        round->Fail(ToString(read.block) + ": not the version that was acknowledged");
      }
      if (read.code == kOk &&
          versions.try_emplace(read.block, read.nonce).first->second != read.nonce) {
        round->Fail(ToString(read.block) + ": its version changed");
      }
    }
  }
  if (versions.size() != kBlocks) round->Fail("not every block was committed");
  for (const auto& [block, nonce] : versions) {
    const bool survived = nonce >= 100 + kWriters / 2;
    round->Saw(survived ? "blocks_by_a_survivor" : "blocks_by_a_killed_writer", true);
  }
  AuditAll(round);
  return "";
}

// Readers die in the middle of their transfers: what they held comes back, and the node answers.
std::string WorkerKilledWhilePinned(Round* round) {
  StartNodes(round, 1, {.dram_bytes = 4 * kMiB});
  FaultWorker* writer = round->StartWorker();
  // What they read was spilled: that takes long enough to be met in the middle.
  const Round::Put put = {.blocks = ChainBlocks(0, 0, 200 + HbmBlocks(*round))};
  ExpectStored(round, "writer", round->DoPut(writer, put));
  std::vector<FaultWorker*> readers;
  for (int i = 0; i < 3; ++i) readers.push_back(round->StartWorker());
  const Round::Fetch fetch = {.blocks = ChainBlocks(0, 0, 100)};
  // Mostly they are stopped first: only then can anybody see what they hold.
  if (round->Pick(0, 3) > 0) {
    round->Saw("readers_killed_while_pinned", StopWhilePinned(round, readers, fetch, 80));
  } else {
    for (FaultWorker* reader : readers) round->SendFetch(reader, fetch);
    round->RandomPause(80);
  }
  for (FaultWorker* reader : readers) round->KillWorker(reader);
  const auto asked = std::chrono::steady_clock::now();
  const bool answers = round->Metric(0, "okv_node_tier_capacity_bytes") > 0;
  if (!answers || std::chrono::steady_clock::now() - asked > std::chrono::seconds(3)) {
    round->Fail("the node did not answer in time after its readers had been killed");
  }
  round->WaitUntil("what killed readers held is free", [round] {
    // The writer's session is idle, and stays.
    return round->Metric(0, "okv_node_pins") == 0 && round->Metric(0, "okv_node_sessions") <= 1;
  });
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(1, 0, 200)}));
  AuditAll(round);
  return "";
}

// A node stops answering during a fetch: what others have arrives, the rest fails at the deadline,
// and nothing writes into the buffers when the node goes on.
std::string StalledNode(Round* round) {
  constexpr uint32_t kChains = 6;
  StartNodes(round, 2, {.dram_bytes = 16 * kMiB});
  FaultWorker* writer = round->StartWorker();
  FaultWorker* reader = round->StartWorker();
  PutHeads(round, writer, 0, kChains);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = Interleaved(0, kChains, 1, 12)}));
  const std::vector<BlockName> blocks = Interleaved(0, kChains, 0, 13);
  if (round->Pick(0, 1) == 1) {  // Over sessions that are open already.
    round->DoFetch(reader, {.blocks = blocks, .by_home = true}, Mode::kStrict);
  }
  const size_t victim = round->Pick(0, 1);
  const bool before = round->Pick(0, 1) == 1;
  if (before) round->SignalNode(victim, SIGSTOP);
  const Round::Fetch fetch = {
      .blocks = blocks, .deadline = Millis(600), .keep = true, .by_home = true};
  round->SendFetch(reader, fetch);
  if (!before) {
    round->RandomPause(15);
    round->SignalNode(victim, SIGSTOP);
  }
  for (const Oracle::Read& read : round->FinishFetch(reader, fetch, Mode::kExcused)) {
    const bool stalled = round->oracle().homes().at(read.block.chain) == round->NodeId(victim);
    round->Saw("blocks_before_a_stall", stalled && read.code == kOk);
    if (read.code == kOk) continue;
    round->Saw("blocks_of_a_stalled_node", stalled);
    if (!stalled) round->Fail(ToString(read.block) + ": did not arrive from a healthy node");
    if (static_cast<absl::StatusCode>(read.code) != absl::StatusCode::kDeadlineExceeded) {
      round->Fail(absl::StrCat(ToString(read.block), " of the stalled node: code ", read.code));
    }
  }
  round->SignalNode(victim, SIGCONT);
  round->DoFetch(reader, {.blocks = blocks, .by_home = true}, Mode::kStrict);
  round->CheckKept(reader);
  AuditAll(round);
  return "";
}

// The control plane is killed and restarted under load: reads go on, writes resume, and its index
// is what the nodes have.
std::string ControlKilled(Round* round) {
  StartNodes(round, 2, {.dram_bytes = 4 * kMiB});
  FaultWorker* writer = round->StartWorker();
  FaultWorker* reader = round->StartWorker();
  PutHeads(round, writer, 0, 4);
  const Round::Put put = {.blocks = Interleaved(0, 4, 1, 40), .batch = 4};
  round->SendPut(writer, put);
  round->RandomPause(60);
  round->KillControl();
  for (uint64_t reads = round->Pick(1, 4); reads > 0; --reads) {
    const size_t count =
        round->DoFetch(reader, {.blocks = SomeAcknowledged(round, 16)}, Mode::kStrict).size();
    round->Saw("reads_without_control_plane", count > 0);
    round->RandomPause(100);
  }
  round->StartControl();
  ExpectStored(round, "writer", round->FinishPut(writer, put));
  AuditAll(round);
  return "";
}

// A writer reserves 1,000 blocks and dies: nothing of it is visible, and the room comes back with
// no further traffic.
std::string DeadWriter(Round* round) {
  constexpr uint32_t kBlocks = 1000;
  StartNodes(round, 1, {.dram_bytes = 4 * kMiB});
  FaultWorker* writer = round->StartWorker();
  FaultWorker* doomed = round->StartWorker();
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(0, 0, 20)}));
  const double used = round->Metric(0, "okv_node_tier_used_bytes");
  round->SignalNode(0, SIGSTOP);  // Reservations come from the control plane; no payload goes.
  round->SendPut(doomed, {.blocks = ChainBlocks(1, 0, kBlocks), .nonce = 7, .batch = kBlocks});
  const bool reserved = round->WaitUntil("1,000 reservations are open", [round] {
    return round->ControlMetric("okv_control_reservations") >= kBlocks;
  });
  round->Saw("dead_writers_with_reservations", reserved);
  round->RandomPause(20);
  round->KillWorker(doomed);
  round->SignalNode(0, SIGCONT);
  if (!reserved) return "";
  round->WaitUntil("a dead writer's reservations are gone",
                   [round] { return round->ControlMetric("okv_control_reservations") == 0; });
  round->WaitUntil("a dead writer's room is free", [round, used] {
    return round->Metric(0, "okv_node_tier_used_bytes") == used &&
           round->Metric(0, "okv_node_claims") == 0;
  });
  for (const Oracle::Read& read :
       round->DoFetch(writer, {.blocks = ChainBlocks(1, 0, 10)}, Mode::kStrict)) {
    if (read.code == kOk) round->Fail(ToString(read.block) + ": visible, though never sent");
  }
  const Round::Put again = {.blocks = ChainBlocks(1, 0, 20), .nonce = 8, .group = "another"};
  ExpectStored(round, "another writer", round->DoPut(writer, again));
  FaultWorker* reader = round->StartWorker();
  round->DoFetch(reader, {.blocks = ChainBlocks(0, 0, 20) + ChainBlocks(1, 0, 20)}, Mode::kStrict);
  return "";
}

}  // namespace

void StartNodes(Round* round, size_t count, const Round::NodeSpec& spec) {
  round->StartControl();
  for (size_t number = 0; number < count; ++number) round->StartNode(number, spec);
}

uint32_t HbmBlocks(const Round& round) {
  const PageLayout layout = PageLayout::Of(FaultFormat());
  return static_cast<uint32_t>(round.hbm_bytes() / layout.block_bytes(Codec::kInt2));
}

void PutHeads(Round* round, FaultWorker* writer, uint32_t first, uint32_t count) {
  std::vector<uint32_t> chains;
  for (uint32_t i = 0; i < count; ++i) chains.push_back(first + i);
  ExpectStored(round, "a writer",
               round->DoPut(writer, {.blocks = Interleaved(first, count, 0, 1)}));
  round->LearnHomes(writer, chains);
}

void ExpectStored(Round* round, const std::string& who, const Json& codes) {
  for (const auto& [code, count] : codes.items()) {
    if (code == "OK" || code == "ALREADY_EXISTS") continue;
    round->Fail(absl::StrCat(who, ": ", count.get<int>(), " puts ended with ", code));
  }
}

std::vector<BlockName> SomeAcknowledged(Round* round, size_t count) {
  round->ReadJournals();
  const std::vector<BlockName> all = round->oracle().Acknowledged();
  std::set<BlockName> chosen;
  for (size_t i = 0; i < count && !all.empty(); ++i) {
    chosen.insert(all[round->Pick(0, all.size() - 1)]);
  }
  return {chosen.begin(), chosen.end()};
}

void AuditAll(Round* round) {
  FaultWorker* auditor = round->StartWorker();
  round->Audit(auditor);
  round->CheckLookups(auditor);
}

uint64_t AdoptedCount(Round* round, size_t node) {
  const std::string log = round->NodeLog(node);
  const std::string mark = "okv-node: adopted ";
  const size_t at = log.rfind(mark);
  return at == std::string::npos ? 0 : std::stoull(log.substr(at + mark.size()));
}

std::vector<Scenario> ProcessScenarios() {
  return {
      {"kill_node", KillNode, {"kills_with_objects_on_disk", "reads_of_a_dead_node"}},
      {"drain", Drain, {"drains_that_moved_blocks", "peers_killed_in_a_drain"}},
      {"slow_reader", SlowReader, {"slow_readers_with_pins"}},
      {"one_key_many_writers",
       ManyWritersOfOneKey,
       {"blocks_by_a_killed_writer", "blocks_by_a_survivor"}},
      {"worker_killed_while_pinned", WorkerKilledWhilePinned, {"readers_killed_while_pinned"}},
      {"stalled_node", StalledNode, {"blocks_before_a_stall", "blocks_of_a_stalled_node"}},
      {"control_killed", ControlKilled, {"reads_without_control_plane"}},
      {"dead_writer", DeadWriter, {"dead_writers_with_reservations"}},
  };
}

}  // namespace okv::faults
