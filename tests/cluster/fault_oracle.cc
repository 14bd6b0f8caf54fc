#include "tests/cluster/fault_oracle.h"

#include <algorithm>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tests/support/process.h"

namespace okv::faults {

std::string ToString(const BlockName& block) {
  return absl::StrCat("block ", block.index, " of chain ", block.chain);
}

std::vector<std::string> MarksNotSeen(const Tally::Scenario& counts,
                                      const std::vector<std::string>& marks) {
  std::vector<std::string> missing;
  if (counts.rounds < kRoundsToJudge) return missing;
  for (const std::string& mark : marks) {
    const auto found = counts.seen.find(mark);
    if (found == counts.seen.end() || found->second == 0) missing.push_back(mark);
  }
  return missing;
}

void Oracle::ReadJournal(const std::string& path) {
  const std::string text = testing_support::ReadFileOrEmpty(path);
  size_t& offset = journal_offsets_[path];
  const size_t end = text.rfind('\n');
  if (end == std::string::npos || end < offset) return;
  std::istringstream lines(text.substr(offset, end + 1 - offset));
  offset = end + 1;
  char kind;
  int64_t nanos;
  int64_t done_nanos;
  BlockName block;
  uint64_t nonce;
  while (lines >> kind >> nanos >> done_nanos >> block.chain >> block.index >> nonce) {
    Fate& fate = fates_[block];
    fate.attempted.insert(nonce);
    if (kind != 'A') continue;
    fate.acked.insert(nonce);
    fate.acked_nanos = std::max(fate.acked_nanos, nanos);
    fate.first_ack_nanos = std::min(fate.first_ack_nanos, done_nanos);
  }
}

void Oracle::NodeKilled(const std::string& node_id, int64_t nanos) {
  kills_.push_back({.node_id = node_id, .nanos = nanos});
}

void Oracle::AllSpilled() {
  for (auto& [block, fate] : fates_) fate.on_disk = fate.on_disk || Required(block);
}

bool Oracle::Required(const BlockName& block) const {
  const auto found = fates_.find(block);
  if (found == fates_.end()) return false;
  const Fate& fate = found->second;
  if (fate.acked.empty() || fate.damaged || fate.may_be_lost) return false;
  if (fate.on_disk) return true;
  const auto home = homes_.find(block.chain);
  for (const Kill& kill : kills_) {
    if (fate.acked_nanos > kill.nanos) continue;
    // A chain goes on elsewhere once its home is dead.
    const bool moved =
        home == homes_.end() || std::any_of(kills_.begin(), kills_.end(), [&](const Kill& other) {
          return other.node_id == home->second && other.nanos <= fate.acked_nanos;
        });
    if (moved || home->second == kill.node_id) return false;
  }
  return true;
}

bool Oracle::IsDamaged(const BlockName& block) const {
  const auto found = fates_.find(block);
  return found != fates_.end() && found->second.damaged;
}

std::vector<BlockName> Oracle::Attempted() const {
  std::vector<BlockName> blocks;
  for (const auto& [block, fate] : fates_) blocks.push_back(block);
  return blocks;
}

std::vector<BlockName> Oracle::Acknowledged() const {
  std::vector<BlockName> blocks;
  for (const auto& [block, fate] : fates_) {
    if (!fate.acked.empty()) blocks.push_back(block);
  }
  return blocks;
}

std::set<uint64_t> Oracle::AcknowledgedNonces(const BlockName& block) const {
  const auto found = fates_.find(block);
  return found == fates_.end() ? std::set<uint64_t>() : found->second.acked;
}

std::string Oracle::Judge(const Read& read, Mode mode) {
  ++tally_->reads;
  const Fate& fate = fates_[read.block];
  const absl::StatusCode code = static_cast<absl::StatusCode>(read.code);
  if (code == absl::StatusCode::kOk) {
    if (read.wrong_bytes > 0) {
      tally_->wrong_bytes += read.wrong_bytes;
      return absl::StrCat(ToString(read.block), ": ", read.wrong_bytes, " wrong bytes");
    }
    if (!fate.attempted.contains(read.nonce)) {
      ++tally_->wrong_bytes;
      return absl::StrCat(ToString(read.block), ": from writer ", read.nonce, ", who never was");
    }
    ++tally_->verified_hits;
    if (!fate.damaged) return "";
    ++tally_->failed_checks;
    return absl::StrCat(ToString(read.block), ": its damage was not noticed");
  }
  if (mode == Mode::kExcused || fate.damaged) return "";
  const bool late = read.sent_nanos < fate.first_ack_nanos;  // The write ended after the question.
  if (Required(read.block) && !late) {
    ++(kills_.empty() && !fate.on_disk ? tally_->unexpected_misses : tally_->lost_objects);
    return absl::StrCat(ToString(read.block), " was acknowledged and is now ",
                        absl::StatusCodeToString(code));
  }
  if (code == absl::StatusCode::kNotFound) return "";
  ++tally_->failed_checks;
  return absl::StrCat(ToString(read.block), ": ", absl::StatusCodeToString(code));
}

}  // namespace okv::faults
