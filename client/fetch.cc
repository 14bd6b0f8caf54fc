#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/call_board.h"
#include "client/cluster_client.h"
#include "proto/block_range.h"
#include "proto/check.h"
#include "proto/object.h"

namespace okv {

// One Fetch: asks every item's best node, all nodes at once; an item that a node does not deliver
// is asked of its next one, until the deadline. Lives on the caller's stack; used by its thread.
class ClusterClient::FetchCall {
 public:
  FetchCall(ClusterClient* client, absl::Span<const FetchItem> items, const BlockRange& range,
            absl::Duration deadline)
      : client_(client),
        items_(items),
        range_(ResolveRange(range, client->layout_)),
        deadline_(absl::Now() + deadline),
        states_(items.size()) {}

  std::vector<absl::Status> Run();

 private:
  struct ItemState {
    size_t node = 0;           // Which of the item's nodes has its turn.
    bool reconnected = false;  // Asked again over a new connection after an idle one had died.
    bool new_ticket = false;   // Asked again with a new ticket.
    bool finished = false;
    bool on_device = false;  // Its buffer is.
    absl::Status status;     // Final, or the worst of the nodes so far.
  };
  struct Group {
    LookupResult::Node node;
    Lease lease;
    absl::flat_hash_set<size_t> outstanding;  // Items whose buffers may still be written.
    absl::Time progress_at;                   // Started, or its last result.
    bool stalled = false;                     // Given up: it delivered nothing for too long.
  };

  void CheckItems();
  void Start(const std::vector<size_t>& ready);
  // The item's next step after `status`; true when it is to be asked again.
  bool Handle(size_t item, const Group& group, const absl::Status& status);
  // Goes on to the item's next node; false when there is none.
  bool Failover(size_t item, const Group& group, const absl::Status& status);
  bool HasNextNode(size_t item) const { return states_[item].node + 1 < items_[item].nodes.size(); }
  // What the checksums say of each result that is OK, and the others' statuses.
  std::vector<absl::Status> Verify(const std::vector<CallBoard::Result>& results);
  void VerifyOnDevice(const std::vector<CallBoard::Result>& results,
                      std::vector<absl::Status>* statuses);
  void Finish(size_t item, const absl::Status& status);
  void FinishTooLate(size_t item);
  // Gives up nodes that deliver nothing and whose items another one has; when to look again.
  absl::Time BreakStalled();
  void Cut();

  ClusterClient* const client_;
  const absl::Span<const FetchItem> items_;
  const absl::StatusOr<BlockRange> range_;
  const absl::Time deadline_;
  std::vector<ItemState> states_;
  std::vector<Group> groups_;
  CallBoard board_;
  size_t unfinished_ = 0;
  bool cut_ = false;  // The deadline has passed; sessions are closing.
  bool renewed_ = false;
  ClusterStats stats_;
};

namespace {

absl::Status TooLate() { return absl::DeadlineExceededError("the fetch did not end in time"); }

// What says most about an item when every node failed it: a node that is gone may hold it whole, a
// damaged copy is more than none.
int Rank(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return 4;
  if (absl::IsResourceExhausted(status)) return 3;
  if (absl::IsDataLoss(status)) return 2;
  return absl::IsNotFound(status) ? 1 : 0;
}

// Another node may do better.
bool IsNodesOwn(const absl::Status& status) { return Rank(status) > 0; }

bool IsTicketRefused(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status);
}

}  // namespace

void ClusterClient::FetchCall::Finish(size_t item, const absl::Status& status) {
  OKV_CHECK(!states_[item].finished);
  states_[item].finished = true;
  states_[item].status = status;
  --unfinished_;
}

void ClusterClient::FetchCall::FinishTooLate(size_t item) {
  const absl::Status& before = states_[item].status;
  Finish(item, before.ok() ? TooLate()
                           : absl::DeadlineExceededError(absl::StrCat(
                                 TooLate().message(), "; a node before: ", before.message())));
}

void ClusterClient::FetchCall::CheckItems() {
  unfinished_ = items_.size();
  for (size_t i = 0; i < items_.size(); ++i) {
    const FetchItem& item = items_[i];
    if (!range_.ok()) {
      Finish(i, range_.status());
      continue;
    }
    const absl::StatusOr<MemoryKind> kind = client_->KindOf(item.buffer, item.memory);
    states_[i].on_device = kind.ok() && *kind == MemoryKind::kDevice;
    const size_t expected = range_->bytes(client_->layout_, item.id.codec);
    if (!kind.ok()) {
      Finish(i, absl::InvalidArgumentError(
                    absl::StrCat("item ", i, ": its buffer: ", kind.status().message())));
    } else if (item.buffer.size() != expected) {
      Finish(i,
             absl::InvalidArgumentError(absl::StrCat(
                 "item ", i, ": its buffer has ", item.buffer.size(), " bytes, not ", expected)));
    } else if (item.nodes.empty()) {
      Finish(i, absl::NotFoundError("no node holds it"));
    }
  }
}

void ClusterClient::FetchCall::Start(const std::vector<size_t>& ready) {
  // By node, and apart those that need a connection that was never used.
  std::map<std::tuple<std::string, std::string, bool>, std::vector<size_t>> by_node;
  auto at = by_node.end();  // Of the item before: a chain's objects are mostly of one node.
  for (const size_t item : ready) {
    const LookupResult::Node& node = items_[item].nodes[states_[item].node];
    const bool fresh = states_[item].reconnected || states_[item].new_ticket;
    if (at == by_node.end() || at->first != std::tie(node.node_id, node.data_address, fresh)) {
      at = by_node.try_emplace({node.node_id, node.data_address, fresh}).first;
    }
    at->second.push_back(item);
  }
  for (auto& [key, items] : by_node) {
    // Shared: the sessions copy what they call.
    const auto members = std::make_shared<const std::vector<size_t>>(std::move(items));
    const size_t group = groups_.size();
    const LookupResult::Node node = {.node_id = std::get<0>(key), .data_address = std::get<1>(key)};
    groups_.push_back(
        {.node = node,
         .lease = std::get<2>(key) ? client_->AcquireNew(node) : client_->Acquire(node),
         .outstanding = {members->begin(), members->end()},
         .progress_at = absl::Now()});
    std::vector<NodeSession::FetchTarget> targets;
    for (const size_t item : *members) {
      targets.push_back(
          {.id = items_[item].id, .index = items_[item].index, .buffer = items_[item].buffer});
    }
    // Nodes older than ranges know the whole as the range that is not said.
    const bool whole = *range_ == BlockRange::Whole(client_->layout_);
    groups_.back().lease.session->Fetch(
        std::move(targets), whole ? BlockRange{} : *range_, deadline_ - absl::Now(),
        [this, group, members](size_t target, absl::StatusOr<ObjectHeader> header) {
          CallBoard::Result result = {.group = group,
                                      .item = (*members)[target],
                                      .status = header.status(),
                                      .header = std::nullopt};
          if (header.ok()) result.header = *std::move(header);
          board_.Post(std::move(result));
        });
  }
}

bool ClusterClient::FetchCall::Handle(size_t item, const Group& group, const absl::Status& status) {
  ItemState& state = states_[item];
  if (status.ok()) {
    Finish(item, status);
    return false;
  }
  if (cut_) {
    FinishTooLate(item);
    return false;
  }
  if (group.stalled && absl::IsUnavailable(status)) {
    if (HasNextNode(item)) return Failover(item, group, status);
    // Its only node: what is left of the time is for it.
    state.reconnected = true;
    return true;
  }
  if (absl::IsUnavailable(status) && group.lease.reused && !state.reconnected) {
    state.reconnected = true;
    return true;
  }
  if (IsTicketRefused(status) && !state.new_ticket) {
    if (!renewed_) client_->RenewTicket(client_->RpcTimeout(deadline_)).IgnoreError();
    renewed_ = true;
    state.new_ticket = true;
    return true;
  }
  if (!IsNodesOwn(status)) {
    Finish(item, status);
    return false;
  }
  if (Failover(item, group, status)) return true;
  Finish(item, absl::Status(state.status));
  return false;
}

bool ClusterClient::FetchCall::Failover(size_t item, const Group& group,
                                        const absl::Status& status) {
  ItemState& state = states_[item];
  if (Rank(status) > Rank(state.status)) state.status = status;
  if (!HasNextNode(item)) return false;
  ++state.node;
  state.reconnected = false;  // The next node's connection may be an old one, too.
  if (group.stalled) {
    ++stats_.failovers_stalled;
  } else if (absl::IsDataLoss(status)) {
    ++stats_.failovers_damaged;
  } else if (absl::IsNotFound(status)) {
    ++stats_.failovers_missing;
  } else {
    ++stats_.failovers_unavailable;
  }
  return true;
}

absl::Time ClusterClient::FetchCall::BreakStalled() {
  const absl::Duration patience = client_->options_.fetch_stall_timeout;
  const absl::Time now = absl::Now();
  absl::Time next = absl::InfiniteFuture();
  for (Group& group : groups_) {
    if (group.outstanding.empty() || group.stalled ||
        std::none_of(group.outstanding.begin(), group.outstanding.end(),
                     [this](size_t item) { return HasNextNode(item); })) {
      continue;
    }
    if (now < group.progress_at + patience) {
      next = std::min(next, group.progress_at + patience);
      continue;
    }
    group.stalled = true;
    group.lease.session->Break(absl::UnavailableError(
        absl::StrCat("node ", group.node.node_id, " at ", group.node.data_address,
                     " delivered nothing for ", absl::FormatDuration(patience))));
  }
  return next;
}

void ClusterClient::FetchCall::Cut() {
  cut_ = true;
  for (Group& group : groups_) {
    if (!group.outstanding.empty()) {
      group.lease.session->Break(TooLate());
    }
  }
}

std::vector<absl::Status> ClusterClient::FetchCall::Verify(
    const std::vector<CallBoard::Result>& results) {
  const absl::Time start = absl::Now();
  std::vector<absl::Status> statuses;
  bool any_on_device = false;
  for (const CallBoard::Result& result : results) {
    statuses.push_back(result.status);
    if (!result.status.ok()) continue;
    const absl::Span<const uint8_t> buffer = items_[result.item].buffer;
    if (states_[result.item].on_device) {
      any_on_device = true;
      statuses.back() = CheckRangeSizes(*result.header, client_->layout_, *range_, buffer.size());
    } else {
      statuses.back() = VerifyRange(*result.header, client_->layout_, *range_, buffer);
    }
  }
  if (any_on_device) VerifyOnDevice(results, &statuses);
  stats_.verify_nanos += static_cast<uint64_t>(absl::ToInt64Nanoseconds(absl::Now() - start));
  return statuses;
}

void ClusterClient::FetchCall::VerifyOnDevice(const std::vector<CallBoard::Result>& results,
                                              std::vector<absl::Status>* statuses) {
  const PageLayout& layout = client_->layout_;
  std::vector<size_t> members;
  std::vector<DeviceRuns> blocks;
  std::vector<std::vector<uint32_t>> parts;  // The checksums of ranges.
  for (size_t i = 0; i < results.size(); ++i) {
    const CallBoard::Result& result = results[i];
    if (!result.status.ok() || !(*statuses)[i].ok() || !states_[result.item].on_device) continue;
    members.push_back(i);
    blocks.push_back(
        DeviceRuns::OfRange(result.header->id, layout, *range_, items_[result.item].buffer.data()));
    parts.push_back(range_->Select(result.header->checksums, layout));
  }
  const std::vector<absl::Span<const uint32_t>> expected(parts.begin(), parts.end());
  const std::vector<absl::Status> verified = client_->options_.device->Verify(blocks, expected);
  for (size_t i = 0; i < members.size(); ++i) {
    // A device that fails is no fault of the node's, and no other node does better.
    (*statuses)[members[i]] =
        absl::IsUnavailable(verified[i]) ? absl::InternalError(verified[i].message()) : verified[i];
  }
}

std::vector<absl::Status> ClusterClient::FetchCall::Run() {
  CheckItems();
  std::vector<size_t> ready;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!states_[i].finished) ready.push_back(i);
  }
  while (unfinished_ > 0) {
    if (!cut_ && absl::Now() >= deadline_) Cut();
    if (cut_) {
      for (const size_t item : std::exchange(ready, {})) FinishTooLate(item);
    }
    if (unfinished_ == 0) break;  // The deadline ended the last ones.
    Start(std::exchange(ready, {}));
    const absl::Time until = cut_ ? absl::InfiniteFuture() : std::min(deadline_, BreakStalled());
    const std::vector<CallBoard::Result> results = board_.Take(until);
    // Here, on the caller's thread, while the transport's receives the next ones.
    const std::vector<absl::Status> statuses = Verify(results);
    for (size_t i = 0; i < results.size(); ++i) {
      const CallBoard::Result& result = results[i];
      Group& group = groups_[result.group];
      group.progress_at = absl::Now();
      OKV_CHECK(group.outstanding.erase(result.item) == 1);
      if (result.status.ok() && absl::IsDataLoss(statuses[i])) {
        // The node finds out whether it was its copy or the way here.
        group.lease.session->Complain(items_[result.item].id, std::string(statuses[i].message()));
        ++stats_.complaints;
      }
      if (group.outstanding.empty()) client_->Release(group.node, group.lease.session);
      if (Handle(result.item, group, statuses[i])) ready.push_back(result.item);
    }
  }
  for (const Group& group : groups_) OKV_CHECK(group.outstanding.empty());
  std::vector<absl::Status> statuses;
  for (size_t i = 0; i < items_.size(); ++i) {
    statuses.push_back(states_[i].status);
    ++(statuses[i].ok() ? stats_.fetched : stats_.fetch_failed);
    if (!statuses[i].ok()) continue;
    stats_.fetched_bytes += items_[i].buffer.size();
    if (states_[i].on_device) ++stats_.fetched_to_device;
  }
  client_->Count(stats_);
  return statuses;
}

std::vector<absl::Status> ClusterClient::Fetch(absl::Span<const FetchItem> items,
                                               const BlockRange& range, absl::Duration deadline) {
  FetchCall call(this, items, range, deadline);
  return call.Run();
}

}  // namespace okv
