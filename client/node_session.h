#ifndef OKV_CLIENT_NODE_SESSION_H_
#define OKV_CLIENT_NODE_SESSION_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/transport/transport.h"
#include "proto/block_range.h"
#include "proto/data_plane.pb.h"
#include "proto/ids.h"
#include "proto/object.h"

namespace okv {

// How many payloads of one session are on offer at a node at a time: enough to keep the link busy
// while the node verifies and commits, few enough that a slow node holds little of the worker.
inline constexpr size_t kPutsInFlightMax = 8;

struct NodeSessionOptions {
  std::string address;  // host:port of the node's data plane.
  std::string node_id;  // Who must answer there.
  std::string client_name;
  std::string ticket;
  std::string format;  // Format::Canonical().
  FormatId format_id;
};

// One data-plane session with one node (data_plane.proto, the worker's side). It connects in the
// background; calls made before the node answered wait for it. When the session breaks, every call
// ends with the reason and further ones fail at once: the owner makes another session.
//
// Every `done` runs on the transport's thread and must not block. Shared: the owner holds it, and
// it holds itself while its connection calls it. Thread-safe. `transport` outlives it.
class NodeSession final : public ConnectionHandler,
                          public std::enable_shared_from_this<NodeSession> {
 public:
  static std::shared_ptr<NodeSession> Create(Transport* transport, NodeSessionOptions options);

  struct FetchTarget {
    ObjectId id;
    BlockIndex index;
    absl::Span<uint8_t> buffer;
  };
  // `range` is what is wanted of each target; all zero: the whole. `done` runs once for each
  // target, with the header that came with the payload now in its buffer; the caller verifies the
  // checksums. Afterwards nothing writes into that buffer. Errors: the
  // node's own (kNotFound, kDeadlineExceeded, ...), kDataLoss for a header or a size that is not
  // the target's, kInternal when this process's device fails to put the bytes in their places,
  // kFailedPrecondition naming both versions when the node is too old for ranges, or why the
  // session broke: kUnavailable, what Break was given, what Hello was answered.
  using FetchDone = std::function<void(size_t target, absl::StatusOr<ObjectHeader> header)>;
  void Fetch(std::vector<FetchTarget> targets, const BlockRange& range, absl::Duration deadline,
             FetchDone done);

  struct PutTarget {
    std::string reservation;
    std::string object_header;  // ObjectHeader::Encode(), with the checksums of the range.
    absl::Span<const uint8_t> payload;
  };
  // `range` is what is offered of each target; all zero: the whole. `done` runs once for each
  // target: OK committed, for a range when the block's other ranges are there too; otherwise the
  // node's answer, kFailedPrecondition naming both versions when the node is too old for ranges, or
  // why the session broke. Afterwards nothing reads that payload. kInvalidArgument: the header is
  // larger than the transport carries.
  using PutDone = std::function<void(size_t target, absl::Status status)>;
  void Put(std::vector<PutTarget> targets, const BlockRange& range, PutDone done);

  // Tells the node that what it sent of this object failed verification; nothing to an old node or
  // over a broken session. Returns at once.
  void Complain(const ObjectId& id, const std::string& why);

  // Closes the connection, cutting transfers in flight; calls end with `why` when nothing touches
  // their memory any more. Returns at once.
  void Break(const absl::Status& why);

  // Whether a new call would fail at once.
  bool broken() const { return broken_.load(); }

  // The transport's.
  void OnMessage(Connection* connection, MessageType type, absl::string_view message) override;
  void OnBulk(Connection* connection, MessageType type, absl::string_view header,
              std::unique_ptr<BulkReceive> payload) override;
  void OnClosed(Connection* connection, const absl::Status& why) override;

 private:
  enum class State { kConnecting, kOpen, kClosing, kClosed };
  enum class TargetState : uint8_t { kAsked, kReceiving, kDone };

  // A delivery of several targets: bytes and headers come apart.
  struct Batch {
    uint32_t count = 0;  // 0: the bytes have not been announced yet.
    bool received = false;
    std::vector<absl::StatusOr<ObjectHeader>> headers;  // Checked; empty: not here yet.
    absl::Status copied;  // How bringing the bytes to their places ended.
  };
  struct PendingFetch {
    std::vector<FetchTarget> targets;
    std::vector<TargetState> states;    // [targets]
    std::map<uint32_t, Batch> batches;  // By their first target.
    bool may_pack = false;              // Deliveries of several may be for buffers that lie apart.
    size_t first = 0;                   // targets[0] is this one of the call.
    size_t remaining = 0;
    FetchDone done;
  };
  struct QueuedPut {
    PutTarget target;
    BlockRange range;
    size_t index = 0;
    PutDone done;
  };
  struct PendingPut {
    QueuedPut put;
    bool sent = false;     // The transport no longer reads the payload.
    bool pending = false;  // The node has it, and waits for the block's other ranges.
    bool replied = false;
    absl::Status status;
  };

  NodeSession(Transport* transport, NodeSessionOptions options)
      : transport_(transport), options_(std::move(options)) {}

  void Connect();
  void WhenOpen(std::function<void()> call);
  void StartFetch(const std::vector<FetchTarget>& targets, const BlockRange& range,
                  absl::Duration deadline, const FetchDone& done);
  // Whether one transfer may fill both.
  bool Follows(absl::Span<const uint8_t> before, absl::Span<const uint8_t> buffer) const;
  // `request` has everything but its id and its objects: targets [first, first + targets.size()) of
  // the call.
  void SendFetch(v1::FetchRequest request, std::vector<FetchTarget> targets, size_t first,
                 const FetchDone& done);
  // What a node that speaks an older minor is not asked.
  absl::Status TooOld(absl::string_view what) const;
  void SendPuts();
  void HandleHelloReply(absl::string_view message);
  void HandleFailure(absl::string_view message);
  void HandleHeaders(absl::string_view message);
  // The bytes of several targets are on offer.
  void ReceiveBatch(uint64_t request_id, uint32_t ordinal, uint32_t count,
                    std::unique_ptr<BulkReceive> payload);
  // The same, for buffers that lie apart: into a place of the transport's staging, once this
  // session may have one and there is one, and from there into each.
  void StartPacked();
  void ReceivePacked(uint64_t request_id, uint32_t ordinal, std::shared_ptr<BulkReceive> payload,
                     std::shared_ptr<DeviceStaging::Slot> slot);
  void Unpack(uint64_t request_id, uint32_t ordinal, std::shared_ptr<DeviceStaging::Slot> slot);
  // Ends the batch's targets once both its parts are here.
  void FinishBatch(uint64_t request_id, uint32_t ordinal);
  void HandlePutReply(absl::string_view message);
  void Received(uint64_t request_id, uint32_t ordinal, absl::StatusOr<ObjectHeader> header);
  // The payload is no longer on offer, once both sides are done with it.
  void LeaveOffer(const PendingPut& pending);
  void FinishPut(uint64_t request_id);
  absl::StatusOr<ObjectHeader> CheckHeader(const FetchTarget& target, absl::string_view encoded,
                                           size_t payload_bytes) const;
  void BreakNow(const absl::Status& why);
  void Violation(absl::string_view what);
  // The connection is gone. Calls end when no copy from the staging runs any more either.
  void EndCalls();

  Transport* const transport_;
  const NodeSessionOptions options_;
  std::atomic<bool> broken_{false};

  // ---- Owned by the transport thread.
  State state_ = State::kConnecting;
  absl::Status why_;  // Why it breaks.
  Connection* connection_ = nullptr;
  std::shared_ptr<NodeSession> self_;  // While the connection may call this.
  // Of a request: what goes together at most, so that the node sends the first objects while the
  // next requests are made: one of 1,600 objects was written and read for 1.0 ms before.
  uint32_t objects_per_fetch_ = kObjectsPerDeliveryMax;
  uint32_t node_minor_ = 0;                     // The node's protocol.
  std::vector<std::function<void()>> waiting_;  // Calls before the node's answer.
  uint64_t next_request_ = 1;
  absl::flat_hash_map<uint64_t, PendingFetch> fetches_;
  // Deliveries on offer that wait for a place of the staging: a session has half of them at most,
  // so that one whose node stops in the middle of its transfers leaves some to the others.
  struct PackedOffer {
    uint64_t request_id;
    uint32_t ordinal;
    std::shared_ptr<BulkReceive> payload;
  };
  std::deque<PackedOffer> packed_offers_;
  uint32_t slots_count_ = 0;  // Places that it has or waits for.
  size_t unpacking_ = 0;      // Copies from the staging that run.
  std::deque<QueuedPut> put_queue_;
  size_t puts_on_offer_ = 0;  // Of puts_, those that the node does not have yet.
  absl::flat_hash_map<uint64_t, PendingPut> puts_;
};

}  // namespace okv

#endif  // OKV_CLIENT_NODE_SESSION_H_
