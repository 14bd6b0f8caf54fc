#ifndef OKV_CLIENT_CLUSTER_H_
#define OKV_CLIENT_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/device_memory.h"
#include "proto/block_key.h"
#include "proto/block_range.h"
#include "proto/format.h"
#include "proto/object.h"
#include "proto/rotation_set.h"

namespace okv {

class Transport;

struct ClusterOptions {
  std::string control_address;  // host:port of okv-control.
  std::string tenant = "default";
  std::string client_name = "worker";
  // How long Connect retries (with backoff) a control plane that is not there.
  absl::Duration connect_timeout = absl::Seconds(10);
  absl::Duration rpc_timeout = absl::Seconds(5);
  // A node that delivers nothing of a fetch for so long loses what another node holds too to that
  // one. Far above a busy disk's read, far below what a prefill costs.
  absl::Duration fetch_stall_timeout = absl::Seconds(2);
  // Buffers and payloads may be in this GPU's memory: they are verified and hashed there. The
  // transport was made with the same one, and their memory registered with it. Null: every address
  // is the host's. Outlives the cluster.
  DeviceMemory* device = nullptr;

  absl::Status Validate() const;
};

struct LookupResult {
  uint32_t prefix_blocks = 0;    // Longest consecutive prefix (sink as bf16, the rest as int2).
  uint32_t resume_boundary = 0;  // Last exact resume point; 0 = none.
  struct Node {
    std::string node_id;
    std::string data_address;
  };
  std::vector<Node> nodes;
  struct Locations {
    std::vector<uint32_t> int2_nodes;  // Indexes into nodes.
    std::vector<uint32_t> bf16_nodes;
  };
  std::vector<Locations> blocks;
};

struct FetchItem {
  ObjectId id;
  BlockIndex index;
  std::vector<LookupResult::Node> nodes;  // Who holds it, best first: tried in order.
  // As many bytes as the range has, the whole block's layout.block_bytes(id.codec); alive until
  // Fetch returns. In a device's memory on a multiple of 16.
  absl::Span<uint8_t> buffer;
  // Which memory that is; not said: the device is asked.
  std::optional<MemoryKind> memory = std::nullopt;
};

// What a Cluster did since it was made, in objects unless the name says otherwise.
struct ClusterStats {
  uint64_t fetched = 0;  // OK.
  uint64_t fetched_bytes = 0;
  uint64_t fetch_failed = 0;  // Any other outcome.
  // Times that an object was asked of its next node, by what the one before did.
  uint64_t failovers_unavailable = 0;  // It went away, or had no room to answer.
  uint64_t failovers_stalled = 0;      // It delivered nothing for fetch_stall_timeout.
  uint64_t failovers_damaged = 0;      // The bytes it sent failed verification.
  uint64_t failovers_missing = 0;      // It no longer had it.

  uint64_t complaints = 0;  // Payloads that failed verification, reported to their node.

  uint64_t fetched_to_device = 0;  // Of `fetched`: into a device's memory, verified there.
  uint64_t verify_nanos = 0;       // The calling threads' time for the verification of arrivals.

  uint64_t failovers() const {
    return failovers_unavailable + failovers_stalled + failovers_damaged + failovers_missing;
  }
};

struct PutItem {
  ObjectId id;
  BlockIndex index;
  std::optional<BlockKey> parent = std::nullopt;
  // As many bytes as the range has, the whole block's or a rank's; alive until Put returns.
  absl::Span<const uint8_t> payload;
  std::optional<MemoryKind> memory = std::nullopt;  // As of a FetchItem.
};

// A session with the control plane and, as needed, with nodes. What crosses a process boundary of a
// worker crosses here. Thread-safe; calls block.
class Cluster {
 public:
  virtual ~Cluster() = default;

  // Publishes a rotation set; returns its hash. kInvalidArgument when it does not validate.
  static absl::StatusOr<RotationHash> PublishRotation(const ClusterOptions& options,
                                                      const RotationSet& rotations);
  // kNotFound when the control plane has no such set; kDataLoss when what arrived is not it.
  static absl::StatusOr<RotationSet> GetRotation(const ClusterOptions& options,
                                                 const RotationHash& hash);

  // Opens a session for `format`. kInvalidArgument for a device that the transport was made
  // without; kUnavailable after connect_timeout without a control plane (the
  // message names the address and the attempts); kFailedPrecondition naming the field when the
  // control plane knows the rotation set under another geometry, or not at all.
  static absl::StatusOr<std::unique_ptr<Cluster>> Connect(const ClusterOptions& options,
                                                          const Format& format,
                                                          Transport* transport);

  virtual const Format& format() const = 0;
  virtual const std::string& tenant_salt() const = 0;

  // Where a chain of keys (from block 0) is held. kUnavailable and kDeadlineExceeded: the control
  // plane did not answer in time; the caller goes on as after a miss.
  virtual absl::StatusOr<LookupResult> Lookup(absl::Span<const BlockKey> keys,
                                              absl::Duration deadline) = 0;

  // Fetches objects into the callers' buffers and verifies each on arrival, those in a device's
  // memory on the device. One status per item:
  // OK the buffer holds the verified payload; kNotFound a miss; kDataLoss it arrived damaged from
  // every node that has it; kUnavailable its nodes are gone; kDeadlineExceeded. No byte of a failed
  // item is valid. When Fetch returns nothing writes into any buffer.
  //
  // An item whose node is gone, stalls, has it no longer or sends damaged bytes is asked of its
  // next node, until the deadline; what was fetched by then stays good.
  //
  // Items whose buffers are in the device's memory may travel together, as far as the transport's
  // staging goes (UcxTransportOptions::device_staging_bytes); without a copy on the way where
  // buffers lie side by side, in the items' order, and the objects lie so in their node. Work that
  // is queued on the device after Fetch returned sees the bytes; what still reads such a buffer
  // must be done before the call, for transfers wait for no stream. kInvalidArgument for a buffer
  // in a device's memory that was not registered with the transport, or in another device's.
  //
  // A tensor-parallel rank names its heads in `range` (what it leaves out is all of them, as of the
  // layers): a buffer then holds the range's own bytes, the first layer's runs of these heads, then
  // the next layer's. It does not matter at which degree a block was written. kInvalidArgument
  // naming the field of a range that the format does not have; kFailedPrecondition for a node too
  // old for ranges.
  virtual std::vector<absl::Status> Fetch(absl::Span<const FetchItem> items,
                                          const BlockRange& range, absl::Duration deadline) = 0;
  std::vector<absl::Status> Fetch(absl::Span<const FetchItem> items, absl::Duration deadline) {
    return Fetch(items, BlockRange{}, deadline);
  }

  // Reserves and writes objects. One status per item: OK committed; kAlreadyExists somebody stored
  // it before (nothing to do); kResourceExhausted no room (back off); kAborted another writer is at
  // it; kUnavailable no control plane or no node (retry); kInvalidArgument among others a block
  // larger than its node's DRAM. An item that repeats an earlier one (same id) is not written
  // twice: it gets kAlreadyExists, or that one's error.
  //
  // The ranks of a tensor-parallel group write one block together: each calls Put with the same
  // `write_group`, and its heads as `range`. A payload then is the range's own bytes, as Fetch
  // receives them. OK when the block is whole: the call waits for the others' shares. kAborted when
  // one of them never came, and nothing is stored. `write_group` names this writer, or its group.
  //
  // What writes a payload in a device's memory must be done before the call.
  struct PutOptions {
    std::string write_group;
    BlockRange range;  // All zero: the whole.
    absl::Duration deadline;
  };
  virtual std::vector<absl::Status> Put(absl::Span<const PutItem> items,
                                        const PutOptions& options) = 0;
  std::vector<absl::Status> Put(absl::Span<const PutItem> items, const std::string& write_group,
                                absl::Duration deadline) {
    return Put(items, {.write_group = write_group, .range = {}, .deadline = deadline});
  }

  virtual ClusterStats stats() const = 0;
};

}  // namespace okv

#endif  // OKV_CLIENT_CLUSTER_H_
