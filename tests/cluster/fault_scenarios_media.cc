#include <signal.h>

#include <algorithm>
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
constexpr uint64_t kNonce = 1;  // Round::Put's default.
constexpr size_t kNeedleBytes = 48;

// Bytes of the block's payload that are nowhere else.
std::string Needle(Round* round, const BlockName& block) {
  const PageLayout layout = PageLayout::Of(FaultFormat());
  BlockKeys keys("default");  // The salt is the tenant's name.
  const ObjectId id = keys.Id(block);
  std::vector<uint8_t> payload(layout.block_bytes(id.codec));
  FillPattern(id, layout, kNonce, absl::MakeSpan(payload));
  const size_t at = round->Pick(1, payload.size() / 8 - kNeedleBytes / 8 - 1) * 8;
  return {payload.begin() + static_cast<ptrdiff_t>(at),
          payload.begin() + static_cast<ptrdiff_t>(at + kNeedleBytes)};
}

// Each reader's one call for everything, all at once: exactly the damaged block fails, and every
// other one arrives.
void ExpectOnlyThisFails(Round* round, const std::vector<FaultWorker*>& readers,
                         const std::vector<BlockName>& blocks, const BlockName& damaged) {
  for (FaultWorker* reader : readers) round->SendFetch(reader, {.blocks = blocks});
  for (FaultWorker* reader : readers) {
    for (const Oracle::Read& read : round->FinishFetch(reader, {.blocks = blocks}, Mode::kStrict)) {
      if (read.block != damaged) continue;
      const auto code = static_cast<absl::StatusCode>(read.code);
      if (code == absl::StatusCode::kDataLoss || code == absl::StatusCode::kNotFound) continue;
      round->Fail(
          absl::StrCat("the damaged ", ToString(damaged), ": ", absl::StatusCodeToString(code)));
    }
  }
}

void WriteAgain(Round* round, FaultWorker* writer, const BlockName& block) {
  round->oracle().Repaired(block);
  ExpectStored(round, "who writes a dropped block again",
               round->DoPut(writer, {.blocks = {block}, .group = "again"}));
  round->DoFetch(writer, {.blocks = {block}}, Mode::kStrict);
}

// A bit of a payload on disk flips while the node is stopped: that block alone is damaged, for
// several readers that come for it at the same time too.
std::string FlippedPayload(Round* round) {
  StartNodes(round, 1, {.dram_bytes = 2 * kMiB});
  FaultWorker* writer = round->StartWorker();
  const std::vector<BlockName> blocks = ChainBlocks(0, 0, 40) + ChainBlocks(1, 0, 20);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = blocks}));
  round->StopNode(0);
  round->ReadJournals();
  round->oracle().AllSpilled();
  const BlockName damaged = blocks[round->Pick(0, blocks.size() - 1)];
  const std::string needle = Needle(round, damaged);
  std::vector<FilePlace> places = FindInFiles(round->NodeDirectory(0), needle);
  if (places.size() != 1) {
    round->Fail(absl::StrCat(ToString(damaged), " is in ", places.size(), " files"));
    return "";
  }
  places[0].offset += round->Pick(0, kNeedleBytes - 1);
  if (!FlipInFile(places[0], static_cast<unsigned>(round->Pick(0, 7)))) round->Fail("no flip");
  round->oracle().Damaged(damaged);
  round->StartNode(0, {.dram_bytes = 2 * kMiB});
  std::vector<FaultWorker*> readers;
  for (int i = 0; i < 3; ++i) readers.push_back(round->StartWorker());
  std::vector<BlockName> in_turn = blocks;
  if (round->Pick(0, 1) == 1) {
    // With sessions that are open, and the damaged block first, they meet at it.
    for (FaultWorker* reader : readers) {
      const BlockName other = blocks[damaged == blocks[0] ? 1 : 0];
      round->DoFetch(reader, {.blocks = {other}}, Mode::kStrict);
    }
    std::swap(in_turn[0], *std::find(in_turn.begin(), in_turn.end(), damaged));
  }
  ExpectOnlyThisFails(round, readers, in_turn, damaged);
  round->WaitUntil("the damaged block is counted", [round] {
    return round->Metric(0, "okv_node_corrupt_objects_total", "tier=\"disk\"") == 1;
  });
  AuditAll(round);
  WriteAgain(round, writer, damaged);
  return "";
}

// A bit of a resident page flips: the reader notices, and the node as soon as it spills.
std::string FlippedDram(Round* round) {
  StartNodes(round, 1, {.dram_bytes = 4 * kMiB, .with_hbm = false});
  FaultWorker* writer = round->StartWorker();
  const std::vector<BlockName> blocks = ChainBlocks(0, 0, 50);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = blocks}));
  const BlockName damaged = blocks[round->Pick(0, blocks.size() - 1)];
  const std::string needle = Needle(round, damaged);
  const size_t offset = round->Pick(0, kNeedleBytes - 1);
  const auto bit = static_cast<unsigned>(round->Pick(0, 7));
  const absl::StatusOr<size_t> places = FlipInMemory(round->NodePid(0), needle, offset, bit);
  if (!places.ok()) return std::string(places.status().message());
  if (*places == 0)
    round->Fail(absl::StrCat(ToString(damaged), " is nowhere in the node's memory"));
  round->ReadJournals();
  round->oracle().Damaged(damaged);
  ExpectOnlyThisFails(round, {writer}, blocks, damaged);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(1, 0, 200)}));
  round->WaitUntil("the node finds its damaged copy",
                   [round] { return round->Metric(0, "okv_node_corrupt_objects_total") == 1; });
  AuditAll(round);
  WriteAgain(round, writer, damaged);
  return "";
}

// The link goes down in the middle of transfers and comes back: codes within the deadline while it
// is down, everything as before once it is up.
std::string CutLink(Round* round) {
  std::string why;
  const std::unique_ptr<OwnLink> link = OwnLink::Create(&why);
  if (link == nullptr) return why;
  StartNodes(round, 2, {.dram_bytes = 4 * kMiB});
  FaultWorker* writer = round->StartWorker();
  FaultWorker* reader = round->StartWorker();
  PutHeads(round, writer, 0, 4);
  ExpectStored(round, "writer", round->DoPut(writer, {.blocks = ChainBlocks(0, 1, 160)}));
  const Round::Put put = {.blocks = ChainBlocks(1, 1, 60)};
  const Round::Fetch fetch = {
      .blocks = ChainBlocks(0, 0, 161), .deadline = Millis(700), .keep = true};
  const bool connected = round->Pick(0, 1) == 1;  // Half of the links go while they are made.
  if (connected) round->DoFetch(reader, {.blocks = ChainBlocks(0, 0, 4)}, Mode::kStrict);
  round->SendPut(writer, put);
  uint64_t pause_ms = connected ? 40 : 80;
  bool in_the_middle = false;
  for (int tries = 0; tries < 5 && !in_the_middle; ++tries) {
    link->Set(true);
    round->SendFetch(reader, fetch);
    round->RandomPause(pause_ms);
    link->Set(false);
    size_t cut = 0;
    for (const Oracle::Read& read : round->FinishFetch(reader, fetch, Mode::kExcused)) {
      cut += read.code != 0;
    }
    in_the_middle = cut > 0 && cut < fetch.blocks.size();
    pause_ms = cut == 0 ? pause_ms / 2 + 1 : 2 * pause_ms;
  }
  round->Saw("transfers_cut", in_the_middle);
  round->DoFetch(reader, {.blocks = ChainBlocks(0, 0, 8), .deadline = Millis(300), .keep = true},
                 Mode::kExcused);
  link->Set(true);
  round->DoFetch(reader, {.blocks = fetch.blocks}, Mode::kStrict);
  round->CheckKept(reader);
  ExpectStored(round, "a writer after the link came back", round->FinishPut(writer, put));
  AuditAll(round);
  round->Finish();  // Here: its processes are behind this link.
  return "";
}

}  // namespace

std::vector<Scenario> MediaScenarios() {
  return {
      {"flipped_payload", FlippedPayload},
      {"flipped_dram", FlippedDram},
      {"cut_link", CutLink, {"transfers_cut"}},
  };
}

}  // namespace okv::faults
