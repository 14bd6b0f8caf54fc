#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/call_board.h"
#include "client/cluster_client.h"
#include "proto/block_range.h"
#include "proto/check.h"
#include "proto/object.h"

namespace okv {
namespace {

// Objects in one Reserve: about 150 B each, far below gRPC's 4 MiB.
constexpr size_t kReserveMax = 1024;

absl::Status TooLate() { return absl::DeadlineExceededError("the put did not end in time"); }

}  // namespace

// One Put: reserves places, then offers each object to the node that the control plane chose. An
// object has one place; when that node is gone the caller's next Put gets another. Lives on the
// caller's stack; used by its thread.
class ClusterClient::PutCall {
 public:
  PutCall(ClusterClient* client, absl::Span<const PutItem> items, const PutOptions& options)
      : client_(client),
        items_(items),
        write_group_(options.write_group),
        range_(ResolveRange(options.range, client->layout_)),
        deadline_(absl::Now() + options.deadline),
        states_(items.size()) {}

  std::vector<absl::Status> Run();

 private:
  struct ItemState {
    v1::Placement placement;
    std::string header;        // Encoded, made once the place is known.
    bool reconnected = false;  // Offered again over a new connection after an idle one had died.
    bool new_ticket = false;
    std::optional<size_t> repeats;  // The earlier item with the same id.
    bool on_device = false;         // Its payload is.
    bool finished = false;
    absl::Status status;
  };
  struct Group {
    LookupResult::Node node;
    Lease lease;
    size_t outstanding = 0;
  };

  // The items that are sound, and not repeated by a later one: those to reserve places for.
  std::vector<size_t> CheckItems();
  // The items that are to be offered.
  std::vector<size_t> ReservePlaces();
  // For each of `ready` that has none yet; those for which it cannot be made are finished.
  void MakeHeaders(const std::vector<size_t>& ready);
  std::vector<std::vector<uint32_t>> ChecksumsOf(const std::vector<size_t>& items);
  void Start(const std::vector<size_t>& ready);
  bool Handle(size_t item, const Group& group, const absl::Status& status);
  void Finish(size_t item, const absl::Status& status);
  void Cut();

  ClusterClient* const client_;
  const absl::Span<const PutItem> items_;
  const std::string write_group_;
  const absl::StatusOr<BlockRange> range_;
  const absl::Time deadline_;
  std::vector<ItemState> states_;
  std::vector<Group> groups_;
  CallBoard board_;
  size_t unfinished_ = 0;
  bool cut_ = false;
  bool renewed_ = false;
};

void ClusterClient::PutCall::Finish(size_t item, const absl::Status& status) {
  OKV_CHECK(!states_[item].finished);
  states_[item].finished = true;
  states_[item].status = status;
  --unfinished_;
}

std::vector<size_t> ClusterClient::PutCall::CheckItems() {
  unfinished_ = items_.size();
  std::vector<size_t> sound;
  absl::flat_hash_map<ObjectId, size_t> first;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!range_.ok()) {
      Finish(i, range_.status());
      continue;
    }
    const absl::StatusOr<MemoryKind> kind = client_->KindOf(items_[i].payload, items_[i].memory);
    states_[i].on_device = kind.ok() && *kind == MemoryKind::kDevice;
    const size_t expected = range_->bytes(client_->layout_, items_[i].id.codec);
    if (!kind.ok()) {
      Finish(i, absl::InvalidArgumentError(
                    absl::StrCat("item ", i, ": its payload: ", kind.status().message())));
    } else if (items_[i].payload.size() != expected) {
      Finish(i, absl::InvalidArgumentError(absl::StrCat("item ", i, ": its payload has ",
                                                        items_[i].payload.size(), " bytes, not ",
                                                        expected)));
    } else if (const auto [known, is_new] = first.emplace(items_[i].id, i); !is_new) {
      states_[i].repeats = known->second;
      Finish(i, absl::OkStatus());
    } else {
      sound.push_back(i);
    }
  }
  return sound;
}

std::vector<size_t> ClusterClient::PutCall::ReservePlaces() {
  const std::vector<size_t> sound = CheckItems();
  std::vector<size_t> ready;
  for (size_t begin = 0; begin < sound.size(); begin += kReserveMax) {
    const size_t end = std::min(sound.size(), begin + kReserveMax);
    std::vector<PutItem> batch;
    for (size_t i = begin; i < end; ++i) batch.push_back(items_[sound[i]]);
    std::vector<v1::Placement> placements;
    client_->Reserve(batch, write_group_, deadline_, &placements);
    for (size_t i = begin; i < end; ++i) {
      v1::Placement& placement = placements[i - begin];
      if (placement.code() != 0) {
        Finish(sound[i],
               absl::Status(static_cast<absl::StatusCode>(placement.code()), placement.message()));
        continue;
      }
      states_[sound[i]].placement = std::move(placement);
      ready.push_back(sound[i]);
    }
  }
  return ready;
}

std::vector<std::vector<uint32_t>> ClusterClient::PutCall::ChecksumsOf(
    const std::vector<size_t>& items) {
  const PageLayout& layout = client_->layout_;
  std::vector<std::vector<uint32_t>> checksums(items.size());
  std::vector<size_t> on_device;
  std::vector<DeviceRuns> blocks;
  for (size_t i = 0; i < items.size(); ++i) {
    const PutItem& item = items_[items[i]];
    if (states_[items[i]].on_device) {
      on_device.push_back(i);
      blocks.push_back(DeviceRuns::OfRange(item.id, layout, *range_, item.payload.data()));
    } else {
      checksums[i] = RangeChecksums(item.id, layout, *range_, item.payload);
    }
  }
  if (blocks.empty()) return checksums;
  absl::StatusOr<std::vector<std::vector<uint32_t>>> computed =
      client_->options_.device->Checksum(blocks);
  for (size_t i = 0; i < on_device.size(); ++i) {
    if (computed.ok()) {
      checksums[on_device[i]] = std::move((*computed)[i]);
    } else {
      // No other node or try would do better: not kUnavailable.
      Finish(items[on_device[i]], absl::InternalError(computed.status().message()));
    }
  }
  return checksums;
}

void ClusterClient::PutCall::MakeHeaders(const std::vector<size_t>& ready) {
  std::vector<size_t> missing;
  for (const size_t item : ready) {
    if (states_[item].header.empty()) missing.push_back(item);
  }
  std::vector<std::vector<uint32_t>> checksums = ChecksumsOf(missing);
  for (size_t i = 0; i < missing.size(); ++i) {
    const size_t item = missing[i];
    if (states_[item].finished) continue;
    ObjectHeader header;
    header.format_id = client_->format_id_;
    header.id = items_[item].id;
    header.parent = items_[item].parent;
    header.index = items_[item].index;
    header.payload_bytes = client_->layout_.block_bytes(header.id.codec);
    header.generation = states_[item].placement.write_id();
    header.checksums = std::move(checksums[i]);
    states_[item].header = header.Encode();
  }
}

void ClusterClient::PutCall::Start(const std::vector<size_t>& ready) {
  std::map<std::tuple<std::string, std::string, bool>, std::vector<size_t>> by_node;
  MakeHeaders(ready);
  for (const size_t item : ready) {
    if (states_[item].finished) continue;
    const v1::NodeAddress& node = states_[item].placement.node();
    const bool fresh = states_[item].reconnected || states_[item].new_ticket;
    by_node[{node.node_id(), node.data_address(), fresh}].push_back(item);
  }
  for (auto& [key, items] : by_node) {
    // Shared: the sessions copy what they call.
    const auto members = std::make_shared<const std::vector<size_t>>(std::move(items));
    const size_t group = groups_.size();
    const LookupResult::Node node = {.node_id = std::get<0>(key), .data_address = std::get<1>(key)};
    groups_.push_back(
        {.node = node,
         .lease = std::get<2>(key) ? client_->AcquireNew(node) : client_->Acquire(node),
         .outstanding = members->size()});
    std::vector<NodeSession::PutTarget> targets;
    for (const size_t item : *members) {
      targets.push_back({.reservation = states_[item].placement.reservation(),
                         .object_header = states_[item].header,
                         .payload = items_[item].payload});
    }
    // Nodes older than ranges know the whole as the range that is not said.
    const bool whole = *range_ == BlockRange::Whole(client_->layout_);
    groups_.back().lease.session->Put(std::move(targets), whole ? BlockRange{} : *range_,
                                      [this, group, members](size_t target, absl::Status status) {
                                        board_.Post({.group = group,
                                                     .item = (*members)[target],
                                                     .status = std::move(status),
                                                     .header = std::nullopt});
                                      });
  }
}

bool ClusterClient::PutCall::Handle(size_t item, const Group& group, const absl::Status& status) {
  ItemState& state = states_[item];
  if (cut_ && !status.ok()) {
    Finish(item, TooLate());
    return false;
  }
  if (absl::IsUnavailable(status) && group.lease.reused && !state.reconnected) {
    state.reconnected = true;
    return true;
  }
  if ((absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status)) && !state.new_ticket) {
    if (!renewed_) client_->RenewTicket(client_->RpcTimeout(deadline_)).IgnoreError();
    renewed_ = true;
    state.new_ticket = true;
    return true;
  }
  Finish(item, status);
  return false;
}

void ClusterClient::PutCall::Cut() {
  cut_ = true;
  for (Group& group : groups_) {
    if (group.outstanding > 0) group.lease.session->Break(TooLate());
  }
}

std::vector<absl::Status> ClusterClient::PutCall::Run() {
  std::vector<size_t> ready = ReservePlaces();
  while (unfinished_ > 0) {
    if (!cut_ && absl::Now() >= deadline_) Cut();
    if (cut_) {
      for (const size_t item : std::exchange(ready, {})) Finish(item, TooLate());
    }
    if (unfinished_ == 0) break;  // The deadline ended the last ones.
    Start(std::exchange(ready, {}));
    if (unfinished_ == 0) break;  // What was left never started.
    for (const CallBoard::Result& result : board_.Take(cut_ ? absl::InfiniteFuture() : deadline_)) {
      Group& group = groups_[result.group];
      if (--group.outstanding == 0) client_->Release(group.node, group.lease.session);
      if (Handle(result.item, group, result.status)) ready.push_back(result.item);
    }
  }
  std::vector<absl::Status> statuses;
  for (const ItemState& state : states_) {
    statuses.push_back(state.repeats.has_value() ? states_[*state.repeats].status : state.status);
    if (state.repeats.has_value() && statuses.back().ok()) {
      statuses.back() = absl::AlreadyExistsError(
          absl::StrCat("item ", *state.repeats, " of the same call is this object"));
    }
  }
  return statuses;
}

std::vector<absl::Status> ClusterClient::Put(absl::Span<const PutItem> items,
                                             const PutOptions& options) {
  PutCall call(this, items, options);
  return call.Run();
}

}  // namespace okv
