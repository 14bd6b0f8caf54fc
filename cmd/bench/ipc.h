#ifndef OKV_CMD_BENCH_IPC_H_
#define OKV_CMD_BENCH_IPC_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cmd/bench/child.h"
#include "cmd/bench/local_service.h"

// What the CUDA runtime alone moves between two processes, on one GPU or two, without a service:
// the baseline of fetches from a node's device memory.
namespace okv {

// Blocks in the device memory of another process.
struct IpcBlocks {
  uint64_t block_bytes = 0;
  uint32_t blocks = 0;
  uint64_t bytes() const { return block_bytes * blocks; }
};

// The other process: allocates the blocks on this device, fills each with bytes of its own
// and writes the allocation's IPC handle to `handle_file`. Then waits to be killed: returns errors
// only, kResourceExhausted when the device has no room.
absl::Status RunIpcOwner(const IpcBlocks& blocks, uint32_t device, const std::string& handle_file);

// Blocks of a process that this one started and ends, mapped here. Thread-compatible.
class IpcArena {
 public:
  // `directory` is for the child's files, `device` is the one of its memory. kUnavailable with the
  // child's output when it did not come up, kInternal when the current device does not map its
  // memory. Blocks.
  static absl::StatusOr<std::unique_ptr<IpcArena>> Start(const std::string& directory,
                                                         const IpcBlocks& blocks, uint32_t device);
  ~IpcArena();
  IpcArena(const IpcArena&) = delete;
  IpcArena& operator=(const IpcArena&) = delete;

  const uint8_t* data() const { return data_; }
  const IpcBlocks& blocks() const { return blocks_; }
  // kDataLoss naming the first slot of `to` that does not hold its block: block i belongs in slot
  // slots[i]. Waits.
  absl::Status CheckCopy(const uint8_t* to, absl::Span<const uint32_t> slots) const;

 private:
  explicit IpcArena(const IpcBlocks& blocks) : blocks_(blocks) {}

  const IpcBlocks blocks_;
  std::unique_ptr<ChildProcess> owner_;
  uint8_t* data_ = nullptr;
};

// Copies blocks, one cudaMemcpyAsync() each, on several streams in turn. Owns the streams.
// Thread-compatible.
class BlockCopier {
 public:
  static absl::StatusOr<std::unique_ptr<BlockCopier>> Create(uint32_t streams_max);
  ~BlockCopier();
  BlockCopier(const BlockCopier&) = delete;
  BlockCopier& operator=(const BlockCopier&) = delete;

  struct Copy {
    const uint8_t* from;  // Block i at from + i * block_bytes
    uint8_t* to;          // ... to slot slots[i]
    absl::Span<const uint32_t> slots;
    uint64_t block_bytes;
    uint32_t streams;  // At most streams_max
  };
  // Wall-clock seconds from the first launch to the last block's arrival. Waits.
  absl::StatusOr<double> Run(const Copy& copy);

 private:
  BlockCopier() = default;
  std::vector<cudaStream_t> streams_;
};

struct IpcOptions {
  IpcBlocks blocks;
  GpuPair gpus;
  std::vector<uint32_t> streams = {1, 2, 4, 8};
  uint32_t rounds = 9;
  std::string directory = "/tmp";  // For the child's files, which go at the end.
  uint64_t seed = 1;

  // kInvalidArgument naming the flag.
  absl::Status Validate() const;
};

// One way of copying all blocks.
struct IpcRate {
  std::string name;
  uint32_t streams = 0;
  double first_bytes_per_second = 0;
  double bytes_per_second = 0;  // Median of the rounds behind the first.
};

struct IpcReport {
  std::string device;
  IpcBlocks blocks;
  GpuPair gpus;
  uint32_t rounds = 0;
  std::vector<IpcRate> rates;

  std::string ToTable() const;
  std::string ToJson() const;
};

// Every block from another process's memory, in random slots, for each number of streams; all of it
// at once; and the same copies inside this process. What arrived is checked. kUnavailable without a
// GPU. Blocks until done.
absl::StatusOr<IpcReport> RunIpc(const IpcOptions& options);

}  // namespace okv

#endif  // OKV_CMD_BENCH_IPC_H_
