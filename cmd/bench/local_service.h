#ifndef OKV_CMD_BENCH_LOCAL_SERVICE_H_
#define OKV_CMD_BENCH_LOCAL_SERVICE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cluster.h"
#include "client/device_memory.h"
#include "client/transport/transport.h"
#include "cmd/bench/child.h"
#include "proto/format.h"
#include "proto/rotation_set.h"

namespace okv {

// What a made-up model's blocks look like. A plain value.
struct BlockShape {
  uint32_t layers = 36;
  uint32_t kv_heads = 8;
  uint32_t head_dim = 128;
  uint32_t group_size = 128;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
  // Bytes of one int2 block of 64 tokens.
  uint64_t block_bytes() const;
  // Bytes of the same tokens in BF16.
  uint64_t bf16_bytes() const;
};

// One Hadamard matrix for every layer, with the clips that are published for the method: 0.96 of
// K's channels, 0.92 of V's.
RotationSet MakeHadamardSet(const BlockShape& shape);

// The GPUs of the worker and of the process that it copies from, by CUDA's numbers; they may be the
// same. A plain value.
struct GpuPair {
  uint32_t worker = 0;
  uint32_t node = 0;
};

struct LocalServiceOptions {
  std::string directory;  // For both programs' files, control.log and node.log; exists.
  BlockShape shape;
  std::string tls;         // The node's and the worker's transports, as UCX_TLS takes them.
  uint64_t objects_bytes;  // What the node must hold without spilling.
  // The node holds it in its GPU's memory, and the worker's payloads and buffers may be in that of
  // its own; else in DRAM.
  std::optional<GpuPair> gpus = std::nullopt;
  // kFailedPrecondition where only host memory leads from one to the other.
  bool require_gpudirect = false;
  absl::Duration start_timeout = absl::Seconds(120);
};

// A control plane and a node, each the real program in a process of its own, and this process as
// their worker. The blocks are int2 blocks of random bytes, each with a key of its own: the service
// looks at checksums, not at values. Thread-compatible.
class LocalService {
 public:
  // Blocks until both serve and the rotation set is published. kUnavailable with the output of the
  // program that did not come up.
  static absl::StatusOr<std::unique_ptr<LocalService>> Start(const LocalServiceOptions& options);
  ~LocalService();

  const Format& format() const { return format_; }
  uint64_t block_bytes() const { return options_.shape.block_bytes(); }
  Cluster* cluster() { return cluster_.get(); }
  Transport* transport() { return transport_.get(); }
  const LookupResult::Node& node_address() const { return node_address_; }
  ChildProcess* node() { return node_.get(); }
  ChildProcess* control() { return control_.get(); }
  // What the node shows at /metrics. kUnavailable when it does not answer within 5 s.
  absl::StatusOr<std::string> NodeMetrics() const;

  // What a worker shows to the node.
  absl::StatusOr<std::string> Ticket() const;

  // Puts blocks [first, first + count) of `payloads` (whole blocks, one after the other) as blocks
  // of those numbers. The first error of any of them.
  absl::Status Put(uint64_t first, absl::Span<const uint8_t> payloads);
  // What Put wrote, to be fetched into `buffers` (whole blocks).
  std::vector<FetchItem> Items(uint64_t first, absl::Span<uint8_t> buffers) const;

 private:
  explicit LocalService(const LocalServiceOptions& options) : options_(options) {}
  MemoryKind memory_kind() const {
    return options_.gpus.has_value() ? MemoryKind::kDevice : MemoryKind::kHost;
  }
  std::vector<std::string> NodeCommand() const;
  absl::Status StartPrograms();
  absl::Status Connect();

  const LocalServiceOptions options_;
  Format format_;
  std::string control_address_;
  LookupResult::Node node_address_;
  std::string metrics_address_;
  std::unique_ptr<ChildProcess> control_;
  std::unique_ptr<ChildProcess> node_;
  // Each goes before the one above.
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Cluster> cluster_;
};

// Memory for payloads in huge pages, zeroed, as a node's arena is. Owns it.
class PayloadMemory {
 public:
  // kResourceExhausted when the system has no room.
  static absl::StatusOr<std::unique_ptr<PayloadMemory>> Create(uint64_t bytes);
  ~PayloadMemory();
  absl::Span<uint8_t> span() const { return span_; }

 private:
  explicit PayloadMemory(absl::Span<uint8_t> span) : span_(span) {}
  const absl::Span<uint8_t> span_;
};

// Fills `bytes` with random ones; `seed` decides which.
void FillRandom(uint64_t seed, absl::Span<uint8_t> bytes);

}  // namespace okv

#endif  // OKV_CMD_BENCH_LOCAL_SERVICE_H_
