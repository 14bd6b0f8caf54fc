#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/cluster/fault_media.h"
#include "tests/cluster/fault_scenarios.h"

namespace okv::faults {
namespace {

using Json = nlohmann::json;
using Mode = Oracle::Mode;
using Millis = std::chrono::milliseconds;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// What a writer may hear of a disk that takes nothing.
void ExpectStoredOrRefused(Round* round, const Json& codes) {
  for (const auto& [code, count] : codes.items()) {
    if (code == "OK" || code == "RESOURCE_EXHAUSTED" || code == "UNAVAILABLE" ||
        code == "DEADLINE_EXCEEDED" || code == "ABORTED") {
      continue;
    }
    round->Fail(absl::StrCat("without room ", count.get<int>(), " puts ended with ", code));
  }
}

// A node that makes room drops what was acknowledged, and says how much: no more may be missing.
// Returns the bytes of what is still there.
uint64_t ExcuseEvicted(Round* round, FaultWorker* reader, size_t node) {
  round->ReadJournals();
  const PageLayout layout = PageLayout::Of(FaultFormat());
  uint64_t missing = 0;
  uint64_t held_bytes = 0;
  const std::vector<BlockName> all = round->oracle().Acknowledged();
  constexpr size_t kBlocksPerCall = 64;
  for (size_t begin = 0; begin < all.size(); begin += kBlocksPerCall) {
    const size_t end = std::min(all.size(), begin + kBlocksPerCall);
    const Round::Fetch fetch = {.blocks = {all.begin() + static_cast<ptrdiff_t>(begin),
                                           all.begin() + static_cast<ptrdiff_t>(end)}};
    for (const Oracle::Read& read : round->DoFetch(reader, fetch, Mode::kExcused)) {
      if (read.code == 0) held_bytes += layout.block_bytes(read.block.codec());
      if (static_cast<absl::StatusCode>(read.code) != absl::StatusCode::kNotFound) continue;
      ++missing;
      round->oracle().MayBeLost(read.block);
    }
  }
  const double evicted = round->Metric(node, "okv_node_evicted_objects_total");
  round->Saw("evicted_blocks", evicted > 0);
  if (static_cast<double>(missing) <= evicted) return held_bytes;
  round->tally().lost_objects += missing - static_cast<uint64_t>(evicted);
  round->Note(
      absl::StrCat(missing, " acknowledged blocks are missing, and the node evicted ", evicted));
  return held_bytes;
}

// A node that drops everything makes room too. REQUIRES: more than that was sent.
void ExpectHeld(Round* round, uint64_t held_bytes, uint64_t least_bytes) {
  if (held_bytes >= least_bytes) return;
  round->Fail(absl::StrCat("a node with room for much more holds ", held_bytes, " bytes"));
}

uint64_t FileBytes(const std::string& directory) {
  uint64_t bytes = 0;
  std::error_code gone;  // A file may go between being listed and being asked.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory, gone)) {
    if (!entry.is_regular_file(gone)) continue;
    const uint64_t size = entry.file_size(gone);
    if (!gone) bytes += size;
  }
  return bytes;
}

// The disk fills before the node's own limit: what was acknowledged stays readable unless the node
// says that it made room, writes are refused with a code, and go on once there is room.
std::string DiskFull(Round* round) {
  round->StartControl();
  const std::string disk = round->Path("small_disk");
  constexpr uint64_t kDisk = 7 * kMiB;
  const std::string why = MountSmallDisk(disk, kDisk);
  if (!why.empty()) return why;
  round->StartNode(0, {.dram_bytes = 2 * kMiB, .data_dir = disk});
  FaultWorker* writer = round->StartWorker();
  const uint32_t count = 250 + HbmBlocks(*round);
  const Round::Put put = {.blocks = ChainBlocks(0, 0, count), .deadline = Millis(1000)};
  const Json codes = round->DoPut(writer, put);
  ExpectStoredOrRefused(round, codes);
  FaultWorker* reader = round->StartWorker();
  const uint64_t full_bytes = ExcuseEvicted(round, reader, 0);
  ExpectHeld(round, full_bytes, kDisk - kMiB);
  const bool refused = codes.value("OK", uint32_t{0}) < count;
  if (!refused && round->Metric(0, "okv_node_evicted_objects_total") == 0) {
    round->Fail("what was written fits a disk that is too small for it");
  }
  const std::string resized = ResizeDisk(disk, 200 * kMiB);
  if (!resized.empty()) round->Fail(resized);
  ExpectStored(round, "a writer after the disk grew",
               round->DoPut(writer, {.blocks = ChainBlocks(1, 0, 100)}));
  // Nothing of the 100 blocks has to go.
  const PageLayout layout = PageLayout::Of(FaultFormat());
  const uint64_t more_bytes = 99 * layout.block_bytes(Codec::kInt2);
  ExpectHeld(round, ExcuseEvicted(round, reader, 0), full_bytes + more_bytes);
  round->StopNode(0);
  round->ReadJournals();
  round->oracle().AllSpilled();
  round->StartNode(0, {.dram_bytes = 2 * kMiB, .data_dir = disk});
  AuditAll(round);
  return "";
}

// Five times the disk's limit is written: the files stay within 1.2 times the limit, and nothing is
// missing that the node does not report as evicted.
std::string DiskLimit(Round* round) {
  constexpr uint64_t kLimit = 6 * kMiB;
  StartNodes(round, 1, {.dram_bytes = 2 * kMiB, .disk_bytes = kLimit});
  FaultWorker* writer = round->StartWorker();
  uint64_t most_bytes = 0;
  for (uint32_t chain = 0; chain < 5; ++chain) {
    const Round::Put put = {.blocks = ChainBlocks(chain, 0, 150), .deadline = Millis(400)};
    ExpectStoredOrRefused(round, round->DoPut(writer, put));
    most_bytes = std::max(most_bytes, FileBytes(round->NodeDirectory(0)));
  }
  // No strict audit behind it: the node goes on making room.
  ExpectHeld(round, ExcuseEvicted(round, writer, 0), kLimit * 3 / 4);
  if (round->Metric(0, "okv_node_evicted_objects_total") == 0) {
    round->Fail("five times what the disk may hold was written, and nothing evicted");
  }
  // Beside the payloads: RocksDB's own files, and what it compacts at the moment.
  if (static_cast<double>(most_bytes) > 1.2 * kLimit + kMiB) {
    round->Fail(absl::StrCat("the files of a disk tier of ", kLimit, " bytes took ", most_bytes));
  }
  return "";
}

// A bit of the index, or of a group's own table, flips while the node is stopped: it starts, and
// loses nothing.
std::string FlippedIndex(Round* round) {
  StartNodes(round, 1, {.dram_bytes = 2 * kMiB});
  FaultWorker* writer = round->StartWorker();
  const std::vector<BlockName> blocks = ChainBlocks(0, 0, 60);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = blocks}));
  round->StopNode(0);
  round->ReadJournals();
  round->oracle().AllSpilled();
  BlockKeys keys("default");
  const BlockName damaged = blocks[round->Pick(0, blocks.size() - 1)];
  const std::string key(keys.Id(damaged).key.view());
  std::vector<FilePlace> places = FindInFiles(round->NodeDirectory(0), key);
  if (places.empty()) {
    round->Fail(absl::StrCat(ToString(damaged), " is in no file"));
    return "";
  }
  FilePlace place = places[round->Pick(0, places.size() - 1)];
  place.offset += round->Pick(0, 60);
  if (!FlipInFile(place, static_cast<unsigned>(round->Pick(0, 7)))) round->Fail("no flip");
  round->StartNode(0, {.dram_bytes = 2 * kMiB});
  round->DoFetch(writer, {.blocks = blocks}, Mode::kStrict);
  round->Saw("damaged_indexes_rebuilt",
             round->Metric(0, "okv_node_index_rebuilds_total") > 0 ||
                 round->Metric(0, "okv_node_index_recovered_objects_total") > 0);
  AuditAll(round);
  return "";
}

// The disk takes nothing for a while: no group can be written, and half of the time no file of the
// index either. What was acknowledged stays readable, and all goes on afterwards.
std::string DiskTaken(Round* round) {
  const Round::NodeSpec spec = {.dram_bytes = 2 * kMiB};
  StartNodes(round, 1, spec);
  FaultWorker* writer = round->StartWorker();
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(0, 0, 60)}));
  const std::string disk = round->NodeDirectory(0);
  // More than a disk takes before it is taken away.
  const Round::Put put = {.blocks = ChainBlocks(1, 0, 600 + HbmBlocks(*round)),
                          .deadline = Millis(1200)};
  auto taken = std::make_unique<ImmutableDirectories>();
  round->SendPut(writer, put);
  round->RandomPause(20);
  std::string why = taken->Add(disk + "/groups");
  if (why.empty() && round->Pick(0, 1) == 1) why = taken->Add(disk + "/rocksdb");
  if (!why.empty()) {
    round->FinishPut(writer, put);
    return why;
  }
  FaultWorker* reader = round->StartWorker();
  round->WaitUntil("a group cannot be spilled",
                   [round] { return round->Metric(0, "okv_node_spill_failures_total") > 0; });
  round->DoFetch(reader, {.blocks = SomeAcknowledged(round, 16)}, Mode::kStrict);
  ExpectStoredOrRefused(round, round->FinishPut(writer, put));
  taken.reset();
  ExpectStored(round, "a writer after the disk came back",
               round->DoPut(writer, {.blocks = ChainBlocks(2, 0, 100)}));
  AuditAll(round);
  round->StopNode(0);
  round->ReadJournals();
  round->oracle().AllSpilled();
  round->StartNode(0, spec);
  AuditAll(round);
  return "";
}

}  // namespace

std::vector<Scenario> DiskScenarios() {
  return {
      {"disk_full", DiskFull, {"evicted_blocks"}},
      {"disk_limit", DiskLimit, {"evicted_blocks"}},
      {"disk_taken", DiskTaken},
      {"flipped_index", FlippedIndex, {"damaged_indexes_rebuilt"}},
  };
}

}  // namespace okv::faults
